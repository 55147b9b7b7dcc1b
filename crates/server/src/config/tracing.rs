//! The section `tracing`: where spans go, and of which requests.

use super::walk::Section;

const OFF: &str = "off";

/// Spans for OpenTelemetry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracingConfig {
    /// A collector of OTLP over gRPC, as a URL.
    pub otlp_endpoint: String,
    /// Of requests that belong to no trace, one of so many begins one; 0: none.
    pub sample: u32,
}

/// `None`: no spans.
pub(super) fn read(mut section: Section<'_>) -> Option<TracingConfig> {
    let allowed = "a URL such as http://127.0.0.1:4317 (OTLP over gRPC, without TLS), or off";
    let otlp_endpoint = section.text_or("otlp_endpoint", OFF, allowed, |text| {
        let uri = text.parse::<http::Uri>();
        let is_plain = uri.is_ok_and(|uri| {
            // A password would be printed with the configuration; OTEL_EXPORTER_OTLP_HEADERS has room for one.
            let has_user = uri
                .authority()
                .is_some_and(|authority| authority.as_str().contains('@'));
            uri.scheme_str() == Some("http")
                && uri.port().is_some()
                && matches!(uri.path(), "" | "/")
                && !has_user
        });
        if is_plain || text == OFF {
            Ok(())
        } else {
            Err(format!("is {text:?}"))
        }
    });
    let sample = section.small("sample", 0, 0..=u32::MAX);
    section.finish();
    (otlp_endpoint != OFF).then_some(TracingConfig {
        otlp_endpoint,
        sample,
    })
}
