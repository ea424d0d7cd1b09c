mod conformance;
mod directory;
mod minio;
mod service;
