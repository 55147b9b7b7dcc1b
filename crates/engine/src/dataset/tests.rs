//! Opening datasets: what is found in good files, and which field and remedy are reported for bad input.

mod vectors;

use super::*;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::path::Path;
use tempfile::{NamedTempFile, TempDir};

/// Next to the test binary: temporary directories are often in memory, whose pages are never evicted, and the sources may be
/// read-only.
pub(crate) fn file_on_disk() -> NamedTempFile {
    let program = std::env::current_exe().unwrap();
    NamedTempFile::new_in(program.parent().unwrap()).unwrap()
}

fn spec(paths: &[&Path], kind: KindSpec) -> DatasetSpec {
    DatasetSpec {
        name: "d".to_owned(),
        paths: paths.iter().map(|path| path.to_path_buf()).collect(),
        kind,
        direct_io: DirectIo::Preferred,
    }
}

fn blocks(block_bytes: u32, partial_tail: PartialTail) -> KindSpec {
    KindSpec::Blocks {
        block_bytes,
        partial_tail,
    }
}

const REFUSE: PartialTail = PartialTail::Refuse;

fn vectors(layout: Layout, dim: Option<u32>, dtype: Option<Dtype>, header_bytes: u64) -> KindSpec {
    KindSpec::Vectors {
        layout,
        dim,
        dtype,
        header_bytes,
    }
}

fn file(dir: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A file of sysfs: regular, of 4096 bytes, and without O_DIRECT on any kernel.
fn file_without_direct_io() -> PathBuf {
    let paths = std::fs::read_dir("/sys/kernel")
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let usable = |path: &PathBuf| {
        let opened = std::fs::File::open(path).and_then(|file| file.metadata());
        opened.is_ok_and(|found| found.is_file() && found.len() == 4096)
    };
    paths.into_iter().find(usable).expect("sysfs must be mounted")
}

#[track_caller]
fn refused(spec: &DatasetSpec, field: &str, parts: &[&str]) {
    let error = Dataset::open(spec).expect_err("it must not open");
    assert_eq!(error.field, field, "{error}");
    assert_eq!(error.dataset, spec.name);
    let message = error.to_string();
    assert!(
        message.starts_with(&format!("dataset {}: {field}: ", spec.name)),
        "{message}"
    );
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

/// A file whose length is not a multiple of the block size: refused with both remedies, or truncated to whole
/// blocks if configured.
#[test]
fn partial_tail() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "blocks", &[0; 10_000]);
    let parts = [
        "10000 bytes",
        "1808 bytes remain after 2 blocks",
        "partial_tail: ignore",
        "another block_bytes",
    ];
    refused(&spec(&[&path], blocks(4096, REFUSE)), "block_bytes", &parts);
    let dataset = Dataset::open(&spec(&[&path], blocks(4096, PartialTail::Ignore))).unwrap();
    assert_eq!((dataset.length_bytes(), dataset.count()), (8192, 2));
    assert_eq!(dataset.files()[0].length_bytes(), 10_000);
    refused(
        &spec(&[&path], blocks(20_000, PartialTail::Ignore)),
        "block_bytes",
        &["not one block", "smaller"],
    );
    refused(&spec(&[&path], blocks(0, REFUSE)), "block_bytes", &["is 0"]);
}

