//! TLS of the ports: certificate, key and client authorities from files, read again when they change (ADR
//! 0015).
//!
//! New files are checked completely before they are used; if they are invalid, the old ones stay in force,
//! with a line in the log and a metric. A handshake uses the files in force when it begins, and open
//! connections are not affected. Sessions are not resumed: there is nothing to store, and no ticket outlives
//! the certificate that it came from.

mod clients;
mod loopback;
mod sections;

pub use loopback::loopback_client;

use crate::config::{TlsConfig, TlsVersion};
use crate::key_file::{FileError, KeyFile, Numbered, Rereads, read_first};
use arc_swap::ArcSwap;
use clients::verifier;
use prometheus::{Gauge, IntCounter, IntCounterVec, Opts, Registry};
use ring::digest::{Context, SHA256};
use sections::{PRIVATE_KEY, Use};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring as provider;
use tokio_rustls::rustls::pki_types::pem::{Error as PemError, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::NoServerSessionStorage;
use tokio_rustls::rustls::{ServerConfig, SupportedProtocolVersion, version};
use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;
use x509_parser::time::ASN1Time;

/// The key of the first file.
const CERTIFICATE: &str = "tls.certificate";
/// Most names of a client certificate that are considered.
const CLIENT_NAMES_MAX: usize = 64;
/// Prefix of a common name.
const COMMON_NAME: &str = "CN=";

impl KeyFile<'_> {
    /// The certificates. None occurs twice, and all are valid now, except for authorities of which another one is.
    fn certificates(&self, of: Use) -> Result<Certificates, FileError> {
        const REMEDY: &str = "use PEM, with lines BEGIN CERTIFICATE";
        self.sections(of)?;
        let found = CertificateDer::pem_slice_iter(&self.bytes).collect::<Result<Vec<_>, PemError>>();
        let found = found.map_err(|_| self.error("is not valid PEM", REMEDY))?;
        if found.is_empty() {
            return Err(self.error("holds no certificate", REMEDY));
        }
        let mut valid = Vec::new();
        let mut left_out = Vec::new();
        let (mut expires, mut same) = (i64::MAX, i64::MIN..i64::MAX);
        for (number, certificate) in (1..).zip(&found) {
            if found.iter().take(number - 1).any(|other| other == certificate) {
                return Err(self.error(
                    format!("holds certificate {number} twice"),
                    "leave one of them out",
                ));
            }
            let (_, parsed) = parse_x509_certificate(certificate).map_err(|_| {
                self.error(
                    format!("certificate {number} is not an X.509 certificate"),
                    REMEDY,
                )
            })?;
            let validity = parsed.validity();
            let now = ASN1Time::now();
            if validity.not_after < now {
                let problem = format!("certificate {number} has expired ({})", validity.not_after);
                left_out.push(self.error(problem, "renew it"));
                same.start = same.start.max(validity.not_after.timestamp() + 1);
                continue;
            }
            if validity.not_before > now {
                let problem = format!("certificate {number} is not valid before {}", validity.not_before);
                let problem = self.error(problem, "check the clock, or use another certificate");
                left_out.push(problem.passing());
                same.end = same.end.min(validity.not_before.timestamp());
                continue;
            }
            expires = expires.min(validity.not_after.timestamp());
            valid.push((number, certificate.clone()));
        }
        match left_out.first() {
            Some(first) if of == Use::Server || valid.is_empty() => Err(first.clone()),
            Some(_) | None => Ok(Certificates {
                valid,
                expires,
                same,
                left_out,
            }),
        }
    }

    fn private_key(&self) -> Result<PrivateKeyDer<'static>, FileError> {
        const REMEDY: &str = "use one PEM key (PKCS#8, PKCS#1 or SEC1), without a passphrase";
        let labels = self.sections(Use::Server)?;
        let has_passphrase = |line: &[u8]| {
            line.starts_with(b"-----BEGIN ENCRYPTED ") || line.starts_with(b"Proc-Type: 4,ENCRYPTED")
        };
        if self.bytes.split(|byte| *byte == b'\n').any(has_passphrase) {
            return Err(self.error("has a passphrase", REMEDY));
        }
        // Also those that the parser does not know.
        let in_file = labels.iter().filter(|label| label.ends_with(PRIVATE_KEY)).count();
        let mut keys = PrivateKeyDer::pem_slice_iter(&self.bytes);
        match (keys.next(), keys.next()) {
            (Some(Ok(key)), None) if in_file == 1 => Ok(key),
            (Some(Ok(_)), _) => Err(self.error("holds more than one private key", REMEDY)),
            // The parser's error could quote the file.
            (Some(Err(_)), _) => Err(self.error("is not valid PEM", REMEDY)),
            (None, _) => Err(self.error("holds no private key", REMEDY)),
        }
    }
}

