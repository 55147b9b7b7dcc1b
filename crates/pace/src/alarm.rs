//! Waits until an instant, to the microsecond if the kernel allows it. Tokio's own timer counts in
//! milliseconds: at 10 000 requests a second it would send ten at a time and charge their wait to the server.

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::os::fd::OwnedFd;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// One waiter at a time.
#[derive(Debug)]
pub enum Alarm {
    /// timerfd_create(2): an hrtimer, without the slack of poll's timeouts.
    Precise(AsyncFd<OwnedFd>),
    /// Tokio's timer: milliseconds; follows a test's paused clock.
    Coarse,
}

impl Alarm {
    /// A precise alarm, or a coarse one if no file descriptor is left. Must be called inside a runtime.
    #[expect(
        deprecated,
        reason = "its successor is unsafe, for types whose descriptor may change; an OwnedFd's does not"
    )]
    pub fn precise() -> Self {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        timerfd_create(TimerfdClockId::Monotonic, flags)
            .ok()
            .and_then(|timer| AsyncFd::with_interest(timer, Interest::READABLE).ok())
            .map_or(Self::Coarse, Self::Precise)
    }

    /// Returns at about `instant`, possibly earlier: the caller checks the clock and calls again.
    pub async fn wait(&self, instant: Instant) {
        let Self::Precise(timer) = self else {
            return tokio::time::sleep_until(instant).await;
        };
        // A value of zero would disarm the timer.
        let left = instant
            .saturating_duration_since(Instant::now())
            .max(Duration::from_nanos(1));
        let value = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            },
        };
        // Setting the timer also discards an unread expiry.
        let set = timerfd_settime(timer.get_ref(), TimerfdTimerFlags::empty(), &value);
        match (set, timer.readable().await) {
            // The expiry need not be read: the next one is a new edge.
            (Ok(_), Ok(mut ready)) => ready.clear_ready(),
            (Err(_), _) | (_, Err(_)) => tokio::time::sleep_until(instant).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_alarm_goes_off_and_goes_off_again() {
        // Twenty alarms in a row, 300 us apart, and one in the past.
        let alarm = Alarm::precise();
        assert!(matches!(alarm, Alarm::Precise(_)));
        let begin = Instant::now();
        for step in 1..=20 {
            let due = begin + Duration::from_micros(300) * step;
            while Instant::now() < due {
                alarm.wait(due).await;
            }
        }
        assert!(begin.elapsed() >= Duration::from_millis(6));
        alarm.wait(begin).await;
    }
}
