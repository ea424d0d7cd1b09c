//! Connections from routers on other machines, led to the worker that they are for.

use std::time::Duration;

use ate_preface::{PrefaceError, Verdict};
use ate_sys::SocketPath;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes};
use tokio::net::UnixStream;
use tokio::time::Instant;

use crate::Node;

/// A router says whom it wants at once; whoever does not is no router.
const PREFACE_WITHIN: Duration = Duration::from_secs(5);

/// A worker has its own limits and says no sooner than this.
const VERDICT_WITHIN: Duration = Duration::from_secs(15);

/// Per direction, as in the worker.
const SPLICE_BUFFER: usize = 16 << 10;

impl Node {
    /// Serves one connection to its end. The worker judges, and cuts it when the actor may not be met any more.
    pub async fn admit(&self, mut router: impl AsyncRead + AsyncWrite + Unpin) {
        let Ok(preface) = ate_preface::accept(&mut router, Instant::now() + PREFACE_WITHIN).await else { return };
        let hosts =
            |handle: &&std::sync::Arc<crate::workers::Handle>| handle.hosted(preface.uid, preface.generation).is_some();
        let socket = self.workers.lock().values().find(hosts).map(|handle| handle.socket());
        let met = async {
            let socket = socket.ok_or(PrefaceError::Stale)?;
            let mut worker = UnixStream::connect(SocketPath::of(&socket)?.path()).await?;
            ate_preface::offer(&mut worker, &preface).await?;
            Ok(worker)
        };
        let verdict = match tokio::time::timeout(VERDICT_WITHIN, met).await {
            Ok(Ok(mut worker)) => {
                if Verdict::Accepted.send(&mut router).await.is_ok() {
                    let _ = copy_bidirectional_with_sizes(&mut router, &mut worker, SPLICE_BUFFER, SPLICE_BUFFER).await;
                }
                return;
            }
            Ok(Err(PrefaceError::Refused)) => Verdict::Refused,
            Ok(Err(PrefaceError::Draining)) => Verdict::Draining,
            // Not here, or the worker is gone: either way not any more.
            Ok(Err(_)) | Err(_) => Verdict::Stale,
        };
        let _ = verdict.send(&mut router).await;
    }
}
