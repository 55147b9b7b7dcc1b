//! The `datasets` list: names, paths, and the keys of each kind. Files are not opened here; the engine checks whether a
//! shape fits its file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringfetch_engine::config::{BackendKind, DirectIo, OBJECT_REVALIDATE_DEFAULT};
use ringfetch_engine::dataset::{
    BLOCK_BYTES_MAX, DIM_MAX, DatasetSpec, Dtype, KindSpec, Layout, PartialTail,
};

use super::keys::{BACKEND_WORDS, DIRECT_IO_WORDS};
use super::layers::{Content, Node};
use super::problem::Source;
use super::walk::{Section, Walk};

/// What the check of an entry needs besides the entry.
pub(super) struct EntryContext<'a> {
    /// The directory that relative paths start from.
    pub(super) directory: &'a Path,
    /// The default for `direct_io`.
    pub(super) direct_io: DirectIo,
    /// The largest response, which an item must fit in.
    pub(super) response_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KindName {
    Blocks,
    Vectors,
    Objects,
}

const KIND_WORDS: [(&str, KindName); 3] = [
    ("blocks", KindName::Blocks),
    ("vectors", KindName::Vectors),
    ("objects", KindName::Objects),
];

/// Keys that belong to one kind.
const KIND_KEYS: [(&str, KindName); 8] = [
    ("block_bytes", KindName::Blocks),
    ("partial_tail", KindName::Blocks),
    ("layout", KindName::Vectors),
    ("dim", KindName::Vectors),
    ("dtype", KindName::Vectors),
    ("header_bytes", KindName::Vectors),
    ("max_open_files", KindName::Objects),
    ("revalidate_ms", KindName::Objects),
];

const PARTIAL_TAIL_WORDS: [(&str, PartialTail); 2] =
    [("refuse", PartialTail::Refuse), ("ignore", PartialTail::Ignore)];

/// The value for a dataset that uses the engine's backend.
const INHERIT: &str = "inherit";

const NAME_ALLOWED: &str = "allowed: 1 to 128 of A-Z a-z 0-9 . _ -, the first one a letter or a digit (in quotes if it is a \
                            number, true, false or null)";
const HEADER_BYTES_MAX: u64 = 1 << 40;
const MAX_OPEN_FILES_DEFAULT: u64 = 1024;
/// An object that is read directly takes two descriptors.
const MAX_OPEN_FILES_MIN: u64 = 2;
const MAX_OPEN_FILES_MAX: u64 = 1 << 20;
const REVALIDATE_MS_MAX: u64 = 3_600_000;

/// The datasets, and the backends of those that have their own.
pub(super) type Datasets = (Vec<DatasetSpec>, BTreeMap<String, BackendKind>);

/// Reads the list. Entries with problems are left out.
pub(super) fn read(walk: &Walk, node: Option<Node>, around: &EntryContext<'_>) -> Datasets {
    let fixed = ["name", "kind", "path", "paths", "direct_io", "backend"];
    for key in fixed.iter().chain(KIND_KEYS.iter().map(|(key, _)| key)) {
        walk.know(&format!("datasets[].{key}"));
    }
    let missing = "list what to serve, such as `- { name: blocks, kind: blocks, path: /data/blocks.bin, block_bytes: 4096 }`";
    let (items, source) = match node {
        Some(Node {
            content: Content::List(items),
            source,
        }) => (items, source),
        Some(Node {
            content: Content::Null,
            source,
        }) => (Vec::new(), source),
        Some(Node { content, source }) => {
            walk.report(
                "datasets",
                content.describe(),
                "allowed: a list of datasets, each beginning with `-`",
                source,
            );
            return Datasets::default();
        }
        None => (Vec::new(), Source::Default),
    };
    if items.is_empty() {
        walk.report("datasets", "there are none", missing, source);
    }
    let mut first_of_name: BTreeMap<String, usize> = BTreeMap::new();
    let (mut specs, mut backends) = Datasets::default();
    for (index, item) in items.into_iter().enumerate() {
        let source = item.source.clone();
        // An empty entry counts as a section that lacks every required key.
        let is_section = matches!(item.content, Content::Section(_) | Content::Null);
        let section = Section::of(walk, format!("datasets[{index}]"), Some(item));
        if !is_section {
            section.finish();
            continue;
        }
        // Also of entries with other problems, so that all are reported at once.
        let named = |name: &str| match first_of_name.get(name) {
            Some(first) => walk.report(
                &format!("datasets[{index}].name"),
                format!("is {name:?}, and so is datasets[{first}].name"),
                "give each dataset a name of its own",
                source.clone(),
            ),
            None => {
                first_of_name.insert(name.to_owned(), index);
            }
        };
        let Some((spec, backend)) = entry(section, &source, around, named) else {
            continue;
        };
        backends.extend(backend.map(|backend| (spec.name.clone(), backend)));
        specs.push(spec);
    }
    (specs, backends)
}

