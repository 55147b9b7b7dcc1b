//! Objects by name: what is found, what is not reachable, and what the cache holds.

use super::*;
use crate::dataset::directory::Resolver;
use crate::dataset::openers::{OPENERS, OPENERS_MAX};
use crate::dataset::{Dataset, DatasetSpec, KindSpec};
use std::os::unix::fs::symlink;
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(3600);

fn spec(path: &Path, max_open_files: usize, revalidate: Duration) -> DatasetSpec {
    let kind = KindSpec::objects(max_open_files, revalidate);
    DatasetSpec::new("objects", path, kind, DirectIo::Preferred)
}

fn open(dir: &TempDir, max_open_files: usize, revalidate: Duration) -> Arc<Dataset> {
    Arc::new(Dataset::open(&spec(dir.path(), max_open_files, revalidate)).unwrap())
}

fn context() -> ErrorContext<'static> {
    ErrorContext { dataset: "objects" }
}

fn objects(dir: &TempDir, resolver: Resolver) -> Objects {
    let (mut objects, _) = Objects::open(dir.path(), 100, LONG, DirectIo::Preferred, context()).unwrap();
    objects.directory = objects.directory.with_resolver(resolver);
    objects
}

fn not_found(name: &str) -> ReadError {
    ReadError::ObjectNotFound {
        name: name.to_owned(),
    }
}

/// Open descriptors of this process on files below a directory, after the reaper has closed unused ones.
fn descriptors_below(dir: &TempDir) -> usize {
    assert!(reaper::settles_within(Duration::from_secs(30)));
    let root = dir.path().canonicalize().unwrap();
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|target| target.starts_with(&root) && *target != root)
        .count()
}

/// Nested names, an object of one byte, an empty one: opened with their length; the dataset has no address
/// space.
#[tokio::test]
async fn objects_by_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
    std::fs::write(dir.path().join("a/b/nested"), b"nested").unwrap();
    std::fs::write(dir.path().join("one"), b"1").unwrap();
    std::fs::write(dir.path().join("empty"), b"").unwrap();
    let dataset = open(&dir, 100, LONG);
    for (name, length) in [("a/b/nested", 6), ("one", 1), ("empty", 0)] {
        let file = dataset.object(name).await.unwrap();
        assert_eq!(file.length_bytes(), length, "{name}");
        assert!(
            Arc::ptr_eq(&file, &dataset.object(name).await.unwrap()),
            "{name} is cached"
        );
        if length == 0 {
            assert!(file.direct_fd().is_none());
        } else {
            assert_eq!(file.direct_fd().is_some(), dataset.direct().direct);
        }
    }
    assert_eq!(
        (dataset.length_bytes(), dataset.count(), dataset.files().len()),
        (0, 0, 0)
    );
    assert_eq!(
        dataset.list_objects("a/b/nested", 1, &|| true).unwrap()[0].name,
        "empty"
    );
}

/// Invalid names: refused with the reason, before the file system is asked.
#[tokio::test]
async fn invalid_names() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = open(&dir, 100, LONG);
    let long = "x".repeat(4097);
    for (name, part) in [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("..", "`..`"),
        ("../x", "`..`"),
        ("a/../b", "`..`"),
        ("a/..", "`..`"),
        ("./a", "`.`"),
        ("a//b", "empty"),
        ("a/", "empty"),
        ("a\0b", "NUL"),
        (&long, "4096"),
    ] {
        match dataset.object(name).await {
            Err(ReadError::ObjectNameInvalid { reason, .. }) => assert!(reason.contains(part), "{reason}"),
            other => panic!("{name:?}: {other:?}"),
        }
    }
    let longest = "x".repeat(4096);
    assert_eq!(dataset.object(&longest).await.unwrap_err(), not_found(&longest));
}

