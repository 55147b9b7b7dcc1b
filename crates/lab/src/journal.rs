//! The samples measured so far, and the steps that failed: lines of JSON, appended step by step, so that an interrupted
//! run can be resumed, and then ends as if it had not been interrupted.
//!
//! Invariants: the first line identifies the run; a journal of another run is refused; a last line that was
//! cut off while it was written is dropped; one process writes at a time.

use crate::error::LabError;
use crate::sample::Sample;
use crate::study::{Key, get};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::Duration;

const NAME: &str = "samples.jsonl";
const FORMAT: &str = "ringfetch-lab-samples/1";
/// A larger file is not a journal: 512 bytes per sample make 100 000 samples.
const LENGTH_MAX_BYTES: u64 = 64 << 20;

/// The first line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) format: String,
    /// What must be equal when a run is resumed.
    pub(crate) identity: Key,
    pub(crate) command_line: String,
    pub(crate) begun: String,
    /// Rules that `--force` overrode.
    pub(crate) marks: Vec<String>,
}

impl Header {
    pub(crate) fn new(identity: Key, command_line: String, begun: String, marks: Vec<String>) -> Self {
        Self {
            format: FORMAT.to_owned(),
            identity,
            command_line,
            begun,
            marks,
        }
    }
}

/// Every other line.
#[derive(Debug, Serialize, Deserialize)]
struct Line {
    cell: String,
    repetition: u32,
    /// How long it was to take, if it was to end by time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    time: Option<Duration>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sample: Option<Sample>,
    /// Why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// The result of a step, or why it failed.
pub(crate) type Made = Result<Sample, String>;

#[derive(Debug)]
pub(crate) struct Journal {
    /// Names its directory.
    option: &'static str,
    /// `None`: the samples are in memory only.
    file: Option<File>,
    header: Header,
    done: HashMap<(String, u32), Made>,
    /// How long the steps of a cell were to take.
    times: HashMap<String, Duration>,
    /// Whether its directory was created with it.
    made: bool,
}

impl Journal {
    /// Refuses a directory that cannot be the run's: also called before data are made.
    ///
    /// # Errors
    /// The directory has results already, or none although a run is to be resumed.
    pub(crate) fn check(option: &str, directory: &Path, resume: bool) -> Result<(), LabError> {
        let (shown, path) = (directory.display(), directory.join(NAME));
        let usage = |problem: String| Err(LabError::Usage(problem));
        match (path.exists(), resume) {
            _ if directory.join("report.json").exists() => usage(format!(
                "{option}: {shown} has a finished report: name another directory"
            )),
            (true, false) => {
                let choices = "--resume continues it; choose another directory to start over";
                usage(format!("{option}: {shown} has an unfinished run: {choices}"))
            }
            (false, true) => usage(format!("--resume: {shown} has no unfinished run")),
            (true, true) | (false, false) => Ok(()),
        }
    }

    /// Refuses a directory with files that are not a run's: the report would replace those of the same names.
    ///
    /// # Errors
    /// The directory is not empty.
    pub(crate) fn check_empty(option: &str, directory: &Path) -> Result<(), LabError> {
        let is_empty = |mut entries: fs::ReadDir| entries.next().is_none();
        if fs::read_dir(directory).map_or(true, is_empty) {
            return Ok(());
        }
        let shown = directory.display();
        Err(LabError::Usage(format!(
            "{option}: {shown} is not empty: name a new directory (--force writes the report into it)"
        )))
    }

    /// Refuses a directory that cannot be written, and leaves nothing there: called before data are made.
    ///
    /// # Errors
    /// errno, with the path.
    pub(crate) fn check_writable(option: &str, directory: &Path) -> Result<(), LabError> {
        let missing = directory.ancestors().take_while(|above| !above.exists());
        let missing: Vec<&Path> = missing.collect();
        let written = fs::create_dir_all(directory).and_then(|()| tempfile::tempfile_in(directory));
        for above in missing {
            // The deepest first. What another process has put something into stays.
            let _removed = fs::remove_dir(above);
        }
        written.map(drop).map_err(|error| {
            let shown = directory.display();
            let problem = match directory.is_file() {
                true => "is a file".to_owned(),
                false => format!("cannot be written: {error}"),
            };
            LabError::Failed(format!("{option}: {shown} {problem}: name another directory"))
        })
    }

