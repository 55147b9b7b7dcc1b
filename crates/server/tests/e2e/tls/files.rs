//! Files of certificates, keys and authorities that change, end or are invalid.

use super::{Authority, client, handshake, is_served, metric, with_section, with_tls, write};
use crate::daemon::{Setup, eventually_async};
use crate::data::plain_blocks;
use crate::reload::reload;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rcgen::date_time_ymd;
use rustix::process::Signal;
use std::fs;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::version;

#[tokio::test]
async fn files_that_change_are_used_and_no_connection_notices() {
    // Scenario: new certificates, by SIGHUP and by the daemon's own check; then invalid files of each kind.
    // Expectation: handshakes see the new certificate, metrics its end, an older connection continues; a reload with invalid
    // files fails completely and names the key, and the old certificate stays, as it does when the daemon
    // checks by itself.
    let authority = Authority::new();
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = with_tls(setup, &authority.pair("first"))
        .set("tls.ports", "grpc,http")
        .start();
    let tls = authority.trusted(None);
    let old = client(daemon.grpc, tls.clone()).await.unwrap();
    let served = async |authority: &Authority| {
        let shaken = handshake(daemon.grpc, authority, &[&version::TLS12], &["h2"]).await;
        shaken.unwrap().2
    };
    let first = served(&authority).await;
    for (signal, last_year) in [(Some(Signal::HUP), 2100), (None, 2101)] {
        let before = served(&authority).await;
        write(&daemon.path(""), &authority.signs("next", 2020, last_year));
        if let Some(signal) = signal {
            daemon.signal(signal);
        }
        eventually_async("the new certificate is used", async || {
            (served(&authority).await != before).then_some(())
        })
        .await;
        old.fetch_blocks("blocks", &[3]).await.unwrap();
        let expires = date_time_ymd(last_year, 1, 1).unix_timestamp();
        let expires = format!("ringfetch_tls_certificate_expiry_timestamp_seconds {expires}\n");
        assert!(metric(&daemon, &tls, &expires).await, "{expires}");
    }
    let good = served(&authority).await;
    assert_ne!(first, good);
    let other = authority.pair("other");
    let (chain, key) = (&daemon.path("chain.pem"), &daemon.path("key.pem"));
    let right = [
        fs::read_to_string(chain).unwrap(),
        fs::read_to_string(key).unwrap(),
    ];
    for (path, text, named) in [
        (key, other.key.as_str(), "tls.key"),
        (key, "", "tls.key"),
        (chain, "not a certificate", "tls.certificate"),
        (
            chain,
            &authority.signs("old", 2020, 2021).chain,
            "tls.certificate",
        ),
        (chain, &[&right[0][..], &right[0]].concat(), "tls.certificate"),
        (
            chain,
            &with_section(&right[0], "CERTIFICATE REQUEST"),
            "holds a section \"CERTIFICATE REQUEST\"",
        ),
    ] {
        fs::write(path, text).unwrap();
        let refused = reload(&daemon).await.unwrap_err();
        assert!(refused.message().contains(named), "{refused:?}");
        assert!(!refused.message().contains("PRIVATE"), "{refused:?}");
        assert_eq!(served(&authority).await, good);
        fs::write(chain, &right[0]).unwrap();
        fs::write(key, &right[1]).unwrap();
    }
    fs::remove_file(key).unwrap();
    daemon.logged(&[
        "the TLS files cannot be used; the old ones stay in force",
        "key.pem",
    ]);
    assert_eq!(served(&authority).await, good);
    assert!(!metric(&daemon, &tls, "ringfetch_tls_loads_total{result=\"failed\"} 0").await);
    daemon.stop().await;
}

