//! Operates a daemon through its admin listener.

use crate::client::Client;
use crate::error::Error;
use crate::status::{Backend, FromWire, Reloaded, Status, Switched};
use ringfetch_proto::v1 as wire;

/// A client of the daemon's admin listener. What changes something is sent once and never retried, since the
/// answer to a second call would say that nothing has changed: after `DeadlineExceeded`, and after `Transport`
/// with `sent`, it may have been done.
#[derive(Debug, Clone)]
pub struct AdminClient {
    client: Client,
}

impl AdminClient {
    /// State, backend and why, memory, shards, rates.
    ///
    /// # Errors
    /// Whatever fails the call.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the call.
    pub async fn status(&self) -> Result<Status, Error> {
        let path = "/ringfetch.v1.AdminService/GetStatus";
        let answer: wire::GetStatusResponse = self.client.unary(path, &wire::GetStatusRequest {}).await?;
        Ok(Status::from_wire(answer))
    }

    /// Replaces the daemon's log filter until its next reload or restart; returns the previous one.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a filter that does not parse.
    ///
    /// # Cancel safety
    /// If the future is dropped, the filter may or may not have been replaced.
    pub async fn set_log_level(&self, filter: &str) -> Result<String, Error> {
        let request = wire::SetLogLevelRequest {
            filter: filter.to_owned(),
        };
        let path = "/ringfetch.v1.AdminService/SetLogLevel";
        let answer: wire::SetLogLevelResponse = self.client.change(path, &request).await?;
        Ok(answer.previous)
    }

    /// Switches to a backend until the daemon's next reload or restart: for a dataset, or (`None`) for every
    /// dataset that has no backend of its own.
    ///
    /// # Errors
    /// FAILED_PRECONDITION if the backend is unavailable, NOT_FOUND for a dataset that is not served. Nothing
    /// has changed then.
    ///
    /// # Cancel safety
    /// If the future is dropped, the switch may or may not have been made.
    pub async fn set_backend(&self, backend: Backend, dataset: Option<&str>) -> Result<Switched, Error> {
        let request = wire::SetBackendRequest {
            backend: backend.number(),
            dataset: dataset.map(str::to_owned),
        };
        let path = "/ringfetch.v1.AdminService/SetBackend";
        let answer: wire::SetBackendResponse = self.client.change(path, &request).await?;
        Ok(Switched::from_wire(answer))
    }

    /// Clears a dataset's own backend: the engine's reads it again.
    ///
    /// # Errors
    /// As [`Self::set_backend`].
    ///
    /// # Cancel safety
    /// As [`Self::set_backend`].
    pub async fn clear_backend(&self, dataset: &str) -> Result<Switched, Error> {
        let request = wire::ClearBackendRequest {
            dataset: dataset.to_owned(),
        };
        let path = "/ringfetch.v1.AdminService/ClearBackend";
        let answer: wire::ClearBackendResponse = self.client.change(path, &request).await?;
        Ok(Switched {
            previous: Backend::from_wire(answer.previous),
            backend: Backend::from_wire(answer.backend),
            reason: answer.reason,
            datasets_with_own: Vec::new(),
        })
    }

    /// Makes the daemon read its configuration file again and apply what can change while it serves.
    ///
    /// # Errors
    /// INVALID_ARGUMENT with what is wrong with the configuration, FAILED_PRECONDITION if a backend is
    /// unavailable or the daemon has no file. Nothing has changed then.
    ///
    /// # Cancel safety
    /// If the future is dropped, the reload may or may not have been made.
    pub async fn reload(&self) -> Result<Reloaded, Error> {
        let path = "/ringfetch.v1.AdminService/Reload";
        let answer: wire::ReloadResponse = self.client.change(path, &wire::ReloadRequest {}).await?;
        Ok(Reloaded::from_wire(answer))
    }
}

impl From<Client> for AdminClient {
    /// From a client that was built with its own settings for the admin listener's address.
    fn from(client: Client) -> Self {
        Self { client }
    }
}
