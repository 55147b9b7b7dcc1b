//! One block and a batch of three vectors. The second id is past the end: only that item fails.
//!
//! `cargo run -p ringfetch-client --example vectors -- [URL]`
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "an example prints what it fetched")]

use ringfetch_client::Client;

/// The length and the first 8 bytes.
fn describe(bytes: &[u8]) -> String {
    let head: String = bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{} bytes, {head}", bytes.len())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "http://127.0.0.1:7410".to_owned());
    let client = Client::builder(url).connect().await?;

    let blocks = client.fetch_blocks("blocks", &[7]).await?;
    println!("block 7: {}", describe(&blocks.get(0)?));

    let ids = [17, 65_536, 5];
    let vectors = client.fetch_vectors("vectors", &ids).await?;
    for (id, vector) in ids.iter().zip(vectors.iter()) {
        match vector {
            Ok(bytes) => println!("vector {id}: {}", describe(&bytes)),
            Err(error) => println!("vector {id}: {}", error.message),
        }
    }

    // As floats, whatever the dataset's element type.
    let (a, b) = (
        vectors.as_f32(0).unwrap_or_default(),
        vectors.as_f32(2).unwrap_or_default(),
    );
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
    println!(
        "cosine of 17 and 5: {:.4}",
        dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt()
    );
    Ok(())
}
