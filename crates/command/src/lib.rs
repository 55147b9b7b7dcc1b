//! What `ringfetchd` and `ringfetch` share at their command lines: sizes and other quantities as people write them, tables,
//! files of results, manual pages, completions.
#![forbid(unsafe_code)]

pub mod manual;
pub mod part_file;
pub mod quantity;
pub mod size;
pub mod table;
