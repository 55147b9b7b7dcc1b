//! Access control: bearer tokens and client certificates, from a file that is read again when it changes (ADR
//! 0016).
//!
//! Each line of the file is a `Grant`. A request is checked once, before routing, and carries its grant from
//! there on. A grant tracks the connections that use it, and closes them when its line is removed or changed.
//! Nothing here keeps, logs or repeats a token.

mod grant;
mod metrics;
mod principal;
mod table;

pub(crate) use grant::{Grant, GrantInUse, Revoke};
pub(crate) use principal::{Principal, PrincipalLimits};

use crate::caller::Connection;
use crate::config::{AccessConfig, Anonymous};
use crate::key_file::{FileError, Numbered, Rereads, read_first};
use crate::record;
use arc_swap::ArcSwap;
use http::{HeaderMap, header};
use metrics::ByPrincipal;
use prometheus::Registry;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use table::{Lines, Table};

/// What a request needs besides the right to the datasets that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// A known principal, or anonymous access where that is allowed.
    Known,
    /// The right to metrics and status, which name all datasets.
    Operation,
    /// The right to administer, which anonymous clients never have.
    Admin,
}

/// Why a request is denied: the same, whether what it asks for exists or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Denied {
    /// No credential, or one that is not in force.
    Unauthenticated,
    /// The principal lacks the right to this.
    Forbidden(Need),
}

/// Checks requests against the principals file. Clones share it.
#[derive(Debug, Clone)]
pub struct Access {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    anonymous: Anonymous,
    /// Whether client certificates are verified.
    has_client_ca: bool,
    table: ArcSwap<Table>,
    rereads: Rereads,
    /// Requests of clients without a principal.
    anonymous_requests: AtomicU64,
}

/// A changed file that was read and is valid.
#[derive(Debug)]
pub struct RenewedPrincipals(Numbered<Lines>);

impl Access {
    /// Reads the principals file; `None` if none is configured. `has_client_ca`: client certificates are
    /// verified.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn load(config: &AccessConfig, has_client_ca: bool) -> Result<Option<Self>, FileError> {
        let Some(path) = &config.principals else {
            return Ok(None);
        };
        let lines = read_first(&[path], || Lines::read(path, has_client_ca))?;
        let table = Table::new(lines, None);
        table.set_limits();
        table.warn_if_empty(path);
        let rereads = Rereads::new(
            "ringfetch_access_loads_total",
            "Loads of a changed principals file, by result. After a failure the old file stays in force.",
            table::KEY,
            path,
        )?;
        Ok(Some(Self {
            inner: Arc::new(Inner {
                path: path.clone(),
                anonymous: config.anonymous,
                has_client_ca,
                table: ArcSwap::from_pointee(table),
                rereads,
                anonymous_requests: AtomicU64::new(0),
            }),
        }))
    }

    /// Registers the metrics.
    ///
    /// # Errors
    /// A name is already registered.
    pub fn register_metrics(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        self.inner.rereads.register_metrics(registry)?;
        registry.register(Box::new(ByPrincipal::new(self.clone())?))
    }

    /// The connection as used by the request's principal.
    pub(crate) fn admit<C: Revoke + 'static>(
        &self,
        headers: &HeaderMap,
        need: Need,
        connection: &Arc<Connection>,
        closing: &Arc<C>,
    ) -> Result<Arc<Connection>, Denied> {
        loop {
            let table = self.inner.table.load();
            let admitted = self.admit_by(&table, headers, need, connection, closing);
            let is_refused = matches!(admitted, Err(Denied::Unauthenticated));
            // A table that was replaced meanwhile has revoked the credentials whose lines changed.
            if !is_refused || Arc::ptr_eq(&table, &self.inner.table.load()) {
                return admitted;
            }
        }
    }

    fn admit_by<C: Revoke + 'static>(
        &self,
        table: &Table,
        headers: &HeaderMap,
        need: Need,
        connection: &Arc<Connection>,
        closing: &Arc<C>,
    ) -> Result<Arc<Connection>, Denied> {
        let grant = match bearer_token(headers)? {
            Some(token) => Some(table.of_token(token).ok_or(Denied::Unauthenticated)?),
            None => table.of_certificate(connection.certificate_names()),
        };
        let Some(grant) = grant else {
            let is_let_in = match self.inner.anonymous {
                Anonymous::Nobody => false,
                Anonymous::Loopback => connection.is_from_this_host(),
                Anonymous::Everybody => true,
            };
            if !is_let_in || need == Need::Admin {
                return Err(Denied::Unauthenticated);
            }
            self.inner.anonymous_requests.fetch_add(1, Ordering::Relaxed);
            return Ok(Arc::clone(connection));
        };
        record::note(|facts| facts.principal = Some(grant.principal.name().into()));
        if !grant.allows(need) {
            return Err(Denied::Forbidden(need));
        }
        let granted = connection.granted(grant, closing);
        // A form from before may be of a grant that is revoked by now.
        let granted = granted.filter(|_| !grant.is_revoked());
        granted
            .inspect(|_| grant.principal.count_request())
            .ok_or(Denied::Unauthenticated)
    }

    /// Reads the file; `None` if it is unchanged.
    ///
    /// # Errors
    /// The file cannot be used; then nothing has changed.
    pub fn read(&self) -> Result<Option<RenewedPrincipals>, FileError> {
        let read = self.inner.rereads.read(|same: Option<&Lines>| {
            let digest = same.map_or_else(|| self.inner.table.load().digest(), Lines::digest);
            Lines::reread(&self.inner.path, self.inner.has_client_ca, digest)
        });
        read.map(|lines| lines.map(RenewedPrincipals))
    }

    /// Checks later requests against this file. Closes connections that use a line that is removed or
    /// changed.
    pub fn install(&self, RenewedPrincipals(lines): RenewedPrincipals) {
        self.inner.rereads.install(lines, |lines| self.replace(lines));
    }

    /// One at a time. Only this revokes grants: none that is in force is revoked.
    fn replace(&self, lines: Lines) -> bool {
        let before = self.inner.table.load_full();
        // A reload and the watch may both have read it.
        if before.digest() == lines.digest() {
            return false;
        }
        let table = Arc::new(Table::new(lines, Some(&before)));
        table.set_limits();
        self.inner.table.store(Arc::clone(&table));
        let mut revoked = 0_u32;
        for grant in before.grants().filter(|grant| !table.has(grant)) {
            grant.revoke();
            revoked += 1;
        }
        table.warn_if_empty(&self.inner.path);
        let path = self.inner.path.display();
        tracing::info!(%path, lines = table.grants().count(), revoked, "principals replaced");
        true
    }

    /// Watches the file and installs it when it changes. Never returns.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect on what is in force.
    pub async fn watch(self) {
        let inner = Arc::clone(&self.inner);
        let renew = move || {
            let renewed = self.inner.rereads.check(self.read(), |problem| {
                tracing::error!(%problem, "the principals file cannot be used; the old one stays in force");
            });
            renewed.into_iter().for_each(|renewed| self.install(renewed));
        };
        inner.rereads.watch(renew).await;
    }
}