/// Paths that lead to no file: missing, empty, a directory, a fifo (without hanging), a character device, no
/// path.
#[test]
fn paths_that_are_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let kind = blocks(512, REFUSE);
    let fifo = dir.path().join("fifo");
    rustix::fs::mkfifoat(CWD, &fifo, Mode::RWXU).unwrap();
    refused(
        &spec(&[&dir.path().join("missing")], kind.clone()),
        "path",
        &["missing: does not exist", "correct"],
    );
    // A container mount without a source: an empty directory.
    let mount = tempfile::tempdir().unwrap();
    let directory = format!("its directory {} is empty", mount.path().display());
    refused(
        &spec(&[&mount.path().join("missing")], kind.clone()),
        "path",
        &["missing: does not exist", &directory, "mount the right one"],
    );
    refused(
        &spec(&[&file(&dir, "empty", b"")], kind.clone()),
        "path",
        &["empty is empty", "write it first"],
    );
    refused(
        &spec(&[dir.path()], kind.clone()),
        "path",
        &["is a directory", "kind: objects"],
    );
    refused(
        &spec(&[&fifo], kind.clone()),
        "path",
        &["is a fifo", "regular file or a block device"],
    );
    refused(
        &spec(&[Path::new("/dev/null")], kind.clone()),
        "path",
        &["is a character device"],
    );
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    refused(
        &spec(&[&link], kind.clone()),
        "path",
        &[
            "link: is a symbolic link to nowhere, which does not exist",
            "correct the link",
        ],
    );
    let socket = dir.path().join("socket");
    // Not bound, which takes only short paths.
    mknodat(CWD, &socket, FileType::Socket, Mode::RWXU, 0).unwrap();
    refused(
        &spec(&[&socket], kind.clone()),
        "path",
        &["is a socket", "correct the path"],
    );
    refused(
        &spec(&[&dir.path().join("x".repeat(300))], kind.clone()),
        "path",
        &["the path is too long: correct it"],
    );
    refused(&spec(&[], kind.clone()), "path", &["is missing", "name a file"]);
    let good = file(&dir, "good", &[0; 512]);
    refused(
        &spec(&[&good.join("below")], kind.clone()),
        "path",
        &["not a directory"],
    );
    refused(
        &spec(&[&good, &file(&dir, "empty", b"")], kind),
        "path",
        &["empty is empty"],
    );
}

/// Several files of a dataset that cannot be opened: all are named at once, and of very many the first ones.
#[test]
fn every_bad_path_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let good = file(&dir, "good", &[0; 512]);
    let missing: Vec<PathBuf> = (0..20).map(|i| dir.path().join(format!("no-{i:02}"))).collect();
    let three = [&missing[0], &good, dir.path(), &missing[1]].map(AsRef::<Path>::as_ref);
    refused(
        &spec(&three, blocks(512, REFUSE)),
        "path",
        &["no-00: does not exist", "is a directory", "no-01: does not exist"],
    );
    let many: Vec<&Path> = missing.iter().map(PathBuf::as_path).collect();
    refused(
        &spec(&many, blocks(512, REFUSE)),
        "path",
        &["no-07: does not exist", "; and 12 more"],
    );
}

/// A file that the daemon's user may not read: the error says so, with the remedy. (Root reads everything:
/// switch to user nobody.)
#[test]
fn a_file_without_permission() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "secret", &[0; 512]);
    rustix::fs::chmodat(CWD, &path, Mode::empty(), rustix::fs::AtFlags::empty()).unwrap();
    let spec = spec(&[&path], blocks(512, REFUSE));
    // Changes the user of the calling thread only (the kernel's setresuid, not the C library's).
    let opening = std::thread::spawn(move || {
        if rustix::process::geteuid().is_root() {
            let nobody = rustix::process::Uid::from_raw(65_534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        }
        refused(
            &spec,
            "path",
            &["secret: permission denied", "let the daemon's user read it"],
        );
    });
    opening.join().unwrap();
}

/// Names that cannot be used in a request's path or a metric.
#[test]
fn names() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "good", &[0; 512]);
    let mut with_name = spec(&[&path], blocks(512, REFUSE));
    for name in ["", ".hidden", "a/b", "a b", "\u{e9}", "-x", &"x".repeat(129)] {
        with_name.name = name.to_owned();
        assert_eq!(Dataset::open(&with_name).unwrap_err().field, "name", "{name:?}");
    }
    for name in ["a", "0", "A.b_c-d", &"x".repeat(128)] {
        with_name.name = name.to_owned();
        assert_eq!(Dataset::open(&with_name).unwrap().name(), name);
    }
}

