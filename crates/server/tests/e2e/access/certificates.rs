//! Principals that are recognized by their certificates.

use super::*;
use crate::tls::{Pair, client};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, GeneralSubtree, IsCa, KeyPair,
    NameConstraints, SanType,
};

impl Authority {
    /// An authority below this one, which may sign only for DNS names below `domain`.
    fn of_domain(&self, domain: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, domain);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: vec![GeneralSubtree::DnsName(domain.to_owned())],
            excluded_subtrees: Vec::new(),
        });
        Self(CertifiedIssuer::signed_by(params, KeyPair::generate().unwrap(), &self.0).unwrap())
    }

    /// A client's certificate with this alternative name, after which comes the authority's.
    fn names(&self, name: SanType) -> Pair {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "client");
        params.subject_alt_names.push(name);
        let key = KeyPair::generate().unwrap();
        Pair {
            chain: params.signed_by(&key, &self.0).unwrap().pem() + &self.pem(),
            key: key.serialize_pem(),
        }
    }
}

#[tokio::test]
async fn certificates_are_principals_by_their_names() {
    // Scenario: clients with a certificate that the file names, with one whose common name equals an
    // alternative name in the file, and without one; then the line is removed. Expectation: the first reads
    // what its line allows and no more, the others nothing; then it reads nothing either.
    let (authority, clients) = (Authority::new(), Authority::new());
    let setup = served(
        &(lines(&[("root", "root", "*")])
            + "reader certificate:CN=reader.example blocks\nother certificate:stranger.example *\n"),
    );
    setup.file("clients.pem", clients.pem().as_bytes());
    let daemon = with_tls(setup, &authority.pair("daemon"))
        .set("tls.client_ca", "clients.pem")
        .set("tls.client_certificates", "optional")
        .start();
    let reads = async |own: Option<&str>, dataset: &str| {
        let own = own.map(|name| clients.pair(name));
        let client = client(daemon.grpc, authority.trusted(own.as_ref()))
            .await
            .unwrap();
        let read = client.fetch_blocks(dataset, &[1]).await;
        read.map(drop).map_err(|error| error.to_string().to_lowercase())
    };
    reads(Some("reader.example"), "blocks").await.unwrap();
    for (own, dataset, said) in [
        (Some("reader.example"), "hidden", "may not read"),
        (Some("stranger.example"), "blocks", "no valid credential"),
        (None, "blocks", "no valid credential"),
    ] {
        let refused = reads(own, dataset).await.unwrap_err();
        assert!(refused.contains(said), "{refused}");
    }
    rewrite(&daemon, &lines(&[("root", "root", "*")]));
    eventually_async("the certificate is no principal any more", async || {
        let refused = reads(Some("reader.example"), "blocks").await.err()?;
        refused.contains("no valid credential").then_some(())
    })
    .await;
    daemon.stop().await;

    let setup = served("reader certificate:reader.example blocks\n");
    setup
        .refused()
        .with(2, &["access.principals", "line 1", "tls.client_ca is off"]);
}

#[tokio::test]
async fn a_name_of_one_kind_is_not_taken_for_one_of_another() {
    // Scenario: principals with a DNS name and with a URI. An authority below the clients' one, which may sign only for DNS
    // names of a tenant, signs each of these names as the other kind, and as its own. Expectation: a name counts only as
    // what it is: authorities restrict the kinds of names separately.
    let (authority, clients) = (Authority::new(), Authority::new());
    let tenant = clients.of_domain("tenant.example");
    let setup = served(
        "reader certificate:reader.example blocks\nworkload certificate:spiffe://example/reader blocks\n",
    );
    setup.file("clients.pem", clients.pem().as_bytes());
    let daemon = with_tls(setup, &authority.pair("daemon"))
        .set("tls.client_ca", "clients.pem")
        .start();
    let dns = |name: &str| SanType::DnsName(name.try_into().unwrap());
    let uri = |name: &str| SanType::URI(name.try_into().unwrap());
    let (domain, workload) = ("reader.example", "spiffe://example/reader");
    for (signer, name, said) in [
        (&clients, dns(domain), None),
        (&clients, uri(workload), None),
        (&tenant, uri(domain), Some("no valid credential")),
        (&clients, uri(domain), Some("no valid credential")),
        (&clients, dns(workload), Some("no valid credential")),
    ] {
        let own = signer.names(name.clone());
        let client = client(daemon.grpc, authority.trusted(Some(&own))).await.unwrap();
        let read = client.fetch_blocks("blocks", &[1]).await;
        let refused = read.err().map(|error| error.to_string().to_lowercase());
        match (&refused, said) {
            (None, None) => {}
            (Some(refused), Some(said)) if refused.contains(said) => {}
            other => panic!("{name:?}: {other:?}"),
        }
    }
    daemon.stop().await;
}
