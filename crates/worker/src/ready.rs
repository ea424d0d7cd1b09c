//! Whether a workload that was started afresh has come up.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use ate_orders::Readyz;

/// How long a workload may take to answer all its probes with 200.
pub(crate) const READY_WITHIN: Duration = Duration::from_secs(30);

/// A single probe; a workload that hangs on one is asked again.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Between probes: short, since it adds to every cold start.
const PROBE_EVERY: Duration = Duration::from_millis(5);

/// Waits until every probe has answered 200; the error says which has not and what it said last.
pub(crate) async fn all(probes: &[Readyz]) -> Result<(), String> {
    for probe in probes {
        let mut last = "nothing yet".to_owned();
        let up = async {
            loop {
                match tokio::time::timeout(PROBE_TIMEOUT, ask(probe)).await {
                    Ok(Ok(status)) if status == "200" => return,
                    Ok(Ok(status)) => last = format!("status {status:?}"),
                    Ok(Err(error)) => last = error.to_string(),
                    Err(_) => last = "no answer".to_owned(),
                }
                tokio::time::sleep(PROBE_EVERY).await;
            }
        };
        if tokio::time::timeout(READY_WITHIN, up).await.is_err() {
            return Err(format!(
                "GET {} on port {} did not answer 200 within {} s (last: {last})",
                probe.path,
                probe.port,
                READY_WITHIN.as_secs(),
            ));
        }
    }
    Ok(())
}

async fn ask(probe: &Readyz) -> std::io::Result<String> {
    let mut stream = TcpStream::connect((ate_network::ACTOR_V4, probe.port)).await?;
    let request =
        format!("GET {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", probe.path, ate_network::ACTOR_V4);
    stream.write_all(request.as_bytes()).await?;
    // "HTTP/1.1 200" is all that is wanted of the answer.
    let mut head = [0; 12];
    stream.read_exact(&mut head).await?;
    Ok(String::from_utf8_lossy(&head[9..]).into_owned())
}
