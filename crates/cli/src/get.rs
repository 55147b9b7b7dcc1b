//! `ringfetch get`: a few items, for people and pipes. Of several items raw and npy output is all or nothing; hex, text and
//! JSON show what could be read and report the rest. A long range comes in parts, an object as a stream: with `--out` all of it
//! or nothing, but a pipe has got what came before a failure.

use crate::args::{Format, Get, Global, Out};
use crate::daemon::{PatientClient, grpc_failure, is_too_large, may_pass};
use crate::expected::engine_dtype;
use crate::format;
use crate::outcome::Failure;
use crate::sink::{Sink, print_json};
use crate::stop::StopSignals;
use bytes::Bytes;
use futures_util::TryStreamExt as _;
use ringfetch_client::{Answer, ByteRange, Dtype, ItemError, Items, ObjectPart, Request};
use serde_json::{Value, json};
use std::io::Write as _;

/// Longer ranges are fetched in parts of this length, or of half of it and so on if a part is refused as too large: any
/// length works, whatever the limit of one response.
const PART_BYTES: u64 = 2 << 20;
/// No limit of a response is smaller.
const PART_BYTES_MIN: u64 = 4 << 10;

pub(crate) async fn run(global: &Global, get: &Get) -> Result<(), Failure> {
    let (Get::Block { out, .. } | Get::Vector { out, .. } | Get::Range { out, .. } | Get::Object { out, .. }) =
        get;
    let vectors = matches!(get, Get::Vector { .. });
    let format = format_of(global.json, out, vectors)?;
    let printer = Printer::open(format, out)?;
    if printer.sink.is_file() {
        // Otherwise a signal would leave a part of it. Not of a pipe: a write that waits for its reader keeps this thread
        // from seeing a signal.
        return StopSignals::catch()?.unless(fetch(global, get, printer)).await;
    }
    fetch(global, get, printer).await
}

async fn fetch(global: &Global, get: &Get, mut printer: Printer) -> Result<(), Failure> {
    let client = PatientClient::new(global)?;
    let failed = grpc_failure(global);
    match get {
        Get::Block { dataset, indices, .. } => {
            let answer = client.fetch(Request::blocks(dataset, &**indices)).await;
            printer.items("block", indices, answer.map_err(failed)?.items(), None)?;
        }
        Get::Vector { dataset, ids, .. } => {
            let answer = client
                .fetch(Request::vectors(dataset, &**ids))
                .await
                .map_err(failed)?;
            let shape = if let Answer::Vectors(vectors) = &answer {
                Some((vectors.dtype(), vectors.dim()))
            } else {
                None
            };
            printer.items("vector", ids, answer.items(), shape)?;
        }
        Get::Range {
            dataset,
            offset,
            length,
            ..
        } => {
            if *length > PART_BYTES {
                // Of parts, the daemon would refuse only the last one.
                let call = client.call(|client| client.get_dataset(dataset));
                let end = call.await.map_err(failed)?.length_bytes;
                if offset.saturating_add(*length) > end {
                    let problem = match end.saturating_sub(*offset) {
                        0 => format!("offset {offset} is past the end of {dataset}: there are {end} bytes"),
                        most => format!(
                            "offset {offset} + length {length} ends past the end of {dataset}, at {end}: ask for at most {most} \
                             bytes"
                        ),
                    };
                    return Err(Failure::Failed(problem));
                }
            }
            fetch_range(&client, global, dataset, *offset, *length, &mut printer).await?;
        }
        Get::Object {
            dataset,
            name,
            offset,
            length,
            ..
        } => {
            let part = ObjectPart::new(name, *offset, *length);
            fetch_object(&client, global, dataset, part, &mut printer).await?;
        }
    }
    printer.finish()
}

