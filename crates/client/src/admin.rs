//! Operating a daemon over its admin listener.

use crate::builder::Builder;
use crate::client::Client;
use crate::error::Error;
use crate::status::{Backend, FromWire, Reloaded, Status, Switched};
use prost::Message;
use ringfetch_proto::v1 as wire;

/// A client of the daemon's admin listener.
#[derive(Debug, Clone)]
pub struct AdminClient {
    client: Client,
}

impl AdminClient {
    /// A client of the admin listener at `http://HOST:PORT`, with [`Builder`]'s defaults. It connects with its first
    /// call.
    ///
    /// # Errors
    /// `Invalid` for something that is no such URL.
    pub fn connect_lazy(url: impl Into<String>) -> Result<Self, Error> {
        Builder::new(url).connect_lazy().map(Self::from)
    }

    /// State, backend and why, memory, shards, rates.
    ///
    /// # Errors
    /// What failed the call.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the call.
    pub async fn status(&self) -> Result<Status, Error> {
        self.call::<wire::GetStatusResponse, _>(
            "/ringfetch.v1.AdminService/GetStatus",
            &wire::GetStatusRequest {},
        )
        .await
    }

    /// Replaces the daemon's log filter until its next reload or restart; returns the one before.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a filter that does not parse.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open whether the filter was replaced.
    pub async fn set_log_level(&self, filter: &str) -> Result<String, Error> {
        let request = wire::SetLogLevelRequest {
            filter: filter.to_owned(),
        };
        let path = "/ringfetch.v1.AdminService/SetLogLevel";
        let answer: wire::SetLogLevelResponse = self.client.unary(path, &request).await?;
        Ok(answer.previous)
    }

    /// Makes a backend read from now on, until the daemon's next reload or restart: a dataset, or (`None`) every one that
    /// has none of its own.
    ///
    /// # Errors
    /// FAILED_PRECONDITION where the backend is unavailable, NOT_FOUND for a dataset that is not served. Nothing has changed
    /// then.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open whether the switch was made.
    pub async fn set_backend(&self, backend: Backend, dataset: Option<&str>) -> Result<Switched, Error> {
        let request = wire::SetBackendRequest {
            backend: backend.number(),
            dataset: dataset.map(str::to_owned),
        };
        self.call::<wire::SetBackendResponse, _>("/ringfetch.v1.AdminService/SetBackend", &request)
            .await
    }

    /// Takes a dataset's own backend away: it is read by the engine's again.
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
        let answer: wire::ClearBackendResponse = self.client.unary(path, &request).await?;
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
    /// INVALID_ARGUMENT with what is wrong with the configuration, FAILED_PRECONDITION for a backend that is unavailable
    /// or a daemon without a file. Nothing has changed then.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open whether the reload was made.
    pub async fn reload(&self) -> Result<Reloaded, Error> {
        self.call::<wire::ReloadResponse, _>("/ringfetch.v1.AdminService/Reload", &wire::ReloadRequest {})
            .await
    }

    async fn call<M: Message + Default, T: FromWire<M>>(
        &self,
        path: &'static str,
        request: &impl Message,
    ) -> Result<T, Error> {
        let answer: M = self.client.unary(path, request).await?;
        Ok(T::from_wire(answer))
    }
}

impl From<Client> for AdminClient {
    /// Over a client that was built with settings of its own for the admin listener's address.
    fn from(client: Client) -> Self {
        Self { client }
    }
}
