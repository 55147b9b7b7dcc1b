//! The principals file, and the table of its lines. A line is `NAME CREDENTIAL RIGHTS [LIMITS]`; lines with the same name are
//! credentials of one principal, with the same rights and limits.

use super::grant::{Credential, Grant, Rights};
use super::principal::{Principal, PrincipalLimits};
use crate::config::{REPORTED_MAX, is_dataset_name};
use crate::key_file::{FileError, KeyFile};
use ring::digest::{SHA256, digest};
use ringfetch_command::size;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use subtle::ConstantTimeEq as _;

pub(super) const KEY: &str = "access.principals";
const NAME_BYTES_MAX: usize = 64;
const LINE: &str =
    "write each line as NAME sha256:HEX RIGHTS or NAME certificate:NAME RIGHTS, and LIMITS if there are any";
const EMPTY: &str = "name principals; to revoke everybody, leave a comment such as # nobody";
const LIMITS: &str = "write limits with commas between them: requests=NUMBER in flight, requests/s=NUMBER, \
     weight=NUMBER (1 to 100), bytes/s=SIZE or memory=SIZE (bytes, KiB, MiB, GiB or TiB, at least 64KiB)";
/// Small responses still fit, and the largest ones are paid back within minutes.
const BYTES_MIN: u64 = 64 << 10;
/// A round over two callers is then 6.25 MiB.
const WEIGHT_MAX: u32 = 100;
/// What metrics call clients without a principal.
pub(super) const ANONYMOUS: &str = "anonymous";
const RIGHTS: &str =
    "list datasets separated by commas, without blanks, * for all, and the roles @metrics and @admin";

/// SHA-256 of a file.
type Digest = [u8; 32];

/// Hashes of tokens, with their grants.
type Tokens = Vec<([u8; 32], Arc<Grant>)>;

/// A file that was read and is valid.
pub(super) struct Lines {
    digest: Digest,
    lines: Vec<Line>,
}

struct Line {
    name: String,
    credential: Credential,
    rights: Rights,
    limits: PrincipalLimits,
}

/// The lines of a file, by credential and by principal.
pub(super) struct Table {
    digest: Digest,
    /// By the first bytes of the hash, so that the rest can be compared in constant time.
    tokens: HashMap<[u8; 8], Tokens>,
    certificates: HashMap<String, Arc<Grant>>,
    principals: BTreeMap<String, (Arc<Principal>, PrincipalLimits)>,
}

/// Does not print credentials.
impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.grants()).finish()
    }
}

pub(super) fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut sum = [0; 32];
    sum.copy_from_slice(digest(&SHA256, bytes).as_ref());
    sum
}

fn prefix(hash: &[u8; 32]) -> [u8; 8] {
    let mut first = [0; 8];
    first.copy_from_slice(&hash[..8]);
    first
}

/// Does not print credentials.
impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.lines.iter().map(|line| &line.name))
            .finish()
    }
}

impl Lines {
    /// Reads the file.
    pub(super) fn read(path: &Path, has_client_ca: bool) -> Result<Self, FileError> {
        Self::of(&KeyFile::read(KEY, path)?, has_client_ca)
    }

    /// Reads the file; `None` if it is still this one.
    pub(super) fn reread(
        path: &Path,
        has_client_ca: bool,
        digest: Digest,
    ) -> Result<Option<Self>, FileError> {
        let file = KeyFile::read(KEY, path)?;
        let is_changed = sha256(&file.bytes) != digest;
        is_changed.then(|| Self::of(&file, has_client_ca)).transpose()
    }

    pub(super) fn digest(&self) -> Digest {
        self.digest
    }

