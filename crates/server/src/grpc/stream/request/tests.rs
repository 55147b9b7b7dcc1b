//! Messages of a stream, decoded and counted; no stream.

use super::*;
use prost::Message as _;
use tonic::Code;
use tonic_types::RpcStatusExt as _;

#[test]
fn a_request_that_asks_for_nothing_is_answered() {
    // A request with none of the variants: INVALID_ARGUMENT with the field's name, under the request's id.
    let encoded = failed(9, &nothing_asked(), "request").unwrap();
    let response = v1::FetchStreamResponse::decode(&encoded.head[5..]).unwrap();
    let Some(v1::fetch_stream_response::Response::Status(status)) = response.response else {
        panic!("{response:?}");
    };
    assert_eq!((response.id, status.code), (9, Code::InvalidArgument as i32));
    assert!(status.get_details_retry_info().is_none());
    assert_eq!(
        status.get_details_bad_request().unwrap().field_violations[0].field,
        "request"
    );
    assert_eq!(
        status.message,
        "request: set one of blocks, vectors, ranges, objects and scores"
    );
}

/// Id, deadline and request of a message, or why it is none.
fn requested(message: &[u8]) -> Result<String, String> {
    let header = MessageHeader::of(message).map_err(|status| status.message().to_owned())?;
    let call = Call::of(&header, message).map_err(|status| status.message().to_owned())?;
    let request = match &call {
        Call::Blocks(call) => Some(OneOf::Blocks((**call).clone())),
        Call::Vectors(call) => Some(OneOf::Vectors((**call).clone())),
        Call::Ranges(call) => Some(OneOf::Ranges((**call).clone())),
        Call::Objects(call) => Some(OneOf::Objects((**call).clone())),
        Call::Scores(call) => Some(OneOf::Scores((**call).clone())),
        Call::Nothing if header.is_cancel => Some(OneOf::Cancel(v1::Cancel {})),
        Call::Nothing => None,
    };
    let (id, deadline_ms) = (header.id, header.deadline_ms);
    Ok(format!(
        "{:?}",
        v1::FetchStreamRequest {
            id,
            deadline_ms,
            request
        }
    ))
}

fn requested_by_prost(message: &[u8]) -> Result<String, String> {
    let request = decode::<v1::FetchStreamRequest>(message);
    let request = request.map_err(|status| status.message().to_owned())?;
    Ok(format!("{request:?}"))
}

#[test]
fn messages_are_decoded_as_prost_does() {
    // Scenario: a message with a request of each kind; sent twice, before one of another kind, and with unknown fields; cut
    // short anywhere, and with any byte changed. Expectation: id, deadline, request and error are those that prost finds; a
    // request that is alone in its message is decoded into a spare one.
    let (dataset, if_match) = ("data".to_owned(), "v".to_owned());
    let (names, numbers) = (vec!["a".to_owned()], vec![1, 300]);
    let ranges = v1::FetchRangesRequest {
        dataset: dataset.clone(),
        offsets: numbers.clone(),
        lengths: numbers.clone(),
        fail_fast: true,
        if_match: if_match.clone(),
    };
    let objects = v1::FetchObjectsRequest {
        dataset: dataset.clone(),
        names,
        offsets: numbers.clone(),
        lengths: numbers.clone(),
        ..Default::default()
    };
    let query = v1::ScoreQuery {
        vector: vec![1.0],
        ids: numbers.clone(),
    };
    let scores = v1::ScoreVectorsRequest {
        dataset: dataset.clone(),
        queries: vec![query],
        threshold: Some(0.5),
        ..Default::default()
    };
    let blocks = v1::FetchBlocksRequest {
        dataset: dataset.clone(),
        indices: numbers.clone(),
        fail_fast: false,
        if_match,
    };
    let vectors = v1::FetchVectorsRequest {
        dataset,
        ids: numbers,
        ..Default::default()
    };
    let encoded = |request| {
        let (id, deadline_ms) = (7, 1000);
        let request = Some(request);
        v1::FetchStreamRequest {
            id,
            deadline_ms,
            request,
        }
        .encode_to_vec()
    };
    let mut messages = vec![Vec::new(), encoded(OneOf::Cancel(v1::Cancel {}))];
    for request in [
        OneOf::Blocks(blocks.clone()),
        OneOf::Vectors(vectors),
        OneOf::Ranges(ranges),
        OneOf::Objects(objects),
        OneOf::Scores(scores),
    ] {
        let message = encoded(request);
        assert!(MessageHeader::of(&message).unwrap().only_call.is_some());
        let other = encoded(OneOf::Blocks(blocks.clone()));
        // A varint, 32 bits, and a group with an id, of field 99.
        let (varint, bits, group) = ([0x98, 6, 1], [0x9d, 6, 1, 2, 3, 4], [0x9b, 6, 8, 1, 0x9c, 6]);
        for unknown in [&varint[..], &bits, &group] {
            messages.extend([[&message, unknown].concat(), [unknown, &message].concat()]);
        }
        messages.extend([[&message[..], &message].concat(), [&message[..], &other].concat()]);
        messages.push(message);
    }
    for message in &mut messages {
        for end in 0..=message.len() {
            let part = &message[..end];
            assert_eq!(requested(part), requested_by_prost(part), "{part:?}");
        }
        for place in 0..message.len() {
            let before = message[place];
            for change in 1..=255 {
                message[place] = before ^ change;
                assert_eq!(requested(message), requested_by_prost(message), "{message:?}");
            }
            message[place] = before;
        }
    }
}

