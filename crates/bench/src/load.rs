//! A load generator: many connections, one thread, one request at a time on each.
//!
//! *Closed*: each connection sends its next request when it has its answer; tells how much a server can take. *Open*: requests
//! are due at a constant pace; one that finds no connection free waits, and its wait counts. Timers are the kernel's
//! own (`epoll_pwait2`), exact to some tens of microseconds.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::http::answer_length;
use crate::schedule::Pace;

/// What is still under way when the time is over gets this long to end.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// Answers here are some hundred bytes.
const MAX_ANSWER: usize = 64 << 10;

/// Since the load began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) scheduled: Duration,
    pub(crate) start: Duration,
    pub(crate) first_byte: Duration,
    pub(crate) end: Duration,
    pub(crate) ok: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Closed,
    Open(Pace),
}

#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) to: SocketAddr,
    pub(crate) host: String,
    pub(crate) connections: usize,
    pub(crate) duration: Duration,
}

struct Connection {
    stream: TcpStream,
    busy: Option<Busy>,
    answer: Vec<u8>,
}

struct Busy {
    scheduled: Duration,
    start: Duration,
    first_byte: Option<Duration>,
}

impl Load {
    /// Blocks the thread for the duration and a little more.
    pub(crate) fn run(&self, kind: Kind) -> io::Result<Vec<Event>> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let mut connections = Vec::with_capacity(self.connections);
        for index in 0..self.connections {
            let stream = TcpStream::connect(self.to)?;
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            epoll::add(&epoll, &stream, EventData::new_u64(index as u64), EventFlags::IN)?;
            connections.push(Connection { stream, busy: None, answer: Vec::with_capacity(4096) });
        }
        let request = format!("GET / HTTP/1.1\r\nHost: {}\r\nAccept: */*\r\n\r\n", self.host).into_bytes();
        let mut run = Run {
            begun: Instant::now(),
            idle: (0..connections.len()).collect(),
            connections,
            request,
            due: VecDeque::new(),
            events: Vec::new(),
        };
        let mut next = 0;
        let mut ready = Vec::with_capacity(self.connections);
        loop {
            let now = run.now();
            let over = now >= self.duration;
            let wait = match kind {
                Kind::Closed => {
                    if !over {
                        run.due.extend(std::iter::repeat_n(now, run.idle.len()));
                    }
                    self.duration.saturating_sub(now)
                }
                Kind::Open(pace) => {
                    let count = pace.count(self.duration);
                    while next < count && pace.at(next) <= now {
                        run.due.push_back(pace.at(next));
                        next += 1;
                    }
                    if next < count { pace.at(next).saturating_sub(now) } else { self.duration.saturating_sub(now) }
                }
            };
            run.dispatch()?;
            let finished = run.due.is_empty() && run.idle.len() == run.connections.len();
            if over && (finished || now > self.duration + LAST_ANSWERS) {
                run.give_up();
                return Ok(run.events);
            }
            let wait = if over { LAST_ANSWERS } else { wait };
            let timeout = wait.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
            epoll::wait(&epoll, spare_capacity(&mut ready), Some(&timeout))?;
            for event in ready.drain(..) {
                run.read(usize::try_from(event.data.u64()).unwrap_or(usize::MAX))?;
            }
        }
    }
}

struct Run {
    begun: Instant,
    connections: Vec<Connection>,
    /// Connections without a request; the one used last is used next.
    idle: Vec<usize>,
    request: Vec<u8>,
    /// Due and not sent.
    due: VecDeque<Duration>,
    events: Vec<Event>,
}

impl Run {
    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn dispatch(&mut self) -> io::Result<()> {
        while let (Some(&index), Some(&scheduled)) = (self.idle.last(), self.due.front()) {
            self.idle.pop();
            self.due.pop_front();
            let start = self.now();
            let connection = &mut self.connections[index];
            connection.busy = Some(Busy { scheduled, start, first_byte: None });
            connection.answer.clear();
            // A request is smaller than any socket's buffer, and the buffer is empty.
            connection.stream.write_all(&self.request)?;
        }
        Ok(())
    }

    fn read(&mut self, index: usize) -> io::Result<()> {
        let now = self.now();
        let Some(connection) = self.connections.get_mut(index) else { return Ok(()) };
        let mut bytes = [0; 4096];
        let read = match connection.stream.read(&mut bytes) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server has closed a connection")),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        };
        let Some(busy) = &mut connection.busy else { return Err(io::Error::other("an answer to nothing")) };
        let first_byte = *busy.first_byte.get_or_insert(now);
        connection.answer.extend_from_slice(&bytes[..read]);
        match answer_length(&connection.answer) {
            Some(length) if connection.answer.len() >= length => {
                let ok = connection.answer.starts_with(b"HTTP/1.1 200 ");
                let (scheduled, start) = (busy.scheduled, busy.start);
                self.events.push(Event { scheduled, start, first_byte, end: now, ok });
                connection.busy = None;
                self.idle.push(index);
                Ok(())
            }
            _ if connection.answer.len() > MAX_ANSWER => Err(io::Error::other("an answer that does not end")),
            _ => Ok(()),
        }
    }

    /// What has no answer by now has failed; so has what was due and never sent.
    fn give_up(&mut self) {
        let now = self.now();
        let unanswered = self.connections.iter_mut().filter_map(|connection| connection.busy.take());
        let unanswered = unanswered.map(|busy| (busy.scheduled, busy.start));
        let unsent = self.due.drain(..).map(|scheduled| (scheduled, now));
        let failed = |(scheduled, start)| Event { scheduled, start, first_byte: now, end: now, ok: false };
        self.events.extend(unanswered.chain(unsent).map(failed).collect::<Vec<_>>());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;

    fn load(to: SocketAddr, connections: usize) -> Load {
        Load { to, host: "actor".to_owned(), connections, duration: Duration::from_millis(200) }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn every_request_that_was_due_is_an_event_with_its_times_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let to = Backend::start(directory.path()).await.unwrap().direct;
        let pace = Pace::new(500.0).unwrap();
        let events = tokio::task::spawn_blocking(move || load(to, 3).run(Kind::Open(pace))).await.unwrap().unwrap();
        let mut scheduled: Vec<_> = events.iter().map(|event| event.scheduled).collect();
        scheduled.sort();
        assert_eq!(scheduled, (0..pace.count(Duration::from_millis(200))).map(|i| pace.at(i)).collect::<Vec<_>>());
        for event in events {
            assert!(event.ok && event.scheduled <= event.start, "{event:?}");
            assert!(event.start <= event.first_byte && event.first_byte <= event.end, "{event:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_closed_load_never_has_more_requests_under_way_than_connections() {
        let directory = tempfile::tempdir().unwrap();
        let to = Backend::start(directory.path()).await.unwrap().direct;
        let load = Load { duration: Duration::from_secs(1), ..load(to, 2) };
        let events = tokio::task::spawn_blocking(move || load.run(Kind::Closed)).await.unwrap().unwrap();
        assert!(events.len() > 2 && events.iter().all(|event| event.ok));
        for event in &events {
            let overlapping =
                events.iter().filter(|other| other.start < event.start && event.start < other.end).count();
            assert!(overlapping < 2);
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_hangs_up_is_no_measurement() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let hanging_up = std::thread::spawn(move || drop(listener.accept()));
        let ended = tokio::task::spawn_blocking(move || load(to, 1).run(Kind::Closed)).await.unwrap();
        hanging_up.join().unwrap();
        assert!(ended.is_err());
    }
}
