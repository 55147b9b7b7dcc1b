//! The OpenAPI 3.1 document. Handlers have the descriptions of their operations; HEAD for every GET, problem details
//! as the default response of every operation, and credentials are added here.

use super::problem::{PROBLEM_JSON, ProblemBody};
use super::{AppState, batch, datasets, items, objects, page, probes, score, status};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, header};
use std::sync::Arc;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::Operation;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, ResponseBuilder, Schema};
use utoipa::{OpenApi as _, PartialSchema as _};

#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "Ringfetch", description = "Random reads over HTTP.", license(name = "Apache-2.0", identifier = "Apache-2.0")),
    paths(
        datasets::list, datasets::get, objects::get_bytes, items::get_block, items::get_vector, objects::list,
        objects::get_object, batch::blocks, batch::vectors, batch::ranges, batch::objects, score::score, probes::metrics,
        probes::livez, probes::readyz, status::status, page::index, page::asset, get
    ),
    components(schemas(ProblemBody)),
    tags(
        (name = "datasets", description = "What is served."),
        (name = "data", description = "Reads."),
        (name = "operation", description = "For whoever operates it."),
    )
)]
struct Document;

/// Headers of a batch as bytes, which say how to split them (`super::batch_response`), and whether each is a number.
const BATCH_HEADERS: [(&str, bool, &str); 7] = [
    ("Ringfetch-Items", true, "Number of requested items."),
    (
        "Ringfetch-Errors",
        true,
        "Number of failed items, which have no bytes.",
    ),
    (
        "Ringfetch-Error-Items",
        false,
        "If there are any: their positions in the request, with commas between them.",
    ),
    (
        "Ringfetch-Item-Bytes",
        true,
        "Bytes of each good item, where all have the same.",
    ),
    (
        "Ringfetch-Lengths",
        false,
        "Otherwise: bytes of each item, 0 for a failed one, with commas between them.",
    ),
    ("Ringfetch-Dim", true, "Elements per vector; only for vectors."),
    ("Ringfetch-Dtype", false, "Element type; only for vectors."),
];

/// Names of the security schemes.
const TOKEN: &str = "token";
const CERTIFICATE: &str = "certificate";