/// The certificates of a file.
struct Certificates {
    /// Each with its number in the file.
    valid: Vec<(usize, CertificateDer<'static>)>,
    /// When the first of those expires, seconds since 1970.
    expires: i64,
    /// While the same are left out, seconds since 1970: until one begins to be valid, or the clock is set back to when an expired
    /// one was.
    same: Range<i64>,
    /// Those that are left out, expired or not valid yet. They must not keep a renewed certificate of the daemon from being
    /// used.
    left_out: Vec<FileError>,
}

impl Certificates {
    fn chain(self) -> Vec<CertificateDer<'static>> {
        self.valid
            .into_iter()
            .map(|(_, certificate)| certificate)
            .collect()
    }
}

/// What handshakes use: for ports with HTTP/2 only, and for those with HTTP/1.1 too.
#[derive(Debug)]
struct Active {
    http2: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
    /// When the first of the certificates expires, seconds since 1970.
    expires: f64,
    /// Authorities that are left out.
    left_out: Vec<FileError>,
    /// As in [`Certificates`].
    same: Range<i64>,
    digest: [u8; 32],
}

/// The files of the configuration.
struct Files<'a> {
    certificate: KeyFile<'a>,
    key: KeyFile<'a>,
    client_ca: Option<KeyFile<'a>>,
    digest: [u8; 32],
}

impl<'a> Files<'a> {
    fn read(config: &'a TlsConfig) -> Result<Self, FileError> {
        let certificate = KeyFile::read(CERTIFICATE, &config.certificate)?;
        let key = KeyFile::read("tls.key", &config.key)?;
        let client_ca = config.client_ca.as_deref();
        let client_ca = client_ca
            .map(|path| KeyFile::read("tls.client_ca", path))
            .transpose()?;
        let mut context = Context::new(&SHA256);
        for file in [Some(&certificate), Some(&key), client_ca.as_ref()]
            .into_iter()
            .flatten()
        {
            context.update(&file.bytes.len().to_le_bytes());
            context.update(&file.bytes);
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(context.finish().as_ref());
        Ok(Self {
            certificate,
            key,
            client_ca,
            digest,
        })
    }
}

impl Active {
    fn read(config: &TlsConfig) -> Result<Self, FileError> {
        Self::of(&Files::read(config)?, config)
    }

    /// `None`: as `before`.
    fn reread(config: &TlsConfig, before: &Self) -> Result<Option<Self>, FileError> {
        let files = Files::read(config)?;
        let is_same = files.digest == before.digest && before.same.contains(&ASN1Time::now().timestamp());
        (!is_same).then(|| Self::of(&files, config)).transpose()
    }

    fn of(files: &Files<'_>, config: &TlsConfig) -> Result<Self, FileError> {
        let Files {
            certificate,
            key,
            client_ca,
            digest,
        } = files;
        let chain = certificate.certificates(Use::Server)?;
        let (mut expires, mut same, mut left_out) = (chain.expires, i64::MIN..i64::MAX, Vec::new());
        let provider = Arc::new(provider::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions(config.min_version))
            .map_err(|error| key.error(error.to_string(), "use other versions"))?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let authorities = file.certificates(Use::Authorities)?;
                expires = expires.min(authorities.expires);
                same.clone_from(&authorities.same);
                left_out.clone_from(&authorities.left_out);
                builder.with_client_cert_verifier(verifier(file, authorities, config, &provider)?)
            }
        };
        let private_key = key.private_key()?;
        let supported = provider.key_provider.load_private_key(private_key.clone_key());
        supported.map_err(|_| {
            key.error(
                "is of no kind that is supported",
                "use a key for RSA (2048 to 4096 bits), P-256, P-384 or Ed25519, and a certificate for it",
            )
        })?;
        let mut http2 = builder.with_single_cert(chain.chain(), private_key).map_err(|error| {
            let first = config.certificate.display();
            key.error(
                format!("does not match the certificate that is first in {first}: {error}"),
                "use that certificate's own key, and put the server's certificate before those of authorities",
            )
            .passing()
        })?;
        http2.session_storage = Arc::new(NoServerSessionStorage {});
        let mut http = http2.clone();
        http2.alpn_protocols = vec![b"h2".to_vec()];
        http.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // Exact to a fraction of a second until 2262.
        #[expect(clippy::cast_precision_loss, reason = "seconds since 1970 are far below 2^53")]
        let expires = expires as f64;
        Ok(Self {
            http2: Arc::new(http2),
            http: Arc::new(http),
            expires,
            left_out,
            same,
            digest: *digest,
        })
    }

    fn log_left_out(&self) {
        for problem in &self.left_out {
            if problem.may_pass {
                tracing::warn!(%problem, "an authority of clients is not valid yet and is left out until it is");
            } else {
                tracing::warn!(%problem, "an authority of clients has expired and is left out");
            }
        }
    }
}

