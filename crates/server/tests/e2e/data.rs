//! Files to serve, and the expected bytes of each of their items: computed from the bytes written, by the
//! formats' definitions, without the engine's arithmetic.

use crate::daemon::Setup;

/// Bytes that depend only on the seed, and differ for different seeds (splitmix64, Steele et al. 2014).
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(word ^ (word >> 31)).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// The items of an address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    Blocks,
    /// Vectors of this many elements of this type.
    Vectors(u32, &'static str),
}

/// A dataset of blocks or vectors.
#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) name: &'static str,
    pub(crate) unit: Unit,
    /// Every block or vector.
    pub(crate) items: Vec<Vec<u8>>,
    /// The address space, which ranges refer to.
    pub(crate) bytes: Vec<u8>,
}

/// One dataset of every kind and layout, and a dataset `objects`.
#[derive(Debug)]
pub(crate) struct Everything {
    pub(crate) spaces: Vec<Space>,
    /// (name, content).
    pub(crate) objects: Vec<(&'static str, Vec<u8>)>,
}

fn pieces(bytes: &[u8], length: usize) -> Vec<Vec<u8>> {
    bytes.chunks_exact(length).map(<[u8]>::to_vec).collect()
}

/// `numpy.save` of a two-dimensional array, as NumPy 2 writes it.
pub(crate) fn npy(descr: &str, rows: usize, columns: usize, data: &[u8]) -> Vec<u8> {
    let mut dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    // Magic, version and length are 10 bytes; the header ends in a line break at a multiple of 64.
    while (10 + dict.len() + 1) % 64 != 0 {
        dict.push(' ');
    }
    dict.push('\n');
    let length = u16::try_from(dict.len()).expect("a short header").to_le_bytes();
    [b"\x93NUMPY\x01\x00", &length[..], dict.as_bytes(), data].concat()
}

/// `.fvecs` and the like: each vector after its dimension.
fn records(dim: u32, vectors: &[Vec<u8>]) -> Vec<u8> {
    let head = dim.to_le_bytes();
    vectors
        .iter()
        .flat_map(|vector| [&head[..], vector].concat())
        .collect()
}

/// `.fbin` and the like: count, dimension, elements.
pub(crate) fn counted(count: u32, dim: u32, data: &[u8]) -> Vec<u8> {
    [&count.to_le_bytes()[..], &dim.to_le_bytes(), data].concat()
}

fn width(dtype: &str) -> usize {
    match dtype {
        "f32" | "i32" => 4,
        "f16" | "bf16" => 2,
        "f64" => 8,
        "u8" | "i8" => 1,
        other => panic!("{other}"),
    }
}

/// Writes everything into the setup's directory and adds the datasets.
pub(crate) fn everything(setup: Setup) -> (Setup, Everything) {
    let mut spaces = Vec::new();
    let blocks = |name, bytes: Vec<u8>, length| Space {
        name,
        unit: Unit::Blocks,
        items: pieces(&bytes, length),
        bytes,
    };

    // Three files whose boundaries lie inside blocks and are unaligned; block lengths that divide no sector.
    let joined = noise(1, 63_000);
    setup.file("a.bin", &joined[..40_001]);
    setup.file("b.bin", &joined[40_001..40_008]);
    setup.file("c.bin", &joined[40_008..]);
    let mut setup =
        setup.dataset(&["{name: joined, kind: blocks, block_bytes: 3000, paths: [a.bin, b.bin, c.bin]}"]);
    spaces.push(blocks("joined", joined, 3000));

    // Whole blocks, then 1234 bytes that are not served.
    let tailed = noise(2, 40 * 4096 + 1234);
    setup.file("tailed.bin", &tailed);
    setup = setup.dataset(&[
        "{name: tailed, kind: blocks, block_bytes: 4KiB, path: tailed.bin, partial_tail: ignore}",
    ]);
    spaces.push(blocks("tailed", tailed[..40 * 4096].to_vec(), 4096));

    // A last block with an unaligned end: it must be readable all the same.
    let ragged = noise(3, 17 * 1111);
    setup.file("ragged.bin", &ragged);
    setup = setup.dataset(&["{name: ragged, kind: blocks, block_bytes: 1111, path: ragged.bin}"]);
    spaces.push(blocks("ragged", ragged, 1111));

    let layouts: [(&'static str, &'static str, u32, &'static str, &[&str]); 12] = [
        ("fvecs", "v.fvecs", 3, "f32", &[]),
        ("bvecs", "v.bvecs", 130, "u8", &[]),
        ("ivecs", "v.ivecs", 7, "i32", &[]),
        ("npy-f32", "f32.npy", 100, "f32", &[]),
        ("npy-f16", "f16.npy", 33, "f16", &["dtype: f16", "dim: 33"]),
        ("npy-f64", "f64.npy", 9, "f64", &[]),
        ("npy-bf16", "bf16.npy", 34, "bf16", &["dtype: bf16"]),
        ("fbin", "v.fbin", 129, "f32", &["dim: 129"]),
        ("u8bin", "v.u8bin", 1025, "u8", &[]),
        ("i8bin", "v.i8bin", 1, "i8", &[]),
        (
            "raw",
            "v.dat",
            5,
            "f16",
            &["layout: raw", "dim: 5", "dtype: f16", "header_bytes: 7"],
        ),
        (
            "raw-bf16",
            "bf16.dat",
            6,
            "bf16",
            &["layout: raw", "dim: 6", "dtype: bf16"],
        ),
    ];
    for (seed, (name, file, dim, dtype, lines)) in (10..).zip(layouts) {
        const COUNT: u32 = 61;
        let length = dim as usize * width(dtype);
        let data = noise(seed, COUNT as usize * length);
        let items = pieces(&data, length);
        let bytes = match name {
            "fvecs" | "bvecs" | "ivecs" => records(dim, &items),
            "npy-f32" => npy("<f4", COUNT as usize, dim as usize, &data),
            "npy-f16" => npy("<f2", COUNT as usize, dim as usize, &data),
            "npy-f64" => npy("<f8", COUNT as usize, dim as usize, &data),
            "npy-bf16" => npy("<V2", COUNT as usize, dim as usize, &data),
            "raw-bf16" => data,
            "raw" => [&noise(99, 7), &data[..]].concat(),
            _ => counted(COUNT, dim, &data),
        };
        setup.file(file, &bytes);
        let (name_line, path_line) = (format!("name: {name}"), format!("path: {file}"));
        setup = setup.dataset(&[&[&name_line[..], "kind: vectors", &path_line], lines].concat());
        spaces.push(Space {
            name,
            unit: Unit::Vectors(dim, dtype),
            items,
            bytes,
        });
    }

    let objects = vec![
        ("one", noise(20, 1)),
        ("empty", Vec::new()),
        ("large.bin", noise(21, (3 << 20) + 17)),
        ("nested/deeper/block", noise(22, 4096)),
        ("with space/100%/a+b?c#d&e=f;g", noise(23, 513)),
        ("%2e%2e/not-escaped", noise(24, 100)),
        ("\u{fc}n\u{ef}c\u{f6}de/\u{96ea}/\u{1f980}", noise(25, 5000)),
        (".hidden", noise(26, 3)),
    ];
    for (name, content) in &objects {
        setup.file(&format!("objects/{name}"), content);
    }
    // A file that must not be reachable.
    setup.file("secret", b"secret");
    std::os::unix::fs::symlink("../secret", setup.path("objects/leaves")).expect("a link");
    std::os::unix::fs::symlink("one", setup.path("objects/stays")).expect("a link");
    let setup = setup.dataset(&["{name: objects, kind: objects, path: objects, revalidate_ms: 50}"]);
    (setup, Everything { spaces, objects })
}

/// A dataset `blocks` of `count` blocks of 4 KiB, and its bytes.
pub(crate) fn plain_blocks(setup: Setup, count: usize) -> (Setup, Vec<u8>) {
    let bytes = noise(7, count * 4096);
    setup.file("blocks.bin", &bytes);
    let setup = setup.dataset(&["{name: blocks, kind: blocks, block_bytes: 4KiB, path: blocks.bin}"]);
    (setup, bytes)
}
