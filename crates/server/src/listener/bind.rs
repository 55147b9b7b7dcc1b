//! Binds ports early and listens late.
//!
//! A port is bound before the slow part of the start, so that a port in use is reported at once. It listens only when the
//! daemon is ready, so that no client waits in the backlog of a daemon that may fail to start.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use ringfetch_command::part_file::{PartFile, write_whole};
use rustix::io::Errno;
use socket2::{Domain, Protocol, SockFilter, SockRef, Socket, Type};
use tokio::net::TcpListener;

/// Backlog of a port; the kernel limits it to net.core.somaxconn (4096 by default).
const BACKLOG: i32 = 1024;

/// A congestion control that every kernel has and lets everybody choose, and that does not pace.
const UNPACED: &[u8] = b"reno";

/// Where the daemon listens, with the actual port in place of 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Addresses {
    /// gRPC.
    pub grpc: SocketAddr,
    /// HTTP.
    pub http: SocketAddr,
    /// The admin service, unless it is off.
    pub admin: Option<SocketAddr>,
}

impl Addresses {
    /// Checks whether they can be written to a file. Leaves nothing.
    ///
    /// # Errors
    /// A directory; a pipe, whose reader the start would wait for; errors of making a file there.
    pub fn check(path: &Path) -> io::Result<()> {
        match path.metadata() {
            Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if found.file_type().is_fifo() => Err(io::Error::other(
                "is a pipe, which may have no reader: name a file",
            )),
            Ok(_) | Err(_) => PartFile::beside(path).map(drop),
        }
    }

    /// Writes them as JSON, atomically.
    ///
    /// # Errors
    /// Errors of writing the file.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        write_whole(path, &serde_json::to_vec(self)?)
    }
}

/// Why a port cannot be bound.
#[derive(Debug, thiserror::Error)]
#[error("{key}: cannot listen on {address}: {error}; {}", self.remedy())]
pub struct BindError {
    /// The configuration key that names the address.
    pub key: &'static str,
    /// The address.
    pub address: SocketAddr,
    /// The kernel's error, which is part of the message and so not a source.
    pub error: io::Error,
}

impl BindError {
    fn remedy(&self) -> String {
        let flag = match self.key {
            "grpc.listen" => "--grpc-listen ".to_owned(),
            "http.listen" => "--http-listen ".to_owned(),
            key => format!("--set {key}="),
        };
        let other = SocketAddr::new(self.address.ip(), 0);
        let kind = self.error.kind();
        if kind == io::ErrorKind::AddrInUse {
            format!(
                "another process has this port: stop that one, or choose another port ({flag}{other} for any free one)"
            )
        } else if kind == io::ErrorKind::PermissionDenied {
            format!(
                "a port below 1024 needs CAP_NET_BIND_SERVICE: choose another port ({flag}{other} for any free one)"
            )
        } else if kind == io::ErrorKind::AddrNotAvailable {
            format!(
                "no interface of this machine has that address: choose one of its addresses ({flag}127.0.0.1:0)"
            )
        } else if matches!(
            Errno::from_io_error(&self.error),
            Some(Errno::MFILE | Errno::NFILE)
        ) {
            "raise the limit of open files (ulimit -n, LimitNOFILE)".to_owned()
        } else {
            format!("choose another address ({flag}127.0.0.1:0)")
        }
    }
}

/// A bound address. Until `BoundSocket::listen`, when the daemon is ready, connections are refused at once.
#[derive(Debug)]
pub struct BoundSocket {
    key: &'static str,
    socket: Socket,
    address: SocketAddr,
}

/// Binds an address; `key` is its configuration key.
///
/// # Errors
/// Another process uses it, or it cannot be bound on this host.
pub fn bind(key: &'static str, address: SocketAddr) -> Result<BoundSocket, BindError> {
    let attempt = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        // A restart must not wait for the old connections' TIME_WAIT.
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        if address.ip().is_loopback() {
            // No link is congested there, but a host whose default is BBR paces all the same: a timer for each 64
            // KiB, and four packets a round trip for 200 ms every 10 s (ADR 0008). Chosen here and inherited: a
            // connection that has begun with BBR stays paced. A sandbox may forbid it; it only saves time.
            let _unpaced = socket.set_tcp_congestion(UNPACED);
        }
        socket.bind(&address.into())?;
        let bound = socket.local_addr()?.as_socket().unwrap_or(address);
        Ok((socket, bound))
    };
    let (socket, bound) = attempt().map_err(|error| BindError { key, address, error })?;
    Ok(BoundSocket {
        key,
        socket,
        address: bound,
    })
}

impl BoundSocket {
    /// The address, with the actual port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Starts listening. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// Two sockets can be bound to one address before either listens; the second `listen` fails.
    pub(super) fn listen(self) -> Result<TcpListener, BindError> {
        let Self { key, socket, address } = self;
        let attempt = || {
            socket.listen(BACKLOG)?;
            TcpListener::from_std(socket.into())
        };
        attempt().map_err(|error| BindError { key, address, error })
    }
}

