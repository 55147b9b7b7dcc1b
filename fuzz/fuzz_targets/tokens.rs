//! A principals file, and requests that it authorizes, over sockets. The file is accepted exactly when an
//! independent interpretation accepts it, each request gets the answer that this interpretation expects, and
//! a refusal repeats nothing of the file.
//!
//! An input is a byte that chooses the ports, a line for each request, an empty line, and the file. A request
//! is a digit (what it asks for), and after each `|` a value of `Authorization`. A line `!` sets the
//! certificate that clients show from then on, over TLS; after each `|` it has a letter (the kind of name)
//! and a name. In the file `$x` is the SHA-256 of the token `x`, any letter.
#![no_main]

use bytes::Bytes;
use http::{HeaderValue, Request, header};
use http_body_util::{BodyExt as _, Full};
use libfuzzer_sys::{Corpus, fuzz_target};
use prost::Message as _;
use ringfetch_fuzz::certificate::{Authority, Kind, Name};
use ringfetch_fuzz::grpc::framed;
use ringfetch_fuzz::principals::{Client, LIMITS, Line, client, hash, read};
use ringfetch_fuzz::socket::{Body, Http1, Http2, http1, http2};
use ringfetch_fuzz::{Answer, WORLD, World, send};
use ringfetch_proto::v1;
use ringfetch_server::access::Access;
use ringfetch_server::config::{AccessConfig, Anonymous, ClientCertificates, TlsConfig, TlsVersion};
use ringfetch_server::http::is_operation;
use ringfetch_server::listener::{ConnectionLimits, CorePool, FastPath, Listener, Port, Role, bind};
use ringfetch_server::tls::Tls;
use serde_json::Value;
use std::cell::RefCell;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use tokio_rustls::TlsConnector;

const STEPS_MAX: usize = 8;
/// Most headers of an HTTP/1.1 request: hyper's limit.
const HTTP1_HEADERS_MAX: usize = 100;
/// Most values of a request: well below HTTP/2's limit.
const VALUES_MAX: usize = 120;
const DATASETS: [&str; 3] = ["b", "o", "v"];

/// All possible messages about a file, with numbers as `N`: nothing of the file is repeated.
const PROBLEMS: [&str; 22] = [
    "is empty",
    "begins with a byte order mark",
    "is not UTF-N",
    "has no text",
    "line N must have three or four words",
    "line N has an invalid name",
    "line N has the name anonymous",
    "line N has neither shaN: nor certificate:",
    "line N names no certificate",
    "line N names a certificate, and tls.client_ca is off",
    "line N has no hash of N hexadecimal digits",
    "line N has the hash of an empty token",
    "line N has an empty right",
    "line N has an unknown role",
    "line N has a right that is not a valid dataset name",
    "line N has a limit without =",
    "line N has an unknown limit",
    "line N has the limit L twice",
    "line N has the limit L with an invalid value: not a number, or out of range",
    "line N repeats the credential of line N",
    "line N differs in rights or limits from line N with the same name",
    "N more of its lines are wrong",
];

/// A daemon's ports that one principals file guards.
struct Guarded {
    file: PathBuf,
    access: Access,
    anonymous: bool,
    /// Whether the file may name certificates.
    with_certificates: bool,
    plain: Ports,
    /// Ports where clients may show certificates.
    over_tls: Option<Ports>,
}

struct Ports {
    http: SocketAddr,
    grpc: SocketAddr,
    admin: SocketAddr,
}

/// Signs the certificates of the ports and of clients.
static AUTHORITY: LazyLock<Authority> = LazyLock::new(Authority::new);

fn tls() -> Tls {
    // Kept as long as the process.
    let directory = tempfile::tempdir().unwrap().keep();
    let [ca, certificate, key] = ["ca", "certificate", "key"].map(|name| directory.join(name));
    for (path, text) in [&ca, &certificate, &key].into_iter().zip(AUTHORITY.files()) {
        std::fs::write(path, text).unwrap();
    }
    let config = TlsConfig {
        certificate,
        key,
        client_ca: Some(ca),
        client_certificates: ClientCertificates::Optional,
        min_version: TlsVersion::Tls12,
        ports: None,
        handshakes: 64,
    };
    Tls::load(&config).unwrap()
}

/// One without anonymous clients; one with them and with certificates.
static GUARDED: LazyLock<[Guarded; 2]> = LazyLock::new(|| {
    let world = &*WORLD;
    let cores = CorePool::new(&world.fetcher, &world.registry).unwrap();
    [false, true].map(|anonymous| Guarded::new(world, &cores, anonymous))
});

