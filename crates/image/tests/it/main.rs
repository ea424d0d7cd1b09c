//! The public interface against real parts: overlayfs, a real registry, a process killed half-way.

mod overlay;
mod pack;
mod registry;
mod store;
mod stub;
mod support;
