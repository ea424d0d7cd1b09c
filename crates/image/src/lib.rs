//! OCI images on a node.
//!
//! An image is pulled by digest once. Each of its layers is unpacked once, into a directory named by the digest of
//! the layer's uncompressed bytes (its diff-id), already in overlayfs form. A root file system is an overlayfs of
//! those read-only directories, which somebody else mounts: this crate only says which ones, in which order. Nothing
//! is unpacked per activation.
//!
//! ```text
//!   <store>/lock                  flock: shared to take a lease, exclusive to evict
//!   <store>/images/<digest>       the record of an image: its config and its layers. A shared flock on it is a lease,
//!                                 its mtime is the last use. Written before the layers are: it names what is being
//!                                 pulled, so that nobody evicts a layer in between.
//!   <store>/layers/<diff-id>/fs   an unpacked layer; it exists only whole, by rename
//!   <store>/layers/<diff-id>/size.json
//!   <store>/ingest/<process>/     what a process is working on, under its flock; free for removal once it is dead
//! ```
//!
//! The digest is the capability: whoever names an image that the node holds gets it, whatever their credentials.

mod credentials;
mod document;
mod error;
mod flight;
mod meter;
mod pack;
mod reference;
mod source;
mod store;
mod tree;
mod unpack;
mod user;

pub use credentials::{Credentials, DockerConfigError};
pub use document::{Architecture, ImageConfig};
pub use error::{Cause, ImageError, StoreError};
pub use meter::Limits;
pub use pack::{Content, PackError, Recipe, pack, pack_archive};
pub use reference::{Location, Reference, ReferenceError};
pub use store::{Eviction, Image, ImageStore, Lease};
pub use unpack::{Refused, UnpackError};
pub use user::{User, UserError};