    /// Opens the journal of a directory, creating the directory if it is missing; without one, a journal in memory.
    ///
    /// # Errors
    /// The directory has results already, or those of another run; errno with the path.
    pub(crate) fn open(
        option: &'static str,
        directory: Option<&Path>,
        header: Header,
        resume: bool,
    ) -> Result<Self, LabError> {
        let mut journal = Self {
            option,
            file: None,
            header,
            done: HashMap::new(),
            times: HashMap::new(),
            made: false,
        };
        let Some(directory) = directory else {
            return Ok(journal);
        };
        Self::check(option, directory, resume)?;
        let (shown, path) = (directory.display(), directory.join(NAME));
        journal.made = !directory.exists();
        fs::create_dir_all(directory)
            .map_err(|error| LabError::at(format_args!("{option}: {shown}"), error))?;
        let io = |error: io::Error| LabError::at(format_args!("{option}: {}", path.display()), error);
        let mut options = OpenOptions::new();
        let options = options.read(true).append(true).create(true);
        let mut file = options.open(&path).map_err(io)?;
        let taken = |_| LabError::Failed(format!("{option}: another process writes {}", path.display()));
        file.try_lock().map_err(taken)?;
        if resume {
            journal.read(&mut file, &path, io)?;
        } else {
            write_line(&file, &journal.header).map_err(io)?;
        }
        journal.file = Some(file);
        Ok(journal)
    }