pub(super) fn document() -> Bytes {
    // Only strings and maps, so it cannot fail.
    let text = serde_json::to_string(&complete(Document::openapi())).unwrap_or_default();
    // utoipa gives unsigned integers the format of signed ones (5.5; its feature for them writes `u-int64`). None here
    // is signed, and inside a JSON string the quotes would be escaped.
    Bytes::from(text.replace(r#""format":"int"#, r#""format":"uint"#))
}

fn complete(mut document: OpenApi) -> OpenApi {
    let mut token = Http::new(HttpAuthScheme::Bearer);
    token.description = Some("The token of a principal.".to_owned());
    let certificate = SecurityScheme::MutualTls {
        description: Some("A certificate that names a principal.".to_owned()),
        extensions: None,
    };
    let components = document.components.get_or_insert_default();
    components.add_security_scheme(TOKEN, SecurityScheme::Http(token));
    components.add_security_scheme(CERTIFICATE, certificate);
    let no_scopes = std::iter::empty::<String>;
    // The first one: none is needed if the daemon has no principals, or lets anonymous clients read.
    document.security = Some(vec![
        SecurityRequirement::default(),
        SecurityRequirement::new(TOKEN, no_scopes()),
        SecurityRequirement::new(CERTIFICATE, no_scopes()),
    ]);
    for (path, item) in &mut document.paths.paths {
        for operation in item.get.iter_mut().chain(item.post.iter_mut()) {
            for (status, response) in &mut operation.responses.responses {
                if let RefOr::T(response) = response
                    && status.starts_with('4')
                {
                    response.content.insert(PROBLEM_JSON.to_owned(), problem());
                }
            }
            add_problem(
                operation,
                "default",
                "What went wrong (RFC 9457); a refusal before routing may be without a body.",
                Some(("Retry-After", u64::schema(), "Seconds, if a retry can help.")),
            );
            if matches!(&path[..], "/livez" | "/readyz") {
                operation.security = Some(Vec::new());
            } else {
                add_problem(
                    operation,
                    "401",
                    "No valid credential (only if the daemon has principals).",
                    Some(("WWW-Authenticate", String::schema(), "The scheme of tokens.")),
                );
            }
            if !is_for_everyone(path) {
                add_problem(
                    operation,
                    "403",
                    "The principal has no right to this, whether it exists or not.",
                    None,
                );
            }
        }
        if let Some(batch) = item.post.as_mut().filter(|_| path.ends_with(":batchFetch"))
            && let Some(RefOr::T(response)) = batch.responses.responses.get_mut("200")
        {
            for (name, is_number, description) in BATCH_HEADERS {
                let schema = if is_number {
                    u64::schema()
                } else {
                    String::schema()
                };
                add_header(response, name, schema, description);
            }
        }
        for operation in item.get.iter_mut().chain(item.post.iter_mut()) {
            add_version(operation);
        }
        item.head = item.get.as_ref().map(head_of);
    }
    document
}

fn problem() -> Content {
    Content::new(Some(Ref::from_schema_name("Problem")))
}

fn add_problem(
    operation: &mut Operation,
    status: &str,
    description: &str,
    header: Option<(&str, RefOr<Schema>, &str)>,
) {
    let mut response = ResponseBuilder::new()
        .description(description)
        .content(PROBLEM_JSON, problem())
        .build();
    if let Some((name, schema, description)) = header {
        add_header(&mut response, name, schema, description);
    }
    operation
        .responses
        .responses
        .insert(status.to_owned(), RefOr::T(response));
}

/// Whether no principal needs a right for it: a list has what its reader may read.
fn is_for_everyone(path: &str) -> bool {
    matches!(path, "/livez" | "/readyz" | "/openapi.json" | "/v1/datasets")
}

/// The version in the responses of an operation that has a condition on it, and where a part is.
fn add_version(operation: &mut Operation) {
    let mut parameters = operation.parameters.iter().flatten();
    if !parameters.any(|one| one.name == "If-Match") {
        return;
    }
    for (status, response) in &mut operation.responses.responses {
        if let RefOr::T(response) = response
            && matches!(&status[..], "200" | "206" | "304" | "412" | "416")
        {
            add_header(response, "ETag", String::schema(), "The version, a strong tag.");
            let place = match &status[..] {
                "206" => {
                    "The part's place and the whole length; of several parts each has its own, in the body."
                }
                "416" => "The whole length: `bytes */LENGTH`.",
                _ => continue,
            };
            add_header(response, "Content-Range", String::schema(), place);
        }
    }
}

fn add_header(
    response: &mut utoipa::openapi::Response,
    name: &str,
    schema: RefOr<Schema>,
    description: &str,
) {
    let header = HeaderBuilder::new().schema(schema);
    let header = header.description(Some(description));
    response.headers.insert(name.to_owned(), header.build());
}

/// The same operation without bodies. Range does not apply to HEAD, so there is no partial response.
fn head_of(get: &Operation) -> Operation {
    let mut head = get.clone();
    head.operation_id = head.operation_id.map(|id| format!("Head{id}"));
    head.parameters = head.parameters.map(|all| {
        all.into_iter()
            .filter(|one| !matches!(&*one.name, "Range" | "If-Range"))
            .collect()
    });
    head.responses
        .responses
        .retain(|status, _| status != "206" && status != "416");
    for response in head.responses.responses.values_mut() {
        if let RefOr::T(response) = response {
            response.content.clear();
        }
    }
    head
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "operation", operation_id = "OpenApi",
    responses((status = 200, description = "OpenAPI 3.1.", content_type = "application/json")))]
pub(super) async fn get(State(app): State<Arc<AppState>>) -> Response {
    let content_type = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, content_type)], app.document.clone()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_status;
    use crate::http::routes::ROUTES;
    use ringfetch_engine::error::ReadError;
    use serde_json::{Map, Value, json};
    use std::collections::BTreeSet;

    fn parsed() -> Value {
        serde_json::from_slice(&document()).unwrap()
    }

    #[test]
    fn the_document_lists_exactly_the_routes() {
        // Paths and methods of the router and of the document: the same sets.
        let document = parsed();
        let mut documented = BTreeSet::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            for method in item
                .as_object()
                .unwrap()
                .keys()
                .filter(|key| *key != "parameters")
            {
                documented.insert((path.clone(), method.to_uppercase()));
            }
        }
        let mut routed = BTreeSet::new();
        for route in ROUTES {
            for method in route.methods {
                routed.insert((route.pattern.replace("{*", "{"), (*method).to_owned()));
            }
        }
        assert_eq!(documented, routed);
        assert_eq!(document["openapi"], "3.1.0");
    }

    #[test]
    fn operations_have_unique_ids_parameters_and_the_problem() {
        // Every operation: a unique id, each parameter of its path declared, problem+json as its default
        // response, and a body for every response but 304.
        let document = parsed();
        let mut ids = BTreeSet::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                assert!(
                    ids.insert(operation["operationId"].as_str().unwrap().to_owned()),
                    "{path} {method}"
                );
                let is_open = matches!(&path[..], "/livez" | "/readyz");
                // Whoever is known may read the description and what there is for it.
                let is_for_all = is_open || matches!(&path[..], "/openapi.json" | "/v1/datasets");
                for (status, is_left_out) in [("401", is_open), ("403", is_for_all)] {
                    assert_eq!(
                        operation["responses"][status].is_null(),
                        is_left_out,
                        "{path} {status}"
                    );
                }
                let no_credential = operation["security"].as_array().is_some_and(Vec::is_empty);
                assert_eq!(no_credential, is_open, "{path}");
                let other = &operation["responses"]["default"];
                assert!(!other["description"].as_str().unwrap().is_empty());
                if method != "head" {
                    let schema = &other["content"][PROBLEM_JSON]["schema"]["$ref"];
                    assert_eq!(schema, "#/components/schemas/Problem", "{path} {method}");
                    let has_body = |response: &Value| response["content"].as_object().is_some();
                    for (status, response) in operation["responses"].as_object().unwrap() {
                        assert_eq!(has_body(response), status != "304", "{path} {method} {status}");
                    }
                }
                let declared: BTreeSet<String> = operation["parameters"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter(|parameter| parameter["in"] == "path")
                    .map(|parameter| parameter["name"].as_str().unwrap().to_owned())
                    .collect();
                let named: BTreeSet<String> = path
                    .split('/')
                    .filter_map(|segment| segment.strip_prefix('{')?.strip_suffix('}'))
                    .map(str::to_owned)
                    .collect();
                assert_eq!(declared, named, "{path} {method}");
            }
        }
    }

    /// Calls `see` with every object of the document.
    fn walk(value: &Value, see: &mut impl FnMut(&Map<String, Value>)) {
        match value {
            Value::Object(members) => {
                see(members);
                members.values().for_each(|member| walk(member, see));
            }
            Value::Array(elements) => elements.iter().for_each(|element| walk(element, see)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        // All `$ref`s of the document: each names an existing schema.
        let document = parsed();
        let mut references = Vec::new();
        walk(&document, &mut |object| {
            references.extend(object.get("$ref").and_then(Value::as_str).map(str::to_owned));
        });
        assert!(!references.is_empty());
        for reference in references {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
    }

    #[test]
    fn every_read_has_its_version() {
        // All reads: the condition on the version, its refusal, and the version of what is read. Each object of a batch
        // has a condition and a version of its own instead, so that no answer has a tag.
        let document = parsed();
        let mut reads = 0;
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                if operation["tags"] != json!(["data"]) {
                    continue;
                }
                let is_versioned = !path.ends_with("/objects:batchFetch");
                let parameters = operation["parameters"].as_array().unwrap();
                let condition = parameters.iter().any(|one| one["name"] == "If-Match");
                assert_eq!(condition, is_versioned, "{method} {path}");
                let responses = &operation["responses"];
                assert!(responses["412"].is_object(), "{method} {path}");
                let tag = &responses["200"]["headers"]["ETag"];
                assert_eq!(tag.is_object(), is_versioned, "{method} {path}");
                let tag = &responses["412"]["headers"]["ETag"];
                assert_eq!(tag.is_object(), is_versioned, "{method} {path}");
                reads += 1;
            }
        }
        assert_eq!(reads, 13);
    }

    #[test]
    fn parts_have_their_place_and_version() {
        // The reads that serve ranges: Content-Range and ETag are with a part and with the refusal of a range past the end, as
        // they are sent.
        let document = parsed();
        for path in [
            "/v1/datasets/{name}/bytes",
            "/v1/datasets/{name}/objects/{object}",
        ] {
            let responses = &document["paths"][path]["get"]["responses"];
            for (status, header) in ["206", "416"]
                .iter()
                .flat_map(|status| ["ETag", "Content-Range"].map(|header| (*status, header)))
            {
                let described = &responses[status]["headers"][header];
                assert!(described.is_object(), "{path} {status} {header}");
            }
            assert!(responses["200"]["headers"]["Content-Range"].is_null(), "{path}");
        }
    }

    #[test]
    fn refusals_have_the_headers_that_say_what_to_do() {
        // Every operation. Expectation: Retry-After with what may go wrong, and WWW-Authenticate with 401, which all but the
        // probes have.
        let mut with_credentials = 0;
        for operations in parsed()["paths"].as_object().unwrap().values() {
            for operation in operations.as_object().unwrap().values() {
                let responses = &operation["responses"];
                assert!(
                    responses["default"]["headers"]["Retry-After"].is_object(),
                    "{operation}"
                );
                if let Some(denied) = responses.get("401") {
                    assert!(denied["headers"]["WWW-Authenticate"].is_object(), "{operation}");
                    with_credentials += 1;
                }
            }
        }
        assert!(with_credentials > 20, "{with_credentials}");
    }

    #[test]
    fn credentials_are_optional_and_of_known_schemes() {
        // The schemes, and the alternatives of every operation that names none: no credential, or one of each scheme.
        let document = parsed();
        let schemes = &document["components"]["securitySchemes"];
        assert_eq!(
            (&schemes[TOKEN]["type"], &schemes[TOKEN]["scheme"]),
            (&json!("http"), &json!("bearer"))
        );
        assert_eq!(schemes[CERTIFICATE]["type"], "mutualTLS");
        assert_eq!(document["security"], json!([{}, {TOKEN: []}, {CERTIFICATE: []}]));
    }

    #[test]
    fn elements_of_every_type_fit_their_number() {
        // A vector in JSON: an element of f64, or an id of i32, needs a double. Its example of a problem is one there is.
        let document = parsed();
        let get = &document["paths"]["/v1/datasets/{name}/vectors/{id}"]["get"];
        let vector = &get["responses"]["200"]["content"]["application/json"]["schema"];
        assert_eq!(vector["items"]["type"], json!(["number", "null"]));
        assert_eq!(vector["items"]["format"], "double");
        let error = ReadError::RangeOutOfRange {
            offset: 0,
            length: 2,
            end: 1,
        };
        let slug = error_status::of_read(&error).slug;
        let example = &document["components"]["schemas"]["Problem"]["properties"]["type"]["example"];
        assert_eq!(*example, format!("/problems/{slug}"));
    }

    #[test]
    fn every_integer_has_its_width() {
        // Clients generated from the document: an index above 2^63, or a length above 2^31, must fit.
        let mut integers = 0;
        walk(&parsed(), &mut |schema| {
            let is_integer = match schema.get("type") {
                Some(Value::Array(types)) => types.contains(&json!("integer")),
                Some(one) => one == "integer",
                None => false,
            };
            if is_integer {
                let format = schema.get("format").and_then(Value::as_str);
                assert!(matches!(format, Some("uint32" | "uint64")), "{schema:?}");
                assert_eq!(schema["minimum"], 0, "{schema:?}");
                integers += 1;
            }
        });
        assert!(integers > 50, "{integers}");
    }
}
