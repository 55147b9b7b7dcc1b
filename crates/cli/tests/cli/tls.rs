//! Commands over TLS: the fake daemon behind a TLS proxy.

use crate::connections::serve;
use crate::flaw::Flaw;
use crate::server::start;
use crate::{command, http, word};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

/// Whose certificate a server has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Server,
    Authority,
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    authority_of(KeyPair::generate().unwrap())
}

/// All have the same name.
fn authority_of(key: KeyPair) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, key).unwrap()
}

/// Terminates TLS and forwards each connection to the server of its protocol. Only for clients with a
/// certificate of its authority, whose files it writes.
fn door(of: Of, grpc: SocketAddr, http: SocketAddr, directory: &Path) -> SocketAddr {
    let authority = authority();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    for (name, text) in [
        ("ca", authority.pem()),
        ("cert", certificate.pem()),
        ("key", key.serialize_pem()),
    ] {
        std::fs::write(directory.join(name), text).unwrap();
    }
    let (presented, key) = match of {
        Of::Server => (certificate.der().clone(), &key),
        Of::Authority => (authority.der().clone(), authority.key()),
    };
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone()).unwrap();
    let provider = Arc::new(default_provider());
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(clients.build().unwrap())
        .with_single_cert(
            vec![presented],
            PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    serve(async move |listener| {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    return;
                };
                let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                let behind = if is_http2 { grpc } else { http };
                let mut behind = TcpStream::connect(behind).await.unwrap();
                // Ends with either side.
                let _ended = tokio::io::copy_bidirectional(&mut stream, &mut behind).await;
            });
        }
    })
}

#[test]
fn commands_and_load_reach_a_daemon_over_tls() {
    // Scenario: reads and load over gRPC, streams and HTTP with all three files; then without one or another
    // of them; then on a host without authorities. Expectation: success, every byte verified; otherwise a failure, or a
    // usage error if a file is missing.
    let host = tempfile::tempdir().unwrap();
    let authorities = host.path().join("authorities");
    std::fs::write(&authorities, authority().pem()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let address = door(Of::Server, start(Flaw::NONE), http::start(), directory.path());
    let run = |args: &str, files: &[&str]| {
        let mut line = format!("--timeout 30s {args}");
        if !args.contains("--grpc") {
            line.push_str(&format!(" --grpc https://{address}"));
        }
        for file in files {
            line.push_str(&format!(" --{file} {}", word(directory.path().join(file))));
        }
        let mut command = command(None, &line);
        command
            .env("SSL_CERT_FILE", &authorities)
            .env_remove("SSL_CERT_DIR");
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let all = ["ca", "cert", "key"];
    let get = "get block blocks 3";
    assert_eq!(run(get, &all), (Some(0), String::new()));
    for transport in ["grpc", "stream", "http"] {
        let load = format!(
            "load --http https://{address} --transport {transport} --dataset blocks --batch 4 --requests 40 --verify"
        );
        assert_eq!(run(&load, &all).0, Some(0), "{:?}", run(&load, &all));
    }
    for (files, code, said) in [
        (&all[..2], 2, "belong together"),
        (&all[..1], 1, ""),
        (&["cert", "key"][..], 1, "TLS"),
        (&[], 1, "TLS"),
    ] {
        let (found, error) = run(get, files);
        assert!(
            found == Some(code) && error.contains(said),
            "{files:?}: {found:?} {error}"
        );
    }
    // RFC 3986, section 3.1: a scheme may be in capitals. Without files, the host's authorities are trusted.
    let capitals = format!("{get} --grpc HTTPS://{address}");
    assert_eq!(run(&capitals, &all), (Some(0), String::new()));
    let plain = format!(
        "--grpc HTTP://{} --dataset blocks --requests 1",
        start(Flaw::NONE)
    );
    let load = format!("load {plain} --transport http --http HTTPS://{address}");
    for args in [&capitals, &load] {
        let (code, error) = run(args, &[]);
        assert!(
            code == Some(1) && error.contains("--ca names the authority"),
            "{error}"
        );
    }
    std::fs::remove_file(&authorities).unwrap();
    for (args, files) in [(get, &[][..]), (get, &["cert", "key"]), (&load, &[])] {
        let (code, error) = run(args, files);
        let said = error.starts_with("ringfetch: --ca: this host's authorities cannot be used (");
        assert!(
            said && code == Some(1) && error.contains("/authorities'"),
            "{error}"
        );
    }
    std::fs::write(&authorities, authority().pem()).unwrap();
    for (files, said) in [
        (&["cert", "key"][..], "--ca names the authority"),
        (&["ca"], "--cert and --key"),
    ] {
        let (code, error) = run(get, files);
        assert!(code == Some(1) && error.contains(said), "{error}");
    }
    for (address, said) in [
        (format!("--grpc http://{address}"), "use https://"),
        (format!("--grpc https://{}", start(Flaw::NONE)), "use http://"),
        (
            format!("--grpc https://localhost:{}", address.port()),
            "a name of its certificate",
        ),
    ] {
        let (code, error) = run(&format!("{get} {address}"), &all);
        assert!(code == Some(1) && error.contains(said), "{error}");
    }
    let load = format!("load --dataset blocks --http http://{address}");
    let (code, error) = run(&load, &all);
    assert!(code == Some(1) && error.contains("use https://"), "{error}");
    // An authority of the same name with another key, as after its renewal, and with one of another kind.
    let another_kind = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    for other in [authority(), authority_of(another_kind)] {
        std::fs::write(directory.path().join("ca"), other.pem()).unwrap();
        let (code, error) = run(get, &all);
        assert!(
            code == Some(1) && error.contains("--ca names the authority"),
            "{error}"
        );
    }
    // What `openssl req -x509` makes by default, in the place of a server's certificate.
    let own = tempfile::tempdir().unwrap();
    let own_address = door(Of::Authority, start(Flaw::NONE), http::start(), own.path());
    let ca = word(own.path().join("ca"));
    let (code, error) = run(&format!("{get} --grpc https://{own_address} --ca {ca}"), &[]);
    assert!(
        code == Some(1) && error.contains("basicConstraints=critical,CA:FALSE"),
        "{error}"
    );
    std::fs::write(directory.path().join("key"), "no key").unwrap();
    let (code, error) = run(get, &all);
    assert!(
        code == Some(2) && error.contains("--key: ") && error.contains("/key: is no private key"),
        "{error}"
    );
    std::fs::remove_file(directory.path().join("ca")).unwrap();
    let (code, error) = run(get, &all);
    assert!(code == Some(2) && error.contains("--ca"), "{error}");
}
