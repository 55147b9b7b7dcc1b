//! Objects datasets in a process that runs out of descriptors. Alone in its binary, since the limit is per
//! process.

#![expect(
    clippy::unwrap_used,
    reason = "a test fails by panicking, outside of its own function too"
)]

use ringfetch_engine::config::DirectIo;
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec, OpenError};
use ringfetch_engine::error::ReadError;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Runs a test alone, since the limit is of the process.
fn alone(test: impl AsyncFnOnce()) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    limit_descriptors(256);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(test());
}

fn limit_descriptors(most: u64) {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(most);
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// A dataset of 200 objects of one byte, whose cache may hold far more than the process.
fn dataset(dir: &Path) -> Arc<Dataset> {
    for index in 0..200 {
        std::fs::write(dir.join(index.to_string()), b"x").unwrap();
    }
    let kind = KindSpec::objects(10_000, Duration::from_secs(3600));
    let spec = DatasetSpec::new("objects", dir, kind, DirectIo::Preferred);
    Arc::new(Dataset::open(&spec).unwrap())
}

/// The cache of one dataset and other files have taken all descriptors when another dataset's first object is opened.
/// Expectation: the cache gives way.
#[test]
fn the_cache_of_another_dataset_gives_way() {
    alone(async || {
        let [greedy_dir, modest_dir] = [(), ()].map(|()| tempfile::tempdir().unwrap());
        let greedy = dataset(greedy_dir.path());
        let modest = dataset(modest_dir.path());
        limit_descriptors(64);
        for index in 0..20 {
            greedy.object(&index.to_string()).await.unwrap();
        }
        let mut others = Vec::new();
        while let Ok(file) = std::fs::File::open(modest_dir.path()) {
            others.push(file);
        }
        assert_eq!(modest.object("0").await.unwrap().length_bytes(), 1);
    });
}

/// The cache may hold far more than the process: it closes half of its files, and every object opens and is listed.
/// Held files cannot be closed: then the object is unreadable with EMFILE, and readable again once they are dropped.
#[test]
fn the_cache_gives_way() {
    alone(async || {
        let dir = tempfile::tempdir().unwrap();
        let dataset = dataset(dir.path());
        limit_descriptors(64);
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
    });
}

/// Opens a dataset with each number of free descriptors, from none until it opens.
fn with_few_descriptors(spec: &DatasetSpec, refused: impl Fn(OpenError)) -> Dataset {
    // The thread that closes files is started by the first one.
    drop(Dataset::open(spec));
    let mut others = Vec::new();
    limit_descriptors(64);
    while let Ok(file) = std::fs::File::open("/") {
        others.push(file);
    }
    loop {
        match Dataset::open(spec) {
            Ok(dataset) => break dataset,
            Err(error) => refused(error),
        }
        assert!(others.pop().is_some(), "it never opens");
    }
}

/// Datasets are opened while there are few descriptors left. Expectation: each is refused for that reason, which the
/// configuration cannot change, until there are enough; then it is read as with many.
#[test]
fn too_few_descriptors_are_the_only_reason() {
    alone(async || {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("below/it")).unwrap();
        std::fs::write(dir.path().join("below/it/file"), [1; 4096]).unwrap();
        let path = |name: &str| dir.path().join(name);
        let objects = KindSpec::objects(10, Duration::ZERO);
        for direct_io in [DirectIo::Off, DirectIo::Preferred] {
            let blocks = DatasetSpec::new("d", path("below/it/file"), KindSpec::blocks(512), direct_io);
            let objects = DatasetSpec::new("d", dir.path(), objects.clone(), direct_io);
            for spec in [blocks, objects] {
                limit_descriptors(256);
                let expected = Dataset::open(&spec).unwrap();
                let opened = with_few_descriptors(&spec, |error| {
                    assert!(error.is_refused_by_host, "{error}");
                    assert!(error.problem.contains("out of file descriptors"), "{error}");
                });
                assert_eq!(opened.direct(), expected.direct());
            }
        }
    });
}

/// Files are missing before and after the one for which there is no descriptor, and one of them may not be read.
/// Expectation: the error names them and the lack, and is a mistake in the configuration.
#[test]
fn missing_files_are_named_when_descriptors_run_out() {
    alone(async || {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for index in 0..100 {
            std::fs::write(path(&index.to_string()), [1; 512]).unwrap();
        }
        let mut spec = DatasetSpec::new("d", path("first-gone"), KindSpec::blocks(512), DirectIo::Off);
        spec.paths.extend((0..100).map(|index| path(&index.to_string())));
        spec.paths.push(path("last-gone"));
        limit_descriptors(64);
        let error = Dataset::open(&spec).unwrap_err();
        for part in [
            "first-gone: does not exist",
            "last-gone: does not exist",
            "out of file descriptors",
        ] {
            assert!(error.problem.contains(part), "{part} is not in: {error}");
        }
        assert_eq!(error.problem.matches("out of file").count(), 1, "{error}");
        assert!(!error.is_refused_by_host);
        // Its files are closed by now: the next dataset has their descriptors.
        spec.paths.truncate(30);
        spec.paths.remove(0);
        Dataset::open(&spec).unwrap();
    });
}
