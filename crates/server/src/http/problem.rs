//! Errors as RFC 9457 problem details. A handler's [`Problem`] becomes an empty response with the problem in
//! its extensions; the outermost layer, which knows the path, writes the body ([`render`]). So errors of axum
//! itself (404, 405) look the same.
//!
//! `crate::error_status` maps errors of reads; only problems specific to HTTP are defined here.

use axum::body::Body;
use axum::extract::path::ErrorKind;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path};
use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderName};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use std::time::Duration;

use super::routes;
use crate::error_status;
use crate::fetch::FetchError;
use ringfetch_engine::error::ReadError;

/// The media type of every error body.
pub(super) const PROBLEM_JSON: &str = "application/problem+json";

/// Why a request failed.
#[derive(Debug, Clone)]
pub(super) struct Problem(Box<Details>);

#[derive(Debug, Clone)]
struct Details {
    status: StatusCode,
    slug: &'static str,
    detail: String,
    field: Option<Cow<'static, str>>,
    retry_after: Option<Duration>,
    allowed: Option<Vec<&'static str>>,
    headers: HeaderMap,
}

/// A problem as it is sent (RFC 9457).
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Problem)]
pub(super) struct ProblemBody<'a> {
    /// What went wrong, as a URI reference whose last segment is a word from a closed set.
    #[serde(rename = "type")]
    #[schema(example = "/problems/range-out-of-range")]
    type_: String,
    /// The type in words.
    title: String,
    /// The HTTP status.
    status: u16,
    /// What is wrong with this request, and how to fix it.
    detail: &'a str,
    /// The requested path; its beginning, if it is long.
    instance: &'a str,
    /// The part of the request that is wrong: a JSON field, a path segment, a query parameter or a header.
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<&'a str>,
    /// When a retry makes sense, milliseconds from now. Absent: the same request fails again, but for 408 and 504, where a
    /// longer deadline, or less load, helps.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
    /// What would have been accepted: methods, or media types.
    #[serde(skip_serializing_if = "Option::is_none")]
    allowed: Option<&'a [&'static str]>,
}

impl Problem {
    /// A problem specific to HTTP.
    pub(super) fn new(status: StatusCode, slug: &'static str, detail: impl Into<String>) -> Self {
        Self(Box::new(Details {
            status,
            slug,
            detail: detail.into(),
            field: None,
            retry_after: None,
            allowed: None,
            headers: HeaderMap::new(),
        }))
    }

    /// An invalid part of the request, reported like a malformed gRPC request.
    pub(super) fn malformed(field: impl Into<String>, problem: impl Into<String>) -> Self {
        FetchError::Malformed {
            field: field.into(),
            problem: problem.into(),
        }
        .into()
    }

    /// Why items could not be read. `items_field` is the member that lists them, or the path segment that names one, for
    /// errors that name no part of the request themselves.
    pub(super) fn of_items(error: FetchError, items_field: &'static str) -> Self {
        let is_requests_fault = error_status::of_fetch(&error).is_requests_fault();
        let mut problem = Self::from(error);
        if is_requests_fault && problem.0.field.is_none() {
            problem.0.field = Some(items_field.into());
        }
        problem
    }

    /// Replaces the description.
    pub(super) fn with_detail(mut self, detail: String) -> Self {
        self.0.detail = detail;
        self
    }

    /// Names the part of the request that is wrong.
    pub(super) fn with_field(mut self, field: impl Into<Cow<'static, str>>) -> Self {
        self.0.field = Some(field.into());
        self
    }

    /// Adds the accepted values.
    pub(super) fn with_allowed(mut self, allowed: Vec<&'static str>) -> Self {
        self.0.allowed = Some(allowed);
        self
    }

    /// Adds a header to the response.
    pub(super) fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.0.headers.insert(name, value);
        self
    }

    /// What the client chose is cut, because a problem is charged to no one's memory.
    fn into_answer(self, path: &str) -> Response {
        let instance = &path[..path.floor_char_boundary(INSTANCE_BYTES_MAX)];
        let Details {
            status: code,
            slug,
            detail,
            field,
            retry_after,
            allowed,
            mut headers,
        } = *self.0;
        let detail = error_status::message_of(&detail);
        let field = field.map(|field| error_status::message_of(&field));
        let body = ProblemBody {
            type_: format!("/problems/{slug}"),
            title: title(slug),
            status: code.as_u16(),
            detail: &detail,
            instance,
            field: field.as_deref(),
            retry_after_ms: retry_after.map(|after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX)),
            allowed: allowed.as_deref(),
        };
        // Only strings and numbers, so it cannot fail.
        let body = serde_json::to_vec(&body).unwrap_or_default();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
        if let Some(after) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(retry_after_seconds(after)));
        }
        (code, headers, Body::from(body)).into_response()
    }
}

impl From<FetchError> for Problem {
    fn from(error: FetchError) -> Self {
        let answer = error_status::of_fetch(&error);
        let mut problem = Self::new(answer.http, answer.slug, error.to_string());
        problem.0.field = error_status::field_of(&error).map(|field| Cow::Owned(field.to_owned()));
        problem.0.retry_after = answer.retry_after;
        problem
    }
}

