//! Bodies pass through frame by frame; neither direction is ever collected.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use crate::front::Busy;
use crate::upstream::Lease;

/// What a client sends: its own stream, or nothing. The latter can be sent again.
pub(crate) struct Upload(Option<Incoming>);

impl Upload {
    pub(crate) fn new(body: Incoming) -> Self {
        Self(if body.is_end_stream() { None } else { Some(body) })
    }

    pub(crate) const NOTHING: Self = Self(None);

    pub(crate) fn is_nothing(&self) -> bool {
        self.0.is_none()
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        match &mut self.0 {
            Some(body) => Pin::new(body).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

/// What a client gets: the workload's stream, or a line of ours.
pub(crate) struct Reply {
    content: Content,
    /// Ends with the reply, so that a client's connection is idle only between replies.
    busy: Option<Busy>,
}

enum Content {
    Text(Bytes),
    Stream { body: Incoming, lease: Option<Lease> },
}

impl Reply {
    pub(crate) fn text(text: Bytes) -> Self {
        Self { content: Content::Text(text), busy: None }
    }

    /// The lease goes back when the stream has ended; a stream left early takes its connection with it.
    pub(crate) fn stream(body: Incoming, mut lease: Option<Lease>) -> Self {
        if body.is_end_stream()
            && let Some(lease) = lease.take()
        {
            lease.give_back();
        }
        Self { content: Content::Stream { body, lease }, busy: None }
    }

    pub(crate) fn keep(&mut self, busy: Busy) {
        self.busy = Some(busy);
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        match &mut self.content {
            Content::Text(text) if text.is_empty() => Poll::Ready(None),
            Content::Text(text) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(text))))),
            Content::Stream { body, lease } => {
                let frame = ready!(Pin::new(&mut *body).poll_frame(cx));
                // A reader asks no further after trailers.
                let ended = match &frame {
                    Some(Ok(frame)) => frame.is_trailers() || body.is_end_stream(),
                    Some(Err(_)) => false,
                    None => true,
                };
                if ended && let Some(lease) = lease.take() {
                    lease.give_back();
                }
                Poll::Ready(frame)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Text(text) => text.is_empty(),
            Content::Stream { body, .. } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Text(text) => SizeHint::with_exact(text.len() as u64),
            Content::Stream { body, .. } => body.size_hint(),
        }
    }
}
