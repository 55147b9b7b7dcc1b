//! Just enough of Rust's lexical grammar to tell code from comments and string literals, so that a sentence
//! about code cannot break a rule about code. Not a parser: it knows no items and no macros.

/// `text` with comments and the literals of strings and characters replaced by spaces. Line breaks are kept.
pub(super) fn blank(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while let Some(first) = text[at..].chars().next() {
        if let Some(length) = literal_bytes(&text[..at], &text[at..]) {
            let blanked = text[at..at + length].chars();
            out.extend(blanked.map(|c| if c == '\n' { c } else { ' ' }));
            at += length;
        } else {
            out.push(first);
            at += first.len_utf8();
        }
    }
    out
}

/// The length of the comment or literal that `rest` begins with.
fn literal_bytes(before: &str, rest: &str) -> Option<usize> {
    let through = |from: usize, end: &str| {
        let found = rest.get(from..).and_then(|inside| inside.find(end));
        Some(found.map_or(rest.len(), |at| from + at + end.len()))
    };
    match rest.as_bytes() {
        [b'/', b'/', ..] => Some(rest.find('\n').unwrap_or(rest.len())),
        [b'/', b'*', ..] => Some(block_comment_bytes(rest)),
        [b'"', ..] => Some(string_bytes(rest)),
        [b'r', b'"' | b'#', ..] if begins_word(before) => {
            let hashes = rest[1..].bytes().take_while(|byte| *byte == b'#').count();
            // Otherwise it is a raw identifier (`r#type`).
            let is_string = rest[1 + hashes..].starts_with('"');
            is_string.then(|| through(2 + hashes, &format!("\"{}", "#".repeat(hashes))))?
        }
        [b'\'', b'\\', ..] => through(3, "'"),
        // `'x'` is a character, `'x` a lifetime.
        [b'\'', ..] if rest.chars().nth(2) == Some('\'') => {
            through(1 + rest[1..].chars().next()?.len_utf8(), "'")
        }
        _ => None,
    }
}

/// Whether an `r` after this text begins a raw string's prefix (`r"`, `br"`, `cr"`) and is not the end of an identifier.
fn begins_word(before: &str) -> bool {
    !before
        .strip_suffix(['b', 'c'])
        .unwrap_or(before)
        .ends_with(is_name)
}

fn block_comment_bytes(rest: &str) -> usize {
    let (mut depth, mut at) = (0_u32, 0);
    while let Some(pair) = rest.as_bytes().get(at..at + 2) {
        match pair {
            b"/*" => depth += 1,
            b"*/" => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

fn string_bytes(rest: &str) -> usize {
    let mut escaped = false;
    let end = rest.bytes().skip(1).position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(rest.len(), |at| at + 2)
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Lines (from 1) of `text` that contain `word` as a whole word.
pub(super) fn lines_with_word(text: &str, word: &str) -> Vec<usize> {
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
