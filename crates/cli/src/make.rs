//! `ringfetch dataset make`: pattern data of any size, and the configuration that serves it. A file appears under its
//! name when it is whole.

use crate::args::{Global, Make, MakeHow};
use crate::outcome::Failure;
use crate::progress;
use crate::quantity::exact_size;
use crate::sink::{Sink, print_json};
use ringfetch_engine::dataset::{Dtype, Layout};
use ringfetch_pattern as pattern;
use serde_json::json;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) async fn run(global: &Global, make: &Make) -> Result<(), Failure> {
    let plan = Plan::new(make)?;
    let (path, how) = place(make);
    check_path(path, how.force, plan.kind() == "objects")?;
    let bar = progress::bytes(plan.length_bytes());
    let stop = Arc::new(AtomicBool::new(false));
    let writing = {
        let (plan, path, seed, bar, stop) = (
            plan.clone(),
            path.to_owned(),
            how.seed,
            bar.clone(),
            Arc::clone(&stop),
        );
        tokio::task::spawn_blocking(move || {
            plan.write(&path, seed, &mut |written| {
                bar.set_position(written);
                !stop.load(Ordering::Relaxed)
            })
        })
    };
    tokio::pin!(writing);
    let written = tokio::select! {
        written = &mut writing => written,
        _ = tokio::signal::ctrl_c() => {
            stop.store(true, Ordering::Relaxed);
            writing.await
        }
    };
    bar.finish_and_clear();
    match written {
        Ok(Ok(())) => {}
        Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {
            return Err(Failure::Failed("interrupted".to_owned()));
        }
        Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidInput => {
            return Err(Failure::Usage(error.to_string()));
        }
        Ok(Err(error)) => {
            return Err(Failure::Failed(format!(
                "cannot write {}: {error}",
                path.display()
            )));
        }
        Err(_) => return Err(Failure::Failed("the writer failed".to_owned())),
    }
    tell(global, &plan, path, how)
}

fn place(make: &Make) -> (&Path, &MakeHow) {
    let (Make::Blocks { path, how, .. } | Make::Vectors { path, how, .. } | Make::Objects { path, how, .. }) =
        make;
    (path, how)
}

/// What to write.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Plan {
    Blocks {
        length_bytes: u64,
        block_bytes: u64,
    },
    Vectors {
        layout: Layout,
        dtype: Dtype,
        dim: u32,
        count: u64,
    },
    Objects {
        count: u64,
        length_min: u64,
        length_max: u64,
        length_bytes: u64,
    },
}

impl Plan {
    fn new(make: &Make) -> Result<Self, Failure> {
        match *make {
            Make::Blocks {
                size, block_bytes, ..
            } => Ok(Self::Blocks {
                length_bytes: size,
                block_bytes: block_bytes.into(),
            }),
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
                    return Err(Failure::Usage(format!(
                        "--dtype {dtype}: layout {layout} has a type of its own"
                    )));
                }
                Ok(Self::Vectors {
                    layout,
                    dtype,
                    dim,
                    count,
                })
            }
            Make::Objects {
                count,
                length_min,
                length_max,
                ref how,
                ..
            } => {
                if length_min > length_max {
                    let problem = "--length-min is above --length-max";
                    return Err(Failure::Usage(problem.to_owned()));
                }
                let length = |index| pattern::object_length(how.seed, index, length_min, length_max);
                let length_bytes = (0..count).map(length).fold(0, u64::saturating_add);
                Ok(Self::Objects {
                    count,
                    length_min,
                    length_max,
                    length_bytes,
                })
            }
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Blocks { .. } => "blocks",
            Self::Vectors { .. } => "vectors",
            Self::Objects { .. } => "objects",
        }
    }

    /// Bytes to write; for vectors without the few of a header.
    fn length_bytes(&self) -> u64 {
        match *self {
            Self::Blocks { length_bytes, .. } | Self::Objects { length_bytes, .. } => length_bytes,
            Self::Vectors {
                layout,
                dtype,
                dim,
                count,
            } => {
                let record_header = match layout {
                    Layout::Fvecs | Layout::Bvecs | Layout::Ivecs => 4,
                    Layout::Raw | Layout::Npy | Layout::Fbin | Layout::U8bin | Layout::I8bin => 0,
                };
                let record = u64::from(dim)
                    .saturating_mul(dtype.bytes().into())
                    .saturating_add(record_header);
                count.saturating_mul(record)
            }
        }
    }

    fn write(&self, path: &Path, seed: u64, progress: pattern::Progress<'_>) -> io::Result<()> {
        match *self {
            Self::Blocks { length_bytes, .. } => pattern::write_blocks(path, seed, length_bytes, progress),
            Self::Vectors {
                layout,
                dtype,
                dim,
                count,
            } => pattern::write_vectors(path, seed, layout, dtype, dim, count, progress),
            // A directory has no moment at which it is whole: objects appear one by one.
            Self::Objects {
                count,
                length_min,
                length_max,
                ..
            } => pattern::write_objects(path, seed, count, length_min, length_max, progress),
        }
    }

    /// The entry for `datasets:` in the daemon's configuration.
    fn yaml(&self, name: &str, path: &str) -> String {
        let mut yaml = format!(
            "  - name: {name}\n    kind: {}\n    path: {}\n",
            self.kind(),
            yaml_text(path)
        );
        // Writing to a string cannot fail.
        let _ = match *self {
            Self::Blocks {
                length_bytes,
                block_bytes,
            } => {
                let _ = writeln!(yaml, "    block_bytes: {}", exact_size(block_bytes));
                if length_bytes.is_multiple_of(block_bytes) {
                    Ok(())
                } else {
                    writeln!(
                        yaml,
                        "    partial_tail: ignore # the last {} bytes",
                        length_bytes % block_bytes
                    )
                }
            }
            Self::Vectors {
                layout: Layout::Raw,
                dtype,
                dim,
                ..
            } => {
                writeln!(yaml, "    layout: raw\n    dim: {dim}\n    dtype: {dtype}")
            }
            // NumPy has no name for bfloat16.
            Self::Vectors {
                layout: Layout::Npy,
                dtype: Dtype::Bf16,
                ..
            } => writeln!(yaml, "    layout: npy\n    dtype: bf16"),
            Self::Vectors { layout, .. } => writeln!(yaml, "    layout: {layout}"),
            Self::Objects { .. } => Ok(()),
        };
        yaml
    }
}

