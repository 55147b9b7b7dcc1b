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

/// Which quantile of the requests that were sent is this quantile of all arrivals: those that were missed, never sent, count
/// as slower than all others. Above 1: it is among those. In percent, if it is given in percent.
///
/// Worked: with 500 missed, the median of 1500 is the quantile 0.75 of the 1000 that were sent.
pub fn quantile_of_sent(quantile: f64, sent: u64, missed: u64) -> f64 {
    // Errors of rounding reach no next rank: half of 30 would be more than the 15th of the 29 that were sent.
    quantile * approximate(sent.saturating_add(missed)) / approximate(sent) * (1.0 - 4.0 * f64::EPSILON)
}

/// A count as a float, for rates.
#[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a rate")]
fn approximate(count: u64) -> f64 {
    count as f64
}