/// The token of `Authorization: Bearer`; `None` without that header. Other schemes and repeated headers are
/// refused.
fn bearer_token(headers: &HeaderMap) -> Result<Option<&[u8]>, Denied> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let token = match (values.next(), values.next()) {
        (None, _) => return Ok(None),
        (Some(value), None) => value.as_bytes().split_at_checked("bearer ".len()),
        (Some(_), Some(_)) => None,
    };
    let token = token.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "));
    let token = token
        .map(|(_, token)| token.trim_ascii())
        .filter(|token| !token.is_empty());
    token.map(Some).ok_or(Denied::Unauthenticated)
}

#[cfg(test)]
pub(crate) mod tests {
    pub(crate) use super::grant::tests::User;
    use super::*;
    use crate::config::Limits;
    use crate::fetch::tests::without_datasets;
    use http::HeaderValue;
    use tempfile::TempDir;

    /// A principals file.
    pub(crate) struct PrincipalsFile {
        _directory: TempDir,
        config: AccessConfig,
        path: PathBuf,
    }

    impl PrincipalsFile {
        pub(crate) fn new(text: &str) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("principals");
            std::fs::write(&path, text).unwrap();
            let config = AccessConfig {
                principals: Some(path.clone()),
                anonymous: Anonymous::Nobody,
            };
            Self {
                _directory: directory,
                config,
                path,
            }
        }

        pub(crate) fn access(&self) -> Access {
            Access::load(&self.config, false).unwrap().unwrap()
        }

