//! `POST .../{blocks|vectors|ranges|objects}:batchFetch`: many items of one dataset, asked for in JSON. What the answer
//! looks like is in `batch_answer`.
//!
//! A request is checked whole, down to whether its answer can be told in the form the client takes, before anything is
//! read. Unknown members are refused: a misspelt `fail_fast` must not be ignored.

use super::App;
use super::batch_answer::{LENGTHS_LISTED_MAX, Shape, encode};
use super::datasets::{Wanted, dataset_of_kind};
use super::negotiate::{Form, preferred, require_json};
use super::problem::{Problem, Segments};
use crate::fetch::{CallContext, FetchError, Items};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use http::{StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use ringfetch_engine::dataset::Kind;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::{Duration, Instant};
use utoipa::ToSchema;

/// Blocks to fetch.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BlocksBatch {
    /// Block indices from 0, in any order; the same one may stand more than once.
    indices: Vec<u64>,
    /// Answer the first item error as the request's.
    #[serde(default)]
    fail_fast: bool,
    /// How long the answer is worth having, from the request's arrival; 0: as long as the connection lives.
    #[serde(default)]
    deadline_ms: u32,
}

/// Vectors to fetch.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct VectorsBatch {
    /// Vector ids from 0, in any order; the same one may stand more than once.
    ids: Vec<u64>,
    /// Answer the first item error as the request's.
    #[serde(default)]
    fail_fast: bool,
    /// How long the answer is worth having, from the request's arrival; 0: as long as the connection lives.
    #[serde(default)]
    deadline_ms: u32,
}

/// Byte ranges to fetch.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RangesBatch {
    /// In any order; they may overlap.
    ranges: Vec<ByteRange>,
    /// Answer the first item error as the request's.
    #[serde(default)]
    fail_fast: bool,
    /// How long the answer is worth having, from the request's arrival; 0: as long as the connection lives.
    #[serde(default)]
    deadline_ms: u32,
}

/// A part of the address space.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ByteRange {
    /// First byte.
    offset: u64,
    /// Bytes, at least 1.
    length: u64,
}

/// Objects to fetch: `names` for whole ones, or `objects` for parts of them.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ObjectsBatch {
    /// Names of whole objects.
    names: Option<Vec<String>>,
    /// Parts of objects.
    objects: Option<Vec<ObjectPart>>,
    /// Answer the first item error as the request's.
    #[serde(default)]
    fail_fast: bool,
    /// How long the answer is worth having, from the request's arrival; 0: as long as the connection lives.
    #[serde(default)]
    deadline_ms: u32,
}

/// A part of an object.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ObjectPart {
    /// Relative to the dataset's directory, `/` between the parts.
    name: String,
    /// First byte.
    #[serde(default)]
    offset: u64,
    /// Bytes; 0: to the end.
    #[serde(default)]
    length: u64,
}

/// The items of a request, in the columns that a fetch wants.
#[derive(Debug, PartialEq, Eq)]
enum Columns {
    Blocks(Vec<u64>),
    Vectors(Vec<u64>),
    Ranges {
        offsets: Vec<u64>,
        lengths: Vec<u64>,
    },
    Objects {
        names: Vec<String>,
        offsets: Vec<u64>,
        lengths: Vec<u64>,
    },
}

/// A request as every kind of it is handled.
#[derive(Debug, PartialEq, Eq)]
struct Call {
    columns: Columns,
    /// The member that lists the items.
    field: &'static str,
    fail_fast: bool,
    deadline_ms: u32,
}

