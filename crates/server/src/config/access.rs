//! The section `access`: access control, and whether clients may be anonymous.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use super::tls::{ClientCertificates, TlsConfig};
use super::walk::Section;

const WORDS: [(&str, Anonymous); 3] = [
    ("nobody", Anonymous::Nobody),
    ("loopback", Anonymous::Loopback),
    ("everybody", Anonymous::Everybody),
];
const ANONYMOUS_KEY: &str = "access.anonymous";
const PRINCIPALS_KEY: &str = "access.principals";

/// Who may read without a credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anonymous {
    /// No client.
    Nobody,
    /// Clients on this host.
    Loopback,
    /// Every client.
    Everybody,
}

/// Access control.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessConfig {
    /// The file of principals; `None`: clients are not distinguished.
    pub principals: Option<PathBuf>,
    /// Who may be anonymous.
    pub anonymous: Anonymous,
}

pub(super) fn read(
    mut section: Section<'_>,
    directory: &Path,
    tls: Option<&TlsConfig>,
    listeners: [(&'static str, &'static str, Option<SocketAddr>); 3],
) -> AccessConfig {
    let walk = section.walk();
    let principals = section.path_or_off("principals", directory);
    let default = if principals.is_some() {
        Anonymous::Nobody
    } else {
        Anonymous::Loopback
    };
    let anonymous = section.word("anonymous", default, &WORDS);
    section.finish();
    walk.report_conflict(
        ANONYMOUS_KEY,
        PRINCIPALS_KEY,
        principals.is_none() && anonymous == Anonymous::Nobody,
        format!("is nobody, but {PRINCIPALS_KEY} is off: no client could read"),
        format!("name a file of principals in {PRINCIPALS_KEY}"),
    );
    for (port, key, address) in listeners {
        let is_beyond = address.is_some_and(|address| !address.ip().to_canonical().is_loopback());
        // Then a certificate signed by the authorities is what admits clients.
        let is_verified = tls.is_some_and(|tls| {
            tls.covers(port)
                && tls.client_ca.is_some()
                && tls.client_certificates == ClientCertificates::Required
        });
        walk.report_conflict(
            key,
            ANONYMOUS_KEY,
            is_beyond && principals.is_none() && anonymous == Anonymous::Loopback && !is_verified,
            format!("is reachable from other hosts, but {ANONYMOUS_KEY} is loopback: any client there could read"),
            format!(
                "listen on loopback, name a file of principals in {PRINCIPALS_KEY}, or set {ANONYMOUS_KEY} to everybody"
            ),
        );
    }
    AccessConfig {
        principals,
        anonymous,
    }
}
