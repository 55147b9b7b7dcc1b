//! A YAML document. [`Value`] alone refuses whole numbers beyond 64 bits, and with them the document; here they are floats, as
//! YAML reads those beyond 128 bits, so that their keys refuse them, beside all other mistakes.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, EnumAccess, Error, MapAccess, SeqAccess, VariantAccess as _, Visitor};
use serde_yaml::value::{Tag, TaggedValue};
use serde_yaml::{Mapping, Value};

#[derive(Debug)]
pub(super) struct Document(pub(super) Value);

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue).map(Self)
    }
}

/// As that of [`Value`], but for the numbers.
struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
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
        while let Some(Document(item)) = items.next_element()? {
            sequence.push(item);
        }
        Ok(Value::Sequence(sequence))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut mapping = Mapping::new();
        while let Some(Document(key)) = entries.next_key()? {
            if mapping.contains_key(&key) {
                let key = if let Value::String(text) = &key {
                    format!("{text:?}")
                } else {
                    super::layers::plain(&key)
                };
                return Err(A::Error::custom(format!("duplicate entry with key {key}")));
            }
            let Document(value) = entries.next_value()?;
            mapping.insert(key, value);
        }
        Ok(Value::Mapping(mapping))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<Value, A::Error> {
        let (tag, value) = tagged.variant::<String>()?;
        if tag.is_empty() {
            return Err(A::Error::custom("empty YAML tag is not allowed"));
        }
        let (tag, Document(value)) = (Tag::new(tag), value.newtype_variant()?);
        Ok(Value::Tagged(Box::new(TaggedValue { tag, value })))
    }
}
