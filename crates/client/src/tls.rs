//! TLS towards servers at `https://` URLs, with rustls.

use crate::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// Trusted authorities, and this client's certificate. Clones share it.
#[derive(Clone)]
pub struct Tls {
    http2: Arc<ClientConfig>,
    http1: Arc<ClientConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

impl Tls {
    /// Trusts the authorities in `ca` (PEM), or, without it, the host's. Presents the certificate chain and
    /// its private key, both PEM, to servers that ask for one.
    ///
    /// # Errors
    /// `Invalid` if one of them cannot be used, or none of the host's authorities. Errors never contain bytes of a key.
    pub fn new(ca: Option<&[u8]>, certificate: Option<(&[u8], &[u8])>) -> Result<Self, Error> {
        let mut roots = RootCertStore::empty();
        match ca {
            Some(pem) => {
                for authority in certificates("ca", pem)? {
                    let added = roots.add(authority);
                    added.map_err(|error| Error::invalid("ca", error.to_string()))?;
                }
            }
            None => add_host_authorities(&mut roots)?,
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::invalid("tls", error.to_string()))?
            .with_root_certificates(roots);
        let mut http2 = match certificate {
            None => builder.with_no_client_auth(),
            Some((chain, key)) => {
                let key = PrivateKeyDer::from_pem_slice(key)
                    .map_err(|_| Error::invalid("key", "is no private key in PEM without a passphrase"))?;
                let config = builder.with_client_auth_cert(certificates("certificate", chain)?, key);
                config.map_err(|error| {
                    Error::invalid("key", format!("does not match the certificate: {error}"))
                })?
            }
        };
        let mut http1 = http2.clone();
        http2.alpn_protocols = vec![HTTP2.to_vec()];
        http1.alpn_protocols = vec![HTTP1.to_vec()];
        Ok(Self {
            http2: Arc::new(http2),
            http1: Arc::new(http1),
        })
    }

    /// A TLS handshake for HTTP/1.1 with the server `host`: a name or an IP address.
    ///
    /// # Errors
    /// `InvalidInput` if `host` is neither; otherwise the error of the handshake.
    pub async fn connect_http1<S>(
        &self,
        host: &str,
        stream: S,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + fmt::Debug + use<S>>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + fmt::Debug,
    {
        connect(&self.http1, host, stream).await
    }

    /// The same for HTTP/2, which the server must agree to.
    pub(crate) async fn connect_http2<S>(
        &self,
        host: &str,
        stream: S,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + use<S>>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin,
    {
        let stream = connect(&self.http2, host, stream).await?;
        if stream.get_ref().1.alpn_protocol() == Some(HTTP2) {
            Ok(stream)
        } else {
            Err(io::Error::other("the server does not speak HTTP/2 there"))
        }
    }
}

async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
    config: &Arc<ClientConfig>,
    host: &str,
    stream: S,
) -> io::Result<tokio_rustls::client::TlsStream<S>> {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    let name = ServerName::try_from(bare.to_owned());
    let name = name.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    TlsConnector::from(Arc::clone(config)).connect(name, stream).await
}

/// The authorities of the host: those of them that can be used.
fn add_host_authorities(roots: &mut RootCertStore) -> Result<(), Error> {
    let found = rustls_native_certs::load_native_certs();
    let mut problems: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
    for authority in found.certs {
        problems.extend(roots.add(authority).err().map(|error| error.to_string()));
    }
    if !roots.is_empty() {
        return Ok(());
    }
    let problem = problems.first().map_or("it has none", String::as_str);
    Err(Error::invalid(
        "tls",
        format!(
            "this host's authorities cannot be used ({problem}): install them (often the package ca-certificates), or give \
             the one that signed the server's certificate"
        ),
    ))
}

fn certificates(field: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|_| Error::invalid(field, "is not valid PEM"))?;
    if found.is_empty() {
        return Err(Error::invalid(field, "holds no certificate in PEM"));
    }
    Ok(found)
}
