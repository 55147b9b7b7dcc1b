//! The bytes resource and objects over HTTP: ranges, several ranges, conditions, HEAD, on every backend; some
//! of it also with curl.

use crate::daemon::{Daemon, Setup, any_backend, backends_and_auto, setups};
use crate::data::everything;
use crate::wire::{Answer, Http, curl};
use http::Method;

#[tokio::test]
async fn ranges_and_conditions_on_every_backend() {
    // Scenario: an address space of many files and an object of 3 MiB, requested in every way that HTTP has.
    // Expectation: the responses that RFC 9110 requires, with the bytes of the files.
    for setup in setups() {
        let (setup, everything) = everything(setup);
        let daemon = setup.start();
        let http = daemon.http_client();
        let joined = &everything.spaces[0];
        assert_eq!(joined.name, "joined");
        for (path, bytes) in [
            ("/v1/datasets/joined/bytes", &joined.bytes),
            ("/v1/datasets/objects/objects/large.bin", &everything.objects[2].1),
        ] {
            one_range(&http, path, bytes).await;
            several_ranges(&http, path, bytes).await;
            conditions(&http, path, bytes).await;
            heads(&http, path, bytes).await;
        }
        emptiness(&http).await;
        daemon.stop().await;
    }
}

/// Satisfiable, past the end, and malformed.
async fn one_range(http: &Http, path: &str, bytes: &[u8]) {
    let length = bytes.len();
    for (range, from, to) in [
        ("bytes=0-0".to_owned(), 0, 1),
        ("bytes=511-513".to_owned(), 511, 514),
        ("bytes=-1".to_owned(), length - 1, length),
        (format!("bytes=-{}", length + 1), 0, length),
        (format!("bytes={}-", length - 4097), length - 4097, length),
        (format!("bytes=40000-{}", u64::MAX), 40_000, length),
        (format!("bytes={}-{}", length - 1, length - 1), length - 1, length),
    ] {
        let answer = http.get_with(path, &[("range", &range)]).await;
        assert_eq!(answer.status, 206, "{range}: {answer:?}");
        assert_eq!(
            answer.header("content-range"),
            format!("bytes {from}-{}/{length}", to - 1),
            "{range}"
        );
        assert_eq!(answer.header("accept-ranges"), "bytes");
        assert_eq!(
            answer.header("content-length"),
            (to - from).to_string(),
            "{range}"
        );
        assert!(answer.body == bytes[from..to], "{range}");
    }
    for range in [
        format!("bytes={length}-"),
        "bytes=-0".to_owned(),
        format!("bytes={}-", u64::MAX),
    ] {
        let answer = http.get_with(path, &[("range", &range)]).await;
        answer.is_problem(
            416,
            "range-not-satisfiable",
            Some("Range"),
            &["past the end", &length.to_string()],
        );
        assert_eq!(
            answer.header("content-range"),
            format!("bytes */{length}"),
            "{range}"
        );
    }
    for range in ["bytes=2-1", "bytes=a-b", "lines=1-2", "bytes="] {
        let answer = http.get_with(path, &[("range", range)]).await;
        assert_eq!(answer.status, 200, "{range} is no range and is not looked at");
        assert_eq!(answer.header("content-length"), length.to_string(), "{range}");
        assert!(answer.body == bytes, "{range}");
    }
}

