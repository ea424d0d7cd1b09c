//! Measurements as text: for people at a terminal and for files that are compared with `diff`.
//!
//! ```text
//!   Samples ─▶ Summary    n, p50, p95, p99, max of what was measured
//!   Table                 columns as wide as their widest cell
//!   bar, waterfall        how much, and when within the whole
//!   Progress              one line on stderr for what takes longer than a second
//! ```
//! Pure but for the writer given: no clock (the time is an argument), no terminal (whether there is one is an argument).

mod bar;
mod progress;
mod samples;
mod table;
mod text;
mod waterfall;

pub use bar::bar;
pub use progress::{PATIENCE, Progress};
pub use samples::{Samples, Summary};
pub use table::{Cell, Column, Table};
pub use text::{Paint, Tone, duration};
pub use waterfall::{Phase, waterfall};
