//! The arguments that commands share, and those of the small commands. Checks here use clap; checks that need
//! the dataset are the command's.

use crate::connect::is_https;
use crate::outcome::Failure;
use crate::quantity::{parse_duration, parse_size};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueEnum};
use ringfetch_client::{Error, Tls};
use ringfetch_command::input_file;
use ringfetch_engine::dataset::{BLOCK_BYTES_MAX, DIM_MAX, Dtype, Layout};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most bytes of a file that is read whole: tokens, certificates, results. A bundle of all authorities has less than 1 MiB.
pub(crate) const INPUT_BYTES_MAX: u64 = 16 << 20;
/// The demo's seed, and the default everywhere.
pub(crate) const SEED: u64 = 42;
/// Most objects that are made: their lengths are added up before the first one is written.
const MADE_OBJECTS_MAX: u64 = 10_000_000;
/// Lengths of made objects.
const LENGTH_MIN: &str = "1KiB";
const LENGTH_MAX: &str = "64KiB";

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// The daemon's gRPC address.
    #[arg(
        long,
        global = true,
        env = "RINGFETCH_GRPC",
        value_name = "URL",
        default_value = "http://127.0.0.1:7410"
    )]
    pub(crate) grpc: String,
    /// The daemon's admin address (status, backend, reload, log-level).
    #[arg(
        long,
        global = true,
        env = "RINGFETCH_ADMIN",
        value_name = "URL",
        default_value = "http://127.0.0.1:7412"
    )]
    pub(crate) admin: String,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// File with the bearer token to send.
    #[arg(long, global = true, env = "RINGFETCH_TOKEN_FILE", value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// How long a call may take. reload: 10m, unless given. get and dataset verify wait longer where the daemon limits their
    /// rate, and repeat a call that reaches no daemon for 4 to 8s.
    #[arg(long, global = true, value_name = "DURATION", value_parser = parse_timeout, default_value = "10s")]
    pub(crate) timeout: Duration,
    /// Whether it is the default.
    #[arg(skip)]
    pub(crate) is_default_timeout: bool,
}

