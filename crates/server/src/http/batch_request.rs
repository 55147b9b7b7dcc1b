//! The four batch requests in JSON, converted to columns. Unknown members are refused: a misspelt `fail_fast`
//! must not be ignored.

use super::bounded_list;
use super::problem::Problem;
use crate::error_status::message_of;
use crate::fetch::Items;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use utoipa::ToSchema;

/// Blocks to fetch. Integers are written without fraction and exponent.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BlocksBatch {
    /// Block indices from 0, in any order; duplicates are allowed.
    #[serde(deserialize_with = "bounded_list::list")]
    indices: Vec<u64>,
    /// Fail the request on the first item error.
    #[serde(default)]
    fail_fast: bool,
    /// Deadline, milliseconds from the request's arrival; 0: only the daemon's (limits.deadline_ms).
    #[serde(default)]
    deadline_ms: u32,
}

/// Vectors to fetch. Integers are written without fraction and exponent.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct VectorsBatch {
    /// Vector ids from 0, in any order; duplicates are allowed.
    #[serde(deserialize_with = "bounded_list::list")]
    ids: Vec<u64>,
    /// Fail the request on the first item error.
    #[serde(default)]
    fail_fast: bool,
    /// Deadline, milliseconds from the request's arrival; 0: only the daemon's (limits.deadline_ms).
    #[serde(default)]
    deadline_ms: u32,
}

/// Byte ranges to fetch. Integers are written without fraction and exponent.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RangesBatch {
    /// In any order; they may overlap.
    #[serde(deserialize_with = "bounded_list::objects")]
    ranges: Vec<ByteRange>,
    /// Fail the request on the first item error.
    #[serde(default)]
    fail_fast: bool,
    /// Deadline, milliseconds from the request's arrival; 0: only the daemon's (limits.deadline_ms).
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

/// Objects to fetch: `names` for whole ones, or `objects` for parts of them. Integers are written without fraction and
/// exponent.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ObjectsBatch {
    /// Names of whole objects.
    #[serde(default, deserialize_with = "bounded_list::optional_list")]
    names: Option<Vec<String>>,
    /// Parts of objects.
    #[serde(default, deserialize_with = "bounded_list::optional_objects")]
    objects: Option<Vec<ObjectPart>>,
    /// Fail the request on the first item error.
    #[serde(default)]
    fail_fast: bool,
    /// Deadline, milliseconds from the request's arrival; 0: only the daemon's (limits.deadline_ms).
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
    /// The required version, without quotes; empty: any.
    #[serde(default)]
    if_match: String,
}

/// The items of a request in columns.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Columns {
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
        if_match: Vec<String>,
    },
}

/// A request of any of the four kinds.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BatchParams {
    /// The items.
    pub(super) columns: Columns,
    /// The member that lists them.
    pub(super) field: &'static str,
    /// Whether the first item error fails the request.
    pub(super) fail_fast: bool,
    /// 0: no deadline.
    pub(super) deadline_ms: u32,
}

impl Columns {
    /// The items in the fetcher's form.
    pub(super) fn items(&self) -> Items<'_> {
        match self {
            Self::Blocks(indices) => Items::Blocks(indices),
            Self::Vectors(ids) => Items::Vectors(ids),
            Self::Ranges { offsets, lengths } => Items::Ranges { offsets, lengths },
            Self::Objects {
                names,
                offsets,
                lengths,
                if_match,
            } => Items::Objects {
                names,
                offsets,
                lengths,
                if_match,
            },
        }
    }

    /// Whether all items that can be read are known to have the same length.
    pub(super) fn is_uniform(&self) -> bool {
        match self {
            Self::Blocks(_) | Self::Vectors(_) => true,
            Self::Ranges { lengths, .. } => lengths.windows(2).all(|pair| pair[0] == pair[1]),
            // 0 means "to the end".
            Self::Objects { lengths, .. } => {
                lengths.first().is_some_and(|first| *first > 0)
                    && lengths.windows(2).all(|pair| pair[0] == pair[1])
            }
        }
    }
}

/// One of the four requests.
pub(super) trait BatchRequest: DeserializeOwned + Send + 'static {
    /// The request, its items in columns.
    fn into_params(self) -> Result<BatchParams, Problem>;
}

impl BatchRequest for BlocksBatch {
    fn into_params(self) -> Result<BatchParams, Problem> {
        Ok(BatchParams {
            columns: Columns::Blocks(self.indices),
            field: "indices",
            fail_fast: self.fail_fast,
            deadline_ms: self.deadline_ms,
        })
    }
}

impl BatchRequest for VectorsBatch {
    fn into_params(self) -> Result<BatchParams, Problem> {
        Ok(BatchParams {
            columns: Columns::Vectors(self.ids),
            field: "ids",
            fail_fast: self.fail_fast,
            deadline_ms: self.deadline_ms,
        })
    }
}

impl BatchRequest for RangesBatch {
    fn into_params(self) -> Result<BatchParams, Problem> {
        let extents = self.ranges.into_iter().map(|range| (range.offset, range.length));
        let (offsets, lengths) = extents.unzip();
        Ok(BatchParams {
            columns: Columns::Ranges { offsets, lengths },
            field: "ranges",
            fail_fast: self.fail_fast,
            deadline_ms: self.deadline_ms,
        })
    }
}

