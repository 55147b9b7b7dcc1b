//! Command-line parts shared by `ringfetchd` and `ringfetch`: sizes and other quantities in human notation,
//! tables, wrong arguments, files to read and to write, manual pages, completions, remedies.
#![forbid(unsafe_code)]

pub mod arguments;
pub mod connect;
pub mod input_file;
pub mod manual;
pub mod part_file;
pub mod quantity;
pub mod size;
pub mod table;
