//! TLS on the ports of a real daemon: who is served and who is not, and files that are invalid or change.

mod clients;
mod files;
mod no_protocol;
mod records;

use crate::daemon::{Daemon, PATIENCE, Setup, eventually_async};
use crate::data::plain_blocks;
use crate::exposition::Scrape;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
use ringfetch_client::{AdminClient, Client, Error, Tls};
use rustix::process::Signal;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{
    ClientConfig, HandshakeKind, ProtocolVersion, RootCertStore, SupportedProtocolVersion, crypto, version,
};

/// An authority that signs certificates.
pub(crate) struct Authority(pub(crate) CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, PEM.
pub(crate) struct Pair {
    pub(crate) chain: String,
    pub(crate) key: String,
}

impl Pair {
    /// Of no authority.
    fn signed_by_itself() -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "itself");
        let key = KeyPair::generate().unwrap();
        Self {
            chain: params.self_signed(&key).unwrap().pem(),
            key: key.serialize_pem(),
        }
    }
}

impl Authority {
    pub(crate) fn new() -> Self {
        Self::until(4000)
    }

    fn until(last_year: i32) -> Self {
        Self::between(1975, last_year)
    }

    fn between(first_year: i32, last_year: i32) -> Self {
        let mut params = CertificateParams::default();
        params.not_before = date_time_ymd(first_year, 1, 1);
        params.not_after = date_time_ymd(last_year, 1, 1);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    fn signs(&self, name: &str, first_year: i32, last_year: i32) -> Pair {
        let mut params = CertificateParams::new(["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_before = date_time_ymd(first_year, 1, 1);
        params.not_after = date_time_ymd(last_year, 1, 1);
        let key = KeyPair::generate().unwrap();
        Pair {
            chain: params.signed_by(&key, &self.0).unwrap().pem(),
            key: key.serialize_pem(),
        }
    }

    /// A certificate for a daemon or a client here.
    pub(crate) fn pair(&self, name: &str) -> Pair {
        self.signs(name, 2020, 2200)
    }

    /// A connection of TLS 1.3 to a port, with these protocols.
    async fn connect(&self, port: SocketAddr, alpn: &[&str]) -> tokio_rustls::client::TlsStream<TcpStream> {
        let stream = TcpStream::connect(port).await.unwrap();
        let connector = self.connector(&[&version::TLS13], alpn);
        connector
            .connect(ServerName::from(port.ip()), stream)
            .await
            .unwrap()
    }

    /// Handshakes with chosen versions and protocols.
    pub(crate) fn connector(
        &self,
        versions: &[&'static SupportedProtocolVersion],
        alpn: &[&str],
    ) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(self.pem().as_bytes()).unwrap())
            .unwrap();
        let provider = Arc::new(crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions);
        let mut config = builder
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        // For tests that send records of their own.
        config.enable_secret_extraction = true;
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        TlsConnector::from(Arc::new(config))
    }

    /// What a client needs to trust it.
    pub(crate) fn trusted(&self, own: Option<&Pair>) -> Tls {
        let own = own.map(|pair| (pair.chain.as_bytes(), pair.key.as_bytes()));
        Tls::new(Some(self.pem().as_bytes()), own).unwrap()
    }
}

/// A port without TLS in front of one with TLS. Closed when dropped.
pub(crate) struct Door {
    _open: oneshot::Sender<()>,
}

impl Door {
    /// Opens a door to a port; returns it and its address.
    pub(crate) fn open(port: SocketAddr, authority: &Authority, is_http2: bool) -> (Self, SocketAddr) {
        let alpn = if is_http2 { "h2" } else { "http/1.1" };
        let connector = authority.connector(&[&version::TLS13], &[alpn]);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (_open, closed) = oneshot::channel::<()>();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                let accepting = async {
                    while let Ok((stream, _)) = listener.accept().await {
                        tokio::spawn(pass(stream, port, connector.clone()));
                    }
                };
                tokio::select! {
                    _dropped = closed => {}
                    () = accepting => {}
                }
            });
        });
        (Self { _open }, address)
    }
}

/// Passes a connection through. One that fails is closed, as it would be without the door.
async fn pass(mut stream: TcpStream, port: SocketAddr, connector: TlsConnector) {
    let Ok(behind) = TcpStream::connect(port).await else {
        return;
    };
    let nodelay = stream.set_nodelay(true).and_then(|()| behind.set_nodelay(true));
    if let (Ok(()), Ok(mut behind)) = (
        nodelay,
        connector.connect(ServerName::from(port.ip()), behind).await,
    ) {
        let _ended = tokio::io::copy_bidirectional(&mut stream, &mut behind).await;
    }
}

