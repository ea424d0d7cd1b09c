//! The router as clients and workers see it: real sockets, workers that speak the preface, an activator that obeys.

#![allow(unreachable_pub)] // Nothing outside can reach anything here.

mod abuse;
mod addressing;
mod lifecycle;
mod parking;
mod pool;
mod protocols;
mod staleness;
mod streams;
mod support;
