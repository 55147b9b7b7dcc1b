//! Access control on the ports of a real daemon: who may read what over every interface, and what happens
//! when that changes.

mod careless;
mod certificates;
mod changes;
mod rates;
mod roads;

use roads::{grpc_roads, http_roads};

use crate::daemon::{Daemon, PATIENCE, Setup, eventually_async};
use crate::data::plain_blocks;
use crate::tls::{Authority, with_tls};
use crate::wire::{self, Answer, Wire, channel};
use http::Method;
use ring::digest::{SHA256, digest};
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_service_client::FetchServiceClient;
use ringfetch_proto::v1::fetch_stream_request::Request as OneOf;
use ringfetch_proto::v1::fetch_stream_response::Response;
use rustix::process::Signal;
use serde_json::json;
use std::fmt::Write as _;
use std::fs;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::timeout;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Request, Status, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;

/// The hash of a token, as the principals file has it.
pub(crate) fn hash(token: &str) -> String {
    let mut text = String::new();
    for byte in digest(&SHA256, token.as_bytes()).as_ref() {
        write!(text, "{byte:02x}").unwrap();
    }
    text
}

/// Lines of the principals file, from (principal, token, rights).
pub(crate) fn lines(of: &[(&str, &str, &str)]) -> String {
    let line =
        |(name, token, rights): &(&str, &str, &str)| format!("{name} sha256:{} {rights}\n", hash(token));
    of.iter().map(line).collect()
}

/// Serves the datasets `blocks`, `hidden`, `vectors` and `objects` to these principals.
fn served(principals: &str) -> Setup {
    let (setup, _) = plain_blocks(Setup::new("pread"), 64);
    setup.file("objects/a", b"an object");
    setup.file("vectors.bin", &[0; 64]);
    setup.file("principals", principals.as_bytes());
    setup
        .dataset(&["{name: hidden, kind: blocks, block_bytes: 4KiB, path: blocks.bin}"])
        .dataset(&["{name: vectors, kind: vectors, path: vectors.bin, layout: raw, dim: 4, dtype: f32}"])
        .dataset(&["name: objects", "kind: objects", "path: objects"])
        .set("access.principals", "principals")
}

/// Adds the dataset `wide` of vectors of `dim` f32, in `wide.bin`.
fn with_wide(setup: Setup, dim: u32) -> Setup {
    let dim = format!("dim: {dim}");
    setup.dataset(&[
        "name: wide",
        "kind: vectors",
        "path: wide.bin",
        "layout: raw",
        &dim,
        "dtype: f32",
    ])
}

fn rewrite(daemon: &Daemon, principals: &str) {
    fs::write(daemon.path("next"), principals).unwrap();
    fs::rename(daemon.path("next"), daemon.path("principals")).unwrap();
}

/// A message with a token, unless that is empty.
fn with<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if !token.is_empty() {
        let value = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", value);
    }
    request
}

async fn get(daemon: &Daemon, token: &str, path: &str) -> Answer {
    let value = format!("Bearer {token}");
    let header = [("authorization", &value[..])];
    let headers = if token.is_empty() { &[][..] } else { &header };
    daemon.http_client().get_with(path, headers).await
}

async fn read(daemon: &Daemon, token: &str, dataset: &str) -> Result<(), Code> {
    let answer = daemon
        .fetch()
        .await
        .fetch_blocks(with(token, wire::blocks(dataset, &[1])))
        .await;
    let grpc = answer.map(drop).map_err(|status| status.code());
    let mirrored = get(daemon, token, &format!("/v1/datasets/{dataset}/blocks/1")).await;
    let status = match grpc {
        Ok(()) => 200,
        Err(Code::Unauthenticated) => 401,
        Err(Code::PermissionDenied) => 403,
        Err(Code::NotFound) => 404,
        Err(other) => panic!("{other:?}"),
    };
    assert_eq!(mirrored.status, status, "{mirrored:?}");
    grpc
}

