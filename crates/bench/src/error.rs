use std::io;

#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("cannot {what}")]
    Io { what: String, source: io::Error },
    #[error("{what} is missing\n  {remedy}")]
    Missing { what: String, remedy: &'static str },
    /// Something that was asked said no, or something else than was asked for.
    #[error("cannot {what}: {message}")]
    Refused { what: String, message: String },
    #[error("interrupted: nothing was measured to its end")]
    Interrupted,
    #[error("{missed} of {of} targets are not met")]
    Missed { missed: usize, of: usize },
}

impl BenchError {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    pub(crate) fn refused(what: impl Into<String>, message: impl ToString) -> Self {
        Self::Refused { what: what.into(), message: message.to_string() }
    }
}
