use super::*;
use crate::config::DirectIo;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;

#[cfg(target_arch = "x86_64")]
mod guarded;

/// The byte at an offset: never 0, so that zeros past a truncated end cannot pass for data.
fn byte_at(offset: u64) -> u8 {
    u8::try_from(offset.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 57).expect("7 bits") | 0x80
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length as u64).map(byte_at).collect()
}

fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().expect("temporary file");
    file.write_all(bytes).expect("write");
    file
}

fn copy(mapping: &Mapping, offset: u64, length: u32) -> Result<Vec<u8>, Faulted> {
    let mut bytes = vec![0xEE; length as usize];
    // SAFETY: `bytes` has `length` bytes and is ours.
    let copied = unsafe { mapping.copy_out(offset, bytes.as_mut_ptr(), length) }?;
    bytes.truncate(copied as usize);
    Ok(bytes)
}

#[test]
fn an_empty_file_maps_to_nothing() {
    // Scenario: a file of no bytes. Expectation: no error, and every copy is of 0 bytes.
    let file = file_of(&[]);
    let mapping = Mapping::new(file.as_fd(), 0).expect("nothing to map");
    assert_eq!(copy(&mapping, 0, 100), Ok(vec![]));
    assert_eq!(mapping.pages(0, 100), None);
}

#[test]
fn what_cannot_be_mapped_is_an_errno() {
    // Scenario: a pipe, which has no pages. Expectation: mmap's errno, no panic.
    let (reader, _writer) = std::io::pipe().expect("pipe");
    assert_eq!(
        Mapping::new(reader.as_fd(), 4096).expect_err("a pipe"),
        libc::ENODEV
    );
}

#[test]
fn mapped_files_leave_room_for_threads() {
    // Scenario: a process maps files until one is refused (alone, since that is felt by all of its threads). Expectation:
    // ENOMEM; 256 threads start nevertheless; where a file is unmapped, another can be mapped.
    const ALONE: &str = "RINGFETCH_MAPPINGS_TEST_CHILD";
    if std::env::var_os(ALONE).is_none() {
        let test = "backend::map::tests::mapped_files_leave_room_for_threads";
        let mut alone = std::process::Command::new(std::env::current_exe().expect("own path"));
        let ended = alone
            .args(["--exact", test, "--nocapture"])
            .env(ALONE, "")
            .output();
        let ended = ended.expect("child");
        let (said, why) = (
            String::from_utf8_lossy(&ended.stdout),
            String::from_utf8_lossy(&ended.stderr),
        );
        // Not a run of no test, which would also succeed.
        assert!(
            ended.status.success() && said.contains(" 1 passed"),
            "{said}{why}"
        );
        return;
    }
    let page = rustix::param::page_size() as u64;
    let file = file_of(&pattern(1));
    let mut mapped = Vec::new();
    let refused = loop {
        match Mapping::new(file.as_fd(), page) {
            Ok(mapping) => mapped.push(mapping),
            Err(errno) => break errno,
        }
    };
    assert_eq!(refused, libc::ENOMEM);
    let together = std::sync::Barrier::new(257);
    std::thread::scope(|scope| {
        for _ in 0..256 {
            let thread = std::thread::Builder::new().spawn_scoped(scope, || {
                together.wait();
            });
            if let Err(error) = thread {
                // Those that wait at the barrier would wait for ever.
                eprintln!("a thread is refused: {error}");
                std::process::exit(1);
            }
        }
        together.wait();
    });
    drop(mapped.pop());
    assert!(Mapping::new(file.as_fd(), page).is_ok());
}

#[test]
fn a_file_that_was_refused_for_want_of_memory_is_tried_again() {
    // Scenario: a file could not be mapped, now or some time ago, for want of memory or because its file system cannot.
    // Expectation: it is mapped at the next access, if there was no memory some time ago; otherwise not.
    let before = Instant::now()
        .checked_sub(TRIED_AGAIN_AFTER)
        .expect("the host is up");
    // It is now, however long this takes.
    let now = Instant::now() + Duration::from_secs(3600);
    for (errno, tried, is_mapped) in [
        (libc::ENOMEM, before, true),
        (libc::ENOMEM, now, false),
        (libc::ENODEV, before, false),
    ] {
        let named = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(named.path(), pattern(100)).expect("write");
        let file = OpenFile::open(named.path(), DirectIo::Off).expect("open");
        let refused = Refused {
            tried: Mutex::new(tried),
            ..Refused::now(errno)
        };
        let attached = file.attached.set(Box::new(Attached(Err(refused))));
        attached.expect("an empty slot");
        for _ in 0..2 {
            let found = Mapping::of(&file).map(|mapping| copy(mapping, 10, 90).expect("its bytes"));
            let expected = if is_mapped {
                Ok(pattern(100)[10..].to_vec())
            } else {
                Err(errno)
            };
            assert_eq!(found, expected);
        }
    }
}

#[test]
fn pages_are_aligned_outward() {
    // Scenario: extents inside one page, across two, past the end. Expectation: whole pages, clamped to the
    // mapping.
    let page = rustix::param::page_size();
    let file = file_of(&pattern(3 * page));
    let mapping = Mapping::new(file.as_fd(), 3 * page as u64).expect("mapped");
    let (base, _) = mapping.pages(0, 1).expect("page 0");
    assert_eq!(base % page, 0);
    assert_eq!(mapping.pages(0, 1), Some((base, base + page)));
    assert_eq!(mapping.pages(page as u64 - 6, 100), Some((base, base + 2 * page)));
    assert_eq!(
        mapping.pages(page as u64, 1),
        Some((base + page, base + 2 * page))
    );
    assert_eq!(
        mapping.pages(2 * page as u64, u32::MAX),
        Some((base + 2 * page, base + 3 * page))
    );
    assert_eq!(mapping.pages(3 * page as u64, 1), None);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_last_page_tells_of_a_truncation() {
    // Scenario: a file of two and a half pages, whole and then truncated inside page 0. Expectation: the last
    // page shows that those before it are whole, then that they may not be; it shows nothing about itself,
    // nor about an empty file.
    let page_bytes = rustix::param::page_size();
    let bytes = pattern(2 * page_bytes + page_bytes / 2);
    let (page, length) = (page_bytes as u64, bytes.len() as u64);
    let file = file_of(&bytes);
    let mapping = Mapping::new(file.as_fd(), length).expect("mapped");
    assert!(mapping.is_untruncated_before(1) && mapping.is_untruncated_before(2 * page));
    assert!(!mapping.is_untruncated_before(2 * page + 1));
    file.set_len(page - 1).expect("truncate");
    assert!(!mapping.is_untruncated_before(1));
    let empty = Mapping::new(file_of(&[]).as_fd(), 0).expect("nothing to map");
    assert!(!empty.is_untruncated_before(0));
}
