//! Where a command reads and writes. Data goes to `stdout` and everything else to `stderr`, so that pipes get only data.

use std::fmt;
use std::io::{self, IsTerminal as _, Read, Write};
use std::pin::Pin;

use crate::errors::CliError;

/// The three streams of a process, or stand-ins for them.
pub struct Terminal {
    pub stdin: Box<dyn Read + Send>,
    pub stdout: Box<dyn Write + Send>,
    pub stderr: Box<dyn Write + Send>,
    /// Colours on `stdout` and on `stderr`.
    pub colour: (bool, bool),
    /// A person watches `stderr`: progress may be drawn there.
    pub is_watched: bool,
    /// Ends a command that would go on for ever, as success.
    pub interrupted: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl fmt::Debug for Terminal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Terminal")
            .field("colour", &self.colour)
            .field("is_watched", &self.is_watched)
            .finish_non_exhaustive()
    }
}

impl Terminal {
    pub fn of_process() -> Self {
        let plain = is_plain();
        let is_watched = io::stderr().is_terminal();
        Self {
            stdin: Box::new(io::stdin()),
            stdout: Box::new(io::stdout()),
            stderr: Box::new(io::stderr()),
            colour: (io::stdout().is_terminal() && !plain, is_watched && !plain),
            is_watched,
            interrupted: Box::pin(async {
                if tokio::signal::ctrl_c().await.is_err() {
                    // Without a handler the signal ends the process by itself.
                    std::future::pending::<()>().await;
                }
            }),
        }
    }

    pub(crate) fn write(&mut self, bytes: impl AsRef<[u8]>) -> Result<(), CliError> {
        let written = self.stdout.write_all(bytes.as_ref()).and_then(|()| self.stdout.flush());
        written.map_err(CliError::Output)
    }

    /// For the person, if there is one: nothing depends on its being read.
    pub(crate) fn note(&mut self, text: &str) {
        let _ = writeln!(self.stderr, "{text}").and_then(|()| self.stderr.flush());
    }

    /// Draws over the line that was drawn last; an empty text leaves none. Only where a person watches.
    pub(crate) fn progress(&mut self, text: &str) {
        if self.is_watched {
            let _ = write!(self.stderr, "\r\x1b[2K{text}").and_then(|()| self.stderr.flush());
        }
    }
}
/// Whether colours are not wanted on stderr, where logs go.
pub fn is_log_plain() -> bool {
    is_plain() || !io::stderr().is_terminal()
}

/// Whether whoever has started us wants no colours anywhere.
fn is_plain() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    set("NO_COLOR") || std::env::var_os("TERM").is_some_and(|term| term == "dumb")
}