/// With openat2 and without: links that leave, loop or lead nowhere, absolute links, directories, fifos,
/// sockets and files used as directories are not found; a link that stays inside works with openat2.
#[test]
fn nothing_outside_is_reachable() {
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("secret"), b"secret").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::create_dir(at("d")).unwrap();
    std::fs::write(at("d/file"), b"inside").unwrap();
    let sibling = outside.path().file_name().unwrap();
    symlink(outside.path().join("secret"), at("absolute")).unwrap();
    symlink(Path::new("..").join(sibling).join("secret"), at("relative")).unwrap();
    symlink(outside.path(), at("outside-dir")).unwrap();
    symlink("..", at("up")).unwrap();
    symlink(at("d/file"), at("absolute-inside")).unwrap();
    symlink("loop-b", at("loop-a")).unwrap();
    symlink("loop-a", at("loop-b")).unwrap();
    symlink("nowhere", at("nowhere")).unwrap();
    symlink("/proc/self/fd/0", at("magic")).unwrap();
    symlink("d/file", at("link")).unwrap();
    symlink("d", at("link-dir")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, at("fifo"), rustix::fs::Mode::RWXU).unwrap();
    let (socket, mode) = (rustix::fs::FileType::Socket, rustix::fs::Mode::RWXU);
    rustix::fs::mknodat(rustix::fs::CWD, at("socket"), socket, mode, 0).unwrap();
    let up = format!("up/{}/secret", sibling.to_str().unwrap());
    for resolver in [Resolver::Openat2, Resolver::Walk] {
        let objects = objects(&dir, resolver);
        for name in [
            "absolute",
            "relative",
            "outside-dir/secret",
            &up,
            "absolute-inside",
            "loop-a",
            "loop-a/x",
            "nowhere",
            "magic",
            "missing",
            "d",
            "d/file/x",
            "fifo",
            "socket",
            &"n".repeat(256),
        ] {
            assert_eq!(
                objects.look_up(name).unwrap_err(),
                not_found(name),
                "{resolver:?}"
            );
        }
        assert_eq!(objects.look_up("d/file").unwrap().length_bytes(), 6);
        for name in ["link", "link-dir/file"] {
            let followed = objects.look_up(name).map(|file| file.length_bytes());
            let expected = if resolver == Resolver::Openat2 {
                Ok(6)
            } else {
                Err(not_found(name))
            };
            assert_eq!(followed, expected, "{resolver:?} {name}");
        }
    }
    let objects = objects(&dir, Resolver::Walk);
    for name in ["..", "d/../d/file", "../secret"] {
        assert!(
            objects.look_up(name).is_err(),
            "the walk itself takes no ..: {name}"
        );
    }
}

/// An object without permission is unreadable with its errno, not "not found". (Root reads everything: switch
/// to user nobody.)
#[test]
fn an_object_without_permission() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("secret"), b"secret").unwrap();
    let everybody = rustix::fs::Mode::from_raw_mode(0o755);
    rustix::fs::chmodat(
        rustix::fs::CWD,
        dir.path(),
        everybody,
        rustix::fs::AtFlags::empty(),
    )
    .unwrap();
    let objects = objects(&dir, Resolver::Openat2);
    let path = dir.path().join("secret");
    rustix::fs::chmodat(
        rustix::fs::CWD,
        path,
        rustix::fs::Mode::empty(),
        rustix::fs::AtFlags::empty(),
    )
    .unwrap();
    let opening = std::thread::spawn(move || {
        if rustix::process::geteuid().is_root() {
            let nobody = rustix::process::Uid::from_raw(65_534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        }
        objects.look_up("secret").unwrap_err()
    });
    let expected = ReadError::ObjectUnreadable {
        name: "secret".to_owned(),
        errno: Errno::ACCESS.raw_os_error(),
    };
    assert_eq!(opening.join().unwrap(), expected);
    let dataset = open(&dir, 100, LONG);
    assert!(
        dataset.direct().direct || !dataset.direct().reason.is_empty(),
        "it does not keep the dataset closed"
    );
}

/// Trusted for an hour: a replaced object is served as it was until it is forgotten. Never trusted: the next
/// request gets the new one, the old one stays readable for its holder, and an untouched object keeps its
/// descriptor.
#[tokio::test]
async fn replaced_objects() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("object"), dir.path().join("other"));
    for revalidate in [LONG, Duration::ZERO] {
        std::fs::write(&path, b"old").unwrap();
        let dataset = open(&dir, 100, revalidate);
        let old = dataset.object("object").await.unwrap();
        assert!(Arc::ptr_eq(&old, &dataset.object("object").await.unwrap()));
        std::fs::write(&other, b"newer").unwrap();
        std::fs::rename(&other, &path).unwrap();
        let next = dataset.object("object").await.unwrap();
        if revalidate == LONG {
            assert!(Arc::ptr_eq(&old, &next));
            dataset.forget_object("object");
        }
        let new = dataset.object("object").await.unwrap();
        assert_eq!((new.length_bytes(), old.length_bytes()), (5, 3));
        assert_ne!(new.etag(), old.etag());
        assert_ne!(new.id, old.id);
        let mut bytes = [0u8; 8];
        let read = rustix::io::pread(old.buffered_fd(), &mut bytes, 0).unwrap();
        assert_eq!(&bytes[..read], b"old");
    }
}

