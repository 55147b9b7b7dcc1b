//! Opens a dataset from its specification: files, then their shape, then one decision about direct I/O for
//! all of them.

use super::direct::{self, Alignment};
use super::file::{self, Accept, OpenFile, OpenOptions};
use super::identity::{Identity, etag_of};
use super::objects::Objects;
use super::open_error::{ErrorContext, file_problem, refusal_reason};
use super::{DatasetSpec, DirectFacts, Kind, KindSpec, OpenDataset, OpenError, PartialTail, layout};
use crate::config::DirectIo;
use crate::geometry::FileSpan;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Most files of one dataset that an error names.
const FAILURES_NAMED_MAX: usize = 8;

pub(super) fn open(spec: &DatasetSpec) -> Result<OpenDataset, OpenError> {
    let context = ErrorContext { dataset: &spec.name };
    check_name(context)?;
    if spec.paths.is_empty() {
        return Err(context.field(
            "path",
            "is missing: name a file, or several that form one address space",
        ));
    }
    match spec.kind {
        KindSpec::Objects {
            max_open_files,
            revalidate,
        } => objects(spec, max_open_files, revalidate, context),
        KindSpec::Blocks {
            block_bytes,
            partial_tail,
        } => address_space(spec, context, |_, length_bytes| {
            blocks(block_bytes, partial_tail, length_bytes, context)
        }),
        KindSpec::Vectors {
            layout,
            dim,
            dtype,
            header_bytes,
        } => {
            let wanted = layout::VectorSpec {
                layout,
                dim,
                dtype,
                header_bytes,
            };
            address_space(spec, context, |files, length_bytes| {
                let kind = layout::read_shape(wanted, files, &spec.paths, length_bytes, context)?;
                Ok((kind, length_bytes))
            })
        }
    }
}

/// Files laid end to end; `shape` determines the kind and how many of their bytes are served.
fn address_space(
    spec: &DatasetSpec,
    context: ErrorContext<'_>,
    shape: impl FnOnce(&[OpenFile], u64) -> Result<(Kind, u64), OpenError>,
) -> Result<OpenDataset, OpenError> {
    let (files, direct) = open_files(spec, context)?;
    let span = FileSpan::new(files.iter().map(OpenFile::length_bytes)).ok_or_else(|| {
        context.field(
            "path",
            "the files together hold more than 2^64 bytes: serve fewer",
        )
    })?;
    let (kind, length_bytes) = shape(&files, span.length_bytes())?;
    Ok(OpenDataset {
        id: file::next_id(),
        spec: spec.clone(),
        kind,
        etag: etag_of(files.iter().map(OpenFile::identity), &kind.layout_words()),
        disks: disks(files.iter().map(OpenFile::identity)),
        files: files.into_iter().map(Arc::new).collect(),
        span,
        length_bytes,
        direct,
        objects: None,
    })
}

fn objects(
    spec: &DatasetSpec,
    max_open_files: usize,
    revalidate: Duration,
    context: ErrorContext<'_>,
) -> Result<OpenDataset, OpenError> {
    let [path] = &spec.paths[..] else {
        return Err(context.field("path", "names several: objects are the files of one directory"));
    };
    let (objects, direct) = Objects::open(path, max_open_files, revalidate, spec.direct_io, context)?;
    let identity = objects
        .identity()
        .map_err(|errno| context.io(path, &errno.into()))?;
    Ok(OpenDataset {
        id: file::next_id(),
        spec: spec.clone(),
        kind: Kind::Objects,
        etag: etag_of([identity], &[]),
        disks: disks([identity]),
        files: Vec::new(),
        span: FileSpan::default(),
        length_bytes: 0,
        direct,
        objects: Some(objects),
    })
}

/// The devices that files are on, each once, with their disks.
fn disks(files: impl IntoIterator<Item = Identity>) -> Vec<(u64, u64)> {
    let (view, mut found) = (ringfetch_host::View::real(), Vec::<(u64, u64)>::new());
    for device in files.into_iter().map(Identity::dev) {
        if !found.iter().any(|(known, _)| *known == device) {
            found.push((device, ringfetch_host::block::disk_number(&view, device)));
        }
    }
    found
}

fn check_name(context: ErrorContext<'_>) -> Result<(), OpenError> {
    let mut bytes = context.dataset.bytes();
    let good = context.dataset.len() <= 128
        && bytes.next().is_some_and(|first| first.is_ascii_alphanumeric())
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if good {
        return Ok(());
    }
    Err(context.field(
        "name",
        "must be 1 to 128 of A-Z, a-z, 0-9, '.', '_' and '-', and begin with a letter or a digit",
    ))
}

