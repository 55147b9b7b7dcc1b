//! House rules that no other tool enforces, checked on the source tree. Each rule is one test; it reports its
//! reason when it is broken, and first checks on made-up samples that it can fail at all.
//!
//! Not here: everything that rustc, clippy, rustfmt, cargo-deny and buf already enforce.

mod tidy {
    mod documents;
    mod lexer;
    mod manifests;
    mod operations;
    mod sources;
    mod tree;
}
