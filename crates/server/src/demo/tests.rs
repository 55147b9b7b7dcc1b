use std::fs;

use super::*;

/// More than any disk has.
const TOO_MUCH: u64 = u64::MAX;

fn place() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("demo");
    fs::create_dir(&path).unwrap();
    (directory, path)
}

fn demo(directory: &Path, needed: u64) -> Demo<'_> {
    Demo {
        directory,
        partial: directory.join(PARTIAL_NAME),
        needed,
    }
}

/// Puts file or directory `name` into `directory`, with bytes that say whose it is.
fn put(directory: &Path, name: &str, whose: &str) {
    let mut path = directory.join(name);
    if name == OBJECTS_NAME {
        fs::create_dir(&path).unwrap();
        path.push("one");
    }
    fs::write(path, whose).unwrap();
}

fn is_of(directory: &Path, name: &str, whose: &str) -> bool {
    let path = directory.join(name);
    let path = if path.is_dir() { path.join("one") } else { path };
    fs::read_to_string(path).is_ok_and(|bytes| bytes == whose)
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Makes little data.
#[expect(clippy::unnecessary_wraps, reason = "as `make`")]
fn make_little(partial: &Path) -> io::Result<()> {
    NAMES.into_iter().for_each(|name| put(partial, name, "ours"));
    Ok(())
}

fn prepare_little(directory: &Path) -> Result<(), DemoError> {
    demo(directory, 0).prepare(&mut || {}, &mut make_little)
}

/// As a demo is that was made and ended after it moved the first `moved` names.
fn put_ready(directory: &Path, moved: usize) -> PathBuf {
    let partial = directory.join(PARTIAL_NAME);
    fs::create_dir(&partial).unwrap();
    put(&partial, READY_NAME, "");
    for (index, name) in NAMES.into_iter().enumerate() {
        put(if index < moved { directory } else { &partial }, name, "ours");
    }
    partial
}

fn is_complete(directory: &Path) {
    assert_eq!(
        names(directory),
        [COMPLETE_NAME, BLOCKS_NAME, OBJECTS_NAME, VECTORS_NAME]
    );
    for name in NAMES {
        assert!(is_of(directory, name, "ours"), "{name}");
    }
}

fn is_refused(outcome: Result<(), DemoError>, problem: &str) {
    let error = outcome.expect_err(problem);
    assert!(!error.is_temporary && error.problem.contains(problem), "{error}");
}

fn is_busy(outcome: Result<(), DemoError>) {
    let error = outcome.expect_err("busy");
    assert!(
        error.is_temporary && error.problem.contains("another process"),
        "{error}"
    );
}

#[test]
fn a_refused_demo_leaves_nothing_behind() {
    // Scenario: no room; a disk that fails in the middle. Expectation: both are told; the directory is empty.
    let (_directory, path) = place();
    is_refused(
        demo(&path, TOO_MUCH).prepare(&mut || {}, &mut make_little),
        "make room",
    );
    assert!(names(&path).is_empty());
    let mut cut_short = |partial: &Path| {
        make_little(partial)?;
        Err(Errno::IO.into())
    };
    is_refused(
        demo(&path, 0).prepare(&mut || {}, &mut cut_short),
        "writing failed",
    );
    assert!(names(&path).is_empty());
    prepare_little(&path).unwrap();
    is_complete(&path);
}

#[test]
fn what_somebody_else_put_there_is_kept() {
    // Scenario: own data has a name of the demo's: before its first start; after it was ended in the middle; while it makes
    // its data; once that is made and the names before have been moved. Expectation: refused by that name; own data stays.
    let refused = |path: &Path, outcome, name: &str| {
        is_refused(
            outcome,
            &format!("it has {name}, which was not made by this demo"),
        );
        assert!(is_of(path, name, "theirs"), "{name}");
        assert!(
            !is_in(path, PARTIAL_NAME) && !is_in(path, COMPLETE_NAME),
            "{name}"
        );
    };
    for (index, name) in NAMES.into_iter().enumerate() {
        let (_directory, path) = place();
        put(&path, name, "theirs");
        refused(&path, prepare_little(&path), name);
        assert_eq!(names(&path), [name]);

        let partial = path.join(PARTIAL_NAME);
        fs::create_dir(&partial).unwrap();
        make_little(&partial).unwrap();
        refused(&path, prepare_little(&path), name);
        assert_eq!(names(&path), [name]);

        let (_directory, path) = place();
        let mut make_beside = |partial: &Path| {
            put(&path, name, "theirs");
            make_little(partial)
        };
        let outcome = demo(&path, 0).prepare(&mut || {}, &mut make_beside);
        refused(&path, outcome, name);
        assert_eq!(names(&path), [name]);

        let (_directory, path) = place();
        put_ready(&path, index);
        put(&path, name, "theirs");
        refused(&path, prepare_little(&path), name);
        assert!(NAMES[..index].iter().all(|moved| is_of(&path, moved, "ours")));
    }
}

#[test]
fn a_demo_that_was_ended_while_it_made_its_data_makes_it_again() {
    // Scenario: what was made is incomplete; or was complete, and somebody has removed what was moved already.
    // Expectation: all is made again, and nothing else is left.
    let (_directory, path) = place();
    let partial = path.join(PARTIAL_NAME);
    fs::create_dir(&partial).unwrap();
    for name in [BLOCKS_NAME, OBJECTS_NAME, ".ringfetch-a1b2c3.partial"] {
        put(&partial, name, "cut short");
    }
    prepare_little(&path).unwrap();
    is_complete(&path);

    let (_directory, path) = place();
    put_ready(&path, 1);
    fs::remove_file(path.join(BLOCKS_NAME)).unwrap();
    prepare_little(&path).unwrap();
    is_complete(&path);
}

#[test]
fn a_demo_that_was_ended_while_it_moved_its_data_goes_on() {
    // Scenario: ended after each move. Expectation: the next start makes nothing, needs no room, and completes it.
    for moved in 0..=NAMES.len() {
        let (_directory, path) = place();
        put_ready(&path, moved);
        let mut make_again = |_: &Path| panic!("made again after {moved} moves");
        let outcome = demo(&path, TOO_MUCH).prepare(&mut || {}, &mut make_again);
        outcome.unwrap();
        is_complete(&path);
    }
}

#[test]
fn one_process_makes_it() {
    // Scenario: another process starts while it is made; before the lock is taken, another one completes it, and has removed
    // the directory; or had before this one made it; or a third one makes it anew. Expectation: busy; complete, not made
    // again; the same; busy.
    let (_directory, path) = place();
    let mut make_while = |partial: &Path| {
        is_busy(prepare_little(&path));
        make_little(partial)
    };
    demo(&path, 0).prepare(&mut || {}, &mut make_while).unwrap();
    is_complete(&path);

    let mut make_again = |_: &Path| panic!("made twice");
    let (_directory, path) = place();
    let mut completed = || prepare_little(&path).unwrap();
    demo(&path, 0).prepare(&mut completed, &mut make_again).unwrap();
    is_complete(&path);

    let (_directory, path) = place();
    let mut was_completed = || {
        make_little(&path).unwrap();
        put(&path, COMPLETE_NAME, "");
    };
    let outcome = demo(&path, 0).prepare(&mut was_completed, &mut make_again);
    outcome.unwrap();
    is_complete(&path);

    let (_directory, path) = place();
    let mut third = None;
    let mut made_anew = || {
        let partial = path.join(PARTIAL_NAME);
        if third.is_none() {
            fs::remove_dir(&partial).unwrap();
            fs::create_dir(&partial).unwrap();
            let locked = File::open(&partial).unwrap();
            locked.try_lock().unwrap();
            third = Some(locked);
        }
    };
    is_busy(demo(&path, 0).prepare(&mut made_anew, &mut make_again));
}

#[test]
fn what_is_no_directory_is_not_made_in() {
    // Scenario: the directory's name is that of a file; of a link. Expectation: refused, and the file and what the link leads to
    // are left alone.
    let (_directory, path) = place();
    put(&path, PARTIAL_NAME, "theirs");
    is_refused(prepare_little(&path), "cannot be written");
    assert!(is_of(&path, PARTIAL_NAME, "theirs"));

    let (directory, path) = place();
    put(directory.path(), BLOCKS_NAME, "theirs");
    std::os::unix::fs::symlink(directory.path(), path.join(PARTIAL_NAME)).unwrap();
    is_refused(prepare_little(&path), "cannot be written");
    assert!(is_of(directory.path(), BLOCKS_NAME, "theirs"));
}

#[test]
fn nothing_is_replaced() {
    // Scenario: the system renames only where nothing is; renameat2 knows no flag, as on NFS. Expectation: the data is moved; a
    // name that is there is not replaced.
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
    let check = || {
        let (_directory, path) = place();
        prepare_little(&path).unwrap();
        is_complete(&path);
        put(&path, "theirs", "theirs");
        let moved = move_new(&path.join(BLOCKS_NAME), &path.join("theirs"));
        assert_eq!(moved, Err(Errno::EXIST));
        assert!(is_of(&path, BLOCKS_NAME, "ours") && is_of(&path, "theirs", "theirs"));
    };
    check();
    let filter = SeccompFilter::new(
        [(nix::libc::SYS_renameat2, Vec::new())].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(Errno::INVAL.raw_os_error().unsigned_abs()),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    let confined = std::thread::spawn(move || {
        apply_filter(&program).unwrap();
        check();
    });
    confined.join().unwrap();
}