/// Blocks over the whole address space: 10 000 bytes in blocks of 4096 are 2 blocks and a remainder of 1808.
fn blocks(
    block_bytes: u32,
    partial_tail: PartialTail,
    length_bytes: u64,
    context: ErrorContext<'_>,
) -> Result<(Kind, u64), OpenError> {
    let wide = u64::from(block_bytes);
    let (Some(count), Some(remainder)) = (length_bytes.checked_div(wide), length_bytes.checked_rem(wide))
    else {
        return Err(context.field("block_bytes", "is 0: a block has at least 1 byte"));
    };
    if remainder != 0 && partial_tail == PartialTail::Refuse {
        return Err(context.field(
            "block_bytes",
            format!(
                "{length_bytes} bytes are not a multiple of {block_bytes}: {remainder} bytes remain after {count} \
                 blocks; set partial_tail: ignore to leave them out, or another block_bytes"
            ),
        ));
    }
    if count == 0 {
        return Err(context.field(
            "block_bytes",
            format!("the dataset has {length_bytes} bytes, not one block of {block_bytes}: set a smaller block_bytes"),
        ));
    }
    Ok((Kind::Blocks { block_bytes, count }, length_bytes - remainder))
}

/// A file with something to serve, and why direct I/O is refused where it is.
fn open_file(
    path: &Path,
    options: OpenOptions,
    context: ErrorContext<'_>,
) -> Result<(OpenFile, Option<String>), OpenError> {
    let opened = OpenFile::open_path(path, options).map_err(|error| file_problem(path, error, context))?;
    if opened.0.length_bytes() == 0 {
        let shown = path.display();
        return Err(context.field(
            "path",
            format!("{shown} is empty: there is nothing to serve; write it first, or leave it out"),
        ));
    }
    Ok(opened)
}

/// Nothing, or one error that names all files that did not open, of very many the first ones; of those that the host
/// refuses only the first, since that holds for all further ones.
fn all_opened(failures: Vec<OpenError>) -> Result<(), OpenError> {
    let (mut refused, mistakes): (Vec<_>, Vec<_>) =
        failures.into_iter().partition(|error| error.is_refused_by_host);
    refused.truncate(1);
    let is_refused_by_host = mistakes.is_empty();
    let more = (refused.len() + mistakes.len()).saturating_sub(FAILURES_NAMED_MAX);
    let mut named = refused.into_iter().chain(mistakes).take(FAILURES_NAMED_MAX);
    let Some(mut error) = named.next() else {
        return Ok(());
    };
    error.is_refused_by_host = is_refused_by_host;
    for next in named {
        error.problem = format!("{}; {}", error.problem, next.problem);
    }
    if more > 0 {
        error.problem = format!("{}; and {more} more", error.problem);
    }
    Err(error)
}

fn open_files(
    spec: &DatasetSpec,
    context: ErrorContext<'_>,
) -> Result<(Vec<OpenFile>, DirectFacts), OpenError> {
    let options = OpenOptions {
        accept: Accept::FilesAndDevices,
        direct_io: spec.direct_io,
        tried: None,
    };
    let mut files = Vec::with_capacity(spec.paths.len());
    let mut refusal = None;
    let mut failures = Vec::new();
    for path in &spec.paths {
        match open_file(path, options, context) {
            Ok((file, reason)) => {
                if let Some(reason) = reason {
                    refusal.get_or_insert_with(|| refusal_reason(path, &reason));
                }
                files.push(file);
            }
            Err(error) => failures.push(error),
        }
    }
    all_opened(failures)?;
    let facts = match (spec.direct_io, refusal) {
        (DirectIo::Off, _) => DirectFacts::buffered("off by configuration"),
        (DirectIo::Preferred | DirectIo::Required, Some(reason)) => {
            // Mixing buffered and direct files would give the dataset two latencies.
            files.iter_mut().for_each(OpenFile::drop_direct);
            DirectFacts::buffered(reason)
        }
        (DirectIo::Preferred | DirectIo::Required, None) => direct_facts(&files, &spec.paths),
    };
    Ok((files, facts))
}

fn direct_facts(files: &[OpenFile], paths: &[PathBuf]) -> DirectFacts {
    let alignments = files.iter().map(OpenFile::alignment);
    let alignment = alignments.reduce(Alignment::coarser).unwrap_or(Alignment::NONE);
    let in_memory = files
        .iter()
        .zip(paths)
        // A device's node may be on such a file system; the device itself is not.
        .find(|(file, _)| !file.is_block_device() && direct::is_on_tmpfs(file.buffered()));
    DirectFacts::aligned(alignment, in_memory.map(|(_, path)| path.as_path()))
}

impl DirectFacts {
    pub(super) fn buffered(reason: impl Into<String>) -> Self {
        Self {
            direct: false,
            reason: reason.into(),
            offset_alignment_bytes: 1,
            memory_alignment_bytes: 1,
        }
    }

    pub(super) fn aligned(alignment: Alignment, in_memory: Option<&Path>) -> Self {
        let Alignment {
            offset_bytes,
            memory_bytes,
            source,
            disproved,
        } = alignment;
        let mut reason = format!("O_DIRECT, {offset_bytes}-byte alignment {source}");
        if let Some((announced, misread)) = disproved {
            reason.push_str(&format!(
                "; memory aligned to {memory_bytes} bytes, since a trial read into {announced}-byte aligned memory {misread}"
            ));
        }
        if let Some(path) = in_memory {
            reason.push_str(&format!(
                "; {} is on tmpfs: this measures memory, not a device",
                path.display()
            ));
        }
        Self {
            direct: true,
            reason,
            offset_alignment_bytes: offset_bytes,
            memory_alignment_bytes: memory_bytes,
        }
    }
}
