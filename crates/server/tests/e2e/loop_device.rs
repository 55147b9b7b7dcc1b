//! Block devices over files. The tests of `ringfetch` use this too.

use std::path::Path;
use std::process::Command;

/// A loop device, by its path; detached on drop.
pub(crate) struct LoopDevice(pub(crate) String);

impl LoopDevice {
    /// Over a file, with an option of losetup.
    pub(crate) fn attach(file: impl AsRef<Path>, option: &str) -> Self {
        let output = Command::new("losetup")
            .args([option, "--find", "--show"])
            .arg(file.as_ref())
            .output()
            .unwrap_or_else(|error| panic!("losetup (util-linux) must be installed: {error}"));
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "losetup must be allowed (run as root): {told}"
        );
        Self(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // A test that is already failing must not panic here a second time.
        let _stays_attached = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
