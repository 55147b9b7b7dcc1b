//! HTTP/1.1: one keep-alive connection per slot, since each has one request in flight at a time. A request of
//! one item is a GET of that item, one of several a batchFetch answered in octets. The task that uses a
//! connection drives it, so that a request wakes no other task. No proxies, no redirects.

use super::Credentials;
use super::response::{Body, FailedItem, RequestError, Response};
use crate::args::Token;
use crate::load::args::ScoreAt;
use crate::load::workload::{Part, Target, name};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{Connection, SendRequest, handshake};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, RANGE, RETRY_AFTER};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use ringfetch_client::{Tls, connect_tcp, is_loopback};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt::Write as _;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;

/// Longest accepted response; the client crate's default.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// Connections opened at once: one may have to wait for an address that does not answer.
const CONNECTING_MAX: usize = 16;
/// Most characters kept of a problem's text.
const PROBLEM_CHARS_MAX: usize = 300;

/// One thread's connections, one per slot.
#[derive(Debug)]
pub(in crate::load) struct Http {
    site: Site,
    host: HeaderValue,
    timeout: Duration,
    slots: Vec<Mutex<Option<HttpConnection>>>,
}

/// A connection, driven by the task that has a request on it.
#[derive(Debug)]
struct HttpConnection {
    sender: SendRequest<Full<Bytes>>,
    driver: Driver,
    /// Sent with every request.
    authorization: Option<HeaderValue>,
}

type Driver = Pin<Box<Connection<TokioIo<Box<dyn Io>>, Full<Bytes>>>>;

/// A socket, with or without TLS.
trait Io: AsyncRead + AsyncWrite + Send + Unpin + std::fmt::Debug {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + std::fmt::Debug> Io for T {}

/// A server's address.
#[derive(Debug)]
struct Site {
    /// `HOST:PORT`.
    address: String,
    /// The host, if it is reached with TLS.
    tls: Option<(Tls, String)>,
    authorization: Option<HeaderValue>,
}

impl Http {
    pub(super) async fn connect(
        url: &str,
        credentials: &Credentials,
        slots: u32,
        timeout: Duration,
    ) -> Result<Self, RequestError> {
        let site = Site::of(url, credentials)?;
        let host = HeaderValue::try_from(&site.address)
            .map_err(|_| RequestError::transport(format!("{url:?} is not an address")))?;
        let connect = async |_| {
            let connected = tokio::time::timeout(timeout, HttpConnection::connect(&site));
            let connected = connected.await.unwrap_or(Err(RequestError::timeout()));
            connected.map(|connection| Mutex::new(Some(connection)))
        };
        let connected = stream::iter(0..slots).map(connect).buffered(CONNECTING_MAX);
        let slots = connected.try_collect().await?;
        Ok(Self {
            site,
            host,
            timeout,
            slots,
        })
    }