/// The requested output format, if it suits the items; or the default.
fn format_of(json: bool, out: &Out, vectors: bool) -> Result<Format, Failure> {
    match out.format {
        _ if json => Ok(Format::Json),
        None if vectors => Ok(Format::Text),
        None if out.out.is_some() => Ok(Format::Raw),
        None => Ok(Format::Hex),
        Some(Format::Npy) if !vectors => {
            let problem = "--format npy: only vectors have a shape; use raw";
            Err(Failure::Usage(problem.to_owned()))
        }
        Some(format) => Ok(format),
    }
}

/// Fetches `length` bytes from `offset`, in parts of one version.
async fn fetch_range(
    client: &PatientClient,
    global: &Global,
    dataset: &str,
    offset: u64,
    length: u64,
    printer: &mut Printer,
) -> Result<(), Failure> {
    let mut long = LongItem::new(offset);
    let (mut left, mut version, mut part_bytes) = (length, String::new(), PART_BYTES);
    while left > 0 && !printer.sink.is_closed() {
        let range = ByteRange::new(long.end, left.min(part_bytes));
        let wanted = Request::ranges(dataset, [range]).if_match(&version);
        let answer = match client.fetch_whole(&wanted).await {
            Ok(answer) => answer,
            Err(error) if part_bytes > PART_BYTES_MIN && is_too_large(&error) => {
                part_bytes /= 2;
                continue;
            }
            Err(error) => return Err(grpc_failure(global)(error)),
        };
        let items = answer.items();
        let bytes = items
            .get(0)
            .map_err(|error| Failure::Failed(format!("{}: {}", error.label(), error.message)))?;
        items.etag().clone_into(&mut version);
        left -= range.length;
        long.print(&bytes, printer)?;
    }
    long.finish(offset.into(), printer)
}

