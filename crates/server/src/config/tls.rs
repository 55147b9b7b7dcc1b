//! The section `tls`: the files, and the ports that use them.

use std::path::{Path, PathBuf};

use super::walk::Section;

/// The ports, as `tls.ports` names them.
const PORTS: [&str; 3] = ["grpc", "http", "admin"];
const CLIENT_WORDS: [(&str, ClientCertificates); 2] = [
    ("required", ClientCertificates::Required),
    ("optional", ClientCertificates::Optional),
];
const VERSION_WORDS: [(&str, TlsVersion); 2] = [("TLS1.2", TlsVersion::Tls12), ("TLS1.3", TlsVersion::Tls13)];
const HANDSHAKES: u32 = 1024;

/// Whether clients need a certificate when `tls.client_ca` is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientCertificates {
    /// A connection without one is refused.
    Required,
    /// None is needed, but one that is presented must be valid.
    Optional,
}

/// The lowest version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsVersion {
    /// 1.2 and 1.3.
    Tls12,
    /// 1.3 only.
    Tls13,
}

/// TLS of the ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsConfig {
    /// The server's certificate chain, PEM.
    pub certificate: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
    /// Certificates of the authorities that sign client certificates; `None`: clients need none.
    pub client_ca: Option<PathBuf>,
    /// Whether clients need a certificate.
    pub client_certificates: ClientCertificates,
    /// Lowest version.
    pub min_version: TlsVersion,
    /// Ports with TLS; `None`: all.
    pub ports: Option<Vec<String>>,
    /// Most concurrent handshakes per port.
    pub handshakes: u32,
}

impl TlsConfig {
    /// Whether the port `grpc`, `http` or `admin` has TLS.
    pub fn covers(&self, port: &str) -> bool {
        self.ports
            .as_ref()
            .is_none_or(|ports| ports.iter().any(|name| name == port))
    }
}

fn port_name(name: &str) -> Result<(), String> {
    if PORTS.contains(&name) {
        Ok(())
    } else {
        Err(format!("is {name:?}, which is not one of {}", PORTS.join(", ")))
    }
}

/// `None`: no TLS.
pub(super) fn read(mut section: Section<'_>, directory: &Path) -> Option<TlsConfig> {
    let walk = section.walk();
    let certificate = section.path_or_off("certificate", directory);
    let key = section.path_or_off("key", directory);
    let client_ca = section.path_or_off("client_ca", directory);
    let client_certificates =
        section.word("client_certificates", ClientCertificates::Required, &CLIENT_WORDS);
    let min_version = section.word("min_version", TlsVersion::Tls12, &VERSION_WORDS);
    let ports = section.names_or_word("ports", "all", PORTS.len(), port_name);
    let handshakes = section.small("handshakes", HANDSHAKES, 1..=1 << 16);
    section.finish();
    let (certificate_key, key_key) = ("tls.certificate", "tls.key");
    walk.report_conflict(
        "tls.ports",
        certificate_key,
        ports.as_ref().is_some_and(Vec::is_empty),
        "is empty, so no port has TLS",
        format!("name grpc, http or admin, or set {certificate_key} and {key_key}: off"),
    );
    for (name, is_set, other, other_is_set) in [
        (key_key, key.is_some(), certificate_key, certificate.is_some()),
        (certificate_key, certificate.is_some(), key_key, key.is_some()),
        (
            "tls.client_ca",
            client_ca.is_some(),
            certificate_key,
            certificate.is_some(),
        ),
    ] {
        let problem = format!("is set, but {other} is off");
        let remedy = format!("set {other} too, or turn {name} off");
        walk.report_conflict(name, other, is_set && !other_is_set, problem, remedy);
    }
    Some(TlsConfig {
        certificate: certificate?,
        key: key?,
        client_ca,
        client_certificates,
        min_version,
        ports,
        handshakes,
    })
}