/// Lets nobody connect to a port any more, while who has connected still waits to be accepted: closing it would reset those
/// who connect between the last accept and the close, and on a busy machine that takes a while. The kernel drops their SYN,
/// and sends it again after a second, when the port is closed.
pub(super) fn refuse_handshakes(listener: &TcpListener) {
    // Classic BPF over a segment: load the flags, byte 13 of TCP's header; drop it if of SYN (2) and ACK (16) only SYN is set.
    let drop_syn = [
        SockFilter::new(0x30, 0, 0, 13),
        SockFilter::new(0x54, 0, 0, 0x12),
        SockFilter::new(0x15, 0, 1, 0x02),
        SockFilter::new(0x06, 0, 0, 0),
        SockFilter::new(0x06, 0, 0, u32::MAX),
    ];
    let socket = SockRef::from(listener);
    // A sandbox may forbid it, and some kernels all but root.
    let _dropped = socket.attach_filter(&drop_syn);
    // Then the kernel lets in who comes while nobody else waits, so that at most one is reset.
    let _shortened = socket.listen(0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[tokio::test]
    async fn two_that_bound_the_same_port_cannot_both_listen() {
        // Scenario: the kernel lets two sockets bind one address while neither listens. Expectation: the
        // second to listen gets the same clear error; before the first listens, clients are refused.
        let first = bind("http.listen", "127.0.0.1:0".parse().expect("an address")).expect("bind");
        let address = first.address();
        assert!(
            std::net::TcpStream::connect(address).is_err(),
            "nobody listens yet"
        );
        let second = bind("http.listen", address).expect("SO_REUSEADDR");
        let listening = first.listen().expect("listen");
        let error = second.listen().expect_err("taken").to_string();
        assert!(
            error.contains("http.listen") && error.contains("--http-listen"),
            "{error}"
        );
        drop(listening);
    }

    /// A client that connects once handshakes are refused, on a port that accepts `early` more and closes a moment later, is
    /// refused: it has never been connected.
    async fn is_refused(listening: TcpListener, early: usize) {
        let address = listening.local_addr().expect("its address");
        refuse_handshakes(&listening);
        let late = tokio::net::TcpStream::connect(address);
        let closing = async {
            // After the SYN was sent.
            tokio::task::yield_now().await;
            let accept = || SockRef::from(&listening).accept();
            for _ in 0..early {
                assert!(accept().is_ok(), "the backlog stays");
            }
            assert_eq!(
                accept().expect_err("nobody else").kind(),
                io::ErrorKind::WouldBlock
            );
            drop(listening);
        };
        let (late, ()) = tokio::join!(late, closing);
        assert_eq!(
            late.expect_err("nobody listens").kind(),
            io::ErrorKind::ConnectionRefused
        );
    }

    fn listening() -> TcpListener {
        let bound = bind("http.listen", "127.0.0.1:0".parse().expect("an address")).expect("bind");
        bound.listen().expect("listen")
    }

    #[tokio::test]
    async fn who_comes_behind_others_while_a_port_closes_is_not_let_in() {
        // Scenario: a client in the backlog. Expectation: it is accepted; a later one is refused.
        let listening = listening();
        let address = listening.local_addr().expect("its address");
        let _early = std::net::TcpStream::connect(address).expect("connect");
        is_refused(listening, 1).await;
    }

    #[tokio::test]
    #[ignore = "needs root"]
    async fn who_comes_alone_while_a_port_closes_is_not_let_in() {
        // Scenario: nobody in the backlog, for which the kernel keeps one place. Expectation: the client is refused.
        is_refused(listening(), 0).await;
    }

    #[tokio::test]
    async fn connections_of_this_host_are_not_paced() {
        // Scenario: a client connects to a loopback address, and to one of every interface. Expectation: the first
        // connection has reno, whatever the host's default is; the second has the default.
        let accepted = async |address: &str| {
            let bound = bind("grpc.listen", address.parse().expect("an address")).expect("bind");
            let (loopback, listener) = (Ipv4Addr::LOCALHOST, bound.address().port());
            let listening = bound.listen().expect("listen");
            let _client = std::net::TcpStream::connect((loopback, listener)).expect("connect");
            let (stream, _) = listening.accept().await.expect("a connection");
            SockRef::from(&stream)
                .tcp_congestion()
                .expect("its congestion control")
        };
        let default = Socket::new(Domain::IPV4, Type::STREAM, None)
            .and_then(|socket| socket.tcp_congestion())
            .expect("the default");
        assert!(accepted("127.0.0.1:0").await.starts_with(UNPACED));
        assert_eq!(accepted("0.0.0.0:0").await, default);
    }

    #[test]
    fn addresses_are_written_whole() {
        // Scenario: addresses without an admin service. Expectation: JSON with three fields, and no partial file left.
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("addresses.json");
        let grpc = "127.0.0.1:1".parse().expect("an address");
        let http = "[::1]:2".parse().expect("an address");
        Addresses {
            grpc,
            http,
            admin: None,
        }
        .write(&path)
        .expect("write");
        let text = std::fs::read_to_string(&path).expect("read");
        assert_eq!(text, r#"{"grpc":"127.0.0.1:1","http":"[::1]:2","admin":null}"#);
        assert_eq!(std::fs::read_dir(directory.path()).expect("list").count(), 1);
    }

    #[test]
    fn addresses_are_not_written_into_a_pipe_that_nobody_reads() {
        // Scenario: a pipe without a reader; a device. Expectation: refused at once; written, and still a device.
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let any = "127.0.0.1:1".parse().unwrap();
        let addresses = Addresses {
            grpc: any,
            http: any,
            admin: None,
        };
        let refused = Addresses::check(&pipe).unwrap_err();
        assert!(refused.to_string().contains("is a pipe"), "{refused}");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        Addresses::check(&link).unwrap();
        addresses.write(&link).unwrap();
        assert!(link.metadata().unwrap().file_type().is_char_device());
    }
}
