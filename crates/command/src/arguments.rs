//! Arguments that are wrong, as text that no terminal obeys.

use crate::table::printable_lines;
use clap::Error;
use clap::error::ErrorKind;
use std::env::{args_os, vars_os};
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
    let mut text = error.render().to_string();
    if error.kind() == ErrorKind::InvalidUtf8
        && let Some((first, rest)) = text.split_once('\n')
    {
        // clap names none. Those that are paths may be so.
        text = format!("{first}: {}\n{rest}", not_utf8().join(", "));
    }
    let _stderr_is_gone = io::stderr().write_all(printable_lines(&text).as_bytes());
    std::process::exit(error.exit_code())
}

/// The arguments of this process that are not UTF-8, and the variables in place of some.
fn not_utf8() -> Vec<String> {
    let arguments = args_os().enumerate().skip(1);
    let arguments = arguments.filter(|(_, argument)| argument.to_str().is_none());
    let arguments = arguments.map(|(n, argument)| format!("argument {n} ({argument:?})"));
    let variables = vars_os().filter(|(_, value)| value.to_str().is_none());
    let variables = variables.filter_map(|(name, _)| name.into_string().ok());
    let variables = variables.filter(|name| name.starts_with("RINGFETCH_"));
    arguments.chain(variables).collect()
}