async fn several_ranges(http: &Http, path: &str, bytes: &[u8]) {
    let length = bytes.len();
    // Out of order, adjacent, across files, the last byte; one past the end, which is left out.
    let wanted = [(39_990, 40_020), (0, 1), (1, 5000), (length - 1, length)];
    let list: Vec<String> = wanted
        .iter()
        .map(|(from, to)| format!("{from}-{}", to - 1))
        .collect();
    let range = format!("bytes={},{length}-", list.join(", "));
    let answer = http.get_with(path, &[("range", &range)]).await;
    assert_eq!(answer.status, 206, "{answer:?}");
    let parts = multipart(&answer);
    assert_eq!(parts.len(), wanted.len());
    for ((from, to), (content_range, data)) in wanted.into_iter().zip(parts) {
        assert_eq!(content_range, format!("bytes {from}-{}/{length}", to - 1));
        assert!(data == bytes[from..to], "{content_range}");
    }
    // The first part is nearly everything: of the object, more than two windows.
    let range = format!("bytes=1000-{},-10,5-5", length - 100);
    let other = http.get_with(path, &[("range", &range)]).await;
    assert_ne!(boundary(&other), boundary(&answer));
    let parts = multipart(&other);
    let wanted = [(1000, length - 99), (length - 10, length), (5, 6)];
    assert_eq!(parts.len(), wanted.len());
    for ((from, to), (content_range, data)) in wanted.into_iter().zip(parts) {
        assert_eq!(content_range, format!("bytes {from}-{}/{length}", to - 1));
        assert!(data == bytes[from..to], "{content_range}");
    }
    // One that is left of two is sent as one.
    let range = format!("bytes=10-19,{length}-");
    let answer = http.get_with(path, &[("range", &range)]).await;
    assert_eq!(answer.header("content-range"), format!("bytes 10-19/{length}"));
    assert!(answer.body == bytes[10..20]);
    // Many small ones, as from a client that reads chunks.
    let many: Vec<String> = (0..64).map(|i| format!("{}-{}", i * 900, i * 900 + 99)).collect();
    let answer = http
        .get_with(path, &[("range", &format!("bytes={}", many.join(",")))])
        .await;
    for (index, (_, data)) in multipart(&answer).into_iter().enumerate() {
        assert!(data == bytes[index * 900..index * 900 + 100], "part {index}");
    }
    // One more than is allowed, and a flood of overlapping ones: refused, with a remedy.
    let more = format!("bytes={},0-0", many.join(","));
    let answer = http.get_with(path, &[("range", &more)]).await;
    answer.is_problem(
        400,
        "malformed",
        Some("Range"),
        &["65 ranges", "limits.http_ranges", "batchFetch"],
    );
    let answer = http.get_with(path, &[("range", "bytes=0-,0-,0-,0-")]).await;
    answer.is_problem(400, "malformed", Some("Range"), &["overlap", "each byte once"]);
}

async fn conditions(http: &Http, path: &str, bytes: &[u8]) {
    let tag = http
        .send(Method::HEAD, path, &[], "")
        .await
        .header("etag")
        .to_owned();
    assert!(tag.starts_with('"') && tag.len() > 10, "a strong tag: {tag}");
    let stale = "\"stale\"";
    let weak = format!("W/{tag}");
    let (date, list) = ("Tue, 15 Nov 1994 12:45:26 GMT", format!("{tag}, {stale}"));
    for (headers, status) in [
        (vec![("if-none-match", tag.as_str())], 304),
        (vec![("if-none-match", weak.as_str())], 304),
        (vec![("if-none-match", "*")], 304),
        (vec![("if-none-match", stale)], 200),
        (
            vec![("if-none-match", stale), ("if-none-match", tag.as_str())],
            304,
        ),
        (vec![("if-match", tag.as_str())], 200),
        (vec![("if-match", stale)], 412),
        (vec![("if-match", stale), ("if-none-match", tag.as_str())], 412),
        (vec![("range", "bytes=1-2"), ("range", "bytes=1-2")], 200),
        (vec![("range", "bytes=1-2"), ("if-range", tag.as_str())], 206),
        (vec![("range", "bytes=1-2"), ("if-range", stale)], 200),
        (vec![("range", "bytes=1-2"), ("if-range", weak.as_str())], 200),
        (vec![("range", "bytes=1-2"), ("if-range", date)], 200),
        (vec![("range", "bytes=1-2"), ("if-range", "*")], 200),
        (vec![("range", "bytes=1-2"), ("if-range", list.as_str())], 200),
        (
            vec![
                ("range", "bytes=1-2"),
                ("if-range", tag.as_str()),
                ("if-range", tag.as_str()),
            ],
            200,
        ),
        (vec![("range", "bytes=99999999999-"), ("if-range", stale)], 200),
        (vec![("range", "bytes=0-,0-,0-"), ("if-range", stale)], 200),
        (vec![("range", "bytes=1-2"), ("if-none-match", tag.as_str())], 304),
        (vec![("range", "bytes=99999999999-"), ("if-match", stale)], 412),
    ] {
        let answer = http.get_with(path, &headers).await;
        assert_eq!(answer.status, status, "{headers:?}: {answer:?}");
        assert_eq!(answer.header("etag"), tag, "{headers:?}");
        match status {
            200 => assert!(answer.body == bytes, "{headers:?}"),
            206 => assert_eq!(answer.body, bytes[1..3], "{headers:?}"),
            304 => assert!(answer.body.is_empty(), "{headers:?}"),
            _ => answer.is_problem(412, "precondition-failed", Some("If-Match"), &["ETag"]),
        }
    }
    // A tag without its quotes, as the JSON description has it, is told so.
    let bare = tag.trim_matches('"');
    for (name, field) in [
        ("if-match", "If-Match"),
        ("if-none-match", "If-None-Match"),
        ("if-range", "If-Range"),
    ] {
        let answer = http.get_with(path, &[("range", "bytes=1-2"), (name, bare)]).await;
        answer.is_problem(400, "malformed", Some(field), &["double quotes"]);
    }
    // Without Range it does not apply.
    assert_eq!(http.get_with(path, &[("if-range", bare)]).await.status, 200);
}

