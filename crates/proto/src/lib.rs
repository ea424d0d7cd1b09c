//! The two APIs on the wire: messages, clients and servers generated from `proto/`, and their JSON.
//!
//! [`ateapi`] is the public API, frozen. [`ate::v1`] is ours. Both are served on one listener.
//!
//! ```text
//!   proto/*.proto ── ATE_UPDATE=1 cargo test -p ate-proto ──▶ src/gen/*.rs, src/gen/descriptors.bin   (checked in)
//! ```
//!
//! What is checked in is compared with what the `.proto` files give on every test run, so a build needs neither
//! `protoc` nor a build script.

mod json;

pub use json::Json;

/// The public API: `ateapi.Control` and `ateapi.SessionIdentity`.
#[allow(clippy::all, unreachable_pub)]
pub mod ateapi {
    include!("gen/ateapi.rs");
}

pub mod ate {
    /// What the public API lacks: `ate.v1.Substrate`.
    #[allow(clippy::all, unreachable_pub)]
    pub mod v1 {
        include!("gen/ate.v1.rs");
    }
}

/// Both APIs and what they import as an encoded `google.protobuf.FileDescriptorSet`, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("gen/descriptors.bin");
