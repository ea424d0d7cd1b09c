//! Columns as wide as their widest cell.

use std::io::{self, Write};

use crate::text::{Paint, Tone, on_one_line};

/// Between two columns.
const GAP: &str = "  ";

/// A heading, and which edge its cells keep to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    heading: String,
    is_number: bool,
}

impl Column {
    /// Words: kept to the left.
    pub fn left(heading: &str) -> Self {
        Self { heading: on_one_line(heading), is_number: false }
    }

    /// Numbers: kept to the right.
    pub fn right(heading: &str) -> Self {
        Self { heading: on_one_line(heading), is_number: true }
    }
}

/// A piece of text in a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    text: String,
    tone: Option<Tone>,
}

impl Cell {
    pub fn new(text: impl ToString) -> Self {
        Self { text: on_one_line(&text.to_string()), tone: None }
    }

    #[must_use]
    pub fn tone(self, tone: Tone) -> Self {
        Self { tone: Some(tone), ..self }
    }
}

impl<T: ToString> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(text)
    }
}

/// Rows under headings, written all at once.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    pub fn new(columns: impl IntoIterator<Item = Column>) -> Self {
        Self { columns: columns.into_iter().collect(), rows: Vec::new() }
    }

    /// Cells that are missing stay empty.
    ///
    /// # Panics
    /// If there are more cells than columns.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let cells: Vec<Cell> = cells.into_iter().collect();
        assert!(cells.len() <= self.columns.len(), "a row of {} cells, {} columns", cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    /// The heading and every row, each line after `indent`. No line ends in spaces.
    pub fn write(&self, writer: &mut impl Write, paint: Paint, indent: &str) -> io::Result<()> {
        let headings = self.columns.iter().map(|column| Cell::new(&column.heading).tone(Tone::Faint)).collect();
        let lines: Vec<&Vec<Cell>> = std::iter::once(&headings).chain(&self.rows).collect();
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|column| lines.iter().filter_map(|line| line.get(column)).map(width).max().unwrap_or(0))
            .collect();
        for line in &lines {
            let mut text = String::from(indent);
            let mut owed = String::new();
            for ((cell, column), wide) in line.iter().zip(&self.columns).zip(&widths) {
                let fill = " ".repeat(wide - width(cell));
                let shown = cell.tone.map_or_else(|| cell.text.clone(), |tone| paint.tone(tone, &cell.text));
                // Spaces are written once something follows them.
                let (before, after) = if column.is_number { (fill.as_str(), "") } else { ("", fill.as_str()) };
                owed.push_str(before);
                if !cell.text.is_empty() {
                    text.push_str(&owed);
                    text.push_str(&shown);
                    owed.clear();
                }
                owed.push_str(after);
                owed.push_str(GAP);
            }
            writeln!(writer, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

fn width(cell: &Cell) -> usize {
    cell.text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(table: &Table, paint: Paint) -> String {
        let mut bytes = Vec::new();
        table.write(&mut bytes, paint, "  ").unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn words_keep_to_the_left_and_numbers_to_the_right() {
        let mut table = Table::new([Column::left("ACTOR"), Column::right("N"), Column::left("NOTE")]);
        table.row(["ärger-1".into(), 5.into(), "x".into()]);
        table.row(["a".into(), 1234.into(), "".into()]);
        table.row(["a".into()]);
        let expected = "  ACTOR       N  NOTE\n  ärger-1     5  x\n  a        1234\n  a\n";
        assert_eq!(shown(&table, Paint(false)), expected);
    }

    #[test]
    fn colour_adds_nothing_to_the_width() {
        let mut table = Table::new([Column::left("A"), Column::right("B")]);
        table.row([Cell::new("lost").tone(Tone::Bad), Cell::new(1)]);
        let plain = shown(&table, Paint(true)).replace("\x1b[0m", "").replace("\x1b[31m", "").replace("\x1b[2m", "");
        assert_eq!(plain, shown(&table, Paint(false)));
        assert!(shown(&table, Paint(true)).contains("\x1b[31mlost\x1b[0m"));
    }

    #[test]
    fn what_is_shown_cannot_break_a_line_or_move_the_cursor() {
        let mut table = Table::new([Column::left("A")]);
        table.row(["x\ny\x1b[2J".into()]);
        assert_eq!(shown(&table, Paint(false)), "  A\n  x y [2J\n");
    }
}
