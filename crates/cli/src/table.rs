//! Columns as wide as their widest cell and three spaces apart, the layout that scripts of `kubectl-ate` cut apart.

/// Between a column's widest cell and the next column.
const PADDING: usize = 3;

/// A table that may still grow: rows come in batches, the header with the first one, and columns only ever widen.
#[derive(Debug)]
pub(crate) struct Table {
    header: Option<Vec<String>>,
    widths: Vec<usize>,
    colour: bool,
}

impl Table {
    pub(crate) fn new(columns: &[&str], colour: bool) -> Self {
        let header = columns.iter().map(|column| (*column).to_owned()).collect();
        Self { header: Some(header), widths: vec![0; columns.len()], colour }
    }

    /// A line for each row, after that of the header if these are the first. None ends in a line break.
    pub(crate) fn lines(&mut self, rows: &[Vec<String>]) -> Vec<String> {
        let clean = |cell: &String| cell.replace(char::is_control, " ");
        let rows = rows.iter().map(|row| row.iter().map(clean).collect());
        let rows: Vec<Vec<String>> = self.header.take().into_iter().chain(rows).collect();
        for row in &rows {
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        rows.iter().map(|row| self.line(row)).collect()
    }

    fn line(&self, row: &[String]) -> String {
        let mut line = String::new();
        for (index, cell) in row.iter().enumerate() {
            match tone(cell).filter(|_| self.colour) {
                Some(tone) => line.push_str(&format!("\x1b[{tone}m{cell}\x1b[0m")),
                None => line.push_str(cell),
            }
            // The last cell is not filled up: no line ends in spaces.
            if index + 1 < row.len() {
                line.push_str(&" ".repeat(self.widths[index] - cell.chars().count() + PADDING));
            }
        }
        line
    }
}

/// The colour of the words that say how something is. No name is spelt like one of them.
fn tone(cell: &str) -> Option<u8> {
    const RED: u8 = 31;
    const GREEN: u8 = 32;
    const YELLOW: u8 = 33;
    match cell {
        "STATUS_RUNNING" | "ASSIGNED" | "Ready" => Some(GREEN),
        "STATUS_RESUMING" | "STATUS_SUSPENDING" | "STATUS_PAUSING" => Some(YELLOW),
        "Failed" | "DELETED" => Some(RED),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: &[&str]) -> Vec<String> {
        cells.iter().map(|cell| (*cell).to_owned()).collect()
    }

    #[test]
    fn a_column_is_three_wider_than_its_widest_cell_and_the_last_is_not_filled_up() {
        let mut table = Table::new(&["ID", "STATUS", "IP"], false);
        let lines = table.lines(&[row(&["ärger", "x", "::1"]), row(&["a", "", ""])]);
        assert_eq!(lines, ["ID      STATUS   IP", "ärger   x        ::1", "a                "]);
    }

    #[test]
    fn later_rows_keep_the_columns_and_repeat_no_header() {
        let mut table = Table::new(&["ID", "V"], false);
        table.lines(&[row(&["long-name", "1"])]);
        assert_eq!(table.lines(&[row(&["a", "2"])]), ["a           2"]);
        assert_eq!(table.lines(&[row(&["longer-name", "3"])]), ["longer-name   3"]);
    }

    #[test]
    fn what_an_actor_prints_cannot_break_a_line_or_move_the_cursor() {
        let lines = Table::new(&["A", "B"], false).lines(&[row(&["x\ny", "\x1b[2J"])]);
        assert_eq!(lines[1], "x y    [2J");
    }

    #[test]
    fn colour_adds_nothing_to_the_width() {
        let rows = [row(&["Ready", "x"]), row(&["Pending", "x"])];
        let lines = Table::new(&["S", "N"], true).lines(&rows);
        assert_eq!(lines[1], "\x1b[32mReady\x1b[0m     x");
        assert_eq!(lines[2], "Pending   x");
    }
}
