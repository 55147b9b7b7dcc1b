//! Backend switches and reloads as gRPC messages and statuses.

use crate::error_status::{self, ERROR_DOMAIN};
use crate::grpc::convert;
use crate::reconfigure::{
    ConfigChange, LastReload, Reconfigurer, ReloadError, ReloadOutcome, ReloadProblem, SwitchError,
};
use crate::record::note_dataset;
use ringfetch_engine::config::BackendKind;
use ringfetch_proto::v1;
use std::collections::HashMap;
use std::time::{Duration, UNIX_EPOCH};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt as _};

/// Retry hint while the daemon is busy with other changes.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Most bytes of a mistake's key and of its description.
const KEY_BYTES_MAX: usize = 128;
const PROBLEM_BYTES_MAX: usize = 384;
/// Most bytes of mistakes in a message and in its details. Of trailers grpc-core and grpc-java accept 8 KiB: the message,
/// percent-encoded (up to three times as long), and once more with the details, in base64 (4/3).
const LISTED_BYTES_MAX: usize = 1024;
const DETAILS_BYTES_MAX: usize = 2048;

pub(super) async fn set_backend(
    reconfigurer: &Reconfigurer,
    request: v1::SetBackendRequest,
) -> Result<v1::SetBackendResponse, Status> {
    if let Some(name) = &request.dataset {
        note_dataset(name);
    }
    let backend = match request.backend() {
        v1::Backend::Uring => BackendKind::Uring,
        v1::Backend::Mmap => BackendKind::Mmap,
        v1::Backend::Auto => BackendKind::Auto,
        v1::Backend::Pread => BackendKind::Pread,
        v1::Backend::Unspecified => {
            let problem =
                "is missing or unknown: one of BACKEND_URING, BACKEND_MMAP, BACKEND_AUTO, BACKEND_PREAD";
            return Err(malformed("backend", problem));
        }
    };
    let switched = match request.dataset.as_deref() {
        None => reconfigurer.set_backend(backend).await,
        // A client that loses the name must not switch every dataset.
        Some("") => {
            return Err(malformed(
                "dataset",
                "is empty: name one, or leave it out for the engine's",
            ));
        }
        Some(dataset) => reconfigurer.set_backend_of(dataset, Some(backend)).await,
    };
    let switched = switched.map_err(|error| not_switched(&error))?;
    Ok(v1::SetBackendResponse {
        previous: convert::backend(switched.previous.backend).into(),
        backend: convert::backend(switched.now.backend).into(),
        reason: switched.now.reason,
        datasets_with_own: switched.datasets_with_own,
    })
}

pub(super) async fn clear_backend(
    reconfigurer: &Reconfigurer,
    request: v1::ClearBackendRequest,
) -> Result<v1::ClearBackendResponse, Status> {
    note_dataset(&request.dataset);
    let switched = reconfigurer.set_backend_of(&request.dataset, None).await;
    let switched = switched.map_err(|error| not_switched(&error))?;
    Ok(v1::ClearBackendResponse {
        previous: convert::backend(switched.previous.backend).into(),
        backend: convert::backend(switched.now.backend).into(),
        reason: switched.now.reason,
    })
}

pub(super) async fn reload(reconfigurer: &Reconfigurer) -> Result<v1::ReloadResponse, Status> {
    let ReloadOutcome {
        applied,
        needs_restart,
        datasets,
        notes,
    } = reconfigurer
        .reload()
        .await
        .map_err(|refused| not_reloaded(&refused))?;
    Ok(v1::ReloadResponse {
        applied: applied.into_iter().map(change).collect(),
        needs_restart: needs_restart.into_iter().map(change).collect(),
        datasets_added: datasets.added,
        datasets_removed: datasets.removed,
        datasets_replaced: datasets.replaced,
        datasets_unchanged: datasets.unchanged,
        notes,
    })
}

pub(super) fn last_reload(last: LastReload) -> v1::LastReload {
    let at = last.at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let successful = last.result.is_ok();
    let (problem, needs_restart) = match last.result {
        Ok(needs_restart) => (String::new(), needs_restart),
        Err(problem) => (problem, Vec::new()),
    };
    v1::LastReload {
        successful,
        at_unix_ms: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
        problem,
        needs_restart: needs_restart.into_iter().map(change).collect(),
    }
}

fn change(change: ConfigChange) -> v1::ConfigChange {
    let ConfigChange { key, before, after } = change;
    v1::ConfigChange { key, before, after }
}

/// INVALID_ARGUMENT for one field of a request.
pub(super) fn malformed(field: &str, problem: &str) -> Status {
    let message = error_status::message_of(&format_args!("{field}: {problem}"));
    let mut details = ErrorDetails::with_bad_request_violation(field, message.clone());
    details.set_error_info("MALFORMED", ERROR_DOMAIN, HashMap::new());
    Status::with_error_details(Code::InvalidArgument, message, details)
}

