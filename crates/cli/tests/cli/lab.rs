//! `ringfetch lab`: how a study asks a daemon, and what it refuses.

use crate::connections::{forward, listen};
use crate::flaw::Flaw;
use crate::server::{REPLACED, start};
use crate::{failure, stdout, word};
use serde_json::Value;
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn act_measures_no_daemon_that_serves_another_file() {
    // Scenario: a file that exists, and a dataset of its length: with other bytes at its end, at its beginning. Expected: exit
    // code 2 and an error that names --dataset and the file.
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, out) = (directory.path().join("data"), directory.path().join("out"));
    for place in [(5 << 20) - 1, 0] {
        // The dataset is all zeros.
        let mut bytes = vec![0; 5 << 20];
        bytes[place] = 1;
        fs::write(&path, bytes).unwrap();
        let [file, out] = [word(&path), word(&out)];
        let args = format!(
            "lab act --force --repetitions 1 --hold 10ms --step 10ms --most 1 --only daemon --path {file} --out {out} \
             --server http://{server} --dataset {REPLACED}"
        );
        let said = failure(None, &args, 2);
        assert!(
            said.contains("--dataset: replaced of ") && said.contains(&*path.to_string_lossy()),
            "{said}"
        );
    }
    assert!(!out.exists());
}

/// Forwards connections to a server, and counts them.
fn counted(server: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let count = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&count);
    let address = listen(move |_, client| {
        counter.fetch_add(1, Ordering::Relaxed);
        forward(client, server);
    });
    (address, count)
}

#[test]
fn requests_to_a_daemon_share_as_many_connections_as_asked_for() {
    // Scenario: a study with runs of many requests in flight, over one connection and over three. Expected: besides those
    // that find and try the dataset, so many for each of two runs; the report names them.
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("data");
    // As the dataset.
    fs::write(&path, vec![0; 5 << 20]).unwrap();
    let opened = [1, 3].map(|connections| {
        let (proxy, count) = counted(server);
        let out = directory.path().join(connections.to_string());
        let args = format!(
            "lab act --force --repetitions 1 --hold 200ms --step 200ms --most 1 --only daemon --path {} --out {} \
             --server http://{proxy} --dataset {REPLACED} --connections {connections}",
            word(&path),
            word(&out)
        );
        stdout(server, &args);
        let report: Value = serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
        let settings = report["settings"].as_array().unwrap();
        let named = settings.iter().find(|setting| setting[0] == "connections").unwrap();
        let said = named[1].as_str().unwrap();
        assert!(said.starts_with(&format!("{connections}, or ")), "{said}");
        count.load(Ordering::Relaxed)
    });
    assert_eq!(opened, [5, 9]);
}
