//! Mounted file systems: /proc/self/mountinfo.

use crate::View;
use procfs::process::MountInfo;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The mounted part of the file system: `/`, or a directory below it with bind mounts.
    pub root: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
    /// `ext4`, `tmpfs`, `overlay`, `cgroup2`, ...
    pub kind: String,
    /// The device, or another name; empty for `none`.
    pub source: String,
    options: Vec<String>,
}

impl Mount {
    /// Whether it has an option (`noatime`, or the name of one with a value).
    pub fn has(&self, option: &str) -> bool {
        self.options.iter().any(|found| found == option)
    }
}

/// All mounts of this process, in mount order.
pub fn mounts(view: &View) -> Vec<Mount> {
    // Line by line: one that procfs cannot parse must not hide the others.
    let text = view.text("proc/self/mountinfo").unwrap_or_default();
    text.lines().filter_map(parse).collect()
}

/// The mount of an absolute path without symbolic links: the one with the longest mount point; of several at
/// one point, the last.
pub fn mount_of<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let leads = |mount: &&Mount| path.starts_with(&mount.point);
    mounts
        .iter()
        .filter(leads)
        .max_by_key(|mount| mount.point.components().count())
}

fn parse(line: &str) -> Option<Mount> {
    let info = MountInfo::from_line(line).ok()?;
    Some(Mount {
        root: unescaped(&info.root).into(),
        point: unescaped(info.mount_point.to_str()?).into(),
        kind: info.fs_type,
        source: unescaped(&info.mount_source.unwrap_or_default()),
        options: info
            .mount_options
            .into_keys()
            .chain(info.super_options.into_keys())
            .collect(),
    })
}

/// Decodes space, tab, newline and backslash, which are written as three octal digits (`\040`); procfs does
/// not.
fn unescaped(field: &str) -> String {
    let mut out = String::with_capacity(field.len());
    let mut rest = field;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        let code = after
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) if code.is_ascii() => {
                out.push(char::from(code));
                rest = after.get(3..).unwrap_or_default();
            }
            Some(_) | None => {
                out.push('\\');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;

    #[test]
    fn a_path_lies_on_the_longest_mount_and_the_last() {
        // Scenario: mounts with optional fields, spaces in names, one over another, a line that is cut off.
        // Expectation: each path's file system; the cut-off line is skipped.
        let tree = Tree::new(&[(
            "proc/self/mountinfo",
            "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
             40 27 0:50 / /data rw - tmpfs none rw\n\
             41 27 259:1 /sub /data rw,noatime master:1 propagate_from:2 - xfs /dev/nvme0n1p1 rw,attr2\n\
             42 27 0:51 / /data\\040two rw - nfs4 server:/export\\134x rw\n\
             43 27 0:52 / /cut\n",
        )]);
        let mounts = mounts(&tree.view());
        assert_eq!(mounts.len(), 4);
        let kind = |path: &str| mount_of(&mounts, Path::new(path)).map(|mount| mount.kind.as_str());
        assert_eq!(kind("/data/x"), Some("xfs"));
        assert_eq!(kind("/database"), Some("ext4"));
        assert_eq!(kind("/data two/x"), Some("nfs4"));
        assert_eq!(mounts[2].root, Path::new("/sub"));
        assert!(mounts[2].has("noatime") && mounts[2].has("attr2"));
        assert_eq!(mounts[3].source, "server:/export\\x");
        assert_eq!(mount_of(&mounts, Path::new("relative")), None);
    }
}
