//! `ringfetchd healthcheck`: one GET of /readyz, for containers that have no curl.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use ringfetch_server::config::TlsConfig;
use ringfetch_server::listener::WrongProtocol;
use ringfetch_server::tls::loopback_client;

/// Timeout of the whole check; orchestrators give it a few seconds at most.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest response that is read: a readiness response is short.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Checks the daemon that listens for HTTP on `listen`, with TLS if that port has it. Returns one line for
/// people.
///
/// # Errors
/// One line: no response, or a status other than 200.
pub(crate) fn ask(listen: SocketAddr, tls: Option<&TlsConfig>) -> Result<String, String> {
    let scheme = if tls.is_some() { "https" } else { "http" };
    if listen.port() == 0 {
        return Err("http.listen has port 0: the real port is only in the daemon's log".to_owned());
    }
    let deadline = Deadline(Instant::now() + TIMEOUT);
    let (address, stream) = connect(listen, deadline);
    let not_ready = |why: &str| format!("not ready: {scheme}://{address}/readyz: {why}");
    let answer = stream
        .and_then(|stream| get(address, DeadlineStream { stream, deadline }, tls))
        .map_err(|error| {
            if is_timeout(&error) {
                not_ready(&format!("no response within {} s", TIMEOUT.as_secs()))
            } else {
                not_ready(&error.to_string())
            }
        })?;
    if answer.is_empty() {
        return Err(not_ready("the connection was closed without a response"));
    }
    let status_line = answer.lines().next().unwrap_or_default();
    // RFC 9112 section 4: HTTP-version SP status-code SP [reason].
    let mut words = status_line.split(' ');
    let is_http = words.next().is_some_and(|version| version.starts_with("HTTP/1."));
    let names = |wrong: WrongProtocol| answer.contains(&format!("/problems/{}\"", wrong.slug()));
    match words.next() {
        Some("200") if is_http => Ok(format!("ready: {scheme}://{address}/readyz")),
        // RFC 8446 section 5.1: the type of a record that is an alert.
        _ if names(WrongProtocol::Tls) || answer.starts_with('\u{15}') => Err(not_ready(
            "this port has TLS; name the daemon's configuration, which has it, with --config",
        )),
        _ if names(WrongProtocol::Grpc) || !is_http => Err(not_ready(
            "it is no HTTP port; http.listen must be the daemon's HTTP address, not that of gRPC",
        )),
        _ => Err(not_ready(&format!("the response is {status_line:?}"))),
    }
}

/// Addresses that reach a listener, in the order to try: loopback if it listens on all interfaces. `[::]` covers IPv4, too,
/// which a host without ::1 has.
fn reachable(listen: SocketAddr) -> Vec<SocketAddr> {
    let port = listen.port();
    let (v4, v6) = (
        (Ipv4Addr::LOCALHOST, port).into(),
        (Ipv6Addr::LOCALHOST, port).into(),
    );
    match listen.ip() {
        // As a whole: a link-local address has its interface with it.
        ip if !ip.is_unspecified() => vec![listen],
        IpAddr::V4(_) => vec![v4],
        IpAddr::V6(_) => vec![v6, v4],
    }
}

/// A connection, or the last error, with its address. A timeout is final: orchestrators do not wait for a second one.
fn connect(listen: SocketAddr, deadline: Deadline) -> (SocketAddr, io::Result<TcpStream>) {
    let mut outcome = (listen, Err(io::ErrorKind::AddrNotAvailable.into()));
    for address in reachable(listen) {
        let stream = deadline
            .time_left()
            .and_then(|time| TcpStream::connect_timeout(&address, time));
        outcome = (address, stream);
        if outcome.1.as_ref().map_or_else(is_timeout, |_| true) {
            break;
        }
    }
    outcome
}

/// The kernel reports a socket's timeout as EAGAIN.
fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

#[derive(Debug, Clone, Copy)]
struct Deadline(Instant);

impl Deadline {
    /// More than none, which would mean no timeout to a socket.
    fn time_left(self) -> io::Result<Duration> {
        let time = self.0.checked_duration_since(Instant::now());
        time.filter(|time| !time.is_zero())
            .ok_or_else(|| io::ErrorKind::TimedOut.into())
    }
}

/// A stream whose reads and writes all end by a deadline, however many there are.
struct DeadlineStream {
    stream: TcpStream,
    deadline: Deadline,
}

impl Read for DeadlineStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.deadline.time_left()?))?;
        self.stream.read(buffer)
    }
}

