//! HTTP/1.1: one keep-alive connection a slot, since it has one request in flight at a time. A request of one item is
//! a GET of that item, one of several a batchFetch answered in octets. Each connection is driven by the task that
//! uses it, so that a request wakes nobody else. Absent: TLS, proxies, redirects.

use super::answer::{Answer, Body, FailedItem, Refused};
use crate::load::args::ScoreAt;
use crate::load::workload::{Part, Target, name};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{Connection, SendRequest, handshake};
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, RANGE, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::Mutex;

/// Longest answer that is taken, as the client crate's default.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// How much of a problem's text is told.
const PROBLEM_CHARS_MAX: usize = 300;

/// One thread's connections, one a slot.
#[derive(Debug)]
pub(in crate::load) struct Http {
    address: String,
    host: HeaderValue,
    timeout: Duration,
    slots: Vec<Mutex<Option<Wire>>>,
}

/// A connection, driven by whoever has a request on it.
#[derive(Debug)]
struct Wire {
    sender: SendRequest<Full<Bytes>>,
    driver: Pin<Box<Connection<TokioIo<TcpStream>, Full<Bytes>>>>,
}

impl Http {
    pub(super) async fn connect(url: &str, slots: u32, timeout: Duration) -> Result<Self, Refused> {
        let address = address(url)?;
        let host = HeaderValue::try_from(&address)
            .map_err(|_| Refused::transport(format!("{url:?} is not an address")))?;
        let mut wires = Vec::new();
        for _ in 0..slots {
            let wire = tokio::time::timeout(timeout, Wire::connect(&address))
                .await
                .unwrap_or(Err(Refused::timeout()))?;
            wires.push(Mutex::new(Some(wire)));
        }
        Ok(Self {
            address,
            host,
            timeout,
            slots: wires,
        })
    }

    pub(super) async fn fetch(&self, slot: usize, part: &Part, items: &[u64]) -> Result<Answer, Refused> {
        let exchange = async {
            let request = request(part, items, &self.host)?;
            let mut held = self.slots[slot % self.slots.len()].lock().await;
            // Taken out, so that one that is given up half-way is not used again.
            let mut wire = match held.take().filter(|wire| !wire.sender.is_closed()) {
                Some(wire) => wire,
                None => Wire::connect(&self.address).await?,
            };
            let answer = wire.exchange(request, part.keeps_bytes()).await?;
            *held = Some(wire);
            if answer.status.is_success() {
                match part.scored_at(ScoreAt::Daemon) {
                    Some(_) => scored(&answer, items),
                    None => octets(answer, part, items),
                }
            } else {
                Err(refused(&answer))
            }
        };
        tokio::time::timeout(self.timeout, exchange)
            .await
            .unwrap_or(Err(Refused::timeout()))
    }
}

/// `HOST:PORT` of a URL `http://HOST:PORT`.
pub(super) fn address(url: &str) -> Result<String, Refused> {
    let wrong = || Refused::transport(format!("{url:?} is not of the form http://HOST:PORT"));
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(wrong)?;
    if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/") {
        return Err(wrong());
    }
    Ok(format!("{host}:{}", uri.port_u16().unwrap_or(80)))
}

/// One GET over a connection of its own, for pages of text.
pub(in crate::load) async fn get_text(url: &str, path: &str, timeout: Duration) -> Result<String, Refused> {
    let exchange = async {
        let address = address(url)?;
        let request = Request::get(path)
            .header(HOST, &address)
            .body(Full::default())
            .map_err(|error| Refused::protocol(error.to_string()))?;
        let answer = Wire::connect(&address).await?.exchange(request, true).await?;
        if answer.status != StatusCode::OK {
            return Err(refused(&answer));
        }
        String::from_utf8(answer.data.into()).map_err(|_| Refused::protocol("the page is not text"))
    };
    tokio::time::timeout(timeout, exchange)
        .await
        .unwrap_or(Err(Refused::timeout()))
}

