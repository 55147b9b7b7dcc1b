//! The stream against its published values and against itself at other offsets; files against the stream.

use super::*;
use proptest::prelude::*;
use ringfetch_engine::config::DirectIo;
use ringfetch_engine::dataset::{Dataset, DatasetSpec, Kind, KindSpec, Layout};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// The first outputs for seed 1234567, as the reference implementation prints them
/// (<https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64>).
#[test]
fn known_values_of_splitmix64() {
    let expected = [
        6_457_827_717_110_365_317,
        3_203_168_211_198_807_973,
        9_817_491_932_198_370_423,
        4_593_380_528_125_082_431,
        16_408_922_859_458_223_821,
    ];
    let mut bytes = [0u8; 40];
    fill(1_234_567, 0, &mut bytes);
    let words: Vec<u64> = bytes
        .chunks(8)
        .map(|chunk| u64::from_le_bytes(chunk.try_into().unwrap()))
        .collect();
    assert_eq!(words, expected);
}

/// Existing data sets depend on these values: a change here makes all of them unverifiable.
#[test]
fn pinned_values() {
    assert_eq!(object_name(0), "shard-00/object-000000");
    assert_eq!(object_name(199), "shard-01/object-000199");
    assert_eq!(object_name(1_234_567), "shard-12345/object-1234567");
    // Computed independently of this code (Python integers and doubles).
    assert_eq!(object_seed(42, "shard-00/object-000002"), 30_320_495_747_210_147);
    assert_eq!(
        [2, 3, 4, 5].map(|index| object_length(42, index, 100, 1_000_000)),
        [1301, 2381, 141, 297_106]
    );
    let mut floats = [0u8; 8];
    fill_elements(42, Dtype::F32, 0, &mut floats);
    assert_eq!(floats[..4], 0.483_129_74_f32.to_le_bytes());
    assert_eq!(floats[4..], (-0.680_179_24_f32).to_le_bytes());
    assert_eq!([object_length(7, 0, 10, 20), object_length(7, 1, 10, 20)], [0, 1]);
}

/// Lengths stay within their bounds, come close to both ends, and half of them lie below the geometric mean.
#[test]
fn lengths_are_log_uniform() {
    let lengths: Vec<u64> = (2..4002)
        .map(|index| object_length(42, index, 100, 1_000_000))
        .collect();
    assert!(lengths.iter().all(|length| (100..=1_000_000).contains(length)));
    let below = lengths.iter().filter(|&&length| length < 10_000).count();
    assert!(
        (1800..2200).contains(&below),
        "{below} of 4000 below the geometric mean"
    );
    assert!(lengths.iter().min().unwrap() < &110 && lengths.iter().max().unwrap() > &900_000);
    for (min, max) in [(0, 0), (5, 1), (1, u64::MAX), (u64::MAX, u64::MAX), (3, 3)] {
        let length = object_length(1, 2, min, max);
        assert!(
            length >= min.max(1) && length <= max.max(min).max(1),
            "{min}..={max}: {length}"
        );
    }
}

/// Elements of every type: floats finite and in [-1, 1), i32 not negative, bytes the stream's own.
#[test]
fn elements_are_in_range() {
    let mut bytes = vec![0u8; 40_000];
    fill_elements(3, Dtype::F32, 0, &mut bytes);
    let floats: Vec<f32> = bytes
        .chunks(4)
        .map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap()))
        .collect();
    assert!(floats.iter().all(|value| (-1.0..1.0).contains(value)));
    assert!(floats.iter().any(|&value| value < -0.99) && floats.iter().any(|&value| value > 0.99));
    fill_elements(3, Dtype::F16, 0, &mut bytes);
    let halves = bytes
        .chunks(2)
        .map(|chunk| half::f16::from_le_bytes(chunk.try_into().unwrap()));
    assert!(halves.map(f32::from).all(|value| (-1.0..1.0).contains(&value)));
    fill_elements(3, Dtype::I32, 0, &mut bytes);
    let mut integers = bytes
        .chunks(4)
        .map(|chunk| i32::from_le_bytes(chunk.try_into().unwrap()));
    assert!(integers.all(|value| value >= 0));
    fill_elements(3, Dtype::I8, 5, &mut bytes);
    assert_eq!(first_difference(3, 5, &bytes), None);
    assert_eq!((f32_of(0), f32_of(u64::MAX)), (-1.0, 1.0 - f32::powi(2.0, -23)));
    assert_eq!(f16_of(u64::MAX).to_f32(), 1.0 - 1.0 / 1024.0);
    assert_eq!(
        (bf16_of(0).to_f32(), bf16_of(u64::MAX).to_f32()),
        (-1.0, 1.0 - 1.0 / 128.0)
    );
    assert_eq!((f64_of(0), f64_of(u64::MAX)), (-1.0, 1.0 - f64::powi(2.0, -52)));
}

