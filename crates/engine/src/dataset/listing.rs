//! Lists the objects of a directory in byte order of their names, after any name, in bounded memory.
//!
//! `/` sorts like any byte: `a.txt` (0x2E) before `a/b` (0x2F) before `a0` (0x30). So a directory's sort key
//! is its name with the `/`. Links to files inside are listed; linked directories are not entered, which
//! rules out loops (their objects can still be fetched). Names that are not UTF-8, and entries that the
//! daemon has no permission for, are skipped. A walk that nobody waits for any more stops at the next entry.

use super::ObjectEntry;
use super::directory::{Directory, is_absent, is_forbidden, is_out_of_descriptors};
use rustix::fs::FileType;
use rustix::io::Errno;
use std::collections::BinaryHeap;

/// Longest name of an object: PATH_MAX, which the kernel would refuse anyway.
pub(super) const NAME_BYTES_MAX: usize = 4096;

/// Entries of one directory held at a time; a larger directory is read again for the next page.
const PAGE_ENTRIES: usize = 8192;

/// Most entries examined to find a file to try direct I/O on.
const PROBE_ENTRIES_MAX: usize = 10_000;

/// Up to `limit` objects after the name `after`; `CANCELED` once `is_wanted` returns false.
pub(super) fn list(
    directory: &Directory,
    after: &str,
    limit: usize,
    is_wanted: &dyn Fn() -> bool,
) -> Result<Vec<ObjectEntry>, Errno> {
    list_paged(directory, after, limit, PAGE_ENTRIES, is_wanted)
}

/// One directory being listed.
struct Level {
    /// Empty, or ends in `/`.
    prefix: String,
    /// The keys to come, last first.
    page: Vec<Key>,
    /// If the directory has more than a page: the last key of this page.
    resume: Option<Key>,
}

/// A file's name, or a directory's with a `/`.
type Key = String;

