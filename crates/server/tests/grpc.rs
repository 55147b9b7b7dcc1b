//! The gRPC services over real datasets and a real engine (pread: it runs wherever the tests do), called in memory by
//! tonic's own clients, so that what is written by hand on the server meets what everybody else has.

#[cfg(test)]
mod grpc {
    mod admin;
    mod datasets;
    mod fetch;
    mod refused;
    mod scores;
    mod served;
    mod sockets;
    mod stream;
}
