//! Just enough of Rust's lexical grammar to tell code from comments and string literals, so that a sentence
//! about code cannot break a rule about code. Not a parser: it knows no items and no macros.

/// `text` with comments and the literals of strings and characters replaced by spaces. Line breaks are kept.
pub(super) fn blank(text: &str) -> String {
    let source: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < source.len() {
        let end = token_end(&source, at);
        let drop = end > at + 1;
        for c in &source[at..end] {
            out.push(if drop && *c != '\n' { ' ' } else { *c });
        }
        at = end;
    }
    out
}

/// The end of the comment or literal that begins at `at`; otherwise of one character of code.
fn token_end(source: &[char], at: usize) -> usize {
    let next = source.get(at + 1).copied();
    match (source[at], next) {
        ('/', Some('/')) => line_end(source, at),
        ('/', Some('*')) => block_comment_end(source, at),
        ('"', _) => string_end(source, at + 1),
        ('r', Some('"' | '#')) if begins_word(source, at) => match raw_string_end(source, at + 1) {
            Some(end) => end,
            None => at + 1,
        },
        ('\'', Some('\\')) => char_end(source, at + 3),
        // `'x'` is a character, `'x` a lifetime.
        ('\'', Some(_)) if source.get(at + 2) == Some(&'\'') => at + 3,
        _ => at + 1,
    }
}

/// Whether the `r` at `at` begins a raw string's prefix (`r"`, `br"`, `cr"`) and is not the end of an
/// identifier.
fn begins_word(source: &[char], at: usize) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    match at.checked_sub(1).map(|before| source[before]) {
        Some('b' | 'c') => at < 2 || !is_name(source[at - 2]),
        Some(before) => !is_name(before),
        None => true,
    }
}

fn line_end(source: &[char], at: usize) -> usize {
    source[at..]
        .iter()
        .position(|c| *c == '\n')
        .map_or(source.len(), |length| at + length)
}

fn block_comment_end(source: &[char], at: usize) -> usize {
    let mut depth = 0_u32;
    let mut i = at;
    while i + 1 < source.len() {
        match (source[i], source[i + 1]) {
            ('/', '*') => {
                depth += 1;
                i += 2;
            }
            ('*', '/') => {
                depth -= 1;
                i += 2;
                if depth == 0 {
                    return i;
                }
            }
            _ => i += 1,
        }
    }
    source.len()
}

fn string_end(source: &[char], mut i: usize) -> usize {
    while i < source.len() {
        match source[i] {
            '\\' => i += 2,
            '"' => return i + 1,
            _ => i += 1,
        }
    }
    source.len()
}

/// `hashes_at` is just after the `r`. `None`: a raw identifier (`r#type`), not a string.
fn raw_string_end(source: &[char], hashes_at: usize) -> Option<usize> {
    let hashes = source[hashes_at..].iter().take_while(|c| **c == '#').count();
    if source.get(hashes_at + hashes) != Some(&'"') {
        return None;
    }
    let mut i = hashes_at + hashes + 1;
    while i < source.len() {
        let closes = source[i] == '"' && source[i + 1..].iter().take_while(|c| **c == '#').count() >= hashes;
        if closes {
            return Some(i + 1 + hashes);
        }
        i += 1;
    }
    Some(source.len())
}

fn char_end(source: &[char], from: usize) -> usize {
    let from = from.min(source.len());
    source[from..]
        .iter()
        .position(|c| *c == '\'')
        .map_or(source.len(), |length| from + length + 1)
}

/// Lines (from 1) of `text` that contain `word` as a whole word.
pub(super) fn lines_with_word(text: &str, word: &str) -> Vec<usize> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let holds = |line: &str| {
        line.match_indices(word).any(|(at, _)| {
            let before = line[..at].chars().next_back();
            let after = line[at + word.len()..].chars().next();
            !before.is_some_and(is_name) && !after.is_some_and(is_name)
        })
    };
    text.lines()
        .enumerate()
        .filter(|(_, line)| holds(line))
        .map(|(number, _)| number + 1)
        .collect()
}

#[test]
fn literals_and_comments_are_blanked_and_lines_stay() {
    // Scenario: the same word in code, comments and every kind of literal. Expectation: only those in code
    // are kept.
    let text = "unsafe a; // unsafe\n/* unsafe /* unsafe */ */ b(\"unsafe \\\" unsafe\", r#\"unsafe\"#, 'u', '\\'', &'a x)\nunsafe";
    let code = blank(text);
    assert_eq!(lines_with_word(&code, "unsafe"), [1, 3]);
    assert_eq!(code.matches("unsafe").count(), 2);
    assert!(code.contains("&'a x)"), "a lifetime is no literal: {code}");
}

#[test]
fn a_word_is_found_only_as_a_whole() {
    // Scenario: a word, and longer names that contain it. Expectation: the longer names do not count.
    assert_eq!(
        lines_with_word("my_sleep(1)\nsleeper\n", "sleep"),
        Vec::<usize>::new()
    );
    assert_eq!(lines_with_word("a\nstd::thread::sleep(x)\n", "sleep"), [2]);
}
