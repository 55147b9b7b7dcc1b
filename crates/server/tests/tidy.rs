//! The house rules that no other tool holds, read off the source tree. Each rule is one test; it says its reason when
//! it is broken, and shows on made-up samples that it can be broken at all before it looks at the tree.
//!
//! Deliberately absent: whatever rustc, clippy, rustfmt, cargo-deny and buf hold already.

mod tidy {
    mod documents;
    mod lexer;
    mod manifests;
    mod operations;
    mod sources;
    mod tree;
}
