//! Nodes that are elsewhere.

use std::collections::HashMap;
use std::sync::Arc;

use ate_name::{ActorUid, Generation, NodeName, OpId, WorkerUid};
use ate_orders::{
    Activate, Activated, Capture, Captured, CopyOrder, ExecOrder, Exit, Findings, ForgetOrder, LogsOrder, NodeError,
    NodeEvent, NodeReport, Nodes, Output, SearchOrder, SnapshotOrder, Stored,
};
use ate_proto::ate::v1::node_client::NodeClient;
use ate_proto::ate::v1::{ListenRequest, RunInput, run_input, run_output};
use futures::{Stream, StreamExt};
use parking_lot::RwLock;
use rustls::ClientConfig;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::dial::channel;
use crate::wire::{Answer, MAX_MESSAGE, Order, Outcome, ReadOrder, decode, encode};

/// The nodes that have registered, reached where they said.
pub struct RemoteNodes {
    tls: Arc<ClientConfig>,
    known: RwLock<HashMap<NodeName, (String, Channel)>>,
}

impl std::fmt::Debug for RemoteNodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteNodes").finish_non_exhaustive()
    }
}

impl RemoteNodes {
    pub fn new(tls: Arc<ClientConfig>) -> Self {
        Self { tls, known: RwLock::default() }
    }

    /// A node has said where it is reached (address:port).
    pub fn know(&self, node: &NodeName, endpoint: &str) {
        if self.known.read().get(node).is_some_and(|(known, _)| known == endpoint) {
            return;
        }
        match channel(endpoint, Arc::clone(&self.tls)) {
            Ok(channel) => drop(self.known.write().insert(node.clone(), (endpoint.to_owned(), channel))),
            Err(error) => tracing::warn!(%node, %error, "a node cannot be reached where it says"),
        }
    }

    /// What happens on a node from now on, until it cannot be heard any more.
    pub async fn listen(&self, node: &NodeName) -> Result<impl Stream<Item = NodeEvent> + Send + use<>, NodeError> {
        let news = self.client(node)?.listen(ListenRequest {}).await.map_err(unreachable)?.into_inner();
        Ok(news.filter_map(|news| std::future::ready(news.ok().and_then(|news| decode(&news.json).ok()))))
    }

    /// One that is not known yet may be on its way to be: nothing may be concluded from that.
    fn client(&self, node: &NodeName) -> Result<NodeClient<Channel>, NodeError> {
        let known = self.known.read();
        let (_, channel) =
            known.get(node).ok_or_else(|| NodeError::Unreachable(format!("node {node} has not been heard of yet")))?;
        Ok(NodeClient::new(channel.clone())
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE))
    }

    async fn carry(&self, node: &NodeName, order: Order) -> Result<Answer, NodeError> {
        let order = ate_proto::ate::v1::Order { json: encode(&order).into() };
        let answer = self.client(node)?.carry(order).await.map_err(unreachable)?.into_inner();
        decode::<Outcome>(&answer.json).map_err(unreachable)?
    }
}

/// What became of an order is not known, and it is repeated; unless it was refused as it stands, and would be again.
fn unreachable(status: Status) -> NodeError {
    match status.code() {
        Code::InvalidArgument | Code::Unimplemented | Code::OutOfRange | Code::PermissionDenied => {
            NodeError::Failed(format!("the node does not understand this order: {}", status.message()))
        }
        _ => NodeError::Unreachable(status.message().to_owned()),
    }
}

fn unexpected(answer: &Answer) -> NodeError {
    NodeError::Failed(format!("the node answered something else: {answer:?}"))
}

macro_rules! answered {
    ($answer:expr, $pattern:pat => $value:expr) => {
        match $answer {
            $pattern => Ok($value),
            other => Err(unexpected(&other)),
        }
    };
}

#[async_trait::async_trait]
impl Nodes for RemoteNodes {
    async fn report(&self, node: &NodeName) -> Result<NodeReport, NodeError> {
        answered!(self.carry(node, Order::Report).await?, Answer::Report(report) => report)
    }

    async fn activate(&self, node: &NodeName, order: Activate) -> Result<Activated, NodeError> {
        answered!(self.carry(node, Order::Activate(order)).await?, Answer::Activated(activated) => activated)
    }

