//! What a lone machine plugs into the ports: its clock, its chance, its keys, and the router's way to the control plane.

use std::sync::Arc;

use ate_control::{Assigned, AssignmentUpdate, Code, Control, Keys, World};
use ate_name::{ActorKey, ActorUid, Generation};
use ate_orders::Ingress;
use ate_router::{ActivateError, Activator, Assignment, Endpoint, Port, Protocol, Update};
use ate_snapshot::{DataKey, InstanceKey};
use base64::Engine as _;
use tokio::sync::{broadcast, mpsc};
use tokio::time::Instant;

pub(crate) struct ThisWorld;

impl World for ThisWorld {
    fn now(&self) -> jiff::Timestamp {
        jiff::Timestamp::now()
    }

    fn random(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        rand::fill(&mut bytes);
        bytes
    }
}

/// Draws a key per actor and seals it with the instance's.
pub(crate) struct InstanceKeys(pub(crate) [u8; 32]);

impl Keys for InstanceKeys {
    fn sealed(&self, actor: ActorUid) -> String {
        let (mut key, mut nonce) = ([0; 32], [0; 12]);
        rand::fill(&mut key);
        rand::fill(&mut nonce);
        let wrapped = InstanceKey::from_bytes(self.0).wrap(&DataKey::from_random(key), actor, nonce);
        base64::engine::general_purpose::STANDARD.encode(wrapped.as_bytes())
    }
}

/// The control plane in the same process.
pub(crate) struct InProcess(pub(crate) Arc<Control>);

#[async_trait::async_trait]
impl Activator for InProcess {
    async fn activate(
        &self,
        key: &ActorKey,
        stale: Option<Generation>,
        deadline: Instant,
    ) -> Result<Assignment, ActivateError> {
        self.0.activate(key, stale, deadline).await.map(assignment).map_err(|error| match error.code {
            Code::NotFound => ActivateError::NotFound,
            Code::FailedPrecondition => ActivateError::FailedPrecondition(error.text),
            Code::Unavailable | Code::Aborted => match error.retry_after {
                Some(after) => ActivateError::Resting { text: error.text, after },
                None => ActivateError::Unavailable,
            },
            Code::DeadlineExceeded => ActivateError::DeadlineExceeded,
            Code::ResourceExhausted => ActivateError::ResourceExhausted(error.text),
            Code::InvalidArgument | Code::AlreadyExists | Code::OutOfRange | Code::Internal => ActivateError::Internal,
        })
    }
}

/// Tells the router what is assigned, then every change. It begins anew when it has fallen behind.
pub(crate) async fn feed(control: Arc<Control>, updates: mpsc::Sender<Update>) {
    loop {
        let (current, mut changes) = control.watch_assignments();
        if updates.send(Update::Reset(current.into_iter().map(assignment).collect())).await.is_err() {
            return;
        }
        loop {
            let update = match changes.recv().await {
                Ok(AssignmentUpdate::Assigned(assigned)) => Update::Assigned(assignment(assigned)),
                Ok(AssignmentUpdate::Released { key, uid, generation }) => Update::Released { key, uid, generation },
                Err(broadcast::error::RecvError::Lagged(_)) => break,
                Err(broadcast::error::RecvError::Closed) => return,
            };
            if updates.send(update).await.is_err() {
                return;
            }
        }
    }
}

fn assignment(assigned: Assigned) -> Assignment {
    Assignment {
        key: assigned.key,
        uid: assigned.uid,
        generation: assigned.generation,
        endpoint: match assigned.ingress {
            Ingress::Socket(path) => Endpoint::Unix(path),
            Ingress::Door(address) => Endpoint::Tcp(address),
        },
        ports: assigned
            .ports
            .iter()
            .map(|port| Port {
                number: port.number,
                protocol: match port.protocol {
                    ate_orders::PortProtocol::Http => Protocol::Http,
                    ate_orders::PortProtocol::H2c => Protocol::H2c,
                },
            })
            .collect(),
        template: assigned.template,
    }
}