fn entry(
    mut section: Section<'_>,
    source: &Source,
    around: &EntryContext<'_>,
    named: impl FnOnce(&str),
) -> Option<(DatasetSpec, Option<BackendKind>)> {
    let walk = section.walk();
    let required = |section: &Section<'_>, name: &str, remedy: &str| {
        walk.report(&section.key(name), "is missing", remedy, source.clone());
    };
    if !section.has("name") {
        required(&section, "name", NAME_ALLOWED);
    }
    let name = section.text("name", NAME_ALLOWED.trim_start_matches("allowed: "), |name| {
        if is_dataset_name(name) {
            Ok(())
        } else {
            Err(format!("is {name:?}"))
        }
    });
    if let Some(name) = &name {
        named(name);
    }
    if !section.has("kind") {
        required(&section, "kind", "allowed: blocks, vectors, objects");
    }
    let kind = section.optional_word("kind", &KIND_WORDS);
    let paths = paths(&mut section, kind, source, around.directory);
    let direct_io = section
        .optional_word("direct_io", &DIRECT_IO_WORDS)
        .unwrap_or_else(|| {
            walk.record(
                &section.key("direct_io"),
                word_of(around.direct_io, &DIRECT_IO_WORDS),
                Source::Default,
            );
            walk.note("engine.direct_io".to_owned());
            around.direct_io
        });
    let backends: Vec<(&str, Option<BackendKind>)> = BACKEND_WORDS
        .iter()
        .map(|(word, kind)| (*word, Some(*kind)))
        .chain([(INHERIT, None)])
        .collect();
    let backend = section.word("backend", None, &backends);
    for (key, of) in KIND_KEYS {
        // Without a valid kind it is unknown which keys are wrong, so only the kind is reported.
        if kind != Some(of)
            && let Some(node) = section.take(key)
            && let Some(kind) = kind
        {
            let (kind, of) = (word_of(kind, &KIND_WORDS), word_of(of, &KIND_WORDS));
            let problem = format!("is only for kind {of}; this dataset is of kind {kind}");
            walk.report(
                &section.key(key),
                problem,
                "leave it out, or change kind",
                node.source,
            );
        }
    }
    let kind = match kind {
        None => None,
        Some(KindName::Blocks) => blocks(&mut section, source, around),
        Some(KindName::Vectors) => vectors(&mut section, paths.as_deref(), source, around),
        Some(KindName::Objects) => Some(objects(&mut section)),
    };
    section.finish();
    let spec = DatasetSpec {
        name: name?,
        paths: paths?,
        kind: kind?,
        direct_io,
    };
    Some((spec, backend))
}

/// Whether a dataset may have this name.
pub(crate) fn is_dataset_name(name: &str) -> bool {
    name.len() <= 128
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
}

