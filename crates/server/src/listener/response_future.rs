//! The future of a response, in memory that its thread reuses: its state is most of what a small request
//! allocates.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::{HeaderMap, Response};
use tokio_util::sync::ReusableBoxFuture;

use super::bodies::AnswerBody;

/// A future in a box.
type Boxed = ReusableBoxFuture<'static, Response<AnswerBody>>;

/// Most boxes that a thread keeps, of about 1.5 KiB each.
const SPARES_MAX: usize = 64;

thread_local! {
    /// Boxes of completed futures.
    static SPARES: RefCell<Vec<Boxed>> = const { RefCell::new(Vec::new()) };
}

/// A boxed future of a response; its box is reused (see the module).
#[derive(Debug)]
pub struct ResponseFuture(Option<Boxed>);

/// Largest header map of a request that is reused for its response.
const KEPT_HEADERS_MAX: usize = 24;

/// A request's header map as memory for its response's, unless it is large.
pub(crate) fn cleared(mut headers: HeaderMap) -> HeaderMap {
    if headers.capacity() > KEPT_HEADERS_MAX {
        return HeaderMap::new();
    }
    headers.clear();
    headers
}

impl ResponseFuture {
    /// Boxes a future.
    pub fn new(future: impl Future<Output = Response<AnswerBody>> + Send + 'static) -> Self {
        Self(Some(match SPARES.with_borrow_mut(Vec::pop) {
            Some(mut spare) => {
                spare.set(future);
                spare
            }
            None => Boxed::new(future),
        }))
    }
}

impl Future for ResponseFuture {
    type Output = Response<AnswerBody>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Response<AnswerBody>> {
        let this = self.get_mut();
        // Futures are not polled after completion.
        let Some(future) = &mut this.0 else {
            return Poll::Pending;
        };
        let response = ready!(future.poll(cx));
        SPARES.with_borrow_mut(|spares| {
            if spares.len() < SPARES_MAX {
                spares.extend(this.0.take());
            }
        });
        Poll::Ready(response)
    }
}