fn with_reason(code: Code, reason: &str, message: &impl std::fmt::Display) -> Status {
    error_status::status_with(code, reason, &error_status::message_of(message), None)
}

fn busy(message: &impl std::fmt::Display) -> Status {
    let (code, message) = (Code::ResourceExhausted, message.to_string());
    error_status::status_with(code, "BUSY", &message, Some(RETRY_AFTER))
}

fn not_switched(error: &SwitchError) -> Status {
    match error {
        SwitchError::NoDataset(error) => error_status::to_status(error, "dataset"),
        SwitchError::NotServing(_) => with_reason(Code::Unavailable, "NOT_SERVING", error),
        SwitchError::Busy => busy(error),
        SwitchError::Unavailable(_) => with_reason(Code::FailedPrecondition, "BACKEND_UNAVAILABLE", error),
        SwitchError::Broken(_) => with_reason(Code::Internal, "BROKEN", error),
    }
}

fn not_reloaded(refused: &ReloadError) -> Status {
    match refused {
        ReloadError::NotServing(_) => with_reason(Code::Unavailable, "NOT_SERVING", refused),
        ReloadError::Busy => busy(refused),
        ReloadError::NoFile => with_reason(Code::FailedPrecondition, "NO_FILE", refused),
        ReloadError::HostRefused(_) => with_reason(Code::FailedPrecondition, "HOST_REFUSED", refused),
        ReloadError::Unavailable(_) => with_reason(Code::FailedPrecondition, "BACKEND_UNAVAILABLE", refused),
        ReloadError::Broken(_) => with_reason(Code::Internal, "BROKEN", refused),
        ReloadError::Invalid(mistakes) => {
            let problem = |mistake: &ReloadProblem| {
                let key = error_status::shortened(mistake.key.clone(), KEY_BYTES_MAX);
                (
                    key,
                    error_status::shortened(mistake.problem.clone(), PROBLEM_BYTES_MAX),
                )
            };
            let mut left = LISTED_BYTES_MAX;
            let mut listed: Vec<String> = mistakes
                .iter()
                .map(|mistake| problem(mistake).1)
                .take_while(|problem| fits(&mut left, problem.len()))
                .collect();
            if mistakes.len() > listed.len() {
                listed.push(format!("and {} more", mistakes.len() - listed.len()));
            }
            let message = listed.join("; ");
            let mut left = DETAILS_BYTES_MAX;
            let violations: Vec<FieldViolation> = mistakes
                .iter()
                .map(problem)
                .take_while(|(key, problem)| fits(&mut left, key.len() + problem.len()))
                .map(|(key, problem)| FieldViolation::new(key, problem))
                .collect();
            let mut details = ErrorDetails::with_bad_request(violations);
            details.set_error_info("INVALID_CONFIGURATION", ERROR_DOMAIN, HashMap::new());
            let s = if mistakes.len() == 1 { "" } else { "s" };
            let message = format!(
                "nothing has changed; the configuration has {} problem{s}: {message}",
                mistakes.len()
            );
            Status::with_error_details(Code::InvalidArgument, message, details)
        }
    }
}

/// Whether `bytes` fit into what is left, which they then take.
fn fits(left: &mut usize, bytes: usize) -> bool {
    left.checked_sub(bytes).is_some_and(|rest| {
        *left = rest;
        true
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailers_of_a_refused_reload_are_short_enough_for_every_client() {
        // One mistake; 40 with long keys and descriptions, in ASCII, and in characters that take 9 bytes each when encoded.
        let of = |text: &str, count| {
            let mistake = ReloadProblem {
                key: text.repeat(1000 / text.len()),
                problem: text.repeat(2000 / text.len()),
            };
            not_reloaded(&ReloadError::Invalid(vec![mistake; count]))
        };
        for status in [of("k", 1), of("k", 40), of("\u{2014}", 40)] {
            let mut trailers = http::HeaderMap::new();
            status.add_header(&mut trailers).unwrap();
            let bytes: usize = trailers
                .iter()
                .map(|(name, value)| name.as_str().len() + value.len() + 32)
                .sum();
            assert!(bytes < 8 << 10, "{bytes}");
            assert!(
                !status
                    .get_details_bad_request()
                    .unwrap()
                    .field_violations
                    .is_empty()
            );
        }
        let many = of("k", 40);
        assert!(many.message().contains("40 problems"), "{}", many.message());
        assert!(many.message().ends_with("; and 38 more"), "{}", many.message());
    }

    #[test]
    fn who_is_refused_as_busy_is_told_why_and_when_to_retry() {
        // A switch and a reload where others wait already: RESOURCE_EXHAUSTED with a reason and a retry hint.
        for status in [not_switched(&SwitchError::Busy), not_reloaded(&ReloadError::Busy)] {
            assert_eq!(status.code(), Code::ResourceExhausted);
            assert_eq!(status.get_details_error_info().unwrap().reason, "BUSY");
            let retry = status.get_details_retry_info().unwrap();
            assert_eq!(retry.retry_delay, Some(RETRY_AFTER));
        }
    }
}
