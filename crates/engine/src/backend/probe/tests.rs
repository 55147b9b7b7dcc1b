use super::refusal::Seen;
use super::*;

const PROFILE: &str = "seccomp=deploy/seccomp/ringfetchd.json";

fn seen(errno: i32, sysctl: Option<u8>, seccomp_mode: Option<u8>) -> Seen {
    Seen {
        errno,
        sysctl,
        seccomp_mode,
        memlock_limit_bytes: Some(65_536),
        kernel_release: "4.19.0-test".to_owned(),
    }
}

#[test]
fn causes_are_told_apart() {
    // Scenario: every errno that set-up is known to return, with each state of the sysctl and of seccomp.
    // Expectation: the cause's label, whether a fallback is allowed, and a one-line message that names the
    // remedy.
    let sysctl = "sysctl kernel.io_uring_disabled=0";
    let table = [
        (libc::ENOSYS, None, Some(0), "kernel", true, "4.19.0-test"),
        (libc::ENOSYS, None, None, "kernel", true, "CONFIG_IO_URING"),
        (libc::ENOSYS, Some(0), Some(0), "kernel", true, "CONFIG_IO_URING"),
        (libc::ENOSYS, None, Some(2), "seccomp", true, PROFILE),
        (libc::ENOSYS, Some(0), Some(2), "seccomp", true, PROFILE),
        (libc::EPERM, Some(2), Some(0), "sysctl", true, sysctl),
        (libc::EPERM, Some(2), Some(2), "sysctl", true, sysctl),
        (
            libc::EPERM,
            Some(1),
            Some(0),
            "sysctl",
            true,
            "kernel.io_uring_group",
        ),
        (libc::EPERM, Some(1), Some(0), "sysctl", true, sysctl),
        (libc::EPERM, Some(0), Some(2), "seccomp", true, PROFILE),
        (libc::EPERM, None, Some(2), "seccomp", true, PROFILE),
        (libc::EPERM, Some(0), Some(0), "denied", true, "security module"),
        (libc::EPERM, None, None, "denied", true, "security module"),
        (libc::EACCES, Some(0), Some(2), "denied", true, "EACCES"),
        (libc::ENOMEM, Some(0), Some(0), "memlock", false, "ulimit -l"),
        (libc::ENOMEM, Some(0), Some(2), "memlock", false, "LimitMEMLOCK"),
        (libc::EMFILE, Some(0), Some(0), "files", false, "ulimit -n"),
        (libc::ENFILE, Some(0), Some(0), "files", false, "fs.file-max"),
        (libc::EINVAL, Some(0), Some(0), "other", false, "a test"),
    ];
    for (errno, sysctl, seccomp_mode, label, may_fall_back, remedy) in table {
        let refusal = seen(errno, sysctl, seccomp_mode).refusal("a test");
        let line = refusal.to_string();
        let case = format!("errno {errno} sysctl {sysctl:?} seccomp {seccomp_mode:?}: {line}");
        assert_eq!(label_of(&refusal), label, "{case}");
        assert_eq!(refusal.may_fall_back(), may_fall_back, "{case}");
        assert!(line.contains(remedy), "{case}");
        assert!(!line.contains('\n') && !line.contains("  "), "{case}");
    }
}

#[test]
fn kernels_before_5_11_are_refused_and_may_fall_back() {
    // Scenario: what kernels 5.1, 5.6, 5.10 and 5.11 announce. Expectation: only the last is usable; the others name the
    // remedy, and the daemon may fall back.
    let of_5_6 = "single_mmap nodrop submit_stable rw_cur_pos";
    let of_5_10 = format!("{of_5_6} fast_poll");
    for features in ["", of_5_6, &of_5_10] {
        let refusal = check_features(features).expect_err(features);
        assert_eq!(label_of(&refusal), "kernel");
        assert!(
            refusal.may_fall_back() && refusal.to_string().contains("5.11"),
            "{refusal}"
        );
    }
    assert_eq!(check_features(&format!("{of_5_10} ext_arg")), Ok(()));
}

#[test]
fn the_probe_answers_here() {
    // Scenario: this machine, whatever it allows. Expectation: facts, or a refusal with a remedy; never a
    // hang.
    match probe() {
        Ok(facts) => {
            assert!(!facts.kernel_release.is_empty());
            assert!(facts.features.contains("nodrop"), "{facts:?}");
        }
        // Nor is a low limit of locked memory the fault of the probe.
        Err(UringRefusal::Memlock { .. }) => {}
        Err(refusal) => assert!(refusal.may_fall_back(), "{refusal}"),
    }
}

const ROLE: &str = "RINGFETCH_PROBE_TEST_CHILD";