    /// Reads the samples of an earlier run, if it measured the same.
    fn read(
        &mut self,
        file: &mut File,
        path: &Path,
        io: impl Fn(io::Error) -> LabError,
    ) -> Result<(), LabError> {
        let option = self.option;
        let foreign = |line: usize| {
            let path = path.display();
            let what = format!("is not from this command: name another directory with {option}");
            LabError::Usage(format!("--resume: {path} line {line} {what}"))
        };
        if file.metadata().map_err(&io)?.len() > LENGTH_MAX_BYTES {
            return Err(foreign(1));
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(&io)?;
        let last = text.iter().rposition(|byte| *byte == b'\n');
        text.truncate(last.map_or(0, |at| at + 1));
        if text.is_empty() {
            // The run was interrupted while it wrote its first line: nothing was measured.
            file.set_len(0).map_err(&io)?;
            return write_line(file, &self.header).map_err(&io);
        }
        let mut lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let first = lines.next().and_then(|line| serde_json::from_slice(line).ok());
        let known = first.filter(|header: &Header| header.format == FORMAT);
        let known = known.ok_or_else(|| foreign(1))?;
        for (number, line) in lines.enumerate() {
            let line: Line = serde_json::from_slice(line).map_err(|_| foreign(number + 2))?;
            let made = match (line.sample, line.problem) {
                (Some(sample), _) => Ok(sample),
                (None, Some(problem)) => Err(problem),
                (None, None) => return Err(foreign(number + 2)),
            };
            self.keep(line.cell, line.repetition, line.time, made);
        }
        same(&known.identity, &self.header.identity)?;
        file.set_len(text.len() as u64).map_err(&io)?;
        file.seek(SeekFrom::End(0)).map_err(&io)?;
        let now = std::mem::replace(&mut self.header, known).marks;
        let known = &mut self.header.marks;
        let new: Vec<String> = now.into_iter().filter(|mark| !known.contains(mark)).collect();
        known.extend(new);
        Ok(())
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// Removes it from its directory if it has no sample: there is nothing to resume.
    pub(crate) fn remove_empty(&self, directory: &Path) {
        if self.done.values().any(Result::is_ok) {
            return;
        }
        // The error that led here is the one to report.
        let _removed = fs::remove_file(directory.join(NAME));
        if self.made {
            let _removed = fs::remove_dir(directory);
        }
    }

    /// The outcome of a step, if it was already made.
    pub(crate) fn step(&self, cell: &str, repetition: u32) -> Option<&Made> {
        self.done.get(&(cell.to_owned(), repetition))
    }

    /// How long the steps of a cell were to take, if one was made.
    pub(crate) fn time(&self, cell: &str) -> Option<Duration> {
        self.times.get(cell).copied()
    }

    /// How many steps were made so far, by earlier runs too.
    pub(crate) fn steps(&self) -> usize {
        self.done.len()
    }

    /// Records a step, in one write; `time`: how long it was to take, if it was to end by time.
    pub(crate) fn record(
        &mut self,
        cell: &str,
        repetition: u32,
        time: Option<Duration>,
        made: &Made,
    ) -> Result<(), LabError> {
        let line = Line {
            cell: cell.to_owned(),
            repetition,
            time,
            sample: made.as_ref().ok().cloned(),
            problem: made.as_ref().err().cloned(),
        };
        let written = self.file.as_ref().map_or(Ok(()), |file| write_line(file, &line));
        let remedy = "make room, and continue with --resume";
        let full = |error| format!("{}: cannot record a step ({error}): {remedy}", self.option);
        written.map_err(|error| LabError::Failed(full(error)))?;
        self.keep(line.cell, repetition, time, made.clone());
        Ok(())
    }

    fn keep(&mut self, cell: String, repetition: u32, time: Option<Duration>, made: Made) {
        if let Some(time) = time {
            self.times.insert(cell.clone(), time);
        }
        self.done.insert((cell, repetition), made);
    }
}

fn write_line(mut file: &File, line: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    file.write_all(&text)
}

fn same(known: &Key, now: &Key) -> Result<(), LabError> {
    let of = |key, name: &str| get(key, name).unwrap_or("nothing").to_owned();
    for (name, _) in known.iter().chain(now) {
        let (then, now) = (of(known, name), of(now, name));
        if then != now {
            let problem = format!("the unfinished run has {name}: {then}; this one has {now}");
            return Err(LabError::Usage(format!("--resume: {problem}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::{pair, tests::sample};

    fn header(seed: &str) -> Header {
        let identity = vec![pair("study", "strategies"), pair("seed", seed)];
        Header::new(identity, "lab".to_owned(), "now".to_owned(), Vec::new())
    }

    #[test]
    fn a_run_that_was_cut_short_goes_on() {
        // Scenario: two steps recorded, of which one failed, a third cut off in the middle of its line. Expected: the two are
        // known, the third is not, and samples recorded afterwards are read again; a line without a result is refused.
        let directory = tempfile::tempdir().unwrap();
        let mut journal = Journal::open("--out", Some(directory.path()), header("1"), false).unwrap();
        journal.record("a", 0, None, &Ok(sample(100, 1.0))).unwrap();
        journal
            .record("b", 0, None, &Err("no memory".to_owned()))
            .unwrap();
        journal
            .file
            .as_ref()
            .unwrap()
            .write_all(b"{\"cell\":\"c\",\"rep")
            .unwrap();
        drop(journal);
        let mut journal = Journal::open("--out", Some(directory.path()), header("1"), true).unwrap();
        assert_eq!(journal.step("a", 0), Some(&Ok(sample(100, 1.0))));
        assert_eq!(journal.step("b", 0), Some(&Err("no memory".to_owned())));
        assert_eq!(journal.step("c", 0), None);
        journal.record("c", 4, None, &Ok(sample(300, 1.0))).unwrap();
        drop(journal);
        let journal = Journal::open("--out", Some(directory.path()), header("1"), true).unwrap();
        assert_eq!(journal.step("c", 4), Some(&Ok(sample(300, 1.0))));
        let second = Journal::open("--out", Some(directory.path()), header("1"), true);
        assert!(second.unwrap_err().to_string().contains("another process"));
        let mut file = journal.file.as_ref().unwrap();
        file.write_all(b"{\"cell\":\"d\",\"repetition\":0}\n").unwrap();
        drop(journal);
        let refused = Journal::open("--out", Some(directory.path()), header("1"), true);
        assert!(refused.unwrap_err().to_string().contains("line 5"));
    }

    #[test]
    fn a_step_that_cannot_be_recorded_says_how_to_go_on() {
        // Scenario: a disk that is full. Expected: an error with the option, the cause and the remedy.
        let mut journal = Journal::open("--out", None, header("1"), false).unwrap();
        journal.file = File::options().write(true).open("/dev/full").ok();
        let problem = journal.record("a", 0, None, &Ok(sample(100, 1.0))).unwrap_err();
        let expected = "--out: cannot record a step (No space left on device (os error 28)): make room, and continue with --resume";
        assert_eq!(problem.to_string(), expected);
    }

    #[test]
    fn unfinished_finished_and_foreign_results_are_refused() {
        // Scenario: an unfinished run without --resume; --resume without one; another seed; a damaged line; a
        // file of something else; a first line that was cut off; a finished report. Expected: an error that
        // names the option and the problem; the cut first line, before which nothing was measured, is written
        // again.
        let directory = tempfile::tempdir().unwrap();
        let open = |seed, resume| {
            let opened = Journal::open("--out", Some(directory.path()), header(seed), resume);
            opened.map(drop).map_err(|error| error.to_string())
        };
        assert!(open("1", true).unwrap_err().starts_with("--resume"));
        open("1", false).unwrap();
        assert!(open("1", false).unwrap_err().contains("--resume continues it"));
        let other = open("2", true).unwrap_err();
        assert!(other.contains("has seed: 1; this one has 2"), "{other}");
        open("1", true).unwrap();
        let path = directory.path().join(NAME);
        let good = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{good}{{\"cell\":1}}\n")).unwrap();
        assert!(open("1", true).unwrap_err().contains("line 2"));
        fs::write(&path, "{\"format\":\"other\"}\n").unwrap();
        let foreign = open("1", true).unwrap_err();
        assert!(foreign.contains("line 1 is not from this command"));
        fs::write(&path, "{\"format\":\"ring").unwrap();
        open("3", true).unwrap();
        assert!(open("1", true).unwrap_err().contains("has seed: 3"));
        fs::write(directory.path().join("report.json"), "{}").unwrap();
        assert!(open("1", true).unwrap_err().contains("finished report"));
    }
}
