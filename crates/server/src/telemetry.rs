//! Logs and the metrics registry.
