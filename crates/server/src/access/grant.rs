//! A line of the principals file: a credential, its principal and rights, and the connections that use it.

use super::{Need, Principal};
use ringfetch_engine::sync::lock;
use slab::Slab;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// What a client authenticates with.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Credential {
    /// SHA-256 of a bearer token.
    Token([u8; 32]),
    /// A name in the client's certificate.
    Certificate(String),
}

/// What a principal may do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Rights {
    pub(super) all_datasets: bool,
    pub(super) datasets: BTreeSet<String>,
    pub(super) metrics: bool,
    pub(super) admin: bool,
}

/// Something to end when a grant is revoked.
pub(crate) trait Revoke: std::fmt::Debug + Send + Sync {
    /// Ends it.
    fn revoke(&self);
}

/// A line of the principals file.
pub(crate) struct Grant {
    pub(crate) principal: Arc<Principal>,
    pub(super) credential: Credential,
    pub(super) rights: Rights,
    is_revoked: AtomicBool,
    users: Mutex<Slab<Weak<dyn Revoke>>>,
}

/// Does not print the credential.
impl std::fmt::Debug for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Grant").field(&self.principal.name()).finish()
    }
}

impl Grant {
    pub(super) fn new(principal: Arc<Principal>, credential: Credential, rights: Rights) -> Self {
        Self {
            principal,
            credential,
            rights,
            is_revoked: AtomicBool::new(false),
            users: Mutex::default(),
        }
    }

    /// A grant for all datasets with a token made from `token`.
    #[cfg(test)]
    pub(crate) fn for_tests(principal: &Arc<Principal>, token: u8) -> Arc<Self> {
        let rights = Rights {
            all_datasets: true,
            ..Rights::default()
        };
        let credential = Credential::Token([token; 32]);
        Arc::new(Self::new(Arc::clone(principal), credential, rights))
    }

    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.principal, &other.principal)
            && (&self.credential, &self.rights) == (&other.credential, &other.rights)
    }

    pub(super) fn allows(&self, need: Need) -> bool {
        let Rights {
            all_datasets,
            metrics,
            admin,
            ..
        } = self.rights;
        match need {
            Need::Known => true,
            Need::Operation => all_datasets || metrics || admin,
            Need::Admin => admin,
        }
    }

    pub(super) fn is_revoked(&self) -> bool {
        self.is_revoked.load(Ordering::SeqCst)
    }

    fn users(&self) -> MutexGuard<'_, Slab<Weak<dyn Revoke>>> {
        lock(&self.users)
    }

    /// Revokes the grant and ends everything that uses it.
    pub(super) fn revoke(&self) {
        // Set before the list is taken: a user that registers later sees it.
        self.is_revoked.store(true, Ordering::SeqCst);
        let users = std::mem::take(&mut *self.users());
        for (_, user) in users {
            if let Some(user) = user.upgrade() {
                user.revoke();
            }
        }
    }
}

/// A connection's use of a grant.
#[derive(Debug)]
pub(crate) struct GrantInUse {
    grant: Arc<Grant>,
    key: usize,
}

impl GrantInUse {
    /// Registers `user` with the grant; `None` if the grant is revoked.
    pub(crate) fn new<C: Revoke + 'static>(grant: &Arc<Grant>, user: &Arc<C>) -> Option<Self> {
        // Coerced from a typed `Weak`.
        let user: Weak<dyn Revoke> = Arc::<C>::downgrade(user);
        let in_use = Self {
            key: grant.users().insert(user),
            grant: Arc::clone(grant),
        };
        (!grant.is_revoked()).then_some(in_use)
    }

    pub(crate) fn is_of(&self, grant: &Arc<Grant>) -> bool {
        Arc::ptr_eq(&self.grant, grant)
    }

    pub(crate) fn principal(&self) -> &Arc<Principal> {
        &self.grant.principal
    }

    /// Whether the line allows this dataset, which need not exist. Also after it is revoked: then the principal may have
    /// another line that allows as much.
    pub(crate) fn may_read(&self, dataset: &str) -> bool {
        let Rights {
            all_datasets,
            datasets,
            ..
        } = &self.grant.rights;
        *all_datasets || datasets.contains(dataset)
    }

    pub(crate) fn is_revoked(&self) -> bool {
        self.grant.is_revoked()
    }
}

impl Drop for GrantInUse {
    fn drop(&mut self) {
        // After a revocation it is no longer in the list.
        let _user = self.grant.users().try_remove(self.key);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A user of a grant; whether it was told of a revocation.
    #[derive(Debug, Default)]
    pub(crate) struct User(AtomicBool);

    impl User {
        pub(crate) fn is_revoked(&self) -> bool {
            self.0.load(Ordering::SeqCst)
        }
    }

    impl Revoke for User {
        fn revoke(&self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_revoked_grant_ends_its_users_and_has_no_more() {
        // Scenario: three connections use a grant, and one of them stops; the grant is revoked; a fourth
        // connection comes. Expectation: the two are ended, the third is not, the fourth is refused; all
        // learn of it, and nothing is kept.
        let rights = Rights {
            all_datasets: true,
            ..Rights::default()
        };
        let grant = Arc::new(Grant::new(
            Principal::new("a"),
            Credential::Token([7; 32]),
            rights,
        ));
        let users: [Arc<User>; 4] = std::array::from_fn(|_| Arc::default());
        let mut in_use: Vec<_> = users[..3]
            .iter()
            .map(|user| GrantInUse::new(&grant, user).unwrap())
            .collect();
        assert!(in_use[0].may_read("d") && !in_use[0].is_revoked());
        in_use.pop();
        assert_eq!(grant.users().len(), 2);
        grant.revoke();
        assert!(GrantInUse::new(&grant, &users[3]).is_none());
        let ended = users.map(|user| user.is_revoked());
        assert_eq!(ended, [true, true, false, false]);
        assert!(in_use[0].is_revoked());
        drop(in_use);
        assert!(grant.users().is_empty());
        assert!(!format!("{grant:?}").contains('7'));
    }
}
