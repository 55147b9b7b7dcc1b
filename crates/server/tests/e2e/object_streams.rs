//! The Rust client's reads of objects of any length: their bytes, and what becomes of a read whose connection breaks, whose
//! object changes, or whose daemon is gone.

use crate::daemon::{Daemon, Setup, any_backend, backends, eventually_async};
use crate::data::{everything, noise};
use futures_util::TryStreamExt as _;
use ringfetch_client::{Client, Code, Error, ObjectPart, ObjectStream};
use std::fs;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// More than what is on its way at any time, and a few bytes.
const LENGTH: usize = (16 << 20) + 345;

/// Objects whose names are looked up for each call.
fn serving(objects: &str) -> Setup {
    let dataset = format!("{{name: objects, kind: objects, path: {objects}, revalidate_ms: 0}}");
    Setup::new(any_backend()).dataset(&[&dataset])
}

fn serving_long(bytes: &[u8]) -> Daemon {
    let setup = serving("objects");
    setup.file("objects/long", bytes);
    setup.start()
}

/// Connections to a daemon that can be cut.
struct Way {
    address: SocketAddr,
    open: Arc<Mutex<JoinSet<()>>>,
    accepting: JoinSet<()>,
}

impl Way {
    async fn to(daemon: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, open) = (
            listener.local_addr().unwrap(),
            Arc::<Mutex<JoinSet<()>>>::default(),
        );
        let (mut accepting, connections) = (JoinSet::new(), Arc::clone(&open));
        accepting.spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                connections.lock().unwrap().spawn(async move {
                    if let Ok(mut far) = TcpStream::connect(daemon).await {
                        drop(tokio::io::copy_bidirectional(&mut near, &mut far).await);
                    }
                });
            }
        });
        Self {
            address,
            open,
            accepting,
        }
    }

    /// Cuts the connections that are open.
    fn cut(&self) {
        self.open.lock().unwrap().abort_all();
    }

    /// Cuts them, and lets no other through.
    async fn close(mut self) {
        self.accepting.shutdown().await;
        self.cut();
    }
}

fn client_of(address: SocketAddr) -> Client {
    let builder = Client::builder(format!("http://{address}"));
    builder.connect_lazy().unwrap()
}

/// The long object, and its first bytes.
async fn begun(client: &Client) -> (ObjectStream, Vec<u8>) {
    let whole = ObjectPart::whole("long");
    let mut object = client.read_object("objects", &whole).await.unwrap();
    assert_eq!(object.object_length_bytes(), LENGTH as u64);
    let first = object.try_next().await.unwrap().unwrap();
    (object, first.to_vec())
}

/// Adds what is left of an object.
async fn finish(object: &mut ObjectStream, bytes: &mut Vec<u8>) -> Result<(), Error> {
    while let Some(chunk) = object.try_next().await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok(())
}