static FROM_12: [&SupportedProtocolVersion; 2] = [&version::TLS13, &version::TLS12];
static FROM_13: [&SupportedProtocolVersion; 1] = [&version::TLS13];

fn versions(min: TlsVersion) -> &'static [&'static SupportedProtocolVersion] {
    match min {
        TlsVersion::Tls12 => &FROM_12,
        TlsVersion::Tls13 => &FROM_13,
    }
}

/// The daemon's TLS configuration. Clones share it.
#[derive(Debug, Clone)]
pub struct Tls {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: TlsConfig,
    active: ArcSwap<Active>,
    rereads: Rereads,
    metrics: Metrics,
}

#[derive(Debug)]
struct Metrics {
    handshakes: IntCounterVec,
    expires: Gauge,
}

impl Metrics {
    fn new() -> Result<Self, prometheus::Error> {
        let handshakes = Opts::new(
            "ringfetch_tls_handshakes_total",
            "TLS handshakes that ended, by result.",
        );
        Ok(Self {
            handshakes: IntCounterVec::new(handshakes, &["transport", "result"])?,
            expires: Gauge::new(
                "ringfetch_tls_certificate_expiry_timestamp_seconds",
                "When the first of the certificates in force expires, authorities of clients included, seconds since 1970.",
            )?,
        })
    }
}

/// Changed files that were read and are valid.
#[derive(Debug)]
pub struct Renewed(Numbered<Active>);

impl Tls {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn load(config: &TlsConfig) -> Result<Self, FileError> {
        let TlsConfig {
            certificate,
            key,
            client_ca,
            ..
        } = config;
        let paths = [Some(certificate), Some(key), client_ca.as_ref()];
        let paths: Vec<_> = paths.into_iter().flatten().map(PathBuf::as_path).collect();
        let active = read_first(&paths, || Active::read(config))?;
        let metrics =
            Metrics::new().map_err(|error| FileError::uncounted(CERTIFICATE, certificate, &error))?;
        let rereads = Rereads::new(
            "ringfetch_tls_loads_total",
            "Loads of changed certificates, keys and authorities, by result. After a failure the old ones stay in force.",
            CERTIFICATE,
            certificate,
        )?;
        metrics.expires.set(active.expires);
        active.log_left_out();
        Ok(Self {
            inner: Arc::new(Inner {
                config: config.clone(),
                active: ArcSwap::from_pointee(active),
                rereads,
                metrics,
            }),
        })
    }

    /// Authorities of clients that are left out since they have expired or are not valid yet.
    pub fn left_out(&self) -> Vec<FileError> {
        self.inner.active.load().left_out.clone()
    }

    /// Registers the metrics.
    ///
    /// # Errors
    /// A name is taken in this registry.
    pub fn register_metrics(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        let Metrics { handshakes, expires } = &self.inner.metrics;
        self.inner.rereads.register_metrics(registry)?;
        registry.register(Box::new(handshakes.clone()))?;
        registry.register(Box::new(expires.clone()))
    }

    /// Most concurrent handshakes per port.
    pub(crate) fn handshakes_max(&self) -> usize {
        usize::try_from(self.inner.config.handshakes).unwrap_or(usize::MAX)
    }

    /// Counters of a port's successful and failed handshakes.
    pub(crate) fn handshake_counters(&self, transport: &str) -> [IntCounter; 2] {
        let counter = |result| {
            self.inner
                .metrics
                .handshakes
                .with_label_values(&[transport, result])
        };
        ["ok", "failed"].map(counter)
    }

    /// The acceptor for handshakes that begin now.
    pub(crate) fn acceptor(&self, http2_only: bool) -> TlsAcceptor {
        let active = self.inner.active.load();
        let config = if http2_only { &active.http2 } else { &active.http };
        TlsAcceptor::from(Arc::clone(config))
    }

    /// Reads the files; `None` if they are unchanged.
    ///
    /// # Errors
    /// A file cannot be used; then nothing has changed.
    pub fn read(&self) -> Result<Option<Renewed>, FileError> {
        let read = self.inner.rereads.read(|same: Option<&Active>| {
            let active = self.inner.active.load();
            Active::reread(&self.inner.config, same.unwrap_or(&active))
        });
        read.map(|active| active.map(Renewed))
    }

