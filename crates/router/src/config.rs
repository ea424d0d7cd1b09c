use std::sync::Arc;
use std::time::Duration;

/// Limits of a router. Each default says what it protects; what happens at the limit stands with the field.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// How long a request may wait for its actor, from its head to a worker's acceptance. Then 504.
    pub park_timeout: Duration,
    /// Requests that may wait for their actors at once. Then 503.
    pub max_parked: usize,
    /// Bytes of heads that the waiting requests may hold. Then 503. Their bodies stay in the clients' sockets.
    pub max_parked_bytes: usize,
    /// Connections from clients, tunnels included. Further ones wait in the kernel's queue.
    pub max_connections: usize,
    /// From a connection's first moment to the end of its first request head. Then it is cut.
    pub head_timeout: Duration,
    /// How long a client's connection may be without a request after its first. Then it is closed.
    pub client_idle_timeout: Duration,
    /// Size of a request head or of a response head. A larger request gets 431, a larger response becomes 502.
    pub max_head_bytes: usize,
    /// To connect to a worker and hear its verdict. Then the worker counts as gone.
    pub connect_timeout: Duration,
    /// Connections to one actor, busy ones included. Then 503.
    pub max_connections_per_actor: usize,
    /// Unused connections to all actors. The least recently used are closed to make room.
    pub max_idle_connections: usize,
    /// How long an unused connection to an actor is kept.
    pub worker_idle_timeout: Duration,
    /// How workers are met at the doors of their nodes; without it connections there are plain, as workloads of tests are.
    pub door: Option<Arc<rustls::ClientConfig>>,
    /// How long requests and tunnels in flight may take to end after shutdown began. Then they are cut.
    pub shutdown_grace: Duration,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            park_timeout: Duration::from_secs(30),
            max_parked: 2_048,
            max_parked_bytes: 16 << 20,
            max_connections: 16_384,
            head_timeout: Duration::from_secs(10),
            client_idle_timeout: Duration::from_secs(75),
            max_head_bytes: 64 << 10,
            connect_timeout: Duration::from_secs(5),
            max_connections_per_actor: 1_024,
            max_idle_connections: 4_096,
            worker_idle_timeout: Duration::from_secs(60),
            door: None,
            shutdown_grace: Duration::from_secs(30),
        }
    }
}
