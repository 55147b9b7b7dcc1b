//! Arguments that are wrong, as text that no terminal obeys.

use crate::table::printable_lines;
use clap::Error;
use clap::error::ErrorKind;
use std::io::{self, Write as _};

/// Ends the process as [`Error::exit`] does. A mistake is printed without colours, and with control characters of the
/// arguments escaped or left out.
pub fn exit(error: &Error) -> ! {
    let is_help = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if is_help || !error.use_stderr() {
        error.exit();
    }
    let _stderr_is_gone = io::stderr().write_all(printable_lines(&error.render().to_string()).as_bytes());
    std::process::exit(error.exit_code())
}
