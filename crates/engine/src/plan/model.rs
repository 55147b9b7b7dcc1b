//! Executes a plan on byte arrays as a device would: the model for tests and fuzzing.
#![expect(
    clippy::cast_possible_truncation,
    reason = "the files of a model are a few kilobytes"
)]

use super::{Place, Plan};

/// The response's bytes after each read's place is filled from its file, up to the end of the file.
///
/// # Panics
/// The plan breaks a rule that devices or the shard rely on.
pub(crate) fn execute(plan: &Plan, files: &[&[u8]]) -> Vec<u8> {
    let mut data = vec![0xEE; plan.data_bytes as usize];
    let mut scratch = vec![0xDD; plan.scratch_bytes as usize];
    let mut written = vec![false; data.len()];
    for read in &plan.reads {
        let file = files[read.file as usize];
        let (from, length) = (read.offset as usize, read.length as usize);
        assert_eq!(
            read.offset % u64::from(read.alignment),
            0,
            "offset off its alignment"
        );
        assert_eq!(read.length % read.alignment, 0, "length off its alignment");
        assert!(read.needed <= read.length && from + read.needed as usize <= file.len());
        let arrives = &file[from..file.len().min(from + length)];
        match read.place {
            Place::Data(place) => {
                let place = place as usize;
                assert_eq!(place % read.alignment as usize, 0, "memory off its alignment");
                for taken in &mut written[place..place + length] {
                    assert!(!*taken, "two in-place reads overlap");
                    *taken = true;
                }
                data[place..place + arrives.len()].copy_from_slice(arrives);
            }
            Place::Scratch(place) => {
                let place = place as usize;
                scratch[place..place + arrives.len()].copy_from_slice(arrives);
            }
        }
    }
    for read in &plan.reads {
        for piece in &plan.pieces[read.first_piece as usize..(read.first_piece + read.pieces) as usize] {
            assert!(
                piece.source + piece.length <= read.needed,
                "a piece reaches past what is needed"
            );
            let (target, length) = (piece.target as usize, piece.length as usize);
            match read.place {
                Place::Data(place) => {
                    let source = (place + piece.source) as usize;
                    data.copy_within(source..source + length, target);
                }
                Place::Scratch(place) => {
                    let source = (place + piece.source) as usize;
                    data[target..target + length].copy_from_slice(&scratch[source..source + length]);
                }
            }
        }
    }
    data
}
