//! Merges flags over environment over file over defaults, into one tree in which every value has its source.
//!
//! Values from the environment and flags are YAML scalars at a dotted path. Nothing here knows which keys
//! exist, except that `datasets` is a list, which only the file can set; other lists are scalars with commas.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_yaml::{Number, Value};

use super::document;
use super::keys::BACKEND_WORDS;
use super::problem::{Problem, Problems, Source};
use crate::key_file;

/// Environment variables with this prefix set keys: `RINGFETCH__ENGINE__BACKEND` is `engine.backend`.
pub const ENVIRONMENT_PREFIX: &str = "RINGFETCH__";

/// Most parts of a key path. The sections of one with thousands would use up the stack.
const PARTS_MAX: usize = 16;

/// Largest configuration file, which is read whole.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Keys that are `off` where somebody may write `off` for the whole section.
const OFF_KEYS: [(&str, &str); 5] = [
    ("access", "principals"),
    ("access_log", "path"),
    ("admin", "listen"),
    ("tls", "certificate"),
    ("tracing", "otlp_endpoint"),
];

/// The known key that a variable with too few or too many underscores was meant for, and that key's variable.
pub(super) fn variable_meant<'a>(name: &str, known: &'a BTreeSet<String>) -> Option<(&'a str, String)> {
    let meant = name.strip_prefix("RINGFETCH_")?.trim_start_matches('_');
    let meant = meant.replace("__", "_").to_ascii_lowercase();
    let key = known.iter().find(|key| is_joined_by_underscores(key, &meant))?;
    let variable = key.replace('.', "__").to_ascii_uppercase();
    Some((key, format!("{ENVIRONMENT_PREFIX}{variable}")))
}

/// Whether `name` is the path of a key in a section, with underscores between its parts: `engine_backend`.
pub(super) fn is_joined_by_underscores(key: &str, name: &str) -> bool {
    key.contains('.') && key.replace('.', "_") == name
}

/// The remedy where the section `path` is expected and something else is found.
pub(super) fn section_allowed(path: &str, found: &Content) -> String {
    let off_key = OFF_KEYS.iter().find(|(section, _)| *section == path);
    match (found, off_key) {
        (Content::Text(text), Some((_, key))) if text == "off" => {
            format!("allowed: a section of keys, such as {{{key}: off}}")
        }
        (Content::Text(text), _)
            if path == "engine" && BACKEND_WORDS.iter().any(|(word, _)| word == text) =>
        {
            format!("allowed: a section of keys, such as {{backend: {text}}}")
        }
        _ => "allowed: a section of keys".to_owned(),
    }
}

/// One setting from the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flag {
    /// As typed, without the value: `--backend`, `--set engine.backend`.
    pub name: String,
    /// Dotted path of the key it sets.
    pub key: String,
    /// The value, a YAML scalar.
    pub value: String,
}

/// The layer below the environment and the flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Base {
    /// A file.
    File(PathBuf),
    /// The demo, whose data is (or will be) in this directory.
    Demo(PathBuf),
}

/// The inputs of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inputs {
    /// File or demo.
    pub base: Base,
    /// The process's environment; other variables are ignored.
    pub environment: Vec<(OsString, OsString)>,
    /// Settings from the command line; the last one for a key wins.
    pub flags: Vec<Flag>,
}

/// A value and where it came from.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) content: Content,
    pub(super) source: Source,
}

#[derive(Debug, Clone)]
pub(super) enum Content {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    /// Text that no key may have, and what it is. Not kept: values and problems are printed and logged.
    Secret(&'static str),
    List(Vec<Node>),
    Section(Vec<(String, Node)>),
}

impl Content {
    /// The text of the value at `path`.
    fn of_text(text: String, path: &str) -> Self {
        match secret_in(&text) {
            // A dataset, or its file, may be named by the hash of its content.
            Some(_) if path.starts_with("datasets") && is_digits(&text) => Self::Text(text),
            Some(what) => Self::Secret(what),
            None => Self::Text(text),
        }
    }

    /// A description of the content, for the middle of a sentence.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Null => "has no value".to_owned(),
            Self::Bool(value) => format!("is {value}"),
            Self::Number(number) => format!("is {number}"),
            Self::Text(text) => format!("is {text:?}"),
            Self::Secret(what) => (*what).to_owned(),
            Self::List(_) => "is a list".to_owned(),
            Self::Section(_) => "is a section of keys".to_owned(),
        }
    }
}

/// What of a text belongs in a file of its own, for the middle of a sentence. Not every token can be recognised.
fn secret_in(text: &str) -> Option<&'static str> {
    let is_token = |word: &str| {
        let word = word.trim_matches(['\'', '"']);
        word.starts_with("sha256:") || is_digits(word)
    };
    if text.contains("-----BEGIN ") {
        Some("is the text of a PEM file")
    } else {
        let has_token = text.split_ascii_whitespace().any(is_token);
        has_token.then_some("contains a token or the hash of one")
    }
}

