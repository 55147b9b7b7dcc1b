//! `ringfetch dataset make`: pattern data of any size, and the configuration that serves it. A file gets its
//! name when it is complete.

use crate::args::{Global, Make, MakeHow};
use crate::outcome::Failure;
use crate::quantity::{exact_size, size};
use crate::stop::StopSignals;
use crate::{progress, sink};
use ringfetch_engine::dataset::{Dtype, Layout};
use ringfetch_pattern as pattern;
use serde_json::json;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) async fn run(global: &Global, make: &Make) -> Result<(), Failure> {
    let plan = Plan::new(make)?;
    let (path, how) = destination(make);
    check_path(path, how.force, plan.kind == "objects")?;
    utf8(std::path::absolute(path)?)?;
    if plan.kind == "objects" && !how.force {
        room_for(path, plan.length_bytes)?;
    }
    let signals = StopSignals::catch()?;
    let bar = progress::bytes(plan.length_bytes);
    let stop = Arc::new(AtomicBool::new(false));
    let writing = {
        let (write, kind, path, seed) = (plan.write, plan.kind, path.to_owned(), how.seed);
        let (bar, stop) = (bar.clone(), Arc::clone(&stop));
        tokio::task::spawn_blocking(move || {
            remove_partial_files(&path, kind == "objects");
            write(&path, seed, &mut |written| {
                bar.set_position(written);
                !stop.load(Ordering::Relaxed)
            })
        })
    };
    let written = signals.end_in_order(writing, &stop).await;
    bar.finish_and_clear();
    written?.map_err(|error| {
        if error.kind() == io::ErrorKind::Interrupted {
            let left = match plan.kind {
                "objects" => "the objects made so far remain",
                _ => "nothing was made",
            };
            return Failure::Failed(format!("interrupted; {left}"));
        }
        let problem = format!("cannot write {}: {error}", path.display());
        let wrong_shape = error.kind() == io::ErrorKind::InvalidInput;
        if wrong_shape {
            Failure::Usage(error.to_string())
        } else {
            Failure::Failed(problem)
        }
    })?;
    if let Make::Objects { count, .. } = make {
        remove_from(path, *count)?;
    }
    let absolute = utf8(std::fs::canonicalize(path)?)?;
    let name = how.name.clone().unwrap_or_else(|| name_of(path));
    let (kind, seed) = (plan.kind, how.seed);
    let yaml = yaml(&name, kind, &absolute, &plan.keys);
    let verify = verify_command(make, &name);
    let value = json!({
        "path": absolute, "name": name, "kind": kind, "seed": seed, "length_bytes": plan.length_bytes, "yaml": yaml,
    });
    sink::print(global.json, &value, |out| {
        write!(
            out,
            "# Made with seed {seed}. {verify}For `datasets:` in the daemon's configuration:\n{yaml}"
        )
    })
}

fn destination(make: &Make) -> (&Path, &MakeHow) {
    let (Make::Blocks { path, how, .. } | Make::Vectors { path, how, .. } | Make::Objects { path, how, .. }) =
        make;
    (path, how)
}

