//! Orders to a process that the benchmark started, and its answers: one JSON line each, over its input and output. It ends
//! with its input.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::BenchError;

/// The benchmark's end.
#[derive(Debug)]
pub(crate) struct Pipe {
    orders: ChildStdin,
    done: Option<BufReader<ChildStdout>>,
}

impl Pipe {
    /// Of a process whose input and output are piped.
    pub(crate) fn to(child: &mut Child) -> Self {
        let orders = child.stdin.take().expect("stdin is piped");
        Self { orders, done: child.stdout.take().map(BufReader::new) }
    }

    /// `None`: the process is gone.
    pub(crate) async fn ask<D: DeserializeOwned>(&mut self, order: &impl Serialize) -> Option<D> {
        self.orders.write_all(&line(order)).ok()?;
        let mut done = self.done.take()?;
        let read = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            (done.read_line(&mut line).map(|_| line), done)
        });
        let (line, done) = read.await.ok()?;
        self.done = Some(done);
        serde_json::from_str(&line.ok()?).ok()
    }
}

/// The other end: carries out orders until there are no more.
pub(crate) async fn take_orders<O: DeserializeOwned, D: Serialize>(
    mut carry_out: impl AsyncFnMut(O) -> D,
) -> Result<(), BenchError> {
    let mut answers = std::io::stdout();
    // On a thread of its own: reading blocks, and orders come one at a time.
    let (order, mut ordered) = tokio::sync::mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if order.blocking_send(line).is_err() {
                return;
            }
        }
    });
    while let Some(text) = ordered.recv().await {
        let order = serde_json::from_str(&text).map_err(|error| BenchError::refused("take orders", error))?;
        let answer = line(&carry_out(order).await);
        answers.write_all(&answer).and_then(|()| answers.flush()).map_err(BenchError::io("take orders"))?;
    }
    Ok(())
}

fn line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("plain data");
    line.push(b'\n');
    line
}
