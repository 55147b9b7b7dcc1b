//! Certificates with any names, written byte by byte: rustls verifies them, and the daemon reads the names.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _};
use std::sync::Arc;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const INTEGER: u8 = 0x02;
const BOOLEAN: u8 = 0x01;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const OID: u8 = 0x06;
const UTC_TIME: u8 = 0x17;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
const T61_STRING: u8 = 0x14;
const ECDSA_WITH_SHA256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02];
const EC_PUBLIC_KEY: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
const P256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
const ALTERNATIVE_NAMES: &[u8] = &[0x55, 0x1d, 0x11];
const BASIC_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 0x13];

/// The authority's own name.
const AUTHORITY: &[u8] = b"the authority";

/// A name in a certificate: its kind, and any bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Name {
    pub kind: Kind,
    pub bytes: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Uri,
    Dns,
    Email,
    Address,
    /// In the subject, UTF-8.
    Common,
    /// In the subject, a PrintableString, which may contain invalid bytes.
    CommonPrintable,
    /// In the subject, of a type whose character set is ambiguous.
    CommonT61,
}

impl Kind {
    /// The kind for a letter.
    pub fn of(letter: u8) -> Option<Self> {
        Some(match letter {
            b'u' => Self::Uri,
            b'd' => Self::Dns,
            b'e' => Self::Email,
            b'i' => Self::Address,
            b'c' => Self::Common,
            b'p' => Self::CommonPrintable,
            b't' => Self::CommonT61,
            _ => return None,
        })
    }

    /// The tag among the alternative names, or that of a string of the subject.
    fn place(self) -> Result<u8, u8> {
        match self {
            Self::Email => Ok(0x81),
            Self::Dns => Ok(0x82),
            Self::Uri => Ok(0x86),
            Self::Address => Ok(0x87),
            Self::Common => Err(UTF8_STRING),
            Self::CommonPrintable => Err(PRINTABLE_STRING),
            Self::CommonT61 => Err(T61_STRING),
        }
    }
}

/// A tag, the length and the concatenated parts.
fn der(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let length = content.len();
    let mut out = vec![tag];
    match length {
        0..=127 => out.push(length as u8),
        128..=255 => out.extend([0x81, length as u8]),
        _ => out.extend([0x82, (length >> 8) as u8, length as u8]),
    }
    out.extend(content);
    out
}

fn common_name(tag: u8, bytes: &[u8]) -> Vec<u8> {
    let attribute = der(SEQUENCE, &[&der(OID, &[COMMON_NAME]), &der(tag, &[bytes])]);
    der(SET, &[&attribute])
}

fn extension(oid: &[u8], critical: bool, value: &[u8]) -> Vec<u8> {
    let critical = if critical {
        der(BOOLEAN, &[&[0xff]])
    } else {
        Vec::new()
    };
    der(
        SEQUENCE,
        &[&der(OID, &[oid]), &critical, &der(OCTET_STRING, &[value])],
    )
}

/// Signs certificates, all for its own key.
pub struct Authority {
    key: EcdsaKeyPair,
    pkcs8: Vec<u8>,
    random: SystemRandom,
    certificate: Vec<u8>,
}

impl Authority {
    pub fn new() -> Self {
        let random = SystemRandom::new();
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random).unwrap();
        let pkcs8 = pkcs8.as_ref().to_vec();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &pkcs8, &random).unwrap();
        let mut authority = Self {
            key,
            pkcs8,
            random,
            certificate: Vec::new(),
        };
        let is_authority = der(SEQUENCE, &[&der(BOOLEAN, &[&[0xff]])]);
        let constraints = extension(BASIC_CONSTRAINTS, true, &is_authority);
        authority.certificate = authority.signed(&common_name(UTF8_STRING, AUTHORITY), &constraints);
        authority
    }

    fn signed(&self, subject: &[u8], extensions: &[u8]) -> Vec<u8> {
        let algorithm = der(SEQUENCE, &[&der(OID, &[ECDSA_WITH_SHA256])]);
        let validity = [b"200101000000Z", b"490101000000Z"].map(|time| der(UTC_TIME, &[time]));
        let key_type = der(SEQUENCE, &[&der(OID, &[EC_PUBLIC_KEY]), &der(OID, &[P256])]);
        let key = der(BIT_STRING, &[&[0], self.key.public_key().as_ref()]);
        let extensions = match extensions {
            b"" => Vec::new(),
            extensions => der(0xa3, &[&der(SEQUENCE, &[extensions])]),
        };
        let body = der(
            SEQUENCE,
            &[
                &der(0xa0, &[&der(INTEGER, &[&[2]])]),
                &der(INTEGER, &[&[1]]),
                &algorithm,
                &der(SEQUENCE, &[&common_name(UTF8_STRING, AUTHORITY)]),
                &der(SEQUENCE, &[&validity.concat()]),
                &der(SEQUENCE, &[subject]),
                &der(SEQUENCE, &[&key_type, &key]),
                &extensions,
            ],
        );
        let signature = self.key.sign(&self.random, &body).unwrap();
        der(
            SEQUENCE,
            &[&body, &algorithm, &der(BIT_STRING, &[&[0], signature.as_ref()])],
        )
    }

    pub fn certificate(&self, names: &[Name]) -> Vec<u8> {
        let (mut subject, mut alternatives) = (Vec::new(), Vec::new());
        for name in names {
            match name.kind.place() {
                Ok(tag) => alternatives.extend(der(tag, &[&name.bytes])),
                Err(tag) => subject.extend(common_name(tag, &name.bytes)),
            }
        }
        let extensions = match &alternatives[..] {
            b"" => Vec::new(),
            alternatives => extension(ALTERNATIVE_NAMES, false, &der(SEQUENCE, &[alternatives])),
        };
        self.signed(&subject, &extensions)
    }

    /// PEM files: the authority's certificate, one for a server at 127.0.0.1, and the key of both.
    pub fn files(&self) -> [String; 3] {
        let pem = |label: &str, bytes: &[u8]| {
            let text = BASE64_STANDARD.encode(bytes);
            format!("-----BEGIN {label}-----\n{text}\n-----END {label}-----\n")
        };
        let server = self.certificate(&[Name {
            kind: Kind::Address,
            bytes: vec![127, 0, 0, 1],
        }]);
        [
            pem("CERTIFICATE", &self.certificate),
            pem("CERTIFICATE", &server),
            pem("PRIVATE KEY", &self.pkcs8),
        ]
    }

    /// A client that trusts the authority and has a certificate with these names; `protocol`: h2 or http/1.1.
    pub fn client(&self, names: &[Name], protocol: &str) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from(self.certificate.clone())).unwrap();
        let chain = vec![CertificateDer::from(self.certificate(names))];
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.pkcs8.clone()));
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let mut config = builder
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .unwrap();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        TlsConnector::from(Arc::new(config))
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}