/// Two look-ups at the same time: the first one opens the object before it is replaced, and is done after the second
/// one. Expectation: whoever asks next gets the new one, as the second one did.
#[test]
fn a_look_up_that_takes_long_does_not_bring_back_what_was_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("object"), dir.path().join("other"));
    std::fs::write(&path, b"old").unwrap();
    let objects = objects(&dir, Resolver::Openat2);
    let began = Instant::now();
    let old = objects
        .open_or_keep("object")
        .unwrap_or_else(|_| panic!("opened"));
    std::fs::write(&other, b"newer").unwrap();
    std::fs::rename(&other, &path).unwrap();
    let new = objects.look_up("object").unwrap();
    assert_eq!((old.length_bytes(), new.length_bytes()), (3, 5));
    objects.keep("object", &old, began);
    assert!(Arc::ptr_eq(&new, &objects.look_up("object").unwrap()));
}

/// Never trusted, a removed object is gone at once, and its descriptor leaves the cache.
#[tokio::test]
async fn removed_objects() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("object"), b"x").unwrap();
    let dataset = open(&dir, 100, Duration::ZERO);
    drop(dataset.object("object").await.unwrap());
    assert!(descriptors_below(&dir) > 0);
    std::fs::remove_file(dir.path().join("object")).unwrap();
    assert_eq!(dataset.object("object").await.unwrap_err(), not_found("object"));
    assert_eq!(descriptors_below(&dir), 0);
}

/// 50 objects through a cache of 8 descriptors: never more than 8 are open, and an evicted file stays open
/// while it is held.
#[tokio::test]
async fn the_cache_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    for index in 0..50 {
        std::fs::write(dir.path().join(index.to_string()), index.to_string()).unwrap();
    }
    let dataset = open(&dir, 8, LONG);
    let each = if dataset.direct().direct { 2 } else { 1 };
    let held = dataset.object("0").await.unwrap();
    for index in 1..50 {
        assert_eq!(
            dataset.object(&index.to_string()).await.unwrap().length_bytes(),
            if index < 10 { 1 } else { 2 }
        );
        assert!(descriptors_below(&dir) <= 8 + each, "after {index}");
    }
    assert_eq!(
        descriptors_below(&dir),
        8 + each,
        "8 cached, and the one that is held"
    );
    drop(held);
    assert_eq!(descriptors_below(&dir), 8);
}

/// Two hundred concurrent requests for the same few names, never trusted: all are answered, and no descriptor
/// is left open.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_at_once() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a", "b", "c"] {
        std::fs::write(dir.path().join(name), name).unwrap();
    }
    let dataset = open(&dir, 4, Duration::ZERO);
    let mut tasks = tokio::task::JoinSet::new();
    for index in 0..200 {
        let dataset = Arc::clone(&dataset);
        tasks.spawn(async move {
            dataset
                .object(["a", "b", "c"][index % 3])
                .await
                .unwrap()
                .length_bytes()
        });
    }
    while let Some(length) = tasks.join_next().await {
        assert_eq!(length.unwrap(), 1);
    }
    assert!(descriptors_below(&dir) <= 4);
}