impl Guarded {
    fn new(world: &World, cores: &Arc<CorePool>, anonymous: bool) -> Self {
        // Kept as long as the process.
        let file = tempfile::tempdir().unwrap().keep().join("principals");
        std::fs::write(&file, format!("first sha256:{} *\n", hash(b"first"))).unwrap();
        let config = AccessConfig {
            principals: Some(file.clone()),
            anonymous: if anonymous {
                Anonymous::Everybody
            } else {
                Anonymous::Nobody
            },
        };
        let access = Access::load(&config, anonymous).unwrap().unwrap();
        let limits = ConnectionLimits::new(&world.limits, world.engine.config().connection_bytes);
        let ports = |tls: Option<&Tls>| {
            let open = |transport, role, router: &axum::Router, fast_path: Option<Arc<dyn FastPath>>| {
                let bound = bind("listen", "127.0.0.1:0".parse().unwrap()).unwrap();
                let address = bound.address();
                let port = Port {
                    transport,
                    bound,
                    http2_only: transport != "http",
                    router: router.clone(),
                    fast_path,
                    hosts: None,
                    tls: tls.cloned(),
                    access: Some(access.clone()),
                    role,
                    recorder: None,
                    rpc: world.rpc.clone(),
                };
                world.block_on(async {
                    let listener = Listener::open_port(port, cores, &limits, &world.lifecycle).unwrap();
                    tokio::spawn(listener.serve());
                });
                address
            };
            let (fetcher, lifecycle, rpc) = (&world.fetcher, &world.lifecycle, &world.rpc);
            let http = ringfetch_server::http::fast_path(fetcher.clone(), rpc.clone());
            let grpc = ringfetch_server::grpc::fast_path(fetcher.clone(), lifecycle.clone(), rpc.clone());
            Ports {
                http: open("http", Role::DataAndProbes(is_operation), &world.http, Some(http)),
                grpc: open("grpc", Role::Data, &world.grpc, Some(grpc)),
                admin: open("admin", Role::Control, &world.grpc, None),
            }
        };
        Self {
            plain: ports(None),
            over_tls: anonymous.then(|| ports(Some(&tls()))),
            file,
            access,
            anonymous,
            with_certificates: anonymous,
        }
    }

    /// The lines in force; `None` if the file is refused.
    fn install(&self, text: &[u8]) -> Option<Vec<Line>> {
        std::fs::write(&self.file, text).unwrap();
        let lines = read(text, self.with_certificates);
        match self.access.read() {
            Ok(renewed) => {
                renewed
                    .into_iter()
                    .for_each(|renewed| self.access.install(renewed));
                assert!(lines.is_some(), "accepted: {:?}", text.escape_ascii().to_string());
            }
            Err(refused) => {
                for error in std::iter::once(&refused).chain(&refused.more) {
                    let mut problem = error.problem.clone();
                    for digits in error
                        .problem
                        .split(|c: char| !c.is_ascii_digit())
                        .filter(|digits| !digits.is_empty())
                    {
                        problem = problem.replacen(digits, "N", 1);
                    }
                    for limit in LIMITS {
                        problem = problem.replace(&format!("the limit {limit} "), "the limit L ");
                    }
                    assert!(PROBLEMS.contains(&&problem[..]), "{error}");
                }
                assert!(
                    lines.is_none(),
                    "refused: {refused}: {:?}",
                    text.escape_ascii().to_string()
                );
            }
        }
        lines
    }
}

/// Reused connections: those with a certificate for the rest of the input, others for the rest of the
/// process.
#[derive(Default)]
struct Connections {
    tls: Option<[TlsConnector; 2]>,
    http: Option<Http1>,
    grpc: Option<Http2>,
    admin: Option<Http2>,
}

thread_local! {
    static CONNECTIONS: RefCell<[Connections; 2]> = RefCell::default();
}

