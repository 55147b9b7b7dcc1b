//! Clients of the daemon, with the settings that all commands share.

use crate::args::Global;
use crate::outcome::Failure;
use ringfetch_client::{AdminClient, Client};

/// A client of the daemon's data port.
pub(crate) fn client(global: &Global) -> Result<Client, Failure> {
    Client::builder(&global.grpc)
        .timeout(global.timeout)
        .connect_lazy()
        .map_err(|error| Failure::call(&error, "grpc", &global.grpc))
}

/// A client of the daemon's admin port.
pub(crate) fn admin(global: &Global) -> Result<AdminClient, Failure> {
    let client = Client::builder(&global.admin)
        .timeout(global.timeout)
        .connect_lazy();
    client
        .map(AdminClient::from)
        .map_err(|error| Failure::call(&error, "admin", &global.admin))
}
