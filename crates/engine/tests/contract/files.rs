//! Files of all kinds and files that change: objects, a file beyond 4 GiB, truncation, replacement.

use crate::harness::{Answer, Case, Harness, assert_answer, blocks_of, expected, ranges_of};
use crate::named;
use crate::suite::{Test, on_every_variant};
use crate::wait::wait_until;
use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::OBJECT_REVALIDATE_DEFAULT;
use ringfetch_engine::dataset::{Dataset, KindSpec, OpenFile};
use ringfetch_engine::engine::SubmitOptions;
use ringfetch_engine::error::ReadError;
use ringfetch_pattern as pattern;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

struct Objects<'a> {
    harness: &'a Harness,
    dataset: Arc<Dataset>,
}

impl<'a> Objects<'a> {
    fn open(harness: &'a Harness, directory: &Path) -> Self {
        let kind = KindSpec::objects(8, OBJECT_REVALIDATE_DEFAULT);
        let dataset = harness.open(kind, &[directory]);
        Self { harness, dataset }
    }

    fn object(&self, name: &str) -> Arc<OpenFile> {
        let object = self.harness.runtime.block_on(self.dataset.object(name));
        object.unwrap_or_else(|error| panic!("{}: {error}", self.harness.name()))
    }

    /// (object, offset, length) each.
    fn batch(&self, items: &[(&Arc<OpenFile>, u64, Option<u64>)]) -> Batch {
        let mut batch = Batch::new(Arc::clone(&self.dataset), items.len());
        for (object, offset, length) in items {
            batch.push_object(object, *offset, *length);
        }
        batch
    }
}

fn objects_of_every_size(harness: &Harness) {
    // Scenario: an empty object, one of one byte, one of 5 MiB and one in nested folders; whole, together,
    // one twice. Expectation: their bytes; an empty object is an item of no bytes and no error.
    let (_, one) = harness.file("objects/one", 1);
    let (_, large) = harness.file("objects/large", 5 << 20);
    let (_, nested) = harness.file("objects/a/b/c/nested", 70_001);
    harness.file("objects/empty", 0);
    let objects = Objects::open(harness, &harness.directory.path().join("objects"));
    let [empty_file, one_file, large_file, nested_file] =
        ["empty", "one", "large", "a/b/c/nested"].map(|name| objects.object(name));
    let whole = |object| (object, 0, None);
    harness.expect(|| objects.batch(&[whole(&empty_file)]), &[Ok(&[])]);
    harness.expect(|| objects.batch(&[whole(&one_file)]), &[Ok(&one)]);
    harness.expect(|| objects.batch(&[whole(&large_file)]), &[Ok(&large)]);
    harness.expect(
        || {
            objects.batch(&[
                whole(&one_file),
                whole(&nested_file),
                whole(&empty_file),
                whole(&one_file),
                (&nested_file, 0, None),
            ])
        },
        &[Ok(&one), Ok(&nested), Ok(&[]), Ok(&one), Ok(&nested)],
    );
}

fn parts_of_objects(harness: &Harness) {
    // Scenario: parts of objects, from an offset to the end, past the end, of no bytes, of an empty object.
    // Expectation: their bytes, and the errors of ranges against the object's own length.
    let (_, bytes) = harness.file("objects/file", 100_000);
    harness.file("objects/empty", 0);
    let objects = Objects::open(harness, &harness.directory.path().join("objects"));
    let (file, empty) = (objects.object("file"), objects.object("empty"));
    let past = |offset, length, end| Err(ReadError::RangeOutOfRange { offset, length, end });
    harness.expect(
        || {
            objects.batch(&[
                (&file, 777, Some(10_000)),
                (&file, 99_999, None),
                (&file, 100_000, None),
                (&file, 99_999, Some(2)),
                (&file, 100_001, None),
                (&file, 5, Some(0)),
                (&empty, 0, Some(1)),
                (&file, 0, Some(4096)),
            ])
        },
        &[
            Ok(&bytes[777..10_777]),
            Ok(&bytes[99_999..]),
            Ok(&[]),
            past(99_999, 2, 100_000),
            past(100_001, 1, 100_000),
            Err(ReadError::ZeroLength),
            past(0, 1, 0),
            Ok(&bytes[..4096]),
        ],
    );
}

