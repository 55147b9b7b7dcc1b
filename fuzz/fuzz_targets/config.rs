//! A YAML configuration, and after a NUL environment variables: no panic, errors can be printed, and an
//! accepted configuration is unchanged after it was printed and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ringfetch_server::config::{Base, Inputs, load, to_yaml};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::sync::LazyLock;

static FILE: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ringfetchd.yaml");
    (directory, file)
});

fn inputs(text: &[u8], environment: &[u8]) -> Inputs {
    let (_, path) = &*FILE;
    std::fs::write(path, text).unwrap();
    let variables = environment.split(|byte| *byte == b'\n').filter_map(|line| {
        let equals = line.iter().position(|byte| *byte == b'=')?;
        let text = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        Some((text(&line[..equals]), text(&line[equals + 1..])))
    });
    Inputs {
        base: Base::File(path.clone()),
        environment: variables.collect(),
        flags: Vec::new(),
    }
}

fuzz_target!(|input: &[u8]| {
    let nul = input.iter().position(|byte| *byte == 0).unwrap_or(input.len());
    let (text, environment) = input.split_at(nul);
    let loaded = match load(&inputs(text, environment.get(1..).unwrap_or_default())) {
        Ok(loaded) => loaded,
        Err(problems) => {
            assert!(!problems.0.is_empty() && !problems.to_string().is_empty());
            return;
        }
    };
    let printed = to_yaml(&loaded.settings);
    let again =
        load(&inputs(printed.as_bytes(), b"")).unwrap_or_else(|problems| panic!("{problems}\n{printed}"));
    assert_eq!(again.config, loaded.config, "{printed}");
});
