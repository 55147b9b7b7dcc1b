//! One path: whether the daemon could open it, how it is read past the page cache and through a ring, how
//! much of it is in memory, and what lies beneath.
//!
//! The engine opens it, as the daemon would: its verdict on direct I/O is the daemon's. Reads a few blocks,
//! and warms at most one page of the cache.

use super::Needs;
use super::block;
use super::finding::{Check, Finding, Verdict, checks};
use crate::args::layout;
use crate::quantity::{grouped, size};
use crate::table::printable;
use ringfetch_engine::config::{DirectIo, OBJECT_REVALIDATE_DEFAULT};
use ringfetch_engine::dataset::{
    Dataset, DatasetSpec, DirectFacts, Dtype, Kind, KindSpec, Layout, PartialTail,
};
use ringfetch_engine::probe::{read_through_ring, resident_pages};
use ringfetch_host::View;
use ringfetch_host::block::Device;
use ringfetch_host::cgroup::Cgroup;
use ringfetch_host::mounts::{Mount, mount_of, mounts};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

checks! {
    OPEN = "path.open", "the daemon starts only if every dataset opens, and serves only what it can read";
    FILE_SYSTEM = "path.file_system",
        "the file system decides on direct I/O, and what a read costs besides the device";
    DIRECT = "path.direct_io",
        "past the page cache a ring keeps the device busy; buffered, reads that miss are left to kernel threads";
    RING_READ = "path.ring_read", "backends uring and auto read this file so";
    RESIDENCY = "path.residency",
        "what is in the page cache is fastest by mmap, what is not by uring; auto checks for each read";
}

/// Most objects of a directory that are examined.
const OBJECTS_SAMPLED: usize = 1000;
/// Alignments of offset, length and memory to try direct reads with.
const ALIGNMENTS: [u32; 4] = [512, 1024, 2048, 4096];

/// The facts about a path that the summary uses.
#[derive(Debug, Clone, Default)]
pub(super) struct PathFacts {
    pub(super) readable: bool,
    pub(super) length_bytes: u64,
    /// Whether it has more objects than were examined: `length_bytes` and `resident_bytes` are of these.
    pub(super) is_cut: bool,
    /// `None`: unknown.
    pub(super) resident_bytes: Option<u64>,
    /// Whether it is read from a device, past the page cache.
    pub(super) direct: bool,
}

/// A file to examine: the path itself, or an object beneath it.
struct Sample {
    path: PathBuf,
    length_bytes: u64,
}

pub(super) fn examine(
    view: &View,
    group: &Cgroup,
    path: &Path,
    needs: Needs,
    ring: bool,
) -> (Vec<Finding>, PathFacts) {
    let shown = printable(&path.display().to_string());
    let (checks, facts) = match Opened::open(path) {
        Ok(opened) => opened.examine(view, group, needs, ring),
        Err((found, remedy)) => (vec![OPEN.problem(found, remedy)], PathFacts::default()),
    };
    let checks = checks.into_iter().map(|finding| finding.about(&shown)).collect();
    (checks, facts)
}

/// A path that can be served.
struct Opened {
    /// Absolute, without symbolic links.
    path: PathBuf,
    is_directory: bool,
    is_device: bool,
    direct: DirectFacts,
    samples: Vec<Sample>,
    /// Objects examined, empty ones included.
    objects: usize,
    /// Whether there are more.
    is_cut: bool,
    /// An object that cannot be opened, and why.
    unreadable: Option<String>,
    length_bytes: u64,
    /// Its vectors, if its suffix names a layout of them: `2 000 vectors of 64 f32 (npy)`.
    vectors: Option<String>,
}