    pub(super) async fn fetch(
        &self,
        slot: usize,
        part: &Part,
        items: &[u64],
    ) -> Result<Response, RequestError> {
        let exchange = async {
            let request = request(part, items, &self.host)?;
            let mut held = self.slots[slot % self.slots.len()].lock().await;
            // Taken out, so that an abandoned exchange's connection is not reused.
            let mut wire = match held.take().and_then(HttpConnection::if_open) {
                Some(wire) => wire,
                None => HttpConnection::connect(&self.site).await?,
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
            .unwrap_or(Err(RequestError::timeout()))
    }
}

/// Whether a URL is `http://HOST:PORT` or `https://HOST:PORT`.
pub(in crate::load) fn is_site(url: &str) -> bool {
    site_uri(url).is_some()
}

fn site_uri(url: &str) -> Option<Uri> {
    let uri: Uri = url.parse().ok()?;
    let has_scheme = matches!(uri.scheme_str(), Some("http" | "https"));
    let authority = uri.authority()?;
    let port = authority.as_str().strip_prefix(authority.host())?;
    let has_host = !authority.host().is_empty() && (port.is_empty() || authority.port_u16().is_some());
    let is_anonymous = !authority.as_str().contains('@');
    let is_bare = matches!(uri.path(), "" | "/") && uri.query().is_none() && !url.contains('#');
    (has_scheme && has_host && is_anonymous && is_bare).then_some(uri)
}

impl Site {
    /// From a URL `http://HOST:PORT` or `https://HOST:PORT`.
    fn of(url: &str, credentials: &Credentials) -> Result<Self, RequestError> {
        let wrong = || RequestError::transport("the address is not of the form http[s]://HOST:PORT");
        let uri = site_uri(url).ok_or_else(wrong)?;
        let host = uri.host().ok_or_else(wrong)?;
        let (port, tls) = if uri.scheme_str() == Some("https") {
            let tls = credentials.tls.clone().ok_or_else(wrong)?;
            (443, Some((tls, host.to_owned())))
        } else {
            (80, None)
        };
        let address = format!("{host}:{}", uri.port_u16().unwrap_or(port));
        // As the client library does for gRPC.
        if credentials.token.is_some() && tls.is_none() && !is_loopback(host) {
            return Err(RequestError::transport(format!(
                "token: would be sent to {address} in plaintext; use https://, or a loopback address"
            )));
        }
        let header = |Token(token): &Token| HeaderValue::try_from(format!("Bearer {token}"));
        let mut authorization = credentials
            .token
            .as_ref()
            .map(header)
            .transpose()
            .map_err(|_| RequestError::transport("the token has characters that HTTP cannot send"))?;
        if let Some(authorization) = &mut authorization {
            authorization.set_sensitive(true);
        }
        Ok(Self {
            address,
            tls,
            authorization,
        })
    }
}

/// One GET over a new connection, for pages of text.
pub(in crate::load) async fn get_text(
    url: &str,
    credentials: &Credentials,
    path: &str,
    timeout: Duration,
) -> Result<String, RequestError> {
    let exchange = async {
        let site = Site::of(url, credentials)?;
        let request = Request::get(path)
            .header(HOST, &site.address)
            .body(Full::default())
            .map_err(|error| RequestError::protocol(error.to_string()))?;
        let answer = HttpConnection::connect(&site)
            .await?
            .exchange(request, true)
            .await?;
        if answer.status != StatusCode::OK {
            return Err(refused(&answer));
        }
        String::from_utf8(answer.data.into()).map_err(|_| RequestError::protocol("the page is not text"))
    };
    tokio::time::timeout(timeout, exchange)
        .await
        .unwrap_or(Err(RequestError::timeout()))
}

/// An answer whose body has been read.
#[derive(Debug)]
struct HttpResponse {
    status: StatusCode,
    head: HeaderMap,
    bytes: u64,
    /// Empty if it was not kept.
    data: Bytes,
}

impl HttpConnection {
    async fn connect(site: &Site) -> Result<Self, RequestError> {
        let Site { address, tls, .. } = site;
        let failed = |error: std::io::Error| RequestError::transport(format!("{address}: {error}"));
        let stream = connect_tcp(address).await.map_err(failed)?;
        let stream: Box<dyn Io> = match tls {
            None => Box::new(stream),
            Some((tls, host)) => Box::new(tls.connect_http1(host, stream).await.map_err(failed)?),
        };
        let (sender, driver) = handshake(TokioIo::new(stream)).await.map_err(broken)?;
        Ok(Self {
            sender,
            driver: Box::pin(driver),
            authorization: site.authorization.clone(),
        })
    }

    /// Itself, unless the server has closed it. Nobody drives an idle connection, so this is noticed only when asked.
    fn if_open(mut self) -> Option<Self> {
        let mut context = Context::from_waker(Waker::noop());
        let is_open = self.driver.as_mut().poll(&mut context).is_pending();
        (is_open && !self.sender.is_closed()).then_some(self)
    }

    /// Sends a request and reads its response to the end.
    async fn exchange(
        &mut self,
        mut request: Request<Full<Bytes>>,
        keep: bool,
    ) -> Result<HttpResponse, RequestError> {
        let Self {
            sender,
            driver,
            authorization,
        } = self;
        if let Some(authorization) = authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
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
    driver: &mut Driver,
    exchange: impl Future<Output = Result<T, RequestError>>,
) -> Result<T, RequestError> {
    let mut exchange = pin!(exchange);
    let mut ended = None;
    poll_fn(|context| {
        loop {
            if let Poll::Ready(result) = exchange.as_mut().poll(context) {
                return Poll::Ready(result);
            }
            if let Some(reason) = &ended {
                return Poll::Ready(Err(RequestError::transport(format!(
                    "the connection ended: {reason}"
                ))));
            }
            match driver.as_mut().poll(context) {
                Poll::Ready(Ok(())) => ended = Some("the server closed it".to_owned()),
                Poll::Ready(Err(error)) => ended = Some(error.to_string()),
                Poll::Pending => {
                    // The exchange may be waiting for what the driver has just read.
                    return exchange.as_mut().poll(context);
                }
            }
        }
    })
    .await
}

async fn read(response: hyper::Response<Incoming>, keep: bool) -> Result<HttpResponse, RequestError> {
    let (head, mut body) = response.into_parts();
    // A problem is always kept: it is short and says why.
    let keep = keep || !head.status.is_success();
    let (mut chunks, mut bytes) = (Vec::new(), 0u64);
    if body.size_hint().lower() > ANSWER_BYTES_MAX {
        return Err(RequestError::protocol("the answer is too long"));
    }
    while let Some(frame) = body.frame().await {
        let Ok(chunk) = frame.map_err(broken)?.into_data() else {
            continue;
        };
        bytes += u64::try_from(chunk.len()).unwrap_or(u64::MAX);
        if bytes > ANSWER_BYTES_MAX {
            return Err(RequestError::protocol("the answer is too long"));
        }
        if keep {
            chunks.push(chunk);
        }
    }
    let data = match &chunks[..] {
        [only] => only.clone(),
        chunks => chunks.concat().into(),
    };
    Ok(HttpResponse {
        status: head.status,
        head: head.headers,
        bytes,
        data,
    })
}

fn broken(error: hyper::Error) -> RequestError {
    RequestError::transport(error.to_string())
}

/// A status as an error, with the problem's text.
fn refused(answer: &HttpResponse) -> RequestError {
    let text = String::from_utf8_lossy(&answer.data);
    let detail = serde_json::from_str::<serde_json::Value>(&text)
        .ok()
        .and_then(|problem| Some(problem.get("detail")?.as_str()?.to_owned()))
        .unwrap_or_else(|| text.into_owned());
    let detail: String = detail.chars().take(PROBLEM_CHARS_MAX).collect();
    let status = answer.status;
    let message = match detail.is_empty() {
        true => status.to_string(),
        false => format!("{status}: {detail}"),
    };
    let seconds = answer
        .head
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    RequestError {
        label: Cow::Owned(format!("HTTP_{}", status.as_u16())),
        message,
        retry_after: seconds.map(Duration::from_secs),
    }
}

fn request(part: &Part, items: &[u64], host: &HeaderValue) -> Result<Request<Full<Bytes>>, RequestError> {
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
        let (kind, json) =
            batch(part.target(), items).map_err(|error| RequestError::protocol(error.to_string()))?;
        path.push('/');
        path.push_str(kind);
        path.push_str(":batchFetch");
        body = Some(json);
    }
    let uri = Uri::from_maybe_shared(Bytes::from(path))
        .map_err(|error| RequestError::protocol(error.to_string()))?;
    let is_get = body.is_none();
    let mut request = Request::new(Full::new(Bytes::from(body.unwrap_or_default())));
    *request.method_mut() = if is_get { Method::GET } else { Method::POST };
    *request.uri_mut() = uri;
    *request.headers_mut() = head;
    Ok(request)
}

/// The batch path's kind, and the JSON body.
fn batch(target: &Target, items: &[u64]) -> serde_json::Result<(&'static str, String)> {
    #[derive(Serialize)]
    struct Range {
        offset: u64,
        length: u64,
    }
    let extents = items.iter().filter_map(|&item| target.extent(item));
    let (kind, field, list) = match target {
        Target::Blocks { .. } => ("blocks", "indices", serde_json::to_string(items)?),
        Target::Vectors { .. } => ("vectors", "ids", serde_json::to_string(items)?),
        Target::Ranges { .. } | Target::Extents(_) => {
            let ranges: Vec<_> = extents.map(|(offset, length)| Range { offset, length }).collect();
            ("ranges", "ranges", serde_json::to_string(&ranges)?)
        }
        Target::Objects { names } => {
            let names: Vec<&str> = items.iter().map(|&item| name(names, item)).collect();
            ("objects", "names", serde_json::to_string(&names)?)
        }
    };
    Ok((kind, format!("{{\"{field}\":{list}}}")))
}

/// Percent-encodes characters that a path may not contain; keeps `/`.
pub(in crate::load) fn encode(text: &str, path: &mut String) {
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            path.push(byte.into());
        } else {
            let _ = write!(path, "%{byte:02X}");
        }
    }
}

/// Scores as JSON.
fn scored(answer: &HttpResponse, items: &[u64]) -> Result<Response, RequestError> {
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
    let Scores { results: [ranking] } = read.map_err(|error| RequestError::protocol(error.to_string()))?;
    let failed = ranking.errors.into_iter().map(|error| FailedItem {
        message: format!("item {}: {}", error.item, error.code),
        label: Cow::Owned(error.code),
    });
    let best = ranking.ids.into_iter().zip(ranking.scores).collect();
    Ok(Response::ranked(items.len(), best, failed.collect()))
}

/// Checks a response against its request.
fn octets(answer: HttpResponse, part: &Part, items: &[u64]) -> Result<Response, RequestError> {
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
            let problem = format!("a response without its {} items", items.len());
            return Err(RequestError::protocol(problem));
        }
        failed = list("ringfetch-error-items").unwrap_or_default();
        let each = number("ringfetch-item-bytes");
        lengths = match list("ringfetch-lengths") {
            Some(lengths) if lengths.len() == items.len() => lengths,
            Some(_) => {
                return Err(RequestError::protocol("lengths do not match the requested items"));
            }
            None => vec![each.unwrap_or(0); items.len()],
        };
        for &item in &failed {
            match lengths.get_mut(item) {
                Some(length) => *length = 0,
                None => return Err(RequestError::protocol(format!("an error of item {item}"))),
            }
        }
        for (i, (&item, &length)) in items.iter().zip(&lengths).enumerate() {
            if due(item).is_some_and(|due| due != length) && !failed.contains(&i) {
                return Err(RequestError::protocol(format!("item {i} has {length} bytes")));
            }
        }
    }
    let sum = lengths
        .iter()
        .try_fold(0usize, |sum, length| sum.checked_add(*length));
    if sum != Some(whole) {
        return Err(RequestError::protocol(format!(
            "{whole} bytes in a response of {sum:?}"
        )));
    }
    let failed_item = |item: &usize| FailedItem {
        label: Cow::Borrowed("ITEM"),
        message: format!("item {item} failed; octets do not say why"),
    };
    Ok(Response {
        items: items.len(),
        bytes: answer.bytes,
        failed: failed.iter().map(failed_item).collect(),
        body: Body::Octets {
            lengths,
            data: answer.data,
        },
    })
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
