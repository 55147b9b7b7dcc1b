//! Encodes messages that end in a large `bytes data = 15` without copying it.
//!
//! prost copies a `bytes` field into its encode buffer (TRAPS 24). Here everything before those bytes is
//! encoded into a small head, and the bytes follow. `data` has the highest tag of its message, so the two
//! parts together are exactly what prost writes.

use super::frame::PREFIX_BYTES;
use crate::fetch::DatasetHandle;
use crate::listener::FrameParts;
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};
use prost::{EncodeError, Message};
use std::cell::RefCell;
use tonic::Status;

/// The tag of `data` in every response.
const DATA_TAG: u32 = 15;
/// The tag of `id` in a stream's response.
const ID_TAG: u32 = 1;

/// A gRPC message in two parts that are sent one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EncodedMessage {
    /// The prefix, and all of the message before the bytes of `data`.
    pub(super) head: Bytes,
    pub(super) data: Bytes,
}

/// Heads up to this size are cut from chunks of [`HEADS_BYTES`], which are reused once all heads in them are
/// sent: a head that waits for its client holds at most 1 KiB.
const SMALL_HEAD_BYTES: usize = 128;
const HEADS_BYTES: usize = 1 << 10;

thread_local! {
    static HEADS: RefCell<BytesMut> = RefCell::new(BytesMut::new());
}

/// All of a response except `data`.
pub(super) trait ResponseFields {
    /// Their encoded length.
    fn encoded_len(&self) -> usize;

    /// Appends them as prost would.
    ///
    /// # Errors
    /// None if the buffer grows.
    fn encode(&self, buffer: &mut BytesMut) -> Result<(), EncodeError>;
}

impl<M: Message> ResponseFields for M {
    fn encoded_len(&self) -> usize {
        Message::encoded_len(self)
    }
    fn encode(&self, buffer: &mut BytesMut) -> Result<(), EncodeError> {
        Message::encode(self, buffer)
    }
}

/// A message with the dataset's etag as its last field, which is not copied into the message.
#[derive(Debug)]
pub(super) struct Tagged<M> {
    pub(super) message: M,
    /// The field's number, higher than all others in the message. `None`: the message has no such field.
    pub(super) etag_field: Option<u32>,
    pub(super) dataset: DatasetHandle,
}

impl<M> Tagged<M> {
    /// Number and value of the field, if it is not empty.
    fn etag(&self) -> Option<(u32, &str)> {
        let etag = self.dataset.etag();
        self.etag_field
            .filter(|_| !etag.is_empty())
            .map(|field| (field, etag))
    }
}

impl<M: Message> ResponseFields for Tagged<M> {
    fn encoded_len(&self) -> usize {
        let etag = self.etag();
        let etag = etag.map_or(0, |(field, etag)| {
            key_len(field) + encoded_len_varint(etag.len() as u64) + etag.len()
        });
        self.message.encoded_len() + etag
    }
    fn encode(&self, buffer: &mut BytesMut) -> Result<(), EncodeError> {
        self.message.encode(buffer)?;
        if let Some((field, etag)) = self.etag() {
            encode_key(field, WireType::LengthDelimited, buffer);
            encode_varint(etag.len() as u64, buffer);
            buffer.put_slice(etag.as_bytes());
        }
        Ok(())
    }
}

/// Data up to this size is copied behind its head: a copy costs less than another slice in the system call.
const COPIED_BYTES_MAX: usize = 1 << 10;

/// Longest frame with several messages, and its most parts.
const RUN_BYTES_MAX: usize = 64 << 10;
const RUN_PARTS_MAX: usize = 48;
/// Most bytes of heads in a frame with several messages: a response's text of up to 4 KiB has no charge of its own, and a
/// client that does not read holds a frame or two of each stream.
const RUN_HEAD_BYTES_MAX: usize = 8 << 10;