impl Columns {
    fn items(&self) -> Items<'_> {
        match self {
            Self::Blocks(indices) => Items::Blocks(indices),
            Self::Vectors(ids) => Items::Vectors(ids),
            Self::Ranges { offsets, lengths } => Items::Ranges { offsets, lengths },
            Self::Objects {
                names,
                offsets,
                lengths,
            } => Items::Objects {
                names,
                offsets,
                lengths,
            },
        }
    }

    fn wanted(&self) -> Wanted {
        match self {
            Self::Blocks(_) => Wanted::Blocks,
            Self::Vectors(_) => Wanted::Vectors,
            Self::Ranges { .. } => Wanted::Space,
            Self::Objects { .. } => Wanted::Objects,
        }
    }

    /// Whether it is known beforehand that every item that can be read has the same length.
    fn is_uniform(&self) -> bool {
        match self {
            Self::Blocks(_) | Self::Vectors(_) => true,
            Self::Ranges { lengths, .. } => lengths.windows(2).all(|pair| pair[0] == pair[1]),
            // 0 is "to the end", which is anywhere.
            Self::Objects { lengths, .. } => {
                lengths.first().is_some_and(|first| *first > 0)
                    && lengths.windows(2).all(|pair| pair[0] == pair[1])
            }
        }
    }
}

/// A request in one of its four forms.
trait BatchRequest: DeserializeOwned {
    fn into_call(self) -> Result<Call, Problem>;
}

impl BatchRequest for BlocksBatch {
    fn into_call(self) -> Result<Call, Problem> {
        let Self {
            indices,
            fail_fast,
            deadline_ms,
        } = self;
        Ok(Call {
            columns: Columns::Blocks(indices),
            field: "indices",
            fail_fast,
            deadline_ms,
        })
    }
}

impl BatchRequest for VectorsBatch {
    fn into_call(self) -> Result<Call, Problem> {
        let Self {
            ids,
            fail_fast,
            deadline_ms,
        } = self;
        Ok(Call {
            columns: Columns::Vectors(ids),
            field: "ids",
            fail_fast,
            deadline_ms,
        })
    }
}

impl BatchRequest for RangesBatch {
    fn into_call(self) -> Result<Call, Problem> {
        let Self {
            ranges,
            fail_fast,
            deadline_ms,
        } = self;
        let (offsets, lengths) = ranges
            .into_iter()
            .map(|range| (range.offset, range.length))
            .unzip();
        Ok(Call {
            columns: Columns::Ranges { offsets, lengths },
            field: "ranges",
            fail_fast,
            deadline_ms,
        })
    }
}

impl BatchRequest for ObjectsBatch {
    fn into_call(self) -> Result<Call, Problem> {
        let Self {
            names,
            objects,
            fail_fast,
            deadline_ms,
        } = self;
        let (field, columns) = match (names, objects) {
            (Some(names), None) => (
                "names",
                Columns::Objects {
                    names,
                    offsets: Vec::new(),
                    lengths: Vec::new(),
                },
            ),
            (None, Some(objects)) => {
                let (mut names, mut offsets, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
                for ObjectPart { name, offset, length } in objects {
                    names.push(name);
                    offsets.push(offset);
                    lengths.push(length);
                }
                (
                    "objects",
                    Columns::Objects {
                        names,
                        offsets,
                        lengths,
                    },
                )
            }
            (None, None) | (Some(_), Some(_)) => {
                return Err(Problem::malformed(
                    "objects",
                    "give either `names` (whole objects) or `objects` (with offset and length)",
                ));
            }
        };
        Ok(Call {
            columns,
            field,
            fail_fast,
            deadline_ms,
        })
    }
}

/// Fetches blocks.
#[utoipa::path(post, path = "/v1/datasets/{name}/blocks:batchFetch", tag = "data",
    operation_id = "BatchFetchBlocks", params(("name" = String, Path, description = "The dataset, of kind blocks.")),
    request_body = BlocksBatch, responses((status = 200, description = "The items.", content(
        (Vec<u8> = "application/octet-stream"), (super::batch_answer::BatchAnswer = "application/json")))))]
pub(super) async fn blocks(
    State(app): State<Arc<App>>,
    Segments(name): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    run::<BlocksBatch>(&app, &name, request).await
}

