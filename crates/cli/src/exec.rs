use std::io::{ErrorKind, Read};

use ate_proto::ate::v1::{ExecRequest, exec_request, exec_response};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::change::ActorArgs;
use crate::errors::CliError;
use crate::session::Session;

/// Most of standard input sent in one message.
const CHUNK: usize = 32 << 10;

/// Messages read ahead of the connection; then reading waits.
const AHEAD: usize = 8;

#[derive(Debug, clap::Args)]
#[command(override_usage = "ate exec [actor] <NAME> -a <ATESPACE> [-c <CONTAINER>] -- <COMMAND> [ARGS]...")]
#[command(after_help = "Examples:
  ate exec my-actor -a demo -- cat /run/ate/actor-id
  tar c src | ate exec my-actor -a demo -- tar x -C /home

A sleeping actor is woken, and kept awake for as long as somebody waits for the command. One that is
left alone, as by Ctrl-C, goes on until its actor is suspended: a command is not part of a snapshot.
The exit code is that of the command, which has the variables of its container.")]
pub struct ExecArgs {
    #[command(flatten)]
    actor: ActorArgs,
    /// Which container of the template; the first if not given
    #[arg(short, long)]
    container: Option<String>,
    /// The command and its arguments; no shell in between
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// The command's exit code.
pub(crate) async fn run(args: ExecArgs, session: &mut Session<'_>) -> Result<u8, CliError> {
    let actor = session.actor(args.actor.atespace(), args.actor.name()?);
    let start = exec_request::Start {
        atespace: actor.atespace,
        name: actor.name,
        container: args.container.unwrap_or_default(),
        args: args.command,
        tty: false,
        env: Vec::new(),
    };
    let (requests, receiver) = mpsc::channel(AHEAD);
    let first = ExecRequest { input: Some(exec_request::Input::Start(start)) };
    requests.try_send(first).expect("the channel is empty and its receiver is here");
    let stdin = std::mem::replace(&mut session.terminal.stdin, Box::new(std::io::empty()));
    // A thread of its own, which nothing waits for: a read from a terminal ends only with the next key.
    std::thread::spawn(move || feed(stdin, &requests));
    let answer = session.substrate.exec(ReceiverStream::new(receiver)).await;
    let mut output = session.answer(answer)?;
    loop {
        let message = output.message().await.map_err(|status| session.refusal(status))?;
        match message.ok_or_else(|| session.lost())?.output {
            Some(exec_response::Output::Stdout(bytes)) => session.terminal.write(bytes)?,
            Some(exec_response::Output::Stderr(bytes)) => {
                let stderr = &mut session.terminal.stderr;
                let _ = stderr.write_all(&bytes).and_then(|()| stderr.flush());
            }
            // A shell could not tell a larger one apart either.
            Some(exec_response::Output::ExitCode(code)) => return Ok(u8::try_from(code).unwrap_or(u8::MAX)),
            Some(exec_response::Output::Error(error)) => return Err(CliError::Failed(error)),
            None => {}
        }
    }
}

fn feed(mut stdin: Box<dyn Read + Send>, requests: &mpsc::Sender<ExecRequest>) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let input = match stdin.read(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Ok(0) | Err(_) => exec_request::Input::CloseStdin(true),
            Ok(count) => exec_request::Input::Stdin(buffer[..count].to_vec().into()),
        };
        let is_last = matches!(input, exec_request::Input::CloseStdin(_));
        if requests.blocking_send(ExecRequest { input: Some(input) }).is_err() || is_last {
            return;
        }
    }
}
