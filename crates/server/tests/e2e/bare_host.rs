//! A host without the usual file systems: a root directory of its own, or a container made by hand.

use crate::daemon::{Setup, backends_and_auto};
use crate::data::plain_blocks;

/// Starts a command in a mount namespace of its own, after this has changed it.
fn after(change: &str) -> [String; 6] {
    let script = format!("{change} && exec \"$@\"");
    ["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned)
}

#[tokio::test]
#[ignore = "needs root"]
async fn a_host_without_devices_processes_and_system_is_enough() {
    // Scenario: /dev is empty; /sys and /proc are not mounted. Expectation: it starts and serves on every backend; of a ring
    // without /proc it says only what is missing.
    let has_ring = backends_and_auto().contains(&"uring");
    for (change, warns) in [
        ("mount -t tmpfs none /dev", false),
        (
            "umount --recursive --lazy /sys && umount --recursive --lazy /proc",
            has_ring,
        ),
    ] {
        let command = after(change);
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        for backend in backends_and_auto() {
            let (setup, _) = plain_blocks(Setup::new(backend), 16);
            let daemon = setup.through(&command).start();
            daemon.assert_serves("blocks").await;
            let log = daemon.log();
            let warnings: Vec<&String> = log.iter().filter(|line| line.contains("\"WARN\"")).collect();
            let of_proc = |line: &&String| line.contains("is /proc mounted?");
            assert!(
                warnings.iter().all(of_proc) && warns != warnings.is_empty(),
                "{change}, {backend}: {warnings:?}"
            );
            daemon.stop().await;
        }
    }
}