proptest! {
    /// Any slice filled at its offset equals that slice of the whole; the same for elements of every type.
    #[test]
    fn slices_of_the_whole(seed: u64, offset in 0usize..3000, length in 0usize..3000) {
        let mut whole = vec![0u8; 6000];
        fill(seed, 0, &mut whole);
        let mut part = vec![0u8; length];
        fill(seed, offset as u64, &mut part);
        prop_assert_eq!(&part[..], &whole[offset..offset + length]);
        prop_assert_eq!(first_difference(seed, offset as u64, &part), None);
        for dtype in Dtype::ALL {
            let size = dtype.bytes() as usize;
            fill_elements(seed, dtype, 0, &mut whole);
            fill_elements(seed, dtype, (offset / size) as u64, &mut part);
            let start = offset / size * size;
            prop_assert_eq!(&part[..], &whole[start..start + length]);
        }
    }

    /// Offsets up to the largest do not panic; one changed byte is found at its position.
    #[test]
    fn a_spoilt_byte_is_found(seed: u64, offset: u64, length in 1usize..20_000, at: prop::sample::Index) {
        let mut data = vec![0u8; length];
        fill(seed, offset, &mut data);
        let at = at.index(length);
        data[at] ^= 1;
        prop_assert_eq!(first_difference(seed, offset, &data), Some(at));
    }
}

fn go_on(_: u64) -> bool {
    true
}

fn open(path: &Path, layout: Layout, dim: Option<u32>, dtype: Option<Dtype>) -> Dataset {
    let kind = KindSpec::Vectors {
        layout,
        dim,
        dtype,
        header_bytes: 0,
    };
    Dataset::open(&DatasetSpec::new("made", path, kind, DirectIo::Preferred)).unwrap()
}

/// Every layout and element type: a written file opens with the right shape, configured or not, and every
/// vector is where the shape says. 1000 vectors of 301 elements span several chunks of the writer.
#[test]
fn every_layout_opens_as_written() {
    let dir = tempfile::tempdir().unwrap();
    let all = Dtype::ALL;
    let mut cases: Vec<(Layout, Dtype)> = [Layout::Raw, Layout::Npy]
        .into_iter()
        .flat_map(|layout| all.map(|dtype| (layout, dtype)))
        .collect();
    cases.extend(
        Layout::ALL
            .iter()
            .filter_map(|layout| Some((*layout, layout.fixed_dtype()?))),
    );
    let (wanted_dim, wanted_count) = (301u32, 1000u64);
    for (layout, wanted_dtype) in cases {
        let path = dir.path().join(format!("{layout}.{wanted_dtype}"));
        let mut seen = Vec::new();
        write_vectors(
            &path,
            9,
            layout,
            wanted_dtype,
            wanted_dim,
            wanted_count,
            &mut |bytes| {
                seen.push(bytes);
                true
            },
        )
        .unwrap();
        let data = std::fs::read(&path).unwrap();
        assert_eq!(seen.last(), Some(&(data.len() as u64)));
        assert!(seen.is_sorted());
        let told = open(&path, layout, Some(wanted_dim), Some(wanted_dtype));
        // NumPy has no name for bfloat16.
        if layout != Layout::Raw && (layout, wanted_dtype) != (Layout::Npy, Dtype::Bf16) {
            assert_eq!(open(&path, layout, None, None).kind(), told.kind());
        }
        let Kind::Vectors {
            dim,
            dtype,
            vector_bytes,
            stride_bytes,
            base_offset,
            count,
            ..
        } = told.kind()
        else {
            panic!("{layout} opened as another kind");
        };
        assert_eq!((dim, dtype, count), (wanted_dim, wanted_dtype, wanted_count));
        assert_eq!(vector_bytes, wanted_dim * wanted_dtype.bytes());
        let mut expected = vec![0u8; vector_bytes as usize];
        for id in 0..count {
            fill_elements(9, dtype, id * u64::from(dim), &mut expected);
            let start = usize::try_from(base_offset + id * stride_bytes).unwrap();
            assert!(
                data[start..start + expected.len()] == expected,
                "{layout} {dtype}: vector {id}"
            );
        }
    }
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        20,
        "no temporary file is left"
    );
}

/// A .npy file as numpy.save writes it, byte by byte: version 1.0, padded with spaces to 128, a newline
/// before the data.
#[test]
fn npy_header_is_numpys() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.npy");
    write_vectors(&path, 1, Layout::Npy, Dtype::F32, 4, 3, &mut go_on).unwrap();
    let data = std::fs::read(path).unwrap();
    let dict = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }";
    assert_eq!(data[..10], *b"\x93NUMPY\x01\x00\x76\x00");
    assert_eq!(data[10..10 + dict.len()], *dict);
    assert!(data[10 + dict.len()..127].iter().all(|&byte| byte == b' '));
    assert_eq!(data[127], b'\n');
    assert_eq!(data.len(), 128 + 48);
    for count in [0, 1, 9_999_999, u64::MAX] {
        assert!(npy_header_length(count).is_multiple_of(64));
    }
}

