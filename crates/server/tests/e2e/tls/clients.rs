//! Chains of clients' certificates that are too long, and what a client's own certificate may sign.

use super::{Authority, Pair, client, is_served, with_tls};
use crate::daemon::Setup;
use crate::data::plain_blocks;
use rcgen::{CertificateParams, CertifiedIssuer, CustomExtension, DnType, KeyPair};
use ringfetch_client::Error;

#[tokio::test]
async fn a_chain_that_is_too_long_is_refused() {
    // Scenario: clients with a good certificate and behind it eight that nobody needs, nine, empty ones, and one of 16 KiB.
    // Expectation: the first is served; rustls would keep the others' chains as long as their connections.
    let (authority, clients) = (Authority::new(), Authority::new());
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    setup.file("clients.pem", clients.pem().as_bytes());
    let daemon = with_tls(setup, &authority.pair("daemon"))
        .set("tls.client_ca", "clients.pem")
        .start();
    let mut large = CertificateParams::default();
    let content = vec![0; 16 << 10];
    large
        .custom_extensions
        .push(CustomExtension::from_oid_content(&[1, 2, 3, 4], content));
    let large = large.self_signed(&KeyPair::generate().unwrap()).unwrap().pem();
    let empty = "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n";
    for (junk, served) in [
        (clients.pem().repeat(8), true),
        (clients.pem().repeat(9), false),
        (empty.repeat(5000), false),
        (large, false),
    ] {
        let mut client = clients.pair("client");
        client.chain.push_str(&junk);
        let length = junk.len();
        assert_eq!(
            is_served(&daemon, authority.trusted(Some(&client))).await,
            served,
            "{length}"
        );
    }
    daemon.stop().await;
}

#[tokio::test]
async fn a_certificate_that_is_refused_is_not_presented_again() {
    // Scenario: a client with no certificate, one with a certificate of another authority, and one that trusts another authority
    // than the daemon's. Expectation: a call fails, and says that it would again, so that it is not retried.
    let (authority, clients, other) = (Authority::new(), Authority::new(), Authority::new());
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    setup.file("clients.pem", clients.pem().as_bytes());
    let daemon = with_tls(setup, &authority.pair("daemon"))
        .set("tls.client_ca", "clients.pem")
        .start();
    for tls in [
        authority.trusted(None),
        authority.trusted(Some(&other.pair("client"))),
        other.trusted(Some(&clients.pair("client"))),
    ] {
        let error = client(daemon.grpc, tls).await.unwrap_err();
        assert!(matches!(error, Error::Transport { .. }), "{error:?}");
        assert!(!error.is_retryable(), "{error:?}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn a_clients_own_certificate_signs_for_nobody_else() {
    // Scenario: a file with a client's own certificate, alone and next to an authority's; another client whose certificate
    // that client has signed, alone and followed by its own. Expectation: only the client itself is served.
    let authority = Authority::new();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "itself");
    let key = KeyPair::generate().unwrap();
    let own_key = key.serialize_pem();
    let issuer = CertifiedIssuer::self_signed(params, key).unwrap();
    let own = Pair {
        chain: issuer.pem(),
        key: own_key,
    };
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "root");
    let key = KeyPair::generate().unwrap();
    let forged = Pair {
        chain: params.signed_by(&key, &issuer).unwrap().pem(),
        key: key.serialize_pem(),
    };
    let followed = Pair {
        chain: [&forged.chain[..], &own.chain].concat(),
        key: forged.key.clone(),
    };
    for others in [String::new(), Authority::new().pem()] {
        let (setup, _) = plain_blocks(Setup::new("pread"), 16);
        setup.file("clients.pem", [&own.chain[..], &others].concat().as_bytes());
        let daemon = with_tls(setup, &authority.pair("daemon"))
            .set("tls.client_ca", "clients.pem")
            .start();
        assert!(is_served(&daemon, authority.trusted(Some(&own))).await);
        for forged in [&forged, &followed] {
            assert!(!is_served(&daemon, authority.trusted(Some(forged))).await);
        }
        daemon.stop().await;
    }
}