/// The kind of a refusal in a word, which a child can print.
fn label_of(refusal: &UringRefusal) -> &'static str {
    match refusal {
        UringRefusal::Kernel { .. } => "kernel",
        UringRefusal::Sysctl { .. } => "sysctl",
        UringRefusal::Seccomp { .. } => "seccomp",
        UringRefusal::Denied { .. } => "denied",
        UringRefusal::Memlock { .. } => "memlock",
        UringRefusal::Files { .. } => "files",
        UringRefusal::Other { .. } => "other",
    }
}

/// Runs a test of this module again in a child process with [`role`] set, and returns the label and the
/// message that it printed.
fn run_child(test: &str, role: &str) -> (String, String) {
    let output = std::process::Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", &format!("backend::probe::tests::{test}")])
        .args(["--include-ignored", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .output()
        .expect("child");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = |prefix: &str| {
        text.lines()
            .find_map(|line| line.split_once(prefix))
            .map(|(_, rest)| rest.to_owned())
            .unwrap_or_else(|| panic!("no {prefix} from the child {role}: {output:?}"))
    };
    (line("label="), line("message="))
}

/// The role of this process, if it is the child of a test.
fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Prints the probe's result for the parent.
fn print_probe() {
    let (label, message) = match probe() {
        Ok(UringFacts {
            registered_buffers: Err(reason),
            ..
        }) => ("unregistered", reason),
        Ok(facts) => ("ok", format!("{facts:?}")),
        Err(refusal) => (label_of(&refusal), refusal.to_string()),
    };
    println!("\nlabel={label}\nmessage={message}");
}

/// The label and the remedy that the child must report: these, unless io_uring is already refused to the
/// parent.
fn unless_refused(label: &'static str, remedy: &str) -> (&'static str, String) {
    match probe() {
        Ok(_) => (label, remedy.to_owned()),
        Err(refusal) => (label_of(&refusal), refusal.remedy()),
    }
}

fn limit(resource: rustix::process::Resource, to: u64) {
    let to = rustix::process::Rlimit {
        current: Some(to),
        maximum: Some(to),
    };
    rustix::process::setrlimit(resource, to).expect("a lower limit is always allowed");
}

/// Installs a filter for this thread like a container's profile: `call` fails with `errno`, all else is allowed.
fn deny(call: libc::c_long, errno: i32) {
    let load = u16::try_from(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS).expect("a code");
    let jump = u16::try_from(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K).expect("a code");
    let ret = u16::try_from(libc::BPF_RET | libc::BPF_K).expect("a code");
    let call = u32::try_from(call).expect("a number");
    let answer = libc::SECCOMP_RET_ERRNO | errno.cast_unsigned();
    let mut filter = [
        // The number of the system call is at offset 0 of seccomp_data.
        libc::sock_filter {
            code: load,
            jt: 0,
            jf: 0,
            k: 0,
        },
        libc::sock_filter {
            code: jump,
            jt: 0,
            jf: 1,
            k: call,
        },
        libc::sock_filter {
            code: ret,
            jt: 0,
            jf: 0,
            k: answer,
        },
        libc::sock_filter {
            code: ret,
            jt: 0,
            jf: 0,
            k: libc::SECCOMP_RET_ALLOW,
        },
    ];
    let program = libc::sock_fprog {
        len: 4,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: these arguments are numbers.
    let set = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(set, 0);
    // SAFETY: the program and its filter live across the call.
    let set = unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
        )
    };
    assert_eq!(set, 0);
}

#[test]
fn a_seccomp_filter_is_recognised() {
    // Scenario: children under a filter whose errno for io_uring_setup is EPERM (Docker's) or ENOSYS
    // (Podman's). Expectation: both are reported as seccomp and name the profile, unless a sysctl, which
    // comes first, forbids io_uring here.
    if let Some(role) = role() {
        deny(libc::SYS_io_uring_setup, role.parse().expect("an errno"));
        return print_probe();
    }
    let expected = match probe() {
        Err(refusal @ UringRefusal::Sysctl { .. }) => (label_of(&refusal), refusal.remedy()),
        Ok(_) | Err(_) => ("seccomp", PROFILE.to_owned()),
    };
    for errno in [libc::EPERM, libc::ENOSYS] {
        let (label, message) = run_child("a_seccomp_filter_is_recognised", &errno.to_string());
        assert_eq!(label, expected.0, "{errno}: {message}");
        assert!(message.contains(&expected.1), "{errno}: {message}");
    }
}

#[test]
fn running_out_of_files_is_recognised() {
    // Scenario: a child limited to 3 descriptors, all in use. Expectation: files, with `ulimit -n`; or what
    // refuses io_uring here.
    if role().is_some() {
        limit(rustix::process::Resource::Nofile, 3);
        return print_probe();
    }
    let (label, message) = run_child("running_out_of_files_is_recognised", "child");
    match probe() {
        Ok(_) => {
            assert_eq!(label, "files", "{message}");
            assert!(message.contains("ulimit -n"), "{message}");
        }
        // Without a descriptor to read /proc, the errno alone cannot tell a filter from a sysctl.
        Err(refusal) => assert!(
            [label_of(&refusal), "denied", "kernel"].contains(&label.as_str()),
            "{label}: {message}"
        ),
    }
}

#[test]
fn a_memlock_limit_is_recognised() {
    // Scenario: a child that may lock no memory. Expectation: memlock, where rings count (kernels before 5.12
    // and from 6.14); else a working ring that says why memory cannot be registered. Both name `ulimit -l`.
    // Or what refuses io_uring here.
    if role().is_some() {
        limit(rustix::process::Resource::Memlock, 0);
        // Root may lock without limit; user nobody may not.
        // SAFETY: setresuid has no preconditions; refused (not root) it changes nothing.
        unsafe { libc::setresuid(65_534, 65_534, 65_534) };
        return print_probe();
    }
    let expected = unless_refused("memlock", "ulimit -l");
    let (label, message) = run_child("a_memlock_limit_is_recognised", "child");
    assert!(
        label == expected.0 || (expected.0 == "memlock" && label == "unregistered"),
        "{label}: {message}"
    );
    assert!(message.contains(&expected.1), "{message}");
}

#[test]
fn a_probe_keeps_no_memory() {
    // Scenario: a child that may register no memory probes 100 times. Expectation: it has grown by less than half a page
    // for each. Not more often: the kernel frees rings some time after they are closed, and until then each counts against
    // this user's limit of lockable memory, which may be 8 MiB (TRAPS 9).
    if role().is_some() {
        deny(libc::SYS_io_uring_register, libc::EPERM);
        // Counted page by page; statm is off by what each CPU has not added up yet.
        let resident_kib = || {
            let memory = std::fs::read_to_string("/proc/self/smaps_rollup").expect("smaps_rollup");
            let mut lines = memory.lines();
            let anonymous = lines.find_map(|line| line.strip_prefix("Anonymous:")?.strip_suffix(" kB"));
            anonymous
                .and_then(|kib| kib.trim().parse::<u64>().ok())
                .expect("a number")
        };
        let _warm = probe();
        let before = resident_kib();
        (0..100).for_each(|_| drop(probe()));
        return println!("\nlabel={}\nmessage=", resident_kib().saturating_sub(before));
    }
    let (grown, _) = run_child("a_probe_keeps_no_memory", "child");
    assert!(grown.parse::<u64>().expect("KiB") < 200, "{grown} KiB");
}

#[test]
#[ignore = "needs root"]
fn locked_memory_counts_once_a_ring() {
    // Scenario: a user of its own with 5 MiB of lockable memory registers 2 MiB with two rings, then with
    // three. Expectation: two succeed, three are refused: each ring counts the same memory anew.
    if role().is_some() {
        limit(rustix::process::Resource::Memlock, 5 << 20);
        // Locked memory is counted over all processes of a user, so this user must be unique.
        let user = 100_000 + std::process::id();
        // SAFETY: setresuid has no preconditions; where it is refused (not root), the test fails.
        unsafe { libc::setresuid(user, user, user) };
        let registers = |rings| register_memory(2 << 20, rings).map_err(|error| error.raw_os_error());
        return println!("\nlabel={:?}\nmessage={:?}", registers(2), registers(3));
    }
    let (two, three) = run_child("locked_memory_counts_once_a_ring", "child");
    assert_eq!(two, "Ok(())");
    assert_eq!(three, format!("Err(Some({}))", libc::ENOMEM));
}

#[test]
fn a_signal_refuses_nothing() {
    // Scenario: a thread that probes is interrupted by signals all the time, a hundred probes long; not longer, for the reason
    // that `a_probe_keeps_no_memory` gives. Expectation: the same answer as without.
    use std::os::unix::thread::JoinHandleExt as _;
    extern "C" fn nothing(_: std::ffi::c_int) {}
    // SAFETY: the handler is async-signal-safe.
    unsafe { libc::signal(libc::SIGUSR1, nothing as *const () as libc::sighandler_t) };
    let label = || probe().err().as_ref().map(label_of);
    let expected = label();
    let probing = std::thread::spawn(move || {
        (0..100)
            .map(|_| probe().err())
            .collect::<Vec<Option<UringRefusal>>>()
    });
    while !probing.is_finished() {
        // SAFETY: the thread is not joined yet.
        unsafe { libc::pthread_kill(probing.as_pthread_t(), libc::SIGUSR1) };
    }
    for refusal in probing.join().expect("no panic") {
        assert_eq!(refusal.as_ref().map(label_of), expected, "{refusal:?}");
    }
}