impl Opened {
    /// # Errors
    /// The cause and the remedy.
    fn open(path: &Path) -> Result<Self, (String, String)> {
        let found = std::fs::metadata(path).ok().map(|found| found.file_type());
        let is_directory = found.is_some_and(|found| found.is_dir());
        let is_device = found.is_some_and(|found| found.is_block_device());
        let (max_open_files, revalidate) = (16, OBJECT_REVALIDATE_DEFAULT);
        let (block_bytes, partial_tail) = (1, PartialTail::Ignore);
        let kind = match is_directory {
            true => KindSpec::Objects {
                max_open_files,
                revalidate,
            },
            false => KindSpec::Blocks {
                block_bytes,
                partial_tail,
            },
        };
        let spec = DatasetSpec {
            name: "doctor".to_owned(),
            paths: vec![path.to_owned()],
            kind,
            direct_io: DirectIo::Preferred,
        };
        let dataset = Dataset::open(&spec).map_err(|error| {
            let problem = without_path(&error.problem, path);
            let (cause, remedy) = problem.split_once(": ").unwrap_or((problem, "correct the path"));
            let denied = is_device && cause == "permission denied";
            let hint = "; in a container or a service, allow the device (--device in Docker, DeviceAllow in systemd)";
            (cause.to_owned(), format!("{remedy}{}", if denied { hint } else { "" }))
        })?;
        let vectors = found.filter(|found| found.is_file()).map(|_| vectors(spec));
        let vectors = vectors.transpose()?.flatten();
        let failed = |error: io::Error| {
            let remedy = match error.raw_os_error() {
                Some(errno)
                    if [Errno::MFILE, Errno::NFILE]
                        .map(Errno::raw_os_error)
                        .contains(&errno) =>
                {
                    "raise the limit of open files (ulimit -n, LimitNOFILE=)"
                }
                _ => "check the device (the kernel log says more) and the permissions",
            };
            (format!("opens but cannot be read: {error}"), remedy.to_owned())
        };
        let path = path.canonicalize().map_err(failed)?;
        let mut samples = Vec::new();
        let mut unreadable = None;
        let (mut count, mut is_cut) = (0, false);
        let mut length_bytes = dataset.length_bytes();
        if is_directory {
            let mut objects = dataset
                .list_objects("", OBJECTS_SAMPLED + 1, &|| true)
                .map_err(failed)?;
            is_cut = objects.len() > OBJECTS_SAMPLED;
            objects.truncate(OBJECTS_SAMPLED);
            count = objects.len();
            length_bytes = objects.iter().map(|object| object.length_bytes).sum();
            for object in objects.iter().filter(|object| object.length_bytes > 0) {
                let (path, length_bytes) = (path.join(&object.name), object.length_bytes);
                let sample = Sample { path, length_bytes };
                match sample.open(OFlags::empty()) {
                    Ok(_) => samples.push(sample),
                    Err(error) => {
                        unreadable.get_or_insert_with(|| format!("{}: {error}", object.name));
                    }
                }
            }
        } else {
            let path = path.clone();
            samples.push(Sample { path, length_bytes });
        }
        if let Some(first) = samples.first() {
            first.read_last_byte().map_err(failed)?;
        }
        let direct = dataset.direct().clone();
        Ok(Self {
            path,
            is_directory,
            is_device,
            direct,
            samples,
            objects: count,
            is_cut,
            unreadable,
            length_bytes,
            vectors,
        })
    }

    fn examine(&self, view: &View, group: &Cgroup, needs: Needs, ring: bool) -> (Vec<Finding>, PathFacts) {
        let mounts = mounts(view);
        let mount = mount_of(&mounts, &self.path).filter(|_| !self.is_device);
        let system = mount.map(|mount| mount.kind.as_str());
        let file_system = match mount {
            Some(mount) => file_system(mount),
            None if self.is_device => FILE_SYSTEM.ok("none: a block device"),
            None => FILE_SYSTEM.unknown_without("/proc"),
        };
        let mut checks = vec![self.opened(), file_system];
        let has_a_device = mount.is_none() || checks.iter().all(|finding| finding.verdict == Verdict::Ok);
        let in_memory = matches!(system, Some("tmpfs" | "ramfs"));
        if let Some(sample) = self.samples.first() {
            checks.push(self.direct_io(sample, in_memory));
            if ring {
                checks.push(self.ring_read(sample));
            }
        }
        let (residency, resident_bytes) = self.residency(system);
        checks.push(residency);
        match self.device(view, mount) {
            Some((device, partition)) => {
                let (partition, direct) = (partition.as_deref(), self.direct.direct);
                checks.extend(block::checks(group, &device, partition, direct, needs));
            }
            // Memory, layered and network file systems have none, as the file system's check says.
            None if has_a_device => checks.push(block::not_found()),
            None => {}
        }
        let (readable, length_bytes, is_cut) = (true, self.length_bytes, self.is_cut);
        let direct = self.direct.direct && !in_memory;
        (
            checks,
            PathFacts {
                readable,
                length_bytes,
                is_cut,
                resident_bytes,
                direct,
            },
        )
    }

