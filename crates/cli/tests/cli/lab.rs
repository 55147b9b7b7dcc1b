//! `ringfetch lab`: what a study of a daemon refuses.

use crate::flaw::Flaw;
use crate::server::{REPLACED, start};
use crate::{failure, word};
use std::fs;

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
