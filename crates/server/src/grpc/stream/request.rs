//! A request of a stream: what its message asks for, read before it is decoded and decoded into a spare message where that is
//! possible, and its response. What refuses a request becomes a response; only bytes that are no request end the stream.

use super::super::encode::EncodedMessage;
use super::super::fetch_request::{Decoded, UnaryRequest};
use super::super::service::{Shared, decode, items_of, malformed};
use super::super::wire::{FieldValue, Fields, dataset_in, visit};
use crate::caller::Connection;
use crate::error_status;
use crate::fetch::{FetchError, Fetcher, RequestContext, RequestMemory};
use crate::record;
use crate::rpc_metrics::{GrpcMethod, Method as _, grpc_code_name};
use bytes::Bytes;
use ringfetch_engine::share::Charge;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request as OneOf;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tonic::Status;

/// Fields of a request that are read before it is decoded.
const ID_TAG: u32 = 1;
const DEADLINE_TAG: u32 = 6;
const CANCEL_TAG: u32 = 7;

/// A request of a stream: its message, and when its last byte arrived, from which its deadline counts.
#[derive(Debug)]
pub(in crate::grpc) struct StreamRequest {
    pub(super) header: MessageHeader,
    pub(super) bytes: Bytes,
    pub(super) arrived: Instant,
    /// Its memory was not granted.
    pub(super) refused: Option<Box<FetchError>>,
}

/// Answers one request of a stream.
///
/// At once, if the message is not a request, which ends the stream.
pub(in crate::grpc) fn respond(
    shared: Arc<Shared>,
    connection: Option<Arc<Connection>>,
    call_deadline: Option<Instant>,
    message: StreamRequest,
) -> Result<impl Future<Output = Result<EncodedMessage, Status>> + Send, Status> {
    let StreamRequest {
        header,
        bytes,
        arrived,
        refused,
    } = message;
    let counted = match refused {
        Some(refused) => Err(*refused),
        // Short requests are not charged, and the fetcher counts their items.
        None if RequestMemory::is_free(bytes.len()) => Ok(0),
        None => shared.fetcher.count_rejection(
            count(&bytes, shared.fetcher.limits().items_per_request),
            connection.as_ref(),
        ),
    };
    let checked = match counted {
        Ok(items) => {
            let mut request_memory = RequestMemory::new(&shared.fetcher, connection.as_ref());
            request_memory
                .whole(bytes.len(), items)
                .map(|()| request_memory.into_charge())
        }
        Err(error) => Err(error),
    };
    // A refused request is not decoded, which would take the very memory that was refused.
    let call = match &checked {
        Ok(_charge) => Call::of(&header, &bytes)?,
        Err(_refused) => Call::Nothing,
    };
    let refused_dataset = if checked.is_err() {
        dataset_of(&bytes)
    } else {
        None
    };
    let own = match header.deadline_ms {
        0 => None,
        after_ms => arrived.checked_add(Duration::from_millis(after_ms.into())),
    };
    let deadline = [own, call_deadline].into_iter().flatten().min();
    let context = RequestContext {
        arrived: Some(arrived),
        deadline,
        connection,
        fail_fast: false,
    };
    let MessageHeader { id, method, .. } = header;
    let answer = async move {
        let charge = match checked {
            Ok(charge) => charge,
            Err(error) => return failed(id, &error, "request"),
        };
        match &call {
            Call::Blocks(call) => answer(&shared.fetcher, id, &**call, context, charge).await,
            Call::Vectors(call) => answer(&shared.fetcher, id, &**call, context, charge).await,
            Call::Ranges(call) => answer(&shared.fetcher, id, &**call, context, charge).await,
            Call::Objects(call) => answer(&shared.fetcher, id, &**call, context, charge).await,
            Call::Scores(call) => answer(&shared.fetcher, id, &**call, context, charge).await,
            Call::Nothing => failed(id, &nothing_asked(), "request"),
        }
    };
    Ok(record::part(
        arrived,
        id,
        method.name(),
        refused_dataset,
        call_deadline,
        answer,
    ))
}

