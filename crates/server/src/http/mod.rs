//! The HTTP transport.