/// Fetches an object or a part of it, of one version.
async fn fetch_object(
    client: &PatientClient,
    global: &Global,
    dataset: &str,
    mut part: ObjectPart,
    printer: &mut Printer,
) -> Result<(), Failure> {
    let mut long = LongItem::new(part.offset);
    loop {
        let object = client.call(|client| client.read_object(dataset, &part)).await;
        let mut object = object.map_err(grpc_failure(global))?;
        object.etag().clone_into(&mut part.if_match);
        let end = part.offset.saturating_add(object.length_bytes());
        let ended = loop {
            match object.try_next().await {
                Ok(Some(bytes)) if !printer.sink.is_closed() => long.print(&bytes, printer)?,
                Ok(_) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        match ended {
            Ok(()) => return long.finish(part.name.as_str().into(), printer),
            // Asked again, the daemon says how long to wait, which may be for longer than --timeout. Not for ever: each call
            // brings something.
            Err(error) if may_pass(&error) && long.end < end => {
                (part.offset, part.length) = (long.end, Some(end - long.end));
            }
            Err(error) => return Err(grpc_failure(global)(error)),
        }
    }
}

/// A range or an object that comes in parts.
struct LongItem {
    /// Where what has been printed or is in `kept` ends.
    end: u64,
    /// For hex the last bytes, which are no whole line yet; for text and JSON all of them.
    kept: Vec<u8>,
}

impl LongItem {
    /// From this offset on.
    fn new(offset: u64) -> Self {
        Self {
            end: offset,
            kept: Vec::new(),
        }
    }

    fn print(&mut self, bytes: &[u8], printer: &mut Printer) -> Result<(), Failure> {
        match printer.format {
            Format::Raw => printer.sink.write_all(bytes)?,
            Format::Hex => {
                let begin = self.end - self.kept.len() as u64;
                self.kept.extend_from_slice(bytes);
                let lines = self.kept.len() - self.kept.len() % format::DUMP_LINE_BYTES;
                format::hex_dump(&mut printer.sink, begin, &self.kept[..lines])?;
                self.kept.drain(..lines);
            }
            Format::Text | Format::Npy | Format::Json => self.kept.extend_from_slice(bytes),
        }
        self.end = self.end.saturating_add(bytes.len() as u64);
        Ok(())
    }

    /// Prints what is left.
    fn finish(self, label: Value, printer: &mut Printer) -> Result<(), Failure> {
        let Self { end, kept } = self;
        match printer.format {
            Format::Hex => format::hex_dump(&mut printer.sink, end - kept.len() as u64, &kept)?,
            Format::Raw | Format::Npy => {}
            Format::Text => printer.text(&label.to_string(), &kept, None)?,
            Format::Json => {
                let hex = format::hex_word(&kept);
                let item = json!({ "item": label, "length": kept.len(), "hex": hex });
                printer.json.push(item);
            }
        }
        Ok(())
    }
}

/// Prints items in one format.
struct Printer {
    format: Format,
    sink: Sink,
    json: Vec<Value>,
    /// Whether an item could be printed.
    has_items: bool,
    /// Items that could not be printed.
    failures: Vec<String>,
}

impl Printer {
    fn open(format: Format, out: &Out) -> Result<Self, Failure> {
        let sink = Sink::open(out.out.as_deref())?;
        if matches!(format, Format::Raw | Format::Npy) && sink.is_terminal() {
            let problem =
                "--format: raw bytes would garble the terminal; add --out FILE, or pipe them somewhere";
            return Err(Failure::Usage(problem.to_owned()));
        }
        let (json, failures) = (Vec::new(), Vec::new());
        Ok(Self {
            format,
            sink,
            json,
            has_items: false,
            failures,
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
        let dtype = vectors.map(|(dtype, _)| dtype);
        let describe =
            |error: &ItemError| format!("{}: {}: {}", label(error.item), error.label(), error.message);
        self.failures.extend(items.errors().iter().map(describe));
        if matches!(self.format, Format::Raw | Format::Npy) {
            if !self.failures.is_empty() {
                return Err(self.failure());
            }
            if let (Format::Npy, Some((dtype, dim))) = (self.format, vectors) {
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
            if self.format == Format::Json {
                self.has_items |= item.is_ok();
                self.json.push(item_json(number, item, dtype));
                continue;
            }
            let Ok(bytes) = item else { continue };
            if self.format == Format::Hex {
                self.has_items = true;
                if numbers.len() > 1 {
                    writeln!(self.sink, "{}:", label(i))?;
                }
                format::hex_dump(&mut self.sink, 0, &bytes)?;
            } else {
                self.text(&label(i), &bytes, dtype)?;
            }
        }
        Ok(())
    }

    fn text(&mut self, label: &str, bytes: &[u8], dtype: Option<Dtype>) -> Result<(), Failure> {
        if let Some(dtype) = dtype {
            self.has_items = true;
            writeln!(self.sink, "{}", format::elements(dtype, bytes).join(" "))?;
            return Ok(());
        }
        match std::str::from_utf8(bytes) {
            Ok(text) => {
                self.has_items = true;
                self.sink.write_all(text.as_bytes())?;
            }
            Err(error) => {
                let at = error.valid_up_to();
                self.failures
                    .push(format!("{label}: no UTF-8 at byte {at}; use --format hex or raw"));
            }
        }
        Ok(())
    }

    fn failure(&self) -> Failure {
        Failure::Failed(match &self.failures[..] {
            [] => String::new(),
            [only] => only.clone(),
            [first, others @ ..] => format!("{first} (and {} more)", others.len()),
        })
    }

    fn finish(mut self) -> Result<(), Failure> {
        if self.format == Format::Json {
            print_json(&mut self.sink, &json!({ "items": self.json }))?;
        }
        let failure = (!self.failures.is_empty()).then(|| self.failure());
        // A file keeps what it had if there is nothing to replace it with.
        if failure.is_none() || self.has_items || !self.sink.is_file() {
            self.sink.finish()?;
        }
        failure.map_or(Ok(()), Err)
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
            // JSON has no NaN and no infinity: they become null, as in most encoders.
            let values: Vec<Value> = format::elements(dtype, &bytes)
                .iter()
                .map(|element| serde_json::from_str(element).unwrap_or(Value::Null))
                .collect();
            json!({ "item": number, "values": values })
        }
    }
}