    fn of(file: &KeyFile<'_>, has_client_ca: bool) -> Result<Self, FileError> {
        let text = std::str::from_utf8(&file.bytes).map_err(|_| file.error("is not UTF-8", LINE))?;
        let mut lines = Vec::new();
        let mut lines_of: BTreeMap<Credential, usize> = BTreeMap::new();
        let mut rights_of: HashMap<&str, (usize, (Rights, PrincipalLimits))> = HashMap::new();
        let mut wrong_lines = (1_usize..).zip(text.lines()).filter_map(|(number, line)| {
            let wrong =
                |problem: String, remedy| Some(file.error(format!("line {number} {problem}"), remedy));
            let line = line.trim_ascii();
            if line.is_empty() || line.starts_with('#') {
                return None;
            }
            let mut words = line.split_ascii_whitespace();
            let (Some(name), Some(credential), Some(rights), limits, None) = (
                words.next(),
                words.next(),
                words.next(),
                words.next(),
                words.next(),
            ) else {
                return wrong("must have three or four words".to_owned(), LINE);
            };
            let credential = match credential_of(credential) {
                Ok(credential) if is_name(name) => credential,
                Ok(_) => {
                    return wrong("has an invalid name".to_owned(), "use letters, digits and . _ -");
                }
                Err(problem) => return wrong(problem.to_owned(), LINE),
            };
            if name == ANONYMOUS {
                return wrong(format!("has the name {ANONYMOUS}"), "use another name");
            }
            let limits = match limits.map_or(Ok(PrincipalLimits::NONE), limits_in) {
                Ok(limits) => limits,
                Err(problem) => return wrong(problem, LIMITS),
            };
            if matches!(credential, Credential::Certificate(_)) && !has_client_ca {
                return wrong(
                    "names a certificate, and tls.client_ca is off".to_owned(),
                    "set tls.client_ca",
                );
            }
            let rights = match rights_in(rights) {
                Ok(rights) => rights,
                Err(problem) => return wrong(problem, RIGHTS),
            };
            if let Some(first) = lines_of.insert(credential.clone(), number) {
                return wrong(
                    format!("repeats the credential of line {first}"),
                    "leave one of them out",
                );
            }
            let given = (rights, limits);
            match rights_of.get(name) {
                Some((first, others)) if *others != given => {
                    let remedy = "give a principal's lines the same rights and limits";
                    let problem = format!("differs in rights or limits from line {first} with the same name");
                    return wrong(problem, remedy);
                }
                Some(_) => {}
                None => {
                    rights_of.insert(name, (number, given.clone()));
                }
            }
            let (rights, limits) = given;
            lines.push(Line {
                name: name.to_owned(),
                credential,
                rights,
                limits,
            });
            None
        });
        if let Some(first) = wrong_lines.next() {
            // The last one says how many more there are.
            let mut more: Vec<FileError> = wrong_lines.by_ref().take(REPORTED_MAX - 2).collect();
            let others = wrong_lines.count();
            if others > 0 {
                more.push(file.error(format!("{others} more of its lines are wrong"), "fix these first"));
            }
            return Err(FileError { more, ..first });
        }
        // A comment tells that nobody is meant, and that the file was not lost.
        if text.trim_ascii().is_empty() {
            return Err(file.error("has no text", EMPTY));
        }
        let digest = sha256(&file.bytes);
        Ok(Self { digest, lines })
    }
}

impl Table {
    /// The table of these lines. Of the one in force before, lines that are the same keep their grants.
    pub(super) fn new(Lines { digest, lines }: Lines, before: Option<&Self>) -> Self {
        let mut table = Self {
            digest,
            tokens: HashMap::new(),
            certificates: HashMap::new(),
            principals: BTreeMap::new(),
        };
        for line in lines {
            let principal = table.principal(&line.name, line.limits, before);
            table.add(Grant::new(principal, line.credential, line.rights), before);
        }
        table
    }

    pub(super) fn digest(&self) -> Digest {
        self.digest
    }

    /// The principal of this name. One that exists keeps what it holds.
    fn principal(&mut self, name: &str, limits: PrincipalLimits, before: Option<&Self>) -> Arc<Principal> {
        let entry = self.principals.entry(name.to_owned());
        let (principal, _) = entry.or_insert_with(|| {
            let kept = before.and_then(|before| before.principals.get(name));
            let principal = kept.map_or_else(|| Principal::new(name), |(kept, _)| Arc::clone(kept));
            (principal, limits)
        });
        Arc::clone(principal)
    }

    /// A file without a line may be meant, to revoke everybody.
    pub(super) fn warn_if_empty(&self, path: &Path) {
        if self.principals.is_empty() {
            let path = path.display();
            tracing::warn!(%path, "the principals file has no line: no credential is accepted");
        }
    }

    /// Applies the limits of the file.
    pub(super) fn set_limits(&self) {
        for (principal, limits) in self.principals.values() {
            principal.set_limits(*limits);
        }
    }

    /// By name.
    pub(super) fn principals(&self) -> impl Iterator<Item = &Arc<Principal>> {
        self.principals.values().map(|(principal, _)| principal)
    }

