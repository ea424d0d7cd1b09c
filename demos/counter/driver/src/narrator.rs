//! What is under way, told on stderr.

use std::io::{IsTerminal as _, Stderr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ate_chart::Progress;
use parking_lot::Mutex;

const REDRAW_EVERY: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub(crate) struct Narrator(Arc<Mutex<Told>>);

#[derive(Debug)]
struct Told {
    progress: Progress<Stderr>,
    detail: String,
}

impl Narrator {
    pub(crate) fn start() -> Self {
        let stderr = std::io::stderr();
        let is_terminal = stderr.is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let told = Arc::new(Mutex::new(Told { progress: Progress::new(stderr, is_terminal), detail: String::new() }));
        let drawn = Arc::downgrade(&told);
        // Ends with the last narrator.
        tokio::spawn(async move {
            while let Some(told) = drawn.upgrade() {
                {
                    let Told { progress, detail } = &mut *told.lock();
                    progress.tick(Instant::now(), detail);
                }
                drop(told);
                tokio::time::sleep(REDRAW_EVERY).await;
            }
        });
        Self(told)
    }

    /// Something begins; what was under way has ended.
    pub(crate) fn begin(&self, what: &str) {
        let mut told = self.0.lock();
        told.detail.clear();
        told.progress.end(Instant::now());
        told.progress.begin(Instant::now(), what);
    }

    pub(crate) fn detail(&self, detail: String) {
        self.0.lock().detail = detail;
    }

    pub(crate) fn end(&self) {
        self.0.lock().progress.end(Instant::now());
    }

    pub(crate) fn say(&self, line: &str) {
        self.0.lock().progress.say(line);
    }
}