    fn opened(&self) -> Finding {
        let bytes = size(self.length_bytes);
        if !self.is_directory {
            let what = if self.is_device { "block device" } else { "file" };
            let vectors = self.vectors.iter().map(|vectors| format!(": {vectors}"));
            return OPEN.ok(format!("a {what} of {bytes}{}", vectors.collect::<String>()));
        }
        if let Some(object) = &self.unreadable {
            return OPEN.warning(
                format!("a directory with objects that cannot be opened: {object}"),
                "let the daemon's user read them; it answers PERMISSION_DENIED for those it cannot",
            );
        }
        let count = self.objects;
        if self.is_cut {
            OPEN.ok(format!("a directory; its first {count} objects hold {bytes}"))
        } else if self.samples.is_empty() {
            let found = "a directory without objects, or with empty ones only";
            OPEN.warning(found, "put objects there, or correct the path")
        } else {
            OPEN.ok(format!("a directory of {count} objects, which hold {bytes}"))
        }
    }

    fn direct_io(&self, sample: &Sample, in_memory: bool) -> Finding {
        let remedy = "put the data on a local file system that takes O_DIRECT (ext4, XFS) or on a block device; or serve it \
                      by mmap";
        let DirectFacts {
            reason,
            memory_alignment_bytes: memory,
            offset_alignment_bytes: offset,
            ..
        } = &self.direct;
        if !self.direct.direct {
            return DIRECT.warning(reason.clone(), remedy);
        }
        let tried = sample.direct_reads();
        let worked = tried.iter().filter(|(_, outcome)| outcome.is_ok());
        let works: Vec<String> = worked.map(|(bytes, _)| bytes.to_string()).collect();
        let found = format!("{reason} (memory: {memory}); reads at {} work", works.join(", "));
        let mut aligned = tried.iter().filter(|(bytes, _)| bytes >= offset.max(memory));
        match aligned.find_map(|(bytes, outcome)| Some((bytes, outcome.as_ref().err()?))) {
            Some((bytes, error)) => DIRECT.warning(
                format!("{reason}, but a read aligned to {bytes} bytes answers {error}"),
                "set direct_io: off for this dataset, and please report this",
            ),
            // The file system's check warns already.
            None if in_memory => DIRECT.note(found),
            None => DIRECT.ok(found),
        }
    }

    fn ring_read(&self, sample: &Sample) -> Finding {
        let direct = &self.direct;
        let (how, flags, bytes, alignment) = match direct.direct {
            true => (
                "direct",
                OFlags::DIRECT,
                direct.offset_alignment_bytes,
                direct.memory_alignment_bytes,
            ),
            false => ("buffered", OFlags::empty(), 512, 1),
        };
        let file = sample.open(flags);
        match file.and_then(|file| read_through_ring(file, 0, bytes, alignment)) {
            Ok(bytes) => RING_READ.ok(format!("a {how} read of {bytes} bytes works")),
            Err(error) => RING_READ.problem(
                format!("a {how} read through a ring answers {error}"),
                "choose backend mmap for it; if pread can read it, please report this with the file system and the kernel",
            ),
        }
    }

    /// How much of it is in the page cache; for a directory, of the examined objects.
    fn residency(&self, system: Option<&str>) -> (Finding, Option<u64>) {
        if system == Some("overlay") {
            // The pages belong to the file of a layer; for the overlay's own file, cachestat finds none
            // (kernel 6.18).
            let found = "overlayfs hides what is in the page cache: backend auto takes all of it for cold";
            let remedy = "put the data into a volume, or choose uring or mmap";
            return (RESIDENCY.warning(found, remedy), None);
        }
        let page_bytes = rustix::param::page_size() as u64;
        let mut resident_bytes: u64 = 0;
        for sample in &self.samples {
            let file = sample.open(OFlags::empty());
            match file.and_then(|file| resident_pages(file, sample.length_bytes)) {
                Ok(pages) => resident_bytes += pages.saturating_mul(page_bytes).min(sample.length_bytes),
                Err(error) => return (residency_refused(&error), None),
            }
        }
        let percent = u128::from(resident_bytes) * 100 / u128::from(self.length_bytes.max(1));
        let found = format!(
            "{percent} % of {} is in the page cache now",
            size(self.length_bytes)
        );
        (RESIDENCY.ok(found), Some(resident_bytes))
    }

    fn device(&self, view: &View, mount: Option<&Mount>) -> Option<(Device, Option<String>)> {
        let metadata = self.path.metadata().ok()?;
        let number = if self.is_device {
            metadata.rdev()
        } else {
            metadata.dev()
        };
        // btrfs and others give their files device numbers that no device has; the mount names one.
        Device::numbered(view, number).or_else(|| {
            let source = Path::new(&mount?.source);
            let metadata = source.starts_with("/dev").then(|| source.metadata().ok())??;
            Device::numbered(view, metadata.rdev())
        })
    }
}