/// What a message requests.
enum Call {
    Blocks(Decoded<v1::FetchBlocksRequest>),
    Vectors(Decoded<v1::FetchVectorsRequest>),
    Ranges(Decoded<v1::FetchRangesRequest>),
    Objects(Decoded<v1::FetchObjectsRequest>),
    Scores(Decoded<v1::ScoreVectorsRequest>),
    Nothing,
}

impl Call {
    /// Decodes a message. A request that is alone in it, as clients send them, is decoded into a spare message.
    ///
    /// # Errors
    /// INVALID_ARGUMENT: it is not a request.
    fn of(header: &MessageHeader, message: &[u8]) -> Result<Self, Status> {
        if let Some((tag, start, end)) = header.only_call
            && let Some(call) = message.get(start..end)
            && let Ok(call) = Self::of_part(tag, call)
        {
            return Ok(call);
        }
        // Also where the request cannot be decoded: the error then names the field of the whole message.
        Ok(match decode::<v1::FetchStreamRequest>(message)?.request {
            Some(OneOf::Blocks(call)) => Self::Blocks(call.into()),
            Some(OneOf::Vectors(call)) => Self::Vectors(call.into()),
            Some(OneOf::Ranges(call)) => Self::Ranges(call.into()),
            Some(OneOf::Objects(call)) => Self::Objects(call.into()),
            Some(OneOf::Scores(call)) => Self::Scores(call.into()),
            // Cancels are handled before this point (`MessageHeader`).
            Some(OneOf::Cancel(_)) | None => Self::Nothing,
        })
    }

    fn of_part(tag: u32, call: &[u8]) -> Result<Self, Status> {
        match tag {
            v1::FetchBlocksRequest::STREAM_TAG => Decoded::of_part(call).map(Self::Blocks),
            v1::FetchVectorsRequest::STREAM_TAG => Decoded::of_part(call).map(Self::Vectors),
            v1::FetchRangesRequest::STREAM_TAG => Decoded::of_part(call).map(Self::Ranges),
            v1::FetchObjectsRequest::STREAM_TAG => Decoded::of_part(call).map(Self::Objects),
            v1::ScoreVectorsRequest::STREAM_TAG => Decoded::of_part(call).map(Self::Scores),
            _ => Ok(Self::Nothing),
        }
    }
}

/// The dataset that a request of a stream names.
fn dataset_of(message: &[u8]) -> Option<&str> {
    let mut dataset = None;
    let _seen = visit(message, &Fields::few(), |tag, field| {
        if let FieldValue::Bytes(call) = field
            && tag != CANCEL_TAG
        {
            dataset = dataset_in(call);
        }
    });
    dataset
}

/// The number of items in an encoded request, summed over its variants (protobuf keeps the last).
fn count(message: &[u8], max: u32) -> Result<usize, FetchError> {
    let fields = Fields::of_items(max);
    let mut most = Ok(0_usize);
    visit(message, &Fields::few(), |tag, field| {
        let FieldValue::Bytes(call) = field else { return };
        let counted = match tag {
            v1::FetchBlocksRequest::STREAM_TAG => items_of::<v1::FetchBlocksRequest>(call, max, &fields),
            v1::FetchVectorsRequest::STREAM_TAG => items_of::<v1::FetchVectorsRequest>(call, max, &fields),
            v1::FetchRangesRequest::STREAM_TAG => items_of::<v1::FetchRangesRequest>(call, max, &fields),
            v1::FetchObjectsRequest::STREAM_TAG => items_of::<v1::FetchObjectsRequest>(call, max, &fields),
            v1::ScoreVectorsRequest::STREAM_TAG => items_of::<v1::ScoreVectorsRequest>(call, max, &fields)
                .map(|items| items.saturating_mul(v1::ScoreVectorsRequest::ITEM_WEIGHT)),
            _ => return,
        };
        // The same variant sent twice is merged.
        most = match (most.clone(), counted) {
            (Ok(before), Ok(items)) => Ok(before.saturating_add(items)),
            (Err(error), _) | (_, Err(error)) => Err(error),
        };
    })?;
    most
}

/// The fields of a message that are read before it is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MessageHeader {
    pub(super) id: u64,
    pub(super) is_cancel: bool,
    /// That of the stream if nothing is requested.
    method: GrpcMethod,
    /// 0: none.
    deadline_ms: u32,
    /// The tag of the request, and where it begins and ends, if the message has one and otherwise only the fields above.
    only_call: Option<(u32, usize, usize)>,
}