#[tokio::test]
async fn an_authority_that_expires_is_seen_before_and_keeps_no_renewal_out() {
    // Scenario: authorities of clients, of which one expires before the daemon's certificate; then one that has expired and one that is
    // not valid yet, next to a good one, and a renewed certificate of the daemon. Expectation: the metric shows the end of the first one; the
    // renewed certificate is used, the log names the authority that is left out, as check-config does, and clients of the
    // other one are served.
    let authority = Authority::new();
    let [clients, short, expired] = [4000, 2050, 2021].map(Authority::until);
    let early = Authority::between(3000, 4000);
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    setup.file("clients.pem", [clients.pem(), short.pem()].concat().as_bytes());
    let daemon = with_tls(setup, &authority.signs("first", 2020, 2100))
        .set("tls.client_ca", "clients.pem")
        .set("tls.client_certificates", "optional")
        .set("tls.ports", "grpc,http")
        .start();
    let anonymous = authority.trusted(None);
    let ends_in = async |year| {
        let end = date_time_ymd(year, 1, 1).unix_timestamp();
        let line = format!("ringfetch_tls_certificate_expiry_timestamp_seconds {end}\n");
        metric(&daemon, &anonymous, &line).await
    };
    assert!(ends_in(2050).await);
    let authorities = [expired.pem(), clients.pem(), early.pem()].concat();
    fs::write(daemon.path("next"), authorities).unwrap();
    fs::rename(daemon.path("next"), daemon.path("clients.pem")).unwrap();
    write(&daemon.path(""), &authority.signs("second", 2020, 2101));
    reload(&daemon).await.unwrap();
    assert!(ends_in(2101).await);
    daemon.logged(&[
        "an authority of clients has expired and is left out",
        "clients.pem: certificate 1 has expired",
    ]);
    daemon.logged(&[
        "an authority of clients is not valid yet and is left out until it is",
        "clients.pem: certificate 3 is not valid before",
    ]);
    let checked = daemon.command(&["check-config", "--open"]);
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success(), "{said}");
    assert!(said.contains("clients.pem: certificate 1 has expired"), "{said}");
    assert!(is_served(&daemon, authority.trusted(Some(&clients.pair("client")))).await);
    assert!(!is_served(&daemon, authority.trusted(Some(&expired.pair("client")))).await);
    daemon.stop().await;
}

