//! Maps an errno to a cause and a remedy. Pure, except for [`Seen::now`], which reads what the kernel reports
//! about io_uring and this thread.

use std::fmt;

/// Why io_uring is unavailable. Displays as one line: the cause, then the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UringRefusal {
    /// The kernel has no io_uring, or one too old.
    Kernel {
        /// `uname -r`.
        release: String,
    },
    /// `kernel.io_uring_disabled` forbids it.
    Sysctl {
        /// 1: for all but one group and CAP_SYS_ADMIN; 2: for all.
        value: u8,
    },
    /// A seccomp filter refuses the system calls: usually a container's default profile.
    Seccomp {
        /// Its errno: EPERM, or ENOSYS (Podman's).
        errno: i32,
    },
    /// EPERM or EACCES without a filter and without the sysctl: a security module.
    Denied {
        /// Which of the two.
        errno: i32,
    },
    /// Out of lockable memory (or of memory).
    Memlock {
        /// RLIMIT_MEMLOCK, bytes; `None` is no limit.
        limit_bytes: Option<u64>,
    },
    /// Out of file descriptors: of the process (EMFILE) or of the machine (ENFILE).
    Files {
        /// Which of the two.
        errno: i32,
    },
    /// Something else.
    Other {
        /// The operation that was tried.
        step: &'static str,
        /// Its errno.
        errno: i32,
    },
}

impl UringRefusal {
    /// Whether another backend may take over: io_uring is unavailable, and neither a retry nor a higher limit would
    /// help. Lack of memory or descriptors is a mistake in the set-up, to be fixed (TRAPS 12).
    pub fn may_fall_back(&self) -> bool {
        match self {
            Self::Kernel { .. } | Self::Sysctl { .. } | Self::Seccomp { .. } | Self::Denied { .. } => true,
            Self::Memlock { .. } | Self::Files { .. } | Self::Other { .. } => false,
        }
    }
}

impl std::error::Error for UringRefusal {}

impl fmt::Display for UringRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.cause(), self.remedy())
    }
}

impl UringRefusal {
    /// The cause in words.
    pub fn cause(&self) -> String {
        match self {
            Self::Kernel { release } => format!("kernel {release} has no usable io_uring"),
            Self::Sysctl { value: 1 } => {
                "kernel.io_uring_disabled is 1, which forbids io_uring to this user".to_owned()
            }
            Self::Sysctl { value } => {
                format!("kernel.io_uring_disabled is {value}, which forbids io_uring to everyone")
            }
            Self::Seccomp { errno: libc::ENOSYS } => {
                "a seccomp filter answers ENOSYS to io_uring (Podman's default profile does)".to_owned()
            }
            Self::Seccomp { .. } => {
                "a seccomp filter forbids io_uring (the default profiles of Docker 25 and containerd 2.0 do)"
                    .to_owned()
            }
            Self::Denied { errno } => {
                format!(
                    "io_uring is denied with {} by neither seccomp nor sysctl",
                    name_of(*errno)
                )
            }
            Self::Memlock {
                limit_bytes: Some(limit),
            } => format!("no memory for a ring under the locked-memory limit of {limit} bytes"),
            Self::Memlock { limit_bytes: None } => {
                "no memory for a ring, though locked memory is unlimited (`ulimit -l`)".to_owned()
            }
            Self::Files { errno: libc::ENFILE } => "the machine is out of file descriptors".to_owned(),
            Self::Files { .. } => "this process is out of file descriptors".to_owned(),
            Self::Other { step, errno } => format!(
                "io_uring fails here: {step} answered {}",
                std::io::Error::from_raw_os_error(*errno)
            ),
        }
    }

    /// How to fix it.
    pub fn remedy(&self) -> String {
        const PROFILE: &str = "run the container with --security-opt seccomp=deploy/seccomp/ringfetchd.json \
                               (it allows io_uring_setup, io_uring_enter and io_uring_register)";
        match self {
            Self::Kernel { .. } => "use kernel 5.11 or newer, built with CONFIG_IO_URING",
            Self::Sysctl { value: 1 } => {
                "on the host, run `sysctl kernel.io_uring_disabled=0`, or put the daemon's group in \
                 kernel.io_uring_group"
            }
            Self::Sysctl { .. } => "on the host, run `sysctl kernel.io_uring_disabled=0`",
            Self::Seccomp { errno: libc::ENOSYS } => {
                return format!(
                    "{PROFILE}; if that changes nothing, the kernel is older than 5.1 or built without CONFIG_IO_URING"
                );
            }
            Self::Seccomp { .. } => PROFILE,
            Self::Denied { .. } => {
                "look for a security module's denial (SELinux, AppArmor, Landlock: `dmesg`, the audit log) and allow \
                 io_uring there"
            }
            Self::Memlock { limit_bytes: Some(_) } => {
                "raise it (`ulimit -l unlimited`, LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in Docker)"
            }
            Self::Memlock { limit_bytes: None } => "give the machine or the container more memory",
            Self::Files { errno: libc::ENFILE } => "raise it with `sysctl fs.file-max`, or close some",
            Self::Files { .. } => {
                "raise the limit (`ulimit -n`, LimitNOFILE in systemd, --ulimit nofile in Docker)"
            }
            Self::Other { .. } => "choose backend mmap, and please report this",
        }
        .to_owned()
    }
}

fn name_of(errno: i32) -> &'static str {
    if errno == libc::EACCES { "EACCES" } else { "EPERM" }
}

/// The evidence for a cause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) errno: i32,
    /// `kernel.io_uring_disabled`; `None` where the kernel has none (before 6.6, or built without io_uring).
    pub(super) sysctl: Option<u8>,
    /// `Seccomp:` of this thread: 0 none, 1 strict, 2 filter.
    pub(super) seccomp_mode: Option<u8>,
    pub(super) memlock_limit_bytes: Option<u64>,
    pub(super) kernel_release: String,
}

impl Seen {
    /// Reads it from the kernel. Unreadable files count as absent.
    pub(super) fn now(errno: i32) -> Self {
        let view = ringfetch_host::View::real();
        // The thread's, not the process's: filters are per thread.
        let seccomp = view.line("proc/thread-self/status", "Seccomp:");
        Self {
            errno,
            sysctl: view.number("proc/sys/kernel/io_uring_disabled"),
            seccomp_mode: seccomp.and_then(|mode| mode.parse().ok()),
            memlock_limit_bytes: rustix::process::getrlimit(rustix::process::Resource::Memlock).current,
            kernel_release: super::kernel_release(),
        }
    }

    /// The cause. `step` is what was tried.
    pub(super) fn refusal(self, step: &'static str) -> UringRefusal {
        let Self {
            errno,
            sysctl,
            seccomp_mode,
            memlock_limit_bytes,
            kernel_release,
        } = self;
        let filtered = seccomp_mode == Some(2);
        match (errno, sysctl) {
            // The kernel checks the filter first, but no profile helps while the sysctl is set, so report the
            // sysctl first.
            (libc::EPERM, Some(value @ 1..)) => UringRefusal::Sysctl { value },
            (libc::EPERM | libc::ENOSYS, _) if filtered => UringRefusal::Seccomp { errno },
            (libc::EPERM | libc::EACCES, _) => UringRefusal::Denied { errno },
            (libc::ENOSYS, _) => UringRefusal::Kernel {
                release: kernel_release,
            },
            (libc::ENOMEM, _) => UringRefusal::Memlock {
                limit_bytes: memlock_limit_bytes,
            },
            (libc::EMFILE | libc::ENFILE, _) => UringRefusal::Files { errno },
            _ => UringRefusal::Other { step, errno },
        }
    }
}
