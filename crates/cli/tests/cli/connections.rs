//! Servers of a few lines, and proxies that count, cut or keep connections.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread;

/// Passes each connection to a port of its own to `take`, numbered from 0.
pub(crate) fn listen(take: impl Fn(usize, TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for (number, connection) in listener.incoming().enumerate() {
            take(number, connection.unwrap());
        }
    });
    address
}

/// Serves a port of its own on a thread with a runtime.
pub(crate) fn serve(server: impl AsyncFnOnce(tokio::net::TcpListener) + Send + 'static) -> SocketAddr {
    let (address, started) = channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            address.send(listener.local_addr().unwrap()).unwrap();
            server(listener).await;
        });
    });
    started.recv().unwrap()
}

/// Forwards a connection to a server, in both directions.
pub(crate) fn forward(client: TcpStream, server: SocketAddr) {
    let server = TcpStream::connect(server).unwrap();
    for (mut from, mut to) in [
        (client.try_clone().unwrap(), server.try_clone().unwrap()),
        (server, client),
    ] {
        thread::spawn(move || std::io::copy(&mut from, &mut to));
    }
}
