//! What makes an opened file or directory this one, in this version: the tag that clients compare, and the name of its page
//! cache.

use super::Dataset;
use rustix::fs::FileType;
use rustix::io::Errno;
use std::os::fd::AsFd;

/// Identifies the opened file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    /// The device it is on, or for a block device the device it is.
    dev: u64,
    ino: u64,
    length_bytes: u64,
    mtime_s: i64,
    mtime_ns: u64,
}

impl Identity {
    pub(super) fn of(descriptor: impl AsFd) -> Result<Self, Errno> {
        let found = rustix::fs::fstat(&descriptor)?;
        let is_block_device = FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice;
        let length_bytes = if is_block_device {
            // st_size of a device is 0; seek to its end instead (as BLKGETSIZE64 would report). No read returns
            // a last sector that is not whole (a loop device of 4,096-byte sectors over 1,050,112 bytes).
            let end = rustix::fs::seek(&descriptor, rustix::fs::SeekFrom::End(0))?;
            end - end % u64::from(rustix::fs::ioctl_blksszget(&descriptor)?.max(1))
        } else {
            u64::try_from(found.st_size).unwrap_or(0)
        };
        Ok(Self {
            dev: if is_block_device {
                found.st_rdev
            } else {
                found.st_dev
            },
            ino: found.st_ino,
            length_bytes,
            mtime_s: found.st_mtime,
            mtime_ns: found.st_mtime_nsec,
        })
    }

    /// Length at open.
    pub(super) fn length_bytes(self) -> u64 {
        self.length_bytes
    }

    /// Whether this length and modification time are those of the open.
    pub(super) fn has_content_of(self, length_bytes: u64, mtime_s: i64, mtime_ns: u32) -> bool {
        (length_bytes, mtime_s, u64::from(mtime_ns)) == (self.length_bytes, self.mtime_s, self.mtime_ns)
    }

    /// As if it were on this device. For tests of what depends on it.
    #[cfg(test)]
    pub(super) fn on_device(self, dev: u64) -> Self {
        Self { dev, ..self }
    }

    fn words(self) -> [u64; 5] {
        let mtime_s = self.mtime_s.cast_unsigned();
        [self.dev, self.ino, self.length_bytes, mtime_s, self.mtime_ns]
    }

    /// Names the page cache of a file. Of its version, since a deleted file's inode is used again. Nodes of one block device
    /// have inodes and times of their own.
    pub(super) fn pages(self, is_block_device: bool) -> u64 {
        let words = if is_block_device {
            [self.dev, 0, self.length_bytes, 0, 0]
        } else {
            self.words()
        };
        let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        words.into_iter().fold(0, mix)
    }

    pub(super) fn dev(self) -> u64 {
        self.dev
    }
}

impl Dataset {
    /// Whether this open dataset has the files of one that was opened just now, or its directory, in the same version, and still
    /// reaches them. Blocks.
    pub fn has_files_of(&self, fresh: &Self) -> bool {
        match (&self.0.objects, &fresh.0.objects) {
            (Some(open), Some(new)) => open.place().is_ok_and(|place| Ok(place) == new.place()),
            (None, None) => {
                self.etag() == fresh.etag() && self.files().iter().all(|file| file.is_reachable())
            }
            (Some(_), None) | (None, Some(_)) => false,
        }
    }
}

/// One tag for files in this order, and how their items lie in them: 128 bits of FNV-1a (Fowler, Noll, Vo;
/// draft-eastlake-fnv) over identities and layout. A digest, so that inode numbers, which identify files to NFS
/// servers, do not leave the machine.
pub(super) fn etag_of(files: impl IntoIterator<Item = Identity>, layout: &[u64]) -> String {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let words = files.into_iter().flat_map(Identity::words);
    let mut hash = OFFSET;
    for byte in words.chain(layout.iter().copied()).flat_map(u64::to_le_bytes) {
        hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
    }
    format!("{hash:032x}")
}
