//! The signals that end a command early and in order: Ctrl-C, SIGTERM (services, containers) and SIGHUP (the end of
//! a login).

use crate::outcome::Failure;
use ringfetch_command::part_file;
use ringfetch_host::View;
use ringfetch_pattern::abandon_partial_files;
use std::future::pending;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Catches the signals. One that arrives while none is awaited is remembered.
#[derive(Debug)]
pub(crate) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Option<Signal>,
}

impl StopSignals {
    /// Catches them from now on, except for SIGHUP if it is ignored: `nohup` wants the command to continue.
    pub(crate) fn catch() -> Result<Self, Failure> {
        let catch = |kind| {
            let failed = |error: io::Error| Failure::Failed(format!("cannot listen for signals: {error}"));
            signal(kind).map_err(failed)
        };
        let hang_up = (!ignores_hang_up()).then(|| catch(SignalKind::hangup()));
        Ok(Self {
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
            hang_up: hang_up.transpose()?,
        })
    }

    /// Waits for the next of them.
    ///
    /// # Cancel safety
    /// Loses no signal.
    pub(crate) async fn next(&mut self) {
        let hang_up = async {
            match &mut self.hang_up {
                Some(signal) => signal.recv().await,
                None => pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = hang_up => {}
        }
    }

    /// Does work that leaves nothing half done when it is dropped, which the first signal does.
    pub(crate) async fn unless<T>(
        &mut self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            done = work => done,
            () = self.next() => Err(Failure::Failed("stopped".to_owned())),
        }
    }

    /// Waits for work on a thread that ends soon once `stop` is set, which the first signal does. The second one
    /// ends the wait: the thread may hang in a read, or in a write, whose partial file is removed.
    pub(crate) async fn end_in_order<T>(
        mut self,
        mut work: JoinHandle<T>,
        stop: &AtomicBool,
    ) -> Result<T, Failure> {
        loop {
            tokio::select! {
                ended = &mut work => {
                    return ended.map_err(|_| Failure::Failed("the command ended unexpectedly".to_owned()));
                }
                () = self.next() => {
                    if stop.swap(true, Ordering::Relaxed) {
                        // At most this long: the file system may not remove it either.
                        let removal = tokio::task::spawn_blocking(|| {
                            abandon_partial_files();
                            part_file::abandon();
                        });
                        let _removed = timeout(Duration::from_secs(1), removal).await;
                        let problem = "stopped a second time, before it had ended in order";
                        return Err(Failure::Failed(problem.to_owned()));
                    }
                }
            }
        }
    }
}

/// Whether SIGHUP (signal 1, bit 0) is in the set of ignored signals of `proc_pid_status(5)`.
fn ignores_hang_up() -> bool {
    let ignored = View::real().line("proc/self/status", "SigIgn:");
    let mask = ignored.and_then(|mask| u64::from_str_radix(&mask, 16).ok());
    mask.is_some_and(|mask| mask & 1 == 1)
}