/// Fetches vectors.
#[utoipa::path(post, path = "/v1/datasets/{name}/vectors:batchFetch", tag = "data",
    operation_id = "BatchFetchVectors", params(("name" = String, Path, description = "The dataset, of kind vectors.")),
    request_body = VectorsBatch, responses((status = 200, description = "The items.", content(
        (Vec<u8> = "application/octet-stream"), (super::batch_answer::BatchAnswer = "application/json")))))]
pub(super) async fn vectors(
    State(app): State<Arc<App>>,
    Segments(name): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    run::<VectorsBatch>(&app, &name, request).await
}

/// Fetches byte ranges.
#[utoipa::path(post, path = "/v1/datasets/{name}/ranges:batchFetch", tag = "data",
    operation_id = "BatchFetchRanges",
    params(("name" = String, Path, description = "The dataset, of kind blocks or vectors.")),
    request_body = RangesBatch, responses((status = 200, description = "The items.", content(
        (Vec<u8> = "application/octet-stream"), (super::batch_answer::BatchAnswer = "application/json")))))]
pub(super) async fn ranges(
    State(app): State<Arc<App>>,
    Segments(name): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    run::<RangesBatch>(&app, &name, request).await
}

/// Fetches objects, whole or in part.
#[utoipa::path(post, path = "/v1/datasets/{name}/objects:batchFetch", tag = "data",
    operation_id = "BatchFetchObjects", params(("name" = String, Path, description = "The dataset, of kind objects.")),
    request_body = ObjectsBatch, responses((status = 200, description = "The items.", content(
        (Vec<u8> = "application/octet-stream"), (super::batch_answer::BatchAnswer = "application/json")))))]
pub(super) async fn objects(
    State(app): State<Arc<App>>,
    Segments(name): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    run::<ObjectsBatch>(&app, &name, request).await
}

async fn run<R: BatchRequest>(app: &App, name: &str, request: Request) -> Result<Response, Problem> {
    let arrival = Instant::now();
    let (parts, body) = request.into_parts();
    let form = preferred(&parts.headers)?;
    require_json(&parts.headers)?;
    let declared = parts
        .headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    let body = read_body(body, declared, app.fetcher.limits().request_bytes).await?;
    let call = parse::<R>(&body)?.into_call()?;
    drop(body);
    let dataset = dataset_of_kind(app, name, call.columns.wanted())?;
    let items_max = usize::try_from(app.fetcher.limits().items_per_request).unwrap_or(usize::MAX);
    check_form(&call, form, items_max)?;

    let deadline = (call.deadline_ms > 0).then(|| arrival + Duration::from_millis(call.deadline_ms.into()));
    let context = CallContext {
        deadline,
        share: super::share_of(&parts.extensions),
        fail_fast: call.fail_fast,
    };
    let result = app.fetcher.fetch(name, call.columns.items(), context).await;
    let (_, fetched) = result.map_err(|error| in_terms_of(call.field, error))?;
    let shape = match dataset.kind() {
        Kind::Vectors { dim, dtype, .. } if call.columns.wanted() == Wanted::Vectors => {
            Some(Shape { dim, dtype })
        }
        Kind::Vectors { .. } | Kind::Blocks { .. } | Kind::Objects => None,
    };
    encode(form, fetched, shape)
}

/// Refuses items of differing lengths that are too many to have their lengths in a header.
fn check_form(call: &Call, form: Form, items_max: usize) -> Result<(), Problem> {
    let items = call.columns.items().len();
    // Too many items altogether is the fetch's to say.
    if form == Form::Json || items <= LENGTHS_LISTED_MAX || items > items_max || call.columns.is_uniform() {
        return Ok(());
    }
    Err(Problem::new(
        StatusCode::NOT_ACCEPTABLE,
        "lengths-not-listable",
        format!(
            "{items} items of differing lengths, and their lengths fit the answer's head up to {LENGTHS_LISTED_MAX}: \
             ask for application/json in Accept, or split the batch"
        ),
    )
    .with_field(call.field)
    .with_allowed(vec![super::negotiate::JSON]))
}

