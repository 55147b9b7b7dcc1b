//! Tests that need the guarded copy.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

fn pread(file: &File, offset: u64, length: usize) -> std::io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, &mut vec![0; length], offset)
}

#[test]
fn copies_are_the_bytes_of_the_file() {
    // Scenario: extents of many lengths and offsets of an intact file. Expectation: the file's bytes, up to
    // its end.
    let page = rustix::param::page_size();
    let bytes = pattern(8 * page + 123);
    let file = file_of(&bytes);
    let mapping = Mapping::new(file.as_fd(), bytes.len() as u64).expect("mapped");
    for offset in [
        0,
        1,
        page - 1,
        page,
        3 * page + 17,
        bytes.len() - 1,
        bytes.len(),
        bytes.len() + page,
    ] {
        for length in [0, 1, 15, 16, 17, 4095, 4096, 4097, 3 * page, 9 * page] {
            let end = (offset + length).min(bytes.len());
            let expected = bytes.get(offset..end).unwrap_or(&[]);
            let got = copy(&mapping, offset as u64, u32::try_from(length).expect("small")).expect("no fault");
            assert!(got == expected, "offset {offset} length {length}");
        }
    }
    assert_eq!(copy(&mapping, u64::MAX, 10), Ok(vec![]));
}

#[test]
fn a_copy_past_a_truncation_faults_and_the_process_lives() {
    // Scenario: 8 pages mapped, the file truncated to 2.5. Expectation: pages 0 and 1 copy; page 5 faults and
    // pread returns 0 bytes; the remaining half page copies, and its lost half reads as zeros without a
    // fault, which only the file's length reveals.
    let page = rustix::param::page_size();
    let bytes = pattern(8 * page);
    let file = file_of(&bytes);
    let mapping = Mapping::new(file.as_fd(), bytes.len() as u64).expect("mapped");
    file.set_len((2 * page + page / 2) as u64).expect("truncate");

    let two_pages = u32::try_from(2 * page).expect("small");
    assert!(copy(&mapping, 0, two_pages).expect("still there") == bytes[..2 * page]);
    assert_eq!(copy(&mapping, 5 * page as u64, 4096), Err(Faulted));
    assert_eq!(pread(&file, 5 * page as u64, 4096).expect("pread"), 0);
    // From a good page into a lost one: the fault comes in the middle of the copy.
    assert_eq!(copy(&mapping, page as u64 + 7, two_pages), Err(Faulted));

    let last =
        copy(&mapping, 2 * page as u64, u32::try_from(page).expect("small")).expect("the page is there");
    assert!(last[..page / 2] == bytes[2 * page..2 * page + page / 2]);
    assert!(
        last[page / 2..].iter().all(|&byte| byte == 0),
        "the kernel zeroes past the end"
    );
}

#[test]
fn copies_race_with_truncation_and_extension() {
    // Scenario: 4 threads copy at random while a fifth truncates the file to random lengths and grows it
    // again. Expectation: no crash; every byte copied is the file's first content or a zero of a truncation;
    // both faults and whole copies happen.
    let page = rustix::param::page_size();
    let pages = 64_u64;
    let bytes = pattern(page * 64);
    let file = file_of(&bytes);
    let mapping = Mapping::new(file.as_fd(), bytes.len() as u64).expect("mapped");
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let stop = AtomicBool::new(false);
    let (whole, faulted) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (mapping, bytes, stop, whole, faulted) = (&mapping, &bytes, &stop, &whole, &faulted);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed ^ thread);
                while !stop.load(Ordering::Relaxed) {
                    let offset = random.usize(..bytes.len());
                    match copy(mapping, offset as u64, random.u32(1..20_000)) {
                        Ok(got) => {
                            whole.fetch_add(1, Ordering::Relaxed);
                            let wrong = got
                                .iter()
                                .zip(&bytes[offset..])
                                .any(|(got, want)| got != want && *got != 0);
                            assert!(!wrong, "offset {offset} length {}", got.len());
                        }
                        Err(Faulted) => {
                            faulted.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        let mut random = fastrand::Rng::with_seed(!seed);
        let deadline = Instant::now() + Duration::from_secs(120);
        let enough = || whole.load(Ordering::Relaxed) >= 2000 && faulted.load(Ordering::Relaxed) >= 2000;
        while !enough() && Instant::now() < deadline {
            let length = random.u64(..pages * page as u64);
            file.set_len(length).expect("truncate");
            std::thread::yield_now();
            file.set_len(pages * page as u64).expect("extend");
        }
        stop.store(true, Ordering::Relaxed);
    });
    let (whole, faulted) = (whole.into_inner(), faulted.into_inner());
    assert!(
        whole >= 2000 && faulted >= 2000,
        "{whole} whole, {faulted} faulted"
    );
}

