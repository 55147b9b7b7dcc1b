//! Paths, queries, Range, conditionals and negotiation, through the router: no panic, a documented status, a
//! correct length, and the bytes of the path, or of the part of them that a Range names. Where nothing in the request
//! speaks against it, success.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use ringfetch_fuzz::{WORLD, check, request};

fuzz_target!(|input: &[u8]| -> Corpus {
    let Some(request) = request::parse(input) else {
        return Corpus::Reject;
    };
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    if path == "/metrics" || path == "/v1/status" {
        return Corpus::Reject; // They grow with what was asked before.
    }
    let world = &*WORLD;
    let answer = world.over_http(request.clone());
    check::form(&method, &answer);
    if method == "GET" {
        match check::resource(world, &path) {
            Some(whole) => check::bytes(whole, &request, &answer),
            None if path.contains('%') || !path.starts_with("/v1/datasets/") => {}
            None if path.contains("/blocks/") || path.contains("/vectors/") || path.ends_with("/bytes") => {
                assert!(
                    !answer.status.is_success() || path.contains("/objects/"),
                    "{path}: {answer:?}"
                );
            }
            None => {}
        }
    }
    Corpus::Keep
});
