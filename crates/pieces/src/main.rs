//! The pieces of the path of a read: timed, or run a number of times for `bench/instructions.py`, which counts the instructions
//! of N and of 2 N runs under valgrind.
//!
//!   (nothing)          times every piece
//!   NAME               times the pieces whose name contains it
//!   --list             their names
//!   --exactly NAME N   runs one of them N times and prints nothing
#![forbid(unsafe_code)]

mod engine;
mod harness;
mod transport;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut pieces = engine::pieces()?;
    pieces.extend(transport::pieces());
    harness::main(pieces)
}