fn list_paged(
    directory: &Directory,
    after: &str,
    limit: usize,
    page_entries: usize,
    is_wanted: &dyn Fn() -> bool,
) -> Result<Vec<ObjectEntry>, Errno> {
    let mut found = Vec::new();
    let read = |prefix: String, passed: Option<&Key>| {
        Level::read(directory, prefix, after, passed, page_entries, is_wanted)
    };
    let mut levels = vec![read(String::new(), None)?];
    while found.len() < limit {
        if !is_wanted() {
            return Err(Errno::CANCELED);
        }
        let Some(level) = levels.last_mut() else { break };
        let Some(key) = level.page.pop() else {
            let (prefix, last) = (std::mem::take(&mut level.prefix), level.resume.take());
            levels.pop();
            let is_root = levels.is_empty();
            match last.map(|last| read(prefix, Some(&last))) {
                Some(Ok(rest)) => levels.push(rest),
                // Removed since its last page was read.
                Some(Err(errno)) if is_root || !is_left_out(errno) => return Err(errno),
                Some(Err(_)) | None => {}
            }
            continue;
        };
        let name = format!("{}{key}", level.prefix);
        if name.ends_with('/') {
            match read(name, None) {
                Ok(below) => levels.push(below),
                Err(errno) if is_left_out(errno) => {}
                Err(errno) => return Err(errno),
            }
            continue;
        }
        match directory.stat_beneath(&name) {
            Ok((FileType::RegularFile, length_bytes)) => found.push(ObjectEntry { name, length_bytes }),
            Ok(_) => {}
            Err(errno) if is_left_out(errno) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(found)
}

/// Whether an entry that fails with this was removed or replaced since its name was read, or is not ours to read:
/// `lost+found`, for example.
fn is_left_out(errno: Errno) -> bool {
    is_absent(errno) || is_forbidden(errno)
}

impl Level {
    /// Reads a directory and keeps the first `page_entries` keys that come after `passed` and can lead to
    /// names after `after`.
    fn read(
        directory: &Directory,
        prefix: String,
        after: &str,
        passed: Option<&Key>,
        page_entries: usize,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Self, Errno> {
        let mut first_keys = BinaryHeap::new();
        let mut has_more = false;
        let mut entries = directory.read_beneath(&prefix)?;
        while let Some(entry) = entries.read() {
            if !is_wanted() {
                return Err(Errno::CANCELED);
            }
            let entry = entry?;
            let Some(key) = key_of(directory, &prefix, &entry)? else {
                continue;
            };
            if passed.is_some_and(|passed| key <= *passed) || !can_follow(&prefix, &key, after) {
                continue;
            }
            first_keys.push(key);
            if first_keys.len() > page_entries {
                first_keys.pop();
                has_more = true;
            }
        }
        let resume = if has_more {
            first_keys.peek().cloned()
        } else {
            None
        };
        let mut page = first_keys.into_sorted_vec();
        page.reverse();
        Ok(Self { prefix, page, resume })
    }
}

/// `None` for anything but objects and directories, and for names that cannot be requested.
fn key_of(directory: &Directory, prefix: &str, entry: &rustix::fs::DirEntry) -> Result<Option<Key>, Errno> {
    let name = entry.file_name().to_str().ok();
    let Some(name) = name.filter(|name| !matches!(*name, "." | "..")) else {
        return Ok(None);
    };
    if prefix.len() + name.len() > NAME_BYTES_MAX {
        return Ok(None);
    }
    let mut kind = entry.file_type();
    if kind == FileType::Unknown {
        // Some file systems do not report the type (readdir(3)).
        kind = match directory.stat_beneath(&format!("{prefix}{name}")) {
            Ok((kind, _)) => kind,
            Err(errno) if is_left_out(errno) => return Ok(None),
            Err(errno) => return Err(errno),
        };
    }
    Ok(match kind {
        FileType::RegularFile | FileType::Symlink => Some(name.to_owned()),
        FileType::Directory => Some(format!("{name}/")),
        FileType::Fifo
        | FileType::Socket
        | FileType::CharacterDevice
        | FileType::BlockDevice
        | FileType::Unknown => None,
    })
}

/// Whether a file's name comes after `after`, or a directory can hold names that do: with `after` = `b/k`, of
/// the directories `a/`, `b/` and `c/` the last two can.
fn can_follow(prefix: &str, key: &str, after: &str) -> bool {
    let name = prefix.bytes().chain(key.bytes());
    name.cmp(after.bytes()).is_gt()
        || (key.ends_with('/')
            && after
                .strip_prefix(prefix)
                .is_some_and(|rest| rest.starts_with(key)))
}

/// The first result of `look` for a file with at least one byte, in no particular order, among the first
/// entries. What cannot be opened is passed over.
///
/// # Errors
/// No descriptor is left.
pub(super) fn some_file<T>(
    directory: &Directory,
    mut look: impl FnMut(String) -> Option<T>,
) -> Result<Option<T>, Errno> {
    let mut left = PROBE_ENTRIES_MAX;
    let mut prefixes = vec![String::new()];
    while let Some(prefix) = prefixes.pop() {
        let Some(mut entries) = unless_out(directory.read_beneath(&prefix))? else {
            continue;
        };
        while let Some(Ok(entry)) = entries.read() {
            if left == 0 {
                return Ok(None);
            }
            left -= 1;
            let Some(key) = unless_out(key_of(directory, &prefix, &entry))?.flatten() else {
                continue;
            };
            let name = format!("{prefix}{key}");
            if name.ends_with('/') {
                prefixes.push(name);
            } else if let Some((FileType::RegularFile, 1..)) = unless_out(directory.stat_beneath(&name))?
                && let Some(answer) = look(name)
            {
                return Ok(Some(answer));
            }
        }
    }
    Ok(None)
}

fn unless_out<T>(result: Result<T, Errno>) -> Result<Option<T>, Errno> {
    match result {
        Err(errno) if is_out_of_descriptors(errno) => Err(errno),
        result => Ok(result.ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::directory::Resolver;
    use proptest::prelude::*;
    use std::path::Path;

    fn make(dir: &Path, name: &str) {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, name).unwrap();
    }

    fn names(found: Vec<ObjectEntry>) -> Vec<String> {
        found.into_iter().map(|entry| entry.name).collect()
    }

    /// A directory that may not be read, such as `lost+found` for an ordinary user, is left out; everything
    /// else is listed. A user who may read it (root) gets its file.
    #[test]
    fn what_may_not_be_read_is_left_out() {
        use std::fs::Permissions;
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "lost+found/b", "z"] {
            make(dir.path(), name);
        }
        let closed = dir.path().join("lost+found");
        let set = |mode| std::fs::set_permissions(&closed, Permissions::from_mode(mode)).unwrap();
        set(0);
        let is_open = std::fs::read_dir(&closed).is_ok();
        let found = names(list(&Directory::open(dir.path()).unwrap(), "", usize::MAX, &|| true).unwrap());
        // Its names can be read, but not what they refer to.
        set(0o444);
        let is_searched = closed.join("b").metadata().is_ok();
        let named = names(list(&Directory::open(dir.path()).unwrap(), "", usize::MAX, &|| true).unwrap());
        set(0o755);
        let expected = |has| {
            if has {
                vec!["a", "lost+found/b", "z"]
            } else {
                vec!["a", "z"]
            }
        };
        assert_eq!(
            (found, named),
            (
                expected(is_open).into_iter().map(str::to_owned).collect(),
                expected(is_searched).into_iter().map(str::to_owned).collect()
            )
        );
    }

    /// A tree where order by bytes and order by parts differ: the listing is in byte order, with lengths, for
    /// every page size, and continues after any name, whether it exists or not.
    #[test]
    fn byte_order_from_any_name_on() {
        let dir = tempfile::tempdir().unwrap();
        let mut all = [
            "a.txt", "a/b", "a/c/d", "a0", "a/c.d", "b", "z/z/z/z", "\u{e9}", "-", "a/c0", "c/1", "c/2",
        ];
        for name in all {
            make(dir.path(), name);
        }
        std::fs::create_dir_all(dir.path().join("empty/emptier")).unwrap();
        all.sort_unstable();
        let directory = Directory::open(dir.path()).unwrap();
        for page in [1, 2, 3, 100] {
            let found = list_paged(&directory, "", usize::MAX, page, &|| true).unwrap();
            assert!(
                found
                    .iter()
                    .all(|entry| entry.length_bytes == entry.name.len() as u64)
            );
            assert_eq!(names(found), all, "page of {page}");
            for after in [
                "a",
                "a/",
                "a/c",
                "a/c/",
                "a/c/d",
                "a/d",
                "a0",
                "b/x",
                "zz",
                "\u{10ffff}",
            ] {
                let expected: Vec<&str> = all.into_iter().filter(|name| *name > after).collect();
                let found = names(list_paged(&directory, after, usize::MAX, page, &|| true).unwrap());
                assert_eq!(found, expected, "after {after}, page of {page}");
            }
        }
        assert_eq!(
            names(list(&directory, "a.txt", 3, &|| true).unwrap()),
            ["a/b", "a/c.d", "a/c/d"]
        );
        assert_eq!(names(list(&directory, "", 0, &|| true).unwrap()), [""; 0]);
    }

    /// A walk that is abandoned stops at the next entry: among the entries of a directory and between directories,
    /// wherever in the tree it is.
    #[test]
    fn an_abandoned_walk_stops() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..20 {
            std::fs::create_dir_all(dir.path().join(format!("a{number}/b"))).unwrap();
            make(dir.path(), &format!("c/{number}"));
        }
        let directory = Directory::open(dir.path()).unwrap();
        let looks = std::cell::Cell::new(0);
        let walk = |looks_max| {
            looks.set(0);
            let is_wanted = || looks.replace(looks.get() + 1) < looks_max;
            list(&directory, "", usize::MAX, &is_wanted).map(names)
        };
        assert_eq!(walk(usize::MAX).unwrap().len(), 20);
        let all = looks.get();
        assert!(all > 100, "{all}");
        for looks_max in 0..all {
            assert_eq!(walk(looks_max), Err(Errno::CANCELED));
            assert_eq!(looks.get(), looks_max + 1);
        }
    }

    /// A directory is removed while its entries are listed page by page: what is left of it is left out, whenever it
    /// happens, and the rest is listed.
    #[test]
    fn a_directory_that_is_removed_meanwhile_is_left_out() {
        let all = ["a", "d/1", "d/2", "d/3", "e"];
        let mut removed_at = 0;
        loop {
            let dir = tempfile::tempdir().unwrap();
            for name in all {
                make(dir.path(), name);
            }
            let looks = std::cell::Cell::new(0);
            let is_wanted = || {
                if looks.replace(looks.get() + 1) == removed_at {
                    std::fs::remove_dir_all(dir.path().join("d")).unwrap();
                }
                true
            };
            let directory = Directory::open(dir.path()).unwrap();
            let found = names(list_paged(&directory, "", usize::MAX, 1, &is_wanted).unwrap());
            assert!(found.iter().all(|name| all.contains(&name.as_str())), "{found:?}");
            assert!(found.is_sorted() && found.first().is_some_and(|name| name == "a"));
            assert_eq!(
                found.last().map(String::as_str),
                Some("e"),
                "removed at {removed_at}"
            );
            if looks.get() <= removed_at {
                return assert_eq!(found, all);
            }
            removed_at += 1;
        }
    }

    /// A link to a file inside is listed; links to outside, to nowhere, in a loop or to a directory are not,
    /// nor is a fifo.
    #[test]
    fn only_files_inside_are_listed() {
        use std::os::unix::fs::symlink;
        let outside = tempfile::tempdir().unwrap();
        make(outside.path(), "secret");
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), "d/file");
        symlink("d/file", dir.path().join("inside")).unwrap();
        symlink("../d/file", dir.path().join("d/up")).unwrap();
        symlink(outside.path().join("secret"), dir.path().join("outside")).unwrap();
        symlink(outside.path(), dir.path().join("outside-dir")).unwrap();
        symlink("nowhere", dir.path().join("nowhere")).unwrap();
        symlink("loop-b", dir.path().join("loop-a")).unwrap();
        symlink("loop-a", dir.path().join("loop-b")).unwrap();
        symlink(".", dir.path().join("self")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, dir.path().join("fifo"), rustix::fs::Mode::RWXU).unwrap();
        let directory = Directory::open(dir.path()).unwrap();
        assert_eq!(
            names(list(&directory, "", 100, &|| true).unwrap()),
            ["d/file", "d/up", "inside"]
        );
        assert_eq!(
            some_file(&directory, |name| name.ends_with("file").then_some(())),
            Ok(Some(()))
        );
        let walking = directory.with_resolver(Resolver::Walk);
        assert_eq!(names(list(&walking, "", 100, &|| true).unwrap()), ["d/file"]);
    }

    /// A name that is not UTF-8 is skipped, and a directory without a byte in it has no file to try.
    #[test]
    fn odd_names_and_empty_files() {
        use std::os::unix::ffi::OsStrExt;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(std::ffi::OsStr::from_bytes(b"\xff\xfe")), b"x").unwrap();
        std::fs::write(dir.path().join("empty"), b"").unwrap();
        let directory = Directory::open(dir.path()).unwrap();
        assert_eq!(names(list(&directory, "", 100, &|| true).unwrap()), ["empty"]);
        assert_eq!(some_file(&directory, Some), Ok(None));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Any tree of short names: pages of any size, each continued from the last name, give the sorted
        /// names once each.
        #[test]
        fn pages_join_to_the_whole(
            tree in prop::collection::btree_set("[a-b.0]{1,2}(/[a-b.0]{1,2}){0,2}", 0..20),
            limit in 1usize..5,
            page in 1usize..5,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let mut all = Vec::new();
            for name in &tree {
                // A name that is also a directory, or has a `.` part, cannot be created: leave it out.
                let dots = name.split('/').any(|part| part == "." || part == "..");
                let path = dir.path().join(name);
                if dots || std::fs::create_dir_all(path.parent().unwrap()).is_err() || path.is_dir() {
                    continue;
                }
                std::fs::write(path, b"x").unwrap();
                all.push(name.clone());
            }
            all.sort_unstable();
            let directory = Directory::open(dir.path()).unwrap();
            let mut joined: Vec<String> = Vec::new();
            loop {
                let after = joined.last().cloned().unwrap_or_default();
                let found = names(list_paged(&directory, &after, limit, page, &|| true).unwrap());
                if found.is_empty() {
                    break;
                }
                joined.extend(found);
            }
            prop_assert_eq!(joined, all);
        }
    }
}