/// The daemon's message without the path, which is printed above it.
fn without_path<'a>(problem: &'a str, path: &Path) -> &'a str {
    let rest = problem.strip_prefix(&path.display().to_string());
    rest.map_or(problem, |rest| rest.trim_start_matches([':', ' ']))
}

/// The vectors of a file whose suffix names a layout, opened as the daemon opens it; `None`: the suffix names none.
///
/// # Errors
/// The cause and the remedy.
fn vectors(mut spec: DatasetSpec) -> Result<Option<String>, (String, String)> {
    let path = spec.paths.first().cloned().unwrap_or_default();
    let suffix = path.extension().and_then(|suffix| suffix.to_str());
    let layout = suffix.and_then(|suffix| layout(&suffix.to_ascii_lowercase()));
    let Some(layout) = layout.filter(|&layout| layout != Layout::Raw) else {
        return Ok(None);
    };
    let mut open = |dtype| {
        spec.kind = KindSpec::Vectors {
            layout,
            dim: None,
            dtype,
            header_bytes: 0,
        };
        Dataset::open(&spec)
    };
    // NumPy has no name for bfloat16; the configuration says so for those files.
    let opened = open(None).or_else(|error| open(Some(Dtype::Bf16)).map_err(|_| error));
    let dataset = opened.map_err(|error| {
        let cause = format!(
            "not a file of layout {layout}: {}",
            without_path(&error.problem, &path)
        );
        let remedy = "write the file again; or serve it as kind: blocks, which reads any file".to_owned();
        (cause, remedy)
    })?;
    Ok(match dataset.kind() {
        Kind::Vectors {
            count, dim, dtype, ..
        } => Some(format!("{} vectors of {dim} {dtype} ({layout})", grouped(count))),
        Kind::Blocks { .. } | Kind::Objects => None,
    })
}

fn residency_refused(error: &io::Error) -> Finding {
    let found = format!("cachestat answers: {error}");
    match Errno::from_io_error(error) {
        Some(Errno::PERM) => RESIDENCY.warning(
            format!("{found}: backend auto takes all of it for cold"),
            "let the daemon's user own the file, or write to it; or choose uring or mmap",
        ),
        Some(Errno::NOSYS) => RESIDENCY.note_with(
            format!("{found}: backend auto takes everything for cold"),
            "use kernel 6.5 or newer, and a seccomp profile that knows cachestat",
        ),
        _ => RESIDENCY.note(found),
    }
}

impl Sample {
    /// Never waits for a fifo's other end, if the path has become one.
    fn open(&self, flags: OFlags) -> io::Result<File> {
        let flags = (flags | OFlags::NONBLOCK).bits().cast_signed();
        File::options().read(true).custom_flags(flags).open(&self.path)
    }

    fn read_last_byte(&self) -> io::Result<()> {
        let file = self.open(OFlags::empty())?;
        // One page and no read-ahead, so that a cold file stays cold.
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
        file.read_exact_at(&mut [0], self.length_bytes.saturating_sub(1))
    }

    /// Tries direct reads with offset, length and memory aligned to exactly each of [`ALIGNMENTS`].
    fn direct_reads(&self) -> Vec<(u32, io::Result<()>)> {
        let file = match self.open(OFlags::DIRECT) {
            Ok(file) => file,
            Err(error) => return vec![(4096, Err(error))],
        };
        let tried = ALIGNMENTS.into_iter().map(|bytes| {
            let alignment = bytes as usize;
            let mut room = vec![0_u8; 4 * alignment];
            // With 512: the next multiple of 1024, plus 512, is a multiple of 512 and not of 1024.
            let start = room
                .as_ptr()
                .align_offset(2 * alignment)
                .saturating_add(alignment);
            let outcome = match room.get_mut(start..start.saturating_add(alignment)) {
                // Past the end it reads nothing, but is still refused if it is not aligned.
                Some(place) => file.read_at(place, u64::from(bytes)).map(drop),
                None => Ok(()),
            };
            (bytes, outcome)
        });
        tried.collect()
    }
}

