//! The daemon to attack, and the source address to use.

use http::HeaderValue;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::net::{TcpSocket, TcpStream};

/// A full backlog drops the handshake, and the kernel would retry for two minutes.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// A running daemon and a dataset of blocks on it.
#[derive(Debug, Clone)]
pub struct Target {
    /// Its gRPC port.
    pub grpc: SocketAddr,
    /// Its HTTP port.
    pub http: SocketAddr,
    /// Its admin port.
    pub admin: SocketAddr,
    /// The source address of connections; `None`: as the kernel chooses.
    pub from: Option<IpAddr>,
    /// The dataset's name.
    pub dataset: String,
    /// How many blocks it has.
    pub blocks: u64,
    /// How long each is.
    pub block_bytes: u32,
    /// The seed of the pattern (`ringfetch dataset make`) that its blocks have; `None`: only the lengths of answers are checked.
    pub seed: Option<u64>,
    /// The bearer token of gRPC calls.
    pub token: Option<String>,
}

impl Target {
    /// A target whose dataset is known, since a daemon under attack may not answer the query.
    ///
    /// # Errors
    /// An address is not loopback.
    pub fn new(
        grpc: SocketAddr,
        http: SocketAddr,
        admin: SocketAddr,
        dataset: &str,
        blocks: u64,
        block_bytes: u32,
    ) -> io::Result<Self> {
        if ![grpc, http, admin]
            .iter()
            .all(|address| address.ip().is_loopback())
        {
            return Err(io::Error::other(
                "only daemons on loopback addresses are attacked",
            ));
        }
        let dataset = dataset.to_owned();
        Ok(Self {
            grpc,
            http,
            admin,
            from: None,
            dataset,
            blocks,
            block_bytes,
            seed: None,
            token: None,
        })
    }

    /// The same daemon from another source address.
    #[must_use]
    pub fn from(&self, address: IpAddr) -> Self {
        Self {
            from: Some(address),
            ..self.clone()
        }
    }

    pub(crate) fn authorization(token: Option<&str>) -> io::Result<Option<HeaderValue>> {
        let value = |token| HeaderValue::try_from(format!("Bearer {token}")).map_err(io::Error::other);
        token.map(value).transpose()
    }

    /// A connection from the source address.
    ///
    /// # Errors
    /// Those of the system, or `TimedOut` after five seconds.
    pub async fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        self.connect_with(to, None).await
    }

    /// As [`Self::connect`]; with a small receive buffer, a stalled reader soon stalls the daemon.
    pub(crate) async fn connect_with(
        &self,
        to: SocketAddr,
        receive_bytes: Option<u32>,
    ) -> io::Result<TcpStream> {
        let socket = if to.is_ipv4() {
            TcpSocket::new_v4()?
        } else {
            TcpSocket::new_v6()?
        };
        if let Some(bytes) = receive_bytes {
            socket.set_recv_buffer_size(bytes)?;
        }
        if let Some(from) = self.from {
            socket.bind(SocketAddr::new(from, 0))?;
        }
        let stream = tokio::time::timeout(CONNECT_WITHIN, socket.connect(to))
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Whether these are the bytes of a block.
    pub(crate) fn is_block(&self, index: u64, bytes: &[u8]) -> bool {
        let offset = index.wrapping_mul(self.block_bytes.into());
        u32::try_from(bytes.len()) == Ok(self.block_bytes)
            && self
                .seed
                .is_none_or(|seed| ringfetch_pattern::first_difference(seed, offset, bytes).is_none())
    }

    pub(crate) fn block_path(&self, index: u64) -> String {
        format!("/v1/datasets/{}/blocks/{index}", self.dataset)
    }
}
