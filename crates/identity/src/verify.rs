use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, SignatureScheme};

use crate::{Authority, Role};

/// Everything that is asked of any server's certificate, and that it is of the one role that is wanted: whoever has stolen a
/// router's key cannot stand in for a node.
#[derive(Debug)]
pub(crate) struct RoleVerifier {
    web: Arc<WebPkiServerVerifier>,
    authority: Arc<Authority>,
    role: Role,
}

impl RoleVerifier {
    pub(crate) fn new(authority: Arc<Authority>, provider: Arc<CryptoProvider>, role: Role) -> Self {
        let web = WebPkiServerVerifier::builder_with_provider(authority.roots(), provider)
            .build()
            .expect("the roots are not empty and there are no revocation lists");
        Self { web, authority, role }
    }
}

impl ServerCertVerifier for RoleVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.web.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)?;
        match self.authority.role_of(std::slice::from_ref(end_entity)) {
            Ok(role) if role == self.role => Ok(verified),
            _ => Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.web.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.web.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.web.supported_verify_schemes()
    }
}
