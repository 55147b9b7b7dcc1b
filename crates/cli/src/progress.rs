//! Progress on stderr; nothing if stderr is not a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that counts bytes, with rate and time left.
pub(crate) fn bytes(total: u64) -> ProgressBar {
    bar(
        total,
        "{bar:30} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left",
    )
}

/// A bar that counts items.
pub(crate) fn items(total: u64, what: &str) -> ProgressBar {
    bar(
        total,
        &format!("{{bar:30}} {{human_pos}}/{{human_len}} {what}  {{per_sec}}  {{eta}} left"),
    )
}

/// A line that shows a message.
pub(crate) fn line() -> ProgressBar {
    bar(0, "{wide_msg}")
}

fn bar(total: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::new(total);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
