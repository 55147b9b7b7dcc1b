//! A request in flight, which its client may cancel.

use super::super::encode::EncodedMessage;
use crate::error_status;
use pin_project_lite::pin_project;
use ringfetch_proto::v1;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use tonic::{Code, Status};

/// The response to a request that its client cancelled.
fn cancelled(id: u64) -> Result<EncodedMessage, Status> {
    let status = error_status::status_with(Code::Cancelled, "CANCELLED", "cancelled by the client", None);
    let response = v1::fetch_stream_response::Response::Status(error_status::to_rpc_status(&status));
    EncodedMessage::plain(&v1::FetchStreamResponse {
        id,
        response: Some(response),
    })
}

pin_project! {
    pub(super) struct InFlightRequest<F> {
        id: u64,
        // `None`: cancelled.
        #[pin]
        work: Option<F>,
        // The waker of the last poll.
        waker: Option<Waker>,
    }
}

impl<F> InFlightRequest<F> {
    pub(super) fn new(id: u64, work: F) -> Self {
        Self {
            id,
            work: Some(work),
            waker: None,
        }
    }

    /// Whether its client has not cancelled it.
    pub(super) fn is_open(&self) -> bool {
        self.work.is_some()
    }

    /// Drops the work if the id matches; the response is then ready.
    pub(super) fn cancel(self: Pin<&mut Self>, id: u64) {
        let this = self.project();
        let mut work = this.work;
        if *this.id == id && work.is_some() {
            work.set(None);
            if let Some(waker) = this.waker.take() {
                waker.wake();
            }
        }
    }
}

impl<F: Future<Output = Result<EncodedMessage, Status>>> Future for InFlightRequest<F> {
    type Output = Result<EncodedMessage, Status>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let Some(work) = this.work.as_pin_mut() else {
            return Poll::Ready(cancelled(*this.id));
        };
        let answer = work.poll(cx);
        if answer.is_pending()
            && !this
                .waker
                .as_ref()
                .is_some_and(|waker| waker.will_wake(cx.waker()))
        {
            *this.waker = Some(cx.waker().clone());
        }
        answer
    }
}