impl BatchRequest for ObjectsBatch {
    fn into_params(self) -> Result<BatchParams, Problem> {
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
                    if_match: Vec::new(),
                },
            ),
            (None, Some(objects)) => {
                let (mut names, mut if_match) = (Vec::new(), Vec::new());
                let (mut offsets, mut lengths) = (Vec::new(), Vec::new());
                for part in objects {
                    names.push(part.name);
                    offsets.push(part.offset);
                    lengths.push(part.length);
                    if_match.push(part.if_match);
                }
                (
                    "objects",
                    Columns::Objects {
                        names,
                        offsets,
                        lengths,
                        if_match,
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
        Ok(BatchParams {
            columns,
            field,
            fail_fast,
            deadline_ms,
        })
    }
}

/// Parses a request's JSON, storing at most `items_max` items; also returns how many there are. Errors name
/// the member (`ranges[3].length`) and the position in the text.
pub(super) fn parse<R: DeserializeOwned>(body: &[u8], items_max: usize) -> Result<(R, usize), Problem> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let (value, listed) = bounded_list::with_bound(items_max, || serde_path_to_error::deserialize(&mut json));
    let bounded_list::Object(value) =
        value.map_err(|error: serde_path_to_error::Error<serde_json::Error>| {
            let path = error.path().to_string();
            // serde_path_to_error writes `.` for the whole value, and `?` if the text ends before a member's
            // name.
            let path = path.trim_end_matches(['?', '.']);
            let field = if path.is_empty() { "body" } else { path };
            // Both repeat text of the request, which may be long: not for the core to copy, and charged to no one.
            Problem::malformed(message_of(&field), message_of(error.inner()))
        })?;
    json.end()
        .map_err(|error| Problem::malformed("body", error.to_string()))?;
    Ok((value, listed))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::http::problem::render;
    use axum::response::IntoResponse;
    use http::Method;
    use http_body_util::BodyExt;

    /// (status, field, detail) as clients see them.
    pub(in crate::http) async fn rendered(problem: Problem) -> (u16, String, String) {
        let response = render(problem.into_response(), "/", None, &Method::POST);
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let text = |member: &str| body[member].as_str().unwrap_or_default().to_owned();
        (status, text("field"), text("detail"))
    }

    fn call<R: BatchRequest>(json: &str) -> Result<BatchParams, Problem> {
        let (request, _listed) = parse::<R>(json.as_bytes(), 1024)?;
        request.into_params()
    }

    #[test]
    fn requests_become_columns() {
        // Each of the four requests, with and without optional members: the columns for a fetch.
        let blocks = call::<BlocksBatch>(r#"{"indices":[3,1],"fail_fast":true,"deadline_ms":50}"#).unwrap();
        let expected = BatchParams {
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
            if_match: vec![],
        };
        assert_eq!((names.columns, names.field), (whole, "names"));
        let parts = call::<ObjectsBatch>(
            r#"{"objects":[{"name":"a","if_match":"v"},{"name":"b","offset":1,"length":2}]}"#,
        )
        .unwrap();
        let columns = Columns::Objects {
            names: vec!["a".into(), "b".into()],
            offsets: vec![0, 1],
            lengths: vec![0, 2],
            if_match: vec!["v".into(), String::new()],
        };
        assert_eq!((parts.columns, parts.field), (columns, "objects"));
    }

    #[test]
    fn whole_objects_have_no_common_length() {
        // Objects without lengths, with equal ones, and to their ends: only equal explicit lengths are uniform.
        let objects = |lengths: Vec<u64>| Columns::Objects {
            names: vec![],
            offsets: vec![],
            lengths,
            if_match: vec![],
        };
        assert!(!objects(vec![]).is_uniform());
        assert!(!objects(vec![0, 0]).is_uniform());
        assert!(!objects(vec![1, 2]).is_uniform());
        assert!(objects(vec![2, 2]).is_uniform());
    }

    #[test]
    fn a_flood_of_items_is_counted_and_not_kept() {
        // Lists longer than the bound, of its length, and shorter: all entries are counted, at most so many
        // are kept, and those beyond the bound need not be valid.
        let of = |json: &str| parse::<BlocksBatch>(json.as_bytes(), 3);
        for (json, kept, listed) in [
            (r#"{"indices": [1, 2, 3, 4, "five", 6]}"#, 3, 6),
            (r#"{"indices": [1, 2, 3]}"#, 3, 3),
            (r#"{"indices": [1]}"#, 1, 1),
            (r#"{"indices": []}"#, 0, 0),
        ] {
            let (request, found) = of(json).unwrap();
            assert_eq!((request.indices.len(), found), (kept, listed), "{json}");
        }
        assert!(of(r#"{"indices": [1, "two"]}"#).is_err());
        let names = parse::<ObjectsBatch>(br#"{"names": ["a", "b", "c", "d"]}"#, 3).unwrap();
        assert_eq!(names.1, 4);
    }

    #[test]
    fn what_is_wrong_repeats_little_of_the_request() {
        // A number and a member's name that are texts of 1 MiB, which would be written in sixfold length. Expectation: the
        // problem is short before it is sent, and has the beginning and the end of what is wrong.
        let long = "\u{7f}".repeat(1 << 20);
        for (json, end) in [
            (format!(r#"{{"indices": ["{long}"]}}"#), "expected u64"),
            (format!(r#"{{"{long}": 1}}"#), "deadline_ms`"),
        ] {
            let problem = parse::<BlocksBatch>(json.as_bytes(), 3).map(drop).unwrap_err();
            let shown = format!("{problem:?}");
            assert!(
                shown.len() < 16 << 10 && shown.contains(end),
                "{} bytes",
                shown.len()
            );
        }
    }
}
