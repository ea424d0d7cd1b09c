//! What a client reads when its request does not reach an actor. Statuses and texts are part of the public API where it
//! has them; nothing internal is in them.

use ate_name::{ActorKey, ActorName};
use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};

use crate::assignment::ActivateError;
use crate::body::Reply;
use crate::stats::{Histogram, Stats};
use crate::target::InvalidTarget;

/// Seconds after which a client may try again: a wake takes well under one, and a queue of wakes drains in a few.
const RETRY_AFTER_SECONDS: HeaderValue = HeaderValue::from_static("1");

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    Activate(ActivateError),
    /// The activator answered for another actor.
    Misrouted,
    TooManyWaiting,
    TooManyConnections,
    UndeclaredPort {
        wanted: u16,
        declared: Vec<u16>,
    },
    /// The worker hosts the actor, but nothing listens on the port.
    SilentPort(u16),
    /// The request was sent, and the connection failed before an answer began.
    Lost,
}

impl Failure {
    fn status(&self) -> StatusCode {
        match self {
            Self::Activate(error) => match error {
                ActivateError::NotFound => StatusCode::NOT_FOUND,
                ActivateError::FailedPrecondition(_) | ActivateError::Unavailable | ActivateError::Resting { .. } => {
                    StatusCode::SERVICE_UNAVAILABLE
                }
                ActivateError::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
                ActivateError::PermissionDenied => StatusCode::FORBIDDEN,
                ActivateError::Unauthenticated => StatusCode::UNAUTHORIZED,
                ActivateError::ResourceExhausted(_) => StatusCode::TOO_MANY_REQUESTS,
                ActivateError::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            },
            Self::Misrouted => StatusCode::INTERNAL_SERVER_ERROR,
            Self::TooManyWaiting | Self::TooManyConnections => StatusCode::SERVICE_UNAVAILABLE,
            Self::UndeclaredPort { .. } => StatusCode::NOT_FOUND,
            Self::SilentPort(_) | Self::Lost => StatusCode::BAD_GATEWAY,
        }
    }

    fn text(&self, actor: &ActorName) -> String {
        match self {
            Self::Activate(error) => match error {
                ActivateError::NotFound => format!("actor \"{actor}\" not found"),
                ActivateError::FailedPrecondition(reason) => format!("actor \"{actor}\" unavailable: {reason}"),
                ActivateError::Unavailable => format!("actor \"{actor}\" unavailable"),
                ActivateError::Resting { text, .. } => format!("actor \"{actor}\" unavailable: {text}"),
                ActivateError::DeadlineExceeded => format!("actor \"{actor}\" request timed out"),
                ActivateError::PermissionDenied => format!("actor \"{actor}\" access denied"),
                ActivateError::Unauthenticated => format!("actor \"{actor}\" authentication required"),
                ActivateError::ResourceExhausted(reason) => format!("actor \"{actor}\" rate limited: {reason}"),
                ActivateError::Internal => format!("error resuming actor \"{actor}\""),
            },
            Self::Misrouted => format!("actor \"{actor}\" routing failed"),
            Self::TooManyWaiting => format!("actor \"{actor}\" unavailable: too many requests are waiting"),
            Self::TooManyConnections => format!("actor \"{actor}\" unavailable: too many connections"),
            Self::UndeclaredPort { wanted, declared } => {
                let declared: Vec<_> = declared.iter().map(u16::to_string).collect();
                format!("actor \"{actor}\" has no port {wanted}; its template declares {}", declared.join(", "))
            }
            Self::SilentPort(port) => format!("actor \"{actor}\" does not listen on port {port}"),
            Self::Lost => format!("actor \"{actor}\" closed the connection before it answered"),
        }
    }

    /// Where the request counts if its route was not known before it failed.
    pub(crate) fn outcome<'a>(&self, stats: &'a Stats) -> &'a Histogram {
        match self {
            Self::Activate(ActivateError::NotFound) | Self::UndeclaredPort { .. } => &stats.not_found,
            Self::Activate(ActivateError::DeadlineExceeded) => &stats.cancelled,
            _ => &stats.error,
        }
    }

    pub(crate) fn reply(&self, actor: &ActorKey) -> Response<Reply> {
        let status = self.status();
        tracing::debug!(%actor, status = status.as_u16(), failure = ?self, "request refused");
        let mut response = text(status, self.text(&actor.name));
        if let Self::Activate(ActivateError::Resting { after, .. }) = self {
            // In whole seconds, and not too early.
            let seconds = u64::try_from(after.as_millis().div_ceil(1000)).unwrap_or(u64::MAX).max(1);
            response.headers_mut().insert(RETRY_AFTER, seconds.into());
        }
        response
    }
}

impl InvalidTarget {
    pub(crate) fn reply(&self) -> Response<Reply> {
        match self {
            Self::Host { .. } | Self::Header { .. } => text(StatusCode::NOT_FOUND, self.to_string()),
            Self::Ambiguous(_) => {
                let mut response = text(StatusCode::BAD_REQUEST, self.to_string());
                // Whoever sends such a head is not to be trusted with where the next one begins.
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                response
            }
        }
    }
}

/// A tunnel to an arbitrary place is not what a router of actors gives.
pub(crate) fn no_tunnels() -> Response<Reply> {
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "CONNECT is not served here".into());
    response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"));
    response
}

fn text(status: StatusCode, text: String) -> Response<Reply> {
    let mut response = Response::new(Reply::text(Bytes::from(text)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    let again =
        [StatusCode::SERVICE_UNAVAILABLE, StatusCode::TOO_MANY_REQUESTS, StatusCode::GATEWAY_TIMEOUT].contains(&status);
    if again {
        headers.insert(RETRY_AFTER, RETRY_AFTER_SECONDS);
    }
    response
}
