//! Datasets on block devices: a loop device with sectors of 512 and of 4096 bytes. Needs root and losetup; fails, and
//! does not skip, without them.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a helper of a test fails it"
)]

use ringfetch_engine::config::DirectIo;
use ringfetch_engine::dataset::{Dataset, DatasetSpec, Kind, KindSpec, Layout, PartialTail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A loop device that is detached on drop.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn attach(file: &Path, sector_bytes: u32) -> Self {
        let output = Command::new("losetup")
            .args(["--sector-size", &sector_bytes.to_string(), "--find", "--show"])
            .arg(file)
            .output()
            .expect("losetup (util-linux) must be installed");
        assert!(
            output.status.success(),
            "losetup must be allowed (run as root, with /dev/loop-control): {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Self(PathBuf::from(String::from_utf8(output.stdout).unwrap().trim()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.0).status();
        assert!(
            detached.is_ok_and(|status| status.success()),
            "{} stays attached",
            self.0.display()
        );
    }
}

fn spec(path: &Path, kind: KindSpec, direct_io: DirectIo) -> DatasetSpec {
    DatasetSpec {
        name: "device".to_owned(),
        paths: vec![path.to_owned()],
        kind,
        direct_io,
    }
}

/// For each sector size: the device opens as blocks and as raw vectors, with its own length (not st_size,
/// which is 0), with direct I/O aligned to its sectors; a block size that does not divide it is refused with
/// the field.
#[test]
#[ignore = "needs root"]
fn loop_devices_of_both_sector_sizes() {
    let dir = tempfile::tempdir().unwrap();
    for sector_bytes in [512u32, 4096] {
        let file = dir.path().join("disk");
        let length = (4u64 << 20) + 4096;
        std::fs::File::create(&file).unwrap().set_len(length).unwrap();
        let device = LoopDevice::attach(&file, sector_bytes);
        let blocks = |block_bytes| KindSpec::Blocks {
            block_bytes,
            partial_tail: PartialTail::Refuse,
        };

        let dataset = Dataset::open(&spec(&device.0, blocks(4096), DirectIo::Required)).unwrap();
        assert_eq!(dataset.length_bytes(), length);
        assert_eq!(
            dataset.kind(),
            Kind::Blocks {
                block_bytes: 4096,
                count: 1025
            }
        );
        let facts = dataset.direct();
        assert!(facts.direct, "{}", facts.reason);
        assert_eq!(facts.offset_alignment_bytes, sector_bytes, "{}", facts.reason);
        assert!(facts.memory_alignment_bytes <= sector_bytes, "{}", facts.reason);
        assert!(
            facts.reason.contains(&format!("{sector_bytes}-byte alignment")),
            "{}",
            facts.reason
        );

        let vectors = KindSpec::Vectors {
            layout: Layout::Raw,
            dim: Some(1024),
            dtype: Some(ringfetch_engine::dataset::Dtype::F32),
            header_bytes: 4096,
        };
        let dataset = Dataset::open(&spec(&device.0, vectors, DirectIo::Off)).unwrap();
        assert_eq!((dataset.count(), dataset.direct().direct), (1024, false));

        let error = Dataset::open(&spec(&device.0, blocks(3000), DirectIo::Preferred)).unwrap_err();
        assert_eq!(error.field, "block_bytes", "{error}");
    }
}
