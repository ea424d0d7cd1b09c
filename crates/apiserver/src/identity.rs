//! `ateapi.SessionIdentity`: part of the public API, not offered yet.

use ate_proto::ateapi::session_identity_server::SessionIdentity;
use ate_proto::ateapi::{MintCertRequest, MintCertResponse, MintJwtRequest, MintJwtResponse};
use tonic::{Request, Response, Status};

#[derive(Debug)]
pub(crate) struct IdentityService;

#[tonic::async_trait]
impl SessionIdentity for IdentityService {
    async fn mint_jwt(&self, _: Request<MintJwtRequest>) -> Result<Response<MintJwtResponse>, Status> {
        Err(Status::unimplemented("session identities are not offered by this server"))
    }

    async fn mint_cert(&self, _: Request<MintCertRequest>) -> Result<Response<MintCertResponse>, Status> {
        Err(Status::unimplemented("session identities are not offered by this server"))
    }
}