fn file_system(mount: &Mount) -> Finding {
    let kind = mount.kind.as_str();
    let found = format!("{kind} at {}", mount.point.display());
    match kind {
        "ext4" | "xfs" | "ext2" | "ext3" => FILE_SYSTEM.ok(found),
        "tmpfs" | "ramfs" => FILE_SYSTEM.warning(
            format!("{found}: it is in memory, and \"direct\" reads of it measure no device"),
            "serve it by mmap; to measure a device, put the data on one",
        ),
        "overlay" => FILE_SYSTEM.warning(
            format!("{found}: a container's own layers"),
            "put the data into a volume (-v, or a bind mount): it is then read without the layers between",
        ),
        "nfs" | "nfs4" | "cifs" | "smb3" | "ceph" | "glusterfs" | "lustre" | "9p" | "virtiofs" => {
            let whose = if matches!(kind, "9p" | "virtiofs") { "the host's" } else { "a server's" };
            let limit = "what its device and its cache do cannot be seen from here";
            FILE_SYSTEM.note(format!("{found}: {whose}; {limit}"))
        }
        "btrfs" | "bcachefs" | "zfs" => FILE_SYSTEM.note_with(
            format!("{found}: where data has checksums or is compressed, direct reads may be buffered ones all the same"),
            "keep the data uncompressed; or on ext4, XFS or a block device",
        ),
        "squashfs" | "erofs" => FILE_SYSTEM.note(format!("{found}: every read may have to decompress")),
        _ if kind.starts_with("fuse") => {
            FILE_SYSTEM.note(format!("{found}: a process of this host answers each read"))
        }
        _ => FILE_SYSTEM.note(format!("{found}: not one this project was tried on")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_host::tree::Tree;

    #[test]
    fn file_systems_are_judged_by_their_kind() {
        let tree = Tree::new(&[(
            "proc/self/mountinfo",
            "1 1 8:1 / / rw - overlay overlay rw\n2 1 8:2 / /a rw - ext4 /dev/sda2 rw\n\
             3 1 0:9 / /b rw - tmpfs none rw\n4 1 0:8 / /c rw - fuse.sshfs x rw\n5 1 0:7 / /d rw - btrfs /dev/sdb rw\n\
             6 1 0:6 / /e rw - nfs4 s:/x rw\n7 1 0:5 / /f rw - newfs x rw\n",
        )]);
        let mounts = mounts(&tree.view());
        let verdict = |path: &str| file_system(mount_of(&mounts, Path::new(path)).unwrap()).verdict;
        assert_eq!(verdict("/a/x"), Verdict::Ok);
        assert_eq!([verdict("/x"), verdict("/b/x")], [Verdict::Warning; 2]);
        assert_eq!(["/c", "/d", "/e", "/f"].map(verdict), [Verdict::Note; 4]);
    }

    #[test]
    fn objects_are_counted_and_a_cut_listing_is_marked() {
        // Scenario: a directory of 3, 1000 and 1001 objects, the first of them empty. Expected: the empty one counts; of 1001
        // objects the first 1000 are examined, and it says so.
        let directory = tempfile::tempdir().unwrap();
        let mut made = 0;
        for (objects, found, is_cut) in [
            (3, "a directory of 3 objects, which hold 2 B", false),
            (1000, "a directory of 1000 objects, which hold 999 B", false),
            (1001, "a directory; its first 1000 objects hold 999 B", true),
        ] {
            for object in made..objects {
                let bytes = if object == 0 { "" } else { "x" };
                std::fs::write(directory.path().join(object.to_string()), bytes).unwrap();
            }
            made = objects;
            let opened = Opened::open(directory.path()).ok().unwrap();
            assert_eq!((&*opened.opened().found, opened.is_cut), (found, is_cut));
        }
    }

    #[test]
    fn refusals_of_cachestat_are_told_apart() {
        let finding = |errno: Errno| residency_refused(&errno.into());
        assert_eq!(finding(Errno::PERM).verdict, Verdict::Warning);
        let old = finding(Errno::NOSYS);
        assert_eq!(old.verdict, Verdict::Note);
        assert!(old.remedy.is_some_and(|remedy| remedy.contains("6.5")));
        assert_eq!(finding(Errno::OPNOTSUPP).verdict, Verdict::Note);
    }

    #[test]
    fn a_path_says_nothing_to_the_terminal() {
        let path = Path::new("/nowhere/\x1b[31m\nx");
        let (checks, facts) = examine(
            &View::real(),
            &Cgroup::default(),
            path,
            Needs::new(1, 1, 1),
            false,
        );
        let [finding] = &checks[..] else {
            panic!("{checks:?}")
        };
        assert_eq!(finding.verdict, Verdict::Problem);
        assert!(!finding.name().contains(char::is_control), "{finding:?}");
        assert!(!facts.readable);
    }
}