/// An answer whose body has been read.
#[derive(Debug)]
struct Read {
    status: StatusCode,
    head: HeaderMap,
    bytes: u64,
    /// Empty if it was not to be kept.
    data: Bytes,
}

impl Wire {
    async fn connect(address: &str) -> Result<Self, Refused> {
        let told = |error: std::io::Error| Refused::transport(format!("{address}: {error}"));
        let stream = TcpStream::connect(address).await.map_err(told)?;
        // Without it a small request waits 40 ms for the acknowledgement of the one before.
        stream.set_nodelay(true).map_err(told)?;
        let (sender, driver) = handshake(TokioIo::new(stream)).await.map_err(broken)?;
        Ok(Self {
            sender,
            driver: Box::pin(driver),
        })
    }

    /// Sends a request and reads its answer to the end.
    async fn exchange(&mut self, request: Request<Full<Bytes>>, keep: bool) -> Result<Read, Refused> {
        let Self { sender, driver } = self;
        let exchange = async {
            sender.ready().await.map_err(broken)?;
            let response = sender.send_request(request).await.map_err(broken)?;
            read(response, keep).await
        };
        drive(driver, exchange).await
    }
}

/// Runs a request with its connection in one task.
async fn drive<T>(
    driver: &mut Pin<Box<Connection<TokioIo<TcpStream>, Full<Bytes>>>>,
    exchange: impl Future<Output = Result<T, Refused>>,
) -> Result<T, Refused> {
    let mut exchange = pin!(exchange);
    let mut ended = None;
    poll_fn(|context| {
        loop {
            if let Poll::Ready(result) = exchange.as_mut().poll(context) {
                return Poll::Ready(result);
            }
            if let Some(reason) = &ended {
                return Poll::Ready(Err(Refused::transport(format!("the connection ended: {reason}"))));
            }
            match driver.as_mut().poll(context) {
                Poll::Ready(Ok(())) => ended = Some("the server closed it".to_owned()),
                Poll::Ready(Err(error)) => ended = Some(error.to_string()),
                Poll::Pending => {
                    // What the driver has just read may be what the exchange waits for.
                    return exchange.as_mut().poll(context);
                }
            }
        }
    })
    .await
}

async fn read(response: Response<Incoming>, keep: bool) -> Result<Read, Refused> {
    let (head, mut body) = response.into_parts();
    // A problem is always read: it is short and says why.
    let keep = keep || !head.status.is_success();
    let (mut first, mut rest, mut bytes) = (Bytes::new(), BytesMut::new(), 0u64);
    if body.size_hint().lower() > ANSWER_BYTES_MAX {
        return Err(Refused::protocol("the answer is too long"));
    }
    while let Some(frame) = body.frame().await {
        let Ok(chunk) = frame.map_err(broken)?.into_data() else {
            continue;
        };
        bytes += u64::try_from(chunk.len()).unwrap_or(u64::MAX);
        if bytes > ANSWER_BYTES_MAX {
            return Err(Refused::protocol("the answer is too long"));
        }
        if !keep {
            continue;
        }
        if first.is_empty() {
            first = chunk;
        } else {
            rest.extend_from_slice(&chunk);
        }
    }
    let data = if rest.is_empty() {
        first
    } else {
        let mut whole = BytesMut::with_capacity(first.len() + rest.len());
        whole.extend_from_slice(&first);
        whole.extend_from_slice(&rest);
        whole.freeze()
    };
    Ok(Read {
        status: head.status,
        head: head.headers,
        bytes,
        data,
    })
}

fn broken(error: hyper::Error) -> Refused {
    Refused::transport(error.to_string())
}

