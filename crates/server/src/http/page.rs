//! The page at `/`: datasets, backend and its reason, and live figures, for people without a dashboard.
//!
//! Markup, style, scripts and an icon are compiled in; figures come from `/v1/status`. The
//! Content-Security-Policy allows nothing else, and nothing inline. All addresses are relative, so that the
//! page works under a proxy's prefix. There are no templates and no frameworks, and the page changes nothing
//! in the daemon.

use super::AppState;
use super::conditional::{ETag, Precondition, evaluate};
use super::problem::{PathParams, Problem, no_such_path};
use super::representation::precondition_failed;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use ring::digest::{SHA256, digest};
use std::sync::Arc;

/// Nothing from other origins, nothing inline, no framing, no markup made from strings.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

/// Links for machines (RFC 8631 and IANA's link relations).
const LINKS: &str = concat!(
    r#"<openapi.json>; rel="service-desc"; type="application/json", "#,
    r#"<v1/status>; rel="status"; type="application/json""#,
);

#[derive(Debug)]
struct Asset {
    name: &'static str,
    content_type: &'static str,
    text: &'static str,
    etag: ETag,
}

/// Every file of the page, with its tag.
#[derive(Debug)]
pub(super) struct Page([Asset; 8]);

const INDEX: &str = "index.html";

impl Page {
    pub(super) fn new() -> Self {
        let asset = |name, content_type, text: &'static str| Asset {
            name,
            content_type,
            text,
            etag: ETag::new(tag_of(text)),
        };
        let script = |name, text| asset(name, "text/javascript; charset=utf-8", text);
        Self([
            asset(INDEX, "text/html; charset=utf-8", include_str!("page/index.html")),
            asset(
                "style.css",
                "text/css; charset=utf-8",
                include_str!("page/style.css"),
            ),
            script("script.js", include_str!("page/script.js")),
            script("numbers.js", include_str!("page/numbers.js")),
            script("points.js", include_str!("page/points.js")),
            script("draw.js", include_str!("page/draw.js")),
            script("tables.js", include_str!("page/tables.js")),
            asset("icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
        ])
    }

    async fn answer(&self, name: &str, conditions: &HeaderMap) -> Result<Response, Problem> {
        match self.find(name) {
            Some(asset) => asset.answer(conditions),
            None => Err(no_such_path().await),
        }
    }

    fn find(&self, name: &str) -> Option<&Asset> {
        self.0.iter().find(|asset| asset.name == name)
    }
}

/// Distinguishes versions of a file.
fn tag_of(text: &str) -> String {
    let digest = digest(&SHA256, text.as_bytes());
    digest.as_ref()[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

impl Asset {
    fn answer(&self, conditions: &HeaderMap) -> Result<Response, Problem> {
        let (status, body) = match evaluate(conditions, &self.etag)? {
            Precondition::Holds => (
                StatusCode::OK,
                Body::from(Bytes::from_static(self.text.as_bytes())),
            ),
            Precondition::NotModified => (StatusCode::NOT_MODIFIED, Body::empty()),
            Precondition::Failed => return Err(precondition_failed(&self.etag)),
        };
        let mut response = (status, body).into_response();
        let headers = response.headers_mut();
        headers.insert(header::ETAG, self.etag.value());
        // Revalidated each time, so that no old script runs against the new status after an upgrade.
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        if status == StatusCode::OK {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.content_type));
        }
        let fixed = [
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
        ];
        for (name, value) in fixed {
            headers.insert(name, HeaderValue::from_static(value));
        }
        if self.name == INDEX {
            headers.insert(header::LINK, HeaderValue::from_static(LINKS));
        }
        Ok(response)
    }
}

/// A page for people: datasets, backend and reason, live IOPS, queue depth and latency.
#[utoipa::path(get, path = "/", tag = "operation", operation_id = "Page",
    responses(
        (status = 200, description = "The page.", body = String, content_type = "text/html"),
        (status = 304, description = "If-None-Match names the current version of the page."),
    ))]
pub(super) async fn index(State(app): State<Arc<AppState>>, headers: HeaderMap) -> Result<Response, Problem> {
    app.page.answer(INDEX, &headers).await
}

/// What the page is made of.
#[utoipa::path(get, path = "/page/{asset}", tag = "operation", operation_id = "PageAsset",
    params(("asset" = String, Path, description = "A file that the page names.")),
    responses(
        (status = 200, description = "The file.", content(
            (String = "text/javascript"), (String = "text/css"), (String = "image/svg+xml"))),
        (status = 304, description = "The file of If-None-Match is the current one."),
    ))]
pub(super) async fn asset(
    State(app): State<Arc<AppState>>,
    PathParams(name): PathParams<String>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    match &*name {
        // The index is served only at `/`: its relative links would be wrong here.
        INDEX => Err(no_such_path().await),
        name => app.page.answer(name, &headers).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_only_what_is_served_and_runs_nothing_inline() {
        // The markup: each src and href is a file of the page or a resource of the daemon, and relative. It
        // contains no script, style or handler, which the policy would block.
        let page = Page::new();
        let markup = page.find(INDEX).unwrap().text;
        let mut named = 0;
        for attribute in [" src=\"", " href=\""] {
            for rest in markup.split(attribute).skip(1) {
                let target = rest.split('"').next().unwrap();
                let is_asset = target
                    .strip_prefix("page/")
                    .is_some_and(|name| name != INDEX && page.find(name).is_some());
                let is_resource =
                    super::super::routes::methods_of(Some(&format!("/{target}"))).contains(&"GET");
                assert!(is_asset || is_resource || target.starts_with('#'), "{target}");
                named += 1;
            }
        }
        // What scripts import is next to them.
        for asset in page.0.iter().filter(|asset| asset.name.ends_with(".js")) {
            for rest in asset.text.split(" from \"").skip(1) {
                let target = rest.split('"').next().unwrap();
                let name = target.strip_prefix("./").unwrap_or_else(|| panic!("{target}"));
                assert!(page.find(name).is_some(), "{} imports {target}", asset.name);
                named += 1;
            }
        }
        assert!(named >= 13, "{named}");
        for inline in [
            "<script>",
            "<style",
            " style=\"",
            " onclick=",
            " onload=",
            "javascript:",
        ] {
            assert!(!markup.contains(inline), "{inline}");
        }
    }

    #[test]
    fn versions_of_a_file_have_tags_of_their_own() {
        // The files of the page, which all have different tags; and the beginning of a known hash (FIPS 180-2, B.1).
        assert_eq!(tag_of("abc"), "ba7816bf8f01cfea");
        let Page(assets) = Page::new();
        for (index, asset) in assets.iter().enumerate() {
            let others = assets.iter().skip(index + 1);
            assert!(
                others.clone().all(|other| other.etag != asset.etag),
                "{}",
                asset.name
            );
        }
    }
}