/// Exactly one of `path` and `paths`.
fn paths(
    section: &mut Section<'_>,
    kind: Option<KindName>,
    source: &Source,
    directory: &Path,
) -> Option<Vec<PathBuf>> {
    let walk = section.walk();
    let (one, many) = (section.take("path"), section.take("paths"));
    let (key, nodes, source) = match (one, many) {
        (Some(node), None) => (section.key("path"), vec![node], source.clone()),
        (
            None,
            Some(Node {
                content: Content::List(nodes),
                source,
            }),
        ) => (section.key("paths"), nodes, source),
        (None, Some(Node { content, source })) => {
            let remedy = "allowed: a list of files; for one file use path".to_owned();
            walk.report(&section.key("paths"), content.describe(), remedy, source);
            return None;
        }
        (Some(_), Some(node)) => {
            let problem = "is given together with path".to_owned();
            walk.report(
                &section.key("paths"),
                problem,
                "give path or paths, not both",
                node.source,
            );
            return None;
        }
        (None, None) => {
            let remedy =
                "name a file or device (several as a list: paths), or for objects a directory".to_owned();
            walk.report(&section.key("path"), "is missing", remedy, source.clone());
            return None;
        }
    };
    if nodes.is_empty() {
        walk.report(&key, "is empty", "name at least one file", source);
        return None;
    }
    if kind == Some(KindName::Objects) && nodes.len() > 1 {
        let problem = format!("has {} entries", nodes.len());
        walk.report(
            &key,
            problem,
            "a dataset of kind objects is one directory",
            source,
        );
        return None;
    }
    let count = nodes.len();
    let mut paths: Vec<PathBuf> = Vec::new();
    let mut named = BTreeSet::new();
    let mut written: Vec<serde_yaml::Value> = Vec::new();
    for node in nodes {
        let (problem, remedy) = match &node.content {
            Content::Text(text) if text.is_empty() || text.contains('\0') => (
                node.content.describe(),
                "allowed: the path of a file, device or directory",
            ),
            Content::Text(text) => {
                // `absolute` fails only for an empty path or an unreadable working directory; then the path
                // is used as written.
                let joined = directory.join(text);
                let path = std::path::absolute(&joined).unwrap_or(joined);
                if named.insert(path.clone()) {
                    written.push(path.to_string_lossy().into_owned().into());
                    paths.push(path);
                    continue;
                }
                (format!("names {text:?} twice"), "name each file once")
            }
            Content::Null
            | Content::Bool(_)
            | Content::Number(_)
            | Content::Secret(_)
            | Content::List(_)
            | Content::Section(_) => (
                node.content.describe(),
                "allowed: the path of a file, device or directory (quote it if YAML would not read it as text)",
            ),
        };
        walk.report(&key, problem, remedy, node.source);
    }
    if paths.len() < count {
        return None;
    }
    let value = if key.ends_with("paths") {
        written.into()
    } else {
        written.swap_remove(0)
    };
    walk.record(&key, value, source);
    Some(paths)
}

fn blocks(section: &mut Section<'_>, source: &Source, around: &EntryContext<'_>) -> Option<KindSpec> {
    let walk = section.walk();
    let key = section.key("block_bytes");
    let given = section.has("block_bytes");
    let block_bytes = section.optional_bytes("block_bytes", 1..=BLOCK_BYTES_MAX.into(), 1);
    let partial_tail = section.word("partial_tail", PartialTail::Refuse, &PARTIAL_TAIL_WORDS);
    if !given {
        walk.report(
            &key,
            "is missing",
            "give the block length in bytes, such as 4KiB",
            source.clone(),
        );
    }
    let block_bytes = block_bytes?;
    fits_an_answer(walk, &key, "a block", block_bytes, around);
    Some(KindSpec::Blocks {
        block_bytes: u32::try_from(block_bytes).ok()?,
        partial_tail,
    })
}

fn fits_an_answer(walk: &Walk, key: &str, what: &str, bytes: u64, around: &EntryContext<'_>) {
    let most = around.response_bytes;
    let problem =
        format!("makes {what} {bytes} bytes, and an answer has at most {most} (limits.response_bytes)");
    walk.report_conflict(
        key,
        "limits.response_bytes",
        bytes > most,
        problem,
        "raise limits.response_bytes",
    );
}

fn layout_by_suffix(path: &Path) -> Option<Layout> {
    let suffix = path.extension()?.to_str()?.to_ascii_lowercase();
    Layout::ALL
        .into_iter()
        .find(|layout| layout.as_str() == suffix && *layout != Layout::Raw)
}