#[tokio::test]
async fn a_principal_sees_its_datasets_and_no_other_by_any_road() {
    // Scenario: a principal with rights to two of four datasets, and to one that is not served. It uses every
    // interface of both transports, on a dataset that it may not read and on one that does not exist; the
    // same without a token and with a wrong one. Expectation: what it may read is served and listed, also in
    // errors. Everything else is refused, in the same way for both names, as it is for unknown clients. No
    // secret is in the log, which has all the expected lines.
    let principals = lines(&[
        ("reader", "reader's", "blocks,objects,gone"),
        ("all", "all's", "*"),
    ]);
    let daemon = served(&principals).set("log.filter", "trace").start();
    assert_eq!(read(&daemon, "reader's", "blocks").await, Ok(()));
    assert_eq!(read(&daemon, "all's", "hidden").await, Ok(()));
    for (token, code) in [
        ("reader's", Code::PermissionDenied),
        ("", Code::Unauthenticated),
        ("stranger's", Code::Unauthenticated),
    ] {
        let hidden = http_roads(&daemon, token, "hidden").await;
        assert_eq!(hidden, http_roads(&daemon, token, "absent").await);
        let status = if code == Code::PermissionDenied {
            "403"
        } else {
            "401"
        };
        assert!(
            hidden.iter().all(|answer| answer.starts_with(status)),
            "{hidden:#?}"
        );
        let hidden = grpc_roads(&daemon, token, "hidden").await;
        assert_eq!(hidden, grpc_roads(&daemon, token, "absent").await);
        assert!(hidden.iter().all(|(found, _)| *found == code), "{hidden:#?}");
    }
    let known = grpc_roads(&daemon, "all's", "absent").await;
    assert!(
        known.iter().all(|(code, _)| *code == Code::NotFound),
        "{known:#?}"
    );
    for (token, names) in [
        ("reader's", "blocks, objects"),
        ("all's", "blocks, hidden, objects, vectors"),
    ] {
        let gone = get(&daemon, token, "/v1/datasets/gone").await;
        gone.is_problem(
            404,
            "dataset-not-found",
            Some("dataset"),
            &[&format!("there are: {names}")],
        );
        let listed = daemon
            .datasets()
            .await
            .list_datasets(with(token, v1::ListDatasetsRequest::default()))
            .await;
        let listed = listed.unwrap().into_inner().datasets;
        let listed: Vec<_> = listed.iter().map(|dataset| &dataset.name[..]).collect();
        assert_eq!(listed.join(", "), names);
        let mirrored = get(&daemon, token, "/v1/datasets").await.json();
        let mirrored: Vec<_> = mirrored["datasets"]
            .as_array()
            .unwrap()
            .iter()
            .map(|dataset| dataset["name"].as_str().unwrap())
            .collect();
        assert_eq!(mirrored.join(", "), names);
    }
    let log = daemon.log().join("\n");
    for secret in ["reader's", "all's", "stranger's", &hash("reader's")] {
        assert!(!log.contains(secret), "{secret}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn metrics_status_and_administration_need_their_roles() {
    // Scenario: principals with one dataset, with all, with each role, and anonymous clients; the operators'
    // resources on every port, existing and not; the probes. Expectation: each resource is only for its
    // roles; probes are for everyone.
    let principals = lines(&[
        ("reader", "reader", "blocks"),
        ("all", "all", "*"),
        ("watcher", "watcher", "@metrics"),
        ("root", "root", "@admin"),
    ]);
    // Administration needs its principal, whether or not anonymous clients are allowed.
    let daemon = served(&principals).start();
    for (token, metrics, admin) in [
        ("", 401, Code::Unauthenticated),
        ("reader", 403, Code::PermissionDenied),
        ("all", 200, Code::PermissionDenied),
        ("watcher", 200, Code::PermissionDenied),
        ("root", 200, Code::Ok),
    ] {
        for path in [
            "/metrics",
            "/v1/status",
            "/",
            "/page/script.js",
            "/nonsense",
            "/metrics/",
            "//metrics",
            "/%6detrics",
        ] {
            let status = get(&daemon, token, path).await.status.as_u16();
            assert_eq!(
                if status == 404 { 200 } else { status },
                metrics,
                "{token} {path}"
            );
        }
        let known = if token.is_empty() { 401 } else { 200 };
        assert_eq!(get(&daemon, token, "/openapi.json").await.status, known);
        for path in ["/livez", "/readyz"] {
            assert_eq!(get(&daemon, token, path).await.status, 200);
        }
        let reflection = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let reflected = ServerReflectionClient::new(channel(daemon.grpc).await)
            .server_reflection_info(with(token, tokio_stream::iter([reflection])))
            .await;
        let refused = reflected.err().map(|status| status.code());
        assert_eq!(refused, token.is_empty().then_some(Code::Unauthenticated));
        let mut operator = daemon.admin_client().await;
        let answer = operator.get_status(with(token, v1::GetStatusRequest {})).await;
        assert_eq!(
            answer.err().map_or(Code::Ok, |status| status.code()),
            admin,
            "{token}"
        );
        for address in [daemon.grpc, daemon.admin] {
            let asked = with(token, HealthCheckRequest::default());
            HealthClient::new(channel(address).await)
                .check(asked)
                .await
                .unwrap();
        }
    }
    assert_eq!(read(&daemon, "root", "blocks").await, Err(Code::PermissionDenied));
    let refused = get(&daemon, "", "/metrics").await;
    refused.is_problem(401, "unauthenticated", None, &["Bearer TOKEN"]);
    assert_eq!(refused.header("www-authenticate"), "Bearer realm=\"ringfetch\"");
    let metrics = get(&daemon, "watcher", "/metrics").await;
    let text = String::from_utf8_lossy(&metrics.body).into_owned();
    assert!(!text.contains("requests_refused_total{reason=\"forbidden\",transport=\"admin\"} 0"));
    assert!(!text.contains(&hash("watcher")[..8]), "{text}");
    daemon.stop().await;
}

#[tokio::test]
async fn anonymous_clients_are_those_that_a_key_names() {
    // Scenario: principals, and anonymous access from this host or from everywhere. Expectation: anonymous
    // clients read everything and administer nothing; an invalid token is still refused.
    for word in ["loopback", "everybody"] {
        let daemon = served(&lines(&[("reader", "reader", "blocks")]))
            .set("access.anonymous", word)
            .start();
        assert_eq!(read(&daemon, "", "hidden").await, Ok(()));
        assert_eq!(
            read(&daemon, "reader", "hidden").await,
            Err(Code::PermissionDenied)
        );
        assert_eq!(read(&daemon, "wrong", "blocks").await, Err(Code::Unauthenticated));
        assert_eq!(get(&daemon, "", "/metrics").await.status, 200);
        let status = daemon
            .admin_client()
            .await
            .get_status(v1::GetStatusRequest {})
            .await;
        assert_eq!(status.unwrap_err().code(), Code::Unauthenticated);
        daemon.stop().await;
    }
}

#[test]
fn a_port_beyond_loopback_needs_a_word_about_who_may_read() {
    // Scenario: ports on all interfaces without `access.anonymous`, with `everybody`, and with `nobody`,
    // without and with principals. Expectation: exit code 2 with keys and remedies, or a valid configuration.
    let (setup, _) = plain_blocks(Setup::new("pread"), 4);
    setup.file("principals", lines(&[("a", "a", "*")]).as_bytes());
    let setup = setup
        .set("http.listen", "0.0.0.0:0")
        .set("admin.listen", "[::]:0");
    let refused = setup.refused();
    let remedy = "set access.anonymous to everybody";
    refused.with(
        2,
        &["http.listen: is reachable", "admin.listen: is reachable", remedy],
    );
    assert!(!refused.said.contains("grpc.listen"), "{}", refused.said);
    let setup = setup.set("access.anonymous", "everybody");
    setup.run(&["check-config"]).with(0, &[]);
    let setup = setup.set("access.anonymous", "nobody");
    setup.refused().with(
        2,
        &[
            "access.anonymous: is nobody, but access.principals is off",
            "name a file",
        ],
    );
    let setup = setup.set("access.principals", "principals");
    setup.run(&["check-config", "--open"]).with(0, &[]);
    let daemon = setup.start();
    daemon.logged(&["tokens reach this port in plain text", "http"]);
    drop(daemon);
    // Verified client certificates are enough, on a port with TLS.
    let (setup, _) = plain_blocks(Setup::new("pread"), 4);
    let authority = Authority::new();
    setup.file("clients.pem", authority.pem().as_bytes());
    let setup = with_tls(setup, &authority.pair("daemon")).set("tls.client_ca", "clients.pem");
    let setup = setup.set("http.listen", "0.0.0.0:0");
    setup.run(&["check-config", "--open"]).with(0, &[]);
    let setup = setup.set("tls.ports", "grpc");
    setup.refused().with(2, &["http.listen: is reachable"]);
}

/// A principal's open stream.
struct Stream {
    ask: UnboundedSender<v1::FetchStreamRequest>,
    answers: Streaming<v1::FetchStreamResponse>,
}

impl Stream {
    async fn open(daemon: &Daemon, token: &str) -> Self {
        Self::open_on(&mut daemon.fetch().await, token).await
    }

    async fn open_on(client: &mut FetchServiceClient<Wire>, token: &str) -> Self {
        let (ask, asked) = unbounded_channel();
        let request = with(token, UnboundedReceiverStream::new(asked));
        let answers = client.fetch_stream(request).await.unwrap().into_inner();
        let mut stream = Self { ask, answers };
        stream.answers_one().await.unwrap();
        stream
    }

    async fn answers_one(&mut self) -> Result<(), Status> {
        let code = self.asked("blocks").await?;
        assert_eq!(code, Code::Ok);
        Ok(())
    }

    async fn asked(&mut self, dataset: &str) -> Result<Code, Status> {
        let request = wire::on_stream(1, OneOf::Blocks(wire::blocks(dataset, &[1])));
        self.ask.send(request).unwrap();
        match self.answers.message().await?.expect("an answer").response {
            Some(Response::Blocks(_)) => Ok(Code::Ok),
            Some(Response::Status(status)) => Ok(Code::from_i32(status.code)),
            other => panic!("{other:?}"),
        }
    }

    /// Waits for the end without sending anything.
    async fn ends(mut self) {
        let end = timeout(PATIENCE, self.answers.message()).await;
        assert!(!matches!(end.expect("an end"), Ok(Some(_))));
    }
}

#[tokio::test]
async fn requests_on_one_connection_have_each_their_own_rights() {
    // Scenario: a stream of one principal on a connection, and on the same connection calls by another
    // principal, by an anonymous client and with an unknown token; the same over HTTP/1.1; then the first
    // one's token is removed. Expectation: each request has the rights of its own token, whatever preceded
    // it; the stream ends, although others have used the connection since.
    let (first, second) = (("first", "first's", "blocks"), ("second", "second's", "hidden"));
    let daemon = served(&lines(&[first, second])).start();
    let mut client = daemon.fetch().await;
    let mut stream = Stream::open_on(&mut client, "first's").await;
    for _ in 0..3 {
        for (token, dataset, code) in [
            ("second's", "hidden", None),
            ("first's", "hidden", Some(Code::PermissionDenied)),
            ("second's", "blocks", Some(Code::PermissionDenied)),
            ("first's", "blocks", None),
            ("", "blocks", Some(Code::Unauthenticated)),
            ("stranger's", "blocks", Some(Code::Unauthenticated)),
            ("second's", "hidden", None),
        ] {
            let call = client.fetch_blocks(with(token, wire::blocks(dataset, &[1])));
            assert_eq!(
                call.await.err().map(|status| status.code()),
                code,
                "{token} {dataset}"
            );
        }
        assert_eq!(stream.asked("blocks").await.unwrap(), Code::Ok);
        assert_eq!(stream.asked("hidden").await.unwrap(), Code::PermissionDenied);
    }
    let mut wire = TcpStream::connect(daemon.http).await.unwrap();
    for (token, status) in [
        ("second's", "200"),
        ("first's", "403"),
        ("second's", "200"),
        ("", "401"),
    ] {
        let request = format!(
            "HEAD /v1/datasets/hidden/blocks/1 HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n"
        );
        wire.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            answer.push(wire.read_u8().await.unwrap());
        }
        let answer = String::from_utf8(answer).unwrap();
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{token}: {answer}"
        );
    }
    rewrite(&daemon, &lines(&[second]));
    daemon.signal(Signal::HUP);
    stream.ends().await;
    daemon.stop().await;
}
