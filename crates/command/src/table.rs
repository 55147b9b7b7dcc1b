//! Text in aligned columns.

use std::fmt;
use std::io::{self, Write};

/// Rows of cells; each column is as wide as its widest cell.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
    /// Right-aligned columns.
    right: &'static [usize],
}

impl Table {
    /// A table with these columns right-aligned.
    pub fn new(right: &'static [usize]) -> Self {
        Self {
            rows: Vec::new(),
            right,
        }
    }

    /// Appends a row.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let cells = cells.into_iter().map(|cell| printable(&cell.into()));
        self.rows.push(cells.collect());
    }

    /// Writes all rows, a line each.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "{self}")
    }
}

impl fmt::Display for Table {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut widths: Vec<usize> = Vec::new();
        for row in &self.rows {
            widths.resize(widths.len().max(row.len()), 0);
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                line.push_str(&match self.right.contains(&column) {
                    true => format!("{cell:>width$}  "),
                    false => format!("{cell:<width$}  "),
                });
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Escapes control characters: names, paths and what servers send may contain anything, and a terminal would obey it.
pub fn printable(text: &str) -> String {
    let shown = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// [`printable`], for text of several lines.
pub fn printable_lines(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(printable).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        // Scenario: three rows, the middle column right-aligned, one row shorter. Expected: aligned columns
        // two spaces apart, no spaces at line ends.
        let mut table = Table::new(&[1]);
        table.row(["name", "count", "note"]);
        table.row(["é", "1 000", "x"]);
        table.row(["longer", "7"]);
        let want = "name    count  note\né       1 000  x\nlonger      7\n";
        assert_eq!(table.to_string(), want);
    }

    #[test]
    fn a_cell_cannot_control_the_terminal() {
        // Scenario: a cell that clears the screen and begins a line. Expected: its characters, escaped, in one line.
        let mut table = Table::default();
        table.row(["é\u{1b}[2J\n"]);
        assert_eq!(table.to_string(), "é\\u{1b}[2J\\n\n");
    }
}