    async fn capture(&self, node: &NodeName, order: Capture) -> Result<Captured, NodeError> {
        answered!(self.carry(node, Order::Capture(order)).await?, Answer::Captured(captured) => captured)
    }

    async fn abort(&self, node: &NodeName, worker: WorkerUid, op: OpId) -> Result<(), NodeError> {
        answered!(self.carry(node, Order::Abort { worker, op }).await?, Answer::Done => ())
    }

    async fn store(&self, node: &NodeName, order: SnapshotOrder) -> Result<Stored, NodeError> {
        answered!(self.carry(node, Order::Store(order)).await?, Answer::Stored(stored) => stored)
    }

    async fn release(&self, node: &NodeName, op: OpId) -> Result<(), NodeError> {
        answered!(self.carry(node, Order::Release { op }).await?, Answer::Done => ())
    }

    async fn copy(&self, node: &NodeName, order: CopyOrder) -> Result<Stored, NodeError> {
        answered!(self.carry(node, Order::Copy(Box::new(order))).await?, Answer::Stored(stored) => stored)
    }

    async fn upload(&self, node: &NodeName, prefix: &str) -> Result<(), NodeError> {
        answered!(self.carry(node, Order::Upload { prefix: prefix.to_owned() }).await?, Answer::Done => ())
    }

    async fn discard(
        &self,
        node: &NodeName,
        worker: WorkerUid,
        actor: ActorUid,
        generation: Generation,
    ) -> Result<(), NodeError> {
        answered!(self.carry(node, Order::Discard { worker, actor, generation }).await?, Answer::Done => ())
    }

    async fn exec(
        &self,
        node: &NodeName,
        order: ExecOrder,
        stdin: mpsc::Receiver<Vec<u8>>,
        output: mpsc::Sender<Output>,
    ) -> Result<Exit, NodeError> {
        let first = futures::stream::once(async move { run_input::Input::Order(encode(&order).into()) });
        let rest = ReceiverStream::new(stdin).map(|bytes| run_input::Input::Stdin(bytes.into()));
        let input = first.chain(rest).map(|input| RunInput { input: Some(input) });
        let mut said = self.client(node)?.run(input).await.map_err(unreachable)?.into_inner();
        loop {
            let message = tokio::select! {
                message = said.message() => message.map_err(unreachable)?,
                // The node sees that nobody listens.
                () = output.closed() => None,
            };
            let Some(message) = message else {
                return Err(NodeError::Unreachable("the node did not say how the command ended".to_owned()));
            };
            let printed = match message.output {
                Some(run_output::Output::Stdout(bytes)) => Output::Stdout(bytes.into()),
                Some(run_output::Output::Stderr(bytes)) => Output::Stderr(bytes.into()),
                Some(run_output::Output::Ended(json)) => {
                    return decode::<Result<Exit, NodeError>>(&json).map_err(unreachable)?;
                }
                None => continue,
            };
            let _ = output.send(printed).await;
        }
    }

    async fn logs(
        &self,
        node: &NodeName,
        actor: ActorUid,
        order: LogsOrder,
        lines: mpsc::Sender<String>,
    ) -> Result<(), NodeError> {
        let order = ate_proto::ate::v1::Order { json: encode(&ReadOrder { actor, order }).into() };
        let mut read = self.client(node)?.read(order).await.map_err(unreachable)?.into_inner();
        loop {
            let line = tokio::select! {
                line = read.message() => line.map_err(unreachable)?,
                () = lines.closed() => return Ok(()),
            };
            let Some(line) = line else { return Ok(()) };
            if lines.send(line.json).await.is_err() {
                return Ok(());
            }
        }
    }

    async fn search(&self, node: &NodeName, order: SearchOrder) -> Result<Findings, NodeError> {
        answered!(self.carry(node, Order::Search(order)).await?, Answer::Found(found) => found)
    }

    async fn forget(&self, node: &NodeName, order: ForgetOrder) -> Result<(), NodeError> {
        answered!(self.carry(node, Order::Forget(order)).await?, Answer::Done => ())
    }
}
