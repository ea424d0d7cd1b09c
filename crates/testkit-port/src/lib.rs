//! Ports for servers that must be told theirs, and that are started again on the one they had.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Below those that the kernel gives to whoever asks for any: nobody takes one while its server is down.
const FIRST: u32 = 10_000;
const COUNT: u32 = 22_000;

/// A port of the loopback address that was free a moment ago, and that this process has not been given before.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes beside each other begin far from each other.
    let begin = std::process::id().wrapping_mul(101);
    for _ in 0..COUNT {
        let number = begin.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
        let port = u16::try_from(FIRST + number).expect("below 32,000");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port is free");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_given_twice_though_nobody_uses_it() {
        let ports: Vec<u16> = (0..100).map(|_| free_port()).collect();
        let distinct: std::collections::BTreeSet<_> = ports.iter().collect();
        assert_eq!(distinct.len(), ports.len());
    }
}
