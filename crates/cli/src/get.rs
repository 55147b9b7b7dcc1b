//! `ringfetch get`: a few items, for people and pipes. Raw and npy output is all or nothing; hex, text and JSON show
//! what could be read and name the rest.

use crate::args::{Format, Get, Global, Out};
use crate::daemon::client;
use crate::expected::engine_dtype;
use crate::format;
use crate::outcome::Failure;
use crate::sink::{Sink, print_json};
use bytes::Bytes;
use ringfetch_client::{ByteRange, Client, Dtype, ItemError, Items, ObjectPart};
use serde_json::{Value, json};
use std::io::Write as _;

/// Longer ranges are fetched in parts of this length, so that any length works whatever one answer may hold. A
/// multiple of 16, so that a hex dump goes on where the part before ended.
const PART_BYTES: u64 = 2 << 20;

pub(crate) async fn run(global: &Global, get: &Get) -> Result<(), Failure> {
    let (Get::Block { out, .. } | Get::Vector { out, .. } | Get::Range { out, .. } | Get::Object { out, .. }) =
        get;
    let vectors = matches!(get, Get::Vector { .. });
    let shape = Shape::choose(global.json, out, vectors)?;
    let client = client(global)?;
    let failed = |error| Failure::call(&error, "grpc", &global.grpc);
    let mut printer = Printer::open(shape, out)?;
    match get {
        Get::Block { dataset, indices, .. } => {
            let blocks = client.fetch_blocks(dataset, indices).await.map_err(failed)?;
            printer.items("block", indices, &blocks, None)?;
        }
        Get::Vector { dataset, ids, .. } => {
            let vectors = client.fetch_vectors(dataset, ids).await.map_err(failed)?;
            printer.items("vector", ids, &vectors, Some((vectors.dtype(), vectors.dim())))?;
        }
        Get::Range {
            dataset,
            offset,
            length,
            ..
        } => {
            let source = Source::Range { dataset };
            stretch(&client, global, &source, *offset, Some(*length), &mut printer).await?;
        }
        Get::Object {
            dataset,
            name,
            offset,
            length,
            ..
        } => {
            let source = Source::Object { dataset, name };
            stretch(&client, global, &source, *offset, *length, &mut printer).await?;
        }
    }
    printer.finish()
}

/// What the output looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Hex,
    Text,
    Raw,
    Npy,
    Json,
}

impl Shape {
    fn choose(json: bool, out: &Out, vectors: bool) -> Result<Self, Failure> {
        Ok(match out.format {
            _ if json => Self::Json,
            None if vectors => Self::Text,
            None | Some(Format::Hex) => Self::Hex,
            Some(Format::Text) => Self::Text,
            Some(Format::Raw) => Self::Raw,
            Some(Format::Npy) if vectors => Self::Npy,
            Some(Format::Npy) => {
                return Err(Failure::Usage(
                    "--format npy: only vectors have a shape; use raw".to_owned(),
                ));
            }
        })
    }
}

/// Where a stretch of bytes lies.
enum Source<'a> {
    Range { dataset: &'a str },
    Object { dataset: &'a str, name: &'a str },
}

/// Fetches `length` bytes from `offset`, in parts if it is long; `None`: to the object's end, in one.
async fn stretch(
    client: &Client,
    global: &Global,
    source: &Source<'_>,
    offset: u64,
    length: Option<u64>,
    printer: &mut Printer,
) -> Result<(), Failure> {
    let label = match source {
        Source::Range { .. } => Value::from(offset),
        Source::Object { name, .. } => Value::from(*name),
    };
    let mut whole = Vec::new();
    let mut at = offset;
    let mut left = length;
    loop {
        let part = left.map(|left| left.min(PART_BYTES));
        let items = match source {
            Source::Range { dataset } => {
                let range = ByteRange::new(at, part.unwrap_or(0));
                client.fetch_ranges(dataset, &[range]).await
            }
            Source::Object { dataset, name } => {
                let object = ObjectPart::new(*name, at, part);
                client.fetch_objects(dataset, &[object]).await
            }
        };
        let items = items.map_err(|error| Failure::call(&error, "grpc", &global.grpc))?;
        let bytes = items
            .get(0)
            .map_err(|error| Failure::Failed(format!("{}: {}", error.label(), error.message)))?;
        match printer.shape {
            Shape::Hex => format::hex_dump(&mut printer.sink, at, &bytes)?,
            Shape::Raw => printer.sink.write_all(&bytes)?,
            Shape::Text | Shape::Npy | Shape::Json => whole.extend_from_slice(&bytes),
        }
        let Some(before) = left else { break };
        let got = part.unwrap_or(0);
        at = at.saturating_add(got);
        left = Some(before - got);
        if left == Some(0) {
            break;
        }
    }
    match printer.shape {
        Shape::Hex | Shape::Raw | Shape::Npy => {}
        Shape::Text => printer.text(&label.to_string(), &whole, None)?,
        Shape::Json => printer.json.push(json!({
            "item": label,
            "length": whole.len(),
            "hex": format::hex_word(&whole),
        })),
    }
    Ok(())
}

