//! The client of the daemon's own health check.

use super::CERTIFICATE;
use super::sections::Use;
use crate::config::{ClientCertificates, TlsConfig};
use crate::key_file::KeyFile;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{
    CryptoProvider, ring as provider, verify_tls12_signature, verify_tls13_signature,
};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{
    self, ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned,
};

/// A blocking client for the daemon's own health check. Verifies nothing: it sends no secret to a port of its
/// own host, and the certificate may name none of its addresses. Presents the daemon's certificate if clients
/// need one.
///
/// # Errors
/// The files cannot be used.
pub fn loopback_client<S: io::Read + io::Write>(
    config: &TlsConfig,
    address: IpAddr,
    stream: S,
) -> io::Result<StreamOwned<ClientConnection, S>> {
    let provider = Arc::new(provider::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer(provider)));
    let needs_certificate =
        config.client_ca.is_some() && config.client_certificates == ClientCertificates::Required;
    let client = match needs_certificate {
        false => builder.with_no_client_auth(),
        // One that is optional must be valid too: this one may be of an authority that signs no clients.
        true => {
            let certificate = KeyFile::read(CERTIFICATE, &config.certificate).map_err(io::Error::other)?;
            let key = KeyFile::read("tls.key", &config.key).map_err(io::Error::other)?;
            let chain = certificate.certificates(Use::Server);
            let chain = chain.map_err(io::Error::other)?.chain();
            let key = key.private_key().map_err(io::Error::other)?;
            builder
                .with_client_auth_cert(chain, key)
                .map_err(io::Error::other)?
        }
    };
    let connection =
        ClientConnection::new(Arc::new(client), ServerName::from(address)).map_err(io::Error::other)?;
    Ok(StreamOwned::new(connection, stream))
}

/// Accepts any certificate, if the server has its key.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
