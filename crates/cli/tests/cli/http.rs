//! The HTTP side of the fake daemon: HTTP/1.1 with keep-alive, one thread per connection, the same data as
//! the gRPC side, and a metrics page that counts its own reads. Only what `ringfetch load` uses.

use crate::connections::listen;
use crate::server::{Item, Server};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A dataset of objects whose list names its second page as the next one, too.
pub(crate) const ENDLESS: &str = "endless";

#[derive(Clone)]
enum Metrics {
    AtOnce,
    /// Once this has returned.
    After(Arc<dyn Fn() + Send + Sync>),
    Forbidden,
}

/// Serves until the process ends.
pub(crate) fn start() -> SocketAddr {
    start_for(None)
}

/// As [`start`], only for clients with this `authorization`, in lower case.
pub(crate) fn start_for(authorization: Option<&'static str>) -> SocketAddr {
    start_with(authorization, Metrics::AtOnce)
}

/// As [`start`], with a page of metrics that comes once `hold` has returned.
pub(crate) fn start_with_held_metrics(hold: impl Fn() + Send + Sync + 'static) -> SocketAddr {
    start_with(None, Metrics::After(Arc::new(hold)))
}

/// As [`start`], for clients without the right to the metrics.
pub(crate) fn start_without_metrics() -> SocketAddr {
    start_with(None, Metrics::Forbidden)
}

fn start_with(authorization: Option<&'static str>, metrics: Metrics) -> SocketAddr {
    let reads = Arc::new(AtomicU64::new(0));
    listen(move |_, connection| {
        let (reads, metrics) = (Arc::clone(&reads), metrics.clone());
        std::thread::spawn(move || serve(connection, &reads, authorization, &metrics));
    })
}

fn serve(connection: TcpStream, reads: &AtomicU64, authorization: Option<&str>, metrics: &Metrics) {
    connection.set_nodelay(true).unwrap();
    let mut out = connection.try_clone().unwrap();
    let mut lines = BufReader::new(connection);
    loop {
        let mut first = String::new();
        if lines.read_line(&mut first).unwrap_or(0) == 0 {
            return;
        }
        let (mut range, mut length) = (String::new(), 0);
        let mut is_known = authorization.is_none();
        loop {
            let mut line = String::new();
            lines.read_line(&mut line).unwrap();
            let line = line.trim().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            is_known = is_known || line.strip_prefix("authorization: ") == authorization;
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.parse().unwrap();
            }
            if let Some(value) = line.strip_prefix("range: bytes=") {
                value.clone_into(&mut range);
            }
        }
        let mut body = vec![0; length];
        lines.read_exact(&mut body).unwrap();
        let path = first.split_whitespace().nth(1).unwrap();
        let (status, head, body) = if !is_known {
            ("401 Unauthorized", String::new(), b"no token".to_vec())
        } else if path == "/metrics" && matches!(metrics, Metrics::Forbidden) {
            ("403 Forbidden", String::new(), b"no right to it".to_vec())
        } else {
            answer(path, &range, &body, reads)
        };
        if let ("/metrics", Metrics::After(hold)) = (path, metrics) {
            hold();
        }
        let length = body.len();
        write!(out, "HTTP/1.1 {status}\r\n{head}content-length: {length}\r\n\r\n").unwrap();
        out.write_all(&body).unwrap();
    }
}

fn answer(path: &str, range: &str, body: &[u8], reads: &AtomicU64) -> (&'static str, String, Vec<u8>) {
    if path == "/metrics" {
        let reads = reads.load(Ordering::SeqCst);
        let page = format!(
            "ringfetch_build_info{{version=\"0\"}} 1\nringfetch_reads_total{{result=\"ok\"}} {reads}\n\
             ringfetch_device_reads_total{{shard=\"0\"}} {}\nprocess_cpu_seconds_total 1\n",
            reads * 2
        );
        return ("200 OK", String::new(), page.into_bytes());
    }
    let path: Vec<&str> = path.trim_start_matches("/v1/datasets/").split('/').collect();
    let server = Server::GOOD;
    let described = match path[..] {
        [ENDLESS] => server.described("objects"),
        [ENDLESS, _] => Some(json!({ "objects": [], "next_page_token": "a" })),
        [name] => server.described(name),
        ["objects", objects] => objects.strip_prefix("objects").map(|query| server.objects(query)),
        _ => None,
    };
    if let Some(json) = described {
        return ("200 OK", String::new(), json.to_string().into_bytes());
    }
    let list = |name: &str| {
        let mut batch: Value = serde_json::from_slice(body).unwrap();
        std::mem::take(batch[name].as_array_mut().unwrap())
    };
    let number = |value: &Value| value.as_u64().unwrap();
    let items: Result<Vec<_>, _> = match path[..] {
        ["blocks", "blocks", index] => vec![server.block(index.parse().unwrap())],
        ["vectors", "vectors", id] => vec![Server::vector(id.parse().unwrap())],
        ["blocks", "bytes"] => {
            let (first, last) = range.split_once('-').unwrap();
            let (first, last): (u64, u64) = (first.parse().unwrap(), last.parse().unwrap());
            vec![server.range(first, last - first + 1)]
        }
        ["blocks", "blocks:batchFetch"] => list("indices")
            .iter()
            .map(|index| server.block(number(index)))
            .collect(),
        ["vectors", "vectors:batchFetch"] => {
            list("ids").iter().map(|id| Server::vector(number(id))).collect()
        }
        ["blocks", "ranges:batchFetch"] => {
            let range = |range: &Value| server.range(number(&range["offset"]), number(&range["length"]));
            list("ranges").iter().map(range).collect::<Vec<Item>>()
        }
        _ => return ("404 Not Found", String::new(), b"no such path".to_vec()),
    }
    .into_iter()
    .collect();
    let items: Vec<Vec<u8>> = items.unwrap();
    reads.fetch_add(u64::try_from(items.len()).unwrap(), Ordering::SeqCst);
    let lengths: Vec<String> = items.iter().map(|item| item.len().to_string()).collect();
    let head = format!(
        "ringfetch-items: {}\r\nringfetch-lengths: {}\r\n",
        items.len(),
        lengths.join(",")
    );
    let status = if range.is_empty() {
        "200 OK"
    } else {
        "206 Partial Content"
    };
    (status, head, items.concat())
}
