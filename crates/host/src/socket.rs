//! What the kernel knows about a socket.

use std::io;
use std::os::fd::AsFd;

use rustix::ioctl::{Getter, Opcode, ioctl};

/// `SIOCOUTQ` of linux/sockios.h, which is `TIOCOUTQ`.
const OUTQ: Opcode = 0x5411;

/// Bytes written to a TCP socket that its peer's system has not acknowledged (tcp(7), SIOCOUTQ). The end of the stream counts
/// as one.
///
/// # Errors
/// It is not a connected TCP socket.
#[allow(
    unsafe_code,
    reason = "neither the standard library nor rustix has this request"
)]
pub fn unacknowledged_bytes(socket: impl AsFd) -> io::Result<u64> {
    // SAFETY: the request writes one int, whatever the socket is.
    let request = unsafe { Getter::<OUTQ, i32>::new() };
    // SAFETY: as above.
    let bytes = unsafe { ioctl(socket, request) }?;
    Ok(u64::try_from(bytes).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::net::{Shutdown, TcpListener, TcpStream};

    #[test]
    fn what_the_peer_has_not_taken_is_counted_to_the_end() {
        // Scenario: as many bytes as a socket accepts for a peer that reads nothing; then the end of the stream, and the peer
        // reads all of it and ends, too; a file. Expectation: more than nothing is unacknowledged; nothing; an error.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut written = 0;
        while let Ok(more) = stream.write(&[7; 65_536]) {
            written += more;
        }
        let waits = usize::try_from(unacknowledged_bytes(&stream).unwrap()).unwrap();
        assert!(waits > 0 && waits <= written, "{waits} of {written}");
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(peer.read_to_end(&mut Vec::new()).unwrap(), written);
        // Acknowledgements may come later than the bytes, but not later than the peer's own end.
        peer.shutdown(Shutdown::Write).unwrap();
        stream.set_nonblocking(false).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        assert_eq!(unacknowledged_bytes(&stream).unwrap(), 0);
        unacknowledged_bytes(tempfile::tempfile().unwrap()).unwrap_err();
    }
}