    fn add(&mut self, grant: Grant, before: Option<&Self>) {
        let kept = before.and_then(|before| before.get(&grant.credential));
        let kept = kept.filter(|kept| kept.is_same(&grant)).cloned();
        let grant = kept.unwrap_or_else(|| Arc::new(grant));
        match &grant.credential {
            Credential::Token(hash) => {
                let place = self.tokens.entry(prefix(hash)).or_default();
                place.push((*hash, Arc::clone(&grant)));
            }
            Credential::Certificate(name) => {
                self.certificates.insert(name.clone(), Arc::clone(&grant));
            }
        }
    }

    fn get(&self, credential: &Credential) -> Option<&Arc<Grant>> {
        match credential {
            Credential::Token(hash) => self.of_hash(hash),
            Credential::Certificate(name) => self.certificates.get(name),
        }
    }

    fn of_hash(&self, hash: &[u8; 32]) -> Option<&Arc<Grant>> {
        let candidates = self.tokens.get(&prefix(hash))?;
        let found = candidates.iter().find(|(other, _)| other.ct_eq(hash).into());
        found.map(|(_, grant)| grant)
    }

    pub(super) fn of_token(&self, token: &[u8]) -> Option<&Arc<Grant>> {
        self.of_hash(&sha256(token))
    }

    /// The grant of the first of these names that is in the file.
    pub(super) fn of_certificate(&self, names: &[String]) -> Option<&Arc<Grant>> {
        names.iter().find_map(|name| self.certificates.get(name))
    }

    pub(super) fn grants(&self) -> impl Iterator<Item = &Arc<Grant>> {
        let tokens = self.tokens.values().flatten().map(|(_, grant)| grant);
        tokens.chain(self.certificates.values())
    }

    /// Whether this very grant is in the table.
    pub(super) fn has(&self, grant: &Arc<Grant>) -> bool {
        self.get(&grant.credential)
            .is_some_and(|other| Arc::ptr_eq(other, grant))
    }
}

fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    name.len() <= NAME_BYTES_MAX && name.chars().all(allowed)
}

/// The problem reveals nothing of the credential's characters.
fn credential_of(word: &str) -> Result<Credential, &'static str> {
    if let Some(name) = word.strip_prefix("certificate:") {
        return match name {
            "" => Err("names no certificate"),
            name => Ok(Credential::Certificate(name.to_owned())),
        };
    }
    let wrong = "has no hash of 64 hexadecimal digits";
    let Some(digits) = word.strip_prefix("sha256:") else {
        return Err("has neither sha256: nor certificate:");
    };
    if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(wrong);
    }
    let mut hash = [0; 32];
    for (byte, place) in hash.iter_mut().zip((0..64).step_by(2)) {
        let pair = digits.get(place..place + 2).ok_or(wrong)?;
        *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong)?;
    }
    if hash == sha256(b"") || hash == sha256(b"\n") {
        return Err("has the hash of an empty token");
    }
    Ok(Credential::Token(hash))
}

fn rights_in(word: &str) -> Result<Rights, String> {
    let mut rights = Rights::default();
    for right in word.split(',') {
        match right {
            "*" => rights.all_datasets = true,
            "@admin" => rights.admin = true,
            "@metrics" => rights.metrics = true,
            "" => return Err("has an empty right".to_owned()),
            role if role.starts_with('@') => return Err("has an unknown role".to_owned()),
            name if !is_dataset_name(name) => {
                return Err("has a right that is not a valid dataset name".to_owned());
            }
            name => {
                rights.datasets.insert(name.to_owned());
            }
        }
    }
    Ok(rights)
}