/// Whether it has the form of a hash, or of a token as the handbook makes them.
fn is_digits(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Reads the file and overrides it with the environment and the flags. Problems with single values are
/// appended, and those values are left out of the tree.
///
/// # Errors
/// The file cannot be read or is not YAML.
pub(super) fn merge(inputs: &Inputs, demo: Value, problems: &mut Vec<Problem>) -> Result<Node, Problems> {
    let mut root = match &inputs.base {
        Base::File(path) => {
            let source = Source::File(path.clone());
            let value = read(path).map_err(|(problem, remedy)| {
                Problems(vec![Problem::new("config", problem, remedy, source.clone())])
            })?;
            convert(value, "", &source, problems)
        }
        Base::Demo(_) => convert(demo, "", &Source::Demo, problems),
    };
    match root.content {
        Content::Section(_) => {}
        Content::Null => root.content = Content::Section(Vec::new()),
        Content::Bool(_) | Content::Number(_) | Content::Text(_) | Content::Secret(_) | Content::List(_) => {
            let remedy = "the file is a mapping of keys, such as `engine:`";
            let problem = root.content.describe();
            problems.push(Problem::new("config", problem, remedy, root.source.clone()));
            root.content = Content::Section(Vec::new());
        }
    }
    let mut variables: Vec<_> = inputs.environment.iter().collect();
    variables.sort();
    let mut first_of = BTreeMap::new();
    for (name, value) in variables {
        // One that is not UTF-8 names no key, and is refused as such.
        let name = name.to_string_lossy();
        let Some(path) = name.strip_prefix(ENVIRONMENT_PREFIX) else {
            continue;
        };
        let key = path.to_ascii_lowercase().replace("__", ".");
        let source = Source::Environment(name.to_string());
        if let Some(first) = first_of.get(&key) {
            let problem = format!("is also set by {first}");
            problems.push(Problem::new(key, problem, "set one of the two", source));
            continue;
        }
        first_of.insert(key.clone(), name.to_string());
        match value.to_str() {
            Some(text) => set(&mut root, &key, text, source, problems),
            None => problems.push(Problem::new(key, "is not UTF-8", "write it in UTF-8", source)),
        }
    }
    for flag in &inputs.flags {
        set(
            &mut root,
            &flag.key,
            &flag.value,
            Source::Flag(flag.name.clone()),
            problems,
        );
    }
    Ok(root)
}

type ProblemAndRemedy = (String, String);

fn read(path: &Path) -> Result<Value, ProblemAndRemedy> {
    let elsewhere = "name a readable file with --config or RINGFETCH_CONFIG, or give neither for the demo";
    let unreadable = |error: std::io::Error| {
        let remedy = key_file::remedy_of(&error, elsewhere);
        (format!("cannot be read: {error}"), remedy.to_owned())
    };
    let mut bytes = Vec::new();
    // A reload must not wait for the writer of a FIFO.
    let Some(file) = key_file::open_regular(path).map_err(unreadable)? else {
        return Err(("is not a regular file".to_owned(), elsewhere.to_owned()));
    };
    let length = file
        .take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    if u64::try_from(length).is_ok_and(|length| length > FILE_BYTES_MAX) {
        return Err((
            "is too large".to_owned(),
            format!("a configuration file has at most {FILE_BYTES_MAX} bytes"),
        ));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = error.as_bytes().iter().take(error.utf8_error().valid_up_to());
        let line = 1 + valid.filter(|byte| **byte == b'\n').count();
        (
            format!("is not UTF-8 in line {line}"),
            "save it as UTF-8".to_owned(),
        )
    })?;
    let syntax = |error: serde_yaml::Error| {
        // It repeats a key that is there twice.
        let error = error.to_string();
        let problem = secret_in(&error).map_or(error, |what| format!("a key {what}"));
        let remedy = match tab_line(&text) {
            Some(line) => format!("indent line {line} with blanks, not tabs"),
            None => "fix the syntax first".to_owned(),
        };
        (
            format!("is not valid YAML: {problem}"),
            format!("{remedy}; nothing else was checked"),
        )
    };
    // serde_yaml takes a byte order mark, which YAML allows, for the beginning of a document.
    let yaml = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let mut value = document::read(yaml).map_err(syntax)?;
    apply_merges(&mut value).map_err(syntax)?;
    Ok(value)
}

/// The first line that is indented with a tab, which YAML does not allow, and whose errors do not name.
fn tab_line(text: &str) -> Option<usize> {
    let is_tabbed = |line: &str| line.trim_start_matches(' ').starts_with('\t');
    text.lines().position(is_tabbed).map(|line| line + 1)
}