/// Reads a request's body.
async fn read_body(body: Body, declared: Option<u64>, bytes_max: u32) -> Result<Bytes, Problem> {
    let too_large = || {
        Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "request-too-large",
            format!("a request's body may have {bytes_max} bytes (limits.request_bytes): split the batch"),
        )
    };
    if declared.is_some_and(|length| length > u64::from(bytes_max)) {
        return Err(too_large());
    }
    match Limited::new(body, usize::try_from(bytes_max).unwrap_or(usize::MAX))
        .collect()
        .await
    {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(too_large()),
        Err(error) => Err(Problem::malformed("body", format!("it broke off: {error}"))),
    }
}

/// Reads a request's JSON. Errors name the member (`ranges[3].length`) and the place in the text.
fn parse<R: DeserializeOwned>(body: &[u8]) -> Result<R, Problem> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { "body".to_owned() } else { path };
        Problem::malformed(field, error.inner().to_string())
    })?;
    json.end()
        .map_err(|error| Problem::malformed("body", error.to_string()))?;
    Ok(value)
}

/// A fetch names the columns; the client knows its own members.
fn in_terms_of(field: &'static str, error: FetchError) -> FetchError {
    if let FetchError::EmptyBatch { .. } = error {
        return FetchError::EmptyBatch { field };
    }
    if let FetchError::TooManyItems { items, max, .. } = error {
        return FetchError::TooManyItems { field, items, max };
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::problem::render;
    use axum::response::IntoResponse;
    use http::Method;

    async fn told(problem: Problem) -> (u16, String, String) {
        let response = render(problem.into_response(), "/", None, &Method::POST);
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let text = |member: &str| body[member].as_str().unwrap_or_default().to_owned();
        (status, text("field"), text("detail"))
    }

    fn call<R: BatchRequest>(json: &str) -> Result<Call, Problem> {
        parse::<R>(json.as_bytes())?.into_call()
    }

    #[test]
    fn requests_become_columns() {
        // Each of the four requests, with and without optional members: the columns that a fetch wants.
        let blocks = call::<BlocksBatch>(r#"{"indices":[3,1],"fail_fast":true,"deadline_ms":50}"#).unwrap();
        let expected = Call {
            columns: Columns::Blocks(vec![3, 1]),
            field: "indices",
            fail_fast: true,
            deadline_ms: 50,
        };
        assert_eq!(blocks, expected);
        let vectors = call::<VectorsBatch>(r#"{"ids":[18446744073709551615]}"#).unwrap();
        assert_eq!(vectors.columns, Columns::Vectors(vec![u64::MAX]));
        let ranges =
            call::<RangesBatch>(r#"{"ranges":[{"offset":5,"length":6},{"offset":7,"length":8}]}"#).unwrap();
        assert_eq!(
            ranges.columns,
            Columns::Ranges {
                offsets: vec![5, 7],
                lengths: vec![6, 8]
            }
        );
        let names = call::<ObjectsBatch>(r#"{"names":["a/b"]}"#).unwrap();
        let whole = Columns::Objects {
            names: vec!["a/b".into()],
            offsets: vec![],
            lengths: vec![],
        };
        assert_eq!((names.columns, names.field), (whole, "names"));
        let parts =
            call::<ObjectsBatch>(r#"{"objects":[{"name":"a"},{"name":"b","offset":1,"length":2}]}"#).unwrap();
        let columns = Columns::Objects {
            names: vec!["a".into(), "b".into()],
            offsets: vec![0, 1],
            lengths: vec![0, 2],
        };
        assert_eq!((parts.columns, parts.field), (columns, "objects"));
    }

    #[tokio::test]
    async fn mistakes_are_named_with_their_member_and_place() {
        // Malformed and wrong JSON of every sort: 400, the member, and line and column in the message.
        for (json, field, part) in [
            (
                r#"{"ranges":[{"offset":1,"length":1},{"offset":-1,"length":1}]}"#,
                "ranges[1].offset",
                "line 1 column",
            ),
            (
                r#"{"ranges":[{"offset":1}]}"#,
                "ranges[0]",
                "missing field `length`",
            ),
            (
                r#"{"ranges":[],"failfast":true}"#,
                "failfast",
                "unknown field `failfast`",
            ),
            (r#"{"ranges":[]} x"#, "body", "trailing characters"),
            (r#"{}"#, "body", "missing field `ranges`"),
            ("", "body", "EOF"),
            ("{\n\"ranges\": [}", "ranges[0]", "line 2 column 12"),
            (
                r#"{"ranges":[],"deadline_ms":-1}"#,
                "deadline_ms",
                "invalid value",
            ),
        ] {
            let (status, got_field, detail) = told(call::<RangesBatch>(json).unwrap_err()).await;
            assert_eq!((status, got_field.as_str()), (400, field), "{json}: {detail}");
            assert!(detail.contains(part), "{json}: {detail}");
        }
    }

    #[tokio::test]
    async fn objects_are_given_in_one_way() {
        // Neither list, and both: a problem that says which to use.
        for json in ["{}", r#"{"names":["a"],"objects":[{"name":"a"}]}"#] {
            let (status, field, detail) = told(call::<ObjectsBatch>(json).unwrap_err()).await;
            assert_eq!((status, field.as_str()), (400, "objects"), "{detail}");
        }
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused() {
        // Bodies below and above 8 bytes, with the length declared and not: 413 names the limit.
        let body = |text: &'static str| Body::from(text);
        assert_eq!(read_body(body("12345678"), Some(8), 8).await.unwrap(), "12345678");
        for declared in [None, Some(9)] {
            let problem = read_body(body("123456789"), declared, 8).await.unwrap_err();
            let (status, _, detail) = told(problem).await;
            assert_eq!(status, 413);
            assert!(detail.contains("limits.request_bytes"), "{detail}");
        }
    }

    #[tokio::test]
    async fn lengths_that_cannot_be_listed_are_refused_beforehand() {
        // One item more than a head can list: fine in JSON or with equal lengths, 406 for differing ones.
        let many = LENGTHS_LISTED_MAX + 1;
        let ranges = |last: u64| {
            let mut lengths = vec![4; many];
            lengths[many - 1] = last;
            let columns = Columns::Ranges {
                offsets: vec![0; many],
                lengths,
            };
            Call {
                columns,
                field: "ranges",
                fail_fast: false,
                deadline_ms: 0,
            }
        };
        assert!(check_form(&ranges(4), Form::Octets, 4096).is_ok());
        assert!(check_form(&ranges(5), Form::Json, 4096).is_ok());
        assert!(check_form(&ranges(5), Form::Octets, many - 1).is_ok());
        let (status, field, _) = told(check_form(&ranges(5), Form::Octets, 4096).unwrap_err()).await;
        assert_eq!((status, field.as_str()), (406, "ranges"));
    }

    #[test]
    fn whole_objects_have_no_common_length() {
        // Objects without lengths, with equal ones, and to their ends: only equal explicit lengths are uniform.
        let objects = |lengths: Vec<u64>| Columns::Objects {
            names: vec![],
            offsets: vec![],
            lengths,
        };
        assert!(!objects(vec![]).is_uniform());
        assert!(!objects(vec![0, 0]).is_uniform());
        assert!(!objects(vec![1, 2]).is_uniform());
        assert!(objects(vec![2, 2]).is_uniform());
    }

    #[test]
    fn errors_name_the_member_of_the_request() {
        // What a fetch says about its columns: told in the terms of the JSON.
        let error = in_terms_of("ranges", FetchError::EmptyBatch { field: "offsets" });
        assert_eq!(error, FetchError::EmptyBatch { field: "ranges" });
        let error = in_terms_of(
            "objects",
            FetchError::TooManyItems {
                field: "names",
                items: 9,
                max: 8,
            },
        );
        assert_eq!(
            error,
            FetchError::TooManyItems {
                field: "objects",
                items: 9,
                max: 8
            }
        );
    }
}