#[derive(Debug, Clone, Copy)]
enum Asked {
    /// A path that needs no credential.
    Probe,
    Operation(&'static str),
    /// The list of datasets, over HTTP.
    List,
    /// A dataset, over HTTP.
    Dataset(&'static str, &'static str),
    /// A dataset, over gRPC.
    Call(&'static str),
    Admin,
}

const ASKED: [Asked; 10] = [
    Asked::Probe,
    Asked::Operation("/v1/status"),
    Asked::Operation("/nothing"),
    Asked::List,
    Asked::Dataset("b", "/v1/datasets/b/blocks/1"),
    Asked::Dataset("v", "/v1/datasets/v/vectors/1"),
    Asked::Dataset("o", "/v1/datasets/o/objects/one"),
    Asked::Dataset("nope", "/v1/datasets/nope/blocks/1"),
    Asked::Call("b"),
    Asked::Admin,
];

/// The expected answer. The admin port here only has data services, so an administrator is let through.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    LetIn,
    Forbidden,
    Unauthenticated,
    /// It has more headers than are read.
    TooManyHeaders,
}

fn expected(asked: Asked, client: Client<'_>, anonymous_read: bool) -> Verdict {
    let line = match (asked, client) {
        (Asked::Probe, _) => return Verdict::LetIn,
        (_, Client::Principal(line)) => line,
        (Asked::Admin, Client::Anonymous) | (_, Client::Unknown) => return Verdict::Unauthenticated,
        (_, Client::Anonymous) if anonymous_read => return Verdict::LetIn,
        (_, Client::Anonymous) => return Verdict::Unauthenticated,
    };
    let may = match asked {
        Asked::Probe | Asked::List => true,
        Asked::Operation(_) => ["*", "@metrics", "@admin"].iter().any(|right| line.has(right)),
        Asked::Dataset(dataset, _) | Asked::Call(dataset) => line.may_read(dataset),
        Asked::Admin => line.has("@admin"),
    };
    if may { Verdict::LetIn } else { Verdict::Forbidden }
}

fn of_status(answer: &Answer) -> Verdict {
    match answer.status.as_u16() {
        401 => {
            assert_eq!(answer.header("www-authenticate"), "Bearer realm=\"ringfetch\"");
            Verdict::Unauthenticated
        }
        403 => Verdict::Forbidden,
        431 => Verdict::TooManyHeaders,
        _ => Verdict::LetIn,
    }
}

fn of_code(answer: &Answer) -> Verdict {
    assert_eq!(answer.status, 200, "{answer:?}");
    let code = [&answer.headers, &answer.trailers]
        .into_iter()
        .find_map(|map| map.get("grpc-status"));
    match code.expect("a status").as_bytes() {
        b"16" => Verdict::Unauthenticated,
        b"7" => Verdict::Forbidden,
        _ => Verdict::LetIn,
    }
}

/// The names in a list over HTTP.
fn listed(answer: &Answer) -> Vec<String> {
    let list: Value = serde_json::from_slice(&answer.body).unwrap();
    let datasets = list["datasets"].as_array().unwrap().iter();
    datasets
        .map(|dataset| dataset["name"].as_str().unwrap().to_owned())
        .collect()
}

fn request(asked: Asked, values: &[Vec<u8>]) -> Request<Body> {
    let (path, body) = match asked {
        Asked::Probe => ("/livez", None),
        Asked::List => ("/v1/datasets", None),
        Asked::Operation(path) | Asked::Dataset(_, path) => (path, None),
        Asked::Call(dataset) => {
            let message = v1::FetchBlocksRequest {
                dataset: dataset.to_owned(),
                indices: vec![1],
                ..v1::FetchBlocksRequest::default()
            };
            let body = framed(&message.encode_to_vec());
            ("/ringfetch.v1.FetchService/FetchBlocks", Some(body))
        }
        Asked::Admin => ("/ringfetch.v1.DatasetService/ListDatasets", Some(framed(b""))),
    };
    let builder = match body {
        None => Request::get(path).header(header::HOST, "localhost"),
        Some(_) => Request::post(format!("http://localhost{path}"))
            .header(header::CONTENT_TYPE, "application/grpc")
            .header(header::TE, "trailers"),
    };
    let builder = values.iter().fold(builder, |builder, value| {
        builder.header(header::AUTHORIZATION, &value[..])
    });
    builder.body(Full::new(body.unwrap_or_default()).boxed()).unwrap()
}

fn ask(guarded: &Guarded, connections: &mut Connections, asked: Asked, values: &[Vec<u8>]) -> Answer {
    let Connections {
        tls,
        http,
        grpc,
        admin,
    } = connections;
    let (ports, [tls1, tls2]) = match tls {
        None => (&guarded.plain, [None, None]),
        Some(tls) => (guarded.over_tls.as_ref().unwrap(), tls.each_ref().map(Some)),
    };
    WORLD.block_on(async {
        let request = || request(asked, values);
        match asked {
            Asked::Call(_) => send!(*grpc, http2(ports.grpc, tls2), request()),
            Asked::Admin => send!(*admin, http2(ports.admin, tls2), request()),
            _ => send!(*http, http1(ports.http, tls1), request()),
        }
    })
}

/// Makes a request, and checks the answer.
fn judge(
    guarded: &Guarded,
    connections: &mut Connections,
    asked: Asked,
    values: &[Vec<u8>],
    client: Client<'_>,
) {
    let answer = ask(guarded, connections, asked, values);
    let verdict = match asked {
        Asked::Call(_) | Asked::Admin => of_code(&answer),
        _ => of_status(&answer),
    };
    let told = || format!("{asked:?} {client:?} {answer:?}");
    let expected = match asked {
        Asked::Call(_) | Asked::Admin => expected(asked, client, guarded.anonymous),
        // Host counts too.
        _ if values.len() + 1 > HTTP1_HEADERS_MAX => Verdict::TooManyHeaders,
        _ => expected(asked, client, guarded.anonymous),
    };
    assert_eq!(verdict, expected, "{}", told());
    if verdict != Verdict::LetIn {
        return;
    }
    // The previous request may still be counted when its answer has arrived.
    let is_limited = matches!(client, Client::Principal(line) if line.limits[0] < u64::MAX || line.limits[2] < u64::MAX || line.limits[3] < u64::MAX);
    let (status, world) = (answer.status.as_u16(), &*WORLD);
    match asked {
        _ if is_limited && status == 429 => {}
        Asked::Dataset("nope", _) | Asked::Operation("/nothing") => assert_eq!(status, 404, "{}", told()),
        Asked::Dataset("b", _) => assert_eq!(&answer.body[..], world.block(1).unwrap(), "{}", told()),
        Asked::Dataset("v", _) => assert_eq!(&answer.body[..], world.vector(1).unwrap(), "{}", told()),
        Asked::Dataset("o", _) => assert_eq!(&answer.body[..], world.object("one").unwrap(), "{}", told()),
        Asked::List => {
            let may_read = |dataset: &&str| match client {
                Client::Principal(line) => line.may_read(dataset),
                _ => true,
            };
            let readable: Vec<&str> = DATASETS.into_iter().filter(may_read).collect();
            assert_eq!(listed(&answer), readable, "{}", told());
        }
        _ => assert_eq!(status, 200, "{}", told()),
    }
}

/// A line of an input.
enum Step {
    Ask(Asked, Vec<Vec<u8>>),
    /// Clients show a certificate with these names.
    Show(Vec<Name>),
}

/// The lines of an input; `None` if one is invalid, or a value cannot be in a header.
fn steps(text: &[u8]) -> Option<Vec<Step>> {
    let lines = text.split(|byte| *byte == b'\n').take(STEPS_MAX);
    let step = |line: &[u8]| {
        let mut parts = line.split(|byte| *byte == b'|');
        let selector = parts.next()?.first()?;
        if *selector == b'!' {
            let name = |part: &[u8]| {
                let (letter, bytes) = part.split_first()?;
                let kind = Kind::of(*letter)?;
                let bytes = bytes.to_vec();
                Some(Name { kind, bytes })
            };
            return parts.map(name).collect::<Option<_>>().map(Step::Show);
        }
        let values: Vec<_> = parts.map(|value| value.trim_ascii().to_vec()).collect();
        let are_values = values.iter().all(|value| HeaderValue::from_bytes(value).is_ok());
        (are_values && values.len() <= VALUES_MAX)
            .then_some(Step::Ask(ASKED[usize::from(*selector) % ASKED.len()], values))
    };
    lines.map(step).collect()
}

/// The file, with `$x` replaced by hashes.
fn file(text: &[u8]) -> Bytes {
    let mut file = Vec::new();
    let mut rest = text.iter();
    while let Some(byte) = rest.next() {
        match (byte, rest.as_slice().first()) {
            (b'$', Some(token)) if token.is_ascii_alphabetic() => {
                rest.next();
                file.extend(hash(&[*token]).into_bytes());
            }
            _ => file.push(*byte),
        }
    }
    file.into()
}

fuzz_target!(|input: &[u8]| -> Corpus {
    let head = input.split_first().and_then(|(port, rest)| {
        let end = rest.windows(2).position(|pair| pair == b"\n\n")?;
        Some((usize::from(port % 2), steps(&rest[..end])?, &rest[end + 2..]))
    });
    let Some((port, steps, text)) = head else {
        return Corpus::Reject;
    };
    let guarded = &GUARDED[port];
    if guarded.over_tls.is_none() && steps.iter().any(|step| matches!(step, Step::Show(_))) {
        return Corpus::Reject;
    }
    let Some(lines) = guarded.install(&file(text)) else {
        return Corpus::Keep;
    };
    let (mut certificate, mut shown) = (Vec::new(), None);
    CONNECTIONS.with_borrow_mut(|connections| {
        for step in steps {
            match step {
                Step::Show(names) => {
                    let tls = ["http/1.1", "h2"].map(|protocol| AUTHORITY.client(&names, protocol));
                    certificate = names;
                    shown = Some(Connections {
                        tls: Some(tls),
                        ..Connections::default()
                    });
                }
                Step::Ask(asked, values) => {
                    let client = client(&lines, &values, &certificate);
                    let connections = shown.as_mut().unwrap_or(&mut connections[port]);
                    judge(guarded, connections, asked, &values, client);
                }
            }
        }
    });
    Corpus::Keep
});
