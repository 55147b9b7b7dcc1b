//! The studies of `ringfetch lab` that ask a daemon, small and forced.

use crate::daemon::{Daemon, Setup, backends_and_auto};
use clap::Parser as _;
use ringfetch_lab::{Context, Lab, Report};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    lab: Lab,
}

/// On a disk: temporary directories are often memory, which may have no direct I/O.
fn scratch() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

/// Runs a study below a directory, with results in `NAME`; its report, or what is wrong.
async fn lab(
    words: &str,
    directory: &Path,
    daemon: Option<&Daemon>,
    stopped: bool,
) -> Result<Report, String> {
    let at = directory.display().to_string();
    let (server, admin) = match daemon {
        Some(daemon) => (
            format!("http://{}", daemon.grpc),
            format!("http://{}", daemon.admin),
        ),
        None => ("http://127.0.0.1:1".to_owned(), "http://127.0.0.1:1".to_owned()),
    };
    let words = words.replace("DIR", &at).replace("SERVER", &server);
    let out = directory.join(format!("out-{}", fs::read_dir(directory).unwrap().count()));
    let words = format!("{words} --out {} --repetitions 2 --force", out.display());
    let line = Line::parse_from(["lab"].into_iter().chain(words.split_ascii_whitespace()));
    let context = Context {
        stop: Arc::new(AtomicBool::new(stopped)),
        json: false,
        admin,
        command_line: words,
    };
    let ran =
        tokio::task::spawn_blocking(move || ringfetch_lab::run(&line.lab, &context, &mut std::io::sink()));
    ran.await.unwrap().map_err(|error| error.to_string())?;
    let report = fs::read(out.join("report.json")).unwrap();
    Ok(serde_json::from_slice(&report).unwrap())
}

fn serving(kind: &str, path: &Path) -> Daemon {
    let (kind, path) = (format!("kind: {kind}"), format!("path: {}", path.display()));
    let shape = match kind.as_str() {
        "kind: vectors" => vec!["dim: 768", "dtype: f32", "layout: raw"],
        _ => vec!["block_bytes: 4KiB"],
    };
    let lines: Vec<&str> = ["name: data", &kind, &path].into_iter().chain(shape).collect();
    Setup::new("pread").dataset(&lines).start()
}

