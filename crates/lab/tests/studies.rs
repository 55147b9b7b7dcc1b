//! Whole studies, from command-line words to the files of a report, over a few MiB and a few milliseconds per
//! step.
#![allow(clippy::unwrap_used, reason = "tests")]

mod line;

use line::{run, run_into, scratch};
use ringfetch_lab::{LabError, Report};
use std::fs;
use std::path::Path;

fn report(directory: &Path) -> Report {
    let text = fs::read(directory.join("report.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

const SMALL: &str = "--path DIR --out DIR/out --repetitions 2 --force";

#[test]
fn a_report_that_cannot_be_written_costs_no_figures() {
    // Scenario: studies that are resumed, where report.html is a directory. Expected: the cause, and the figures on stdout.
    let directory = scratch();
    fs::write(directory.path().join("data"), vec![1; 16 << 20]).unwrap();
    let strategies = "strategies --path DIR --out OUT --force --size 4MiB --step 10ms --warm-bytes 2MiB --profiles buffered --only pread";
    let calibrate = "calibrate DIR/data --report OUT --force --quick";
    for (words, figures) in [(strategies, "pread"), (calibrate, "engine:")] {
        let out = directory.path().join(figures);
        let words = words.replace("OUT", &format!("DIR/{figures}"));
        run(&words, directory.path(), false).unwrap();
        for name in ["report.json", "report.html"] {
            fs::remove_file(out.join(name)).unwrap();
        }
        fs::create_dir(out.join("report.html")).unwrap();
        let mut text = Vec::new();
        let error = run_into(&mut text, &format!("{words} --resume"), directory.path(), false).unwrap_err();
        assert!(
            error.to_string().contains("report.html: is a directory"),
            "{error}"
        );
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains(figures) && !text.contains("Report:"), "{text}");
    }
}

#[test]
fn a_study_of_strategies_is_measured_resumed_and_compared() {
    // Scenario: a forced study that is stopped at its first step, started again without --resume, resumed and
    // stopped again before its first new step, resumed; then compared with itself. Expected: a report only at
    // the end, marked as forced, with every requested row.
    let directory = scratch();
    let words = format!(
        "strategies {SMALL} --size 4MiB --step 10ms --warm-bytes 2MiB --depths 4,1,4 --profiles buffered \
         --only pread,threaded-pread,aio,mmap"
    );
    // Without --force it is refused before anything is made.
    let refused = run(&words.replace(" --force", ""), directory.path(), false);
    assert!(matches!(refused, Err(LabError::Refused(_))));
    assert!(!directory.path().join("ringfetch-lab-data").exists());
    // Makes the data, which a stop would prevent.
    run(&words.replace("DIR/out", "DIR/before"), directory.path(), false).unwrap();
    let stopped = run(&words, directory.path(), true).unwrap_err().to_string();
    assert!(
        stopped.starts_with("stopped before the first step; continue with --resume"),
        "{stopped}"
    );
    let out = directory.path().join("out");
    assert!(!out.join("report.json").exists() && !out.join("report.html").exists());
    let elsewhere = directory.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    // Refused before data are made, too.
    let anew = words.replacen("--path DIR", "--path DIR/elsewhere", 1);
    for words in [&words, &anew] {
        let again = run(words, directory.path(), false);
        assert!(matches!(again, Err(LabError::Usage(_))));
    }
    let unknown = anew
        .replace("DIR/out", "DIR/new")
        .replace("--only pread", "--only none,pread");
    assert!(
        run(&unknown, directory.path(), false)
            .unwrap_err()
            .to_string()
            .starts_with("--only")
    );
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    let other = run(&format!("{words} --resume --seed 9"), directory.path(), false);
    assert!(other.unwrap_err().to_string().contains("seed"));

    // Neither the order of the strategies nor the spelling of the path matters.
    let turned = words.replace("pread,threaded-pread,aio,mmap", "mmap,aio,threaded-pread,pread");
    let turned = turned.replacen("--path DIR", "--path DIR/./elsewhere/..", 1);
    // Two steps of an earlier run are there.
    let before = fs::read_to_string(directory.path().join("before/samples.jsonl")).unwrap();
    let begun: Vec<&str> = before.split_inclusive('\n').take(3).collect();
    fs::write(out.join("samples.jsonl"), begun.concat()).unwrap();
    let stopped = run(&format!("{turned} --resume"), directory.path(), true).unwrap_err();
    assert!(
        stopped.to_string().starts_with("stopped before step 3; "),
        "{stopped}"
    );
    let text = run(&format!("{turned} --resume"), directory.path(), false).unwrap();
    assert!(text.contains("FORCED, no evidence: --repetitions: 2"), "{text}");
    let report = report(&out);
    // pread has depth 1 only. Depths are ascending and unique, whatever was typed.
    assert_eq!(report.rows.len(), 7);
    let depths = report
        .rows
        .iter()
        .filter_map(|row| row.key.iter().find(|(name, _)| name == "depth"));
    assert!(
        depths
            .map(|(_, depth)| depth.as_str())
            .collect::<String>()
            .contains("14")
    );
    assert!(report.rows.iter().all(|row| row.measures[0].1.count == 2));
    let mut facts = report.facts.iter();
    assert!(facts.any(|(name, value)| name == "command line" && value.contains("strategies")));
    for name in [
        "report.csv",
        "report.html",
        "plot-buffered-reads.svg",
        "samples.jsonl",
    ] {
        assert!(out.join(name).exists(), "{name}");
    }
    let same = run("compare DIR/out DIR/out/report.json", directory.path(), false).unwrap();
    assert!(same.contains("42 measures do not differ"), "{same}");
    let same = run("--json compare DIR/out DIR/out", directory.path(), false).unwrap();
    let same: serde_json::Value = serde_json::from_str(&same).unwrap();
    assert_eq!([&same["same"], &same["alone"]], [42, 0], "{same}");
    assert_eq!(same["differ"], serde_json::json!([]), "{same}");
    assert!(run("compare DIR/out DIR", directory.path(), false).is_err());
}

#[test]
#[ignore = "needs direct I/O"]
fn a_study_of_block_sizes_recommends_one() {
    // Scenario: blocks of 512 bytes to 2 MiB of 4 MiB. Expected: a row for each up to 256 KiB, of which the data
    // have 16, and the reason why there are no larger ones; a recommended block, our figures next to those of
    // the publication's devices.
    let directory = scratch();
    let words = format!(
        "block-size {SMALL} --size 4MiB --step 10ms --depths 1 --largest 2MiB --only pread,preadv2-hipri,aio"
    );
    run(&words, directory.path(), false).unwrap();
    let report = report(&directory.path().join("out"));
    assert_eq!(report.rows.len() % 3, 0);
    assert!(report.rows.len() >= 3 * 7, "{} rows", report.rows.len());
    let notes = &report.notes;
    assert!(notes[0].starts_with("recommended block: "), "{notes:?}");
    let larger = "blocks of 512KiB to 2MiB: the data have less than 16 of them";
    assert!(
        report.left_out.iter().any(|why| why == larger),
        "{:?}",
        report.left_out
    );
    let devices = &report.beside[0].rows[0][1..5];
    assert_eq!(devices, ["HDD", "SATA SSD", "NVMe SSD", "Optane"]);
}

#[test]
fn a_study_of_objects_finds_crossovers() {
    // Scenario: 5 and 20 files of 16 KiB, threads and, if available, a ring. Expected: cold and warm, opening
    // in and out, buffers pooled and new: 16 rows per strategy, each of whole files.
    let directory = scratch();
    let words = format!("objects {SMALL} --files 5,20 --file-bytes 16KiB");
    run(&words, directory.path(), false).unwrap();
    let report = report(&directory.path().join("out"));
    let threads =
        |row: &&ringfetch_lab::ReportRow| row.key.iter().any(|(_, value)| value == "threaded-pread");
    assert_eq!(report.rows.iter().filter(threads).count(), 16);
    assert!(report.beside[0].title.starts_with("Crossovers"));
}

#[test]
fn a_file_that_is_replaced_cut_or_removed_ends_the_study() {
    // Scenario: the file is cut, replaced by another one of the same length, and removed, after the first step; then it
    // is there again. Expected: an error that names it, and the steps are kept; the rest can be measured.
    let directory = scratch();
    let [file, other, out] = ["file", "other", "out"].map(|name| directory.path().join(name));
    // Long enough for a change before its end, on a busy machine too.
    let words = "strategies --path DIR/file --out DIR/out --repetitions 50 --force --step 50ms --warm-bytes 1MiB \
                 --profiles buffered --depths 1 --only pread";
    fs::write(&other, vec![2; 1 << 20]).unwrap();
    let cut = || fs::File::options().write(true).open(&file)?.set_len(4096);
    let (replace, remove) = (|| fs::rename(&other, &file), || fs::rename(&file, &other));
    let changes: [(&dyn Fn() -> std::io::Result<()>, &str); 3] = [
        (&cut, "changed during the study"),
        (&replace, "changed during the study"),
        (&remove, "No such file"),
    ];
    for (change, said) in changes {
        if out.exists() {
            fs::remove_dir_all(&out).unwrap();
        }
        fs::write(&file, vec![1; 1 << 20]).unwrap();
        let problem = std::thread::scope(|scope| {
            let study = scope.spawn(|| run(words, directory.path(), false));
            let steps =
                || fs::read_to_string(out.join("samples.jsonl")).map_or(0, |text| text.lines().count());
            while steps() < 2 && !study.is_finished() {
                std::thread::yield_now();
            }
            change().unwrap();
            study.join().unwrap().unwrap_err().to_string()
        });
        assert!(
            problem.starts_with("--path: ") && problem.contains("/file"),
            "{problem}"
        );
        assert!(problem.contains(said), "{problem}");
    }
    fs::rename(&other, &file).unwrap();
    run(&format!("{words} --resume"), directory.path(), false).unwrap();
    assert_eq!(report(&out).rows[0].measures[0].1.count, 50);
}

#[test]
fn a_place_that_cannot_hold_results_is_refused_before_data_are_made() {
    // Scenario: --out is a file; below a file. Expected: an error that names the option and the path; no data.
    let directory = scratch();
    fs::write(directory.path().join("file"), "").unwrap();
    for out in ["DIR/file", "DIR/file/out"] {
        let words = format!("strategies --path DIR --size 1MiB --force --out {out}");
        let problem = run(&words, directory.path(), false).unwrap_err().to_string();
        let named = out.replace("DIR", &directory.path().display().to_string());
        assert!(problem.starts_with(&format!("--out: {named}")), "{problem}");
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn a_study_that_measured_nothing_leaves_nothing() {
    // Scenario: strategies that cannot read as requested; then ones that can, into the same directory.
    // Expected: an error with the reason of each, and no directory; then a report, which names them too.
    let directory = scratch();
    let words = format!(
        "strategies {SMALL} --size 4MiB --step 10ms --warm-bytes 2MiB --profiles buffered --only pread,ring-polled"
    );
    let problem = run(&format!("{words} --depths 4"), directory.path(), false).unwrap_err();
    let [alone, polled] = [
        "pread: depth 1 only",
        "ring-polled, buffered: only direct reads can be polled",
    ];
    let expected = format!("nothing can be measured here: {polled}; {alone}");
    assert_eq!(problem.to_string(), expected);
    let out = directory.path().join("out");
    assert!(!out.exists());
    run(&format!("{words} --depths 1,4,128"), directory.path(), false).unwrap();
    let deep = "buffered, depth 128: more than 64 reads in flight would measure the scheduler";
    assert_eq!(report(&out).left_out, [deep, polled, alone]);
}

#[test]
fn what_makes_no_sense_is_refused_with_its_option() {
    // Scenario: an unknown strategy; a strategy without its daemon; no daemon at the address; a file for objects; no
    // such path; no block of a page. Expected: an error that begins with the option, before data are made.
    let directory = scratch();
    fs::write(directory.path().join("file"), vec![1; 2 << 20]).unwrap();
    for (words, option) in [
        (
            "strategies --path DIR --size 1MiB --only uringg --force",
            "--only",
        ),
        (
            "act --path DIR --size 1MiB --only engine-pread,daemon --step 10ms --hold 10ms --most 1 --force",
            "--only: daemon needs --server and --dataset",
        ),
        (
            "act --path DIR --size 1MiB --server http://127.0.0.1:1 --dataset x --force",
            "--server: cannot reach ",
        ),
        ("objects --path DIR/file --force", "--path"),
        ("objects --path DIR --bytes-max 1MiB --force", "--bytes-max"),
        ("strategies --path DIR/none --force", "--path"),
        (
            "block-size --path DIR --size 1MiB --largest 2KiB --force",
            "--largest",
        ),
    ] {
        let problem = run(&format!("{words} --out DIR/out"), directory.path(), false);
        let problem = problem.unwrap_err().to_string();
        assert!(problem.starts_with(option), "{words}: {problem}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "{words}");
    }
}
