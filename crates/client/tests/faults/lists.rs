//! Lists that come in pages.

use crate::calls::timeout_us;
use crate::fake::Fake;
use futures_util::{StreamExt as _, TryStreamExt as _};
use ringfetch_client::{Error, ObjectInfo};
use ringfetch_proto::v1 as wire;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;

#[tokio::test(start_paused = true)]
async fn objects_are_listed_page_by_page() {
    // Scenario: three pages of two names; then a server whose page names itself as the next.
    // Expected: six names in order; a protocol error instead of a loop.
    let object = |n: u64| wire::ObjectInfo {
        name: n.to_string(),
        length_bytes: n,
    };
    let fake = Fake::new().on_list(move |request| {
        let page = request.page_token.parse().unwrap_or(0);
        let next_page_token = if page < 2 {
            (page + 1).to_string()
        } else {
            String::new()
        };
        wire::ListObjectsResponse {
            objects: vec![object(2 * page), object(2 * page + 1)],
            next_page_token,
        }
    });
    let objects: Vec<_> = fake.client().list_objects("d").try_collect().await.unwrap();
    assert_eq!(
        objects,
        (0..6)
            .map(|n: u64| ObjectInfo::new(n.to_string(), n))
            .collect::<Vec<_>>()
    );

    let fake = Fake::new().on_list(|_| wire::ListObjectsResponse {
        objects: vec![],
        next_page_token: "again".into(),
    });
    let error = fake
        .client()
        .list_objects("d")
        .try_collect::<Vec<_>>()
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn datasets_are_listed_to_the_last_page() {
    // Scenario: a page without datasets and two with one; then a server whose page names itself as the next; then one with a
    // next page after each, which take 4 s. Expected: both datasets; a protocol error instead of a loop; DeadlineExceeded after
    // the 10 s that a call may take, and the third page's request says that 2 s are left.
    let dataset = |n: usize| wire::Dataset {
        name: n.to_string(),
        ..Default::default()
    };
    let fake = Fake::new().on_datasets(move |request| {
        let page = request.get_ref().page_token.parse().unwrap_or(0);
        let next_page_token =
            [Some(1), Some(2), None][page].map_or_else(String::new, |next: usize| next.to_string());
        std::future::ready(wire::ListDatasetsResponse {
            datasets: (page > 0).then(|| dataset(page)).into_iter().collect(),
            next_page_token,
        })
    });
    let names = fake.client().list_datasets().await.unwrap();
    let names: Vec<_> = names.iter().map(|dataset| dataset.name.as_str()).collect();
    assert_eq!(names, ["1", "2"]);

    let fake = Fake::new().on_datasets(move |_| {
        std::future::ready(wire::ListDatasetsResponse {
            datasets: vec![dataset(0)],
            next_page_token: "again".into(),
        })
    });
    let error = fake.client().list_datasets().await.unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");

    let pages: Arc<Mutex<Vec<usize>>> = Arc::default();
    let seen = Arc::clone(&pages);
    let fake = Fake::new().on_datasets(move |request| {
        let mut seen = seen.lock().unwrap();
        seen.push(timeout_us(&request));
        let next_page_token = seen.len().to_string();
        async move {
            tokio::time::sleep(Duration::from_secs(4)).await;
            wire::ListDatasetsResponse {
                next_page_token,
                ..Default::default()
            }
        }
    });
    let begin = Instant::now();
    let error = fake.client().list_datasets().await.unwrap_err();
    assert!(matches!(error, Error::DeadlineExceeded), "{error:?}");
    assert_eq!(begin.elapsed().as_secs(), 10);
    let pages = pages.lock().unwrap();
    assert!(
        pages.len() == 3 && (1_900_000..=2_000_000).contains(&pages[2]),
        "{pages:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_list_whose_pages_come_again_ends() {
    // Scenario: lists whose second page names the first one as the next, and one that has a name twice. Expected: a protocol
    // error each, that says which name is not in order.
    let fake = Fake::new()
        .on_list(|request| {
            let n = u64::from(request.page_token == "1");
            wire::ListObjectsResponse {
                objects: vec![wire::ObjectInfo {
                    name: format!("o{n}"),
                    length_bytes: 1,
                }],
                next_page_token: (1 - n).to_string(),
            }
        })
        .on_datasets(|_| {
            let dataset = wire::Dataset {
                name: "d".into(),
                ..Default::default()
            };
            std::future::ready(wire::ListDatasetsResponse {
                datasets: vec![dataset.clone(), dataset],
                next_page_token: String::new(),
            })
        });
    let client = fake.client();
    let objects = client.list_objects("d").take(10).try_collect::<Vec<_>>().await;
    let datasets = client.list_datasets().await;
    for (error, want) in [
        (objects.unwrap_err(), r#""o0" after "o1""#),
        (datasets.unwrap_err(), r#""d" after "d""#),
    ] {
        assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
        assert!(error.to_string().contains(want), "{error}");
    }
}