/// Messages sent in one frame. Keeps the originals of copied data, so that they stay charged to the
/// connection until the frame is sent.
#[derive(Debug, Default)]
pub(super) struct FrameBuffer {
    parts: FrameParts,
    /// Heads and copied data, after `parts`.
    bytes: BytesMut,
    held: Vec<Bytes>,
    /// Of all messages.
    head_bytes: usize,
}

struct FrameBytes {
    bytes: Bytes,
    _held: Vec<Bytes>,
}

impl AsRef<[u8]> for FrameBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl FrameBuffer {
    /// Appends a message if it fits; returns it otherwise. An empty buffer has room for any message.
    pub(super) fn push(&mut self, encoded: EncodedMessage) -> Result<(), EncodedMessage> {
        let EncodedMessage { head, data } = encoded;
        let length = self.parts.remaining() + self.bytes.len();
        let fits = length + head.len() + data.len() <= RUN_BYTES_MAX
            && self.parts.count() < RUN_PARTS_MAX
            && self.head_bytes + head.len() <= RUN_HEAD_BYTES_MAX;
        if !fits && length > 0 {
            return Err(EncodedMessage { head, data });
        }
        self.head_bytes += head.len();
        let is_long = |part: &Bytes| part.len() > COPIED_BYTES_MAX;
        // A long head has a charge of its own.
        if is_long(&head) || (is_long(&data) && self.bytes.is_empty()) {
            self.close_part();
            self.parts.push(head);
        } else {
            self.bytes.extend_from_slice(&head);
        }
        if is_long(&data) {
            self.close_part();
            self.parts.push(data);
        } else if !data.is_empty() {
            self.bytes.extend_from_slice(&data);
            self.held.push(data);
        }
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty() && !self.parts.has_remaining()
    }

    fn close_part(&mut self) {
        if self.bytes.is_empty() {
            return;
        }
        let bytes = self.bytes.split().freeze();
        let held = std::mem::take(&mut self.held);
        self.parts.push(if held.is_empty() {
            bytes
        } else {
            Bytes::from_owner(FrameBytes { bytes, _held: held })
        });
    }

    pub(super) fn into_frame(mut self) -> FrameParts {
        self.close_part();
        self.parts
    }
}

impl EncodedMessage {
    /// The message as the payload of its own frame.
    pub(super) fn into_frame(self) -> FrameParts {
        let mut parts = FrameParts::from(self.head);
        parts.push(self.data);
        parts
    }

    /// The message with its head as `charge` returns it.
    ///
    /// # Errors
    /// Those of `charge`.
    pub(super) fn charged<E>(self, charge: impl FnOnce(Bytes) -> Result<Bytes, E>) -> Result<Self, E> {
        Ok(Self {
            head: charge(self.head)?,
            data: self.data,
        })
    }

    /// A response without `data`, and the bytes of `data`.
    ///
    /// # Errors
    /// INTERNAL: more than the 4 GiB of a gRPC message, which `limits.response_bytes` prevents.
    pub(super) fn unary(message: &impl ResponseFields, data: Bytes) -> Result<Self, Status> {
        let length = inner_length(message, data.len());
        let head_length = PREFIX_BYTES + length - data.len();
        let head = head_of(length, head_length, |head| put_inner(head, message, data.len()))?;
        Ok(Self { head, data })
    }

    /// The same response inside the field `tag` of a stream's response with this id.
    ///
    /// # Errors
    /// As for `unary`.
    pub(super) fn nested(
        id: u64,
        tag: u32,
        message: &impl ResponseFields,
        data: Bytes,
    ) -> Result<Self, Status> {
        let inner = inner_length(message, data.len());
        let id_length = if id == 0 {
            0
        } else {
            key_len(ID_TAG) + encoded_len_varint(id)
        };
        let length = id_length + key_len(tag) + encoded_len_varint(inner as u64) + inner;
        let head = head_of(length, PREFIX_BYTES + length - data.len(), |head| {
            if id != 0 {
                encode_key(ID_TAG, WireType::Varint, head);
                encode_varint(id, head);
            }
            encode_key(tag, WireType::LengthDelimited, head);
            encode_varint(inner as u64, head);
            put_inner(head, message, data.len())
        })?;
        Ok(Self { head, data })
    }

