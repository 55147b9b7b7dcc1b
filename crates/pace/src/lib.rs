//! A load, independent of its transport: when its requests start (`pacer`, along a `schedule`, woken by an
//! `alarm`), and what a recorded load reads (`trace`).
#![forbid(unsafe_code)]

mod alarm;
mod pacer;
mod schedule;
pub mod trace;

pub use alarm::Alarm;
pub use pacer::{Gate, Pacer, Permit, per_second};
pub use schedule::{Arrivals, Ramp};

/// A count as a float, for rates.
#[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a rate")]
fn approximate(count: u64) -> f64 {
    count as f64
}
