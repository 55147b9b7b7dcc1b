//! gRPC framing and request decoding through the router: no panic, always a status, exactly the requested
//! bytes, and nothing for input that is not framed, does not decode or is too long.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use ringfetch_fuzz::grpc::Call;
use ringfetch_fuzz::{Answer, WORLD};
use tower::ServiceExt as _;

fuzz_target!(|input: &[u8]| -> Corpus {
    let Some(call) = Call::parse(input) else {
        return Corpus::Reject;
    };
    let Some(request) = call.request("", axum::body::Body::new(call.pieces())) else {
        return Corpus::Reject;
    };
    let world = &*WORLD;
    let answer = world.block_on(async {
        let response = world.grpc.clone().oneshot(request).await.unwrap();
        Answer::of(response)
            .await
            .expect("an answer ends with its trailers")
    });
    call.check(world, &answer);
    Corpus::Keep
});
