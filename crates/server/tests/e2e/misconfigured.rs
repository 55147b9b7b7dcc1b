//! Configurations and files that cannot be served: each ends the daemon at once with its exit code and a
//! message that names the field and the remedy.

use crate::daemon::{AS_NOBODY, Setup};
use crate::data::{counted, noise, npy, plain_blocks};
use crate::tls::{Authority, with_tls};
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, SystemTime};

/// An entry for a vectors dataset in a file.
fn vectors<'a>(name: &'a str, path: &'a str, more: &[&'a str]) -> Vec<String> {
    let mut lines = vec![
        format!("name: {name}"),
        "kind: vectors".to_owned(),
        format!("path: {path}"),
    ];
    lines.extend(more.iter().map(|line| (*line).to_owned()));
    lines
}

#[test]
fn files_that_contradict_their_entry_are_told_all_at_once() {
    // Scenario: one daemon with several datasets, each with a mistake. Expectation: exit code 2, and every
    // dataset is named with its field, the problem and the remedy.
    let setup = Setup::new("uring");
    let array = npy("<f4", 10, 16, &noise(1, 640));
    setup.file("f32.npy", &array);
    setup.file("header-cut.npy", &array[..50]);
    setup.file("data-cut.npy", &array[..array.len() - 1]);
    setup.file("not.npy", &noise(2, 500));
    setup.file("empty.bin", b"");
    setup.file("odd.bin", &noise(3, 10_001));
    setup.file("cut.fvecs", &[&16_u32.to_le_bytes()[..], &noise(4, 63)].concat());
    setup.file("cut.fbin", &counted(10, 16, &noise(5, 600)));
    setup.file("directory/file", b"x");
    let entries = [
        vectors("dtype", "f32.npy", &["dtype: u8"]),
        vectors("dim", "f32.npy", &["dim: 17"]),
        vectors("header-cut", "header-cut.npy", &[]),
        vectors("data-cut", "data-cut.npy", &[]),
        vectors("magic", "not.npy", &[]),
        vectors("fvecs-cut", "cut.fvecs", &[]),
        vectors("fbin-cut", "cut.fbin", &[]),
        vectors(
            "raw-odd",
            "odd.bin",
            &["layout: raw", "dim: 16", "dtype: f32", "header_bytes: 1000"],
        ),
    ];
    let blocks = |name: &str, path: &str| {
        [
            &format!("name: {name}"),
            "kind: blocks",
            "block_bytes: 4096",
            &format!("path: {path}"),
        ]
        .map(str::to_owned)
        .to_vec()
    };
    let mut all = entries.to_vec();
    all.extend([
        blocks("blocks-odd", "odd.bin"),
        blocks("missing", "gone.bin"),
        blocks("empty", "empty.bin"),
        blocks("a-directory", "directory"),
        ["name: a-file", "kind: objects", "path: odd.bin"]
            .map(str::to_owned)
            .to_vec(),
    ]);
    let setup = all.iter().fold(setup, |setup, lines| {
        setup.dataset(&lines.iter().map(String::as_str).collect::<Vec<_>>())
    });
    let checks: [&[&str]; 13] = [
        &["dtype", "is u8, but", "holds f32", "set dtype: f32"],
        &["dim", "is 17, but", "says 16", "set dim: 16"],
        &["header-cut", "truncated", "copy or save the file again"],
        &["data-cut", "wants 768", "cut off"],
        &["magic", "magic of .npy"],
        &["fvecs-cut", "not a multiple of 68", "cut off"],
        &["fbin-cut", "wants 648", "cut off"],
        &[
            "raw-odd",
            "dim",
            "not a multiple of 64",
            "correct dim, dtype or header_bytes",
        ],
        &[
            "blocks-odd",
            "block_bytes",
            "not a multiple of 4096",
            "partial_tail: ignore",
        ],
        &[
            "dataset missing: path",
            "gone.bin: does not exist",
            "correct the path",
        ],
        &["empty", "is empty", "write it first"],
        &["a-directory", "is a directory", "kind: objects"],
        &["a-file", "objects need a directory", "kind: blocks"],
    ];
    refused_with_lines(&setup, 2, &checks);
}

