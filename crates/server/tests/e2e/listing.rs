//! Lists, a page at a time, the same over both transports.

use crate::access_log::lines_of;
use crate::daemon::{Daemon, Setup, any_backend, eventually_async};
use crate::wire::{self, Narrow};
use prost::Message as _;
use ringfetch_proto::v1;
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// A page: its names and lengths, and the next page's token.
type Page = (Vec<(String, u64)>, String);

async fn datasets(daemon: &Daemon, page_size: u32, page_token: &str) -> Page {
    let request = v1::ListDatasetsRequest {
        page_size,
        page_token: page_token.to_owned(),
    };
    let answer = daemon
        .datasets()
        .await
        .list_datasets(request)
        .await
        .unwrap()
        .into_inner();
    let datasets = answer.datasets.into_iter();
    let listed = datasets.map(|dataset| (dataset.name, dataset.length_bytes));
    (listed.collect(), answer.next_page_token)
}

async fn objects(daemon: &Daemon, page_size: u32, page_token: &str) -> Page {
    let request = v1::ListObjectsRequest {
        dataset: "objects".into(),
        page_size,
        page_token: page_token.to_owned(),
    };
    let answer = daemon
        .datasets()
        .await
        .list_objects(request)
        .await
        .unwrap()
        .into_inner();
    let objects = answer.objects.into_iter();
    let listed = objects.map(|object| (object.name, object.length_bytes));
    (listed.collect(), answer.next_page_token)
}

async fn mirrored(daemon: &Daemon, path: &str, member: &str, page_size: u32, page_token: &str) -> Page {
    let path = format!(
        "{path}?page_size={page_size}&page_token={}",
        wire::escaped(page_token)
    );
    let answer = daemon.http_client().get(&path).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let answer = answer.json();
    let one = |listed: &Value| {
        let name = listed["name"].as_str().unwrap().to_owned();
        (name, listed["length_bytes"].as_u64().unwrap())
    };
    let listed = answer[member].as_array().unwrap().iter().map(one).collect();
    // Over HTTP the last page has no token at all.
    assert_ne!(answer.get("next_page_token"), Some(&json!("")));
    let next = answer
        .get("next_page_token")
        .map_or("", |token| token.as_str().unwrap());
    (listed, next.to_owned())
}

/// All pages of a list, over both transports: names and lengths, and the number of pages.
async fn pages(daemon: &Daemon, path: &str, page_size: u32) -> (Vec<(String, u64)>, usize) {
    let (mut seen, mut token) = (Vec::new(), String::new());
    for page in 1.. {
        let (member, (listed, next)) = if path == DATASETS {
            ("datasets", datasets(daemon, page_size, &token).await)
        } else {
            ("objects", objects(daemon, page_size, &token).await)
        };
        let mirrored = mirrored(daemon, path, member, page_size, &token).await;
        assert_eq!(mirrored, (listed.clone(), next.clone()), "{path} {page_size}");
        seen.extend(listed);
        token = next;
        if token.is_empty() {
            return (seen, page);
        }
    }
    unreachable!("the list has an end")
}

const DATASETS: &str = "/v1/datasets";
const OBJECTS: &str = "/v1/datasets/objects/objects";

#[tokio::test]
async fn both_transports_page_alike() {
    // Scenario: datasets and 1,100 objects in pages of the default size, of a few, of more than the maximum,
    // and after a name that does not exist; sizes that are not numbers. Expectation: the same pages over gRPC
    // and HTTP; all names, once, in order, with their lengths; over HTTP invalid sizes are refused with their
    // field.
    let setup = Setup::new("pread");
    setup.file("one", &[7; 512]);
    for number in 0..1100 {
        let bytes = vec![0; number % 7];
        setup.file(&format!("objects/{:02}/o {number:04}", number % 100), &bytes);
    }
    let dataset = |setup: Setup, name| {
        setup.dataset(&[
            &format!("name: {name}"),
            "kind: blocks",
            "block_bytes: 512",
            "path: one",
        ])
    };
    let setup = ["d", "a", "z", "c", "b", "e"].into_iter().fold(setup, dataset);
    let daemon = setup
        .dataset(&["name: objects", "kind: objects", "path: objects"])
        .start();
    let sorted = ["a", "b", "c", "d", "e", "objects", "z"];
    let sorted = sorted.map(|name| (name.to_owned(), if name == "objects" { 0 } else { 512 }));
    for (size, expected) in [(0, 1), (3, 3), (6, 2), (7, 1), (u32::MAX, 1)] {
        let (listed, count) = pages(&daemon, DATASETS, size).await;
        assert_eq!((listed, count), (sorted.to_vec(), expected), "{size}");
    }
    for (size, expected) in [(0, 2), (400, 3), (1000, 2), (5000, 2)] {
        let (listed, count) = pages(&daemon, OBJECTS, size).await;
        assert_eq!((listed.len(), count), (1100, expected), "{size}");
        assert!(listed.windows(2).all(|pair| pair[0].0 < pair[1].0), "{size}");
        for (name, length) in listed {
            let number: u64 = name[name.len() - 4..].parse().unwrap();
            assert_eq!(length, number % 7, "{name}");
        }
    }
    assert_eq!(
        datasets(&daemon, 1, "bb").await,
        (vec![("c".to_owned(), 512)], "c".to_owned())
    );
    assert_eq!(datasets(&daemon, 1, "zz").await, (Vec::new(), String::new()));
    let http = daemon.http_client();
    for path in [DATASETS, OBJECTS] {
        for (query, field) in [
            ("page_size=-1", "page_size"),
            ("page_size=x", "page_size"),
            ("page_size=", "page_size"),
            ("page_size=4294967296", "page_size"),
            ("page_size=1&page_size=2", "query"),
            ("page=1", "query"),
            ("limit=1", "query"),
            // Latin-1, and a character that is cut off.
            ("page_token=%E9", "page_token"),
            ("page_token=a%C3&page_size=1", "page_token"),
        ] {
            let answer = http.get(&format!("{path}?{query}")).await;
            answer.is_problem(400, "malformed", Some(field), &[]);
        }
        // What stands for bytes that are no text may be in a name.
        for token in ["%C3%A9", "%EF%BF%BD"] {
            let answer = http.get(&format!("{path}?page_token={token}")).await;
            assert_eq!(answer.status, 200, "{token}: {answer:?}");
        }
    }
    daemon.stop().await;
}

