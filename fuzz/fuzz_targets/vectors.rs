//! Headers of vector files (.npy, .fvecs and the like, .fbin and the like, raw): no panic, and in a file that
//! opens every vector is inside the file. Four bytes choose layout, dimension, type and header; the rest is
//! the file.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::DirectIo;
use ringfetch_engine::dataset::{Dataset, DatasetSpec, Dtype, Kind, KindSpec, Layout};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

const LAYOUTS: [Layout; 8] = [
    Layout::Npy,
    Layout::Raw,
    Layout::Fvecs,
    Layout::Bvecs,
    Layout::Ivecs,
    Layout::Fbin,
    Layout::U8bin,
    Layout::I8bin,
];

static FILE: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("vectors");
    (directory, file)
});

fuzz_target!(|input: &[u8]| -> Corpus {
    let Some((&[layout, dim, dtype, header], bytes)) = input.split_first_chunk::<4>() else {
        return Corpus::Reject;
    };
    let (_, path) = &*FILE;
    std::fs::write(path, bytes).unwrap();
    let spec = DatasetSpec {
        name: "v".to_owned(),
        paths: vec![path.clone()],
        kind: KindSpec::Vectors {
            layout: LAYOUTS[usize::from(layout) % LAYOUTS.len()],
            // 255 means more than a vector may have.
            dim: (dim > 0).then_some(if dim == 255 { u32::MAX } else { u32::from(dim) }),
            dtype: Dtype::ALL.get(usize::from(dtype)).copied(),
            header_bytes: if header == 255 {
                u64::MAX
            } else {
                u64::from(header)
            },
        },
        direct_io: DirectIo::Off,
    };
    let dataset = match Dataset::open(&spec) {
        Ok(dataset) => Arc::new(dataset),
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return Corpus::Keep;
        }
    };
    let Kind::Vectors {
        dim,
        dtype,
        vector_bytes,
        stride_bytes,
        base_offset,
        count,
        ..
    } = dataset.kind()
    else {
        panic!("vectors were asked for");
    };
    let length = bytes.len() as u64;
    assert!(count > 0 && vector_bytes > 0 && vector_bytes == dim * dtype.bytes());
    assert!(stride_bytes >= u64::from(vector_bytes));
    let end =
        u128::from(base_offset) + u128::from(count - 1) * u128::from(stride_bytes) + u128::from(vector_bytes);
    assert_eq!(end, u128::from(length), "{dataset:?}");
    let errors_of = |id| {
        let mut batch = Batch::new(Arc::clone(&dataset), 1);
        batch.push_vector(id);
        batch.errors().len()
    };
    assert_eq!([0, count - 1, count, u64::MAX].map(errors_of), [0, 0, 1, 1]);
    Corpus::Keep
});