/// A status as an error, with the problem's text.
fn refused(answer: &Read) -> Refused {
    let text = String::from_utf8_lossy(&answer.data);
    let detail = serde_json::from_str::<serde_json::Value>(&text)
        .ok()
        .and_then(|problem| Some(problem.get("detail")?.as_str()?.to_owned()))
        .unwrap_or_else(|| text.into_owned());
    let detail: String = detail.chars().take(PROBLEM_CHARS_MAX).collect();
    let seconds = answer
        .head
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    Refused {
        label: Cow::Owned(format!("HTTP_{}", answer.status.as_u16())),
        message: format!("{}: {detail}", answer.status),
        retry_after: seconds.map(Duration::from_secs),
    }
}

fn request(part: &Part, items: &[u64], host: &HeaderValue) -> Result<Request<Full<Bytes>>, Refused> {
    let mut path = String::with_capacity(96);
    path.push_str("/v1/datasets/");
    encode(part.dataset(), &mut path);
    let mut head = HeaderMap::with_capacity(4);
    head.insert(HOST, host.clone());
    let mut body = None;
    if let Some(scoring) = part.scored_at(ScoreAt::Daemon) {
        head.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        path.push_str("/vectors:score");
        body = Some(scoring.json(items).to_string());
    } else if let [item] = items {
        // Writing to a string does not fail.
        let _ = match part.target() {
            Target::Blocks { .. } => write!(path, "/blocks/{item}"),
            Target::Vectors { .. } => write!(path, "/vectors/{item}"),
            Target::Objects { names } => {
                path.push_str("/objects/");
                encode(name(names, *item), &mut path);
                Ok(())
            }
            Target::Ranges { .. } | Target::Extents(_) => {
                let (offset, length) = part.target().extent(*item).unwrap_or_default();
                // Inclusive: 4096 bytes from 8192 are 8192-12287.
                let last = offset.saturating_add(length).saturating_sub(1);
                let range = HeaderValue::try_from(format!("bytes={offset}-{last}"));
                range
                    .into_iter()
                    .for_each(|range| drop(head.insert(RANGE, range)));
                write!(path, "/bytes")
            }
        };
    } else {
        head.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        head.insert(ACCEPT, HeaderValue::from_static("application/octet-stream"));
        let (kind, json) = batch(part.target(), items);
        path.push('/');
        path.push_str(kind);
        path.push_str(":batchFetch");
        body = Some(json);
    }
    let uri =
        Uri::from_maybe_shared(Bytes::from(path)).map_err(|error| Refused::protocol(error.to_string()))?;
    let is_get = body.is_none();
    let mut request = Request::new(Full::new(Bytes::from(body.unwrap_or_default())));
    *request.method_mut() = if is_get { Method::GET } else { Method::POST };
    *request.uri_mut() = uri;
    *request.headers_mut() = head;
    Ok(request)
}

/// The kind in a batch's path, and its JSON.
fn batch(target: &Target, items: &[u64]) -> (&'static str, String) {
    let mut json = String::with_capacity(32 + items.len() * 12);
    let list = |json: &mut String, each: &dyn Fn(u64) -> String| {
        for (i, &item) in items.iter().enumerate() {
            if i > 0 {
                json.push(',');
            }
            json.push_str(&each(item));
        }
    };
    let numbers = |json: &mut String| {
        for (i, item) in items.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            // Writing to a string does not fail.
            let _ = write!(json, "{comma}{item}");
        }
    };
    let kind = match target {
        Target::Blocks { .. } => {
            json.push_str("{\"indices\":[");
            numbers(&mut json);
            "blocks"
        }
        Target::Vectors { .. } => {
            json.push_str("{\"ids\":[");
            numbers(&mut json);
            "vectors"
        }
        Target::Ranges { .. } | Target::Extents(_) => {
            json.push_str("{\"ranges\":[");
            list(&mut json, &|item| {
                let (offset, length) = target.extent(item).unwrap_or_default();
                format!("{{\"offset\":{offset},\"length\":{length}}}")
            });
            "ranges"
        }
        Target::Objects { names } => {
            json.push_str("{\"names\":[");
            list(&mut json, &|item| {
                serde_json::Value::from(name(names, item)).to_string()
            });
            "objects"
        }
    };
    json.push_str("]}");
    (kind, json)
}

