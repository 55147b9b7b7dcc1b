//! Typed getters for the merged tree. Each takes one key; it records a problem with the key and continues.
//! Keys left at the end of a section are unknown.
//!
//! Why not `derive(Deserialize)`: serde stops at the first error, knows neither sources nor ranges, and its
//! `deny_unknown_fields` accepts unknown keys in internally tagged enums (serde #2123). The walk also yields the list of
//! known keys and the effective value of each.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde_yaml::Value;

use ringfetch_command::size;

use super::layers::{Content, Node, join, section_allowed, variable_meant};
use super::meant::{closest, key_meant, without_indices};
use super::problem::{Problem, Source};

/// One key's effective value.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// Path of the key.
    pub key: String,
    /// The value, as in a file.
    pub value: Value,
    /// Where it came from.
    pub source: Source,
    /// A remark, such as the value of `auto`.
    pub note: Option<String>,
}

/// Collects settings and problems.
#[derive(Debug, Default)]
pub(super) struct Walk {
    found: RefCell<Found>,
}

#[derive(Debug, Default)]
struct Found {
    problems: Vec<Problem>,
    settings: Vec<Setting>,
    unknown: Vec<(String, Source)>,
    /// Paths of all known keys, without list indices: `datasets[].name`.
    known: BTreeSet<String>,
}

impl Walk {
    pub(super) fn new(problems: Vec<Problem>) -> Self {
        Self {
            found: RefCell::new(Found {
                problems,
                ..Found::default()
            }),
        }
    }

    pub(super) fn report(
        &self,
        key: &str,
        problem: impl Into<String>,
        remedy: impl Into<String>,
        source: Source,
    ) {
        let problem = Problem::new(key, problem, remedy, source);
        self.found.borrow_mut().problems.push(problem);
    }

    /// Reports a contradiction between two keys at `key`, unless one of them already has a problem.
    pub(super) fn report_conflict(
        &self,
        key: &str,
        with: &str,
        conflicts: bool,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let found = self.found.borrow();
        if !conflicts
            || found
                .problems
                .iter()
                .any(|problem| problem.key == key || problem.key == with)
        {
            return;
        }
        let source_of = |key| {
            found
                .settings
                .iter()
                .find(|setting| setting.key == key)
                .map(|setting| setting.source.clone())
        };
        let sources = [source_of(key), source_of(with)].into_iter().flatten();
        let source = sources
            .reduce(|a, b| if a == Source::Default { b } else { a })
            .unwrap_or(Source::Default);
        drop(found);
        self.report(key, problem, remedy, source);
    }

    pub(super) fn record(&self, key: &str, value: impl Into<Value>, source: Source) {
        let setting = Setting {
            key: key.to_owned(),
            value: value.into(),
            source,
            note: None,
        };
        self.found.borrow_mut().settings.push(setting);
    }

    /// Adds a remark to the last recorded setting.
    pub(super) fn note(&self, text: String) {
        if let Some(setting) = self.found.borrow_mut().settings.last_mut() {
            setting.note = Some(text);
        }
    }

    pub(super) fn know(&self, key: &str) {
        self.found.borrow_mut().known.insert(without_indices(key));
    }

    /// Problems (including unknown keys, with suggestions), settings, and known keys.
    pub(super) fn finish(self) -> (Vec<Problem>, Vec<Setting>, BTreeSet<String>) {
        let Found {
            mut problems,
            settings,
            unknown,
            known,
        } = self.found.into_inner();
        for (key, source) in unknown {
            let variable = match &source {
                Source::Environment(name) => variable_meant(name, &known),
                Source::Default | Source::Demo | Source::File(_) | Source::Flag(_) => None,
            };
            let remedy = match variable {
                Some((_, variable)) => format!("the variable is {variable}"),
                None => key_meant(&key, &known),
            };
            problems.push(Problem::new(key, "is not a key here", remedy, source));
        }
        (problems, settings, known)
    }
}

/// A section of the tree whose keys are being taken.
#[derive(Debug)]
#[must_use = "finish() reports the unknown keys"]
pub(super) struct Section<'w> {
    walk: &'w Walk,
    path: String,
    entries: Vec<(String, Node)>,
}

impl<'w> Section<'w> {
    /// The whole tree.
    pub(super) fn root(walk: &'w Walk, node: Node) -> Self {
        Self::of(walk, String::new(), Some(node))
    }

