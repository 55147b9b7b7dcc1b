//! Clients of the daemon, with the settings that all commands share.

use crate::args::{Global, Token};
use crate::outcome::Failure;
use ringfetch_client::{AdminClient, Answer, Builder, Client, Code, Error};
use std::time::Duration;

/// A client of the daemon's data port.
pub(crate) fn client(global: &Global) -> Result<Client, Failure> {
    let client = builder(global, &global.grpc)?;
    client.connect_lazy().map_err(grpc_failure(global))
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

fn builder(global: &Global, url: &str) -> Result<Builder, Failure> {
    Ok(builders(global)?(url))
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

/// Whether one response may not hold what was asked for, the whole request or an item of it: what is refused only now
/// comes with a hint of when to retry.
pub(crate) fn is_too_large(answer: &Result<Answer, Error>) -> bool {
    match answer {
        Ok(answer) => {
            let mut errors = answer.items().errors().iter();
            errors.any(|error| error.code == Code::ResourceExhausted)
        }
        Err(error) => error.code() == Some(Code::ResourceExhausted) && error.retry_after().is_none(),
    }
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
