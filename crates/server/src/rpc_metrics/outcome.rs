//! How a request of a port ended. Its code is known with its head, but a client may leave before it has the
//! response, and a body may fail. So what is observed while a response is polled is collected, and counted by the
//! listener when the response has ended.
//!
//! Collected in a variable of the thread, like records: three numbers, without an allocation or a reference count.

use super::labels::{GRPC_CODES, HTTP_CODES, grpc_code_index, http_code_index};
use super::{GRPC, GrpcMethod, HTTP, HttpOperation, Method, TRANSPORTS};
use std::cell::Cell;

/// Transport, method and code, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    transport: u8,
    method: u8,
    code: u8,
}

/// Tells a packed outcome from none.
const IS_SOME: u8 = 1;

impl Outcome {
    pub(super) fn new(transport: usize, method: usize, code: usize) -> Self {
        // There are two transports and fewer than 30 methods and codes.
        let number = |index| u8::try_from(index).unwrap_or_default();
        Self {
            transport: number(transport),
            method: number(method),
            code: number(code),
        }
    }

    /// The outcome of a request over HTTP whose client left before it was served: with HTTP/1, hyper drops its
    /// response unpolled.
    pub(crate) fn unserved_http() -> Self {
        Self::new(HTTP, HttpOperation::Other.index(), HttpOperation::ABANDONED)
    }

    pub(super) fn transport(self) -> usize {
        self.transport.into()
    }

    pub(super) fn method(self) -> usize {
        self.method.into()
    }

    pub(super) fn code(self) -> usize {
        self.code.into()
    }

    fn is_grpc(self) -> bool {
        self.transport() == GRPC
    }

    pub(crate) fn code_name(self) -> &'static str {
        let labels: &[&str] = if self.is_grpc() { &GRPC_CODES } else { &HTTP_CODES };
        labels.get(self.code()).copied().unwrap_or("other")
    }

    /// The outcome if the client left: CANCELLED or 499.
    pub(crate) fn abandoned(self) -> Self {
        let abandoned = if self.is_grpc() {
            GrpcMethod::ABANDONED
        } else {
            HttpOperation::ABANDONED
        };
        Self::new(self.transport(), self.method(), abandoned)
    }

    /// The outcome if the client did not get the whole response. A failure stays what it was.
    pub(crate) fn unsent(self) -> Self {
        match is_success(self.code_name()) {
            true => self.abandoned(),
            false => self,
        }
    }

    /// As one number; 0: none.
    pub(crate) fn pack(self) -> u32 {
        u32::from_be_bytes([IS_SOME, self.transport, self.method, self.code])
    }

    pub(crate) fn unpack(packed: u32) -> Option<Self> {
        let [is_some, transport, method, code] = packed.to_be_bytes();
        (is_some == IS_SOME).then_some(Self {
            transport,
            method,
            code,
        })
    }
}

/// Whether a `code` label is not an error.
pub(crate) fn is_success(code: &str) -> bool {
    code == "OK" || code.starts_with(['1', '2', '3'])
}

/// What was observed during a [`collect`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Collected {
    outcome: Option<Outcome>,
    /// What the response became after its outcome was observed, as the number of its code by transport.
    became: Option<[usize; TRANSPORTS.len()]>,
}

impl Collected {
    /// The outcome, if `before` was known before.
    pub(crate) fn added_to(self, before: Option<Outcome>) -> Option<Outcome> {
        let outcome = self.outcome.or(before)?;
        let code = self
            .became
            .and_then(|codes| codes.get(outcome.transport()).copied());
        Some(match code {
            Some(code) => Outcome::new(outcome.transport(), outcome.method(), code),
            None => outcome,
        })
    }

    pub(crate) fn is_empty(self) -> bool {
        self == Self::default()
    }
}

thread_local! {
    static COLLECTED: Cell<Option<Collected>> = const { Cell::new(None) };
}

/// Polls a response: what is observed about its request meanwhile is returned, not counted.
pub(crate) fn collect<T>(poll: impl FnOnce() -> T) -> (T, Collected) {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            COLLECTED.set(None);
        }
    }
    let _after_a_panic_too = Reset;
    COLLECTED.set(Some(Collected::default()));
    let polled = poll();
    (polled, COLLECTED.take().unwrap_or_default())
}

/// Leaves an outcome to the collector. Returns `false` if there is none.
pub(super) fn leave_to_collector(outcome: Outcome) -> bool {
    // There is none while the thread ends.
    let left = COLLECTED.try_with(|collected| {
        let Some(mut held) = collected.get() else {
            return false;
        };
        held.outcome = Some(outcome);
        collected.set(Some(held));
        true
    });
    left.unwrap_or(false)
}

/// An error ends the body that is being polled, which HTTP has no trailers to report in. Before the head the response
/// would have had this status.
pub(crate) fn cut_short(status: ::http::StatusCode) {
    replaced(tonic::Code::Unknown, status);
}

/// A refusal with this code or status replaces the response that is being polled.
pub(crate) fn replaced(code: tonic::Code, status: ::http::StatusCode) {
    if let Some(mut held) = COLLECTED.get() {
        held.became = Some([grpc_code_index(code), http_code_index(status)]);
        COLLECTED.set(Some(held));
    }
}