    /// A message without `data`.
    ///
    /// # Errors
    /// As for `unary`.
    pub(super) fn plain(message: &impl Message) -> Result<Self, Status> {
        let length = message.encoded_len();
        let head = head_of(length, PREFIX_BYTES + length, |head| message.encode(head))?;
        let data = Bytes::new();
        Ok(Self { head, data })
    }
}

/// Encoded length of the message with `data`; an empty `data` is not written at all.
fn inner_length(message: &impl ResponseFields, data_length: usize) -> usize {
    message.encoded_len() + data_field_length(data_length) + data_length
}

/// Length of the tag and length of `data`.
fn data_field_length(data_length: usize) -> usize {
    if data_length == 0 {
        0
    } else {
        key_len(DATA_TAG) + encoded_len_varint(data_length as u64)
    }
}

/// A head of `head_length` bytes: the gRPC prefix, and what `fill` appends.
fn head_of(
    message_length: usize,
    head_length: usize,
    fill: impl FnOnce(&mut BytesMut) -> Result<(), EncodeError>,
) -> Result<Bytes, Status> {
    let prefix = prefix(message_length)?;
    let put = |head: &mut BytesMut| {
        head.put_slice(&prefix);
        fill(head).map_err(|error| Status::internal(error.to_string()))
    };
    if head_length > SMALL_HEAD_BYTES {
        let mut head = BytesMut::with_capacity(head_length);
        put(&mut head)?;
        return Ok(head.freeze());
    }
    HEADS.with_borrow_mut(|heads| {
        if heads.capacity() < head_length {
            heads.reserve(HEADS_BYTES);
        }
        put(heads).inspect_err(|_| heads.clear())?;
        Ok(heads.split().freeze())
    })
}

fn prefix(message_length: usize) -> Result<[u8; PREFIX_BYTES], Status> {
    let length = u32::try_from(message_length).map_err(|_| {
        Status::internal(format!(
            "the answer has {message_length} bytes; a message can have 4 GiB"
        ))
    })?;
    let [a, b, c, d] = length.to_be_bytes();
    Ok([0, a, b, c, d])
}

