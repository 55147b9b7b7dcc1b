//! The section `tracing`: where spans are sent, and for which requests.

use super::walk::Section;

const OFF: &str = "off";

/// Spans for OpenTelemetry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracingConfig {
    /// An OTLP collector over gRPC, as a URL.
    pub otlp_endpoint: String,
    /// One in this many requests without a trace starts one; 0: none.
    pub sample: u32,
}

/// `None`: no spans.
pub(super) fn read(mut section: Section<'_>) -> Option<TracingConfig> {
    let allowed = "a URL such as http://127.0.0.1:4317 (OTLP over gRPC, without TLS), or off";
    let otlp_endpoint = section.text_or("otlp_endpoint", OFF, allowed, |text| {
        let uri = text.parse::<http::Uri>();
        // Credentials in the URL are neither repeated nor accepted: the configuration is printed, and its
        // changes are logged.
        if text.contains(['@', '?', '#']) {
            let problem =
                "contains a user, a password, a query or a fragment: use OTEL_EXPORTER_OTLP_HEADERS instead";
            return Err(problem.to_owned());
        }
        let is_plain = uri.is_ok_and(|uri| {
            let has_host = uri.host().is_some_and(|host| !host.is_empty());
            uri.scheme_str() == Some("http")
                && has_host
                && uri.port().is_some()
                && matches!(uri.path(), "" | "/")
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
