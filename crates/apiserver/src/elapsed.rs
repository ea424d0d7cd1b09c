//! How long the server took, in a trailer on every call: public benchmarks read it.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::{Body, Frame, SizeHint};
use tower::{Layer, Service};

const TRAILER: &str = "x-server-elapsed-us";

#[derive(Clone, Copy, Debug)]
pub(crate) struct ElapsedLayer;

impl<S> Layer<S> for ElapsedLayer {
    type Service = Elapsed<S>;
    fn layer(&self, inner: S) -> Elapsed<S> {
        Elapsed(inner)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Elapsed<S>(S);

impl<S, I, O> Service<Request<I>> for Elapsed<S>
where
    S: Service<Request<I>, Response = Response<O>>,
    S::Future: Send + 'static,
{
    type Response = Response<Timed<O>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<I>) -> Self::Future {
        let begun = Instant::now();
        let response = self.0.call(request);
        Box::pin(async move {
            let mut response = response.await?;
            // A call that failed at once has no body: its headers are its trailers.
            if response.headers().contains_key("grpc-status") {
                stamp(response.headers_mut(), begun);
            }
            Ok(response.map(|body| Timed { body, begun }))
        })
    }
}

fn stamp(headers: &mut HeaderMap, begun: Instant) {
    headers.insert(TRAILER, HeaderValue::from(u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX)));
}

#[derive(Debug)]
pub(crate) struct Timed<B> {
    body: B,
    begun: Instant,
}

impl<B: Body + Unpin> Body for Timed<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let begun = self.begun;
        Pin::new(&mut self.body).poll_frame(context).map(|frame| {
            frame.map(|frame| {
                frame.map(|mut frame| {
                    if let Some(trailers) = frame.trailers_mut() {
                        stamp(trailers, begun);
                    }
                    frame
                })
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