    /// Later handshakes use these files.
    pub fn install(&self, Renewed(active): Renewed) {
        self.inner.rereads.install(active, |active| self.replace(active));
    }

    fn replace(&self, active: Active) -> bool {
        let expires = active.expires;
        active.log_left_out();
        self.inner.active.store(Arc::new(active));
        self.inner.metrics.expires.set(expires);
        let certificate = self.inner.config.certificate.display();
        tracing::info!(%certificate, expires, "TLS certificate, key and authorities replaced");
        true
    }

    /// Watches the files and installs them when they change. Never returns.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect on what is in force.
    pub async fn watch(self) {
        let inner = Arc::clone(&self.inner);
        let renew = move || {
            let renewed = self.inner.rereads.check(self.read(), |problem| {
                tracing::error!(%problem, "the TLS files cannot be used; the old ones stay in force");
            });
            renewed.into_iter().for_each(|renewed| self.install(renewed));
        };
        inner.rereads.watch(renew).await;
    }
}

/// Names in a client's verified certificate: its alternative names that are URIs or DNS names, then its
/// common names after `CN=`. No kind can pass for another, since authorities restrict them separately: a URI
/// has a scheme (RFC 5280, 4.2.1.6), and a DNS name no colon.
pub(crate) fn names_of(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, parsed)) = parse_x509_certificate(certificate) else {
        return Vec::new();
    };
    let alternatives = parsed.subject_alternative_name().ok().flatten();
    let alternatives = alternatives.map_or(&[][..], |names| &names.value.general_names);
    let alternatives = alternatives.iter().filter_map(|name| {
        let (name, has_scheme) = if let GeneralName::URI(name) = name {
            (name, true)
        } else if let GeneralName::DNSName(name) = name {
            (name, false)
        } else {
            return None;
        };
        let is_of_its_kind = name.contains(':') == has_scheme && !name.starts_with(COMMON_NAME);
        is_of_its_kind.then(|| (*name).to_owned())
    });
    let common = parsed
        .subject()
        .iter_common_name()
        .filter_map(|name| name.as_str().ok());
    let common = common.map(|name| format!("{COMMON_NAME}{name}"));
    alternatives.chain(common).take(CLIENT_NAMES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair, SanType, date_time_ymd};

    #[test]
    fn who_is_left_out_depends_on_the_clock() {
        // Scenario: an authority until 2021, one from 3000 on, and one that is valid between. Expectation: two are left out now, and
        // the same ones until the year 3000; not in 2021, to which a clock that was ahead may be set back.
        let times = [2020, 2021, 3000, 4000].map(|year| date_time_ymd(year, 1, 1));
        let pem = |from: usize, until: usize| {
            let mut params = CertificateParams::default();
            (params.not_before, params.not_after) = (times[from], times[until]);
            params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem()
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, [pem(0, 1), pem(2, 3), pem(1, 2)].concat()).unwrap();
        let file = KeyFile::read("tls.client_ca", file.path()).unwrap();
        let authorities = file.certificates(Use::Authorities).unwrap();
        assert_eq!((authorities.valid.len(), authorities.left_out.len()), (1, 2));
        let [_, ended, begins, _] = times.map(|time| time.unix_timestamp());
        assert_eq!(authorities.same, ended + 1..begins);
    }

    #[test]
    fn a_name_is_never_taken_for_one_of_another_kind() {
        // Scenario: a certificate with names of each kind, of which some look like those of another kind; bytes that are not a
        // certificate; a certificate with many names. Expectation: URIs and DNS names, then the common name, marked; nothing;
        // the first ones.
        let mut params = CertificateParams::new(["a.example".to_owned(), "192.0.2.1".to_owned()]).unwrap();
        let uris = ["spiffe://b", "CN=root", "CN=root:", "root.example"];
        let uris = uris.map(|uri| SanType::URI(uri.try_into().unwrap()));
        let domains = ["CN=root", "spiffe://root"].map(|name| SanType::DnsName(name.try_into().unwrap()));
        params.subject_alt_names.extend(uris.into_iter().chain(domains));
        params
            .distinguished_name
            .push(DnType::CommonName, "spiffe://root");
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert_eq!(
            names_of(certificate.der()),
            ["a.example", "spiffe://b", "CN=spiffe://root"]
        );
        assert!(names_of(&CertificateDer::from_slice(b"none")).is_empty());
        // Each request may look all of them up.
        let many = CertificateParams::new(vec!["a.example".to_owned(); CLIENT_NAMES_MAX + 1]).unwrap();
        let certificate = many.self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert_eq!(names_of(certificate.der()).len(), CLIENT_NAMES_MAX);
    }
}
