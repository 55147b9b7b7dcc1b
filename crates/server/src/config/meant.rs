//! What a word that is unknown was meant to be.

use super::layers::is_joined_by_underscores;
use std::collections::BTreeSet;

/// The last part of a key's path and what precedes it.
fn split(key: &str) -> (&str, &str) {
    key.rsplit_once('.').unwrap_or(("", key))
}

/// Similarity from which one word is suggested for another (0 to 1, normalized Damerau-Levenshtein).
const ALIKE_MIN: f64 = 0.6;
/// No known word is similar to a longer one, with which each comparison takes time.
const WORD_BYTES_MAX: usize = 256;

/// The most similar of these words, if one is similar.
pub(super) fn closest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > WORD_BYTES_MAX {
        return None;
    }
    let likeness = |other: &str| strsim::normalized_damerau_levenshtein(word, other);
    let closest = known.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    closest.filter(|other| likeness(other) >= ALIKE_MIN)
}

/// The remedy for a key that is not one of those that are known, which have no indices.
pub(super) fn key_meant(key: &str, known: &BTreeSet<String>) -> String {
    let key = without_indices(key);
    if known.contains(&key) {
        // The whole dotted path was written as one key of the file.
        let (section, name) = split(&key);
        return format!("write {name} below {section}, as a key of that section");
    }
    if let Some(meant) = known.iter().find(|known| is_joined_by_underscores(known, &key)) {
        return format!("did you mean {meant}?");
    }
    let (section, name) = split(&key);
    let elsewhere = known
        .iter()
        .find(|other| split(other).1 == name && !other.contains("[]"));
    let siblings = || {
        known
            .iter()
            .filter(|other| split(other).0 == section)
            .map(|other| split(other).1)
    };
    match (closest(name, siblings()), elsewhere) {
        (Some(closest), _) => format!("did you mean {closest}?"),
        (_, Some(elsewhere)) => format!("did you mean {elsewhere}?"),
        _ => format!("allowed: {}", siblings().collect::<Vec<_>>().join(", ")),
    }
}

/// A key's path without the indices of lists: `datasets[].name`.
pub(super) fn without_indices(key: &str) -> String {
    let mut out = String::with_capacity(key.len());
    let mut inside = false;
    for c in key.chars() {
        inside = if inside { c != ']' } else { c == '[' };
        if !inside || c == '[' {
            out.push(c);
        }
    }
    out
}
