//! Vector files of every layout: the shape that is found, and the error for each bad file.

use super::*;

/// A vector file with these bytes and this layout, nothing else configured: refused.
#[track_caller]
fn refused_vectors(layout: Layout, bytes: &[u8], field: &str, parts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "vectors", bytes);
    refused(&spec(&[&path], vectors(layout, None, None, 0)), field, parts);
}

/// A .npy file of `count` vectors of 3 f32.
fn write_npy(path: &Path, count: u64) {
    // `ringfetch_pattern` links another build of this crate, whose types differ from `crate`'s.
    use ringfetch_engine::dataset::{Dtype, Layout};
    ringfetch_pattern::write_vectors(path, 1, Layout::Npy, Dtype::F32, 3, count, &mut |_| true).unwrap();
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Raw vectors: shape from the configuration, checked against the length; several files without headers.
#[test]
fn raw_vectors() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "raw", &[0; 1000]);
    let raw = |dim, dtype, header| vectors(Layout::Raw, dim, dtype, header);
    let (dim, f16, f32) = (Some(48), Some(Dtype::F16), Some(Dtype::F32));
    let expected = Kind::Vectors {
        layout: Layout::Raw,
        dim: 48,
        dtype: Dtype::F16,
        vector_bytes: 96,
        stride_bytes: 96,
        base_offset: 40,
        count: 10,
    };
    assert_eq!(
        Dataset::open(&spec(&[&path], raw(dim, f16, 40))).unwrap().kind(),
        expected
    );
    refused(&spec(&[&path], raw(None, f16, 40)), "dim", &["is missing", "raw"]);
    refused(
        &spec(&[&path], raw(dim, None, 40)),
        "dtype",
        &["is missing", "raw"],
    );
    refused(
        &spec(&[&path], raw(Some(50), f32, 40)),
        "dim",
        &["not a multiple of 200", "correct dim, dtype or header_bytes"],
    );
    let long = file(&dir, "long", &vec![0; DIM_MAX as usize]);
    let longest = spec(&[&long], raw(Some(DIM_MAX), Some(Dtype::U8), 0));
    assert_eq!(Dataset::open(&longest).unwrap().count(), 1);
    refused(
        &spec(&[&path], raw(Some(0), f32, 0)),
        "dim",
        &["is 0", "1 to 1048576"],
    );
    refused(
        &spec(&[&path], raw(Some(DIM_MAX + 1), f32, 0)),
        "dim",
        &["1 to 1048576"],
    );
    refused(
        &spec(&[&path], raw(dim, f16, 1001)),
        "header_bytes",
        &["do not fit", "smaller"],
    );
    refused(
        &spec(&[&path], raw(dim, f16, 1000)),
        "path",
        &["holds no vectors"],
    );
    let second = file(&dir, "second", &[0; 152]);
    let joined = Dataset::open(&spec(&[&path, &second], raw(dim, f16, 0))).unwrap();
    assert_eq!((joined.count(), joined.length_bytes()), (12, 1152));
    refused(
        &spec(&[&path, &second], raw(dim, f16, 40)),
        "header_bytes",
        &["set header_bytes: 0"],
    );
}

