//! Opening datasets of blocks and of raw vectors: what is found, and what each bad input is told.

use super::*;
use std::path::Path;

fn spec(paths: &[&Path], kind: KindSpec) -> DatasetSpec {
    DatasetSpec {
        name: "d".to_owned(),
        paths: paths.iter().map(|path| path.to_path_buf()).collect(),
        kind,
        direct_io: DirectIo::Preferred,
    }
}

fn blocks(block_bytes: u32, partial_tail: PartialTail) -> KindSpec {
    KindSpec::Blocks {
        block_bytes,
        partial_tail,
    }
}

/// Three files as one address space: count, length, pieces over the seams, one tag.
#[test]
fn blocks_over_several_files() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = ["a", "b", "c"].iter().map(|name| dir.path().join(name)).collect();
    for (path, length) in paths.iter().zip([1000usize, 24, 1024]) {
        std::fs::write(path, vec![1u8; length]).unwrap();
    }
    let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    let dataset = Dataset::open(&spec(&paths, blocks(512, PartialTail::Refuse))).unwrap();
    assert_eq!(
        dataset.kind(),
        Kind::Blocks {
            block_bytes: 512,
            count: 4
        }
    );
    assert_eq!(dataset.length_bytes(), 2048);
    let mut pieces = Vec::new();
    dataset.locate(
        Extent {
            offset: 990,
            length: 100,
        },
        &mut |file, extent| {
            pieces.push((file, extent.offset, extent.length));
        },
    );
    assert_eq!(pieces, [(0, 990, 10), (1, 0, 24), (2, 0, 66)]);
    assert_eq!(
        dataset
            .files()
            .iter()
            .map(|file| file.length_bytes())
            .collect::<Vec<_>>(),
        [1000, 24, 1024]
    );
}