/// Writes data of a seed to a path.
type Write = Box<dyn FnOnce(&Path, u64, pattern::Progress<'_>) -> io::Result<()> + Send>;

/// What to write.
struct Plan {
    kind: &'static str,
    /// Bytes to write; for vectors without the small header.
    length_bytes: u64,
    /// Keys of the dataset's configuration besides its name, kind and path.
    keys: Vec<String>,
    write: Write,
}

impl Plan {
    fn new(make: &Make) -> Result<Self, Failure> {
        let (kind, length_bytes, keys, write): (_, _, _, Write) = match *make {
            Make::Blocks {
                size, block_bytes, ..
            } if size < block_bytes.into() => {
                return Err(Failure::Usage(format!(
                    "--size {} is less than a block; give at least {}, or a smaller --block-bytes",
                    exact_size(size),
                    exact_size(block_bytes.into())
                )));
            }
            Make::Blocks {
                size, block_bytes, ..
            } => {
                let mut keys = vec![format!("block_bytes: {}", exact_size(block_bytes.into()))];
                match size % u64::from(block_bytes) {
                    0 => {}
                    rest => keys.push(format!("partial_tail: ignore # the last {rest} bytes")),
                }
                let write: Write =
                    Box::new(move |path, seed, on| pattern::write_blocks(path, seed, size, on));
                ("blocks", size, keys, write)
            }
            Make::Vectors {
                ref path,
                count,
                dim,
                dtype,
                layout,
                ..
            } => {
                let suffix = path.extension().and_then(|suffix| suffix.to_str());
                let layout = layout
                    .or_else(|| crate::args::layout(suffix?))
                    .unwrap_or(Layout::Raw);
                let dtype = dtype.or(layout.fixed_dtype()).unwrap_or(Dtype::F32);
                if layout.fixed_dtype().is_some_and(|fixed| fixed != dtype) {
                    let problem = format!("--dtype {dtype}: layout {layout} has a type of its own");
                    return Err(Failure::Usage(problem));
                }
                let header = match layout {
                    Layout::Fvecs | Layout::Bvecs | Layout::Ivecs => 4,
                    Layout::Raw | Layout::Npy | Layout::Fbin | Layout::U8bin | Layout::I8bin => 0,
                };
                let record = u64::from(dim)
                    .saturating_mul(dtype.bytes().into())
                    .saturating_add(header);
                let mut keys = vec![format!("layout: {layout}")];
                if layout == Layout::Raw {
                    keys.extend([format!("dim: {dim}"), format!("dtype: {dtype}")]);
                } else if (layout, dtype) == (Layout::Npy, Dtype::Bf16) {
                    // NumPy has no name for bfloat16.
                    keys.push("dtype: bf16".to_owned());
                }
                let write: Write = Box::new(move |path, seed, on| {
                    pattern::write_vectors(path, seed, layout, dtype, dim, count, on)
                });
                ("vectors", count.saturating_mul(record), keys, write)
            }
            Make::Objects {
                length_min,
                length_max,
                ..
            } if length_min > length_max => {
                return Err(Failure::Usage("--length-min is above --length-max".to_owned()));
            }
            Make::Objects {
                count,
                length_min,
                length_max,
                ref how,
                ..
            } => {
                let length = |index| pattern::object_length(how.seed, index, length_min, length_max);
                let length_bytes = (0..count).map(length).fold(0, u64::saturating_add);
                // A directory is never complete at one moment: objects appear one by one.
                let write: Write = Box::new(move |path, seed, on| {
                    pattern::write_objects(path, seed, count, length_min, length_max, on)
                });
                ("objects", length_bytes, Vec::new(), write)
            }
        };
        Ok(Self {
            kind,
            length_bytes,
            keys,
            write,
        })
    }
}

/// How to check made objects; empty for other data, whose length the daemon checks.
fn verify_command(make: &Make, name: &str) -> String {
    match make {
        Make::Blocks { .. } | Make::Vectors { .. } => String::new(),
        Make::Objects {
            count,
            length_min,
            length_max,
            how: MakeHow { seed, .. },
            ..
        } => {
            let (min, max) = (exact_size(*length_min), exact_size(*length_max));
            format!(
                "To check it: ringfetch dataset verify {name} --all --seed {seed} --count {count} --length-min {min} \
                 --length-max {max}\n# "
            )
        }
    }
}

/// The entry for `datasets:` in the daemon's configuration.
fn yaml(name: &str, kind: &str, path: &str, keys: &[String]) -> String {
    let mut yaml = format!(
        "  - name: {}\n    kind: {kind}\n    path: {}\n",
        yaml_text(name),
        yaml_text(path)
    );
    yaml.extend(keys.iter().map(|key| format!("    {key}\n")));
    yaml
}

/// A plain scalar if YAML cannot misread it, else a quoted one (JSON's quoting is valid YAML).
fn yaml_text(text: &str) -> String {
    // Numbers begin with a digit.
    const WORDS: [&str; 3] = ["true", "false", "null"];
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-');
    let is_word = WORDS.iter().any(|word| text.eq_ignore_ascii_case(word));
    let is_text = text.starts_with(|c: char| c == '/' || c.is_ascii_alphabetic()) && !is_word;
    if is_text && text.chars().all(plain) {
        text.to_owned()
    } else {
        json!(text).to_string()
    }
}

/// Refuses what does not fit: a file reserves its room at once, objects appear one by one.
fn room_for(path: &Path, bytes: u64) -> Result<(), Failure> {
    let exists = path.ancestors().find(|parent| parent.is_dir());
    let Ok(system) = rustix::fs::statvfs(exists.unwrap_or(Path::new("."))) else {
        return Ok(());
    };
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    if bytes <= free {
        return Ok(());
    }
    let (path, free, bytes) = (path.display(), size(free), size(bytes));
    Err(Failure::Failed(format!("{path}: {bytes} needed, {free} free")))
}

/// Removes what runs that were killed have left: next to a file, and in a directory of objects, where each would be served as
/// one. Best effort: a directory that cannot be read is reported when it is written.
fn remove_partial_files(path: &Path, directory: bool) {
    if !directory {
        // A bare name has an empty parent.
        let parent = Path::new(".").join(path.parent().unwrap_or(path));
        return pattern::remove_partial_files(&parent);
    }
    pattern::remove_partial_files(path);
    for folder in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if folder.file_type().is_ok_and(|kind| kind.is_dir()) {
            pattern::remove_partial_files(&folder.path());
        }
    }
}