impl Write for DeadlineStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.deadline.time_left()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn get(address: SocketAddr, stream: DeadlineStream, tls: Option<&TlsConfig>) -> io::Result<String> {
    // Without the interface of a link-local address, which means nothing to the other side (RFC 6874, section 4).
    let host = SocketAddr::new(address.ip(), address.port());
    let request = format!("GET /readyz HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    let mut answer = Vec::new();
    match tls {
        None => exchange(stream, &request, &mut answer)?,
        Some(tls) => exchange(loopback_client(tls, address.ip(), stream)?, &request, &mut answer)?,
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn exchange(mut stream: impl Read + Write, request: &str, answer: &mut Vec<u8>) -> io::Result<()> {
    stream.write_all(request.as_bytes())?;
    stream.take(ANSWER_BYTES_MAX).read_to_end(answer)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answering(answer: &'static str) -> (SocketAddr, std::thread::JoinHandle<String>) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut request = [0; 1024];
            let length = stream.read(&mut request).expect("a request");
            stream.write_all(answer.as_bytes()).expect("an answer");
            String::from_utf8_lossy(&request[..length]).into_owned()
        });
        (address, server)
    }

    #[test]
    fn the_status_decides() {
        // Scenario: a daemon that is ready, one that drains, one that closes without a response, a gRPC
        // port. Expectation: only the first is ready; the lines report the response.
        let (address, server) = answering("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nready");
        assert_eq!(ask(address, None), Ok(format!("ready: http://{address}/readyz")));
        assert!(
            server
                .join()
                .expect("the server")
                .starts_with("GET /readyz HTTP/1.1\r\n")
        );
        let (address, _server) = answering("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n");
        assert!(
            ask(address, None)
                .expect_err("draining")
                .contains("503 Service Unavailable")
        );
        let (address, _server) = answering("");
        assert!(ask(address, None).expect_err("silent").starts_with("not ready"));
        // A gRPC port answers with a problem, that of another server with HTTP/2's SETTINGS.
        let problem = "HTTP/1.1 400 Bad Request\r\n\r\n{\"type\":\"/problems/grpc-only\"}";
        for answer in [problem, "\0\0\x06\x04\0\0\0\0\0\0\x05\0\0@\0"] {
            let (address, _server) = answering(answer);
            let line = ask(address, None).expect_err("gRPC");
            assert!(line.contains("http.listen") && !line.contains("\\u{"), "{line}");
        }
        // A port with TLS answers with a problem, that of another server with an alert: version 3.3, 2 bytes, fatal, decode_error.
        let problem = "HTTP/1.1 400 Bad Request\r\n\r\n{\"type\":\"/problems/tls-only\"}";
        for answer in [problem, "\x15\x03\x03\0\x02\x02\x32"] {
            let (address, _server) = answering(answer);
            let line = ask(address, None).expect_err("TLS");
            assert!(line.contains("TLS") && line.contains("--config"), "{line}");
        }
    }

    #[test]
    fn a_daemon_that_does_not_answer_is_reported_with_the_timeout() {
        // Scenario: a port whose owner accepts nothing. Expectation: the line names the timeout, not an errno.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let line = ask(address, None).expect_err("stopped");
        assert!(line.contains("no response within 2 s"), "{line}");
    }

    #[test]
    fn a_response_that_never_ends_has_one_timeout() {
        // Scenario: a server whose response comes in pieces, each well within the timeout, but altogether not. Expectation:
        // not ready, with the timeout; not the status in the first piece, however many follow.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let (asked, is_over) = std::sync::mpsc::channel::<()>();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut piece = *b"HTTP/1.1 200 OK\r\nx-piece: ";
            while stream.write_all(&[&piece[..], &[b'a'; 1024]].concat()).is_ok()
                && is_over.recv_timeout(TIMEOUT / 20) == Err(std::sync::mpsc::RecvTimeoutError::Timeout)
            {
                piece = [b'a'; 26];
            }
        });
        let line = ask(address, None).expect_err("still responding");
        assert!(line.contains("no response within 2 s"), "{line}");
        drop(asked);
        server.join().expect("the server");
    }

    #[test]
    fn all_interfaces_are_reached_by_loopback() {
        // Scenario: unspecified addresses, a particular one, and a link-local one. Expectation: loopback of the
        // same family, and of IPv4, which a host without ::1 has; the others unchanged, with the interface.
        for (listen, expected) in [
            ("0.0.0.0:7411", &["127.0.0.1:7411"][..]),
            ("[::]:7411", &["[::1]:7411", "127.0.0.1:7411"]),
            ("192.0.2.1:7411", &["192.0.2.1:7411"]),
            ("[fe80::1%2]:7411", &["[fe80::1%2]:7411"]),
        ] {
            let parse = |text: &&str| text.parse::<SocketAddr>().expect("an address");
            let expected: Vec<_> = expected.iter().map(parse).collect();
            assert_eq!(reachable(parse(&listen)), expected);
        }
    }

    #[test]
    fn all_interfaces_are_reached_where_only_ipv4_has_loopback() {
        // Scenario: all interfaces, and nobody on ::1, as on a host without it. Expectation: 127.0.0.1 answers.
        let (address, _server) = answering("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nready");
        let listen = (Ipv6Addr::UNSPECIFIED, address.port()).into();
        assert_eq!(ask(listen, None), Ok(format!("ready: http://{address}/readyz")));
    }
}
