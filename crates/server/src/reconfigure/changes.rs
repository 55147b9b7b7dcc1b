//! Differences between the configuration in force and a new one, by key, and which of them a running daemon
//! can apply. Pure. `catalogue` compares datasets.

use crate::config::Setting;
use std::fmt;

/// A key whose value differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigChange {
    /// Path of the key.
    pub key: String,
    /// The old value.
    pub before: String,
    /// The new value, in force now or after a restart.
    pub after: String,
}

impl ConfigChange {
    pub(super) fn new(key: impl Into<String>, before: impl fmt::Display, after: impl fmt::Display) -> Self {
        Self {
            key: key.into(),
            before: before.to_string(),
            after: after.to_string(),
        }
    }
}

impl fmt::Display for ConfigChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} -> {}", self.key, self.before, self.after)
    }
}

/// How a changed key takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// Applied by a reload.
    AtReload,
    /// Applied by a reload, but compared where it is applied, since it may have been changed at run time.
    SetElsewhere,
    /// Needs a restart.
    Restart,
}

fn effect_of(key: &str) -> Effect {
    match key {
        "engine.backend" | "log.filter" => Effect::SetElsewhere,
        "access_log.sample" | "access_log.slow_ms" => Effect::AtReload,
        "engine.direct_io" | "shutdown.drain_timeout_ms" | "shutdown.lame_duck_ms" => Effect::AtReload,
        // Fixed when a shard starts.
        "limits.queued_reads" => Effect::Restart,
        key if key.starts_with("limits.") || key.starts_with("timeouts.") => Effect::AtReload,
        _ => Effect::Restart,
    }
}

/// The keys that differ.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ConfigDiff {
    pub(super) live: Vec<ConfigChange>,
    pub(super) needs_restart: Vec<ConfigChange>,
}

impl ConfigDiff {
    /// Differences outside `datasets`, in the order of the documented file.
    pub(super) fn new(before: &[Setting], after: &[Setting]) -> Self {
        let mut changes = Self::default();
        for new in after.iter().filter(|setting| !is_of_a_dataset(setting)) {
            let old = before.iter().find(|old| old.key == new.key);
            let (Some(old), effect) = (old, effect_of(&new.key)) else {
                continue;
            };
            if old.value == new.value {
                continue;
            }
            let change = ConfigChange::new(&new.key, old.text(), new.text());
            match effect {
                Effect::AtReload => changes.live.push(change),
                Effect::Restart => changes.needs_restart.push(change),
                Effect::SetElsewhere => {}
            }
        }
        changes
    }

    /// Moves a key to those that need a restart, because its new value depends on one of those.
    pub(super) fn hold_back(&mut self, key: &str) {
        if let Some(place) = self.live.iter().position(|change| change.key == key) {
            let change = self.live.remove(place);
            self.needs_restart.push(change);
        }
    }
}

/// The settings in force after a reload: keys that need a restart keep their old values, so that the next reload reports
/// them again.
pub(super) fn active(before: &[Setting], after: Vec<Setting>, changes: &ConfigDiff) -> Vec<Setting> {
    let old = |key: &str| before.iter().find(|old| old.key == key).cloned();
    let waits = |key: &str| changes.needs_restart.iter().any(|change| change.key == key);
    let merge = |new: Setting| {
        if waits(&new.key) {
            old(&new.key).unwrap_or(new)
        } else {
            new
        }
    };
    after.into_iter().map(merge).collect()
}

