//! Clients of TLS that negotiate no protocol (ALPN).

use super::{Authority, with_tls};
use crate::daemon::{Setup, eventually_async};
use crate::data::plain_blocks;
use crate::wire;
use prost::Message as _;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request;

#[tokio::test]
async fn an_old_connection_is_told_to_go_away() {
    // Scenario: an HTTP/2 client has a stream open when its connection becomes too old. Expectation: it receives GOAWAY, then
    // an answer on the stream.
    let authority = Authority::new();
    let (setup, bytes) = plain_blocks(Setup::new("pread"), 16);
    let daemon = with_tls(setup, &authority.pair("daemon"))
        .set("tls.ports", "grpc")
        .set("timeouts.connection_age_ms", "300")
        .set("timeouts.connection_age_grace_ms", "600000")
        .start();
    // Again, if this machine was so slow that the connection was too old for a stream.
    let begun = eventually_async("a stream is begun", async || {
        let stream = authority.connect(daemon.grpc, &[]).await;
        let (mut sender, connection) = h2::client::handshake(stream).await.ok()?;
        let connection = tokio::spawn(connection);
        let request = http::Request::post("https://localhost/ringfetch.v1.FetchService/FetchStream")
            .header("content-type", "application/grpc");
        let (answer, asked) = sender.send_request(request.body(()).unwrap(), false).ok()?;
        eventually_async("it is told", async || sender.clone().ready().await.err()).await;
        Some((answer.await.ok()?, asked, connection))
    });
    let (answer, mut asked, connection) = begun.await;

    let request = wire::on_stream(1, Request::Blocks(wire::blocks("blocks", &[1])));
    asked
        .send_data(wire::framed(&request.encode_to_vec()), true)
        .unwrap();
    let mut answer = answer.into_body();
    let mut received = Vec::new();
    while let Some(data) = answer.data().await {
        received.extend_from_slice(&data.unwrap());
    }
    let answers = wire::messages::<v1::FetchStreamResponse>(&received);
    let [answer] = <[_; 1]>::try_from(answers).unwrap();
    assert!(wire::blocks_of(answer.response).unwrap().data == bytes[4096..8192]);
    connection.await.unwrap().unwrap();
    daemon.stop().await;
}
