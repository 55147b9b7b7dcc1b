//! The studies: for each its axes, its strategies, and the interpretation of its figures.

pub(crate) mod act;
pub(crate) mod block_size;
pub(crate) mod calibrate;
pub(crate) mod flip;
pub(crate) mod objects;
pub(crate) mod rescore;
pub(crate) mod strategies;