/// Off: buffered, alignment 1, with the reason. Preferred: either direct with usable figures or buffered with
/// the path.
#[test]
fn direct_io_facts() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "blocks", &[0; 8192 + 100]);
    let mut wanted = spec(&[&path], blocks(100, PartialTail::Ignore));
    wanted.direct_io = DirectIo::Off;
    let dataset = Dataset::open(&wanted).unwrap();
    assert_eq!(dataset.direct(), &DirectFacts::buffered("off by configuration"));
    let opened = &dataset.files()[0];
    assert!(opened.direct_fd().is_none());
    assert_eq!((opened.offset_alignment(), opened.memory_alignment()), (1, 1));
    wanted.direct_io = DirectIo::Preferred;
    let dataset = Dataset::open(&wanted).unwrap();
    let (facts, opened) = (dataset.direct(), &dataset.files()[0]);
    assert_eq!(facts.direct, opened.direct_fd().is_some());
    assert_eq!(facts.offset_alignment_bytes, opened.offset_alignment());
    assert_eq!(facts.memory_alignment_bytes, opened.memory_alignment());
    if facts.direct {
        assert!(facts.offset_alignment_bytes.is_power_of_two() && facts.offset_alignment_bytes > 1);
        assert!(facts.reason.starts_with("O_DIRECT, "), "{}", facts.reason);
    } else {
        assert!(
            facts.reason.contains("reads go through the page cache"),
            "{}",
            facts.reason
        );
    }
    for fd in [Some(opened.buffered_fd()), opened.direct_fd()]
        .into_iter()
        .flatten()
    {
        let flags = rustix::fs::fcntl_getfl(fd).unwrap();
        assert!(
            !flags.contains(rustix::fs::OFlags::NONBLOCK),
            "io_uring would answer EAGAIN"
        );
        assert_eq!(flags & rustix::fs::OFlags::ACCMODE, rustix::fs::OFlags::RDONLY);
    }
}

/// One file that refuses O_DIRECT: the whole dataset is buffered and names the file; with `required` it does
/// not open.
#[test]
fn one_file_that_refuses_direct_io() {
    let dir = tempfile::tempdir().unwrap();
    let (good, refusing) = (file(&dir, "good", &[0; 4096]), file_without_direct_io());
    let mut wanted = spec(&[&good, &refusing], blocks(4096, REFUSE));
    let dataset = Dataset::open(&wanted).unwrap();
    let shown = refusing.display().to_string();
    let expected =
        format!("the file system of {shown} refuses O_DIRECT (EINVAL): reads go through the page cache");
    assert_eq!(dataset.direct(), &DirectFacts::buffered(expected));
    assert!(
        dataset
            .files()
            .iter()
            .all(|file| file.direct_fd().is_none() && file.offset_alignment() == 1)
    );
    wanted.direct_io = DirectIo::Required;
    refused(
        &wanted,
        "direct_io",
        &[&shown, "EINVAL", "set direct_io: preferred or off"],
    );
    wanted.direct_io = DirectIo::Off;
    assert!(Dataset::open(&wanted).is_ok());
}

/// On tmpfs a direct read, if the kernel supports it at all, measures memory: the reason says so.
#[test]
#[ignore = "needs /dev/shm"]
fn tmpfs_is_called_that() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = file(&dir, "blocks", &[0; 4096]);
    let dataset = Dataset::open(&spec(&[&path], blocks(512, REFUSE))).unwrap();
    let facts = dataset.direct();
    let expected = if facts.direct {
        "measures memory, not a device"
    } else {
        "page cache"
    };
    assert!(facts.reason.contains(expected), "{}", facts.reason);
    assert_eq!(
        Dataset::open(&spec(&[&path], blocks(512, REFUSE)))
            .unwrap()
            .etag(),
        dataset.etag()
    );
}

