//! Advice as a section of the daemon's configuration, each key below a comment with its reason.

use crate::report::Advice;

/// Columns of a comment.
const WIDTH: usize = 110;

/// The `engine` section, each line with its reason. Keys of one section are adjacent and in order in `lines`.
pub(super) fn yaml(head: &[String], lines: &[Advice]) -> String {
    let mut text = String::new();
    for line in head {
        comment(&mut text, "", line);
    }
    let mut open: Vec<&str> = Vec::new();
    for line in lines {
        let mut sections: Vec<&str> = line.key.split('.').collect();
        let key = sections.pop().unwrap_or(&line.key);
        let kept = open.iter().zip(&sections).take_while(|(a, b)| a == b).count();
        for (level, section) in sections.iter().enumerate().skip(kept) {
            text.push_str(&format!("{}{section}:\n", "  ".repeat(level)));
        }
        let indent = "  ".repeat(sections.len());
        comment(&mut text, &indent, &line.why);
        text.push_str(&format!("{indent}{key}: {}\n", line.value));
        open = sections;
    }
    text
}

/// A comment in lines of at most [`WIDTH`], if its words allow that. No character can end it: a path may
/// contain any.
fn comment(out: &mut String, indent: &str, text: &str) {
    let shown = text.replace(char::is_control, "?");
    let mut used = indent.len() + 1;
    out.push_str(&format!("{indent}#"));
    for (number, word) in shown.split(' ').enumerate() {
        let length = 1 + word.chars().count();
        if number > 0 && used + length > WIDTH {
            out.push_str(&format!("\n{indent}#  "));
            used = indent.len() + 3;
        }
        out.push_str(&format!(" {word}"));
        used += length;
    }
    out.push('\n');
}
