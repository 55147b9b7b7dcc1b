//! A YAML document. [`Value`] alone refuses whole numbers beyond 64 bits, and with them the document; here they are floats, as
//! YAML reads those beyond 128 bits, so that their keys refuse them, beside all other mistakes.

use std::cell::Cell;
use std::fmt;

use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, VariantAccess as _, Visitor,
};
use serde_yaml::value::{Tag, TaggedValue};
use serde_yaml::{Mapping, Value};

/// Most values of a document, each alias counted as what it stands for: a few kilobytes of aliases could stand for gigabytes.
const VALUES_MAX: u32 = 1 << 20;

/// Most brackets that are open at once; those in text and comments count. 128 levels are accepted, but only once all is parsed, and
/// at each word the parser visits every open bracket: 100,000 of them took more than a minute (a debug build).
const BRACKETS_MAX: usize = 256;

/// Reads a document.
///
/// # Errors
/// It is not YAML, has a key twice, or more than [`VALUES_MAX`] values or [`BRACKETS_MAX`] open brackets.
pub(super) fn read(text: &str) -> Result<Value, serde_yaml::Error> {
    let mut open = 0_usize;
    for byte in text.bytes() {
        match byte {
            b'[' | b'{' => open += 1,
            b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        if open > BRACKETS_MAX {
            let problem = format!("more than {BRACKETS_MAX} brackets are open at once");
            return Err(serde_yaml::Error::custom(problem));
        }
    }
    let left = Cell::new(VALUES_MAX);
    AnyValue { left: &left }.deserialize(serde_yaml::Deserializer::from_str(text))
}

/// As that of [`Value`], but for the numbers and the limit.
#[derive(Clone, Copy)]
struct AnyValue<'a> {
    /// Values that may still come.
    left: &'a Cell<u32>,
}

impl<'de> DeserializeSeed<'de> for AnyValue<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        match self.left.get().checked_sub(1) {
            Some(left) => self.left.set(left),
            None => {
                return Err(D::Error::custom(format!(
                    "it has more than {VALUES_MAX} values, with each alias for what it stands for"
                )));
            }
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for AnyValue<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any YAML value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i128<E>(self, value: i128) -> Result<Value, E> {
        Ok((value as f64).into())
    }

    fn visit_u128<E>(self, value: u128) -> Result<Value, E> {
        Ok((value as f64).into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    /// An empty document.
    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut sequence = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            sequence.push(item);
        }
        Ok(Value::Sequence(sequence))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut mapping = Mapping::new();
        while let Some(key) = entries.next_key_seed(self)? {
            if mapping.contains_key(&key) {
                let key = if let Value::String(text) = &key {
                    format!("{text:?}")
                } else {
                    super::layers::plain(&key)
                };
                return Err(A::Error::custom(format!("duplicate entry with key {key}")));
            }
            let value = entries.next_value_seed(self)?;
            mapping.insert(key, value);
        }
        Ok(Value::Mapping(mapping))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<Value, A::Error> {
        let (tag, value) = tagged.variant::<String>()?;
        if tag.is_empty() {
            return Err(A::Error::custom("empty YAML tag is not allowed"));
        }
        let (tag, value) = (Tag::new(tag), value.newtype_variant_seed(self)?);
        Ok(Value::Tagged(Box::new(TaggedValue { tag, value })))
    }
}