/// A directory `large` without objects that takes long to walk: 5,000 directories, each opened by a path of 100 parts.
fn long_walk(setup: &Setup) {
    let depth = setup.path("large").join(vec!["d"; 100].join("/"));
    std::fs::create_dir_all(&depth).unwrap();
    for number in 0..5000 {
        std::fs::create_dir(depth.join(number.to_string())).unwrap();
    }
}

#[tokio::test]
async fn listings_of_one_caller_leave_room_for_others() {
    // Scenario: a caller lists a directory that takes long to walk, eight times at once on as many connections;
    // during the walks it lists once more over gRPC, and another caller lists a small directory. Expectation: the
    // first caller is refused because of its own share, over both transports; the other one is served.
    let setup = Setup::new(any_backend());
    setup.file("small/a", b"a");
    long_walk(&setup);
    let daemon = setup
        .dataset(&["name: large", "kind: objects", "path: large"])
        .dataset(&["name: small", "kind: objects", "path: small"])
        .start();
    let [greedy, other] = ["127.0.0.1", "127.0.0.2"].map(|address| address.parse().unwrap());
    let (refused, status, served) = eventually_async("all happens during the walks", async || {
        let mut listings = JoinSet::new();
        for _ in 0..8 {
            let http = daemon.http_client_from(greedy);
            listings.spawn(async move { http.get("/v1/datasets/large/objects").await });
        }
        let refused = listings.join_next().await.unwrap().unwrap();
        let request = wire::listing("small");
        let status = daemon.datasets().await.list_objects(request).await.err();
        let http = daemon.http_client_from(other);
        let served = http.get("/v1/datasets/small/objects").await;
        while listings.try_join_next().is_some() {}
        let are_walking = refused.status != 200 && !listings.is_empty();
        status
            .filter(|_| are_walking)
            .map(|status| (refused, status, served))
    })
    .await;
    assert_eq!(served.status, 200, "{served:?}");
    refused.is_problem(429, "overloaded", None, &["this caller", "listings"]);
    assert!(
        refused.header("retry-after").parse::<u32>().is_ok(),
        "{refused:?}"
    );
    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status:?}");
    assert!(status.message().contains("this caller"), "{status:?}");
    let refused = [("reason", "listings")];
    assert!(daemon.sum("ringfetch_rejected_total", &refused).await >= 2);
    daemon.stop().await;
}

#[tokio::test]
async fn the_line_of_a_refused_listing_has_its_dataset() {
    // Scenario: a listing whose page size is no number. Expectation: the access log names the dataset, as for every other
    // refusal.
    let setup = Setup::new(any_backend());
    setup.file("objects/a", b"a");
    let daemon = setup
        .set("access_log.path", "access.log")
        .dataset(&["name: objects", "kind: objects", "path: objects"])
        .start();
    let path = format!("{OBJECTS}?page_size=x");
    let answer = daemon
        .http_client()
        .get_with(&path, &[("x-request-id", "one")])
        .await;
    assert_eq!(answer.status, 400, "{answer:?}");
    let line = &lines_of(&daemon, "one", 1).await[0];
    assert_eq!(line["dataset"], "objects", "{line}");
    daemon.stop().await;
}

#[tokio::test]
async fn a_listing_ends_at_its_deadline() {
    // Scenario: a call with a millisecond lists a directory that takes long to walk, and waits. Expectation:
    // DEADLINE_EXCEEDED from the daemon.
    let setup = Setup::new(any_backend());
    long_walk(&setup);
    let daemon = setup
        .dataset(&["name: large", "kind: objects", "path: large"])
        .start();
    let request = wire::listing("large");
    let mut narrow = Narrow::connect(daemon.grpc, 1 << 20).await;
    let headers = [
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("grpc-timeout", "1m"),
    ];
    let answer = narrow
        .ask(
            "/ringfetch.v1.DatasetService/ListObjects",
            &headers,
            wire::framed(&request.encode_to_vec()),
        )
        .await;
    let status = answer.status().await;
    assert_eq!(status.code(), tonic::Code::DeadlineExceeded, "{status:?}");
    daemon.stop().await;
}