/// The tag of an unchanged file stays the same, changes after a write, and reveals no inode.
#[test]
fn tags_follow_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "blocks", &[0; 512]);
    let open = || Dataset::open(&spec(&[&path], blocks(512, REFUSE))).unwrap();
    let (first, again) = (open(), open());
    assert_eq!(first.etag(), again.etag());
    assert_ne!(first.id(), again.id());
    assert_ne!(first.files()[0].id, again.files()[0].id);
    let other = std::fs::File::options().write(true).open(&path).unwrap();
    other.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert_ne!(open().etag(), first.etag());
    assert_eq!(first.etag().len(), 32);
    assert!(first.etag().bytes().all(|byte| byte.is_ascii_hexdigit()));
    other.set_len(100).unwrap();
    assert_eq!(first.files()[0].known_length(), Ok(100));
    assert_eq!(first.files()[0].length_bytes(), 512);
}

/// Copies before, across, at and past the file's end: as many bytes as the file has there.
#[test]
fn only_bytes_before_the_end_are_kept() {
    let kept = |offset, length| bytes_before(Ok(10_000), offset, length);
    assert_eq!(kept(0, 4096), Ok(4096));
    assert_eq!(kept(8192, 4096), Ok(1808));
    assert_eq!(kept(10_000, 4096), Ok(0));
    assert_eq!(kept(20_000, 4096), Ok(0));
    assert_eq!(bytes_before(Ok(u64::MAX), 0, u32::MAX), Ok(u32::MAX));
    assert_eq!(bytes_before(Err(5), 0, 1), Err(5));
}

/// Direct reads on tmpfs are served from the page cache, which may return zeros during a truncation: they end
/// where the file ends.
#[test]
#[ignore = "needs /dev/shm"]
fn what_the_page_cache_serves_is_held_against_the_length() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = file(&dir, "blocks", &[1; 8192]);
    let opened = OpenFile::open(&path, DirectIo::Preferred).unwrap();
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(5000)
        .unwrap();
    for is_direct in [false, true] {
        assert_eq!(opened.kept(0, 4096, is_direct), Ok(4096));
        assert_eq!(opened.kept(4096, 4096, is_direct), Ok(904));
        assert_eq!(opened.kept(8192, 4096, is_direct), Ok(0));
    }
}

/// A dataset is open as long as any clone is.
#[test]
fn the_last_clone_closes_it() {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), [1; 512]).unwrap();
    let opened = Dataset::open(&spec(&[file.path()], blocks(512, PartialTail::Refuse))).unwrap();
    let (clone, weak) = (opened.clone(), opened.downgrade());
    assert_eq!(clone.id(), opened.id());
    drop(opened);
    assert!(weak.is_open());
    drop(clone);
    assert!(!weak.is_open());
}

#[test]
fn a_file_with_a_write_lease_is_waited_for() {
    // Scenario: another program has a write lease on the file (Samba, an NFS server's delegation), which it gives up once the
    // kernel asks for that. Expectation: the dataset opens.
    use std::os::fd::AsRawFd;
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "file", &[7; 4096]);
    let holder = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let descriptor = holder.as_raw_fd();
    // SAFETY: plain numbers; the descriptor is open.
    let lease = move |command: libc::c_int, argument: libc::c_int| unsafe {
        libc::fcntl(descriptor, command, argument)
    };
    // The kernel asks by a signal; this one is ignored unless a program handles it.
    const F_SETSIG: libc::c_int = 10;
    assert_eq!(lease(F_SETSIG, libc::SIGURG), 0);
    assert_eq!(lease(libc::F_SETLEASE, libc::F_WRLCK), 0);
    let opening = std::thread::spawn(move || Dataset::open(&spec(&[&path], blocks(4096, REFUSE))));
    while lease(libc::F_GETLEASE, 0) == libc::F_WRLCK && !opening.is_finished() {
        std::thread::yield_now();
    }
    assert_eq!(lease(libc::F_SETLEASE, libc::F_UNLCK), 0);
    assert_eq!(opening.join().unwrap().unwrap().length_bytes(), 4096);
}