fn measured(report: &Report, strategy: &str) -> usize {
    let rows = report.rows.iter();
    rows.filter(|row| row.key.iter().any(|(_, value)| value == strategy))
        .count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs direct I/O"]
async fn act_is_measured_over_grpc_and_in_process() {
    // Scenario: the daemon reads the file that the study has made; then another one of the same length; no daemon; no such
    // dataset. Expected: an N for both ways, and its shares; wrong bytes; an error that names the option, each.
    let directory = scratch();
    let act = "act --path DIR --size 4MiB --hold 100ms --step 50ms --most 2";
    let alone = lab(
        &format!("{act} --only engine-pread"),
        directory.path(),
        None,
        false,
    )
    .await;
    assert_eq!(measured(&alone.unwrap(), "engine-pread"), 1);
    let data = directory.path().join("ringfetch-lab-data/blocks-4MiB.dat");
    let daemon = serving("blocks", &data);
    let asking = format!("{act} --server SERVER --dataset data");
    let both = format!(
        "{asking} --only engine-pread,daemon --server-pid {}",
        daemon.pid().as_raw_nonzero()
    );
    let report = lab(&both, directory.path(), Some(&daemon), false).await.unwrap();
    for name in ["multiple", "over_1ms", "over_64ms"] {
        let rows = report
            .rows
            .iter()
            .filter(|row| row.measures.iter().any(|(known, _)| known == name));
        assert_eq!(rows.count(), 2, "{name}");
    }
    let missing = lab(
        &asking.replace("dataset data", "dataset other"),
        directory.path(),
        Some(&daemon),
        false,
    )
    .await;
    assert!(missing.unwrap_err().starts_with("--dataset"));
    daemon.stop().await;
    let nobody = lab(&asking, directory.path(), None, false).await.unwrap_err();
    assert!(
        nobody.starts_with("--server: cannot reach http://127.0.0.1:1"),
        "{nobody}"
    );

    let other = directory.path().join("other");
    fs::write(&other, vec![7; 4 << 20]).unwrap();
    let daemon = serving("blocks", &other);
    let wrong = lab(
        &format!("{asking} --only daemon"),
        directory.path(),
        Some(&daemon),
        false,
    )
    .await;
    assert!(wrong.unwrap_err().contains("wrong bytes"));
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_gets_back_the_backend_that_it_had() {
    // Scenario: a study of two backends, with random items and with a trace at a rate; one that is stopped at its first step; one
    // of a dataset with a backend of its own; a trace that is past the end. Expected: a verdict; each time the backend that
    // there was; an error that names the option.
    let directory = scratch();
    let data = directory.path().join("data");
    fs::write(&data, vec![7; 2 << 20]).unwrap();
    fs::write(directory.path().join("trace"), "3\n1\n511\n").unwrap();
    fs::write(directory.path().join("beyond"), "1\n512\n").unwrap();
    let daemon = serving("blocks", &data);
    let read_by = async || {
        let path = daemon.read_path("data").await;
        (path.backend().as_str_name().to_owned(), path.own_backend)
    };
    let before = read_by().await;
    let flip = "flip --path DIR/data --server SERVER --dataset data --only mmap,pread --step 30ms --batch 4";
    for more in ["", "--trace DIR/trace --rate 200"] {
        let report = lab(&format!("{flip} {more}"), directory.path(), Some(&daemon), false)
            .await
            .unwrap();
        assert!(report.notes[0].starts_with("verdict: "), "{:?}", report.notes);
        assert_eq!((measured(&report, "mmap"), measured(&report, "pread")), (1, 1));
        assert_eq!(read_by().await, before);
    }
    let stopped = lab(flip, directory.path(), Some(&daemon), true)
        .await
        .unwrap_err();
    assert!(stopped.contains("stopped after 0 of 4 steps"), "{stopped}");
    assert_eq!(read_by().await, before);
    let beyond = lab(
        &format!("{flip} --trace DIR/beyond"),
        directory.path(),
        Some(&daemon),
        false,
    )
    .await;
    let beyond = beyond.unwrap_err();
    assert!(
        beyond.starts_with("--trace") && beyond.contains("line 2"),
        "{beyond}"
    );

    crate::flip::set(&daemon, ringfetch_proto::v1::Backend::Mmap, Some("data"))
        .await
        .unwrap();
    let own = read_by().await;
    assert!(own.1 && own != before);
    lab(flip, directory.path(), Some(&daemon), false).await.unwrap();
    assert_eq!(read_by().await, own);
    daemon.stop().await;
}

/// Writes candidates for vectors of 768 f32 as bench/candidates.py does: 6 queries, 5 results, oversampling 1 and 4; every
/// best score is off by `off`.
fn candidates(vectors: &Path, off: f32) -> PathBuf {
    let bytes = fs::read(vectors).unwrap();
    let elements: Vec<f32> = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|word| f32::from_le_bytes(*word))
        .collect();
    let all: Vec<&[f32]> = elements.chunks(768).collect();
    let head = serde_json::json!({ "format": "ringfetch-lab-candidates/1", "dim": 768, "count": all.len(), "queries": 6,
        "limit": 5, "oversampling": [1, 4], "made_by": "a test" });
    let mut out = format!("{head}\n").into_bytes();
    for query in 0..6_u32 {
        let vector = all[query as usize * 7];
        let ids: Vec<u32> = (0..20).map(|place| (query * 131 + place * 37) % 1000).collect();
        out.extend(vector.iter().flat_map(|element| element.to_le_bytes()));
        out.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        for count in [5, 20] {
            let dot = |id: &u32| {
                vector
                    .iter()
                    .zip(all[*id as usize])
                    .map(|(a, b)| a * b)
                    .sum::<f32>()
            };
            let mut scores: Vec<f32> = ids[..count].iter().map(dot).collect();
            scores.sort_by(|one, other| other.total_cmp(one));
            out.extend(scores[..5].iter().flat_map(|score| (score + off).to_le_bytes()));
        }
    }
    let path = vectors.with_extension("candidates");
    fs::write(&path, out).unwrap();
    path
}

async fn rescored(strategies: &[&str]) {
    let directory = scratch();
    let rescore = "rescore --path DIR --vectors 1000 --buffered";
    let missing = lab(rescore, directory.path(), None, false).await.unwrap_err();
    assert!(
        missing.starts_with("--path") && missing.contains("python3 bench/candidates.py "),
        "{missing}"
    );
    let data = directory.path().join("ringfetch-lab-data/vectors-1000x768.f32");
    candidates(&data, 0.0);
    let daemon = serving("vectors", &data);
    let asking = format!(
        "{rescore} --server SERVER --dataset data --only {}",
        strategies.join(",")
    );
    let report = lab(&asking, directory.path(), Some(&daemon), false)
        .await
        .unwrap();
    for strategy in strategies {
        assert_eq!(
            measured(&report, strategy),
            4,
            "{strategy}: {:?}",
            report.left_out
        );
    }
    let unprepared = lab(
        &format!("{asking} --oversampling 2"),
        directory.path(),
        Some(&daemon),
        false,
    )
    .await;
    assert!(unprepared.unwrap_err().starts_with("--oversampling: 2"));
    for strategy in strategies {
        candidates(&data, 0.01);
        let wrong = format!("{rescore} --server SERVER --dataset data --only {strategy}");
        let wrong = lab(&wrong, directory.path(), Some(&daemon), false)
            .await
            .unwrap_err();
        assert!(wrong.contains("wrong bytes: query"), "{strategy}: {wrong}");
    }
    let path = candidates(&data, 0.0);
    fs::write(&path, &fs::read(&path).unwrap()[..5000]).unwrap();
    let short = lab(&asking, directory.path(), Some(&daemon), false)
        .await
        .unwrap_err();
    assert!(
        short.starts_with("--path") && short.contains("cut short"),
        "{short}"
    );
    daemon.stop().await;

    candidates(&data, 0.0);
    let daemon = serving("blocks", &data);
    let kind = lab(&asking, directory.path(), Some(&daemon), false)
        .await
        .unwrap_err();
    assert!(
        kind.starts_with("--dataset") && kind.contains("kind blocks"),
        "{kind}"
    );
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rescoring_gives_the_right_scores() {
    // Scenario: candidates that are missing, whole, wrong, cut short; oversampling that was not prepared; a dataset of another
    // kind. Expected: every strategy and the daemon give the scores that are stored; errors name the option and the remedy.
    rescored(&["mmap-plain", "mmap", "engine-pread", "daemon"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs io_uring"]
async fn rescoring_with_a_ring_gives_the_right_scores() {
    assert!(backends_and_auto().contains(&"auto"));
    rescored(&["uring", "auto"]).await;
}