/// The problem names only limits that exist.
fn limits_in(word: &str) -> Result<PrincipalLimits, String> {
    let (mut limits, mut seen) = (PrincipalLimits::NONE, BTreeSet::new());
    for limit in word.split(',') {
        let (name, value) = limit.split_once('=').ok_or("has a limit without =")?;
        // No sign, and no blanks other than ASCII.
        let value = if value.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            value
        } else {
            ""
        };
        let number = || value.parse().ok().filter(|value| *value > 0);
        let bytes = || size::parse(value).ok().filter(|bytes| *bytes >= BYTES_MIN);
        let weight = || {
            value
                .parse()
                .ok()
                .filter(|weight| (1..=WEIGHT_MAX).contains(weight))
        };
        let set = match name {
            "requests" => number().map(|number| limits.requests = number),
            "memory" => bytes().map(|bytes| limits.memory_bytes = bytes),
            "requests/s" => number().map(|number| limits.requests_per_s = number),
            "bytes/s" => bytes().map(|bytes| limits.bytes_per_s = bytes),
            "weight" => weight().map(|weight| limits.weight = weight),
            _ => return Err("has an unknown limit".to_owned()),
        };
        if !seen.insert(name) {
            return Err(format!("has the limit {name} twice"));
        }
        set.ok_or_else(|| {
            format!("has the limit {name} with an invalid value: not a number, or out of range")
        })?;
    }
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(token: &str) -> String {
        sha256(token.as_bytes())
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    fn read(text: &str) -> Result<Lines, FileError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("principals");
        std::fs::write(&path, text).unwrap();
        let lines = Lines::read(&path, true)?;
        assert!(Lines::reread(&path, true, lines.digest()).unwrap().is_none());
        Ok(lines)
    }

    #[test]
    fn a_good_file_says_who_may_what() {
        // Scenario: comments, a hash that begins as that of a token, tokens of two principals, one with two, a certificate.
        // Expectation: each credential finds its principal, others find none; roles and datasets are as written.
        let text = format!(
            "# who\n\nd sha256:{}{} *\na sha256:{} x,y\na sha256:{} y,x\n  b\tsha256:{} *,@admin\nc certificate:spiffe://c @metrics\ne certificate:CN=c *\n",
            &hash("one")[..16],
            &hash("two")[16..],
            hash("one"),
            hash("two").to_uppercase(),
            hash("three"),
        );
        let table = Table::new(read(&text).unwrap(), None);
        let name = |token: &str| {
            table
                .of_token(token.as_bytes())
                .map(|grant| grant.principal.name().to_owned())
        };
        assert_eq!(
            ["one", "two", "three", "four", ""].map(|token| name(token).unwrap_or_default()),
            ["a", "a", "b", "", ""]
        );
        let of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            table.of_certificate(&names).map(|grant| grant.rights.clone())
        };
        assert_eq!(of(&["other"]), None);
        assert!(of(&["other", "spiffe://c", "CN=c"]).unwrap().metrics);
        let rights = &table.of_token(b"three").unwrap().rights;
        assert!(rights.all_datasets && rights.admin && !rights.metrics);
        for printed in [format!("{table:?}"), format!("{:?}", read(&text).unwrap())] {
            assert!(!printed.contains(&hash("one")[..8]), "{printed}");
        }
    }

    #[test]
    fn lines_that_stay_keep_their_grants() {
        // Scenario: of three lines one stays, one changes its rights, one is removed. Expectation: only the
        // first grant is still in force.
        let line = |name: &str, rights: &str| format!("{name} sha256:{} {rights}\n", hash(name));
        let before = read(&[line("a", "x"), line("b", "x"), line("c", "x")].concat());
        let before = Table::new(before.unwrap(), None);
        let after = read(&[line("b", "y"), line("a", "x")].concat());
        let after = Table::new(after.unwrap(), Some(&before));
        let still = |token: &str| after.has(before.of_token(token.as_bytes()).unwrap());
        assert_eq!(["a", "b", "c"].map(still), [true, false, false]);
    }

    #[test]
    fn a_bad_file_is_refused_by_its_line_and_says_no_secret() {
        // Scenario: files with one error each. Expectation: the error names the line and the problem, and
        // nothing of the hash.
        let good = format!("a sha256:{} x\n", hash("one"));
        let of = |credential: &str, rights: &str| format!("{good}b {credential} {rights}\n");
        let two = format!("sha256:{}", hash("two"));
        for (text, said) in [
            (" \n\n".to_owned(), "has no text"),
            (format!("{good}b {two}\n"), "line 2 must have three or four words"),
            (
                format!("{good}b {two} x y z\n"),
                "line 2 must have three or four words",
            ),
            (format!("anonymous {two} x\n"), "line 1 has the name anonymous"),
            (of(&two, "x requests"), "has a limit without ="),
            (of(&two, "x speed=1"), "has an unknown limit"),
            (of(&two, "x requests=1,requests=2"), "limit requests twice"),
            (
                of(&two, &format!("x requests={},requests=2", u64::MAX)),
                "limit requests twice",
            ),
            (of(&two, "x requests=+1"), "limit requests with an invalid value"),
            (of(&two, "x weight=+1"), "limit weight with an invalid value"),
            (
                of(&two, "x memory=64\u{a0}KiB"),
                "limit memory with an invalid value",
            ),
            (of(&two, "x requests=0"), "limit requests with an invalid value"),
            (of(&two, "x memory=1KiB"), "limit memory with an invalid value"),
            (of(&two, "x memory=1x"), "limit memory with an invalid value"),
            (
                of(&two, "x requests/s=0"),
                "limit requests/s with an invalid value",
            ),
            (
                of(&two, "x requests/s=1/2"),
                "limit requests/s with an invalid value",
            ),
            (of(&two, "x bytes/s=0"), "limit bytes/s with an invalid value"),
            (of(&two, "x bytes/s=1KiB"), "limit bytes/s with an invalid value"),
            (of(&two, "x weight=0"), "limit weight with an invalid value"),
            (of(&two, "x weight=101"), "limit weight with an invalid value"),
            (of(&two, "x weight=1.5"), "limit weight with an invalid value"),
            (of(&two, "x weight=1,weight=1"), "limit weight twice"),
            (
                of(&two, "x requests/s=1,requests=1,requests/s=1"),
                "limit requests/s twice",
            ),
            (format!("{good}b/c {two} x\n"), "line 2 has an invalid name"),
            (format!("{good}\u{a0}b {two} x\n"), "line 2 has an invalid name"),
            (
                format!("{good}{} {two} x\n", "b".repeat(NAME_BYTES_MAX + 1)),
                "line 2 has an invalid name",
            ),
            (of(&hash("two"), "x"), "line 2 has neither sha256:"),
            (of("sha256:abc", "x"), "line 2 has no hash"),
            (
                of(&format!("sha256:{}", "g".repeat(64)), "x"),
                "line 2 has no hash",
            ),
            (
                of(&format!("sha256:{}", hash("")), "x"),
                "line 2 has the hash of an empty token",
            ),
            (
                of(&format!("sha256:{}", hash("\n")), "x"),
                "line 2 has the hash of an empty token",
            ),
            (of("certificate:", "x"), "line 2 names no certificate"),
            (of(&two, "x,,y"), "line 2 has an empty right"),
            (of(&two, "@root"), "line 2 has an unknown role"),
            (of(&two, "x/y"), "line 2 has a right that is not"),
            (of(&two, "*,-x"), "line 2 has a right that is not"),
            (format!("{good}{good}"), "line 2 repeats the credential of line 1"),
            (
                format!("{good}a {two} y\n"),
                "line 2 differs in rights or limits from line 1 with the same name",
            ),
        ] {
            let error = read(&text).unwrap_err();
            assert!(error.problem.contains(said), "{said:?}: {error}");
            assert!(!error.to_string().contains(&hash("two")[..6]), "{error}");
        }
        let unit = read(&of(&two, "x memory=64MB")).unwrap_err().to_string();
        assert!(
            unit.contains("memory=SIZE (bytes, KiB, MiB, GiB or TiB"),
            "{unit}"
        );
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("principals");
        std::fs::write(&path, "c certificate:c x\n").unwrap();
        let error = Lines::read(&path, false).unwrap_err();
        assert!(error.problem.contains("tls.client_ca is off"), "{error}");
    }

    #[test]
    fn every_wrong_line_is_reported() {
        // Scenario: three wrong lines among good ones; a file with wrong lines only. Expectation: each wrong
        // line with its remedy, in order; of many, the first ones, and how many more there are.
        let (one, two) = (hash("one"), hash("two"));
        let text = format!("a sha256:{one} x\nb\nc sha256:{two} x\nd sha256:{two} @root\ne sha256:{one} x\n");
        let error = read(&text).unwrap_err().to_string();
        let lines: Vec<&str> = error.lines().collect();
        let parts = [
            ["line 2 must have three or four words", "write each line as"],
            ["line 4 has an unknown role", "@metrics and @admin"],
            ["line 5 repeats the credential of line 1", "leave one of them out"],
        ];
        assert_eq!(lines.len(), parts.len(), "{error}");
        for (line, parts) in lines.iter().zip(parts) {
            assert!(line.trim_start().starts_with("access.principals: "), "{error}");
            assert!(parts.iter().all(|part| line.contains(part)), "{error}");
        }
        let error = read(&"x\n".repeat(1000)).unwrap_err().to_string();
        assert_eq!(error.lines().count(), REPORTED_MAX, "{error}");
        assert!(
            error.ends_with(": 981 more of its lines are wrong; fix these first"),
            "{error}"
        );
    }
}
