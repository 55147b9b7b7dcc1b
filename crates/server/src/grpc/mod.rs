//! The gRPC transport.
