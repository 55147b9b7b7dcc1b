//! Arguments that are wrong, as text that no terminal obeys.

use crate::table::printable_lines;
use clap::Error;
use clap::error::ErrorKind;
use std::io::{self, Write as _};

/// Ends the process as [`Error::exit`] does, but with 1 if the help cannot be written. A mistake is printed without colours,
/// and with control characters of the arguments escaped or left out.
pub fn exit(program: &str, error: &Error) -> ! {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        error.exit();
    }
    if !error.use_stderr() {
        // clap's own exit ignores failures. A reader that leaves early, such as `head`, has what it wanted.
        match error.print().and_then(|()| io::stdout().flush()) {
            Err(failed) if failed.kind() != io::ErrorKind::BrokenPipe => {
                let _stderr_is_gone = writeln!(io::stderr(), "{program}: stdout: {failed}");
                std::process::exit(1);
            }
            Ok(()) | Err(_) => std::process::exit(error.exit_code()),
        }
    }
    let _stderr_is_gone = io::stderr().write_all(printable_lines(&error.render().to_string()).as_bytes());
    std::process::exit(error.exit_code())
}
