//! Lists in a request that are counted to their end but stored only up to a bound, so that too many items are
//! refused before they take memory. serde cannot pass a setting to a field, so [`with_bound`] keeps the bound
//! in a thread-local while it decodes. Also objects that must be JSON objects.

use serde::de::value::MapAccessDeserializer;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    /// (most entries of a list that are kept, entries of the longest list so far).
    static BOUND: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Decodes, storing at most `most` entries of each list. Also returns the length of the longest list.
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

/// `deserialize_with` of a list of objects.
pub(super) fn objects<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    Ok(unwrapped(list(deserializer)?))
}

/// `deserialize_with` of a list of objects that may be missing.
pub(super) fn optional_objects<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Vec<T>>, D::Error> {
    Ok(optional_list(deserializer)?.map(unwrapped))
}

fn unwrapped<T>(objects: Vec<Object<T>>) -> Vec<T> {
    objects.into_iter().map(|object| object.0).collect()
}

/// A struct that can be decoded only from a JSON object: what serde derives also accepts an array of the
/// members' values.
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Members<T> {
            type Value = T;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(members))
            }
        }
        deserializer.deserialize_map(Members(PhantomData)).map(Self)
    }
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
                // Entries beyond the bound are not checked.
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
