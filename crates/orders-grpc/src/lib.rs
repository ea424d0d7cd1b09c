//! Orders over the network: every replica of the control plane is a client of every node.
//!
//! ```text
//!   Control ─▶ RemoteNodes ── TLS, HTTP/2 ──▶ serve ─▶ the node's own `Nodes`
//!      ▲           │  Carry   one order, one answer         │
//!      └───────────┤  Run     a command, its input, its output
//!         news     │  Read    a log
//!                  └─ Listen  what happens there, to every replica that listens
//! ```
//!
//! A call that breaks off is [`Unreachable`](ate_orders::NodeError::Unreachable): what became of it is not known, and it is
//! repeated. The node goes on with it: whoever gave the order may be gone, the order stands.

mod client;
mod dial;
mod server;
mod wire;

pub use client::RemoteNodes;
pub use dial::channel;
pub use server::{News, serve};