fn more_objects_than_open_files(harness: &Harness) {
    // Scenario: a batch of 60 small objects in a dataset that keeps 8 open. Expectation: all of them, since a
    // read holds its file.
    let files: Vec<_> = (0..60_usize)
        .map(|number| harness.file(&format!("objects/{number}"), number * 411))
        .collect();
    let objects = Objects::open(harness, &harness.directory.path().join("objects"));
    let build = || {
        let opened: Vec<_> = (0..60)
            .map(|number| objects.object(&number.to_string()))
            .collect();
        let items: Vec<_> = opened.iter().map(|object| (object, 0, None)).collect();
        objects.batch(&items)
    };
    let items: Vec<_> = files.iter().map(|(_, bytes)| Ok(bytes.as_slice())).collect();
    harness.expect(build, &items);
}

fn a_file_beyond_4_gib(harness: &Harness) {
    // Scenario: a sparse file of 4 GiB and 10 000 bytes with data around the 4 GiB boundary and at the end; ranges
    // across the boundary, and in a hole. Expectation: the data, and zeros.
    const BOUNDARY: u64 = 1 << 32;
    let path = harness.directory.path().join("sparse");
    let file = File::create(&path).expect("create");
    file.set_len(BOUNDARY + 10_000).expect("extend");
    let mut model = vec![0; 20_000];
    pattern::fill(9, 0, &mut model);
    file.write_all_at(&model, BOUNDARY - 10_000).expect("write");
    let dataset = harness.blocks(1, &[&path]);
    let build = || {
        let mut batch = Batch::new(Arc::clone(&dataset), 5);
        batch.push_range(BOUNDARY - 3, 6);
        batch.push_range(BOUNDARY - 4096, 8192);
        batch.push_range(BOUNDARY + 9_999, 1);
        batch.push_range(1 << 31, 1000);
        batch.push_range(BOUNDARY - 9_999, 19_999);
        batch
    };
    let zeros = [0; 1000];
    harness.expect(
        build,
        &[
            Ok(&model[9_997..10_003]),
            Ok(&model[5_904..14_096]),
            Ok(&model[19_999..]),
            Ok(&zeros),
            Ok(&model[1..]),
        ],
    );
}

/// The expected results for ranges of a file of `length` bytes that was truncated to `end`.
fn after_the_cut<'a>(
    model: &'a [u8],
    end: usize,
    ranges: &[(usize, usize)],
) -> Vec<Result<&'a [u8], ReadError>> {
    let one = |&(offset, length): &(usize, usize)| {
        if offset + length <= end {
            Ok(&model[offset..offset + length])
        } else {
            Err(ReadError::Truncated {
                offset: offset as u64,
                length: length as u64,
            })
        }
    };
    ranges.iter().map(one).collect()
}

fn a_truncated_file(harness: &Harness) {
    // Scenario: a file is read, then truncated at an unaligned offset inside a page. Expectation: bytes
    // before the end are served, up to the last; items that reach past it are Truncated with their own
    // extent, together and alone.
    let (path, model) = harness.file("file", 200_000);
    let dataset = harness.blocks(1, &[&path]);
    harness.expect_ranges(&dataset, &model, &[(0, 200_000)]);
    let end = 50_001;
    harness.truncate(&path, end as u64);
    let ranges = [
        (0, 100),
        (end - 1, 1),
        (end, 1),
        (end - 1, 2),
        (end + 100, 50),
        (40_000, 10_001),
        (40_000, 100_000),
        (150_000, 5_000),
        (49_152, 849),
        (0, 200_000),
    ];
    harness.expect(
        || ranges_of(&dataset, &ranges),
        &after_the_cut(&model, end, &ranges),
    );
    for range in ranges {
        harness.expect(
            || ranges_of(&dataset, &[range]),
            &after_the_cut(&model, end, &[range]),
        );
    }
    harness.truncate(&path, 0);
    harness.expect(
        || ranges_of(&dataset, &[(0, 1)]),
        &after_the_cut(&model, 0, &[(0, 1)]),
    );
}

fn a_truncated_run(harness: &Harness) {
    // Scenario: blocks in file order, which merge into one read, of a file truncated within one of them; in
    // reverse order, with one of them twice. Expectation: the blocks before the end are served, the others
    // are Truncated.
    let (path, model) = harness.file("file", 32 * 4096);
    let dataset = harness.blocks(4096, &[&path]);
    let end = 10 * 4096 + 1000;
    harness.truncate(&path, end as u64);
    let forward: Vec<usize> = (0..32).collect();
    let backward: Vec<usize> = (5..15).rev().chain([9, 10, 9]).collect();
    for blocks in [forward, backward] {
        let ranges: Vec<_> = blocks.iter().map(|block| (block * 4096, 4096)).collect();
        harness.expect(
            || blocks_of(&dataset, &blocks),
            &after_the_cut(&model, end, &ranges),
        );
    }
}