fn npy_header_length(count: u64) -> usize {
    npy_header(Dtype::I8, 1_000_000, count).len()
}

/// A file of blocks is the stream, also for lengths that are multiples of nothing.
#[test]
fn blocks_are_the_stream() {
    let dir = tempfile::tempdir().unwrap();
    for length in [0u64, 1, 7, 8, 4097, (1 << 20) - 1, 1 << 20, (3 << 20) + 5] {
        let path = dir.path().join("blocks");
        write_blocks(&path, 5, length, &mut go_on).unwrap();
        let data = std::fs::read(&path).unwrap();
        assert_eq!(data.len() as u64, length);
        assert_eq!(first_difference(5, 0, &data), None);
    }
}

/// A stopped run says so, leaves no file of its own, and keeps the file that was there before.
#[test]
fn a_stopped_run_leaves_no_half_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("blocks");
    std::fs::write(&path, b"before").unwrap();
    let mut stop = |written: u64| written < 2 << 20;
    let error = write_blocks(&path, 5, 10 << 20, &mut stop).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::Interrupted);
    let error = write_vectors(&path, 5, Layout::Fvecs, Dtype::F32, 4, 1 << 20, &mut stop).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::Interrupted);
    assert_eq!(std::fs::read(&path).unwrap(), b"before");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn what_killed_runs_left_is_removed_and_nothing_else() {
    // Scenario: partial files of a run that was killed and of one that writes, and other names; then files are written while
    // another thread removes, again and again, what killed runs have left. Expectation: only the first one goes; every file is
    // written.
    let directory = tempfile::tempdir().unwrap();
    let [killed, running, other] =
        [".ringfetch-a.partial", ".ringfetch-b.partial", "x.partial"].map(|name| directory.path().join(name));
    let [_, locked, _] = [&killed, &running, &other].map(|path| std::fs::File::create(path).unwrap());
    locked.try_lock().unwrap();
    remove_partial_files(directory.path());
    assert!(!killed.exists() && running.exists() && other.exists());

    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                remove_partial_files(&directory.path().join("shard-00"));
            }
        });
        // Objects, since each file of blocks waits for the disk.
        let failed =
            (0..20).find_map(|seed| write_objects(directory.path(), seed, 100, 1, 9, &mut go_on).err());
        is_over.store(true, Ordering::Relaxed);
        assert!(failed.is_none(), "{failed:?}");
    });
}

/// The kernel takes no length from 2^63 on for one; it must not fill the disk first.
#[test]
fn a_file_longer_than_any_is_refused_before_a_byte_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks.bin");
    let error = write_blocks(&path, 5, 1 << 63, &mut |_| false).unwrap_err();
    assert_eq!(
        error.raw_os_error(),
        Some(rustix::io::Errno::FBIG.raw_os_error()),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

/// Every object has its name, its length and its own stream; progress counts over all of them.
#[test]
fn objects_have_their_own_streams() {
    let dir = tempfile::tempdir().unwrap();
    let mut seen = Vec::new();
    write_objects(dir.path(), 11, 103, 1, 5000, &mut |bytes| {
        seen.push(bytes);
        true
    })
    .unwrap();
    let mut total = 0;
    for index in 0..103 {
        let name = object_name(index);
        let data = std::fs::read(dir.path().join(&name)).unwrap();
        assert_eq!(data.len() as u64, object_length(11, index, 1, 5000), "{name}");
        assert_eq!(first_difference(object_seed(11, &name), 0, &data), None, "{name}");
        total += data.len() as u64;
    }
    assert!(seen.is_sorted());
    assert_eq!(seen.last(), Some(&total));
    let mut calls = 0;
    let stopped = write_objects(dir.path(), 11, 103, 1, 5000, &mut |_| {
        calls += 1;
        calls < 5
    });
    assert_eq!(stopped.unwrap_err().kind(), std::io::ErrorKind::Interrupted);
}

/// Shapes that a layout cannot represent are refused before a file is created.
#[test]
fn shapes_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("v");
    for (layout, dtype, dim, count) in [
        (Layout::Fbin, Dtype::F16, 4, 4),
        (Layout::Bvecs, Dtype::F32, 4, 4),
        (Layout::Fbin, Dtype::F32, 4, 1 << 32),
        (Layout::Raw, Dtype::F32, u32::MAX, u64::MAX),
        (Layout::Fvecs, Dtype::F32, u32::MAX, 1),
        (Layout::Raw, Dtype::F32, 0, 4),
    ] {
        let error = write_vectors(&path, 1, layout, dtype, dim, count, &mut go_on).unwrap_err();
        assert_eq!(
            error.kind(),
            std::io::ErrorKind::InvalidInput,
            "{layout} {dtype} {dim} {count}"
        );
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
