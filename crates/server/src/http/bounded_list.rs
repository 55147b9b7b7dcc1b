//! Lists in a request that are counted to their end and kept up to a bound, so that a flood of items is refused before each
//! takes its place in memory. The bound is a setting, which serde cannot hand to a field: so [`with_bound`] keeps it for as
//! long as the thread decodes.

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    /// (most entries of a list that are kept, entries of the longest list so far).
    static BOUND: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Decodes with lists of at most `most` entries kept. Returns also how many the longest list had.
pub(super) fn with_bound<T>(most: usize, decode: impl FnOnce() -> T) -> (T, usize) {
    BOUND.set((most, 0));
    let decoded = decode();
    let (_, longest) = BOUND.get();
    (decoded, longest)
}

/// `deserialize_with` of a list.
pub(super) fn list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    Ok(Bounded::deserialize(deserializer)?.0)
}

/// `deserialize_with` of a list that may be missing.
pub(super) fn optional_list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Vec<T>>, D::Error> {
    Ok(Option::<Bounded<T>>::deserialize(deserializer)?.map(|list| list.0))
}

struct Bounded<T>(Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Bounded<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a sequence")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
                let (most, _) = BOUND.get();
                let mut kept = Vec::new();
                while kept.len() < most {
                    match list.next_element()? {
                        Some(entry) => kept.push(entry),
                        None => break,
                    }
                }
                let mut listed = kept.len();
                // An entry that is not kept need not even be one of ours.
                while listed >= most && list.next_element::<IgnoredAny>()?.is_some() {
                    listed += 1;
                }
                let (_, longest) = BOUND.get();
                BOUND.set((most, longest.max(listed)));
                Ok(kept)
            }
        }
        deserializer.deserialize_seq(Entries(PhantomData)).map(Self)
    }
}