/// Prints items in one shape.
struct Printer {
    shape: Shape,
    sink: Sink,
    json: Vec<Value>,
    /// What could not be printed.
    failures: Vec<String>,
}

impl Printer {
    fn open(shape: Shape, out: &Out) -> Result<Self, Failure> {
        let sink = Sink::open(out.out.as_deref())?;
        if matches!(shape, Shape::Raw | Shape::Npy) && sink.is_terminal() {
            let problem =
                "--format: raw bytes would garble the terminal; add --out FILE, or pipe them somewhere";
            return Err(Failure::Usage(problem.to_owned()));
        }
        Ok(Self {
            shape,
            sink,
            json: Vec::new(),
            failures: Vec::new(),
        })
    }

    /// Prints a batch; `numbers` are the items' numbers, `vectors` the element type and dimension of vectors.
    fn items(
        &mut self,
        what: &str,
        numbers: &[u64],
        items: &Items,
        vectors: Option<(Dtype, u32)>,
    ) -> Result<(), Failure> {
        let label = |item: usize| format!("{what} {}", numbers.get(item).copied().unwrap_or(0));
        let describe =
            |error: &ItemError| format!("{}: {}: {}", label(error.item), error.label(), error.message);
        self.failures.extend(items.errors().iter().map(describe));
        if matches!(self.shape, Shape::Raw | Shape::Npy) {
            if !self.failures.is_empty() {
                return Err(self.failure());
            }
            if let (Shape::Npy, Some((dtype, dim))) = (self.shape, vectors) {
                let rows = u64::try_from(items.len()).unwrap_or(u64::MAX);
                let header = ringfetch_pattern::npy_header(engine_dtype(dtype), dim, rows);
                self.sink.write_all(&header)?;
            }
            for piece in items.pieces() {
                self.sink.write_all(piece)?;
            }
            return Ok(());
        }
        for (i, (item, &number)) in items.iter().zip(numbers).enumerate() {
            if self.shape == Shape::Json {
                self.json
                    .push(item_json(number, item, vectors.map(|(dtype, _)| dtype)));
                continue;
            }
            let Ok(bytes) = item else { continue };
            if self.shape == Shape::Hex {
                if numbers.len() > 1 {
                    writeln!(self.sink, "{}:", label(i))?;
                }
                format::hex_dump(&mut self.sink, 0, &bytes)?;
            } else {
                self.text(&label(i), &bytes, vectors.map(|(dtype, _)| dtype))?;
            }
        }
        Ok(())
    }

    fn text(&mut self, label: &str, bytes: &[u8], dtype: Option<Dtype>) -> Result<(), Failure> {
        if let Some(dtype) = dtype {
            writeln!(self.sink, "{}", format::elements(dtype, bytes).join(" "))?;
            return Ok(());
        }
        match std::str::from_utf8(bytes) {
            Ok(text) => self.sink.write_all(text.as_bytes())?,
            Err(error) => {
                let at = error.valid_up_to();
                self.failures
                    .push(format!("{label}: no UTF-8 at byte {at}; use --format hex or raw"));
            }
        }
        Ok(())
    }

    fn failure(&self) -> Failure {
        let more = match self.failures.len() {
            0 | 1 => String::new(),
            n => format!(" (and {} more)", n - 1),
        };
        Failure::Failed(format!(
            "{}{more}",
            self.failures.first().map_or("", String::as_str)
        ))
    }

    fn finish(mut self) -> Result<(), Failure> {
        if self.shape == Shape::Json {
            print_json(&mut self.sink, &json!({ "items": self.json }))?;
        }
        let outcome = if self.failures.is_empty() {
            Ok(())
        } else {
            Err(self.failure())
        };
        self.sink.finish()?;
        outcome
    }
}

fn item_json(number: u64, item: Result<Bytes, ItemError>, dtype: Option<Dtype>) -> Value {
    match (item, dtype) {
        (Err(error), _) => {
            json!({ "item": number, "error": { "code": error.label(), "message": error.message } })
        }
        (Ok(bytes), None) => {
            json!({ "item": number, "length": bytes.len(), "hex": format::hex_word(&bytes) })
        }
        (Ok(bytes), Some(dtype)) => {
            // JSON has no NaN and no infinity: null stands for them, as in most encoders.
            let values: Vec<Value> = format::elements(dtype, &bytes)
                .iter()
                .map(|element| serde_json::from_str(element).unwrap_or(Value::Null))
                .collect();
            json!({ "item": number, "values": values })
        }
    }
}
