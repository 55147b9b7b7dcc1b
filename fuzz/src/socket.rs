//! Requests over sockets, on reused connections.

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::convert::Infallible;
use std::net::SocketAddr;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

pub type Body = BoxBody<Bytes, Infallible>;
/// A connection that speaks HTTP/1.1.
pub type Http1 = http1::SendRequest<Body>;
/// A connection that speaks HTTP/2.
pub type Http2 = http2::SendRequest<Body>;

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

async fn connect(address: SocketAddr, tls: Option<&TlsConnector>) -> TokioIo<Box<dyn Stream>> {
    let stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    TokioIo::new(match tls {
        None => Box::new(stream),
        Some(tls) => {
            let server = ServerName::from(address.ip());
            Box::new(tls.connect(server, stream).await.unwrap())
        }
    })
}

/// Connects.
pub async fn http1(address: SocketAddr, tls: Option<&TlsConnector>) -> Http1 {
    let (sender, connection) = http1::handshake(connect(address, tls).await).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// Connects, without an upgrade.
pub async fn http2(address: SocketAddr, tls: Option<&TlsConnector>) -> Http2 {
    let stream = connect(address, tls).await;
    let (sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// Sends over the connection in `slot`, or a new one if there is none or it was closed.
#[macro_export]
macro_rules! send {
    ($slot:expr, $connect:expr, $request:expr) => {{
        let mut attempt = 0;
        loop {
            let mut sender = match $slot.take() {
                Some(sender) => sender,
                None => $connect.await,
            };
            let sending = async {
                sender.ready().await?;
                $crate::Answer::of(sender.send_request($request).await?).await
            };
            let answer: hyper::Result<$crate::Answer> = sending.await;
            match answer {
                Ok(answer) => {
                    $slot = Some(sender);
                    break answer;
                }
                // It was closed while idle, or after the last answer.
                Err(error) => assert!(attempt < 3, "{error:?}"),
            }
            attempt += 1;
        }
    }};
}