fn is_of_a_dataset(setting: &Setting) -> bool {
    setting.key.starts_with("datasets")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Base, Flag, Inputs, known_keys, load};

    fn settings(set: &[(&str, &str)]) -> Vec<Setting> {
        let flags = set.iter().map(|(key, value)| Flag {
            name: format!("--set {key}"),
            key: (*key).to_owned(),
            value: (*value).to_owned(),
        });
        let inputs = Inputs {
            base: Base::Demo("demo".into()),
            environment: Vec::new(),
            flags: flags.collect(),
        };
        load(&inputs)
            .unwrap_or_else(|problems| panic!("{problems}"))
            .settings
    }

    fn lines(changes: &[ConfigChange]) -> Vec<String> {
        changes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_can_change_does_and_what_cannot_is_named() {
        // Scenario: two limits (one is fixed in the shards), cores, an address and the drain timeout differ.
        // Expectation: each is in its list, with both values as written in a file; equal values are in
        // neither.
        let before = settings(&[("engine.cores", "2")]);
        let after = settings(&[
            ("engine.cores", "4"),
            ("http.listen", "127.0.0.1:0"),
            ("limits.connections", "7"),
            ("limits.queued_reads", "9000"),
            ("shutdown.drain_timeout_ms", "5"),
        ]);
        let changes = ConfigDiff::new(&before, &after);
        assert_eq!(
            lines(&changes.live),
            [
                "limits.connections 4096 -> 7",
                "shutdown.drain_timeout_ms 10000 -> 5"
            ]
        );
        assert_eq!(
            lines(&changes.needs_restart),
            [
                "http.listen 127.0.0.1:7411 -> 127.0.0.1:0",
                "engine.cores 2 -> 4",
                "limits.queued_reads 65536 -> 9000"
            ]
        );
        assert_eq!(ConfigDiff::new(&after, &after), ConfigDiff::default());
    }

    #[test]
    fn what_waits_for_a_restart_is_named_again() {
        // Scenario: a reload applies what it can; another follows with the same file, then one with the first
        // file. Expectation: the second reports the waiting key again and nothing else; the third reports
        // nothing.
        let first = settings(&[]);
        let file = settings(&[("engine.pin", "false"), ("limits.connections", "7")]);
        let changes = ConfigDiff::new(&first, &file);
        let now = active(&first, file.clone(), &changes);
        let again = ConfigDiff::new(&now, &file);
        assert!(again.live.is_empty(), "{again:?}");
        assert_eq!(lines(&again.needs_restart), ["engine.pin true -> false"]);
        assert_eq!(
            lines(&ConfigDiff::new(&now, &first).live),
            ["limits.connections 7 -> 4096"]
        );
    }

    #[test]
    fn a_key_that_is_held_back_waits() {
        // Scenario: a live key that makes sense only with a key that needs a restart. Expectation: it moves
        // to those, once.
        let mut changes = ConfigDiff::new(
            &settings(&[]),
            &settings(&[
                ("engine.memory_budget", "1GiB"),
                ("limits.response_bytes", "128MiB"),
                ("limits.connection_bytes", "256MiB"),
            ]),
        );
        changes.hold_back("limits.response_bytes");
        changes.hold_back("limits.response_bytes");
        assert_eq!(
            lines(&changes.needs_restart),
            [
                "engine.memory_budget 256MiB -> 1GiB",
                "limits.response_bytes 3MiB -> 128MiB"
            ]
        );
    }

    #[test]
    fn every_live_key_is_a_key() {
        // Scenario: all keys. Expectation: every key declared as live exists; addresses, cores and memory are
        // not live.
        let known = known_keys();
        let live = |key: &&String| effect_of(key) != Effect::Restart;
        let live: Vec<&str> = known.iter().filter(live).map(String::as_str).collect();
        for key in [
            "access_log.sample",
            "engine.backend",
            "engine.direct_io",
            "limits.connection_bytes",
            "log.filter",
            "shutdown.drain_timeout_ms",
        ] {
            assert!(live.contains(&key), "{key} is not in {live:?}");
        }
        for key in [
            "access_log.path",
            "grpc.listen",
            "engine.cores",
            "engine.memory_budget",
            "log.format",
        ] {
            assert!(known.contains(key) && !live.contains(&key), "{key}");
        }
    }
}
