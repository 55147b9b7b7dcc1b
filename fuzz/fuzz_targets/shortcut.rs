//! The shortcut against the router, over real sockets: a port with the fast path and one without it give the
//! same answer. An input that begins with a letter is an HTTP request; any other is a gRPC call.
#![no_main]

use bytes::Bytes;
use http::{HeaderMap, Request, header};
use http_body_util::{BodyExt as _, Full};
use libfuzzer_sys::{Corpus, fuzz_target};
use ringfetch_fuzz::grpc::Call;
use ringfetch_fuzz::socket::{Http1, Http2, http1, http2};
use ringfetch_fuzz::{Answer, WORLD, World, check, request, send};
use ringfetch_server::listener::{ConnectionLimits, CorePool, FastPath, Listener, Port, Role, bind};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};

/// Headers that belong to the connection, not to the request.
const OF_THE_CONNECTION: [header::HeaderName; 8] = [
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::EXPECT,
    header::HOST,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Two ports of each protocol: with the fast path, and without.
struct Ports {
    http: [SocketAddr; 2],
    grpc: [SocketAddr; 2],
}

static PORTS: LazyLock<Ports> = LazyLock::new(|| {
    let world = &*WORLD;
    let World {
        fetcher,
        lifecycle,
        rpc,
        ..
    } = world;
    let cores = CorePool::new(fetcher, &world.registry).unwrap();
    let limits = ConnectionLimits::new(&world.limits, world.engine.config().connection_bytes);
    let open = |transport, router: &axum::Router, fast_path: Option<Arc<dyn FastPath>>| {
        let bound = bind("listen", "127.0.0.1:0".parse().unwrap()).unwrap();
        let (address, http2_only, router) = (bound.address(), transport == "grpc", router.clone());
        let port = Port {
            transport,
            bound,
            http2_only,
            router,
            fast_path,
            hosts: None,
            tls: None,
            access: None,
            role: if http2_only {
                Role::Data
            } else {
                Role::DataAndProbes(ringfetch_server::http::is_operation)
            },
            recorder: None,
            rpc: rpc.clone(),
        };
        world.block_on(async {
            let listener = Listener::open_port(port, &cores, &limits, lifecycle).unwrap();
            tokio::spawn(listener.serve());
        });
        address
    };
    let http = ringfetch_server::http::fast_path(fetcher.clone(), rpc.clone());
    let grpc = ringfetch_server::grpc::fast_path(fetcher.clone(), lifecycle.clone(), rpc.clone());
    Ports {
        http: [Some(http), None].map(|fast_path| open("http", &world.http, fast_path)),
        grpc: [Some(grpc), None].map(|fast_path| open("grpc", &world.grpc, fast_path)),
    }
});

#[derive(Default)]
struct Connections {
    http: [Option<Http1>; 2],
    grpc: [Option<Http2>; 2],
}

thread_local! {
    static CONNECTIONS: RefCell<Connections> = RefCell::default();
}

/// Headers or trailers, sorted.
type Lines = Vec<(String, Vec<u8>)>;

/// An answer without what may differ: the date, the boundary between parts, and a length that the end of the
/// body implies too.
fn comparable(mut answer: Answer) -> (u16, Lines, Vec<u8>, Lines) {
    answer.headers.remove(header::DATE);
    if answer.header("content-length") == answer.body.len().to_string() {
        answer.headers.remove(header::CONTENT_LENGTH);
    }
    let content_type = answer.header("content-type").to_owned();
    let mut body = answer.body.to_vec();
    if let Some((kind, boundary)) = content_type.split_once("boundary=") {
        while let Some(at) = body
            .windows(boundary.len())
            .position(|bytes| bytes == boundary.as_bytes())
        {
            body.splice(at..at + boundary.len(), *b"boundary");
        }
        answer.headers.insert(header::CONTENT_TYPE, kind.parse().unwrap());
    }
    let sorted = |map: &HeaderMap| {
        let mut lines: Lines = map
            .iter()
            .map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()))
            .collect();
        lines.sort();
        lines
    };
    (
        answer.status.as_u16(),
        sorted(&answer.headers),
        body,
        sorted(&answer.trailers),
    )
}

fn same(fast: Answer, routed: Answer, asked: &dyn std::fmt::Debug) {
    let (fast, routed) = (comparable(fast), comparable(routed));
    assert_eq!(fast, routed, "{asked:?}");
}

fn over_http(mut request: Request<Bytes>) -> Corpus {
    for name in OF_THE_CONNECTION {
        request.headers_mut().remove(name);
    }
    request
        .headers_mut()
        .insert(header::HOST, "localhost".parse().unwrap());
    let path = request.uri().path().to_owned();
    if request.method() != "GET" || ["/metrics", "/v1/status"].contains(&&path[..]) {
        return Corpus::Reject;
    }
    let sent = || request.clone().map(|_| Full::new(Bytes::new()).boxed());
    let (world, ports) = (&*WORLD, &*PORTS);
    let answers = CONNECTIONS.with_borrow_mut(|connections| {
        world.block_on(async {
            let [fast, routed] = &mut connections.http;
            let fast = send!(*fast, http1(ports.http[0], None), sent());
            (fast, send!(*routed, http1(ports.http[1], None), sent()))
        })
    });
    if let Some(expected) = check::resource(world, &path) {
        check::bytes(expected, &request, &answers.0);
    }
    check::form(request.method(), &answers.0);
    same(answers.0, answers.1, &request);
    Corpus::Keep
}

fn over_grpc(mut call: Call) -> Corpus {
    // Whether a deadline passes may differ, as may the order of a stream's answers.
    call.timeout = None;
    if call.method.ends_with("FetchStream") {
        return Corpus::Reject;
    }
    let (world, ports) = (&*WORLD, &*PORTS);
    let request = || {
        call.request("http://localhost", call.pieces().boxed())
            .expect("a request")
    };
    let answers = CONNECTIONS.with_borrow_mut(|connections| {
        world.block_on(async {
            let [fast, routed] = &mut connections.grpc;
            let fast = send!(*fast, http2(ports.grpc[0], None), request());
            (fast, send!(*routed, http2(ports.grpc[1], None), request()))
        })
    });
    call.check(world, &answers.0);
    same(answers.0, answers.1, &call);
    Corpus::Keep
}

fuzz_target!(|input: &[u8]| -> Corpus {
    if input.first().is_some_and(u8::is_ascii_alphabetic) {
        request::parse(input).map_or(Corpus::Reject, over_http)
    } else {
        Call::parse(input).map_or(Corpus::Reject, over_grpc)
    }
});