/// A daemon's certificate and key, in its directory.
pub(crate) fn with_tls(setup: Setup, pair: &Pair) -> Setup {
    write(&setup.path(""), pair);
    setup
        .set("tls.certificate", "chain.pem")
        .set("tls.key", "key.pem")
}

fn write(directory: &Path, pair: &Pair) {
    for (name, text) in [("chain.pem", &pair.chain), ("key.pem", &pair.key)] {
        fs::write(directory.join("next"), text).unwrap();
        fs::rename(directory.join("next"), directory.join(name)).unwrap();
    }
}

pub(crate) async fn client(address: SocketAddr, tls: Tls) -> Result<Client, Error> {
    Client::builder(format!("https://{address}"))
        .tls(tls)
        .connect()
        .await
}

/// A file and another section.
fn with_section(pem: &str, label: &str) -> String {
    format!("{pem}-----BEGIN {label}-----\nMAoCAQ==\n-----END {label}-----\n")
}

/// Whether a client is served.
async fn is_served(daemon: &Daemon, tls: Tls) -> bool {
    let Ok(client) = client(daemon.grpc, tls).await else {
        return false;
    };
    client.fetch_blocks("blocks", &[1]).await.is_ok()
}

/// A GET with HTTP/1.1: status line, head and body.
pub(crate) async fn get(address: SocketAddr, tls: &Tls, path: &str, head: &str) -> String {
    let stream = TcpStream::connect(address).await.unwrap();
    let mut stream = tls.connect_http1("127.0.0.1", stream).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{head}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

async fn metric(daemon: &Daemon, tls: &Tls, line: &str) -> bool {
    get(daemon.http, tls, "/metrics", "").await.contains(line)
}

/// A handshake with chosen versions; returns what was negotiated.
async fn handshake(
    address: SocketAddr,
    authority: &Authority,
    versions: &[&'static SupportedProtocolVersion],
    alpn: &[&str],
) -> std::io::Result<(ProtocolVersion, Option<String>, CertificateDer<'static>)> {
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::from(address.ip());
    let stream = authority.connector(versions, alpn).connect(name, stream).await?;
    let session = stream.get_ref().1;
    let alpn = session
        .alpn_protocol()
        .map(|name| String::from_utf8(name.to_vec()).unwrap());
    let first = session.peer_certificates().unwrap()[0].clone().into_owned();
    Ok((session.protocol_version().unwrap(), alpn, first))
}

#[tokio::test]
async fn every_port_speaks_tls_and_nothing_else() {
    // Scenario: a daemon with a certificate, in files as servers share them, with parameters and the key; clients of each
    // port with its authority, with another one, without TLS, with an older version, with and without ALPN. Expectation: the
    // first are served, small and large responses; the others are not, and are counted; the health check passes.
    let authority = Authority::new();
    let (setup, blocks) = plain_blocks(Setup::new("pread"), 1024);
    let Pair { chain, key } = authority.pair("daemon");
    let bundle = Pair {
        chain: with_section(&[&chain[..], &key].concat(), "DH PARAMETERS"),
        key: [with_section("", "EC PARAMETERS"), key].concat(),
    };
    let daemon = with_tls(setup, &bundle).set("tls.min_version", "TLS1.3").start();
    let tls = authority.trusted(None);
    let reads = client(daemon.grpc, tls.clone()).await.unwrap();
    let all: Vec<u64> = (0..512).collect();
    for indices in [&all[..1], &all] {
        let answer = reads.fetch_blocks("blocks", indices).await.unwrap();
        for (index, block) in indices.iter().zip(answer.iter()) {
            let at = usize::try_from(*index).unwrap() * 4096;
            assert_eq!(block.unwrap()[..], blocks[at..at + 4096]);
        }
    }
    let admin = AdminClient::from(client(daemon.admin, tls.clone()).await.unwrap());
    assert_eq!(admin.status().await.unwrap().state, "serving");
    assert!(
        get(daemon.http, &tls, "/v1/datasets", "")
            .await
            .contains("\"blocks\"")
    );

    assert!(!is_served(&daemon, Authority::new().trusted(None)).await);
    let plain = Client::builder(format!("http://{}", daemon.grpc)).connect().await;
    let plain = match plain {
        Ok(client) => client.fetch_blocks("blocks", &[1]).await.err(),
        Err(error) => Some(error),
    };
    assert!(plain.is_some());
    let old = handshake(daemon.http, &authority, &[&version::TLS12], &[]).await;
    assert!(old.is_err());
    let both = [&version::TLS13, &version::TLS12];
    for (address, offered, agreed) in [
        (daemon.grpc, &["h2"][..], Ok(Some("h2"))),
        (daemon.grpc, &["http/1.1"], Err(())),
        (daemon.http, &["h2", "http/1.1"], Ok(Some("h2"))),
        (daemon.http, &["http/1.1"], Ok(Some("http/1.1"))),
        (daemon.http, &[], Ok(None)),
    ] {
        let shaken = handshake(address, &authority, &both, offered).await;
        let alpn = shaken.map(|(version, alpn, _)| {
            assert_eq!(version, ProtocolVersion::TLSv1_3);
            alpn
        });
        assert_eq!(
            alpn.as_ref().map(Option::as_deref).map_err(|_| ()),
            agreed,
            "{offered:?}"
        );
    }
    eventually_async("failures are counted", async || {
        let text = get(daemon.http, &tls, "/metrics", "").await;
        let failed = [("transport", "grpc"), ("result", "failed")];
        (Scrape { text }.sum("ringfetch_tls_handshakes_total", &failed) >= 3).then_some(())
    })
    .await;
    let http = daemon.http.to_string();
    let checked = daemon.command(&["--http-listen", &http, "healthcheck"]);
    assert!(checked.status.success(), "{checked:?}");
    daemon.stop().await;
}

#[tokio::test]
async fn no_session_is_resumed() {
    // Scenario: a client that resumes sessions if it can connects twice with each version, and reads a response each time.
    // Expectation: each handshake is a full one, so that no client is served by what it was before a file changed.
    let authority = Authority::new();
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = with_tls(setup, &authority.pair("daemon")).start();
    for version in [&version::TLS13, &version::TLS12] {
        let connector = authority.connector(&[version], &["http/1.1"]);
        for _ in 0..2 {
            let stream = TcpStream::connect(daemon.http).await.unwrap();
            let name = ServerName::from(daemon.http.ip());
            let mut stream = connector.connect(name, stream).await.unwrap();
            stream
                .write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                .await
                .unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            assert!(answer.starts_with(b"HTTP/1.1 200"));
            let handshake = stream.get_ref().1.handshake_kind();
            assert_eq!(handshake, Some(HandshakeKind::Full), "{version:?}");
        }
    }
    daemon.stop().await;
}

#[tokio::test]
async fn a_drain_ends_tls_in_order() {
    // Scenario: connections that are idle after a response, one over each protocol, when the daemon drains.
    // Expectation: each sees the end of TLS, not only of the socket, which would be a truncation; the drain
    // is clean.
    let authority = Authority::new();
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = with_tls(setup, &authority.pair("daemon")).start();
    let mut idle = Vec::new();
    for (alpn, words) in [
        ("http/1.1", &b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"[..]),
        ("h2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"),
    ] {
        let mut stream = authority.connect(daemon.http, &[alpn]).await;
        stream.write_all(words).await.unwrap();
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
        idle.push(stream);
    }
    let hear_out = async |mut stream: tokio_rustls::client::TlsStream<TcpStream>| {
        stream.read_to_end(&mut Vec::new()).await.unwrap();
    };
    let [first, second] = <[_; 2]>::try_from(idle).unwrap();
    tokio::join!(daemon.stop(), hear_out(first), hear_out(second));
}

#[tokio::test]
async fn a_client_needs_a_certificate_where_it_is_required() {
    // Scenario: an authority for clients and one client's own certificate, which signs itself, required and optional;
    // clients with no certificate, with one from another authority, with one from this authority, and that client; and the
    // daemon's own health check, which has the daemon's certificate at most, from another authority. Expectation: the last
    // two clients are served, and if it is optional the first too, and the health check; none of this authority once a
    // reload has found another one in its file.
    for (word, without) in [("required", false), ("optional", true)] {
        let (authority, clients) = (Authority::new(), Authority::new());
        let (setup, _) = plain_blocks(Setup::new("pread"), 16);
        let own = Pair::signed_by_itself();
        setup.file("clients.pem", (clients.pem() + &own.chain).as_bytes());
        let daemon = with_tls(setup, &authority.pair("daemon"))
            .set("tls.client_ca", "clients.pem")
            .set("tls.client_certificates", word)
            .start();
        assert_eq!(is_served(&daemon, authority.trusted(None)).await, without);
        assert!(!is_served(&daemon, authority.trusted(Some(&authority.pair("stranger")))).await);
        assert!(is_served(&daemon, authority.trusted(Some(&clients.pair("client")))).await);
        assert!(is_served(&daemon, authority.trusted(Some(&own))).await);
        let checked = daemon.command(&["--http-listen", &daemon.http.to_string(), "healthcheck"]);
        assert_eq!(checked.status.success(), without, "{word}: {checked:?}");
        fs::write(daemon.path("clients.pem"), Authority::new().pem()).unwrap();
        daemon.signal(Signal::HUP);
        eventually_async("the authority is gone", async || {
            let client = authority.trusted(Some(&clients.pair("client")));
            (!is_served(&daemon, client).await).then_some(())
        })
        .await;
        daemon.stop().await;
    }
}

#[tokio::test]
async fn new_keys_on_an_idle_connection_are_no_head() {
    // Scenario: an HTTP/1.1 client changes its keys after a response; heads have a short timeout. Expectation: once half a head
    // on another connection has been closed for it, the client gets another response.
    let authority = Authority::new();
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = with_tls(setup, &authority.pair("daemon"))
        .set("engine.cores", "1")
        .set("timeouts.head_ms", "300")
        .start();
    let request = b"HEAD /livez HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut idle = authority.connect(daemon.http, &["http/1.1"]).await;
    for is_last in [false, true] {
        idle.write_all(request).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(idle.read_u8().await.unwrap());
        }
        if !is_last {
            idle.get_mut().1.refresh_traffic_keys().unwrap();
            idle.flush().await.unwrap();
            let mut half = authority.connect(daemon.http, &["http/1.1"]).await;
            half.write_all(&request[..9]).await.unwrap();
            // It is closed.
            let _end = half.read(&mut [0]).await;
        }
    }
    daemon.stop().await;
}

#[tokio::test]
async fn who_leaves_without_a_byte_has_failed_no_handshake() {
    // Scenario: probes connect and leave, and one connection is silent when the daemon drains; the same, and a client that
    // speaks no TLS. Expectation: nothing is logged; one failure is counted, of that client.
    let authority = Authority::new();
    let pair = authority.pair("daemon");
    let start = || {
        let (setup, _) = plain_blocks(Setup::new("pread"), 16);
        with_tls(setup, &pair).set("tls.ports", "grpc").start()
    };
    let open = [("transport", "grpc")];
    let mut daemon = start();
    drop(TcpStream::connect(daemon.grpc).await.unwrap());
    let mut silent = TcpStream::connect(daemon.grpc).await.unwrap();
    eventually_async("the silent one is open alone", async || {
        let accepted = daemon.sum("ringfetch_connections", &open).await;
        (accepted == 1).then_some(())
    })
    .await;
    daemon.signal(Signal::TERM);
    assert_eq!(silent.read(&mut [0]).await.unwrap_or(0), 0);
    daemon.ends_with(0).await;
    let log = daemon.log().join("\n");
    assert!(!log.contains("connections were closed"), "{log}");

    let daemon = start();
    for _ in 0..8 {
        drop(TcpStream::connect(daemon.grpc).await.unwrap());
    }
    let mut plain = TcpStream::connect(daemon.grpc).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut told = String::new();
    plain.read_to_string(&mut told).await.unwrap();
    assert!(
        told.starts_with("HTTP/1.1 400 ") && told.contains("https://"),
        "{told}"
    );
    eventually_async("all are gone", async || {
        let is_closed = daemon.closed("grpc", "tls").await > 0;
        (is_closed && daemon.sum("ringfetch_connections", &open).await == 0).then_some(())
    })
    .await;
    let failed = [("transport", "grpc"), ("result", "failed")];
    assert_eq!(daemon.sum("ringfetch_tls_handshakes_total", &failed).await, 1);
    assert_eq!(daemon.closed("grpc", "tls").await, 1);
    daemon.stop().await;
}

#[tokio::test]
async fn handshakes_that_do_not_come_on_are_ended_and_bounded() {
    // Scenario: three silent connections with a limit of two handshakes, while a client connects; after that
    // nobody sends anything. Expectation: the oldest is closed for a newer one, the client is served, the
    // rest time out.
    let authority = Authority::new();
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = with_tls(setup, &authority.pair("daemon"))
        .set("tls.ports", "grpc")
        .set("tls.handshakes", "2")
        .set("timeouts.handshake_ms", "20000")
        .start();
    let mut silent = Vec::new();
    for _ in 0..3 {
        let mut stream = TcpStream::connect(daemon.grpc).await.unwrap();
        // Half of a record header.
        stream.write_all(&[22, 3]).await.unwrap();
        silent.push(stream);
    }
    daemon.has_closed("grpc", "evicted").await;
    assert!(is_served(&daemon, authority.trusted(None)).await);
    let mut byte = [0];
    assert_eq!(silent[0].read(&mut byte).await.unwrap_or(0), 0);
    drop(silent);
    daemon.stop().await;

    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = with_tls(setup, &authority.pair("daemon"))
        .set("tls.ports", "grpc")
        .set("timeouts.handshake_ms", "200")
        .start();
    let mut silent = TcpStream::connect(daemon.grpc).await.unwrap();
    let ended = tokio::time::timeout(PATIENCE, silent.read(&mut byte))
        .await
        .unwrap();
    assert_eq!(ended.unwrap_or(0), 0);
    assert!(daemon.closed("grpc", "handshake").await > 0);
    daemon.stop().await;
}