    pub(super) fn of(walk: &'w Walk, path: String, node: Option<Node>) -> Self {
        let mut entries = Vec::new();
        match node {
            None
            | Some(Node {
                content: Content::Null,
                ..
            }) => {}
            Some(Node {
                content: Content::Section(found),
                ..
            }) => entries = found,
            Some(Node { content, source }) => {
                walk.report(
                    &path,
                    content.describe(),
                    section_allowed(&path, &content),
                    source,
                );
            }
        }
        Self { walk, path, entries }
    }

    /// Path of a key in this section.
    pub(super) fn key(&self, name: &str) -> String {
        join(&self.path, name)
    }

    pub(super) fn walk(&self) -> &'w Walk {
        self.walk
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.entries.iter().any(|(key, _)| key == name)
    }

    /// Takes a key with any value.
    pub(super) fn take(&mut self, name: &str) -> Option<Node> {
        self.walk.know(&self.key(name));
        let position = self.entries.iter().position(|(key, _)| key == name)?;
        Some(self.entries.swap_remove(position).1)
    }

    pub(super) fn section(&mut self, name: &str) -> Self {
        let node = self.take(name);
        Self::of(self.walk, self.key(name), node)
    }

    /// Records the remaining keys as unknown.
    pub(super) fn finish(self) {
        let mut found = self.walk.found.borrow_mut();
        for (name, node) in self.entries {
            found.unknown.push((join(&self.path, &name), node.source));
        }
    }

    /// Takes and parses a key. Records a valid value, reports an invalid one; `None` if absent or invalid.
    fn read<T>(
        &mut self,
        name: &str,
        allowed: &str,
        parse: impl FnOnce(&Content) -> Result<T, String>,
        write: impl FnOnce(&T) -> Value,
    ) -> Option<T> {
        let node = self.take(name)?;
        let key = self.key(name);
        match parse(&node.content) {
            Ok(value) => {
                self.walk.record(&key, write(&value), node.source);
                Some(value)
            }
            Err(problem) => {
                self.walk
                    .report(&key, problem, format!("allowed: {allowed}"), node.source);
                None
            }
        }
    }

    /// Records the default if the key was absent. If it was invalid, that is already reported, and the walk
    /// continues with the default.
    fn or_default<T>(&self, name: &str, value: Option<T>, default: T, write: impl FnOnce(&T) -> Value) -> T {
        value.unwrap_or_else(|| {
            self.walk
                .record(&self.key(name), write(&default), Source::Default);
            default
        })
    }

    /// A whole number in a range.
    pub(super) fn integer(&mut self, name: &str, default: u64, range: RangeInclusive<u64>) -> u64 {
        let value = self.optional_integer(name, range);
        self.or_default(name, value, default, |value| (*value).into())
    }

    pub(super) fn optional_integer(&mut self, name: &str, range: RangeInclusive<u64>) -> Option<u64> {
        let allowed = format!("a whole number, {} to {}", range.start(), range.end());
        self.read(
            name,
            &allowed,
            |content| integer(content, &range),
            |value| (*value).into(),
        )
    }

    /// A whole number in a range within 32 bits.
    pub(super) fn small(&mut self, name: &str, default: u32, range: RangeInclusive<u32>) -> u32 {
        let value = self.integer(
            name,
            default.into(),
            u64::from(*range.start())..=u64::from(*range.end()),
        );
        u32::try_from(value).unwrap_or(default)
    }

    pub(super) fn optional_small(&mut self, name: &str, range: RangeInclusive<u32>) -> Option<u32> {
        let value = self.optional_integer(name, u64::from(*range.start())..=u64::from(*range.end()));
        value.and_then(|value| u32::try_from(value).ok())
    }

    /// A byte size in a range, and a multiple of `multiple`.
    pub(super) fn bytes(
        &mut self,
        name: &str,
        default: u64,
        range: RangeInclusive<u64>,
        multiple: u64,
    ) -> u64 {
        let value = self.optional_bytes(name, range, multiple);
        self.or_default(name, value, default, |value| written(*value))
    }

    pub(super) fn optional_bytes(
        &mut self,
        name: &str,
        range: RangeInclusive<u64>,
        multiple: u64,
    ) -> Option<u64> {
        let (from, to) = (size::exact(*range.start()), size::exact(*range.end()));
        let of = if multiple > 1 {
            format!("a multiple of {multiple}, ")
        } else {
            String::new()
        };
        let allowed = format!("{from} to {to}, {of}written as {}", size::ALLOWED);
        let parse = |content: &Content| {
            let value = if let Content::Text(text) = content {
                size::parse(text).map_err(|problem| format!("is {text:?}, which {problem}"))?
            } else {
                integer(content, &range)?
            };
            if range.contains(&value) && value.is_multiple_of(multiple) {
                Ok(value)
            } else {
                Err(content.describe())
            }
        };
        self.read(name, &allowed, parse, |value| written(*value))
    }

    /// `true` or `false`.
    pub(super) fn boolean(&mut self, name: &str, default: bool) -> bool {
        let parse = |content: &Content| {
            let Content::Bool(value) = content else {
                return Err(not_a::<bool>(content));
            };
            Ok(*value)
        };
        let value = self.read(name, "true or false", parse, |value| (*value).into());
        self.or_default(name, value, default, |value| (*value).into())
    }

    /// One of these words.
    pub(super) fn word<T: Copy + PartialEq>(&mut self, name: &str, default: T, words: &[(&str, T)]) -> T {
        let value = self.optional_word(name, words);
        self.or_default(name, value, default, |value| spelled(value, words))
    }

    pub(super) fn optional_word<T: Copy + PartialEq>(
        &mut self,
        name: &str,
        words: &[(&str, T)],
    ) -> Option<T> {
        let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let allowed = names.join(", ");
        let parse = |content: &Content| {
            let text = text(content)?;
            let meant = words.iter().find(|(word, _)| *word == text);
            meant
                .map(|(_, value)| *value)
                .ok_or_else(|| match closest(&text, names.iter().copied()) {
                    Some(word) => format!("is {text:?} (did you mean {word}?)"),
                    None => format!("is {text:?}"),
                })
        };
        self.read(name, &allowed, parse, |value| spelled(value, words))
    }

    /// Text that `check` accepts; otherwise `check` returns the problem.
    pub(super) fn text(
        &mut self,
        name: &str,
        allowed: &str,
        check: impl FnOnce(&str) -> Result<(), String>,
    ) -> Option<String> {
        let parse = |content: &Content| {
            let text = text(content)?;
            check(&text).map(|()| text)
        };
        self.read(name, allowed, parse, |value| value.as_str().into())
    }

    /// Text with a default.
    pub(super) fn text_or(
        &mut self,
        name: &str,
        default: &str,
        allowed: &str,
        check: impl FnOnce(&str) -> Result<(), String>,
    ) -> String {
        let value = self.text(name, allowed, check);
        self.or_default(name, value, default.to_owned(), |value| value.as_str().into())
    }

    /// A whole number, or a word for `None`.
    pub(super) fn integer_or_word(
        &mut self,
        name: &str,
        word: &'static str,
        range: RangeInclusive<u64>,
    ) -> Option<u64> {
        let allowed = format!("{word}, or a whole number, {} to {}", range.start(), range.end());
        let parse = |content: &Content| {
            let is_word = matches!(content, Content::Text(text) if text == word);
            if is_word {
                Ok(None)
            } else {
                integer(content, &range).map(Some)
            }
        };
        let write = |value: &Option<u64>| value.map_or_else(|| word.into(), Into::into);
        let value = self.read(name, &allowed, parse, write);
        self.or_default(name, value, None, write)
    }

    /// A list of names that `check` accepts (or text with commas between them), or a word for `None`.
    pub(super) fn names_or_word(
        &mut self,
        name: &str,
        word: &'static str,
        most: usize,
        check: impl Fn(&str) -> Result<(), String>,
    ) -> Option<Vec<String>> {
        let allowed = format!("{word}, or at most {most} names, as a list or with commas between them");
        let one = |content: &Content| {
            let text = text(content)?;
            check(&text).map(|()| text)
        };
        let parse = |content: &Content| match content {
            Content::Text(text) if text == word => Ok(None),
            Content::List(nodes) if nodes.len() > most => Err(format!("has {} entries", nodes.len())),
            Content::List(nodes) => nodes
                .iter()
                .map(|node| one(&node.content))
                .collect::<Result<_, _>>()
                .map(Some),
            Content::Text(text) => {
                let names = text.split(',').map(str::trim);
                let checked = names.map(|name| check(name).map(|()| name.to_owned()));
                checked.collect::<Result<_, _>>().map(Some)
            }
            Content::Null
            | Content::Bool(_)
            | Content::Number(_)
            | Content::Secret(_)
            | Content::Section(_) => Err(content.describe()),
        };
        let write = |value: &Option<Vec<String>>| match value {
            None => word.into(),
            Some(names) => Value::Sequence(names.iter().map(|name| name.as_str().into()).collect()),
        };
        let value = self.read(name, &allowed, parse, write);
        self.or_default(name, value, None, write)
    }

    /// The path of a file, relative to `directory`, or `off`.
    pub(super) fn path_or_off(&mut self, name: &str, directory: &Path) -> Option<PathBuf> {
        self.path_or_word(name, directory, &[("off", ())]).ok()
    }

    /// The path of a file, relative to `directory`, or one of these words, the first by default.
    pub(super) fn path_or_word<T: Clone + PartialEq>(
        &mut self,
        name: &str,
        directory: &Path,
        words: &[(&str, T)],
    ) -> Result<PathBuf, T> {
        let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let allowed = format!("the path of a file, or {}", names.join(", "));
        let parse = |content: &Content| {
            let text = text(content)?;
            if let Some((_, word)) = words.iter().find(|(word, _)| *word == text) {
                return Ok(Err(word.clone()));
            }
            if text.is_empty() || text.contains('\0') {
                return Err(content.describe());
            }
            let joined = directory.join(text);
            Ok(Ok(std::path::absolute(&joined).unwrap_or(joined)))
        };
        let write = |value: &Result<PathBuf, T>| match value {
            Ok(path) => path.to_string_lossy().into_owned().into(),
            Err(word) => spelled(word, words),
        };
        let value = self.read(name, &allowed, parse, write);
        self.or_default(name, value, Err(words[0].1.clone()), write)
    }

    /// An address to listen on, or `off` if that is allowed.
    pub(super) fn address(&mut self, name: &str, default: SocketAddr, off: bool) -> Option<SocketAddr> {
        let allowed = if off {
            "an IP address and a port such as 127.0.0.1:7412, or off"
        } else {
            "an IP address and a port, such as 127.0.0.1:7410, [::1]:7410 or, for all interfaces, 0.0.0.0:7410 \
             (port 0: any free one)"
        };
        let parse = |content: &Content| {
            let text = text(content)?;
            if off && text == "off" {
                return Ok(None);
            }
            text.parse()
                .map(Some)
                .map_err(|_| format!("is {text:?}, which is not an address"))
        };
        let write = |value: &Option<SocketAddr>| {
            value.map_or_else(|| "off".into(), |address| address.to_string().into())
        };
        let value = self.read(name, allowed, parse, write);
        self.or_default(name, value, Some(default), write)
    }
}

