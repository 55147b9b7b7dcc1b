//! An independent interpretation of a principals file, of `Authorization` and of certificate names, from
//! docs/ACCESS.md.

use crate::certificate::{Kind, Name};
use ring::digest::{SHA256, digest};
use std::collections::{BTreeMap, BTreeSet};

/// The limits: the first bounds requests in flight, the third and the fourth are rates.
pub const LIMITS: [&str; 5] = ["requests", "memory", "requests/s", "bytes/s", "weight"];

/// The limits of a line that sets none.
const NO_LIMITS: [u64; 5] = [u64::MAX, u64::MAX, u64::MAX, u64::MAX, 1];

/// How a line recognises its principal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Credential {
    /// The SHA-256 of its token, in lower-case hexadecimal.
    Token(String),
    /// A name in its certificate.
    Certificate(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub name: String,
    pub credential: Credential,
    pub rights: BTreeSet<String>,
    /// [`LIMITS`], `u64::MAX` for none.
    pub limits: [u64; 5],
}

impl Line {
    pub fn may_read(&self, dataset: &str) -> bool {
        self.has("*") || self.has(dataset)
    }

    pub fn has(&self, right: &str) -> bool {
        self.rights.contains(right)
    }
}

/// The client of a request.
#[derive(Debug, Clone, Copy)]
pub enum Client<'a> {
    Principal(&'a Line),
    /// No credential, or a certificate that the file does not name.
    Anonymous,
    /// An invalid credential.
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
            // The default is 1.
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

fn credential(word: &str, with_certificates: bool) -> Option<Credential> {
    match word.split_once(':')? {
        ("certificate", name) => {
            (with_certificates && !name.is_empty()).then(|| Credential::Certificate(name.to_owned()))
        }
        ("sha256", digits) => {
            let is_hash = digits.len() == 64 && digits.chars().all(|c| c.is_ascii_hexdigit());
            let hash_of = digits.to_ascii_lowercase();
            let is_empty = [&b""[..], b"\n"].iter().any(|none| hash_of == hash(none));
            (is_hash && !is_empty).then_some(Credential::Token(hash_of))
        }
        _ => None,
    }
}

/// The lines of a file; `None` if it must be refused. `with_certificates`: clients' certificates are
/// verified.
pub fn read(file: &[u8], with_certificates: bool) -> Option<Vec<Line>> {
    let text = std::str::from_utf8(file)
        .ok()
        .filter(|text| !text.starts_with('\u{feff}'))?;
    let (mut lines, mut credentials, mut has_comment) = (Vec::<Line>::new(), BTreeSet::new(), false);
    for line in text.split('\n') {
        let words = line.split([' ', '\t', '\r', '\x0c']);
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        let (name, proof, may, most) = match words[..] {
            [] => continue,
            [first, ..] if first.starts_with('#') => {
                has_comment = true;
                continue;
            }
            [name, proof, may] => (name, proof, may, None),
            [name, proof, may, most] => (name, proof, may, Some(most)),
            _ => return None,
        };
        let line = Line {
            name: (are(name, "._-") && name.len() <= 64 && name != "anonymous").then(|| name.to_owned())?,
            credential: credential(proof, with_certificates)?,
            rights: rights(may)?,
            limits: most.map_or(Some(NO_LIMITS), limits)?,
        };
        let is_new = credentials.insert(line.credential.clone());
        let agrees = (lines.iter().filter(|other| other.name == line.name))
            .all(|other| (&other.rights, other.limits) == (&line.rights, line.limits));
        if !is_new || !agrees {
            return None;
        }
        lines.push(line);
    }
    (has_comment || !lines.is_empty()).then_some(lines)
}

/// Most names of a certificate that count.
const NAMES_MAX: usize = 64;

/// Names that the file may use for a certificate: URIs with a scheme and DNS names in UTF-8 that cannot be confused
/// with each other or with a common name, in their order, then the common names after `CN=`.
fn names(certificate: &[Name]) -> Vec<String> {
    let text = |name: &Name| String::from_utf8(name.bytes.clone()).ok();
    let alternatives = certificate.iter().filter_map(|name| match name.kind {
        Kind::Uri => text(name).filter(|text| text.contains(':') && !text.starts_with("CN=")),
        Kind::Dns => text(name).filter(|text| !text.contains(':') && !text.starts_with("CN=")),
        _ => None,
    });
    let common = certificate.iter().filter_map(|name| match name.kind {
        Kind::Common | Kind::CommonPrintable => text(name).map(|text| format!("CN={text}")),
        _ => None,
    });
    alternatives.chain(common).take(NAMES_MAX).collect()
}

/// The client that sent these values of `Authorization` (without surrounding blanks) over a connection with
/// this certificate.
pub fn client<'a>(lines: &'a [Line], values: &[Vec<u8>], certificate: &[Name]) -> Client<'a> {
    let line_of = |credential| lines.iter().find(|line| line.credential == credential);
    let token = match values {
        [] => {
            let mut found = names(certificate).into_iter();
            let line = found.find_map(|name| line_of(Credential::Certificate(name)));
            return line.map_or(Client::Anonymous, Client::Principal);
        }
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
    line_of(Credential::Token(hash(token))).map_or(Client::Unknown, Client::Principal)
}