/// A dim or dtype in the configuration that contradicts the file: the error has both values and the remedy.
#[test]
fn contradictions() {
    let dir = tempfile::tempdir().unwrap();
    let fvecs = file(&dir, "a.fvecs", &words(&[2, 0, 0, 2, 0, 0]));
    let fbin = file(&dir, "a.fbin", &words(&[2, 1, 0, 0]));
    let npy = dir.path().join("a.npy");
    write_npy(&npy, 2);
    let told = |path: &Path, layout, dim, dtype| spec(&[path], vectors(layout, dim, dtype, 0));
    assert_eq!(
        Dataset::open(&told(&fvecs, Layout::Fvecs, Some(2), Some(Dtype::F32)))
            .unwrap()
            .count(),
        2
    );
    let parts = ["is 128", "says 2", "set dim: 2, or leave it out"];
    refused(&told(&fvecs, Layout::Fvecs, Some(128), None), "dim", &parts);
    let parts = ["is f16", "fbin", "holds f32", "set dtype: f32, or leave it out"];
    refused(
        &told(&fbin, Layout::Fbin, None, Some(Dtype::F16)),
        "dtype",
        &parts,
    );
    refused(
        &told(&fbin, Layout::Fbin, Some(7), None),
        "dim",
        &["is 7", "says 1"],
    );
    refused(
        &told(&npy, Layout::Npy, Some(4), None),
        "dim",
        &["is 4", "says 3"],
    );
    refused(
        &told(&npy, Layout::Npy, None, Some(Dtype::U8)),
        "dtype",
        &["is u8", "holds f32"],
    );
    refused(
        &spec(&[&fbin], vectors(Layout::Fbin, None, None, 8)),
        "header_bytes",
        &["layout raw", "leave it out"],
    );
    for (path, layout, name) in [(&fbin, Layout::Fbin, "fbin"), (&fvecs, Layout::Fvecs, "fvecs")] {
        refused(
            &spec(&[path, path], vectors(layout, None, None, 0)),
            "path",
            &["2 files", "only layout raw", &format!("{name} is one file")],
        );
    }
}

/// Records with a dimension each: cut off, not a multiple, a different dimension at the end, absurd
/// dimensions.
#[test]
fn bad_records() {
    refused_vectors(
        Layout::Fvecs,
        &[1, 0],
        "path",
        &["has 2 bytes, too few", "cut off"],
    );
    refused_vectors(
        Layout::Fvecs,
        &words(&[2, 0]),
        "path",
        &["not a multiple of 12", "8 bytes remain"],
    );
    refused_vectors(
        Layout::Fvecs,
        &words(&[1, 0, 1, 0, 1]),
        "path",
        &["not a multiple of 8", "after 2 vectors"],
    );
    refused_vectors(
        Layout::Ivecs,
        &words(&[1, 0, 2, 0]),
        "path",
        &["of dimension 1", "has 2 at byte 8", "vector 1"],
    );
    refused_vectors(
        Layout::Fvecs,
        &words(&[u32::MAX, 0]),
        "path",
        &["dimension -1", "1 to 1048576", "fvecs"],
    );
    refused_vectors(Layout::Bvecs, &words(&[0, 0]), "path", &["dimension 0"]);
    refused_vectors(
        Layout::Fvecs,
        &words(&[2_000_000, 0]),
        "path",
        &["dimension 2000000"],
    );
}

/// Records of another dimension among records of `dim`, so placed that the file's length, its first and its last record
/// fit `dim`: `odd` records of `odd_dim` after `before` of `dim`, which `after` follow. No element looks like a dimension.
fn mixed([before, dim]: [usize; 2], [odd, odd_dim]: [usize; 2], after: usize) -> Vec<u8> {
    let record = |dim: usize| {
        let dimension = u32::try_from(dim).unwrap();
        [vec![dimension], vec![1.5_f32.to_bits(); dim]].concat()
    };
    let records = |count, dim| record(dim).repeat(count);
    words(&[records(before, dim), records(odd, odd_dim), records(after, dim)].concat())
}

/// A file of mixed dimensions whose length and ends fit one of them: refused, wherever the others lie. Records of 2 + 1
/// words take the place of one of 5 + 1. In a file of up to 64 records each is checked, in a longer one 64, so that no run
/// of a 63rd of the file is missed.
#[test]
fn mixed_dimensions() {
    let parts = ["begins with a vector of dimension 5", "same"];
    for before in 1..63 {
        let bytes = mixed([before, 5], [2, 2], 63 - before);
        refused_vectors(Layout::Fvecs, &bytes, "path", &parts);
    }
    let run = 1000_usize.div_ceil(63);
    for before in (1..1000 - run).step_by(7) {
        let bytes = mixed([before, 5], [2 * run, 2], 1000 - run - before);
        refused_vectors(Layout::Ivecs, &bytes, "path", &parts);
    }
    for count in [1, 2, 63, 64, 65, 127, 1000] {
        let dir = tempfile::tempdir().unwrap();
        let path = file(&dir, "same", &mixed([count, 5], [0, 2], 0));
        let opened = Dataset::open(&spec(&[&path], vectors(Layout::Fvecs, None, None, 0))).unwrap();
        assert_eq!(opened.count(), count as u64);
    }
}

