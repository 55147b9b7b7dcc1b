//! Tests of `http`.

use super::*;
use hyper::header::HeaderName;
use rcgen::{CertificateParams, KeyPair};
use std::io::{BufRead as _, BufReader, Write as _};

#[test]
fn urls_and_paths_are_what_http_wants() {
    let with = |tls| Credentials { tls, token: None };
    // Any authority: not every host has some.
    let authority = CertificateParams::default().self_signed(&KeyPair::generate().unwrap());
    let tls = Tls::new(Some(authority.unwrap().pem().as_bytes()), None);
    let tls = with(Some(tls.unwrap()));
    for (url, want) in [
        ("https://host", "host:443"),
        ("HTTPS://host", "host:443"),
        ("HTTP://host", "host:80"),
        ("http://127.0.0.1:7411", "127.0.0.1:7411"),
        ("http://host/", "host:80"),
        ("http://[::1]:7", "[::1]:7"),
    ] {
        assert_eq!(Site::of(url, &tls).unwrap().address, want);
    }
    for wrong in ["127.0.0.1:7411", "https://a:1", "http://", "http://a:1/v1", ""] {
        assert!(Site::of(wrong, &with(None)).is_err(), "{wrong}");
    }
    let token = |tls| Credentials {
        tls,
        token: Some(Token("s3cret".to_owned())),
    };
    for private in ["https://host", "http://[::1]:7", "http://localhost:7411"] {
        assert!(Site::of(private, &token(tls.tls.clone())).is_ok(), "{private}");
    }
    assert!(Site::of("http://host:7411", &token(tls.tls)).is_err());
    let mut path = String::new();
    encode("a b/c%é", &mut path);
    assert_eq!(path, "a%20b/c%25%C3%A9");
}

#[test]
fn batches_are_json() {
    let (names, dtype) = (
        vec!["a".to_owned(), "b\"c".to_owned()],
        ringfetch_client::Dtype::F32,
    );
    for (target, kind, json) in [
        (
            Target::Blocks { block_bytes: 8 },
            "blocks",
            r#"{"indices":[0,1]}"#,
        ),
        (Target::Vectors { dtype, dim: 2 }, "vectors", r#"{"ids":[0,1]}"#),
        (
            Target::Ranges { range_bytes: 10 },
            "ranges",
            r#"{"ranges":[{"offset":0,"length":10},{"offset":10,"length":10}]}"#,
        ),
        (Target::Objects { names }, "objects", r#"{"names":["a","b\"c"]}"#),
    ] {
        assert_eq!(batch(&target, &[0, 1]).unwrap(), (kind, json.to_owned()));
    }
}

#[test]
fn a_response_is_held_against_its_request() {
    // Responses to one and to three blocks of 8 bytes.
    let workload = crate::load::workload::Workload::of_blocks(10);
    let lengths = |head: &str, bytes: usize, items: &[u64]| {
        let mut response = HttpResponse {
            status: StatusCode::OK,
            head: HeaderMap::new(),
            bytes: u64::try_from(bytes).unwrap(),
            data: vec![7; bytes].into(),
        };
        for (name, value) in head.split_whitespace().filter_map(|field| field.split_once('=')) {
            let name = HeaderName::try_from(format!("ringfetch-{name}")).unwrap();
            response.head.insert(name, value.parse().unwrap());
        }
        match octets(response, workload.part(0), items).ok()?.body {
            Body::Octets { lengths, .. } => Some(lengths),
            other @ (Body::None | Body::Items(_) | Body::Ranked(_)) => panic!("{other:?}"),
        }
    };
    assert_eq!(lengths("", 8, &[1]), Some(vec![8]));
    assert_eq!(lengths("", 7, &[1]), None);
    for (head, bytes, want) in [
        ("items=3 item-bytes=8", 24, Some(vec![8, 8, 8])),
        ("items=3 item-bytes=8 error-items=1", 16, Some(vec![8, 0, 8])),
        ("items=3 item-bytes=8", 16, None),
        ("item-bytes=8", 24, None),
        ("items=3", 24, None),
        ("items=3 item-bytes=8 error-items=3", 16, None),
        ("items=3 lengths=8,8", 16, None),
        ("items=3 lengths=8,4,8", 20, None),
    ] {
        assert_eq!(lengths(head, bytes, &[1, 2, 3]), want, "{head}");
    }
}

#[test]
fn a_refusal_says_what_the_server_said() {
    // A problem, another text, and nothing.
    for (data, message) in [
        (r#"{"detail":"no such dataset"}"#, "302 Found: no such dataset"),
        ("gone", "302 Found: gone"),
        ("", "302 Found"),
    ] {
        let response = HttpResponse {
            status: StatusCode::FOUND,
            head: HeaderMap::new(),
            bytes: 0,
            data: data.into(),
        };
        assert_eq!(refused(&response).message, message);
    }
}

#[tokio::test]
async fn a_connection_that_was_closed_while_idle_costs_no_request() {
    // Scenario: a server that closes each connection after its first answer, without a word. Expectation: every request
    // that is made after that is answered.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (close, closed) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            let mut head = BufReader::new(&connection).lines();
            while !head.next().unwrap().unwrap().is_empty() {}
            drop(head);
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n12345678";
            connection.write_all(answer).unwrap();
            drop(connection);
            close.send(()).unwrap();
        }
    });
    let (tls, token) = (None, None);
    let timeout = Duration::from_secs(60);
    let http = Http::connect(&url, &Credentials { tls, token }, 1, timeout).await;
    let (http, workload) = (http.unwrap(), crate::load::workload::Workload::of_blocks(10));
    for _ in 0..3 {
        let answer = http.fetch(0, workload.part(0), &[1]).await;
        assert_eq!(answer.unwrap().bytes, 8);
        closed.recv().unwrap();
        // The runtime looks for events every 61 turns at the latest.
        for _ in 0..200 {
            tokio::task::yield_now().await;
        }
    }
}
