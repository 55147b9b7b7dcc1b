//! The effective configuration as YAML, each value with its source in a comment. The output is an equivalent
//! configuration: paths are absolute, and computed values are written as they were configured (`auto`).

use std::fmt::Write;

use serde_yaml::Value;

use super::walk::Setting;

/// Writes settings as a configuration file.
pub fn to_yaml(settings: &[Setting]) -> String {
    let mut out = String::from("# The effective configuration; each value with its source.\n");
    let mut open: Vec<&str> = Vec::new();
    for setting in settings {
        let parts = parts(&setting.key);
        let Some((name, sections)) = parts.split_last() else {
            continue;
        };
        let shared = open.iter().zip(sections).take_while(|(a, b)| a == b).count();
        // The first key of a list entry is on the line of its dash.
        let mut dash = false;
        for (depth, section) in sections.iter().enumerate().skip(shared) {
            if section.starts_with('[') {
                dash = true;
            } else {
                let _infallible = writeln!(out, "{:1$}{section}:", "", depth * 2);
            }
        }
        let indent = sections.len() * 2;
        let lead = if dash {
            format!("{:1$}- ", "", indent - 2)
        } else {
            " ".repeat(indent)
        };
        let note = setting
            .note
            .as_ref()
            .map(|note| format!(": {note}"))
            .unwrap_or_default();
        let comment = format!("{}{note}", setting.source).replace(is_not_printable, "?");
        let _infallible = writeln!(out, "{lead}{name}: {} # {comment}", written(&setting.value));
        open = sections.to_vec();
    }
    out
}

impl Setting {
    /// The value as written in a configuration file.
    pub fn text(&self) -> String {
        written(&self.value)
    }
}

/// `datasets[0].name` in parts: `datasets`, `[0]`, `name`.
fn parts(key: &str) -> Vec<&str> {
    key.split('.')
        .flat_map(|part| {
            let (name, index) = part.split_at(part.find('[').unwrap_or(part.len()));
            [name, index].into_iter().filter(|part| !part.is_empty())
        })
        .collect()
}

fn written(value: &Value) -> String {
    match value {
        Value::String(text) => written_text(text),
        Value::Sequence(items) => format!("[{}]", items.iter().map(written).collect::<Vec<_>>().join(", ")),
        Value::Number(number) => number.to_string(),
        Value::Bool(value) => value.to_string(),
        // Settings hold no such values.
        Value::Null | Value::Mapping(_) | Value::Tagged(_) => "null".to_owned(),
    }
}

/// Whether YAML treats an unescaped character as a line break, or refuses it.
fn is_not_printable(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

/// Plain if YAML reads it back as the same text, otherwise in double quotes as in JSON (which YAML 1.2
/// contains, except for a few characters that JSON does not escape).
fn written_text(text: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "._-/:".contains(c);
    let plain =
        text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/') && text.chars().all(harmless);
    if plain && matches!(serde_yaml::from_str(text), Ok(Value::String(read)) if read == text) {
        return text.to_owned();
    }
    let mut out = String::new();
    for c in serde_json::Value::from(text).to_string().chars() {
        if is_not_printable(c) {
            let _infallible = write!(out, "\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    out
}