/// A start and a check of the configuration end with this exit code, and with a line for each of `checks` that has all of
/// its parts. Returns all that they say.
fn refused_with_lines(setup: &Setup, code: i32, checks: &[&[&str]]) -> [String; 2] {
    [setup.refused(), setup.run(&["check-config", "--open"])].map(|run| {
        run.with(code, &[]);
        for check in checks {
            let told = run
                .said
                .lines()
                .any(|line| check.iter().all(|part| line.contains(part)));
            assert!(told, "no line with {check:?} in:\n{}", run.said);
        }
        run.said
    })
}

#[test]
#[ignore = "needs root"]
fn a_file_without_permission_names_the_file_and_the_remedy() {
    // Scenario: the daemon runs as another user, with a file that only its owner may read. Expectation: exit
    // code 2 and the path, "permission denied" and the remedy.
    let setup = Setup::new("pread").open_to_all();
    let file = setup.file("private.bin", &noise(1, 4096));
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    setup
        .dataset(&["{name: private, kind: blocks, block_bytes: 4096, path: private.bin}"])
        .through(&AS_NOBODY)
        .refused()
        .with(
            2,
            &[
                "private",
                "path",
                "private.bin: permission denied",
                "let the daemon's user read it",
            ],
        );
}

#[test]
fn too_few_descriptors_for_a_dataset_are_the_hosts_refusal() {
    // Scenario: a limit of 100 open files, a dataset of 100 files, and one of 10 after it; then also some whose file is
    // missing, before and after them; a start, and a check of the configuration. Expectation: exit code 3, with the first
    // dataset and the remedy; with the mistakes 2, and their lines. The other one is not named: it may fit.
    let names: Vec<String> = (0..100).map(|index| format!("{index}.bin")).collect();
    let dataset = |name: &str, names: &[String]| {
        let names = names.join(", ");
        format!("{{name: {name}, kind: blocks, block_bytes: 4096, paths: [{names}]}}")
    };
    let missing = |name: &str| dataset(name, &["gone.bin".to_owned()]);
    let (many, few) = (dataset("many", &names), dataset("few", &names[..10]));
    let refusal = ["dataset many: path", "out of file descriptors: raise the limit"];
    let mistakes = ["a", "z"].map(|name| {
        [
            format!("dataset {name}: path: "),
            "gone.bin: does not exist".to_owned(),
        ]
    });
    let [a, z] = mistakes
        .each_ref()
        .map(|parts| parts.each_ref().map(String::as_str));
    let limited = |datasets: &[&String]| {
        let setup = Setup::new("pread").through(&["prlimit", "--nofile=100"]);
        for name in &names {
            setup.file(name, &[1; 4096]);
        }
        datasets
            .iter()
            .fold(setup, |setup, dataset| setup.dataset(&[dataset]))
    };
    let refused = |datasets: &[&String], code, checks: &[&[&str]]| {
        for said in refused_with_lines(&limited(datasets), code, checks) {
            assert!(!said.contains("dataset few"), "{said}");
            assert_eq!(said.matches("out of file descriptors").count(), 1, "{said}");
        }
    };
    refused(&[&many, &few], 3, &[&refusal]);
    refused(
        &[&missing("a"), &many, &few, &missing("z")],
        2,
        &[&refusal, &a, &z],
    );
}

#[test]
fn too_few_descriptors_for_a_start_are_named_with_the_remedy() {
    // Scenario: limits at which each step of a start in turn finds no descriptor left. Expectation: exit code 3 and the
    // remedy.
    for most in 5..=20 {
        let nofile = format!("--nofile={most}");
        let (setup, _) = plain_blocks(Setup::new("pread"), 1);
        let setup = setup.through(&["prlimit", &nofile]);
        setup.refused().with(3, &["raise the", "ulimit -n"]);
    }
}