fn one_truncated_file_of_several(harness: &Harness) {
    // Scenario: two files as one address space, the first truncated. Expectation: items in the second are
    // served, items that reach into the lost part are Truncated with their extent in the address space.
    let files = [harness.file("a", 20_000), harness.file("b", 20_000)];
    let dataset = harness.blocks(1, &[&files[0].0, &files[1].0]);
    harness.truncate(&files[0].0, 10_000);
    let model = [files[0].1.as_slice(), &files[1].1].concat();
    let lost = |offset, length| Err(ReadError::Truncated { offset, length });
    harness.expect(
        || {
            ranges_of(
                &dataset,
                &[(19_000, 2000), (20_000, 20_000), (9_000, 1000), (10_000, 1)],
            )
        },
        &[
            lost(19_000, 2000),
            Ok(&model[20_000..]),
            Ok(&model[9_000..10_000]),
            lost(10_000, 1),
        ],
    );
}

fn a_file_cut_while_it_is_read(harness: &Harness) {
    // Scenario: batches continue while the file is truncated. Expectation: no batch fails as a whole, and
    // every item is the file's bytes or Truncated; items before the new end are always served.
    let (path, model) = harness.file("file", 256 * 4096);
    let dataset = harness.blocks(4096, &[&path]);
    let blocks: Vec<usize> = (0..256).step_by(3).collect();
    let end = 100 * 4096 + 77;
    std::thread::scope(|scope| {
        scope.spawn(|| harness.truncate(&path, end as u64));
        for round in 0..10 {
            let answer = harness.fetch_outside(blocks_of(&dataset, &blocks), SubmitOptions::default());
            let answer: Answer = answer.unwrap_or_else(|error| panic!("{}: {error}", harness.name()));
            let items: Vec<Result<&[u8], ReadError>> = blocks
                .iter()
                .enumerate()
                .map(|(item, block)| {
                    let failed = answer.errors.iter().find(|error| error.item as usize == item);
                    assert!(
                        failed.is_none() || (block + 1) * 4096 > end,
                        "{}: {failed:?}",
                        harness.name()
                    );
                    match failed {
                        Some(_) => Err(ReadError::Truncated {
                            offset: *block as u64 * 4096,
                            length: 4096,
                        }),
                        None => Ok(&model[block * 4096..][..4096]),
                    }
                })
                .collect();
            assert_answer(
                &answer,
                &expected(&items),
                &format!("{} round {round}", harness.name()),
            );
        }
    });
}

fn a_replaced_file(harness: &Harness) {
    // Scenario: another file is renamed over the path of an open one. Expectation: the old bytes, from the
    // cache and from the device, as long as the dataset is open.
    let (path, model) = harness.file("file", 100_000);
    let dataset = harness.blocks(1, &[&path]);
    let (other, _) = harness.file("other", 3000);
    std::fs::rename(&other, &path).expect("rename");
    harness.expect_ranges(&dataset, &model, &[(0, 100_000)]);
    harness.expect_ranges(&dataset, &model, &[(5000, 100), (99_000, 1000)]);
}

fn a_file_closed_with_its_last_read(harness: &Harness) {
    // Scenario: the last reference to a dataset is dropped as soon as its batch is submitted. Expectation:
    // the bytes; then the file is closed.
    let (dataset, model) = harness.of_blocks(300_000, 1);
    let watched = Arc::downgrade(&dataset.files()[0]);
    let batch = ranges_of(&dataset, &[(1, 200_000), (250_000, 3)]);
    drop(dataset);
    let answer = harness
        .fetch_outside(batch, SubmitOptions::default())
        .expect("an answer");
    assert_answer(
        &answer,
        &expected(&[Ok(&model[1..200_001]), Ok(&model[250_000..250_003])]),
        harness.name(),
    );
    wait_until(
        || watched.upgrade().is_none(),
        || format!("{}: the file is held", harness.name()),
    );
}

pub(crate) const CASES: &[Case] = named!(
    objects_of_every_size,
    parts_of_objects,
    more_objects_than_open_files,
    a_file_beyond_4_gib,
    a_truncated_file,
    a_truncated_run,
    one_truncated_file_of_several,
    a_file_cut_while_it_is_read,
    a_replaced_file,
    a_file_closed_with_its_last_read,
);

pub(crate) fn tests() -> Vec<Test> {
    on_every_variant("files", CASES)
}
