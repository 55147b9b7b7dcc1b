//! An independent reading of a file of principals and of `Authorization`, from docs/ACCESS.md.

use ring::digest::{SHA256, digest};
use std::collections::{BTreeMap, BTreeSet};

/// The limits: the first bounds requests in flight, the third and the fourth are rates.
pub const LIMITS: [&str; 5] = ["requests", "memory", "requests/s", "bytes/s", "weight"];

/// Of a line without them.
const NO_LIMITS: [u64; 5] = [u64::MAX, u64::MAX, u64::MAX, u64::MAX, 1];

/// A line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub name: String,
    /// The SHA-256 of its token in small letters; `None`: its credential is a certificate.
    pub hash: Option<String>,
    pub rights: BTreeSet<String>,
    /// [`LIMITS`], `u64::MAX` where there is none.
    pub limits: [u64; 5],
}

impl Line {
    /// Whether it may read this dataset.
    pub fn may_read(&self, dataset: &str) -> bool {
        self.has("*") || self.has(dataset)
    }

    /// Whether it has this right.
    pub fn has(&self, right: &str) -> bool {
        self.rights.contains(right)
    }
}

/// Who a request is of.
#[derive(Debug, Clone, Copy)]
pub enum Client<'a> {
    Principal(&'a Line),
    /// It has no credential.
    Anonymous,
    /// It has one that is not in force.
    Unknown,
}

/// The SHA-256 in hexadecimal.
pub fn hash(bytes: &[u8]) -> String {
    let digits = digest(&SHA256, bytes);
    digits.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn are(text: &str, allowed: &str) -> bool {
    let is_allowed = |c: char| matches!(c, 'a'..='z' | 'A'..='Z' | '0'..='9') || allowed.contains(c);
    !text.is_empty() && text.chars().all(is_allowed)
}

fn number(text: &str) -> Option<u64> {
    let digits = text.chars().map(|c| c.to_digit(10));
    digits.into_iter().try_fold(0_u64, |number, digit| {
        number.checked_mul(10)?.checked_add(u64::from(digit?))
    })
}

fn requests(text: &str) -> Option<u64> {
    number(text).filter(|number| *number > 0 && !text.is_empty())
}

fn memory(text: &str) -> Option<u64> {
    let end = text.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, unit) = text.split_at(end);
    let factor: u64 = match unit {
        "" | "B" => 1,
        "KiB" => 1024,
        "MiB" => 1024 * 1024,
        "GiB" => 1024 * 1024 * 1024,
        "TiB" => 1024 * 1024 * 1024 * 1024,
        _ => return None,
    };
    let bytes = number(digits)?.checked_mul(factor)?;
    (bytes >= 65_536).then_some(bytes)
}

fn limits(words: &str) -> Option<[u64; 5]> {
    let mut found = BTreeMap::new();
    for limit in words.split(',') {
        let (name, value) = limit.split_once('=')?;
        let value = match name {
            "requests" | "requests/s" => requests(value)?,
            "memory" | "bytes/s" => memory(value)?,
            // One is what those without it have.
            "weight" => Some(requests(value)?).filter(|weight| *weight <= 100)?,
            _ => return None,
        };
        if found.insert(name, value).is_some() {
            return None;
        }
    }
    Some(LIMITS.map(|name| {
        let none = if name == "weight" { 1 } else { u64::MAX };
        found.get(name).copied().unwrap_or(none)
    }))
}

fn rights(words: &str) -> Option<BTreeSet<String>> {
    let right = |word: &str| {
        let is_right = ["*", "@metrics", "@admin"].contains(&word) || are(word, "._-");
        is_right.then(|| word.to_owned())
    };
    words.split(',').map(right).collect()
}

/// The hash of a token, or nothing of a certificate. The outer `None`: it is neither.
fn credential(word: &str, with_certificates: bool) -> Option<Option<String>> {
    match word.split_once(':')? {
        ("certificate", name) => (with_certificates && !name.is_empty()).then_some(None),
        ("sha256", digits) => {
            let is_hash = digits.len() == 64 && digits.chars().all(|c| c.is_ascii_hexdigit());
            let hash_of = digits.to_ascii_lowercase();
            let is_empty = [&b""[..], b"\n"].iter().any(|none| hash_of == hash(none));
            (is_hash && !is_empty).then_some(Some(hash_of))
        }
        _ => None,
    }
}

/// The lines of a file; `None` if it must be refused. `with_certificates`: clients' certificates are verified.
pub fn read(file: &[u8], with_certificates: bool) -> Option<Vec<Line>> {
    let text = std::str::from_utf8(file).ok()?;
    let (mut lines, mut credentials) = (Vec::<Line>::new(), BTreeSet::new());
    for line in text.split('\n') {
        let words = line.split([' ', '\t', '\r', '\x0c']);
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        let (name, proof, may, most) = match words[..] {
            [] => continue,
            [first, ..] if first.starts_with('#') => continue,
            [name, proof, may] => (name, proof, may, None),
            [name, proof, may, most] => (name, proof, may, Some(most)),
            _ => return None,
        };
        let line = Line {
            name: (are(name, "._-") && name.len() <= 64 && name != "anonymous").then(|| name.to_owned())?,
            hash: credential(proof, with_certificates)?,
            rights: rights(may)?,
            limits: most.map_or(Some(NO_LIMITS), limits)?,
        };
        let is_new = credentials.insert(line.hash.clone().unwrap_or_else(|| proof.to_owned()));
        let agrees = (lines.iter().filter(|other| other.name == line.name))
            .all(|other| (&other.rights, other.limits) == (&line.rights, line.limits));
        if !is_new || !agrees {
            return None;
        }
        lines.push(line);
    }
    (!lines.is_empty()).then_some(lines)
}

/// Who sent these values of `Authorization`, which have no blanks around them.
pub fn client<'a>(lines: &'a [Line], values: &[Vec<u8>]) -> Client<'a> {
    let token = match values {
        [] => return Client::Anonymous,
        [value] if value.len() > 7 && value[..7].eq_ignore_ascii_case(b"bearer ") => {
            let token = &value[7..];
            let blanks = token
                .iter()
                .take_while(|byte| matches!(byte, b' ' | b'\t'))
                .count();
            &token[blanks..]
        }
        _ => return Client::Unknown,
    };
    let hash_of = hash(token);
    let found = lines.iter().find(|line| line.hash.as_deref() == Some(&hash_of));
    found.map_or(Client::Unknown, Client::Principal)
}