/// A plain scalar where YAML cannot mistake it, else a quoted one (JSON's quoting is YAML's too).
fn yaml_text(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-');
    if text.starts_with('/') && text.chars().all(plain) {
        text.to_owned()
    } else {
        json!(text).to_string()
    }
}

fn check_path(path: &Path, force: bool, directory: bool) -> Result<(), Failure> {
    let shown = path.display();
    let Ok(found) = std::fs::symlink_metadata(path) else {
        return Ok(());
    };
    if directory {
        let empty = std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
        if !found.is_dir() {
            return Err(Failure::Failed(format!(
                "{shown} exists and is not a directory; choose another path"
            )));
        }
        if !empty && !force {
            return Err(Failure::Failed(format!(
                "{shown} is not empty; --force replaces objects in it"
            )));
        }
    } else if !found.is_file() {
        return Err(Failure::Failed(format!(
            "{shown} exists and is not a regular file; choose another path"
        )));
    } else if !force {
        return Err(Failure::Failed(format!(
            "{shown} is there already; --force replaces it"
        )));
    }
    Ok(())
}

fn tell(global: &Global, plan: &Plan, path: &Path, how: &MakeHow) -> Result<(), Failure> {
    let absolute = std::fs::canonicalize(path)?;
    let absolute = absolute.to_string_lossy();
    let name = how.name.clone().unwrap_or_else(|| name_of(path));
    let yaml = plan.yaml(&name, &absolute);
    let mut out = Sink::open(None)?;
    if global.json {
        let made = json!({
            "path": absolute, "name": name, "kind": plan.kind(), "seed": how.seed,
            "length_bytes": plan.length_bytes(), "yaml": yaml,
        });
        print_json(&mut out, &made)?;
    } else {
        write!(
            out,
            "# Made with seed {}. For `datasets:` in the daemon's configuration:\n{yaml}",
            how.seed
        )?;
    }
    out.finish()
}

/// A dataset name from a path: its stem, with what names may not have as `-`.
fn name_of(path: &Path) -> String {
    let stem = path
        .file_stem()
        .map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    let allowed = |c: char| {
        if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') {
            c
        } else {
            '-'
        }
    };
    let name: String = stem.chars().map(allowed).take(128).collect();
    let name = name.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    if name.is_empty() {
        "made".to_owned()
    } else {
        name.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_configuration_names_what_the_daemon_needs() {
        // Scenario: blocks with and without a tail, raw vectors, .npy, a path with a space, an odd file name.
        // Expected: the keys that the daemon documents, quoted where YAML needs it.
        let blocks = |length_bytes| Plan::Blocks {
            length_bytes,
            block_bytes: 4096,
        };
        let head = "  - name: b\n    kind: blocks\n    path: /d/b.bin\n    block_bytes: 4KiB\n";
        assert_eq!(blocks(8192).yaml("b", "/d/b.bin"), head);
        let tail = "    partial_tail: ignore # the last 1 bytes\n";
        assert_eq!(blocks(8193).yaml("b", "/d/b.bin"), format!("{head}{tail}"));
        let vectors = |layout| Plan::Vectors {
            layout,
            dtype: Dtype::U8,
            dim: 3,
            count: 1,
        };
        let raw = vectors(Layout::Raw).yaml("v", "/d/a b");
        assert!(
            raw.ends_with("path: \"/d/a b\"\n    layout: raw\n    dim: 3\n    dtype: u8\n"),
            "{raw}"
        );
        assert!(vectors(Layout::Npy).yaml("v", "/d/v").ends_with("layout: npy\n"));
        let bfloat16 = Plan::Vectors {
            layout: Layout::Npy,
            dtype: Dtype::Bf16,
            dim: 3,
            count: 1,
        };
        assert!(
            bfloat16
                .yaml("v", "/d/v")
                .ends_with("layout: npy\n    dtype: bf16\n")
        );
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
