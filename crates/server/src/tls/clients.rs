//! Which certificates of clients are accepted.

use super::Certificates;
use crate::config::{ClientCertificates, TlsConfig};
use crate::key_file::{FileError, KeyFile};
use std::ops::RangeInclusive;
use std::sync::Arc;
use tokio_rustls::rustls::client::danger::HandshakeSignatureValid;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::pki_types::{CertificateDer, TrustAnchor, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};
use x509_parser::parse_x509_certificate;
use x509_parser::public_key::PublicKey;
use x509_parser::x509::X509Version;

/// Most certificates that a client may send after its own one, and most bytes of those: rustls keeps them until the
/// connection closes, also those that it does not need.
const INTERMEDIATES_MAX: usize = 8;
const INTERMEDIATES_BYTES_MAX: usize = 16 << 10;

const REMEDY: &str = "use the certificates of the authorities that sign clients' certificates";

/// Lengths of RSA keys whose signatures `ring` verifies.
const RSA_BITS: RangeInclusive<usize> = 2048..=8192;
const KEY_REMEDY: &str = "use one with a key for RSA (2048 to 8192 bits), P-256, P-384 or Ed25519";

/// Accepts what an authority has signed, and the very certificates in the file that sign themselves.
#[derive(Debug)]
struct Clients {
    /// `None`: the file has no authority.
    signed: Option<Arc<dyn ClientCertVerifier>>,
    /// Single clients' own. They sign for nobody else.
    own: Vec<CertificateDer<'static>>,
    /// Takes every certificate of the file for an authority: only for `own`, and for what does not depend on it.
    all: Arc<dyn ClientCertVerifier>,
}

/// Verifies certificates of clients by those of the file.
///
/// # Errors
/// One of them is neither an authority's nor signed by itself.
pub(super) fn verifier(
    file: &KeyFile<'_>,
    certificates: Certificates,
    config: &TlsConfig,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, FileError> {
    let (mut all, mut authorities, mut own) = (RootCertStore::empty(), RootCertStore::empty(), Vec::new());
    let unusable = |error: Error| {
        file.error(
            format!("holds a certificate that cannot be used as an authority: {error}"),
            REMEDY,
        )
    };
    for (number, certificate) in certificates.valid {
        all.add(certificate.clone()).map_err(unusable)?;
        let parsed = parse_x509_certificate(&certificate);
        let key = parsed
            .as_ref()
            .ok()
            .and_then(|(_, parsed)| parsed.public_key().parsed().ok());
        let known = key.zip(all.roots.last());
        if !known.is_some_and(|(key, anchor)| can_be_verified(anchor, &key, provider)) {
            let problem = format!("certificate {number} has a key whose signatures cannot be verified");
            return Err(file.error(problem, KEY_REMEDY));
        }
        if parsed.as_ref().is_ok_and(|(_, parsed)| parsed.is_ca()) {
            authorities.add(certificate).map_err(unusable)?;
            continue;
        }
        // rustls would take these, the first for an authority.
        if parsed
            .as_ref()
            .is_ok_and(|(_, parsed)| parsed.version() == X509Version::V1)
        {
            let problem = format!(
                "certificate {number} is of version 1, which cannot tell whether it is an authority's"
            );
            return Err(file.error(problem, "make it again as version 3, an authority's with CA:TRUE"));
        }
        if !parsed.is_ok_and(|(_, parsed)| parsed.subject() == parsed.issuer()) {
            let problem = format!("certificate {number} is not an authority's (CA:TRUE)");
            return Err(file.error(problem, REMEDY));
        }
        own.push(certificate);
    }
    let build = |roots| {
        let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
        let builder = match config.client_certificates {
            ClientCertificates::Required => builder,
            ClientCertificates::Optional => builder.allow_unauthenticated(),
        };
        builder
            .build()
            .map_err(|error| file.error(error.to_string(), REMEDY))
    };
    let signed = (!authorities.is_empty())
        .then(|| build(authorities))
        .transpose()?;
    Ok(Arc::new(Clients {
        signed,
        own,
        all: build(all)?,
    }))
}

/// Whether signatures made with the key can be verified. If not, all that it signs is refused.
fn can_be_verified(anchor: &TrustAnchor<'_>, key: &PublicKey<'_>, provider: &CryptoProvider) -> bool {
    if let PublicKey::RSA(key) = key
        && !RSA_BITS.contains(&key.key_size())
    {
        return false;
    }
    // After a tag and a length, of a byte each, the algorithm; then the key.
    let algorithm = anchor.subject_public_key_info.get(2..).unwrap_or_default();
    let mut known = provider.signature_verification_algorithms.all.iter();
    known.any(|known| algorithm.starts_with(&known.public_key_alg_id()))
}

impl ClientCertVerifier for Clients {
    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let bytes: usize = intermediates.iter().map(|certificate| certificate.len()).sum();
        if intermediates.len() > INTERMEDIATES_MAX || bytes > INTERMEDIATES_BYTES_MAX {
            return Err(Error::General(format!(
                "the client sent more than {INTERMEDIATES_MAX} certificates, or {INTERMEDIATES_BYTES_MAX} bytes, after its own"
            )));
        }
        if self.own.iter().any(|own| own == end_entity) {
            return self.all.verify_client_cert(end_entity, &[], now);
        }
        match &self.signed {
            Some(signed) => signed.verify_client_cert(end_entity, intermediates, now),
            None => Err(CertificateError::UnknownIssuer.into()),
        }
    }

    fn offer_client_auth(&self) -> bool {
        self.all.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.all.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.all.root_hint_subjects()
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.all.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.all.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.all.supported_verify_schemes()
    }
}