#[test]
fn too_few_descriptors_for_the_demo_are_named_with_the_remedy() {
    // Scenario: limits at which each step of `make-demo` in turn finds no descriptor left. Expectation: exit code 3, the
    // remedy, and no directory.
    for most in 5..=11 {
        let nofile = format!("--nofile={most}");
        let setup = Setup::new("mmap").through(&["prlimit", &nofile]);
        let path = setup.path("demo");
        setup
            .run(&["make-demo", "--demo-dir", path.to_str().unwrap()])
            .with(3, &["raise the", "ulimit -n"]);
        assert!(!path.exists(), "{most}");
    }
}

#[test]
#[ignore = "needs strace"]
fn a_lack_of_descriptors_for_the_files_of_the_configuration_is_no_mistake_in_it() {
    // Scenario: no descriptor is left for the configuration file; for the principals file; for the access log. Expectation:
    // exit code 3, the file's key and the remedy.
    for (name, key) in [
        ("ringfetchd.yaml", "config"),
        ("principals", "access.principals"),
        ("access.log", "access_log.path"),
    ] {
        let setup = Setup::new("pread").with_token();
        let (setup, _) = plain_blocks(setup.set("access_log.path", "access.log"), 1);
        setup.file("access.log", b"");
        let path = setup.path(name);
        let path = path.to_str().unwrap();
        let no_descriptor = [
            "strace",
            "-qq",
            "-o",
            "/dev/null",
            "-P",
            path,
            "-e",
            "inject=?open,openat:error=ENFILE",
        ];
        refused_with_lines(
            &setup.through(&no_descriptor),
            3,
            &[&[key, "raise the limit of open files"]],
        );
    }
}

#[test]
fn files_that_are_still_being_written_are_no_mistake() {
    // Scenario: principals, certificate and key that are cut off: an hour old, and changed after the start, as if somebody
    // still wrote them. Expectation: exit code 2, and then 3, with the file's key.
    let pair = Authority::new().pair("daemon");
    for (name, key) in [
        ("principals", "access.principals"),
        ("chain.pem", "tls.certificate"),
        ("key.pem", "tls.key"),
    ] {
        let (setup, _) = plain_blocks(Setup::new("pread").with_token(), 1);
        let setup = with_tls(setup, &pair);
        let file = File::options().write(true).open(setup.path(name)).unwrap();
        file.set_len(file.metadata().unwrap().len() / 2).unwrap();
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
        for (modified, code) in [(now - hour, 2), (now + hour, 3)] {
            file.set_modified(modified).unwrap();
            refused_with_lines(&setup, code, &[&[key, name]]);
        }
    }
}

#[test]
fn no_mistake_can_control_the_terminal() {
    // Scenario: a command and a key with a sequence that clears the screen; colours are forced, as on a terminal.
    // Expectation: exit code 2, and the mistake without control characters.
    let setup = Setup::new("pread").variable("CLICOLOR_FORCE", "1");
    for (argument, part) in [
        ("\u{1b}[2J", "unrecognized subcommand"),
        ("--set=\u{1b}[2J=1", "\\u{1b}[2J"),
    ] {
        let run = setup.run(&[argument]);
        run.with(2, &[part]);
        assert!(
            !run.said.replace('\n', "").contains(char::is_control),
            "{:?}",
            run.said
        );
    }
}

#[test]
fn a_check_opens_as_many_files_as_a_start() {
    // Scenario: a soft limit of 64 open files, which the daemon raises to the hard one, and 100 datasets. Expectation: the
    // check finds nothing wrong.
    let setup = Setup::new("pread").through(&["prlimit", "--nofile=64:256"]);
    setup.file("blocks.bin", &[1; 4096]);
    let setup = (0..100).fold(setup, |setup, index| {
        setup.dataset(&[&format!(
            "{{name: d{index}, kind: blocks, block_bytes: 4096, path: blocks.bin}}"
        )])
    });
    setup.run(&["check-config", "--open"]).with(0, &[]);
}

