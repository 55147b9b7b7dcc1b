//! An HTTP/1.1 client by hyper, which checks the framing.
//!
//! A request and its connection run in one task. Handed to a connection that ends on another thread meanwhile, a request of
//! hyper's may never be answered, nor fail (hyperium/hyper#2312): with hyper-util's client a test waited for it without end.

use crate::daemon::Daemon;
use crate::wire::{Answer, authorization};
use bytes::Bytes;
use http::{Method, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::error::Error;
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinHandle;

type Request = http::Request<Full<Bytes>>;

/// Clones share their idle connections.
#[derive(Debug, Clone)]
pub(crate) struct Http {
    address: SocketAddr,
    from: IpAddr,
    idle: Arc<Mutex<Vec<Idle>>>,
}

/// A connection that waits for its next request, `None` once it has ended or is used, and the task that closes it with the daemon.
#[derive(Debug)]
struct Idle {
    connection: Arc<Mutex<Option<Connection>>>,
    watch: JoinHandle<()>,
}

/// A connection, and what has to be polled for it.
#[derive(Debug)]
struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    driver: http1::Connection<TokioIo<TcpStream>, Full<Bytes>>,
}

impl Daemon {
    /// An HTTP client with connections of its own.
    pub(crate) fn http_client(&self) -> Http {
        self.http_client_from(self.http.ip())
    }

    /// The same from this address.
    pub(crate) fn http_client_from(&self, from: IpAddr) -> Http {
        Http {
            address: self.http,
            from,
            idle: Arc::default(),
        }
    }
}

impl Http {
    /// Sends a request and reads the answer whole.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        let request = self.request(method, path, headers, body.into());
        self.answer(request).await.expect("an answer")
    }

    /// A GET of a daemon that may be going: `None` when there is no connection, or it was closed without a word. An
    /// answer that breaks off is a failure.
    pub(crate) async fn try_get(&self, path: &str, headers: &[(&str, &str)]) -> Option<Answer> {
        let request = self.request(Method::GET, path, headers, Bytes::new());
        self.answer(request).await.ok()
    }

    /// A plain GET.
    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, &[], "").await
    }

    /// A GET with headers.
    pub(crate) async fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.send(Method::GET, path, headers, "").await
    }

    /// A batch: JSON in, the form that `accept` names out.
    pub(crate) async fn batch(&self, path: &str, body: &Value, accept: &str) -> Answer {
        let headers = [("content-type", "application/json"), ("accept", accept)];
        self.send(Method::POST, path, &headers, body.to_string()).await
    }

    fn request(&self, method: Method, path: &str, headers: &[(&str, &str)], body: Bytes) -> Request {
        let mut request = http::Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(value) = authorization(self.address) {
            request = request.header(header::AUTHORIZATION, value);
        }
        let mut request = request.body(Full::new(body)).expect("a request");
        let host = self.address.to_string().parse().expect("a host");
        request.headers_mut().entry(header::HOST).or_insert(host);
        request
    }

    /// By a connection that was used before, unless that has ended.
    async fn answer(&self, request: Request) -> Result<Answer, Box<dyn Error>> {
        loop {
            let idle = self.idle.lock().expect("connections").pop();
            let Some(idle) = idle else { break };
            let Some(connection) = idle.take() else { continue };
            match self.ask(connection, request.clone()).await {
                Err(error) if error.is_canceled() || error.is_closed() => {}
                answer => return Ok(answer?),
            }
        }
        let connection = self.connect().await?;
        Ok(self.ask(connection, request).await?)
    }

    async fn connect(&self) -> Result<Connection, Box<dyn Error>> {
        let socket = match self.address {
            SocketAddr::V4(_) => TcpSocket::new_v4(),
            SocketAddr::V6(_) => TcpSocket::new_v6(),
        }?;
        socket.bind(SocketAddr::new(self.from, 0))?;
        let stream = socket.connect(self.address).await?;
        let (sender, driver) = http1::handshake(TokioIo::new(stream)).await?;
        Ok(Connection { sender, driver })
    }

    async fn ask(&self, connection: Connection, request: Request) -> hyper::Result<Answer> {
        let Connection { mut sender, driver } = connection;
        let mut driver = Some(driver);
        let answer = {
            let mut answer = std::pin::pin!(async {
                sender.ready().await?;
                let (parts, body) = sender.send_request(request).await?.into_parts();
                let body = body.collect().await.expect("a whole body").to_bytes();
                hyper::Result::Ok(Answer {
                    status: parts.status,
                    headers: parts.headers,
                    body,
                })
            });
            let answered = tokio::select! {
                biased;
                answer = &mut answer => Some(answer),
                _ = driver.as_mut().expect("a connection") => None,
            };
            match answered {
                Some(answer) => answer,
                // What has arrived can still be read; what was not sent fails once the connection is dropped.
                None => {
                    driver = None;
                    answer.await
                }
            }
        };
        if let (Ok(_), Some(driver)) = (&answer, driver) {
            let idle = Idle::new(Connection { sender, driver });
            self.idle.lock().expect("connections").push(idle);
        }
        answer
    }
}

impl Idle {
    fn new(connection: Connection) -> Self {
        let connection = Arc::new(Mutex::new(Some(connection)));
        let watched = Arc::clone(&connection);
        let watch = tokio::spawn(poll_fn(move |cx| {
            let mut connection = watched.lock().expect("a connection");
            let Some(open) = &mut *connection else {
                return Poll::Ready(());
            };
            Pin::new(&mut open.driver).poll(cx).map(|_| *connection = None)
        }));
        Self { connection, watch }
    }

    fn take(&self) -> Option<Connection> {
        self.connection.lock().expect("a connection").take()
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        self.watch.abort();
    }
}
