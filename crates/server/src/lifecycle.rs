//! Signals and the drain.