#[test]
fn bad_files_are_refused_at_the_start() {
    // Scenario: files that are missing, empty, expired, not valid yet, with a certificate twice, of another
    // key, with two keys, with a passphrase (of PKCS#8, and older), of a kind that is not supported, not PEM, in the wrong
    // order, an authority whose key is of such a kind, with a byte order mark (which hides the first certificate), joined
    // without a line break, with a section of another kind: a certificate in another form, a revocation list, a request, a key
    // among authorities; and a certificate without a key. Expectation: exit code 2, or 3 for what may pass (the clock, files
    // that are being replaced), before a port is bound, and from check-config; key, file and remedy; no byte of a key.
    let authority = Authority::new();
    let good = authority.pair("daemon");
    let twice = good.chain.repeat(2);
    let keys = [&good.key[..], &authority.pair("other").key].concat();
    let expired = authority.signs("daemon", 2020, 2021);
    let early = authority.signs("daemon", 2199, 2200);
    // PKCS#8, whose 57 bytes of key are zero.
    let ed448 = ["MEcCAQAwBQYDK2VxBDsEOQ", &"A".repeat(76), "=="].concat();
    let ed448 = format!("-----BEGIN PRIVATE KEY-----\n{ed448}\n-----END PRIVATE KEY-----\n");
    let authority_first = [authority.pem(), good.chain.clone()].concat();
    let marked = ["\u{feff}", &authority.pem(), &Authority::new().pem()].concat();
    let joined = [authority.pem().trim_end(), &Authority::new().pem()].concat();
    let chain_joined = [good.chain.trim_end(), &authority.pem()].concat();
    let marked_later = [&authority.pem(), "\u{feff}", &Authority::new().pem()].concat();
    let labelled = Authority::new()
        .pem()
        .replace(" CERTIFICATE-", " TRUSTED CERTIFICATE-");
    let labelled = [authority.pem(), labelled].concat();
    let encrypted = good.key.replace(" PRIVATE KEY-", " ENCRYPTED PRIVATE KEY-");
    let begin = "-----BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\n";
    let encrypted_before = good.key.replace("-----BEGIN PRIVATE KEY-----\n", begin);
    let encrypted_before = encrypted_before.replace("END PRIVATE", "END EC PRIVATE");
    // Its curve, P-256, becomes P-192, which has an object identifier of the same length.
    let mut weak = CertificateDer::from_pem_slice(authority.pem().as_bytes())
        .unwrap()
        .to_vec();
    let curve = [0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7];
    let at = weak
        .windows(curve.len())
        .position(|bytes| bytes == curve)
        .unwrap();
    weak[at + curve.len() - 1] = 1;
    let weak = format!(
        "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n",
        BASE64_STANDARD.encode(weak)
    );
    let weak = [authority.pem(), weak].concat();
    let keys_joined = [good.key.trim_end(), &authority.pair("other").key].concat();
    for (file, text, said) in [
        ("key.pem", None, "cannot be read"),
        ("key.pem", Some(""), "is empty"),
        (
            "key.pem",
            Some(&authority.pair("other").key[..]),
            "does not match the certificate",
        ),
        ("key.pem", Some(&keys), "more than one private key"),
        (
            "key.pem",
            Some(&keys_joined),
            "is not recognized as the first or last line of a PEM section",
        ),
        ("key.pem", Some("nonsense"), "holds no private key"),
        ("key.pem", Some(&encrypted), "has a passphrase"),
        ("key.pem", Some(&encrypted_before), "has a passphrase"),
        ("key.pem", Some(&ed448), "is of no kind that is supported"),
        (
            "chain.pem",
            Some(&authority_first),
            "put the server's certificate before",
        ),
        ("chain.pem", None, "cannot be read"),
        ("chain.pem", Some(""), "is empty"),
        ("chain.pem", Some(&good.key), "holds no certificate"),
        ("chain.pem", Some(&twice), "holds certificate 2 twice"),
        ("chain.pem", Some(&expired.chain), "has expired"),
        ("chain.pem", Some(&early.chain), "is not valid before"),
        ("clients.pem", Some(&early.chain), "is not valid before"),
        ("clients.pem", Some(""), "is empty"),
        ("clients.pem", Some(&expired.chain), "has expired"),
        ("clients.pem", Some(&marked), "begins with a byte order mark"),
        (
            "clients.pem",
            Some(&joined),
            "is not recognized as the first or last line of a PEM section",
        ),
        (
            "clients.pem",
            Some(&marked_later),
            "is not recognized as the first or last line of a PEM section",
        ),
        (
            "clients.pem",
            Some(&labelled),
            "holds a section \"TRUSTED CERTIFICATE\"",
        ),
        (
            "chain.pem",
            Some(&chain_joined),
            "is not recognized as the first or last line of a PEM section",
        ),
        (
            "clients.pem",
            Some(&with_section(&authority.pem(), "X509 CRL")),
            "revocation lists are not supported",
        ),
        (
            "clients.pem",
            Some(&[&authority.pem(), &good.key[..]].concat()),
            "holds a section \"PRIVATE KEY\"",
        ),
        (
            "chain.pem",
            Some(&with_section(&good.chain, "CERTIFICATE REQUEST")),
            "holds a section \"CERTIFICATE REQUEST\"",
        ),
        (
            "key.pem",
            Some(&with_section(&good.key, "X509 CRL")),
            "holds a section \"X509 CRL\"",
        ),
        (
            "clients.pem",
            Some(&good.chain),
            "certificate 1 is not an authority's",
        ),
        (
            "clients.pem",
            Some(&weak),
            "certificate 2 has a key whose signatures cannot be verified",
        ),
    ] {
        let (setup, _) = plain_blocks(Setup::new("pread"), 4);
        setup.file("clients.pem", authority.pem().as_bytes());
        let setup = with_tls(setup, &good).set("tls.client_ca", "clients.pem");
        match text {
            None => fs::remove_file(setup.path(file)).unwrap(),
            Some(text) => fs::write(setup.path(file), text).unwrap(),
        }
        for refused in [setup.refused(), setup.run(&["check-config", "--open"])] {
            let may_pass = [
                "cannot be read",
                "is empty",
                "does not match the certificate",
                "put the server's certificate before",
                "is not valid before",
            ];
            let code = if may_pass.contains(&said) { 3 } else { 2 };
            refused.with(code, &["tls.", file, said]);
            let mut base64 = text.unwrap_or_default().lines().filter(|line| line.len() > 16);
            let is_repeated = |line: &str| !line.contains("-----") && refused.said.contains(line);
            assert!(!base64.any(is_repeated), "{}", refused.said);
        }
    }
    let (setup, _) = plain_blocks(Setup::new("pread"), 4);
    let half = setup.set("tls.certificate", "chain.pem").refused();
    half.with(2, &["tls.certificate", "tls.key is off"]);
}
