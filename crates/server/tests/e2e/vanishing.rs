//! Files that are truncated, replaced or removed while they are served: reads of lost bytes are errors,
//! everything else continues, on every backend (including mmap, where a lost page is a SIGBUS).

use crate::daemon::{Setup, backends_and_auto, eventually_async};
use crate::data::{noise, plain_blocks};
use crate::wire;
use ringfetch_proto::v1;
use std::fs::{File, OpenOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tonic::Code;

const COUNT: u64 = 1024;

#[tokio::test]
async fn a_file_cut_short_under_load_loses_only_what_is_gone() {
    // Scenario: clients read random blocks while the file is truncated to half, in the middle of a block.
    // Expectation: never a wrong byte; blocks before the cut are served, those after it are DATA_LOSS; the
    // process survives; another dataset is not affected.
    for backend in backends_and_auto() {
        let setup = Setup::new(backend);
        let (setup, bytes) = plain_blocks(setup, usize::try_from(COUNT).unwrap());
        setup.file("other.bin", &bytes);
        let setup = setup.dataset(&["{name: other, kind: blocks, block_bytes: 4KiB, path: other.bin}"]);
        let mut daemon = setup.start();
        let bytes = Arc::new(bytes);
        let cut = AtomicBool::new(false);
        let (before, lost) = (AtomicU64::new(0), AtomicU64::new(0));
        let reader = async |seed: u64| {
            let mut fetch = daemon.fetch().await;
            let mut random = fastrand::Rng::with_seed(seed);
            let mut rounds_after = 0;
            while rounds_after < 40 {
                let was_cut = cut.load(Ordering::Acquire);
                let indices: Vec<u64> = (0..32).map(|_| random.u64(..COUNT)).collect();
                let answer = fetch
                    .fetch_blocks(wire::blocks("blocks", &indices))
                    .await
                    .unwrap()
                    .into_inner();
                let failed: Vec<u64> = answer
                    .errors
                    .iter()
                    .map(|error| indices[error.item as usize])
                    .collect();
                for error in &answer.errors {
                    assert_eq!(error.code, i32::from(Code::DataLoss), "{error:?}");
                    assert!(
                        error.message.contains("truncated after it was opened"),
                        "{error:?}"
                    );
                }
                // Block 512 was cut in the middle, so it is lost as well.
                assert!(failed.iter().all(|index| *index >= COUNT / 2), "{failed:?}");
                let good = indices.iter().filter(|index| !failed.contains(index));
                let expected: Vec<u8> = good.flat_map(|index| block(&bytes, *index)).collect();
                assert!(answer.data == expected, "{backend}: wrong bytes");
                if was_cut {
                    assert!(
                        indices
                            .iter()
                            .all(|index| *index < COUNT / 2 || failed.contains(index)),
                        "{backend}"
                    );
                    rounds_after += 1;
                    lost.fetch_add(failed.len() as u64, Ordering::Relaxed);
                } else {
                    before.fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        let cutter = async {
            eventually_async("some reads before the cut", async || {
                (before.load(Ordering::Relaxed) > 20).then_some(())
            })
            .await;
            let file = OpenOptions::new()
                .write(true)
                .open(daemon.path("blocks.bin"))
                .unwrap();
            file.set_len(COUNT / 2 * 4096 + 1000).unwrap();
            cut.store(true, Ordering::Release);
        };
        tokio::join!(reader(1), reader(2), reader(3), cutter);
        assert!(lost.load(Ordering::Relaxed) > 0);

        // The rest of the block that was cut is still readable; HTTP reports the lost part in the same way.
        let mut fetch = daemon.fetch().await;
        let ranges = [(COUNT / 2 * 4096, 1000), (COUNT / 2 * 4096, 1001)];
        let answer = fetch
            .fetch_ranges(wire::ranges("blocks", &ranges))
            .await
            .unwrap()
            .into_inner();
        assert_eq!(
            (answer.lengths, answer.errors[0].code),
            (vec![1000, 0], i32::from(Code::DataLoss))
        );
        let answer = daemon
            .http_client()
            .get(&format!("/v1/datasets/blocks/blocks/{}", COUNT - 1))
            .await;
        answer.is_problem(500, "truncated", None, &["truncated after it was opened"]);
        let answer = fetch
            .fetch_blocks(wire::blocks("other", &[COUNT - 1]))
            .await
            .unwrap()
            .into_inner();
        assert!(
            answer.errors.is_empty() && answer.data == block(&bytes, COUNT - 1),
            "{backend}"
        );
        let scrape = daemon.scrape().await;
        assert!(
            scrape.sum(
                "ringfetch_reads_total",
                &[("dataset", "blocks"), ("result", "truncated")]
            ) > 0
        );
        assert_eq!(scrape.sum("ringfetch_shard_failures_total", &[]), 0);
        assert!(daemon.is_alive());
        daemon.assert_serves("blocks").await;
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_file_that_grows_back_is_readable_again() {
    // Scenario: a file is truncated to nothing and written again with the same length. Expectation: all lost,
    // then the new bytes, on every backend; no old byte.
    for backend in backends_and_auto() {
        let (setup, _) = plain_blocks(Setup::new(backend), 64);
        let daemon = setup.start();
        let mut fetch = daemon.fetch().await;
        let request = wire::blocks("blocks", &[0, 63]);
        assert!(
            fetch
                .fetch_blocks(request.clone())
                .await
                .unwrap()
                .into_inner()
                .errors
                .is_empty()
        );
        File::create(daemon.path("blocks.bin")).unwrap();
        let answer = fetch.fetch_blocks(request.clone()).await.unwrap().into_inner();
        assert_eq!((answer.errors.len(), answer.data.len()), (2, 0), "{backend}");
        let fresh = noise(50, 64 * 4096);
        std::fs::write(daemon.path("blocks.bin"), &fresh).unwrap();
        let answer = fetch.fetch_blocks(request.clone()).await.unwrap().into_inner();
        let expected = [block(&fresh, 0), block(&fresh, 63)].concat();
        assert!(
            answer.errors.is_empty() && answer.data == expected,
            "{backend}: {:?}",
            answer.errors
        );
        daemon.stop().await;
    }
}

#[tokio::test]
async fn an_object_replaced_by_rename_is_read_anew() {
    // Scenario: an object is replaced by a file of another length, under load, and then removed. Expectation:
    // after `revalidate_ms` the new bytes and a new tag, never a mixture; after the removal NOT_FOUND and
    // 404.
    for backend in backends_and_auto() {
        let setup = Setup::new(backend);
        let (old, new) = (noise(60, 70_000), noise(61, 90_001));
        setup.file("objects/a/o", &old);
        setup.file("objects/other", b"other");
        setup.file("next", &new);
        let setup = setup.dataset(&["{name: objects, kind: objects, path: objects, revalidate_ms: 100}"]);
        let daemon = setup.start();
        let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());
        let request = wire::objects("objects", &["a/o", "other"]);
        let path = "/v1/datasets/objects/objects/a/o";
        let tag = http.get(path).await.header("etag").to_owned();

        let whole = |answer: &v1::FetchObjectsResponse, expected: &[u8]| {
            answer.errors.is_empty() && answer.data == [expected, b"other"].concat()
        };
        assert!(whole(
            &fetch.fetch_objects(request.clone()).await.unwrap().into_inner(),
            &old
        ));
        std::fs::rename(daemon.path("next"), daemon.path("objects/a/o")).unwrap();
        eventually_async("the new object is served", async || {
            let answer = fetch.fetch_objects(request.clone()).await.unwrap().into_inner();
            if whole(&answer, &new) {
                return Some(());
            }
            assert!(
                whole(&answer, &old),
                "{backend}: neither the old nor the new object"
            );
            None
        })
        .await;
        let answer = http.get_with(path, &[("if-none-match", &tag)]).await;
        assert_eq!(answer.status, 200, "another version has another tag");
        assert!(answer.body == new, "{backend}");
        let stale = http
            .get_with(path, &[("range", "bytes=0-9"), ("if-range", &tag)])
            .await;
        assert_eq!((stale.status.as_u16(), stale.body.len()), (200, new.len()));

        std::fs::remove_file(daemon.path("objects/a/o")).unwrap();
        let gone = eventually_async("the removal is noticed", async || {
            let answer = fetch.fetch_objects(request.clone()).await.unwrap().into_inner();
            (!answer.errors.is_empty()).then_some(answer)
        })
        .await;
        assert_eq!(
            (gone.errors.len(), gone.errors[0].code),
            (1, i32::from(Code::NotFound))
        );
        assert_eq!(gone.data, &b"other"[..]);
        http.get(path)
            .await
            .is_problem(404, "object-not-found", Some("object"), &["a/o"]);
        daemon.stop().await;
    }
}

#[tokio::test]
async fn an_object_cut_short_is_lost_once_and_then_what_it_is() {
    // Scenario: an open object is truncated, again and again, and read in a batch, in one that fails as a whole, and over HTTP.
    // Expectation: a read of the lost part is DATA_LOSS on every backend, and the object is opened again at once, without
    // waiting for `revalidate_ms`: complete at its new length.
    for backend in backends_and_auto() {
        let setup = Setup::new(backend);
        let bytes = noise(70, 50_000);
        setup.file("objects/o", &bytes);
        let setup = setup.dataset(&["{name: objects, kind: objects, path: objects, revalidate_ms: 3600000}"]);
        let daemon = setup.start();
        let mut fetch = daemon.fetch().await;
        let request = wire::objects("objects", &["o"]);
        assert!(
            fetch
                .fetch_objects(request.clone())
                .await
                .unwrap()
                .into_inner()
                .data
                == bytes
        );
        let object = OpenOptions::new()
            .write(true)
            .open(daemon.path("objects/o"))
            .unwrap();
        for length in [20_001, 15_000, 10_000] {
            object.set_len(length).unwrap();
            match length {
                20_001 => {
                    let answer = fetch.fetch_objects(request.clone()).await.unwrap().into_inner();
                    assert_eq!(
                        (answer.errors.len(), answer.errors[0].code),
                        (1, i32::from(Code::DataLoss)),
                        "{backend}"
                    );
                    assert_eq!((answer.data.len(), answer.lengths), (0, vec![0]));
                }
                15_000 => {
                    let mut request = request.clone();
                    request.fail_fast = true;
                    let status = fetch.fetch_objects(request).await.unwrap_err();
                    assert_eq!(status.code(), Code::DataLoss, "{backend}");
                }
                _ => {
                    let http = daemon.http_client();
                    let answer = http.get("/v1/datasets/objects/objects/o").await;
                    assert_eq!(
                        (answer.status.as_u16(), answer.body.len()),
                        (200, 10_000),
                        "{backend}"
                    );
                }
            }
            let answer = fetch.fetch_objects(request.clone()).await.unwrap().into_inner();
            assert!(
                answer.errors.is_empty() && answer.data == bytes[..usize::try_from(length).unwrap()],
                "{backend}: {:?}",
                answer.errors
            );
        }
        daemon.stop().await;
    }
}

fn block(bytes: &[u8], index: u64) -> Vec<u8> {
    bytes[usize::try_from(index * 4096).unwrap()..][..4096].to_vec()
}
