//! The file of the access log is opened again by name, at once or as soon as that is possible.

use super::{dropped, get, lines, lines_of};
use crate::daemon::{PATIENCE, Setup, any_backend, eventually, eventually_async};
use crate::data::plain_blocks;
use http::Method;
use rustix::process::Signal;
use std::fs;

#[tokio::test]
async fn a_rotated_file_is_left_and_a_new_one_made() {
    // Scenario: the file is renamed and the daemon gets SIGHUP, first with a valid configuration, then with
    // an invalid one. Expectation: later requests are in a new file, and the old one gets no more.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let daemon = setup.set("access_log.path", "access.log").start();
    for number in 0..2 {
        let id = format!("before-{number}");
        get(&daemon, &id, Method::GET, "/v1/datasets/blocks/blocks/1", None).await;
        lines_of(&daemon, &id, 1).await;
        fs::rename(daemon.path("access.log"), daemon.path("old.log")).unwrap();
        let old = lines(&daemon, "old.log").len();
        if number == 1 {
            daemon.rewrite("nonsense: 1");
        }
        daemon.signal(Signal::HUP);
        eventually("the new file is there", PATIENCE, || {
            daemon.path("access.log").exists().then_some(())
        });
        let id = format!("after-{number}");
        get(&daemon, &id, Method::GET, "/v1/datasets/blocks/blocks/1", None).await;
        lines_of(&daemon, &id, 1).await;
        assert_eq!(lines(&daemon, "old.log").len(), old);
    }
    assert_eq!(dropped(&daemon, "write").await, 0);
    daemon.stop().await;
}

#[tokio::test]
async fn a_file_that_cannot_be_reopened_is_tried_again() {
    // Scenario: the file's directory is renamed, and the daemon gets SIGHUP twice while there is none of that name; later there is
    // one. Expectation: until then lines are in the old file; then, without a signal, in the new one. The log has a warning for
    // each signal, and the end of it once.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    fs::create_dir(setup.path("logs")).unwrap();
    let daemon = setup.set("access_log.path", "logs/access.log").start();
    fs::rename(daemon.path("logs"), daemon.path("old")).unwrap();
    let fails = "the access log cannot be reopened; still writing to the old file";
    let works = "the access log is reopened";
    let times = |text| daemon.log().iter().filter(|line| line.contains(text)).count();
    for signals in 1..=2 {
        daemon.signal(Signal::HUP);
        eventually("a warning", PATIENCE, || (times(fails) == signals).then_some(()));
    }
    let before = lines(&daemon, "old/access.log").len();
    eventually_async("a line in the old file", async || {
        daemon.assert_serves("blocks").await;
        (lines(&daemon, "old/access.log").len() > before).then_some(())
    })
    .await;
    fs::create_dir(daemon.path("logs")).unwrap();
    eventually_async("a line in the new file", async || {
        daemon.assert_serves("blocks").await;
        (!lines(&daemon, "logs/access.log").is_empty()).then_some(())
    })
    .await;
    daemon.logged(&[works]);
    assert_eq!((times(fails), times(works)), (2, 1));
    assert_eq!(dropped(&daemon, "write").await, 0);
    daemon.stop().await;
}