/// A bearer token. Never printed.
#[derive(Clone)]
pub(crate) struct Token(pub(crate) String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

impl Global {
    /// The token to send, if there is one.
    pub(crate) fn token(&self) -> Result<Option<Token>, Failure> {
        let Some(path) = &self.token_file else {
            return Ok(None);
        };
        let wrong = |problem: &dyn std::fmt::Display| {
            Failure::Usage(format!("--token-file: {}: {problem}", path.display()))
        };
        let text = input_file::read_text(path, INPUT_BYTES_MAX).map_err(|error| wrong(&error))?;
        match text.trim() {
            "" => Err(wrong(&"it is empty")),
            token if token.contains(char::is_control) => {
                Err(wrong(&"it has more than one line, or control characters"))
            }
            token if token.contains(|c: char| c.is_whitespace() || c == '\u{feff}') => Err(wrong(
                &"it has blanks or a byte order mark; leave only the token in it",
            )),
            token => Ok(Some(Token(token.to_owned()))),
        }
    }
}

/// TLS at `https://` addresses.
#[derive(Debug, Args)]
pub(crate) struct TlsArgs {
    /// Authorities to trust at https:// addresses (PEM). Default: this host's authorities.
    #[arg(long, global = true, env = "RINGFETCH_CA", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Certificate chain to present there (PEM), with --key.
    #[arg(long, global = true, env = "RINGFETCH_CERT", value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Private key of that certificate (PEM).
    #[arg(long, global = true, env = "RINGFETCH_KEY", value_name = "FILE")]
    key: Option<PathBuf>,
}

impl TlsArgs {
    /// The TLS settings of the flags; `None` if none is given.
    pub(crate) fn read(&self) -> Result<Option<Tls>, Failure> {
        let file = |flag: &str, path: &PathBuf| {
            let read = input_file::read(path, INPUT_BYTES_MAX);
            read.map_err(|error| Failure::Usage(format!("--{flag}: {}: {error}", path.display())))
        };
        let ca = self.ca.as_ref().map(|path| file("ca", path)).transpose()?;
        let own = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => Some((file("cert", cert)?, file("key", key)?)),
            (None, None) if ca.is_none() => return Ok(None),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => {
                return Err(Failure::Usage("--cert and --key belong together".to_owned()));
            }
        };
        let own = own.as_ref().map(|(cert, key)| (&cert[..], &key[..]));
        self.made(ca.as_deref(), own).map(Some)
    }

    fn made(&self, ca: Option<&[u8]>, own: Option<(&[u8], &[u8])>) -> Result<Tls, Failure> {
        Tls::new(ca, own).map_err(|error| {
            let Error::Invalid { field, problem, .. } = error else {
                return Failure::Usage(format!("--ca, --cert, --key: {error}"));
            };
            let (flag, path) = match field {
                // The host's authorities, without --ca.
                "tls" => return Failure::Failed(format!("--ca: {problem}")),
                "ca" => ("ca", &self.ca),
                "key" => ("key", &self.key),
                _ => ("cert", &self.cert),
            };
            let path = path.as_deref().unwrap_or(Path::new("")).display();
            Failure::Usage(format!("--{flag}: {path}: {problem}"))
        })
    }

    /// [`Self::read`]; without flags, the host's trusted authorities if an address needs TLS.
    pub(crate) fn of_urls(&self, urls: &[&str]) -> Result<Option<Tls>, Failure> {
        match self.read()? {
            None if urls.iter().any(|url| is_https(url)) => self.made(None, None).map(Some),
            tls => Ok(tls),
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Get {
    /// Whole blocks, by index.
    Block {
        /// Name of a dataset of kind blocks.
        dataset: String,
        /// From 0.
        #[arg(required = true, value_name = "INDEX")]
        indices: Vec<u64>,
        #[command(flatten)]
        out: Out,
    },
    /// Vectors, by id.
    Vector {
        /// Name of a dataset of kind vectors.
        dataset: String,
        /// From 0.
        #[arg(required = true, value_name = "ID")]
        ids: Vec<u64>,
        #[command(flatten)]
        out: Out,
    },
    /// A byte range of a dataset of kind blocks or vectors.
    Range {
        /// Name of the dataset.
        dataset: String,
        /// First byte.
        #[arg(value_parser = parse_size)]
        offset: u64,
        /// Bytes (4096, 64KiB, ...).
        #[arg(value_parser = at_least_1)]
        length: u64,
        #[command(flatten)]
        out: Out,
    },
    /// An object, whole or in part.
    Object {
        /// Name of a dataset of kind objects.
        dataset: String,
        /// Name below the dataset's directory: `shard-00/object-000005`.
        name: String,
        /// First byte.
        #[arg(long, value_parser = parse_size, default_value = "0")]
        offset: u64,
        /// Bytes; without it: to the end.
        #[arg(long, value_parser = at_least_1)]
        length: Option<u64>,
        #[command(flatten)]
        out: Out,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Out {
    /// How to print: hex (as xxd), text (numbers; UTF-8), raw bytes, or npy (vectors). Default: text for vectors; else
    /// hex, and raw with --out.
    #[arg(long, value_enum, conflicts_with = "json")]
    pub(crate) format: Option<Format>,
    /// Write to this file instead of stdout. A range or object that fails midway then leaves it as it was; a pipe has got its
    /// beginning.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Hex,
    Text,
    Raw,
    Npy,
    /// By the global flag.
    #[value(skip)]
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DatasetCommand {
    /// Write a file or directory of pattern data, whose every byte `verify` knows.
    #[command(subcommand)]
    Make(Make),
    /// Fetch a dataset over the network and check it against the pattern.
    Verify(Verify),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Make {
    /// A file of blocks.
    Blocks {
        /// The file.
        path: PathBuf,
        /// Length of the file (10GiB, ...).
        #[arg(long, value_parser = at_least_1)]
        size: u64,
        /// Block length that the printed configuration names.
        #[arg(long, value_parser = parse_block_bytes, default_value = "4KiB")]
        block_bytes: u32,
        #[command(flatten)]
        how: MakeHow,
    },
    /// A file of vectors.
    Vectors {
        /// The file.
        path: PathBuf,
        /// Vectors.
        #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
        count: u64,
        /// Elements of a vector.
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(DIM_MAX)))]
        dim: u32,
        /// Element type. Default: what the layout fixes, else f32.
        #[arg(long, value_parser = dtypes())]
        dtype: Option<Dtype>,
        /// File layout. Default: by the file's suffix, else raw.
        #[arg(long, value_parser = layouts())]
        layout: Option<Layout>,
        #[command(flatten)]
        how: MakeHow,
    },
    /// A directory of objects.
    Objects {
        /// The directory.
        path: PathBuf,
        /// Objects.
        #[arg(long, value_parser = clap::value_parser!(u64).range(1..=MADE_OBJECTS_MAX))]
        count: u64,
        /// Shortest object. The first two always have 0 and 1 bytes.
        #[arg(long, value_parser = at_least_1, default_value = LENGTH_MIN)]
        length_min: u64,
        /// Longest object.
        #[arg(long, value_parser = parse_size, default_value = LENGTH_MAX)]
        length_max: u64,
        #[command(flatten)]
        how: MakeHow,
    },
}

#[derive(Debug, Args)]
pub(crate) struct MakeHow {
    /// The pattern's seed.
    #[arg(long, default_value_t = SEED)]
    pub(crate) seed: u64,
    /// Replace what is there.
    #[arg(long)]
    pub(crate) force: bool,
    /// Name in the printed configuration. Default: from the path.
    #[arg(long, value_parser = parse_name)]
    pub(crate) name: Option<String>,
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err("no call is answered in no time; use 500ms, 10s, 2m".to_owned()),
        timeout => Ok(timeout),
    }
}

/// A name that the daemon's configuration takes.
fn parse_name(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let good = text.len() <= 128
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(allowed);
    let rule = "use 1 to 128 letters, digits, '.', '_' and '-', the first a letter or digit";
    good.then(|| text.to_owned()).ok_or_else(|| rule.to_owned())
}

fn at_least_1(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("use at least one byte".to_owned()),
        size => Ok(size),
    }
}

fn parse_block_bytes(text: &str) -> Result<u32, String> {
    let bytes = u32::try_from(at_least_1(text)?).ok();
    bytes
        .filter(|bytes| *bytes <= BLOCK_BYTES_MAX)
        .ok_or_else(|| format!("use 1 to {BLOCK_BYTES_MAX}"))
}

/// The layout of this name, as on the command line and as a file's suffix.
pub(crate) fn layout(word: &str) -> Option<Layout> {
    Layout::ALL.into_iter().find(|layout| layout.as_str() == word)
}

fn layouts() -> impl TypedValueParser<Value = Layout> {
    PossibleValuesParser::new(Layout::ALL.map(Layout::as_str))
        .map(|word| layout(&word).unwrap_or(Layout::Raw))
}

fn dtypes() -> impl TypedValueParser<Value = Dtype> {
    let dtype = |word: String| Dtype::ALL.into_iter().find(|dtype| dtype.as_str() == word);
    PossibleValuesParser::new(Dtype::ALL.map(Dtype::as_str))
        .map(move |word| dtype(word).unwrap_or(Dtype::F32))
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Name of the dataset.
    pub(crate) dataset: String,
    /// The seed it was made with.
    #[arg(long, default_value_t = SEED)]
    pub(crate) seed: u64,
    /// Check this many blocks, vectors or objects, chosen at random.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) sample: u64,
    /// Check all of it.
    #[arg(long, conflicts_with = "sample")]
    pub(crate) all: bool,
    /// Check only the first bytes of the dataset (of its elements, for vectors; of each object, for objects).
    #[arg(long, value_name = "SIZE", value_parser = at_least_1)]
    pub(crate) length: Option<u64>,
    /// Blocks, vectors or objects that the dataset must have. Without it, missing objects and lengths are not checked.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// Shortest object, as in `make objects`.
    #[arg(long, value_name = "SIZE", value_parser = at_least_1, default_value = LENGTH_MIN, requires = "count")]
    pub(crate) length_min: u64,
    /// Longest object, as in `make objects`.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = LENGTH_MAX, requires = "count")]
    pub(crate) length_max: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_server::demo;

    #[test]
    fn the_demos_objects_are_those_that_verify_expects() {
        // The flags of verify are not given: its defaults are what the demo makes.
        let defaults = [LENGTH_MIN, LENGTH_MAX].map(|length| parse_size(length).unwrap());
        assert_eq!(defaults, [demo::OBJECT_BYTES_MIN, demo::OBJECT_BYTES_MAX]);
        assert_eq!(SEED, demo::SEED);
    }
}