/// Percent-encodes what may not stand in a path; `/` stays.
fn encode(text: &str, path: &mut String) {
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            path.push(byte.into());
        } else {
            let _ = write!(path, "%{byte:02X}");
        }
    }
}

/// Scores as JSON.
fn scored(answer: &Read, items: &[u64]) -> Result<Answer, Refused> {
    #[derive(Deserialize)]
    struct Scores {
        results: [Ranking; 1],
    }
    #[derive(Deserialize)]
    struct Ranking {
        ids: Vec<u64>,
        scores: Vec<f64>,
        errors: Vec<ItemError>,
    }
    #[derive(Deserialize)]
    struct ItemError {
        item: u64,
        code: String,
    }
    let read = serde_json::from_slice::<Scores>(&answer.data);
    let Scores { results: [ranking] } = read.map_err(|error| Refused::protocol(error.to_string()))?;
    let failed = ranking.errors.into_iter().map(|error| FailedItem {
        message: format!("item {}: {}", error.item, error.code),
        label: Cow::Owned(error.code),
    });
    let best = ranking.ids.into_iter().zip(ranking.scores).collect();
    Ok(Answer::ranked(items.len(), best, failed.collect()))
}

/// Holds an answer against its request.
fn octets(answer: Read, part: &Part, items: &[u64]) -> Result<Answer, Refused> {
    let number = |name: &str| answer.head.get(name)?.to_str().ok()?.parse::<usize>().ok();
    let list = |name: &str| -> Option<Vec<usize>> {
        let list = answer.head.get(name)?.to_str().ok()?;
        list.split(',').map(|number| number.trim().parse().ok()).collect()
    };
    let due = |item: u64| {
        part.target()
            .item_bytes(item)
            .and_then(|bytes| usize::try_from(bytes).ok())
    };
    let whole = usize::try_from(answer.bytes).unwrap_or(usize::MAX);
    let (mut failed, mut lengths) = (Vec::new(), Vec::new());
    if let [item] = items {
        lengths.push(due(*item).unwrap_or(whole));
    } else {
        if number("ringfetch-items") != Some(items.len()) {
            return Err(Refused::protocol(format!(
                "an answer without its {} items",
                items.len()
            )));
        }
        failed = list("ringfetch-error-items").unwrap_or_default();
        let each = number("ringfetch-item-bytes");
        lengths = match list("ringfetch-lengths") {
            Some(lengths) if lengths.len() == items.len() => lengths,
            Some(_) => return Err(Refused::protocol("lengths of other items than were asked for")),
            None => vec![each.unwrap_or(0); items.len()],
        };
        for &item in &failed {
            match lengths.get_mut(item) {
                Some(length) => *length = 0,
                None => return Err(Refused::protocol(format!("an error of item {item}"))),
            }
        }
        for (i, (&item, &length)) in items.iter().zip(&lengths).enumerate() {
            if due(item).is_some_and(|due| due != length) && !failed.contains(&i) {
                return Err(Refused::protocol(format!("item {i} has {length} bytes")));
            }
        }
    }
    let sum = lengths
        .iter()
        .try_fold(0usize, |sum, length| sum.checked_add(*length));
    if sum != Some(whole) {
        return Err(Refused::protocol(format!(
            "{whole} bytes in an answer of {sum:?}"
        )));
    }
    let tell = |item: &usize| FailedItem {
        label: Cow::Borrowed("ITEM"),
        message: format!("item {item} failed; octets do not say why"),
    };
    Ok(Answer {
        items: items.len(),
        bytes: answer.bytes,
        failed: failed.iter().map(tell).collect(),
        body: Body::Octets {
            lengths,
            data: answer.data,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_and_paths_are_what_http_wants() {
        // Scenario: URLs with and without a port, and what is none; names with blanks, slashes and other letters.
        // Expected: addresses; an error; percent-encoding that leaves the slashes.
        assert_eq!(address("http://127.0.0.1:7411").unwrap(), "127.0.0.1:7411");
        assert_eq!(address("http://host/").unwrap(), "host:80");
        assert_eq!(address("http://[::1]:7").unwrap(), "[::1]:7");
        for wrong in ["127.0.0.1:7411", "https://a:1", "http://", "http://a:1/v1", ""] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
        let mut path = String::new();
        encode("a b/c%é", &mut path);
        assert_eq!(path, "a%20b/c%25%C3%A9");
    }

    #[test]
    fn batches_are_json() {
        // Scenario: two items of each kind.
        // Expected: the four forms of batchFetch.
        let names = vec!["a".to_owned(), "b\"c".to_owned()];
        for (target, kind, json) in [
            (
                Target::Blocks { block_bytes: 8 },
                "blocks",
                r#"{"indices":[0,1]}"#,
            ),
            (
                Target::Vectors {
                    dtype: ringfetch_client::Dtype::F32,
                    dim: 2,
                },
                "vectors",
                r#"{"ids":[0,1]}"#,
            ),
            (
                Target::Ranges { range_bytes: 10 },
                "ranges",
                r#"{"ranges":[{"offset":0,"length":10},{"offset":10,"length":10}]}"#,
            ),
            (Target::Objects { names }, "objects", r#"{"names":["a","b\"c"]}"#),
        ] {
            assert_eq!(batch(&target, &[0, 1]), (kind, json.to_owned()));
        }
    }

    #[test]
    fn an_answer_is_held_against_its_request() {
        // Scenario: answers to one and to three blocks of 8 bytes: right, too short, with a failed item, contradictory.
        // Expected: items and bytes; an error for what does not add up.
        let workload = crate::load::workload::Workload::of_blocks(10);
        let answer = |head: &[(&'static str, &'static str)], bytes: usize| Read {
            status: StatusCode::OK,
            head: head
                .iter()
                .map(|&(name, value)| {
                    (
                        hyper::header::HeaderName::from_static(name),
                        HeaderValue::from_static(value),
                    )
                })
                .collect(),
            bytes: u64::try_from(bytes).unwrap(),
            data: vec![7; bytes].into(),
        };
        let check = |answer, items: &[u64]| octets(answer, workload.part(0), items);
        assert_eq!(check(answer(&[], 8), &[1]).unwrap().bytes, 8);
        assert!(check(answer(&[], 7), &[1]).is_err());
        let three = [("ringfetch-items", "3"), ("ringfetch-item-bytes", "8")];
        let lengths = |answer: Answer| match answer.body {
            Body::Octets { lengths, .. } => lengths,
            other @ (Body::None | Body::Items(_) | Body::Ranked(_)) => panic!("{other:?}"),
        };
        assert_eq!(lengths(check(answer(&three, 24), &[1, 2, 3]).unwrap()), [8, 8, 8]);
        let failed = [three[0], three[1], ("ringfetch-error-items", "1")];
        let octets = check(answer(&failed, 16), &[1, 2, 3]).unwrap();
        assert_eq!((octets.failed.len(), lengths(octets)), (1, vec![8, 0, 8]));
        for (head, bytes) in [
            (&three[..], 16),
            (&three[1..], 24),
            (&[three[0]][..], 24),
            (&[three[0], three[1], ("ringfetch-error-items", "3")][..], 16),
            (&[three[0], ("ringfetch-lengths", "8,8")][..], 16),
            (&[three[0], ("ringfetch-lengths", "8,4,8")][..], 20),
        ] {
            assert!(check(answer(head, bytes), &[1, 2, 3]).is_err(), "{head:?}");
        }
    }
}