#[test]
fn an_addresses_file_that_cannot_be_written_is_told_before_a_port_is_bound() {
    // Scenario: --addresses-file in a directory that is missing, and as the name of a directory; and a dataset whose file
    // is missing. Expectation: exit code 2, both mistakes, and no port.
    let setup = Setup::new("pread").dataset(&["{name: a, kind: blocks, block_bytes: 4096, path: gone.bin}"]);
    setup.file("directory/file", b"x");
    for (name, why) in [("gone/addresses", "No such file"), ("directory", "directory")] {
        let path = setup.path(name);
        let path = path.to_str().unwrap();
        let run = setup.run(&["--addresses-file", path]);
        run.with(2, &["--addresses-file", path, why, "gone.bin: does not exist"]);
        assert!(!run.said.contains("listening"), "{}", run.said);
    }
}

#[test]
fn too_little_memory_for_a_process_is_the_hosts_refusal() {
    // Scenario: the address space, or the data, may hardly be larger than the response memory, and than that and what the
    // daemon needs besides. Expectation: exit code 3, the key and the limit to raise; then nothing is wrong.
    for (limit, name) in [("--as", "ulimit -v"), ("--data", "ulimit -d")] {
        for (mib, code) in [(80_u64, 3), (1024, 0)] {
            let limited = format!("{limit}={}", mib << 20);
            let (setup, _) = plain_blocks(Setup::new("pread").through(&["prlimit", &limited]), 1);
            if code == 0 {
                setup.run(&["check-config", "--open"]).with(0, &[]);
            } else {
                let parts: &[&str] = &[
                    "engine.memory_budget: is 32MiB",
                    "80.0 MiB",
                    name,
                    "lower the budget",
                ];
                refused_with_lines(&setup, code, &[parts]);
            }
        }
    }
}

#[test]
fn mistakes_in_the_configuration_are_told_all_at_once() {
    // Scenario: an unknown key in a dataset, one on the command line, a wrong word, a number out of range, a
    // size with an ambiguous unit, a limit that contradicts another. Expectation: exit code 2, each with its
    // key path and what is allowed; nothing else, since no file was opened.
    let setup = Setup::new("uring")
        .set("engine.backend", "io_uring")
        .set("engine.uring.que_depth", "4")
        .set("engine.mmap.threads", "0")
        .set("limits.request_bytes", "4MB")
        .set("limits.response_bytes", "1GiB")
        .dataset(&["name: a", "kind: blocks", "block_byte: 4096", "path: a.bin"]);
    let run = setup.refused();
    run.with(
        2,
        &[
            "engine.backend",
            "allowed: uring, mmap, auto, pread",
            "engine.uring.que_depth",
            "queue_depth",
            "engine.mmap.threads",
            "1 to 256",
            "limits.request_bytes",
            "MiB",
            "limits.response_bytes",
            "engine.memory_budget",
            "datasets[0].block_byte",
            "block_bytes",
        ],
    );
    assert!(!run.said.contains("does not exist"), "{}", run.said);
    Setup::new("uring")
        .refused()
        .with(2, &["datasets", "there are none"]);
}

