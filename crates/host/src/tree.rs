//! Files of other hosts, for tests.
#![allow(clippy::expect_used, reason = "only tests use this")]

use crate::View;
use std::fs;

/// A directory in place of `/`.
#[derive(Debug)]
pub struct Tree(tempfile::TempDir);

impl Tree {
    /// A host with these files.
    pub fn new(files: &[(&str, &str)]) -> Self {
        let tree = Self(tempfile::tempdir().expect("a tree of files"));
        for (path, text) in files {
            tree.write(path, text);
        }
        tree
    }

    /// Writes or replaces a file.
    pub fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a tree of files")).expect("a tree of files");
        fs::write(path, text).expect("a tree of files");
    }

    /// Makes a symbolic link.
    pub fn link(&self, target: &str, path: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a tree of files")).expect("a tree of files");
        std::os::unix::fs::symlink(self.0.path().join(target), path).expect("a tree of files");
    }

    /// /proc/meminfo, in KiB: these lines, and 0 in the others that every kernel has.
    pub fn write_meminfo(&self, kib: &[(&str, u64)]) {
        let always = "MemTotal MemFree Buffers Cached SwapCached Active Inactive SwapTotal SwapFree Dirty Writeback \
                      Mapped Slab Committed_AS VmallocTotal VmallocUsed VmallocChunk";
        let zeros = always.split(' ').map(|name| (name, 0));
        let lines = zeros.chain(kib.iter().copied());
        let text: Vec<String> = lines.map(|(name, kib)| format!("{name}: {kib} kB\n")).collect();
        self.write("proc/meminfo", &text.concat());
    }

    /// Its files.
    pub fn view(&self) -> View {
        View::beneath(self.0.path())
    }
}

/// A server's storage: an nvme disk with dm-crypt and LVM on its second partition, a mirror of two SATA disks, two loop
/// devices.
pub fn storage() -> Tree {
    let tree = Tree::new(&[]);
    let queue = |device: &str, files: &[(&str, &str)]| {
        for (name, text) in files {
            tree.write(&format!("sys/devices/{device}/queue/{name}"), text);
        }
    };
    let nvme = "pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1";
    queue(
        nvme,
        &[
            ("rotational", "0\n"),
            ("scheduler", "[none] mq-deadline kyber\n"),
            ("nr_requests", "1023\n"),
            ("read_ahead_kb", "128\n"),
            ("max_sectors_kb", "1280\n"),
            ("max_hw_sectors_kb", "2048\n"),
            ("io_poll", "0\n"),
            ("logical_block_size", "4096\n"),
        ],
    );
    tree.write(&format!("sys/devices/{nvme}/mq/0/cpu_list"), "0\n");
    tree.write(&format!("sys/devices/{nvme}/mq/1/cpu_list"), "1\n");
    tree.write(&format!("sys/devices/{nvme}/dev"), "259:0\n");
    tree.link(&format!("sys/devices/{nvme}"), "sys/dev/block/259:0");
    for (minor, name) in [(1, "nvme0n1p1"), (2, "nvme0n1p2")] {
        tree.write(
            &format!("sys/devices/{nvme}/{name}/partition"),
            &format!("{minor}\n"),
        );
        tree.link(
            &format!("sys/devices/{nvme}/{name}"),
            &format!("sys/dev/block/259:{minor}"),
        );
    }
    let disks = [
        ("sda", "8:0", "mq-deadline kyber [bfq] none\n", "64\n"),
        ("sdb", "8:16", "[mq-deadline] kyber none\n", "256\n"),
    ];
    for (name, number, scheduler, tags) in disks {
        let device = format!("pci0000:00/ata1/block/{name}");
        queue(
            &device,
            &[
                ("rotational", "1\n"),
                ("scheduler", scheduler),
                ("nr_requests", tags),
                ("io_poll", "0\n"),
            ],
        );
        tree.write(&format!("sys/devices/{device}/dev"), &format!("{number}\n"));
        tree.write(&format!("sys/devices/{device}/mq/0/cpu_list"), "0, 1\n");
        tree.write(&format!("sys/devices/{device}/device/scsi_level"), "6\n");
        let slave = format!("sys/devices/virtual/block/md0/slaves/{name}");
        tree.link(&format!("sys/devices/{device}"), &slave);
    }
    queue(
        "virtual/block/md0",
        &[
            ("rotational", "1\n"),
            ("nr_requests", "128\n"),
            ("read_ahead_kb", "8192\n"),
            ("max_sectors_kb", "512\n"),
            ("max_hw_sectors_kb", "32767\n"),
        ],
    );
    for name in ["dm-0", "dm-1"] {
        queue(&format!("virtual/block/{name}"), &[("nr_requests", "128\n")]);
    }
    let stacked = [
        ("md0", "9:0", "md/level", "raid1\n"),
        ("dm-0", "252:0", "dm/uuid", "CRYPT-LUKS2-0123456789abcdef-data\n"),
        ("dm-1", "252:1", "dm/uuid", "LVM-abcdef\n"),
        ("loop0", "7:0", "loop/backing_file", "/images/a\n"),
        ("loop1", "7:1", "loop/backing_file", "/images/b\n"),
    ];
    for (name, number, file, text) in stacked {
        let device = format!("sys/devices/virtual/block/{name}");
        tree.write(&format!("{device}/{file}"), text);
        tree.write(&format!("{device}/dev"), &format!("{number}\n"));
        tree.link(&device, &format!("sys/dev/block/{number}"));
    }
    let virtual_block = "sys/devices/virtual/block";
    tree.link(
        &format!("sys/devices/{nvme}/nvme0n1p2"),
        &format!("{virtual_block}/dm-0/slaves/nvme0n1p2"),
    );
    tree.link(
        &format!("{virtual_block}/dm-0"),
        &format!("{virtual_block}/dm-1/slaves/dm-0"),
    );
    tree.write(&format!("{virtual_block}/loop0/loop/dio"), "1\n");
    tree.write(&format!("{virtual_block}/loop1/loop/dio"), "0\n");
    tree
}
