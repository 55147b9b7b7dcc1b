//! An objects dataset in a process that runs out of descriptors. Alone in its binary, since the limit is per
//! process.

use ringfetch_engine::config::DirectIo;
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec};
use ringfetch_engine::error::ReadError;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::sync::Arc;
use std::time::Duration;

/// The cache may hold far more than the process: it closes half of its files, and every object opens and is listed.
/// Held files cannot be closed: then the object is unreadable with EMFILE, and readable again once they are dropped.
#[tokio::test]
async fn the_cache_gives_way() {
    let dir = tempfile::tempdir().unwrap();
    for index in 0..200 {
        std::fs::write(dir.path().join(index.to_string()), b"x").unwrap();
    }
    let spec = DatasetSpec {
        name: "objects".to_owned(),
        paths: vec![dir.path().to_owned()],
        kind: KindSpec::Objects {
            max_open_files: 10_000,
            revalidate: Duration::from_secs(3600),
        },
        direct_io: DirectIo::Preferred,
    };
    let dataset = Arc::new(Dataset::open(&spec).unwrap());
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(64);
    setrlimit(Resource::Nofile, limit).unwrap();

    // Objects take two descriptors each: of an odd number of free ones one would always remain.
    let mut odd = Vec::new();
    for _ in 0..2 {
        for index in 0..200 {
            let object = dataset.object(&index.to_string()).await;
            assert_eq!(object.unwrap().length_bytes(), 1);
            let listed = dataset.list_objects("", 1, &|| true);
            assert_eq!(listed.unwrap().len(), 1, "with {index} objects opened");
        }
        odd.push(std::fs::File::open(dir.path()).unwrap());
    }
    let mut held = Vec::new();
    let error = loop {
        match dataset.object(&held.len().to_string()).await {
            Ok(file) => held.push(file),
            Err(error) => break error,
        }
    };
    assert!(held.len() >= 16, "{}", held.len());
    let emfile = rustix::io::Errno::MFILE.raw_os_error();
    assert_eq!(
        error,
        ReadError::ObjectUnreadable {
            name: held.len().to_string(),
            errno: emfile
        }
    );
    let refused = held.len().to_string();
    drop(held);
    assert_eq!(dataset.object(&refused).await.unwrap().length_bytes(), 1);
}
