//! The daemon's other commands beside a daemon that serves. `config` tests them alone.

use crate::daemon::{PATIENCE, Setup, any_backend, eventually};
use crate::data::plain_blocks;
use ringfetch_engine::dataset::{Dtype, Layout};
use ringfetch_proto::v1;
use rustix::process::Signal;
use std::process::{Command, Stdio};
use tonic::Code;
use tonic_types::StatusExt as _;

#[tokio::test]
async fn a_configuration_that_became_invalid_makes_no_running_daemon_unhealthy() {
    // Scenario: the file of a serving daemon gets a misspelled key and an invalid word; then that daemon
    // stops. Expectation: healthcheck reaches the daemon by the address in the file or on the command line,
    // and reports the mistakes in the file; once the daemon is gone, it exits with 1 and the same report.
    let mut daemon = plain_blocks(Setup::new(any_backend()), 1).0.start();
    let address = daemon.http.to_string();
    let valid = std::fs::read_to_string(daemon.path("ringfetchd.yaml")).unwrap();
    let misspelled = valid.clone() + "engin: {}\n";
    let with_address = valid.replace(
        "http: {listen: 127.0.0.1:0",
        &format!("http: {{hots: [a], listen: \"{address}\""),
    );
    assert_ne!(valid, with_address);
    let by_flag = ["healthcheck", "--http-listen", &address];
    for (broken, mistake, arguments) in [
        (misspelled.as_str(), "engin", &by_flag[..]),
        ("a: [", "YAML", &by_flag),
        (&with_address, "hots", &["healthcheck"]),
    ] {
        daemon.rewrite(broken);
        let health = daemon.command(arguments);
        let line = String::from_utf8_lossy(&health.stdout);
        assert_eq!(health.status.code(), Some(0), "{health:?}");
        assert!(line.starts_with("ready: ") && line.contains(mistake), "{line}");
    }
    daemon.rewrite(&misspelled);
    daemon.signal(Signal::TERM);
    daemon.ends_with(0).await;
    let health = daemon.command(&by_flag);
    assert_eq!(health.status.code(), Some(1), "{health:?}");
    assert!(
        String::from_utf8_lossy(&health.stderr).contains("engin"),
        "{health:?}"
    );
}

/// A daemon that serves the demo.
pub(crate) fn demo() -> Setup {
    let ports = ["grpc.listen", "http.listen", "admin.listen"];
    let setup = ports
        .iter()
        .fold(Setup::new("mmap"), |setup, port| setup.set(port, "127.0.0.1:0"));
    setup.file("demo/.ringfetch-demo-complete", b"");
    setup.file("demo/blocks.bin", &[7; 4096]);
    setup.file("demo/objects/one", b"1");
    let vectors = setup.path("demo/vectors.npy");
    ringfetch_pattern::write_vectors(&vectors, 1, Layout::Npy, Dtype::F32, 128, 4, &mut |_| true).unwrap();
    let demo = setup.path("demo").to_str().unwrap().to_owned();
    // Without `--config FILE`.
    let through = ["sh", "-c", "shift 2; exec \"$0\" --demo-dir \"$DEMO\" \"$@\""];
    setup.variable("DEMO", &demo).through(&through)
}

#[tokio::test]
async fn a_daemon_without_a_file_cannot_reload_and_says_so() {
    // Scenario: the demo, which has no configuration file, gets a call to reload. Expectation: FAILED_PRECONDITION with the
    // remedy, and no reload in the status.
    let daemon = demo().start();
    let status = daemon
        .admin_client()
        .await
        .reload(v1::ReloadRequest {})
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(status.message().contains("--config"), "{status:?}");
    assert_eq!(status.get_details_error_info().unwrap().reason, "NO_FILE");
    assert_eq!(daemon.status().await.last_reload, None);
    daemon.stop().await;
}

#[test]
fn an_error_that_nobody_reads_ends_the_process_all_the_same() {
    // Scenario: stderr is a full pipe that nobody reads, and the configuration does not exist. Expectation: exit code 2.
    let (_reader, mut stderr) = std::io::pipe().unwrap();
    rustix::fs::fcntl_setfl(&stderr, rustix::fs::OFlags::NONBLOCK).unwrap();
    while std::io::Write::write(&mut stderr, &[b'x'; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&stderr, rustix::fs::OFlags::empty()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfetchd"));
    command.args(["--config", "no-such.yaml", "check-config"]);
    let mut child = command.stdin(Stdio::null()).stderr(stderr).spawn().unwrap();
    let code = eventually("it ends", PATIENCE, || child.try_wait().unwrap());
    assert_eq!(code.code(), Some(2));
}
