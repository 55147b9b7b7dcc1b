//! The loops that strategies share: blocking threads, one thread with a queue, the engine, a daemon.

pub(crate) mod daemon;
pub(crate) mod engine;
pub(crate) mod queue;
pub(crate) mod threads;
