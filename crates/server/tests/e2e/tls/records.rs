//! Records that no library sends.

use super::{Authority, with_tls};
use crate::daemon::{Setup, eventually_async};
use crate::data::plain_blocks;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::rustls::crypto::cipher::{MessageEncrypter, OutboundPlainMessage};
use tokio_rustls::rustls::{ConnectionTrafficSecrets, ContentType, ProtocolVersion, SupportedCipherSuite};

/// The sending side of a connection after its handshake.
struct Sealer {
    socket: TcpStream,
    cipher: Box<dyn MessageEncrypter>,
    sequence: u64,
}

impl Sealer {
    async fn connect(authority: &Authority, port: SocketAddr) -> Self {
        let (socket, session) = authority.connect(port, &["h2"]).await.into_inner();
        let Some(SupportedCipherSuite::Tls13(suite)) = session.negotiated_cipher_suite() else {
            panic!("it is TLS 1.3");
        };
        let (sequence, secrets) = session.dangerous_extract_secrets().unwrap().tx;
        let (key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv }
            | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
            | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (key, iv),
            _ => panic!("it has other keys"),
        };
        Self {
            socket,
            cipher: suite.aead_alg.encrypter(key, iv),
            sequence,
        }
    }

    /// Sends a record; fails if the daemon has closed the connection.
    async fn send(&mut self, typ: ContentType, payload: &[u8]) -> std::io::Result<()> {
        let record = OutboundPlainMessage {
            typ,
            version: ProtocolVersion::TLSv1_2,
            payload: payload.into(),
        };
        let sealed = self.cipher.encrypt(record, self.sequence).unwrap();
        self.sequence += 1;
        self.socket.write_all(&sealed.encode()).await
    }
}

#[tokio::test]
async fn a_message_of_tls_that_does_not_end_closes_the_connection() {
    // Scenario: clients that speak HTTP/2 send 40 KiB of a message of TLS that says it has 64,000 bytes, at once and in small
    // records. Expectation: the connections are closed as floods; the daemon keeps no more of it.
    let authority = Authority::new();
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = with_tls(setup, &authority.pair("daemon"))
        .set("tls.ports", "grpc")
        .start();
    for record_bytes in [16 << 10, 1 << 10] {
        let mut client = Sealer::connect(&authority, daemon.grpc).await;
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        client.send(ContentType::ApplicationData, preface).await.unwrap();
        // A key update (24), which has one byte.
        let mut message = vec![0; 40 << 10];
        message[..4].copy_from_slice(&[24, 0, 0xfa, 0]);
        for part in message.chunks(record_bytes) {
            // An error: it is closed already.
            let _closed = client.send(ContentType::Handshake, part).await;
        }
        let mut rest = Vec::new();
        // The end, or a reset, since there may be unread bytes.
        let _end = client.socket.read_to_end(&mut rest).await;
    }
    eventually_async("both are closed", async || {
        (daemon.closed("grpc", "flood").await == 2).then_some(())
    })
    .await;
    daemon.stop().await;
}