/// A scalar that is text. `off` and the like are text in YAML 1.2.
fn text(content: &Content) -> Result<String, String> {
    match content {
        Content::Text(text) => Ok(text.clone()),
        Content::Number(_) | Content::Bool(_) => Err(format!("{}, which is not text", content.describe())),
        Content::Null | Content::Secret(_) | Content::List(_) | Content::Section(_) => {
            Err(content.describe())
        }
    }
}

/// What a value is instead of a `T`; the text of one, perhaps.
fn not_a<T: FromStr>(content: &Content) -> String {
    let Content::Text(text) = content else {
        return content.describe();
    };
    let remedy = match text.parse::<T>() {
        Err(_) => "",
        // In YAML `02` is text, as `"2"` is.
        Ok(_) if text.len() > 1 && text.starts_with('0') => ", which is text: leave out the leading zero",
        Ok(_) => ", which is text: leave out the quotes",
    };
    format!("{}{remedy}", content.describe())
}

fn integer(content: &Content, range: &RangeInclusive<u64>) -> Result<u64, String> {
    let Content::Number(number) = content else {
        return Err(not_a::<u64>(content));
    };
    number
        .as_u64()
        .filter(|value| range.contains(value))
        .ok_or_else(|| content.describe())
}

fn written(bytes: u64) -> Value {
    let text = size::exact(bytes);
    text.parse::<u64>().map_or_else(|_| text.into(), Into::into)
}

fn spelled<T: PartialEq>(value: &T, words: &[(&str, T)]) -> Value {
    words
        .iter()
        .find(|(_, other)| other == value)
        .map_or(Value::Null, |(word, _)| (*word).into())
}