#[tokio::test]
async fn objects_are_read_whole_and_in_part_by_the_client() {
    // Scenario: objects of no bytes, of a few and of many windows, whole and in part, on each backend. Expectation: their bytes,
    // with the version that HTTP reports and the lengths; each counts as one call with OK.
    for backend in backends() {
        let (setup, everything) = everything(Setup::new(backend));
        let long = noise(91, LENGTH);
        setup.file("objects/long", &long);
        let daemon = setup.start();
        let client = client_of(daemon.grpc);
        let objects = everything.objects.iter().map(|(name, content)| (*name, content));
        let mut calls = 0;
        for (name, content) in objects.chain([("long", &long)]) {
            let http = daemon.http_client();
            let path = format!("/v1/datasets/objects/objects/{}", crate::wire::escaped(name));
            let etag = http.get(&path).await.header("etag").trim_matches('"').to_owned();
            let end = content.len();
            let part = (end / 2 > 0).then_some(end / 2);
            for (from, length) in [(0, None), (end / 2, None), (end / 3, part), (end, None)] {
                let length_on_wire = length.map(|length| length as u64);
                let mut wanted = ObjectPart::new(name, from as u64, length_on_wire);
                wanted.if_match.clone_from(&etag);
                let object = client.read_object("objects", &wanted).await;
                let mut object = object.unwrap_or_else(|error| panic!("{wanted:?}: {error}"));
                let expected = &content[from..length.map_or(end, |length| from + length)];
                assert_eq!(
                    (object.etag(), object.object_length_bytes(), object.length_bytes()),
                    (&etag[..], end as u64, expected.len() as u64)
                );
                let mut found = Vec::new();
                finish(&mut object, &mut found).await.unwrap();
                assert!(found == expected, "{wanted:?}");
                calls += 1;
            }
        }
        eventually_async("every call is counted", async || {
            let labels = [("method", "ReadObject"), ("code", "OK")];
            let counted = daemon.sum("ringfetch_rpc_requests_total", &labels).await;
            (counted >= calls).then_some(())
        })
        .await;
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_read_whose_connection_breaks_goes_on() {
    // Scenario: the connection breaks twice while an object is read. Expectation: all its bytes.
    let bytes = noise(92, LENGTH);
    let daemon = serving_long(&bytes);
    let way = Way::to(daemon.grpc).await;
    let (mut object, mut found) = begun(&client_of(way.address)).await;
    for _ in 0..2 {
        way.cut();
        let before = found.len();
        // What has been received comes first.
        while found.len() < before + LENGTH / 3 {
            found.extend(object.try_next().await.unwrap().unwrap());
        }
    }
    finish(&mut object, &mut found).await.unwrap();
    assert!(found == bytes);
    eventually_async("there were three calls", async || {
        let labels = [("method", "ReadObject")];
        let counted = daemon.sum("ringfetch_rpc_requests_total", &labels).await;
        (counted >= 3).then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_read_goes_on_with_its_version_or_says_that_it_is_gone() {
    // Scenario: while an object is read, it is written to; or its connection breaks, and it is replaced, or removed. Expectation:
    // VersionLost, with the daemon's code, and no byte of another version.
    let (old, new) = (noise(93, LENGTH), noise(94, LENGTH));
    for code in [Code::Aborted, Code::FailedPrecondition, Code::NotFound] {
        let daemon = serving_long(&old);
        let way = Way::to(daemon.grpc).await;
        let (mut object, mut found) = begun(&client_of(way.address)).await;
        let path = daemon.path("objects/long");
        if code == Code::Aborted {
            let mut file = fs::OpenOptions::new().write(true).open(path).unwrap();
            file.seek(SeekFrom::End(-1)).unwrap();
            file.write_all(&[!old[LENGTH - 1]]).unwrap();
        } else {
            fs::remove_file(&path).unwrap();
            if code == Code::FailedPrecondition {
                fs::write(path, &new).unwrap();
            }
            way.cut();
        }
        let error = finish(&mut object, &mut found).await.unwrap_err();
        let at = found.len() as u64;
        assert!(
            matches!(error, Error::VersionLost { offset, .. } if offset == at),
            "{error:?}"
        );
        assert_eq!(error.code(), Some(code), "{error:?}");
        assert!(found.len() < LENGTH && old.starts_with(&found));
        daemon.stop().await;
    }
}

#[tokio::test]
async fn another_daemon_goes_on_if_it_has_the_same_files() {
    // Scenario: a client of two daemons, of which the one that sends an object is gone midway; the other one has the same file,
    // or a copy. Expectation: all bytes; VersionLost.
    let bytes = noise(95, LENGTH);
    let first = serving_long(&bytes);
    let same = serving(first.path("objects").to_str().unwrap()).start();
    let copy = serving_long(&bytes);
    for (other, is_same) in [(&same, true), (&copy, false)] {
        let way = Way::to(first.grpc).await;
        let builder = Client::builder(format!("http://{}", way.address));
        let builder = builder.endpoint(format!("http://{}", other.grpc));
        let (mut object, mut found) = begun(&builder.connect_lazy().unwrap()).await;
        way.close().await;
        let outcome = finish(&mut object, &mut found).await;
        if is_same {
            outcome.unwrap();
            assert!(found == bytes);
        } else {
            let error = outcome.unwrap_err();
            assert!(matches!(error, Error::VersionLost { .. }), "{error:?}");
            assert_eq!(error.code(), Some(Code::FailedPrecondition), "{error:?}");
        }
    }
    first.stop().await;
    same.stop().await;
    copy.stop().await;
}
