//! Text in aligned columns.

use std::io::{self, Write};

/// Rows of cells; each column is as wide as its widest cell.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
    /// Columns whose cells stand at the right.
    right: &'static [usize],
}

impl Table {
    /// A table whose columns of these numbers stand at the right.
    pub fn new(right: &'static [usize]) -> Self {
        Self {
            rows: Vec::new(),
            right,
        }
    }

    /// Appends a row.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// Writes all rows, a line each.
    ///
    /// # Errors
    /// Whatever the writer has.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let width = widths.get(column).copied().unwrap_or(0);
                if self.right.contains(&column) {
                    line.push_str(&format!("{cell:>width$}  "));
                } else {
                    line.push_str(&format!("{cell:<width$}  "));
                }
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        // Scenario: three rows, the middle column at the right, one row shorter.
        // Expected: aligned columns two spaces apart, no spaces at line ends.
        let mut table = Table::new(&[1]);
        table.row(["name", "count", "note"]);
        table.row(["é", "1 000", "x"]);
        table.row(["longer", "7"]);
        let mut out = Vec::new();
        table.write(&mut out).unwrap();
        let want = "name    count  note\né       1 000  x\nlonger      7\n";
        assert_eq!(String::from_utf8(out).unwrap(), want);
    }
}
