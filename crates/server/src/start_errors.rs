//! What prevents a start: mistakes in the configuration and what this host refuses, all reported at once.

use ringfetch_engine::dataset::{DatasetSpec, free_descriptors, is_refused_by_host};
use ringfetch_server::catalogue::{Catalogue, OpenErrors};
use ringfetch_server::config::{AccessLogConfig, Config, listed};
use ringfetch_server::key_file::{FileError, HOST_REMEDY};
use std::fmt::Display;
use std::io;

/// Mistakes in the configuration or the files it names, one per line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct ConfigError(pub(crate) String);

/// What this host refuses, one per line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct HostError(pub(crate) String);

/// Gathers both.
#[derive(Default)]
pub(crate) struct StartErrors {
    mistakes: Vec<String>,
    refusals: Vec<String>,
}

impl StartErrors {
    /// The value, or one more mistake.
    pub(crate) fn of_config<T, E: Display>(&mut self, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.mistakes.push(error.to_string())).ok()
    }

    /// The value, or one more refusal of this host.
    pub(crate) fn of_host<T, E: Display>(&mut self, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.refusals.push(error.to_string())).ok()
    }

    /// The value, or what is wrong with a file that the configuration names.
    pub(crate) fn of_key_file<T>(&mut self, result: Result<T, FileError>) -> Option<T> {
        match result {
            // A mistake, perhaps; but systemd tries again after a refusal only.
            Err(error) if error.is_refused_by_host() || error.may_pass => self.of_host(Err(error)),
            result => self.of_config(result),
        }
    }

    /// The value, or what is wrong with the file of a flag or key: a refusal of this host where it has no descriptor or no memory
    /// left.
    pub(crate) fn of_file<T>(&mut self, result: io::Result<T>, flag: &str, remedy: &str) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) if is_refused_by_host(&error) => {
                self.of_host(Err(format!("{flag}: {error}; {HOST_REMEDY}")))
            }
            Err(error) => self.of_config(Err(format!("{flag}: {error}; {remedy}"))),
        }
    }

    /// The log if there is to be one, or what is wrong with its target.
    pub(crate) fn of_access_log<T>(
        &mut self,
        config: &Config,
        open: impl FnOnce(&AccessLogConfig) -> io::Result<T>,
    ) -> Option<Option<T>> {
        let Some(log) = &config.access_log else {
            return Some(None);
        };
        let key = format!("access_log.path: {} cannot be written", log.target);
        let remedy = "name a file that the daemon may append to, stdout, stderr or off";
        match open(log) {
            // EAGAIN of clone(2).
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let remedy = "raise the limit on threads (ulimit -u, or the cgroup's pids.max)";
                self.of_host(Err(format!(
                    "{key}: there is no thread for it: {error}; {remedy}"
                )))
            }
            opened => self.of_file(opened, &key, remedy).map(Some),
        }
    }

    /// `begins`: as of [`Catalogue::open`].
    pub(crate) fn open(
        &mut self,
        datasets: &[DatasetSpec],
        begins: impl Fn(&DatasetSpec),
    ) -> Option<Catalogue> {
        let OpenErrors(errors) = match Catalogue::open(datasets, begins) {
            Ok(catalogue) => return Some(catalogue),
            Err(errors) => errors,
        };
        // So that no further check fails because of those that are still being closed.
        free_descriptors();
        for error in errors {
            let list = if error.is_refused_by_host {
                &mut self.refusals
            } else {
                &mut self.mistakes
            };
            list.push(error.to_string());
        }
        None
    }

    pub(crate) fn any(&self) -> bool {
        !self.mistakes.is_empty() || !self.refusals.is_empty()
    }

    /// All of them: a [`ConfigError`] if there is a mistake, which remains when the host refuses nothing more; else a
    /// [`HostError`].
    pub(crate) fn into_error(self) -> anyhow::Error {
        let is_mistaken = !self.mistakes.is_empty();
        let text = listed(&[self.mistakes, self.refusals].concat(), "\n  ");
        if is_mistaken {
            ConfigError(text).into()
        } else {
            HostError(text).into()
        }
    }
}