#[test]
fn a_refusal_that_passes_says_when_to_come_back() {
    // Overload inside a stream: RESOURCE_EXHAUSTED with google.rpc.RetryInfo, as in a unary call.
    let encoded = failed(9, &FetchError::TooManyRequests { max: 3, own: false }, "indices").unwrap();
    let response = v1::FetchStreamResponse::decode(&encoded.head[5..]).unwrap();
    let Some(v1::fetch_stream_response::Response::Status(status)) = response.response else {
        panic!("{response:?}");
    };
    assert_eq!(status.code, Code::ResourceExhausted as i32);
    let retry = status.get_details_retry_info().unwrap();
    assert!(retry.retry_delay.is_some_and(|delay| !delay.is_zero()));
}

#[test]
fn a_candidate_counts_as_in_a_call_of_its_own() {
    // Scores of 200 candidates in a message of less than 4096 bytes. Expectation: each counts as two items, however
    // short the message is.
    let request = v1::ScoreVectorsRequest {
        queries: vec![v1::ScoreQuery {
            vector: vec![1.0],
            ids: vec![1; 200],
        }],
        ..Default::default()
    };
    let alone =
        items_of::<v1::ScoreVectorsRequest>(&request.encode_to_vec(), 4096, &Fields::of_items(4096)).unwrap();
    let request = v1::FetchStreamRequest {
        id: 1,
        request: Some(OneOf::Scores(request)),
        deadline_ms: 0,
    };
    assert_eq!(
        count(&request.encode_to_vec(), 4096).unwrap(),
        alone * v1::ScoreVectorsRequest::ITEM_WEIGHT
    );
}

#[test]
fn fields_of_all_that_is_in_a_message_are_counted_together() {
    // Scenario: two and three requests in one message, and queries in one request, each of which sets a field 30,000 times; 65,536 fields
    // are allowed. Expectation: two are counted, three refused.
    let part = |tag: u8| {
        let mut field = vec![tag << 3 | 2];
        prost::encoding::encode_varint(60_000, &mut field);
        [field, [0x08, 0].repeat(30_000)].concat()
    };
    for parts in [2, 3] {
        let (calls, queries) = (part(2).repeat(parts), part(2).repeat(parts));
        let fields = Fields::of_items(4096);
        for counted in [
            count(&calls, 4096),
            items_of::<v1::ScoreVectorsRequest>(&queries, 4096, &fields),
        ] {
            let is_refused = matches!(counted, Err(FetchError::Malformed { .. }));
            assert_eq!(is_refused, parts == 3, "{counted:?}");
        }
    }
}
