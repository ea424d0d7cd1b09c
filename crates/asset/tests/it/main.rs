mod peers;
mod runtime;
mod store;
mod support;
