//! The source tree: every text file that git tracks or would track, and one way to check a rule on it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// One file.
#[derive(Debug, Clone)]
pub(super) struct Source {
    /// Relative to the repository, with `/` between the parts.
    pub(super) path: String,
    pub(super) text: String,
}

impl Source {
    pub(super) fn new(path: &str, text: &str) -> Self {
        Self {
            path: path.to_owned(),
            text: text.to_owned(),
        }
    }

    /// Whether it is our Rust code.
    pub(super) fn is_rust(&self) -> bool {
        self.path.starts_with("crates/") && self.path.ends_with(".rs")
    }

    /// Whether it tells readers of this version.
    pub(super) fn is_document(&self) -> bool {
        self.path.ends_with(".md") && self.path != "CHANGELOG.md"
    }
}

/// A file's text; empty if there is no such file.
pub(super) fn text_of<'a>(tree: &'a [Source], path: &str) -> &'a str {
    let found = tree.iter().find(|source| source.path == path);
    found.map_or("", |source| source.text.as_str())
}

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every text file that git tracks or would track; without git (a source archive), every file that is not a
/// build product.
pub(super) fn tree() -> Vec<Source> {
    let root = root();
    let mut sources = Vec::new();
    for path in tracked(&root).unwrap_or_else(|| walk(&root)) {
        // Deleted but still in the index, or not text: nothing to read.
        if let Ok(text) = std::fs::read_to_string(root.join(&path)) {
            sources.push(Source { path, text });
        }
    }
    assert!(
        sources.iter().any(|s| s.path == "Cargo.toml"),
        "the tree was not found at {}",
        root.display()
    );
    sources
}

fn tracked(root: &Path) -> Option<Vec<String>> {
    let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(arguments)
        .output()
        .ok()?;
    let listing = String::from_utf8(output.stdout).ok()?;
    let paths: Vec<String> = listing
        .split('\0')
        .filter(|path| {
            !path.is_empty()
                && !Path::new(path)
                    .ancestors()
                    .skip(1)
                    .any(|above| is_cache(&root.join(above)))
        })
        .map(str::to_owned)
        .collect();
    (output.status.success() && !paths.is_empty()).then_some(paths)
}

/// Whether it holds what can be made again: a build directory, whatever its name (<https://bford.info/cachedir/>).
fn is_cache(directory: &Path) -> bool {
    directory.join("CACHEDIR.TAG").is_file()
}

fn walk(root: &Path) -> Vec<String> {
    // `.git` is a file in a worktree. Cargo tags no build directory that was there before, like a container's cache.
    const BUILT: [&str; 5] = [".git", "target", "ringfetch-demo", ".venv", "__pycache__"];
    let mut paths = Vec::new();
    let mut directories = vec![root.to_path_buf()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            let is_built = BUILT.iter().any(|name| entry.file_name() == *name) || is_cache(&entry.path());
            match entry.file_type() {
                Ok(_) if is_built => {}
                Ok(kind) if kind.is_dir() => directories.push(entry.path()),
                Ok(kind) if kind.is_file() => {
                    let path = entry.path();
                    let relative = path.strip_prefix(root).unwrap_or(&path);
                    paths.push(relative.to_string_lossy().replace('\\', "/"));
                }
                _ => {}
            }
        }
    }
    paths.sort();
    paths
}

/// Checks a rule: first that `bad` breaks it and `good` does not, then that no file in the tree breaks it. A
/// rule returns the problems of one file, as lines of text.
pub(super) fn hold(reason: &str, rule: impl Fn(&Source) -> Vec<String>, bad: &[Source], good: &[Source]) {
    for sample in bad {
        assert!(
            !rule(sample).is_empty(),
            "self-check: the rule accepts what breaks it: {sample:?}\n({reason})"
        );
    }
    for sample in good {
        let found = rule(sample);
        assert!(
            found.is_empty(),
            "self-check: the rule refuses what keeps it: {sample:?}: {found:?}\n({reason})"
        );
    }
    report(reason, &tree().iter().flat_map(rule).collect::<Vec<_>>());
}

/// Fails with the reason when anything was found.
pub(super) fn report(reason: &str, found: &[String]) {
    assert!(found.is_empty(), "{reason}\n{}", found.join("\n"));
}

/// `path:line: what` for every line.
pub(super) fn at_lines(source: &Source, lines: Vec<usize>, what: &str) -> Vec<String> {
    lines
        .into_iter()
        .map(|line| format!("{}:{line}: {what}", source.path))
        .collect()
}

/// A tree with build products: in a directory of another name than `target`, and in one that Cargo did not create.
fn built_tree() -> std::io::Result<tempfile::TempDir> {
    let root = tempfile::tempdir()?;
    for directory in ["build/debug", "target/debug"] {
        std::fs::create_dir_all(root.path().join(directory))?;
    }
    for file in [
        "Cargo.toml",
        "build/CACHEDIR.TAG",
        "build/debug/made.rs",
        "target/debug/made.rs",
    ] {
        std::fs::write(root.path().join(file), "")?;
    }
    std::fs::write(root.path().join(".gitignore"), "/target\n")?;
    Ok(root)
}

#[test]
fn a_build_directory_is_no_source_without_git() {
    // Scenario: build products, and the file that a worktree has for `.git`. Expectation: they are no sources.
    let root = built_tree().unwrap();
    std::fs::write(root.path().join(".git"), "gitdir: elsewhere\n").unwrap();
    assert_eq!(walk(root.path()), [".gitignore", "Cargo.toml"]);
}

#[test]
#[ignore = "needs git"]
fn a_build_directory_is_no_source() {
    // Scenario: the same in a repository. Expectation: the same.
    let root = built_tree().unwrap();
    let made = Command::new("git")
        .args(["init", "--quiet"])
        .arg(root.path())
        .status();
    assert!(made.unwrap().success());
    assert_eq!(tracked(root.path()).unwrap(), [".gitignore", "Cargo.toml"]);
}