        /// What is read of it with this text.
        pub(crate) fn renewed(&self, access: &Access, text: &str) -> RenewedPrincipals {
            std::fs::write(&self.path, text).unwrap();
            access.read().unwrap().unwrap()
        }
    }

    /// A line for a principal whose token is its name.
    pub(crate) fn line(name: &str, rights: &str) -> String {
        let hash = table::sha256(name.as_bytes()).map(|byte| format!("{byte:02x}"));
        format!("{name} sha256:{} {rights}\n", hash.concat())
    }

    /// The head of a request of that principal.
    pub(crate) fn headers_of(name: &str) -> HeaderMap {
        let token = HeaderValue::try_from(format!("Bearer {name}")).unwrap();
        HeaderMap::from_iter([(header::AUTHORIZATION, token)])
    }

    #[test]
    fn a_line_that_changes_admits_its_principal_at_every_moment() {
        // Scenario: a line's rights change again and again, while its token is used on one connection after the other, and
        // on one that stays. Expectation: no request is refused, since the token is in every file.
        let file = PrincipalsFile::new(&line("a", "x"));
        let access = file.access();
        let fetcher = without_datasets(Limits::default());
        let connect = || fetcher.callers().connect("192.0.2.1".parse().unwrap(), u64::MAX);
        let headers = headers_of("a");
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let user = scope.spawn(|| {
                let stays = connect();
                while !is_over.load(Ordering::Relaxed) {
                    for connection in [connect(), Arc::clone(&stays)] {
                        let admitted =
                            access.admit(&headers, Need::Known, &connection, &Arc::new(User::default()));
                        assert!(admitted.is_ok(), "{admitted:?}");
                    }
                }
            });
            for round in 0..1000 {
                let rights = if round % 2 == 0 { "y" } else { "x" };
                access.install(file.renewed(&access, &line("a", rights)));
                if user.is_finished() {
                    break;
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }

    fn lines(names: &[&str]) -> String {
        names.iter().map(|name| line(name, "x")).collect()
    }

    #[test]
    fn a_line_that_comes_back_while_files_are_read_admits_its_principal() {
        // Scenario: of two reads that overlap, the first lacks a line that is in force, and the second has it; both are
        // installed, in that order; then the file changes once more. Expectation: the line's token is admitted after each.
        let file = PrincipalsFile::new(&lines(&["a", "b"]));
        let access = file.access();
        let fetcher = without_datasets(Limits::default());
        let is_admitted = || {
            let connection = fetcher.callers().connect("192.0.2.1".parse().unwrap(), u64::MAX);
            let user = Arc::new(User::default());
            access
                .admit(&headers_of("b"), Need::Known, &connection, &user)
                .is_ok()
        };
        let read = |names: &[&str]| file.renewed(&access, &lines(names));
        let (first, second) = (read(&["a"]), read(&["a", "b", "c"]));
        access.install(first);
        assert!(!is_admitted());
        access.install(second);
        assert!(is_admitted());
        access.install(read(&["a", "b", "c", "d"]));
        assert!(is_admitted());
    }

    #[test]
    fn a_line_that_two_files_have_keeps_its_connections() {
        // Scenario: of two files that are read before either is installed, both have a line that is new. A connection uses it
        // once the first is installed; then the second is. Expectation: the connection stays.
        let file = PrincipalsFile::new(&lines(&["a"]));
        let access = file.access();
        let fetcher = without_datasets(Limits::default());
        let connection = fetcher.callers().connect("192.0.2.1".parse().unwrap(), u64::MAX);
        let [first, second] =
            [&["a", "b"][..], &["a", "b", "c"]].map(|names| file.renewed(&access, &lines(names)));
        access.install(first);
        let user = Arc::new(User::default());
        let granted = access.admit(&headers_of("b"), Need::Known, &connection, &user);
        let granted = granted.unwrap();
        access.install(second);
        assert!(!user.is_revoked());
        drop(granted);
    }

    #[test]
    fn anonymous_clients_are_let_in_by_their_host_and_never_administer() {
        // Scenario: requests without a credential from this host and from another one, where nobody, this host or everybody may
        // be anonymous. Expectation: those are let in and counted that may, but to no administration.
        let mut file = PrincipalsFile::new(&line("a", "x"));
        let fetcher = without_datasets(Limits::default());
        for (anonymous, let_in) in [
            (Anonymous::Nobody, [false, false]),
            (Anonymous::Loopback, [true, false]),
            (Anonymous::Everybody, [true, true]),
        ] {
            file.config.anonymous = anonymous;
            let access = file.access();
            let found = ["::ffff:127.0.0.2", "192.0.2.1"].map(|address| {
                let connection = fetcher.callers().connect(address.parse().unwrap(), u64::MAX);
                let user = Arc::new(User::default());
                let admit = |need| access.admit(&HeaderMap::new(), need, &connection, &user);
                assert_eq!(admit(Need::Admin).unwrap_err(), Denied::Unauthenticated);
                admit(Need::Known).is_ok()
            });
            assert_eq!(found, let_in, "{anonymous:?}");
            let counted = access.inner.anonymous_requests.load(Ordering::Relaxed);
            assert_eq!(counted, let_in.into_iter().map(u64::from).sum::<u64>());
        }
    }

    #[test]
    fn a_bearer_token_is_one_header_of_one_scheme() {
        // Scenario: no header; the scheme in other case; more blanks; another scheme, no token, two headers.
        // Expectation: nothing; the token, twice; refusals.
        let token = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::AUTHORIZATION, HeaderValue::from_static(value));
            }
            bearer_token(&headers).map(|token| token.map(<[u8]>::to_vec))
        };
        assert_eq!(token(&[]), Ok(None));
        for value in ["Bearer secret", "bearer secret", "BEARER   secret "] {
            assert_eq!(token(&[value]), Ok(Some(b"secret".to_vec())), "{value}");
        }
        for value in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer   ",
            "Basic c2VjcmV0",
            "secret",
            "Bearersecret",
        ] {
            assert_eq!(token(&[value]), Err(Denied::Unauthenticated), "{value}");
        }
        assert_eq!(token(&["Bearer a", "Bearer a"]), Err(Denied::Unauthenticated));
    }
}
