//! `ringfetchd`: the composition root.
fn main() {}
