//! The gRPC services over real datasets and a real engine (pread: it runs on any host), called in memory by
//! tonic's own clients, so that the hand-written server is tested against a standard client.

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
