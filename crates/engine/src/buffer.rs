//! Response memory: one aligned arena under one byte budget, and each connection's share of it.

/// A connection's share of the response memory.
#[derive(Debug)]
pub struct Share {}