async fn heads(http: &Http, path: &str, bytes: &[u8]) {
    // HEAD ignores ranges, reads nothing, and has the head of the whole resource.
    for headers in [vec![], vec![("range", "bytes=0-0")]] {
        let answer = http.send(Method::HEAD, path, &headers, "").await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("content-length"), bytes.len().to_string());
        assert_eq!(answer.header("content-type"), "application/octet-stream");
        assert!(answer.body.is_empty());
    }
    for (condition, tag, status) in [("if-none-match", "*", 304), ("if-match", "\"stale\"", 412)] {
        let answer = http.send(Method::HEAD, path, &[(condition, tag)], "").await;
        assert_eq!(answer.status, status, "{condition}");
    }
}

#[tokio::test]
async fn head_has_the_head_of_get_and_reads_nothing() {
    // Scenario: HEAD of every resource with bytes, and of one that is not there. Expectation: GET's status and head; nothing
    // is read.
    let (setup, _) = everything(Setup::new(any_backend()));
    let daemon = setup.start();
    let http = daemon.http_client();
    for path in [
        "joined/bytes",
        "tailed/blocks/3",
        "fbin/vectors/7",
        "objects/objects/large.bin",
        "objects/objects/empty",
    ] {
        let path = format!("/v1/datasets/{path}");
        let get = http.get(&path).await;
        let reads = daemon.sum("ringfetch_reads_total", &[]).await;
        let head = http.send(Method::HEAD, &path, &[], "").await;
        assert_eq!((get.status.as_u16(), head.status.as_u16()), (200, 200), "{path}");
        for name in ["content-length", "content-type", "etag", "accept-ranges"] {
            assert_eq!(head.header(name), get.header(name), "{path} {name}");
        }
        assert_eq!(daemon.sum("ringfetch_reads_total", &[]).await, reads, "{path}");
    }
    let gone = "/v1/datasets/tailed/blocks/999999";
    assert_eq!(http.send(Method::HEAD, gone, &[], "").await.status, 404);
    daemon.stop().await;
}

#[tokio::test]
#[ignore = "needs curl"]
async fn curl_reads_what_it_asks_for_on_every_backend() {
    // Scenario: the same with curl: its ranges, its HEAD, its paths, and HTTP/2. Expectation: the same.
    for backend in backends_and_auto() {
        let (setup, everything) = everything(Setup::new(backend));
        let daemon = setup.start();
        let joined = &everything.spaces[0];
        by_curl(&daemon, "/v1/datasets/joined/bytes", &joined.bytes);
        let object = &everything.objects[2].1;
        by_curl(&daemon, "/v1/datasets/objects/objects/large.bin", object);
        daemon.stop().await;
    }
}

