//! A node's side: orders in, answers out, news to whoever listens.

use std::pin::Pin;
use std::sync::Arc;

use ate_name::NodeName;
use ate_orders::{Exit, NodeError, NodeEvent, Nodes, Output};
use ate_proto::ate::v1::node_server::{Node, NodeServer};
use ate_proto::ate::v1::{self as proto, ListenRequest, RunInput, RunOutput, run_input, run_output};
use futures::{Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{broadcast, mpsc};
use tokio_stream::wrappers::{BroadcastStream, ReceiverStream};
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status, Streaming};

use crate::wire::{Answer, MAX_MESSAGE, Order, Outcome, ReadOrder, decode, encode};

/// News that a listener may be behind; it misses those beyond, and learns the rest from the next report.
const NEWS: usize = 1024;

/// Messages of a stream that the other side has not taken yet; whoever produces them then waits.
const STREAM_BUFFER: usize = 64;

/// A node's news, for every replica that listens.
#[derive(Clone, Debug)]
pub struct News(broadcast::Sender<NodeEvent>);

impl Default for News {
    fn default() -> Self {
        Self(broadcast::Sender::new(NEWS))
    }
}

impl News {
    /// Passes on what the node tells, for as long as it does.
    pub async fn pass_on(&self, mut events: mpsc::Receiver<NodeEvent>) {
        while let Some(event) = events.recv().await {
            // Nobody listening is no loss: whoever comes asks for a report first.
            let _ = self.0.send(event);
        }
    }
}

/// Takes orders for `node` on these connections, which have proven to be the control plane's.
pub async fn serve<S>(
    node: NodeName,
    nodes: Arc<dyn Nodes>,
    news: News,
    connections: mpsc::Receiver<S>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error>
where
    S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let service = NodeServer::new(NodeService { node, nodes, news })
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let incoming = ReceiverStream::new(connections).map(Ok::<_, std::io::Error>);
    tonic::transport::Server::builder().add_service(service).serve_with_incoming_shutdown(incoming, shutdown).await
}

struct NodeService {
    node: NodeName,
    nodes: Arc<dyn Nodes>,
    news: News,
}

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Node for NodeService {
    async fn carry(&self, request: Request<proto::Order>) -> Result<Response<proto::Answer>, Status> {
        let order = decode::<Order>(&request.into_inner().json)?;
        let outcome: Outcome = carry_out(&*self.nodes, &self.node, order).await;
        Ok(Response::new(proto::Answer { json: encode(&outcome).into() }))
    }

    type RunStream = BoxStream<RunOutput>;

    async fn run(&self, request: Request<Streaming<RunInput>>) -> Result<Response<Self::RunStream>, Status> {
        let mut input = request.into_inner();
        let order = match input.message().await?.and_then(|message| message.input) {
            Some(run_input::Input::Order(json)) => decode(&json)?,
            _ => return Err(Status::invalid_argument("the first message must be the order")),
        };
        let (stdin, stdin_receiver) = mpsc::channel(STREAM_BUFFER);
        tokio::spawn(async move {
            while let Ok(Some(RunInput { input: Some(run_input::Input::Stdin(bytes)) })) = input.message().await {
                if stdin.send(bytes.into()).await.is_err() {
                    return;
                }
            }
        });
        let (output, printed) = mpsc::channel(STREAM_BUFFER);
        let (node, nodes) = (self.node.clone(), Arc::clone(&self.nodes));
        let running = tokio::spawn(async move { nodes.exec(&node, order, stdin_receiver, output).await });
        let ended = futures::stream::once(async move {
            let ended: Result<Exit, NodeError> =
                running.await.unwrap_or_else(|panic| Err(NodeError::Failed(panic.to_string())));
            run_output::Output::Ended(encode(&ended).into())
        });
        let printed = ReceiverStream::new(printed).map(|output| match output {
            Output::Stdout(bytes) => run_output::Output::Stdout(bytes.into()),
            Output::Stderr(bytes) => run_output::Output::Stderr(bytes.into()),
        });
        Ok(Response::new(Box::pin(printed.chain(ended).map(|output| Ok(RunOutput { output: Some(output) })))))
    }

    type ReadStream = BoxStream<proto::Line>;

    async fn read(&self, request: Request<proto::Order>) -> Result<Response<Self::ReadStream>, Status> {
        let ReadOrder { actor, order } = decode(&request.into_inner().json)?;
        let (sender, receiver) = mpsc::channel(STREAM_BUFFER);
        let (node, nodes) = (self.node.clone(), Arc::clone(&self.nodes));
        tokio::spawn(async move {
            if let Err(error) = nodes.logs(&node, actor, order, sender).await {
                tracing::warn!(%actor, %error, "a log could not be read");
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver).map(|json| Ok(proto::Line { json })))))
    }

    type ListenStream = BoxStream<proto::News>;

    async fn listen(&self, _: Request<ListenRequest>) -> Result<Response<Self::ListenStream>, Status> {
        let news = BroadcastStream::new(self.news.0.subscribe())
            // Too far behind: the next report makes it good.
            .filter_map(|news| std::future::ready(news.ok()))
            .map(|news| Ok(proto::News { json: encode(&news).into() }));
        Ok(Response::new(Box::pin(news)))
    }
}

async fn carry_out(nodes: &dyn Nodes, node: &NodeName, order: Order) -> Outcome {
    let done = |done: Result<(), NodeError>| done.map(|()| Answer::Done);
    match order {
        Order::Report => nodes.report(node).await.map(Answer::Report),
        Order::Activate(order) => nodes.activate(node, order).await.map(Answer::Activated),
        Order::Capture(order) => nodes.capture(node, order).await.map(Answer::Captured),
        Order::Abort { worker, op } => done(nodes.abort(node, worker, op).await),
        Order::Store(order) => nodes.store(node, order).await.map(Answer::Stored),
        Order::Release { op } => done(nodes.release(node, op).await),
        Order::Copy(order) => nodes.copy(node, *order).await.map(Answer::Stored),
        Order::Upload { prefix } => done(nodes.upload(node, &prefix).await),
        Order::Discard { worker, actor, generation } => done(nodes.discard(node, worker, actor, generation).await),
        Order::Search(order) => nodes.search(node, order).await.map(Answer::Found),
        Order::Forget(order) => done(nodes.forget(node, order).await),
    }
}
