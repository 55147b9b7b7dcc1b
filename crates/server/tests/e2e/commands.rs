//! The daemon's other commands beside a daemon that serves. `config` tests them alone.

use crate::daemon::{Setup, any_backend};
use crate::data::plain_blocks;
use rustix::process::Signal;

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