fn by_curl(daemon: &Daemon, path: &str, bytes: &[u8]) {
    let url = format!("{{http}}{path}");
    assert!(curl(daemon, &[&url]) == bytes);
    assert!(curl(daemon, &["--http2-prior-knowledge", &url]) == bytes);
    assert!(curl(daemon, &["--range", "3-4000", &url]) == bytes[3..=4000]);
    assert!(curl(daemon, &["--continue-at", "60000", &url]) == bytes[60_000..]);
    let head = String::from_utf8(curl(daemon, &["--head", &url]))
        .unwrap()
        .to_lowercase();
    assert!(
        head.contains("200 ok") && head.contains(&format!("content-length: {}", bytes.len())),
        "{head}"
    );
    let several = curl(daemon, &["--include", "--range", "0-1,5-6", &url]);
    let text = String::from_utf8_lossy(&several);
    assert!(
        text.contains("multipart/byteranges") && text.contains(&format!("bytes 5-6/{}", bytes.len())),
        "{text}"
    );
    let code = [
        "--path-as-is",
        "--output",
        "/dev/null",
        "--write-out",
        "%{http_code}",
    ];
    let climbing = "{http}/v1/datasets/objects/objects/../../../etc/passwd";
    assert_eq!(curl(daemon, &[&code[..], &[climbing]].concat()), b"400");
}

/// An empty object.
async fn emptiness(http: &Http) {
    let path = "/v1/datasets/objects/objects/empty";
    let answer = http.get(path).await;
    assert_eq!(
        (
            answer.status.as_u16(),
            answer.header("content-length"),
            answer.body.len()
        ),
        (200, "0", 0)
    );
    let answer = http.get_with(path, &[("range", "bytes=0-0")]).await;
    answer.is_problem(
        416,
        "range-not-satisfiable",
        Some("Range"),
        &["past the end of 0 bytes"],
    );
    assert_eq!(answer.header("content-range"), "bytes */0");
    assert_eq!(http.get_with(path, &[("range", "bytes=-5")]).await.status, 200);
}

fn boundary(answer: &Answer) -> &str {
    answer
        .header("content-type")
        .strip_prefix("multipart/byteranges; boundary=")
        .unwrap_or_else(|| panic!("{answer:?}"))
}

/// The parts of a multipart/byteranges response, (Content-Range, bytes), parsed according to RFC 2046.
fn multipart(answer: &Answer) -> Vec<(String, Vec<u8>)> {
    let boundary = boundary(answer);
    // RFC 2046: without characters that need quotes.
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    assert!(
        boundary.len() <= 70 && boundary.bytes().all(is_plain),
        "{boundary}"
    );
    assert_eq!(answer.header("content-length"), answer.body.len().to_string());
    let mut rest = &answer.body[..];
    let mut parts = Vec::new();
    let eat = |rest: &mut &[u8], token: &str| {
        let found = rest.strip_prefix(token.as_bytes());
        *rest = found.unwrap_or(rest);
        found.is_some()
    };
    assert!(eat(&mut rest, &format!("--{boundary}\r\n")));
    loop {
        let blank = rest
            .windows(4)
            .position(|window| window == b"\r\n\r\n")
            .expect("a blank line");
        let head = std::str::from_utf8(&rest[..blank]).expect("text");
        assert!(head.contains("Content-Type: application/octet-stream"), "{head}");
        let range = head
            .lines()
            .find_map(|line| line.strip_prefix("Content-Range: "))
            .expect("Content-Range");
        let (first, last) = range
            .strip_prefix("bytes ")
            .and_then(|range| range.split('/').next()?.split_once('-'))
            .expect("a range");
        let length = last.parse::<usize>().unwrap() - first.parse::<usize>().unwrap() + 1;
        rest = &rest[blank + 4..];
        parts.push((range.to_owned(), rest[..length].to_vec()));
        rest = &rest[length..];
        assert!(eat(&mut rest, &format!("\r\n--{boundary}")));
        if eat(&mut rest, "--\r\n") {
            assert!(rest.is_empty());
            return parts;
        }
        assert!(eat(&mut rest, "\r\n"));
    }
}
