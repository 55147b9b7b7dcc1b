//! Tells code from comments and literals, so that a sentence about code cannot break a rule about code.

use proc_macro2::{Span, TokenStream, TokenTree};

/// `text` with comments and literals replaced by spaces, as many as they have bytes. Line breaks are kept.
pub(super) fn blank(text: &str) -> String {
    let spaces = text.bytes().map(|byte| if byte == b'\n' { byte } else { b' ' });
    let mut code: Vec<u8> = spaces.collect();
    let Ok(tokens) = text.parse() else {
        panic!("is not Rust: {text}");
    };
    keep(tokens, text.as_bytes(), &mut code);
    String::from_utf8_lossy(&code).into_owned()
}

fn keep(tokens: TokenStream, text: &[u8], code: &mut [u8]) {
    let mut copy = |span: Span| {
        let place = span.byte_range();
        code[place.clone()].copy_from_slice(&text[place]);
    };
    let mut groups = Vec::new();
    for token in tokens {
        let place = &text[token.span().byte_range()];
        match token {
            TokenTree::Literal(_) => {}
            // The tokens of an attribute that was written as a comment are all where the comment is.
            _ if place.len() > 1 && place.starts_with(b"/") => {}
            TokenTree::Ident(_) | TokenTree::Punct(_) => copy(token.span()),
            TokenTree::Group(group) => {
                copy(group.span_open());
                copy(group.span_close());
                groups.push(group.stream());
            }
        }
    }
    for group in groups {
        keep(group, text, code);
    }
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Lines (from 1) of `text` that contain `word` as a whole word.
pub(super) fn lines_with_word(text: &str, word: &str) -> Vec<usize> {
    let holds = |line: &str| line.split(|c| !is_name(c)).any(|found| found == word);
    text.lines()
        .enumerate()
        .filter(|(_, line)| holds(line))
        .map(|(number, _)| number + 1)
        .collect()
}

#[test]
fn literals_and_comments_are_blanked_and_lines_stay() {
    // Scenario: the same word in code, comments and every kind of literal. Expectation: only those in code
    // are kept, where they are.
    let text = "unsafe a; // unsafe\n/* unsafe /* unsafe */ */ b(\"unsafe \\\" unsafe\", r#\"unsafe\"#, 'u', '\\'', &'a x)\n\
                /// \u{e9} (unsafe)\nunsafe";
    let code = blank(text);
    assert_eq!(lines_with_word(&code, "unsafe"), [1, 4]);
    assert_eq!(code.matches("unsafe").count(), 2);
    assert_eq!(
        code.find("&'a x)"),
        text.find("&'a x)"),
        "a lifetime is no literal: {code}"
    );
    assert_eq!(code.matches(')').count(), 1, "{code}");
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