/// From the inside out: `apply_merge` itself leaves the merges of what it merges.
fn apply_merges(value: &mut Value) -> Result<(), serde_yaml::Error> {
    match value {
        Value::Mapping(entries) => entries.values_mut().try_for_each(apply_merges)?,
        Value::Sequence(items) => items.iter_mut().try_for_each(apply_merges)?,
        Value::Tagged(tagged) => apply_merges(&mut tagged.value)?,
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
    value.apply_merge()
}

fn convert(value: Value, path: &str, source: &Source, problems: &mut Vec<Problem>) -> Node {
    let place = if path.is_empty() { "config" } else { path };
    let content = match value {
        Value::Null => Content::Null,
        Value::Bool(value) => Content::Bool(value),
        Value::Number(number) => Content::Number(number),
        Value::String(text) => Content::of_text(text, path),
        Value::Sequence(items) => {
            let item = |(index, item)| convert(item, &format!("{path}[{index}]"), source, problems);
            Content::List(items.into_iter().enumerate().map(item).collect())
        }
        Value::Mapping(entries) => {
            let mut section = Vec::new();
            for (key, value) in entries {
                let text = plain(&key);
                let problem = match (secret_in(&text), key) {
                    (None, Value::String(key)) if !key.is_empty() => {
                        let node = convert(value, &join(path, &key), source, problems);
                        section.push((key, node));
                        continue;
                    }
                    (Some(what), _) => format!("has a key that {what}"),
                    (None, _) => format!("has a key that is not text: {text}"),
                };
                problems.push(Problem::new(place, problem, "keys are words", source.clone()));
            }
            Content::Section(section)
        }
        Value::Tagged(tagged) => {
            let problem = format!("has the YAML tag {}", tagged.tag);
            let remedy = "write the value without a tag";
            problems.push(Problem::new(place, problem, remedy, source.clone()));
            return convert(tagged.value, path, source, problems);
        }
    };
    Node {
        content,
        source: source.clone(),
    }
}

pub(super) fn plain(key: &Value) -> String {
    serde_yaml::to_string(key).map_or_else(|_| "?".to_owned(), |text| text.trim().to_owned())
}

pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() {
        key.to_owned()
    } else {
        format!("{path}.{key}")
    }
}

/// Sets one key from a scalar. Text that is not a YAML scalar (`[::1]:7410` would be a list) is used as it
/// is.
fn set(root: &mut Node, key: &str, text: &str, source: Source, problems: &mut Vec<Problem>) {
    let complaint = |problem: &str, remedy: &str| Problem::new(key, problem, remedy, source.clone());
    let parts: Vec<&str> = key.split('.').collect();
    if parts.len() > PARTS_MAX || parts.iter().any(|part| part.is_empty()) {
        return problems.push(complaint(
            "is not a key path",
            "write it like engine.backend (RINGFETCH__ENGINE__BACKEND in the environment)",
        ));
    }
    let top = parts[0].split('[').next().unwrap_or_default();
    if top == "datasets" {
        return problems.push(complaint(
            "cannot be set here",
            "datasets are named in the configuration file only",
        ));
    }
    let content = match document::read(text) {
        Ok(Value::Null) => Content::Null,
        Ok(Value::Bool(value)) => Content::Bool(value),
        Ok(Value::Number(number)) => Content::Number(number),
        Ok(Value::String(text)) => Content::of_text(text, key),
        Ok(Value::Sequence(_) | Value::Mapping(_) | Value::Tagged(_)) | Err(_) => {
            Content::of_text(text.to_owned(), key)
        }
    };
    // A value in place of a section is reported, and must not hide keys that are set inside that section.
    if let [top, _, ..] = parts.as_slice()
        && let Content::Section(entries) = &mut root.content
        && let Some((_, section)) = entries.iter_mut().find(|(name, _)| name == top)
        && !matches!(section.content, Content::Null | Content::Section(_))
    {
        let remedy = section_allowed(top, &section.content);
        let problem = section.content.describe();
        problems.push(Problem::new(*top, problem, remedy, section.source.clone()));
        section.content = Content::Section(Vec::new());
    }
    let mut node = root;
    for part in &parts {
        if matches!(node.content, Content::Null) {
            node.content = Content::Section(Vec::new());
        }
        let Content::Section(entries) = &mut node.content else {
            return problems.push(complaint(
                "is inside a value that is not a section",
                "fix the section first, or leave this one out",
            ));
        };
        let position = entries
            .iter()
            .position(|(name, _)| name == part)
            .unwrap_or_else(|| {
                entries.push((
                    (*part).to_owned(),
                    Node {
                        content: Content::Null,
                        source: source.clone(),
                    },
                ));
                entries.len() - 1
            });
        node = &mut entries[position].1;
    }
    if matches!(node.content, Content::Section(_)) {
        return problems.push(complaint(
            "is a section, not a single value",
            "name a key inside it",
        ));
    }
    *node = Node { content, source };
}