fn put_inner(
    head: &mut BytesMut,
    message: &impl ResponseFields,
    data_length: usize,
) -> Result<(), EncodeError> {
    message.encode(head)?;
    if data_length > 0 {
        encode_key(DATA_TAG, WireType::LengthDelimited, head);
        encode_varint(data_length as u64, head);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use ringfetch_proto::v1::fetch_stream_response::Response as OneOf;
    use ringfetch_proto::v1::{
        FetchBlocksResponse, FetchObjectsResponse, FetchRangesResponse, FetchStreamResponse,
        FetchVectorsResponse, ItemError,
    };

    /// What prost and gRPC make of a message: the prefix and the encoding.
    fn by_prost(message: &impl Message) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.put_u32(u32::try_from(message.encoded_len()).unwrap());
        bytes.extend(message.encode_to_vec());
        bytes
    }

    fn joined(encoded: &EncodedMessage) -> Vec<u8> {
        // The head is allocated once, at its exact length.
        [&encoded.head[..], &encoded.data[..]].concat()
    }

    fn item_errors() -> impl Strategy<Value = Vec<ItemError>> {
        let error = (any::<u32>(), any::<i32>(), ".{0,20}");
        prop::collection::vec(
            error.prop_map(|(item, code, message)| ItemError { item, code, message }),
            0..4,
        )
    }

    fn data() -> impl Strategy<Value = Bytes> {
        // Including the lengths around which a varint grows by a byte.
        let length = prop_oneof![0usize..200, 16_380usize..16_390, 100_000usize..100_001];
        length.prop_map(|length| Bytes::from(vec![7; length]))
    }

    macro_rules! equals_prost {
        ($full:expr, $variant:path, $tag:expr, $id:expr) => {{
            let full = $full;
            let mut without = full.clone();
            let data = std::mem::take(&mut without.data);
            let unary = EncodedMessage::unary(&without, data.clone()).unwrap();
            prop_assert_eq!(joined(&unary), by_prost(&full));
            prop_assert_eq!(unary.data.as_ptr(), data.as_ptr(), "data was copied");
            let nested = EncodedMessage::nested($id, $tag, &without, data).unwrap();
            let whole = FetchStreamResponse {
                id: $id,
                response: Some($variant(full)),
            };
            prop_assert_eq!(joined(&nested), by_prost(&whole));
        }};
    }

    proptest! {
        #[test]
        fn envelopes_are_what_prost_writes(
            number in any::<u32>(),
            dtype in 0i32..6,
            lengths in prop::collection::vec(any::<u32>(), 0..20),
            errors in item_errors(),
            etag in "[0-9a-f]{0,32}",
            data in data(),
            id in prop_oneof![Just(0u64), 1..200u64, any::<u64>()],
        ) {
            // Any response of the four kinds, alone and inside a stream's response: byte for byte prost's
            // encoding.
            equals_prost!(
                FetchBlocksResponse {
                    block_bytes: number, lengths: lengths.clone(), errors: errors.clone(), etag: etag.clone(),
                    data: data.clone(),
                },
                OneOf::Blocks, 2, id
            );
            equals_prost!(
                FetchVectorsResponse {
                    dim: number, dtype, lengths: lengths.clone(), errors: errors.clone(), etag: etag.clone(),
                    data: data.clone(),
                },
                OneOf::Vectors, 3, id
            );
            equals_prost!(
                FetchRangesResponse {
                    lengths: lengths.clone(), errors: errors.clone(), etag: etag.clone(), data: data.clone(),
                },
                OneOf::Ranges, 4, id
            );
            equals_prost!(FetchObjectsResponse { lengths, errors, etags: vec![etag; 2], data }, OneOf::Objects, 5, id);
        }
    }

    proptest! {
        #[test]
        fn frames_hold_the_messages_in_order_and_are_bounded(
            lengths in prop::collection::vec(
                prop_oneof![0usize..40, 1_000usize..1_050, 4_096usize..4_097, 60_000usize..70_000],
                1..150,
            ),
        ) {
            // Messages of any size, in as few frames as they fit in: together the bytes of all messages, in
            // order. A frame of several messages has at most 64 KiB and few parts, and large data is not
            // copied.
            let (mut sent, mut expected) = (Vec::new(), Vec::new());
            let mut buffer = FrameBuffer::default();
            let mut messages = 0;
            let mut send = |frame: FrameParts, messages: usize| {
                let mut frame = frame;
                assert!(messages == 1 || frame.remaining() <= RUN_BYTES_MAX);
                assert!(frame.count() <= RUN_PARTS_MAX + 2);
                sent.extend_from_slice(&frame.copy_to_bytes(frame.remaining()));
            };
            for (i, length) in lengths.into_iter().enumerate() {
                let data = Bytes::from(vec![u8::try_from(i % 251).unwrap(); length]);
                let message = EncodedMessage::unary(&FetchRangesResponse::default(), data.clone()).unwrap();
                expected.extend(joined(&message));
                if let Err(refused) = buffer.push(message) {
                    send(std::mem::take(&mut buffer).into_frame(), messages);
                    messages = 0;
                    prop_assert!(buffer.push(refused).is_ok(), "an empty buffer has room");
                }
                messages += 1;
                if length > COPIED_BYTES_MAX {
                    let uncopied = buffer.bytes.is_empty();
                    prop_assert!(uncopied, "its data is a part of its own");
                }
                prop_assert!(!buffer.is_empty());
            }
            send(buffer.into_frame(), messages);
            prop_assert!(sent == expected);
        }
    }

    #[test]
    fn a_message_longer_than_grpc_can_say_is_refused() {
        // 4 GiB do not fit in the prefix: an error, not a wrapped length.
        assert!(prefix(1 << 32).is_err());
        assert_eq!(prefix((1 << 32) - 1).unwrap(), [0, 255, 255, 255, 255]);
    }
}