#[test]
fn mistakes_in_all_kinds_of_files_are_told_all_at_once() {
    // Scenario: a missing certificate, a principals file with two wrong lines, an access log in a missing
    // directory, a missing file, and (on hosts with less than 1 TiB) more memory than there is; a start, and a
    // check of the configuration. Expectation: exit code 2, each in its own line, with its key and the remedy.
    let setup = Setup::new("mmap")
        .set("tls.certificate", "gone.pem")
        .set("tls.key", "gone.pem")
        .set("access.principals", "principals")
        .set("access_log.path", "gone/access.log")
        .set("engine.memory_budget", "1TiB")
        .dataset(&["name: a", "kind: blocks", "block_bytes: 4096", "path: gone.bin"]);
    setup.file("principals", b"alice\nbob token x\n");
    let memory: &[&str] = &["engine.memory_budget: is 1TiB, more than", "lower it"];
    let is_small = std::fs::read_to_string("/proc/meminfo").is_ok_and(|text| {
        let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        total
            .and_then(|total| total.split_whitespace().next()?.parse::<u64>().ok())
            .is_some_and(|kib| kib < 1 << 30)
    });
    let checks: [&[&str]; 6] = [
        if is_small { memory } else { &[] },
        &[
            "tls.certificate",
            "gone.pem",
            "name a file that the daemon may read",
        ],
        &[
            "access.principals",
            "line 1 must have three or four words",
            "write each line",
        ],
        &["access.principals", "line 2", "write each line"],
        &["access_log.path", "gone/access.log", "cannot be"],
        &["a: path", "gone.bin: does not exist", "correct the path"],
    ];
    refused_with_lines(&setup, 2, &checks);
}

#[test]
fn a_demo_directory_that_cannot_be_used_is_a_mistake() {
    // Scenario: `make-demo` into a path through a file, beside a file that the demo did not make, and while another
    // process makes it. Expectation: exit code 2, the directory and the flag; 1 where a restart helps.
    let setup = Setup::new("mmap");
    setup.file("file", b"");
    setup.file("theirs/blocks.bin", b"theirs");
    let partial = setup.path("made/.ringfetch-demo-partial");
    std::fs::create_dir_all(&partial).unwrap();
    let other_process = File::open(partial).unwrap();
    other_process.lock().unwrap();
    for (directory, code, problem) in [
        ("file/demo", 2, "cannot be made"),
        ("theirs", 2, "was not made by this demo"),
        ("made", 1, "another process is making it"),
    ] {
        let path = setup.path(directory);
        setup
            .run(&["make-demo", "--demo-dir", path.to_str().unwrap()])
            .with(code, &[directory, problem, "--demo-dir"]);
    }
    assert_eq!(std::fs::read(setup.path("theirs/blocks.bin")).unwrap(), b"theirs");
    assert!(!setup.path("theirs/.ringfetch-demo-partial").exists());
}

#[test]
fn every_port_in_use_is_told_at_once() {
    // Scenario: all three addresses are in use. Expectation: exit code 3; a line for each, which says it once.
    let taken = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let keys = ["grpc.listen", "http.listen", "admin.listen"];
    let setup = keys
        .iter()
        .zip(&taken)
        .fold(Setup::new("mmap"), |setup, (key, taken)| {
            setup.set(key, &taken.local_addr().unwrap().to_string())
        });
    let (setup, _) = plain_blocks(setup, 1);
    let run = setup.refused();
    run.with(3, &keys);
    assert_eq!(run.said.matches("(os error 98)").count(), 3, "{}", run.said);
}

#[tokio::test]
async fn a_port_in_use_is_named_with_its_key() {
    // Scenario: another program or another daemon listens on the gRPC, HTTP or admin address. Expectation:
    // exit code 3, key, address and remedy; the other daemon continues.
    let daemon = plain_blocks(Setup::new("mmap"), 1).0.start();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    for address in [taken.local_addr().unwrap(), daemon.grpc] {
        for (key, remedy) in [
            ("grpc.listen", "--grpc-listen 127.0.0.1:0"),
            ("http.listen", "--http-listen 127.0.0.1:0"),
            ("admin.listen", "--set admin.listen=127.0.0.1:0"),
        ] {
            let setup = Setup::new("mmap").set(key, &address.to_string());
            let (setup, _) = plain_blocks(setup, 1);
            let complaint = format!("{key}: cannot listen on {address}");
            setup
                .refused()
                .with(3, &[&complaint, "another process has this port", remedy]);
        }
    }
    assert_eq!(daemon.http_client().get("/readyz").await.status, 200);
    daemon.stop().await;
}
