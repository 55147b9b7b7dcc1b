//! The studies of `ringfetch lab` that measure a daemon, small and with `--force`.

use crate::access::lines;
use crate::daemon::{Daemon, PATIENCE, Setup, eventually};
use crate::data::plain_blocks;
use crate::tls::{Authority, with_tls};
use clap::Parser as _;
use procfs::process::Process;
use ringfetch_client::Client;
use ringfetch_lab::{Clients, Context, Lab, Report};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    lab: Lab,
}

/// A directory on a disk (temporary ones are often in memory, which may not support direct I/O), and the
/// daemon to measure.
struct Bed {
    directory: tempfile::TempDir,
    daemon: Option<Daemon>,
    /// How the study connects to the daemon.
    scheme: &'static str,
    clients: Clients,
}

impl Bed {
    fn new() -> Self {
        let program = std::env::current_exe().unwrap();
        let directory = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        Self {
            directory,
            daemon: None,
            scheme: "http",
            clients: Clients::default(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Serves a file as the dataset `data`, in place of the previous one.
    async fn serve(&mut self, kind: &str, file: &str) -> &Daemon {
        self.stop().await;
        let (line, path) = (
            format!("kind: {kind}"),
            format!("path: {}", self.path(file).display()),
        );
        let shape: &[&str] = match kind {
            "vectors" => &["dim: 768", "dtype: f32", "layout: raw"],
            _ => &["block_bytes: 4KiB"],
        };
        let lines = [&["name: data", line.as_str(), path.as_str()], shape].concat();
        self.daemon.insert(Setup::new("pread").dataset(&lines).start())
    }

    async fn stop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.stop().await;
        }
    }

    /// Runs a study to its end, or, if `stopped`, until its first step is done; returns its report, or the
    /// error.
    async fn run(&self, words: &str, stopped: bool) -> Result<Report, String> {
        let stop = |stop: &AtomicBool| stop.store(true, Ordering::Relaxed);
        self.run_and(words, stopped.then_some(stop)).await
    }

    /// The same; `then` is done once the first step is.
    async fn run_and(
        &self,
        words: &str,
        then: Option<impl FnOnce(&AtomicBool) + Send + 'static>,
    ) -> Result<Report, String> {
        let of = |port: fn(&Daemon) -> std::net::SocketAddr| {
            let address = self.daemon.as_ref().map(|daemon| port(daemon).to_string());
            format!(
                "{}://{}",
                self.scheme,
                address.unwrap_or_else(|| "127.0.0.1:1".to_owned())
            )
        };
        // A run that goes on has the directory of the last one.
        let number = fs::read_dir(self.path("")).unwrap().count() - usize::from(words.contains("--resume"));
        let out = self.path(&format!("out-{number}"));
        let (directory, server) = (self.path("").display().to_string(), of(|daemon| daemon.grpc));
        let named = |word: &str| word.replace("DIR", &directory).replace("SERVER", &server);
        let words = words.split_ascii_whitespace().map(named);
        let line = std::iter::once("lab".to_owned()).chain(words);
        let line = line.chain(
            [
                "--out",
                &out.display().to_string(),
                "--repetitions",
                "2",
                "--force",
            ]
            .map(str::to_owned),
        );
        let words: Vec<String> = line.collect();
        let line = Line::parse_from(&words);
        let stop = Arc::new(AtomicBool::new(false));
        let context = Context {
            stop: Arc::clone(&stop),
            json: false,
            clients: self.clients.clone(),
            admin: of(|daemon| daemon.admin),
            command_line: words.join(" "),
        };
        let goes_on = then.is_none();
        if let Some(then) = then {
            let samples = out.join("samples.jsonl");
            std::thread::spawn(move || {
                eventually("a first step", PATIENCE, || {
                    let made = fs::read_to_string(&samples).is_ok_and(|text| text.lines().count() > 1);
                    made.then_some(())
                });
                then(&stop);
            });
        }
        let ran = move || ringfetch_lab::run(&line.lab, &context, &mut std::io::sink());
        let ran = tokio::task::spawn_blocking(ran).await.unwrap();
        assert!(
            ran.is_ok() || !goes_on || !out.exists(),
            "a study that failed leaves nothing"
        );
        ran.map_err(|error| error.to_string())?;
        Ok(serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap())
    }

    async fn report(&self, words: &str) -> Report {
        self.run(words, false).await.unwrap()
    }

    /// The error of a study that must fail; it has to begin with the option.
    async fn refused(&self, words: &str, option: &str) -> String {
        let problem = self.run(words, false).await.unwrap_err();
        assert!(problem.starts_with(option), "{words}: {problem}");
        problem
    }
}

/// Rows of this strategy or backend.
fn rows(report: &Report, name: &str) -> usize {
    let of = |row: &&ringfetch_lab::ReportRow| row.key.iter().any(|(_, value)| value == name);
    report.rows.iter().filter(of).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs direct I/O"]
async fn act_is_measured_over_grpc_and_in_process() {
    // Scenario: the daemon reads the file that the study has made; no such dataset; no daemon; another file
    // of the same length; a shorter one. Expectation: an N for both ways, with its shares; an error that names
    // the option, for each, and the file to serve.
    let mut bed = Bed::new();
    let act = "act --path DIR --size 4MiB --hold 400ms --step 200ms --most 2";
    let alone = bed.report(&format!("{act} --only engine-pread")).await;
    assert_eq!(rows(&alone, "engine-pread"), 1);
    let pid = bed
        .serve("blocks", "ringfetch-lab-data/blocks-4MiB.dat")
        .await
        .pid();
    let asking = format!("{act} --server SERVER --dataset data");
    let both = format!(
        "{asking} --only engine-pread,daemon --server-pid {}",
        pid.as_raw_nonzero()
    );
    let report = bed.report(&both).await;
    for name in ["multiple", "over_1ms", "over_64ms"] {
        let has = |row: &&ringfetch_lab::ReportRow| row.measures.iter().any(|(known, _)| known == name);
        assert_eq!(report.rows.iter().filter(has).count(), 2, "{name}");
    }
    bed.refused(&asking.replace("dataset data", "dataset other"), "--dataset")
        .await;
    bed.stop().await;
    bed.refused(&asking, "--server: cannot reach http://127.0.0.1:1")
        .await;
    fs::write(bed.path("other"), vec![7; 4 << 20]).unwrap();
    bed.serve("blocks", "other").await;
    let wrong = bed
        .refused(&format!("{asking} --only daemon"), "--dataset: data of ")
        .await;
    let file = "ringfetch-lab-data/blocks-4MiB.dat: wrong bytes at ";
    assert!(wrong.contains(file), "{wrong}");
    fs::write(bed.path("other"), vec![7; 1 << 20]).unwrap();
    bed.serve("blocks", "other").await;
    let short = bed.refused(&asking, "--dataset: data of ").await;
    assert!(
        short.ends_with("ringfetch-lab-data/blocks-4MiB.dat, which is longer"),
        "{short}"
    );
    bed.stop().await;
}

/// CPU time of this process so far, in ticks of 10 ms.
fn own_cpu() -> Duration {
    let stat = Process::myself().unwrap().stat().unwrap();
    Duration::from_millis((stat.utime + stat.stime) * 1000 / procfs::ticks_per_second())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs direct I/O"]
async fn reads_in_process_cost_no_cpu_time_of_the_daemon() {
    // Scenario: reads in process, while the process that --server-pid names is busy. Expectation: they cost no more
    // than this process has used.
    let mut bed = Bed::new();
    fs::create_dir(bed.path("ringfetch-lab-data")).unwrap();
    let data = "ringfetch-lab-data/blocks-4MiB.dat";
    ringfetch_pattern::write_blocks(&bed.path(data), 42, 4 << 20, &mut |_| true).unwrap();
    bed.serve("blocks", data).await;
    let busy = Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
    let mut busy = busy.unwrap();
    let words = format!(
        "act --path DIR --size 4MiB --hold 1s --step 200ms --most 1 --only engine-pread --server SERVER --dataset data \
         --server-pid {}",
        busy.id()
    );
    let before = own_cpu();
    let report = bed.run(&words, false).await;
    // A tick may have begun before.
    let used = own_cpu() - before + Duration::from_millis(10);
    busy.kill().unwrap();
    busy.wait().unwrap();
    let out = report.unwrap();
    let measure = |name: &str| {
        let mut measures = out.rows[0].measures.iter();
        measures.find(|(known, _)| known == name).unwrap().1.least
    };
    let reads = measure("reads_per_second") * measure("step_seconds");
    // The least of two repetitions.
    let cost = Duration::from_secs_f64(reads * measure("cpu_us_per_read") / 1e6);
    assert!(2 * cost <= used, "{cost:?} of {used:?}");
    bed.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_step_goes_without_the_cpu_time_of_the_daemon() {
    // Scenario: the process of --server-pid ends after the first step. Expectation: the others fail, with the option; none
    // has the CPU time of the caller alone.
    let mut bed = Bed::new();
    fs::write(bed.path("data"), vec![7; 2 << 20]).unwrap();
    bed.serve("blocks", "data").await;
    let mut process = Command::new("sleep").arg("600").spawn().unwrap();
    let words = format!(
        "flip --path DIR/data --server SERVER --dataset data --only mmap,pread --step 500ms --server-pid {}",
        process.id()
    );
    let end = move |_: &AtomicBool| {
        process.kill().unwrap();
        process.wait().unwrap();
    };
    let problem = bed.run_and(&words, Some(end)).await.unwrap_err();
    assert!(
        problem.contains("nothing was measured") && problem.contains("--server-pid"),
        "{problem}"
    );
    bed.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_gets_back_the_backend_that_it_had() {
    // Scenario: a study of two backends, with random items and with a trace at a rate; one that is stopped in
    // its second step, and continued when the engine has another backend, when the daemon's CPU time is counted, and when the
    // dataset has a backend of its own; one of such a dataset, at a directory; a
    // trace that goes past the end; other files than the dataset's. Expectation: a verdict; each time the original backend
    // afterwards; errors that name the option, or what has changed.
    let mut bed = Bed::new();
    fs::write(bed.path("data"), vec![7; 2 << 20]).unwrap();
    fs::write(bed.path("trace"), "3\n1\n511\n").unwrap();
    fs::write(bed.path("beyond"), "1\n512\n").unwrap();
    bed.serve("blocks", "data").await;
    let read_by = async || {
        let path = bed.daemon.as_ref().unwrap().read_path("data").await;
        (path.backend(), path.own_backend)
    };
    let before = read_by().await;
    let flip = "flip --path DIR/data --server SERVER --dataset data --only mmap,pread --step 200ms --batch 4";
    for more in ["", "--trace DIR/trace --rate 200"] {
        let report = bed.report(&format!("{flip} {more}")).await;
        assert!(report.notes[0].starts_with("verdict: "), "{:?}", report.notes);
        let own = "the daemon's CPU time: name its process with --server-pid";
        assert!(
            report.left_out.iter().any(|why| why == own),
            "{:?}",
            report.left_out
        );
        assert_eq!((rows(&report, "mmap"), rows(&report, "pread")), (1, 1));
        assert_eq!(read_by().await, before);
    }
    let slow = flip.replace("200ms", "1s");
    let stopped = bed.run(&slow, true).await.unwrap_err();
    assert!(stopped.contains("stopped after 1 of 4 steps"), "{stopped}");
    assert_eq!(read_by().await, before);
    // Its rows would be of two daemons.
    let (daemon, mmap, pread) = {
        use ringfetch_proto::v1::Backend;
        (bed.daemon.as_ref().unwrap(), Backend::Mmap, Backend::Pread)
    };
    let pid = daemon.pid().as_raw_nonzero();
    crate::flip::set(daemon, mmap, None).await.unwrap();
    let refused = bed.run(&format!("{slow} --resume"), true).await.unwrap_err();
    let named = "has daemon's backend: pread, cores: 2; this one has mmap, cores: 2";
    assert!(refused.contains(named), "{refused}");
    crate::flip::set(daemon, pread, None).await.unwrap();
    let counted = format!("{slow} --resume --server-pid {pid}");
    let refused = bed.run(&counted, true).await.unwrap_err();
    assert!(
        refused.contains("has daemon's CPU time: not counted"),
        "{refused}"
    );
    // As if it had been killed: the daemon has the backend of a step.
    crate::flip::set(daemon, mmap, Some("data")).await.unwrap();
    let resumed = bed.run(&format!("{slow} --resume"), true).await.unwrap_err();
    assert!(
        resumed.contains("has own backend: none; this one has mmap"),
        "{resumed}"
    );
    let beyond = bed
        .refused(&format!("{flip} --trace DIR/beyond"), "--trace")
        .await;
    assert!(beyond.contains("line 2"), "{beyond}");
    // It ends differently; it goes on; it is shorter.
    for (last, length) in [(8, 2 << 20), (7, 4 << 20), (7, 1 << 20)] {
        fs::write(bed.path("other"), [vec![7; length - 1], vec![last]].concat()).unwrap();
        let other = flip.replacen("DIR/data", "DIR/other", 1);
        let other = bed.refused(&other, "--path: ").await;
        assert!(
            other.contains("other is not the file of data of http://"),
            "{other}"
        );
    }

    let report = bed.report(&flip.replacen("DIR/data", "DIR", 1)).await;
    assert_eq!(read_by().await, (mmap, true));
    // How long the data of a directory or a device are is not known, and not 0 B.
    let mut facts = report.facts.iter();
    assert!(
        !facts.any(|(name, _)| name.starts_with("data")),
        "{:?}",
        report.facts
    );
    bed.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_study_asks_with_tls_and_a_token() {
    // Scenario: a daemon with TLS and principals is measured and switched with a token that may do so, with
    // one that may not administer, and with an unknown one. Expectation: a verdict; errors that name the
    // option of the address that refused.
    let authority = Authority::new();
    let (setup, bytes) = plain_blocks(Setup::new("pread"), 512);
    let may = [("lab", "a-token", "*,@admin"), ("reader", "another", "*")];
    setup.file("principals", lines(&may).as_bytes());
    let setup = with_tls(setup, &authority.pair("daemon")).set("access.principals", "principals");
    let mut bed = Bed::new();
    (bed.daemon, bed.scheme) = (Some(setup.start()), "https");
    fs::write(bed.path("data"), bytes).unwrap();
    let flip =
        "flip --path DIR/data --server SERVER --dataset blocks --only mmap,pread --step 200ms --batch 4";
    for (token, refused) in [
        ("a-token", None),
        ("another", Some("--admin")),
        ("wrong", Some("--server")),
    ] {
        let tls = authority.trusted(None);
        bed.clients = Clients::new(move |url| Client::builder(url).tls(tls.clone()).token(token));
        match refused {
            None => assert_eq!(rows(&bed.report(flip).await, "mmap"), 1),
            Some(option) => drop(bed.refused(flip, option).await),
        }
    }
    bed.stop().await;
}

/// Writes candidates for vectors of 768 f32 as bench/candidates.py does: 6 queries, 5 results, oversampling 1
/// and 4; every best score is off by `off`.
fn candidates(vectors: &Path, off: f32) -> PathBuf {
    let bytes = fs::read(vectors).unwrap();
    let words = bytes.as_chunks::<4>().0.iter();
    let elements: Vec<f32> = words.map(|word| f32::from_le_bytes(*word)).collect();
    let all: Vec<&[f32]> = elements.chunks(768).collect();
    let head = serde_json::json!({ "format": "ringfetch-lab-candidates/1", "dim": 768, "count": all.len(), "queries": 6,
        "limit": 5, "oversampling": [1, 4], "made_by": "a test" });
    let mut out = format!("{head}\n").into_bytes();
    for query in 0..6_u32 {
        let vector = all[query as usize * 7];
        let ids: Vec<u32> = (0..20).map(|place| (query * 131 + place * 37) % 1000).collect();
        let dot = |id: &u32| {
            vector
                .iter()
                .zip(all[*id as usize])
                .map(|(a, b)| a * b)
                .sum::<f32>()
        };
        out.extend(vector.iter().flat_map(|element| element.to_le_bytes()));
        out.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        for count in [5, 20] {
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
    let (mut bed, file) = (Bed::new(), "ringfetch-lab-data/vectors-1000x768.f32");
    let rescore = "rescore --path DIR --vectors 1000 --buffered";
    let missing = bed.refused(rescore, "--path").await;
    assert!(missing.contains("python3 bench/candidates.py "), "{missing}");
    assert!(missing.contains("in a release's tarball"), "{missing}");
    candidates(&bed.path(file), 0.0);
    bed.serve("vectors", file).await;
    let asking = format!("{rescore} --server SERVER --dataset data --only");
    let all = format!("{asking} {}", strategies.join(","));
    let report = bed.report(&all).await;
    for strategy in strategies {
        assert_eq!(rows(&report, strategy), 4, "{strategy}: {:?}", report.left_out);
    }
    bed.refused(&format!("{all} --oversampling 2"), "--oversampling: 2")
        .await;
    candidates(&bed.path(file), 0.01);
    for strategy in strategies {
        let wrong = bed.refused(&format!("{asking} {strategy}"), "").await;
        assert!(wrong.contains("wrong bytes: query"), "{strategy}: {wrong}");
    }
    let path = candidates(&bed.path(file), 0.0);
    fs::write(&path, &fs::read(&path).unwrap()[..5000]).unwrap();
    assert!(bed.refused(&all, "--path").await.contains("cut short"));
    candidates(&bed.path(file), 0.0);
    bed.serve("blocks", file).await;
    assert!(bed.refused(&all, "--dataset").await.contains("kind blocks"));
    bed.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rescoring_gives_the_right_scores() {
    // Scenario: candidates that are missing, complete, wrong, truncated; oversampling that was not prepared;
    // a dataset of another kind. Expectation: every strategy and the daemon give the stored scores; errors
    // name the option and the remedy.
    rescored(&["mmap-plain", "mmap", "engine-pread", "daemon"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs io_uring"]
async fn rescoring_with_a_ring_gives_the_right_scores() {
    rescored(&["uring", "auto"]).await;
}
