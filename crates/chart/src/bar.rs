//! A number as a length.

/// An eighth more of a cell each, from one eighth to seven.
const PARTS: [char; 7] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// `value` of `whole` as a bar of at most `width` cells, to an eighth of a cell. Anything above nothing is visible.
pub fn bar(value: f64, whole: f64, width: usize) -> String {
    let share = if whole > 0.0 && value > 0.0 { (value / whole).min(1.0) } else { 0.0 };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and the width")]
    let eighths = (share * width as f64 * 8.0).round() as usize;
    let eighths = if share > 0.0 && width > 0 { eighths.max(1) } else { eighths };
    let mut bar = "█".repeat(eighths / 8);
    bar.extend((eighths % 8).checked_sub(1).map(|part| PARTS[part]));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_its_share() {
        let shown = [0.0, 0.001, 1.0, 2.5, 5.0, 10.0, 99.0].map(|value| bar(value, 10.0, 4));
        assert_eq!(shown, ["", "▏", "▍", "█", "██", "████", "████"]);
    }

    #[test]
    fn what_is_no_share_is_no_bar() {
        for (value, whole) in [(1.0, 0.0), (-1.0, 2.0), (f64::NAN, 1.0), (1.0, f64::NAN)] {
            assert_eq!(bar(value, whole, 4), "");
        }
        assert_eq!(bar(1.0, 1.0, 0), "");
    }
}