impl From<ReadError> for Problem {
    fn from(error: ReadError) -> Self {
        FetchError::Read(error).into()
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = self.0.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// Writes the body of a response with a problem, and of axum's own errors. `matched` is the route's pattern,
/// if the path has one.
pub(super) fn render<B: From<Body>>(
    mut response: http::Response<B>,
    path: &str,
    matched: Option<&str>,
    method: &Method,
) -> http::Response<B> {
    if let Some(problem) = response.extensions_mut().remove::<Problem>() {
        return problem.into_answer(path).map(B::from);
    }
    if response.status() == StatusCode::METHOD_NOT_ALLOWED {
        return method_not_allowed(matched, method).into_answer(path).map(B::from);
    }
    response
}

/// Most bytes of the request's path that a problem repeats.
const INSTANCE_BYTES_MAX: usize = 256;

/// The response for a problem found before the router.
pub(crate) fn refusal(status: StatusCode, slug: &'static str, detail: String, path: &str) -> Response {
    Problem::new(status, slug, detail).into_answer(path)
}

/// The response to a request that comes too late in a drain.
pub(crate) fn too_late(path: &str) -> Response {
    Problem::from(ReadError::Draining).into_answer(path)
}

/// The response for an unknown path.
pub(super) async fn no_such_path() -> Problem {
    Problem::new(
        StatusCode::NOT_FOUND,
        "no-such-path",
        "there is no resource at this path; /openapi.json lists the resources",
    )
}

/// The response where no route matches. `OPTIONS *` only asks whether anybody answers (RFC 9110 9.3.7).
pub(super) async fn no_route(method: Method, uri: Uri) -> Result<StatusCode, Problem> {
    if method == Method::OPTIONS && uri.path() == "*" {
        return Ok(StatusCode::NO_CONTENT);
    }
    Err(no_such_path().await)
}

fn method_not_allowed(matched: Option<&str>, method: &Method) -> Problem {
    let allowed = routes::methods_of(matched);
    let list = allowed.join(", ");
    let problem = Problem::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "method-not-allowed",
        format!("{method} is not a method of this resource: use {list}"),
    );
    match HeaderValue::try_from(list) {
        Ok(list) => problem
            .with_allowed(allowed.to_vec())
            .with_header(header::ALLOW, list),
        Err(_) => problem,
    }
}

/// `out-of-range` to `Out of range`.
fn title(slug: &str) -> String {
    let words = slug.replace('-', " ");
    let mut letters = words.chars();
    match letters.next() {
        Some(first) => first.to_uppercase().chain(letters).collect(),
        None => words,
    }
}

/// Whole seconds, rounded up and at least 1: the header has no smaller unit, and 0 would invite a busy loop.
fn retry_after_seconds(after: Duration) -> u64 {
    let whole = after.as_secs();
    if after.subsec_nanos() > 0 {
        whole.saturating_add(1)
    } else {
        whole.max(1)
    }
}

/// The path's parameters, percent-decoded; a path that cannot be decoded is a problem.
#[derive(Debug)]
pub(super) struct PathParams<T>(pub(super) T);

impl<T, S> FromRequestParts<S> for PathParams<T>
where
    T: DeserializeOwned + Send,
    S: Send + Sync,
{
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(value)) => Ok(Self(value)),
            Err(rejection) => Err(undecodable(&rejection)),
        }
    }
}

fn undecodable(rejection: &PathRejection) -> Problem {
    if let PathRejection::FailedToDeserializePathParams(failed) = rejection
        && let ErrorKind::InvalidUtf8InPathParam { key } = failed.kind()
    {
        // As other errors call it.
        let field = if key == "name" { "dataset" } else { key };
        return Problem::malformed(field, "is not UTF-8: percent-encode the bytes of its UTF-8 form");
    }
    Problem::malformed("path", rejection.body_text())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;
    use serde_json::json;

    async fn body_of(response: Response) -> serde_json::Value {
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        serde_json::from_slice(&bytes).unwrap()
    }

    #[tokio::test]
    async fn a_problem_is_sent_with_every_member_it_has() {
        // A problem with a field, a hint and allowed values: all of them in the body, Retry-After rounded up.
        let mut problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, "too-many-requests", "wait")
            .with_field("ids")
            .with_allowed(vec!["a"]);
        problem.0.retry_after = Some(Duration::from_millis(1500));
        let response = render(problem.into_response(), "/v1/x", None, &Method::GET);
        assert_eq!(response.status(), 429);
        assert_eq!(response.headers()[header::CONTENT_TYPE], PROBLEM_JSON);
        assert_eq!(response.headers()[header::RETRY_AFTER], "2");
        let expected = json!({
            "type": "/problems/too-many-requests", "title": "Too many requests", "status": 429, "detail": "wait",
            "instance": "/v1/x", "field": "ids", "retry_after_ms": 1500, "allowed": ["a"],
        });
        assert_eq!(body_of(response).await, expected);
    }

    #[tokio::test]
    async fn members_that_do_not_apply_are_absent() {
        // A problem without a field and a hint: the body has exactly the five members of RFC 9457.
        let problem = Problem::new(StatusCode::NOT_FOUND, "not-found", "gone");
        let response = render(problem.into_response(), "/", None, &Method::GET);
        assert!(!response.headers().contains_key(header::RETRY_AFTER));
        let body = body_of(response).await;
        let members: Vec<&String> = body.as_object().unwrap().keys().collect();
        assert_eq!(members, ["detail", "instance", "status", "title", "type"]);
    }

    #[test]
    fn retry_after_is_never_zero() {
        // Hints below, at and above a second: whole seconds, rounded up, at least one.
        for (ms, seconds) in [(0, 1), (1, 1), (1000, 1), (1001, 2), (2500, 3)] {
            assert_eq!(retry_after_seconds(Duration::from_millis(ms)), seconds, "{ms} ms");
        }
    }
}
