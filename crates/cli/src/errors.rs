//! What can go wrong, in words for the person at the keyboard: what was refused, and what to do about it.

use std::io;
use std::path::PathBuf;

use ate_object::ManifestError;
use tonic::Code;

use crate::connect::DialError;

/// The command line itself is wrong. The same code as for what the parser refuses.
const USAGE: u8 = 2;
const FAILURE: u8 = 1;

#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("the connection to {endpoint} was lost")]
    Lost { endpoint: String },
    /// The server's own words.
    #[error("{text}")]
    Refused { code: Code, text: String, hint: Option<String> },
    #[error("{}", joined(.0))]
    Manifests(Vec<ManifestError>),
    #[error("{object} in {file}")]
    Image { file: String, object: String, source: ate_image::ReferenceError },
    #[error("cannot read {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{0}")]
    Failed(String),
    #[error("the {kind} that the server sent is not JSON")]
    Answer { kind: &'static str, source: serde_json::Error },
    #[error("cannot write")]
    Output(#[source] io::Error),
}

fn joined(errors: &[ManifestError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

impl CliError {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => USAGE,
            _ => FAILURE,
        }
    }

    /// Whoever read the output has gone, as `head` does. That is no failure, and there is nobody to tell.
    pub(crate) fn is_closed_output(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// What to do, where the text does not say it already.
    fn hint(&self) -> Option<String> {
        match self {
            Self::Dial(error) => Some(error.hint()),
            Self::Lost { .. } => Some("see whether the daemon still runs, then try again".to_owned()),
            Self::Refused { hint: Some(hint), .. } => Some(hint.clone()),
            Self::Refused { code: Code::Unimplemented, .. } => {
                Some("this server does not offer it: its release may be older than this program".to_owned())
            }
            _ => None,
        }
    }

    /// Everything to print, without a line break at the end.
    pub(crate) fn explained(&self, colour: bool) -> String {
        let label = if colour { "\x1b[1;31merror:\x1b[0m" } else { "error:" };
        if let Self::Manifests(_) = self {
            return format!("{self}\n{label} nothing was sent; correct the lines above first");
        }
        let mut text = format!("{label} {self}");
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            text.push_str(&format!(": {error}"));
            source = error.source();
        }
        if let Some(hint) = self.hint() {
            text.push_str(&format!("\n  {hint}"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_no_error_but_a_full_disk_is() {
        assert!(CliError::Output(io::ErrorKind::BrokenPipe.into()).is_closed_output());
        assert!(!CliError::Output(io::ErrorKind::StorageFull.into()).is_closed_output());
    }

    #[test]
    fn an_error_says_what_was_refused_why_and_what_to_do() {
        let socket = PathBuf::from("/x/api.sock");
        let no_daemon = DialError::NoDaemon { socket: socket.clone(), data_dir: Some("/x".into()) };
        assert_eq!(
            CliError::from(no_daemon).explained(false),
            "error: no daemon answers at /x/api.sock\n  start it with: ate dev --data-dir /x"
        );
        let file = CliError::File { path: socket, source: io::ErrorKind::NotFound.into() };
        assert_eq!(file.explained(false), "error: cannot read /x/api.sock: entity not found");
        assert_eq!((CliError::Usage(String::new()).exit_code(), file.exit_code()), (2, 1));
    }

    #[test]
    fn faults_of_a_file_are_shown_as_they_are() {
        let fault = ate_object::read_manifests("a.yaml", b"kind: 1", "default").unwrap_err();
        let text = CliError::Manifests(vec![fault.clone(), fault.clone()]).explained(false);
        assert!(text.starts_with(&format!("{fault}\n{fault}\nerror: ")), "{text}");
    }
}