/// Files with a count: cut off, too long, empty, absurd; the size is checked to the byte.
#[test]
fn bad_counts() {
    refused_vectors(
        Layout::Fbin,
        &[1, 0, 0, 0, 1],
        "path",
        &["has 5 bytes, too few", "fbin"],
    );
    refused_vectors(
        Layout::Fbin,
        &words(&[2, 1, 0]),
        "path",
        &["has 12 bytes", "wants 16", "cut off"],
    );
    refused_vectors(
        Layout::Fbin,
        &words(&[1, 1, 0, 0]),
        "path",
        &["has 16 bytes", "wants 12"],
    );
    refused_vectors(
        Layout::U8bin,
        &words(&[0, 4]),
        "path",
        &["holds no vectors", "write some"],
    );
    refused_vectors(Layout::I8bin, &words(&[4, 0]), "path", &["dimension 0"]);
    refused_vectors(
        Layout::Fbin,
        &words(&[u32::MAX, 1 << 20, 0]),
        "path",
        &["wants 18014398505287688"],
    );
    refused_vectors(
        Layout::Fbin,
        &words(&[1, u32::MAX]),
        "path",
        &["dimension 4294967295"],
    );
}

/// `.npy` files: cut off in the header and in the data, not two-dimensional, with types and shapes that are
/// not served.
#[test]
fn bad_npy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.npy");
    write_npy(&path, 2);
    let good = std::fs::read(&path).unwrap();
    for cut in [1, 5, 9, 11, 60, 127] {
        refused_vectors(
            Layout::Npy,
            &good[..cut],
            "path",
            &["truncated", "copy or save the file again"],
        );
    }
    refused_vectors(Layout::Npy, &good[..140], "path", &["has 140 bytes", "wants 152"]);
    refused_vectors(
        Layout::Npy,
        b"PK\x03\x04 an npz is a zip file",
        "path",
        &["magic", "another layout"],
    );
    let with = |from: &str, to: &str| {
        let header = String::from_utf8_lossy(&good[10..128]).replace(from, to);
        let header = &header.as_bytes()[..118.min(header.len())];
        [&good[..10], header, &good[128..]].concat()
    };
    refused_vectors(
        Layout::Npy,
        &with("'<f4'", "'>f4'"),
        "dtype",
        &["vectors: ", "big-endian", "astype('<f4')"],
    );
    refused_vectors(
        Layout::Npy,
        &with("'<f4'", "'<c8'"),
        "dtype",
        &["'<c8'", "are served"],
    );
    refused_vectors(
        Layout::Npy,
        &with("False", "True "),
        "path",
        &["Fortran order", "ascontiguousarray"],
    );
    refused_vectors(
        Layout::Npy,
        &with("(2, 3)", "(6,)  "),
        "path",
        &["1 dimension(s)", "array of two"],
    );
    refused_vectors(Layout::Npy, &with("(2, 3)", "(0, 3)"), "path", &["wants 128"]);
    refused_vectors(Layout::Npy, &with("(2, 3)", "(2, 0)"), "path", &["dimension 0"]);
    refused_vectors(
        Layout::Npy,
        &with("'shape'", "'shope'"),
        "path",
        &["save it again"],
    );
    write_npy(&path, 0);
    refused_vectors(
        Layout::Npy,
        &std::fs::read(&path).unwrap(),
        "path",
        &["holds no vectors"],
    );
}

/// A file that is truncated after its length was read, such as one that is being copied into place again: a file of sysfs
/// has a length of 4096 and fewer bytes. The error does not blame the device.
#[test]
fn a_file_that_becomes_shorter_while_it_is_opened() {
    let ends_early = |path: &PathBuf| std::fs::read(path).is_ok_and(|bytes| bytes.len() < 4);
    let paths = std::fs::read_dir("/sys/kernel").unwrap();
    let mut paths = paths
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file());
    let path = paths.find(ends_early).expect("sysfs must be mounted");
    let kind = vectors(Layout::Fvecs, None, None, 0);
    refused(
        &spec(&[&path], kind),
        "path",
        &["was truncated while it was opened", "rename it into place"],
    );
}