fn word_of<T: PartialEq>(value: T, words: &[(&'static str, T)]) -> &'static str {
    words
        .iter()
        .find(|(_, other)| *other == value)
        .map_or("", |(word, _)| word)
}

/// The layout from its key, or else from the suffix that all paths share.
fn layout(section: &mut Section<'_>, paths: Option<&[PathBuf]>, source: &Source) -> Option<Layout> {
    let (walk, key) = (section.walk(), section.key("layout"));
    if section.has("layout") {
        return section.optional_word("layout", &Layout::ALL.map(|layout| (layout.as_str(), layout)));
    }
    let found: Vec<_> = paths?.iter().map(|path| layout_by_suffix(path)).collect();
    if let [Some(layout), rest @ ..] = found.as_slice()
        && rest.iter().all(|other| *other == Some(*layout))
    {
        walk.record(&key, layout.as_str(), Source::Default);
        walk.note("by the file's suffix".to_owned());
        return Some(*layout);
    }
    let remedy = format!(
        "cannot be derived from the file's suffix; allowed: {}",
        Layout::ALL.map(Layout::as_str).join(", ")
    );
    walk.report(&key, "is missing", remedy, source.clone());
    None
}

fn vectors(
    section: &mut Section<'_>,
    paths: Option<&[PathBuf]>,
    source: &Source,
    around: &EntryContext<'_>,
) -> Option<KindSpec> {
    let walk = section.walk();
    let layout = layout(section, paths, source);
    let (dim_given, dtype_given, header_given) = (
        section.has("dim"),
        section.has("dtype"),
        section.has("header_bytes"),
    );
    let dim = section.optional_small("dim", 1..=DIM_MAX);
    let dtype = section.optional_word("dtype", &Dtype::ALL.map(|dtype| (dtype.as_str(), dtype)));
    let header_bytes = section
        .optional_bytes("header_bytes", 0..=HEADER_BYTES_MAX, 1)
        .unwrap_or(0);
    let layout = layout?;
    if layout == Layout::Raw {
        for (name, given, remedy) in [
            (
                "dim",
                dim_given,
                "a raw file does not contain it: give the elements per vector",
            ),
            (
                "dtype",
                dtype_given,
                "a raw file does not contain it; allowed: f32, f16, bf16, f64, u8, i8, i32",
            ),
        ] {
            if !given {
                walk.report(&section.key(name), "is missing", remedy, source.clone());
            }
        }
    } else if header_given {
        let problem = format!("is for layout raw, and this one is {layout}");
        walk.report(
            &section.key("header_bytes"),
            problem,
            "leave it out",
            source.clone(),
        );
    }
    if let (Some(fixed), Some(said)) = (layout.fixed_dtype(), dtype)
        && fixed != said
    {
        let problem = format!("is {said}, and layout {layout} holds {fixed}");
        walk.report(
            &section.key("dtype"),
            problem,
            "leave it out, or change layout",
            source.clone(),
        );
    }
    let has_several_files = paths.is_some_and(|paths| paths.len() > 1);
    if layout == Layout::Raw && has_several_files && header_bytes > 0 {
        let problem =
            format!("is {header_bytes}, and several files form one address space only without headers");
        let remedy = "set header_bytes: 0, or make a dataset of each file";
        walk.report(&section.key("header_bytes"), problem, remedy, source.clone());
    }
    if layout != Layout::Raw && has_several_files {
        let problem = format!(
            "has several entries, and a dataset of layout {layout} is one file (only layout raw may have several)"
        );
        let remedy = "make a dataset of each file".to_owned();
        walk.report(&section.key("paths"), problem, remedy, source.clone());
    }
    if let (Some(dim), Some(dtype)) = (dim, dtype.or(layout.fixed_dtype())) {
        fits_an_answer(
            walk,
            &section.key("dim"),
            "a vector",
            u64::from(dim) * u64::from(dtype.bytes()),
            around,
        );
    }
    Some(KindSpec::Vectors {
        layout,
        dim,
        dtype,
        header_bytes,
    })
}

fn objects(section: &mut Section<'_>) -> KindSpec {
    let range = MAX_OPEN_FILES_MIN..=MAX_OPEN_FILES_MAX;
    let max_open_files = section.integer("max_open_files", MAX_OPEN_FILES_DEFAULT, range);
    let default = u64::try_from(OBJECT_REVALIDATE_DEFAULT.as_millis()).unwrap_or(REVALIDATE_MS_MAX);
    let revalidate_ms = section.integer("revalidate_ms", default, 0..=REVALIDATE_MS_MAX);
    KindSpec::Objects {
        max_open_files: usize::try_from(max_open_files).unwrap_or(usize::MAX),
        revalidate: Duration::from_millis(revalidate_ms),
    }
}