/// Removes the objects that an earlier run made from number `first` on: they are not part of this dataset.
fn remove_from(directory: &Path, first: u64) -> io::Result<()> {
    let later = (first..).map(|index| directory.join(pattern::object_name(index)));
    for object in later.take_while(|object| object.exists()) {
        std::fs::remove_file(&object)?;
        // Succeeds for the last one of a folder.
        let _removed = object.parent().map(std::fs::remove_dir);
    }
    Ok(())
}

fn check_path(path: &Path, force: bool, directory: bool) -> Result<(), Failure> {
    let Ok(found) = std::fs::symlink_metadata(path) else {
        return Ok(());
    };
    let empty = || std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    let problem = match directory {
        true if !found.is_dir() => "exists and is not a directory; choose another path",
        true if !force && !empty() => "is not empty; --force replaces the objects in it",
        false if !found.is_file() => "exists and is not a regular file; choose another path",
        false if !force => "is there already; --force replaces it",
        true | false => return Ok(()),
    };
    Err(Failure::Failed(format!("{} {problem}", path.display())))
}

/// A path as a configuration can name it.
fn utf8(path: PathBuf) -> Result<String, Failure> {
    let text = path.into_os_string().into_string();
    text.map_err(|path| {
        let path = Path::new(&path).display();
        Failure::Failed(format!(
            "{path} is not UTF-8, as a configuration is; choose another path"
        ))
    })
}

/// A dataset name from a path: its stem, with `-` for characters that names may not have.
fn name_of(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let name: String = stem
        .chars()
        .map(|c| if allowed(c) { c } else { '-' })
        .take(128)
        .collect();
    match name.trim_start_matches(|c: char| !c.is_ascii_alphanumeric()) {
        "" => "made".to_owned(),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::DatasetCommand;
    use crate::commands::{Cli, Command};
    use clap::Parser as _;
    use ringfetch_server::config::{self, Base, Inputs};

    #[test]
    fn the_printed_configuration_names_what_the_daemon_needs() {
        for (arguments, path, want) in [
            (
                "blocks /b --size 8KiB",
                "/d/b",
                "kind: blocks\n    path: /d/b\n    block_bytes: 4KiB\n",
            ),
            (
                "blocks /b --size 8193",
                "/b",
                "4KiB\n    partial_tail: ignore # the last 1 bytes\n",
            ),
            (
                "vectors /v --count 1 --dim 3 --dtype u8",
                "/d/a b",
                "path: \"/d/a b\"\n    layout: raw\n    dim: 3\n    dtype: u8\n",
            ),
            (
                "vectors /v.npy --count 1 --dim 3",
                "/v",
                "path: /v\n    layout: npy\n",
            ),
            (
                "vectors /v.npy --count 1 --dim 3 --dtype bf16",
                "/v",
                "layout: npy\n    dtype: bf16\n",
            ),
            ("objects /o --count 3", "/o", "kind: objects\n    path: /o\n"),
        ] {
            let line = format!("ringfetch dataset make {arguments}");
            let Command::Dataset(DatasetCommand::Make(make)) = Cli::parse_from(line.split(' ')).command
            else {
                panic!("{line}");
            };
            let Ok(plan) = Plan::new(&make) else {
                panic!("{line}")
            };
            let yaml = yaml("n", plan.kind, path, &plan.keys);
            assert!(
                yaml.starts_with("  - name: n\n    kind: ") && yaml.ends_with(want),
                "{yaml}"
            );
        }
    }

    #[test]
    fn every_name_is_the_same_in_the_daemons_configuration() {
        // Scenario: names that YAML takes for numbers, truth values or nothing, as those of files often are, and others.
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("ringfetchd.yaml");
        for name in [
            "0", "1e3", "0x1f", "1.5", "true", "Null", "off", "blocks", "a-1.b",
        ] {
            let entry = yaml(name, "objects", "/o", &[]);
            std::fs::write(&file, format!("datasets:\n{entry}")).unwrap();
            let inputs = Inputs {
                base: Base::File(file.clone()),
                environment: Vec::new(),
                flags: Vec::new(),
            };
            let loaded = config::load(&inputs).unwrap_or_else(|problems| panic!("{problems}\n{entry}"));
            assert_eq!(loaded.config.datasets[0].name, name);
        }
    }

    #[test]
    fn a_dataset_is_named_by_its_path() {
        for (path, name) in [
            ("/d/my data.bin", "my-data"),
            ("/", "made"),
            ("/d/.hidden", "hidden"),
            ("é", "made"),
        ] {
            assert_eq!(name_of(Path::new(path)), name);
        }
    }
}