impl MessageHeader {
    /// # Errors
    /// INVALID_ARGUMENT: the message has more than [`Fields::few`].
    pub(super) fn of(message: &[u8]) -> Result<Self, Status> {
        let mut header = Self {
            id: 0,
            is_cancel: false,
            method: GrpcMethod::FetchStream,
            deadline_ms: 0,
            only_call: None,
        };
        let mut others = 0;
        let visited = visit(message, &Fields::few(), |tag, field| {
            let method = match (tag, field) {
                (ID_TAG, FieldValue::Number(number)) => {
                    header.id = number;
                    return;
                }
                (DEADLINE_TAG, FieldValue::Number(number)) => {
                    // As prost decodes a uint32.
                    #[expect(clippy::cast_possible_truncation, reason = "protobuf takes the lower half")]
                    let number = number as u32;
                    header.deadline_ms = number;
                    return;
                }
                (CANCEL_TAG, FieldValue::Bytes(_)) => GrpcMethod::FetchStream,
                (v1::FetchBlocksRequest::STREAM_TAG, FieldValue::Bytes(_)) => GrpcMethod::FetchBlocks,
                (v1::FetchVectorsRequest::STREAM_TAG, FieldValue::Bytes(_)) => GrpcMethod::FetchVectors,
                (v1::FetchRangesRequest::STREAM_TAG, FieldValue::Bytes(_)) => GrpcMethod::FetchRanges,
                (v1::FetchObjectsRequest::STREAM_TAG, FieldValue::Bytes(_)) => GrpcMethod::FetchObjects,
                (v1::ScoreVectorsRequest::STREAM_TAG, FieldValue::Bytes(_)) => GrpcMethod::ScoreVectors,
                _ => {
                    others += 1;
                    return;
                }
            };
            // The last field of a oneof wins.
            header.is_cancel = tag == CANCEL_TAG;
            header.method = method;
            others += usize::from(header.only_call.is_some());
            header.only_call = field.range_in(message).map(|(start, end)| (tag, start, end));
        });
        let is_known = visited.map_err(|error| malformed(&error))?;
        header.only_call = header.only_call.filter(|_| is_known && others == 0);
        Ok(header)
    }
}

/// Checks the message of a cancel. It is as short as a request that is not charged: one that comes before the cancel in the
/// message is decoded, too.
///
/// # Errors
/// INVALID_ARGUMENT: it is long, or not a request.
pub(super) fn check_cancel(message: &[u8]) -> Result<(), Status> {
    if !RequestMemory::is_free(message.len()) {
        return Err(malformed(&"it has more than a cancel"));
    }
    decode::<v1::FetchStreamRequest>(message).map(drop)
}

fn nothing_asked() -> FetchError {
    FetchError::Malformed {
        field: "request".to_owned(),
        problem: "set one of blocks, vectors, ranges, objects and scores".to_owned(),
    }
}

async fn answer<C: UnaryRequest>(
    fetcher: &Fetcher,
    id: u64,
    call: &C,
    mut context: RequestContext,
    charge: Option<Charge>,
) -> Result<EncodedMessage, Status> {
    context.fail_fast = call.fail_fast();
    match call.run(fetcher, &context).await {
        Ok((answer, data)) => {
            let encoded = EncodedMessage::nested(id, C::STREAM_TAG, &answer, data)?;
            let connection = context.connection.as_ref();
            encoded
                .charged(|text| fetcher.charge_text(connection, charge, text))
                .or_else(|error| failed(id, &error, call.field_of(&error)))
        }
        Err(error) => failed(id, &error, call.field_of(&error)),
    }
}

/// The response to a failed request, with the status that a unary call would have.
pub(super) fn failed(id: u64, error: &FetchError, items_field: &str) -> Result<EncodedMessage, Status> {
    let status = error_status::to_status(error, items_field);
    record::note(|facts| facts.code = Some(grpc_code_name(status.code())));
    let status = error_status::to_rpc_status(&status);
    let response = v1::fetch_stream_response::Response::Status(status);
    EncodedMessage::plain(&v1::FetchStreamResponse {
        id,
        response: Some(response),
    })
}

#[cfg(test)]
mod tests;