/// A caller that leaves at once loses nothing: the open continues and the next request is a hit.
#[test]
fn a_caller_that_gives_up() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("object"), b"x").unwrap();
    let dataset = open(&dir, 100, LONG);
    // Every thread that opens files is busy until the caller has left.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let (let_go, busy) = std::sync::mpsc::channel::<()>();
        let busy = Arc::new(Mutex::new(busy));
        let (tell, mut told) = tokio::sync::mpsc::channel(OPENERS_MAX);
        for _ in 0..OPENERS_MAX {
            let (busy, tell) = (Arc::clone(&busy), tell.clone());
            let _ended_unseen = OPENERS.run(move || {
                tell.try_send(()).unwrap();
                assert!(busy.lock().unwrap().recv().is_err(), "nothing was sent");
            });
        }
        for _ in 0..OPENERS_MAX {
            told.recv().await.unwrap();
        }
        {
            let mut call = Box::pin(dataset.object("object"));
            assert!(Future::poll(call.as_mut(), &mut no_waker()).is_pending());
        }
        drop(let_go);
        // The permit returns when the open has ended.
        let objects = dataset.0.objects.as_ref().unwrap();
        let all = u32::try_from(OPENS_MAX).unwrap();
        let done = tokio::time::timeout(Duration::from_secs(30), objects.opens.acquire_many(all)).await;
        drop(done.expect("the open ends").unwrap());
        assert!(objects.cached("object").is_some());
        // Idle ones stay for a while.
        assert_eq!(openers_alive(), OPENERS_MAX, "none was started for it");
    });
}

/// Scenario: more opens than may be in progress are begun and not polled again, as for a response that its client does not
/// read. Expectation: another one ends.
#[tokio::test]
async fn opens_that_nobody_polls_keep_no_other_waiting() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("object"), b"x").unwrap();
    let dataset = open(&dir, 100, LONG);
    let names: Vec<String> = (0..4 * OPENS_MAX).map(|number| number.to_string()).collect();
    let mut begun: Vec<_> = names.iter().map(|name| Box::pin(dataset.object(name))).collect();
    // All of them wait for a permit.
    let opens = Arc::clone(&dataset.0.objects.as_ref().unwrap().opens);
    let all = opens.acquire_many(u32::try_from(OPENS_MAX).unwrap()).await;
    for open in &mut begun {
        assert!(Future::poll(open.as_mut(), &mut no_waker()).is_pending());
    }
    drop(all);
    let other = tokio::time::timeout(Duration::from_secs(30), dataset.object("object")).await;
    assert_eq!(other.expect("opened").unwrap().length_bytes(), 1);
    drop(begun);
}

/// Threads of this process that open objects.
fn openers_alive() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks
        .filter_map(name)
        .filter(|name| name.trim() == "rf-open")
        .count()
}

fn no_waker() -> std::task::Context<'static> {
    std::task::Context::from_waker(std::task::Waker::noop())
}

/// A path that is no directory, and limits that allow nothing, are reported at open.
#[test]
fn bad_specifications() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, b"x").unwrap();
    let refused = |spec: &DatasetSpec| Dataset::open(spec).expect_err("it must not open");
    let error = refused(&spec(&file, 10, LONG));
    assert_eq!(error.field, "path");
    assert!(
        error
            .problem
            .contains("is a regular file: objects need a directory"),
        "{error}"
    );
    let error = refused(&spec(&dir.path().join("missing"), 10, LONG));
    assert!(
        error.field == "path" && error.problem.contains("does not exist"),
        "{error}"
    );
    let mut two = spec(dir.path(), 10, LONG);
    two.paths.push(dir.path().to_owned());
    assert!(refused(&two).problem.contains("one directory"));
}

/// Direct I/O is tried on a file; without a file each object decides; `off` is off.
#[tokio::test]
async fn direct_io_of_objects() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("empty"), b"").unwrap();
    let before = open(&dir, 10, LONG);
    assert!(
        before.direct().reason.contains("decided per object"),
        "{}",
        before.direct().reason
    );
    std::fs::write(dir.path().join("object"), b"x").unwrap();
    let after = open(&dir, 10, LONG);
    assert!(
        !after.direct().reason.contains("decided per object"),
        "{}",
        after.direct().reason
    );
    let (first, second) = (
        before.object("object").await.unwrap(),
        after.object("object").await.unwrap(),
    );
    assert_eq!(first.direct_fd().is_some(), second.direct_fd().is_some());
    let mut off = spec(dir.path(), 10, LONG);
    off.direct_io = DirectIo::Off;
    let off = Arc::new(Dataset::open(&off).unwrap());
    assert_eq!(off.direct().reason, "off by configuration");
    assert!(off.object("object").await.unwrap().direct_fd().is_none());
}

