//! What `ringfetchd` and `ringfetch` share at their command lines: sizes as people write them, manual pages, completions.
#![forbid(unsafe_code)]

pub mod manual;
pub mod size;
