//! What everybody shares: the clock, chance, what goes wrong how often, and the record of what happened.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use ate_name::ActorKey;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::dice::Dice;

/// How often things go wrong, out of a thousand, and how long they take.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weather {
    /// A message is lost: on its way there, or on its way back.
    pub(crate) lost: u32,
    /// An order arrives twice.
    pub(crate) doubled: u32,
    /// A commit's outcome is not told.
    pub(crate) commit_untold: u32,
    /// A commit is answered as unavailable, and made later all the same.
    pub(crate) commit_late: u32,
    /// A node fails at what it is told, without harm: its disk, its storage, its sandbox.
    pub(crate) fails: u32,
    /// A message takes seconds.
    pub(crate) slow: u32,
}

/// A uid in as many characters as tell it from the others of a run.
pub(crate) fn short(uid: impl std::fmt::Display) -> String {
    uid.to_string().chars().take(8).collect()
}

/// What contradicts a promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken(pub String);

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) dice: Dice,
    begun: Instant,
    weather: Mutex<Weather>,
    trace: Mutex<String>,
    broken: Mutex<Option<Broken>>,
    /// Actors that an operator has used force on while their node was silent, once for each time.
    forced: Mutex<Vec<ActorKey>>,
}

impl World {
    pub(crate) fn new(seed: u64, weather: Weather) -> Arc<Self> {
        Arc::new(Self {
            dice: Dice::new(seed),
            begun: Instant::now(),
            weather: Mutex::new(weather),
            trace: Mutex::default(),
            broken: Mutex::default(),
            forced: Mutex::default(),
        })
    }

    pub(crate) fn micros(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// By a clock that is right.
    pub(crate) fn date(&self) -> jiff::Timestamp {
        let micros = i64::try_from(self.micros()).unwrap_or(i64::MAX);
        jiff::Timestamp::new(1_800_000_000, 0).expect("a date") + jiff::SignedDuration::from_micros(micros)
    }

    pub(crate) fn weather(&self) -> Weather {
        *self.weather.lock()
    }

    pub(crate) fn set_weather(&self, weather: Weather) {
        *self.weather.lock() = weather;
    }

    pub(crate) fn say(&self, line: impl std::fmt::Display) {
        let at = Duration::from_micros(self.micros());
        let _ = writeln!(self.trace.lock(), "{:>11.3} {line}", at.as_secs_f64());
    }

    pub(crate) fn trace(&self) -> String {
        self.trace.lock().clone()
    }

    /// A promise is broken. The first one counts: what follows may follow from it.
    pub(crate) fn broken(&self, what: impl Into<String>) {
        let what = what.into();
        self.say(format_args!("BROKEN {what}"));
        self.broken.lock().get_or_insert(Broken(what));
    }

    pub(crate) fn verdict(&self) -> Option<Broken> {
        self.broken.lock().clone()
    }

    /// Force is used on an actor: whoever does that accepts that a node which cannot be asked may serve it for a while.
    pub(crate) fn force(&self, key: &ActorKey) {
        self.forced.lock().push(key.clone());
    }

    /// It did no harm after all.
    pub(crate) fn unforce(&self, key: &ActorKey) {
        let mut forced = self.forced.lock();
        if let Some(at) = forced.iter().position(|forced| forced == key) {
            forced.remove(at);
        }
    }

    pub(crate) fn is_forced(&self, key: &ActorKey) -> bool {
        self.forced.lock().contains(key)
    }

    /// The time that a message or a small piece of work takes.
    pub(crate) async fn pass(&self) {
        let most = if self.dice.happens(self.weather().slow) { 8_000 } else { 20 };
        tokio::time::sleep(self.dice.between(Duration::ZERO, Duration::from_millis(most))).await;
    }
}
