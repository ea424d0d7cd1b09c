use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::address::{Protection, Roots};
use crate::error::ConnectError;

/// Reads the roots of trust; blocks on the disk.
pub(crate) fn connector(protection: &Protection) -> Result<MakeRustlsConnect, ConnectError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("the provider has suites for TLS 1.2 and 1.3");
    let config = match protection {
        Protection::Verified(roots) => builder.with_root_certificates(trusted(roots)?).with_no_client_auth(),
        Protection::None | Protection::Offered | Protection::Encrypted => {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(Anyone(provider))).with_no_client_auth()
        }
    };
    Ok(MakeRustlsConnect::new(config))
}

fn trusted(roots: &Roots) -> Result<RootCertStore, ConnectError> {
    let mut store = RootCertStore::empty();
    let place = match roots {
        Roots::System => {
            // One unreadable file among a hundred is no reason to trust none; an empty store is refused below.
            store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            "the trust store of this machine".to_owned()
        }
        Roots::File(path) => {
            let refused = |source| ConnectError::Roots { path: path.clone(), source };
            let certificates = CertificateDer::pem_file_iter(path).map_err(refused)?;
            store.add_parsable_certificates(certificates.collect::<Result<Vec<_>, _>>().map_err(refused)?);
            path.display().to_string()
        }
    };
    if store.is_empty() { Err(ConnectError::NoRoots { place }) } else { Ok(store) }
}

/// What `sslmode=require` means in libpq: whoever answers is believed, as long as it holds the key of the certificate
/// that it shows. That holds off listeners, and nobody who sits in between.
#[derive(Debug)]
struct Anyone(Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