const ROLE: &str = "RINGFETCH_MAP_TEST_CHILD";

/// Runs a test of this module again in a child process with a role.
fn run_child(test: &str, role: &str) -> std::process::ExitStatus {
    std::process::Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", &format!("backend::map::tests::guarded::{test}")])
        .args(["--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .expect("child")
}

/// In a child process: ends it as its role demands.
fn end_if_child() {
    if let Some(role) = std::env::var_os(ROLE) {
        end_as(role.to_str().expect("text"));
    }
}

fn end_as(role: &str) -> ! {
    let none = rustix::process::Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    rustix::process::setrlimit(rustix::process::Resource::Core, none)
        .expect("no core files from a wanted death");
    let page = rustix::param::page_size();
    let file = file_of(&pattern(2 * page));
    if role == "previous_handler" {
        extern "C" fn earlier(_: std::ffi::c_int) {
            // SAFETY: _exit is async-signal-safe and does not return.
            unsafe { libc::_exit(41) }
        }
        // SAFETY: the handler is async-signal-safe.
        unsafe { libc::signal(libc::SIGBUS, earlier as *const () as libc::sighandler_t) };
    }
    let mapping = Mapping::new(file.as_fd(), 2 * page as u64).expect("mapped");
    file.set_len(0).expect("truncate");
    assert_eq!(
        copy(&mapping, 0, 10),
        Err(Faulted),
        "the guard is installed and works"
    );
    if role == "advisory" {
        // What the kernel sends for memory found damaged before anything read it. A process may send it to
        // itself.
        // SAFETY: all zeros is a valid siginfo.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        info.si_signo = libc::SIGBUS;
        info.si_code = libc::BUS_MCEERR_AO;
        let (process, thread) = (
            std::process::id(),
            rustix::thread::gettid().as_raw_nonzero().get(),
        );
        // SAFETY: the kernel copies the siginfo, which lives until the call returns.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_rt_tgsigqueueinfo,
                process,
                thread,
                libc::SIGBUS,
                &raw const info,
            )
        };
        assert_eq!(sent, 0);
        assert_eq!(copy(&mapping, 0, 10), Err(Faulted), "the guard is still there");
        std::process::exit(43);
    }
    if role == "sent" {
        // SAFETY: raise has no preconditions.
        unsafe { libc::raise(libc::SIGBUS) };
    } else {
        // An unguarded load of the same page.
        // SAFETY: none. It faults, which is what this tests.
        unsafe { mapping.base.as_ptr().read_volatile() };
    }
    std::process::exit(42);
}

#[test]
fn advice_about_damaged_memory_leaves_the_guard_in_place() {
    // Scenario: a SIGBUS that reports damaged memory that nothing has touched (BUS_MCEERR_AO), then a copy
    // that faults. Expectation: the copy returns `Faulted`, and the process lives.
    end_if_child();
    let child = |role| run_child("advice_about_damaged_memory_leaves_the_guard_in_place", role);
    assert_eq!(child("advisory").code(), Some(43));
}

#[test]
fn a_sigbus_that_is_not_ours_keeps_its_effect() {
    // Scenario: after the guard has served one fault, a load outside the copy faults; SIGBUS is sent; an
    // earlier handler was installed. Expectation: the process dies of SIGBUS, of SIGBUS, and by its earlier
    // handler.
    use std::os::unix::process::ExitStatusExt;
    end_if_child();
    let child = |role| run_child("a_sigbus_that_is_not_ours_keeps_its_effect", role);
    assert_eq!(child("load").signal(), Some(libc::SIGBUS));
    assert_eq!(child("sent").signal(), Some(libc::SIGBUS));
    assert_eq!(child("previous_handler").code(), Some(41));
}
