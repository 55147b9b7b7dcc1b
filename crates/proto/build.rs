//! Generates the wire types from `proto/` with a protobuf compiler written in Rust, so that no `protoc` is needed.

use prost::Message as _;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("../../proto");
    let files = ["fetch", "dataset", "admin"].map(|name| root.join(format!("ringfetch/v1/{name}.proto")));
    let descriptors = protox::compile(&files, [&root])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptor_set.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        // `Bytes` instead of `Vec<u8>`: a client slices the items out of one response without copying them.
        .bytes(".")
        .extern_path(".google.rpc.Status", "::tonic_types::Status")
        .compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed={}", root.display());
    Ok(())
}
