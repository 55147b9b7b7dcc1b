//! Clients of the daemon, with the settings that all commands share.

use crate::args::{Global, Token};
use crate::outcome::Failure;
use ringfetch_client::{
    AdminClient, Answer, Builder, Client, Code, Error, Request, RetryBudget, RetryPolicy,
};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

/// A client of the daemon's data port.
pub(crate) fn client(global: &Global) -> Result<Client, Failure> {
    // Each call has its own limit. One for all would end a listing whose every page is refused once, by a rate.
    let client = builder(global, &global.grpc)?.retry_budget(no_budget());
    client.connect_lazy().map_err(grpc_failure(global))
}

/// Retries of one command cannot multiply an overload.
fn no_budget() -> RetryBudget {
    let mut budget = RetryBudget::default();
    budget.tokens_max = 0;
    budget
}

/// So many attempts that fail are taken for more than a moment's trouble, if what refuses them is no rate.
const ATTEMPTS_MAX: u32 = 5;

/// A client of the daemon's data port that waits for the rates of its principal as long as the daemon says. `--timeout` bounds
/// each attempt, and no wait.
#[derive(Debug)]
pub(crate) struct PatientClient {
    client: Client,
    /// Held by the refused call that waits. If all waited at once, one would be granted, and the others refused again.
    turn: Mutex<()>,
}

impl PatientClient {
    pub(crate) fn new(global: &Global) -> Result<Self, Failure> {
        // A long read outlives the restart of its daemon.
        let mut retry = RetryPolicy::default();
        // What comes with a hint is retried here instead, since a wait there takes its time from the attempt.
        retry.hint_max = Duration::ZERO;
        let builder = builder(global, &global.grpc)?.retry(retry);
        let client = builder.retry_budget(no_budget()).connect_lazy();
        Ok(Self {
            client: client.map_err(grpc_failure(global))?,
            turn: Mutex::new(()),
        })
    }

    /// Makes a call, again and again as long as it is refused and to be repeated later.
    pub(crate) async fn call<'a, T, F>(&'a self, call: impl Fn(&'a Client) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let (mut turn, mut failures) = (None, 0);
        loop {
            let error = match call(&self.client).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let Some(hint) = error.retry_after().filter(|_| error.is_retryable()) else {
                return Err(error);
            };
            // What else there is to wait for may not pass: an overload, a drain, a device.
            failures += u32::from(!is_rate(&error));
            if failures == ATTEMPTS_MAX {
                return Err(error);
            }
            let refused = Instant::now();
            if turn.is_none() {
                turn = Some(self.turn.lock().await);
            }
            sleep(hint.saturating_sub(refused.elapsed())).await;
        }
    }

    /// As [`Client::fetch`], but waits for an item that cannot be read for now, too.
    pub(crate) async fn fetch(&self, request: Request) -> Result<Answer, Error> {
        match self.fetch_whole(&request).await {
            // Asked again: which items fail.
            Err(error) if is_final(&error) => self.call(|client| client.fetch(request.clone())).await,
            Err(error @ Error::Status(_)) if error.is_retryable() => {
                self.client.fetch(request).await.or(Err(error))
            }
            answer => answer,
        }
    }

    /// As [`Client::fetch`], of all items or none. The error of an item has a hint then, if it may pass.
    pub(crate) async fn fetch_whole(&self, request: &Request) -> Result<Answer, Error> {
        self.call(|client| async { client.with_fail_fast(true).fetch(request.clone()).await })
            .await
    }
}

/// A client of the daemon's admin port.
pub(crate) fn admin(global: &Global) -> Result<AdminClient, Failure> {
    admin_within(global, global.timeout)
}

/// As [`admin`], with another time limit.
pub(crate) fn admin_within(global: &Global, timeout: Duration) -> Result<AdminClient, Failure> {
    let client = builder(global, &global.admin)?.timeout(timeout);
    let client = client.connect_lazy().map_err(admin_failure(global))?;
    Ok(AdminClient::from(client))
}

/// For somebody who waits for the answer, and wants to know soon that no daemon is there.
fn builder(global: &Global, url: &str) -> Result<Builder, Failure> {
    let mut retry = RetryPolicy::default();
    retry.attempts_max = ATTEMPTS_MAX;
    Ok(builders(global)?(url).retry(retry))
}

/// Returns a maker of client builders, with the token and TLS settings of the command line.
pub(crate) fn builders(global: &Global) -> Result<impl Fn(&str) -> Builder + use<>, Failure> {
    let (timeout, token, tls) = (global.timeout, global.token()?, global.tls.read()?);
    Ok(move |url: &str| {
        let mut builder = Client::builder(url).timeout(timeout);
        if let Some(Token(token)) = &token {
            builder = builder.token(token);
        }
        match &tls {
            None => builder,
            Some(tls) => builder.tls(tls.clone()),
        }
    })
}

/// Whether one response may not hold what was asked for, of [`PatientClient::fetch_whole`]: what is refused only now comes
/// with a hint of when to retry.
pub(crate) fn is_too_large(error: &Error) -> bool {
    error.code() == Some(Code::ResourceExhausted) && error.retry_after().is_none()
}

/// Whether the server refused what it would refuse again.
pub(crate) fn is_final(error: &Error) -> bool {
    let is_late = error.code() == Some(Code::DeadlineExceeded);
    matches!(error, Error::Status(_)) && !is_late && !error.is_retryable()
}

/// Whether a read that has begun may go on later: the server was too slow, or refuses the rest for now.
pub(crate) fn may_pass(error: &Error) -> bool {
    matches!(error, Error::DeadlineExceeded) || (error.retry_after().is_some() && error.is_retryable())
}

/// Whether a rate of the principal is used up, which passes.
fn is_rate(error: &Error) -> bool {
    matches!(error, Error::Status(status) if status.reason == "RATE_LIMITED")
}

/// Whether a request has more items than `limits.items_per_request`.
pub(crate) fn has_too_many_items(error: &Error) -> bool {
    matches!(error, Error::Status(status) if status.reason == "TOO_MANY_ITEMS")
}

/// Reports a failed call to the data port.
pub(crate) fn grpc_failure(global: &Global) -> impl Fn(Error) -> Failure + Copy {
    |error| Failure::call(&error, "grpc", &global.grpc)
}

/// Reports a failed call to the admin port that changes something; `look`: how to see whether it did.
pub(crate) fn change_failure(global: &Global, look: &str) -> impl Fn(Error) -> Failure {
    move |error| Failure::change(&error, &global.admin, look)
}

/// Reports a failed call to the admin port.
pub(crate) fn admin_failure(global: &Global) -> impl Fn(Error) -> Failure + Copy {
    |error| Failure::call(&error, "admin", &global.admin)
}