/// A directory whose files refuse O_DIRECT (sysfs): `preferred` is buffered and names the file, `required` is
/// refused.
#[tokio::test]
async fn objects_that_refuse_direct_io() {
    let path = Path::new("/sys/kernel/mm");
    let dataset = Arc::new(Dataset::open(&spec(path, 10, LONG)).unwrap());
    assert!(!dataset.direct().direct);
    assert!(
        dataset
            .direct()
            .reason
            .starts_with("the file system of /sys/kernel/mm/"),
        "{}",
        dataset.direct().reason
    );
    let mut required = spec(path, 10, LONG);
    required.direct_io = DirectIo::Required;
    let error = Dataset::open(&required).expect_err("it must not open");
    assert!(
        error.field == "direct_io" && error.problem.contains("preferred or off"),
        "{error}"
    );
}

/// Requests hold as many descriptors as the budget has: a further object is refused as overloaded, while
/// objects already held are still returned; idle ones in the cache are closed first; and what is returned can
/// be used again.
#[test]
fn requests_and_cache_share_a_budget() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a", "b", "c", "d", "e", "f"] {
        std::fs::write(dir.path().join(name), name).unwrap();
    }
    let mut objects = objects(&dir, Resolver::Openat2);
    let each = descriptors_each(objects.options.direct_io) as usize;
    objects.descriptors = Arc::new(Semaphore::new(3 * each));
    for name in ["a", "b", "c"] {
        objects.look_up(name).unwrap();
    }
    // The cache holds all three, which are closed for these.
    let mut held: Vec<_> = ["d", "e", "f"].map(|name| objects.look_up(name).unwrap()).into();
    assert_eq!(descriptors_below(&dir), 3 * each);
    let overloaded = ReadError::Overloaded {
        resource: Resource::OpenObjects,
    };
    assert_eq!(objects.look_up("a").unwrap_err(), overloaded);
    assert!(Arc::ptr_eq(&objects.look_up("e").unwrap(), &held[1]));
    assert_eq!(descriptors_below(&dir), 3 * each);
    held.pop();
    assert_eq!(objects.look_up("a").unwrap().length_bytes(), 1);
    // A failed open takes nothing from the budget.
    for _ in 0..10 {
        assert_eq!(objects.look_up("missing").unwrap_err(), not_found("missing"));
    }
    drop(held);
    drop(objects);
    assert_eq!(descriptors_below(&dir), 0);
}

/// The reaper is stuck, and has room for fewer remains than files are forgotten. Expectation: half of the files are forgotten,
/// and the reaper closes all of them, not the caller, who may accept connections.
#[test]
fn what_gives_way_is_closed_by_the_reaper() {
    const FILES: usize = 400;
    let _alone = reaper::tests::alone();
    let dir = tempfile::tempdir().unwrap();
    let (objects, _) = Objects::open(dir.path(), 2 * FILES, LONG, DirectIo::Off, context()).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    for index in 0..FILES {
        let name = index.to_string();
        std::fs::write(dir.path().join(&name), [1]).unwrap();
        reaper::tests::watch(&objects.look_up(&name).unwrap(), &tell);
    }
    let release = reaper::tests::stuck_with_room_for(FILES / 2 - 1);
    assert!(forget_half([Arc::clone(&objects.cache)]));
    drop(release);
    reaper::tests::expect_reaped(&told, FILES / 2);
    assert_eq!(objects.lock().len(), FILES / 2);
}

/// The trial read of an object fails because its disk is offline, or a sector bad. Expectation: it cannot be read, with the
/// errno of any failed read; so it is if the open itself fails, with its own errno. Neither is said to be absent.
#[test]
fn an_object_on_a_failed_disk_is_not_absent() {
    for errno in [Errno::NODEV, Errno::NODATA, Errno::IO] {
        let error = read_error("o", FileError::TrialRead(errno.into()));
        let name = "o".to_owned();
        let errno = libc::EIO;
        assert_eq!(error, ReadError::ObjectUnreadable { name, errno });
    }
    for errno in [Errno::NODEV, Errno::NXIO] {
        let error = read_error("o", FileError::Open(errno.into()));
        let (name, errno) = ("o".to_owned(), errno.raw_os_error());
        assert_eq!(error, ReadError::ObjectUnreadable { name, errno });
        assert_eq!(error.label(), "device_error");
    }
}
