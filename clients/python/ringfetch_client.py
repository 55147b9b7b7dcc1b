"""A small Ringfetch client: gRPC stubs made from proto/ on first use, and batches as numpy arrays.

Deliberately absent: pooling and pipelining. The Rust crate has them; this is the smallest thing that is right.
"""

import hashlib
import importlib
import importlib.metadata
import ipaddress
import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

HERE = Path(__file__).resolve().parent
PROTO = HERE.parents[1] / "proto"
PROTO_FILES = ("fetch", "dataset")

# gRPC makes at most five attempts: with the waits between them, of 0.5, 1, 2 and 2 s (each 20 % more or less), a call outlives the
# restart of its only server. All of these calls only read. UNAVAILABLE is also a server that cannot be reached or drains.
RETRIED = ("FetchBlocks", "FetchVectors", "FetchRanges", "FetchObjects", "ScoreVectors")
SERVICE_CONFIG = {"methodConfig": [{
    "name": [{"service": "ringfetch.v1.DatasetService"},
             *({"service": "ringfetch.v1.FetchService", "method": method} for method in RETRIED)],
    "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.5s", "backoffMultiplier": 2, "maxBackoff": "2s",
                    "retryableStatusCodes": ["UNAVAILABLE"]},
}]}

# A response is one contiguous field of megabytes. Frames of 256 KiB in place of HTTP/2's 16 KiB are the largest single
# lever there is on the server's side: it writes once a frame.
CHANNEL_OPTIONS = (
    ("grpc.http2.max_frame_size", 256 << 10),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    # A server that is back is found by the next attempt: by default the waits between connections grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def _stubs():
    """Imports the stubs of this contract by this version of grpcio-tools; makes them if there are none."""
    sources = sorted(PROTO.rglob("*.proto"))
    digest = hashlib.sha256(importlib.metadata.version("grpcio-tools").encode())
    for source in sources:
        digest.update(source.read_bytes())
    build = HERE / f"build-{digest.hexdigest()[:16]}"
    if not build.is_dir():
        _make_stubs(build)
    if str(build) not in sys.path:
        sys.path.insert(0, str(build))
    module = importlib.import_module
    return {
        f"{name}{suffix}": module(f"ringfetch.v1.{name}{suffix}") for name in PROTO_FILES for suffix in ("_pb2", "_pb2_grpc")
    }


def _make_stubs(build):
    """Makes the directory at once and whole: other processes may be making it, and this one may end in between."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory(prefix="build-", dir=HERE) as scratch:
        made = Path(scratch, "stubs")
        made.mkdir()
        # google/protobuf/any.proto comes with grpcio-tools, the stubs of google/rpc with googleapis-common-protos.
        paths = [f"--proto_path={path}" for path in (PROTO, Path(protoc.__file__).parent / "_proto")]
        arguments = ["protoc", *paths, f"--python_out={made}", f"--grpc_python_out={made}"]
        sources = [str(PROTO / "ringfetch" / "v1" / f"{name}.proto") for name in PROTO_FILES]
        if protoc.main(arguments + sources) != 0:
            raise RuntimeError(f"protoc could not compile {PROTO}: see its messages above")
        try:
            made.rename(build)
        except OSError:
            # Another process was faster.
            if not build.is_dir():
                raise


_made = _stubs()
fetch_pb2 = _made["fetch_pb2"]
dataset_pb2 = _made["dataset_pb2"]

NUMPY_DTYPES = {
    fetch_pb2.DTYPE_F32: np.dtype("<f4"),
    fetch_pb2.DTYPE_F16: np.dtype("<f2"),
    fetch_pb2.DTYPE_U8: np.dtype("u1"),
    fetch_pb2.DTYPE_I8: np.dtype("i1"),
    fetch_pb2.DTYPE_I32: np.dtype("<i4"),
    # NumPy has no bfloat16: `values` holds its bits. `(values.astype("<u4") << 16).view("<f4")` are the numbers.
    fetch_pb2.DTYPE_BF16: np.dtype("<u2"),
    fetch_pb2.DTYPE_F64: np.dtype("<f8"),
}


class Vectors(NamedTuple):
    """An answered batch of vectors."""

    values: np.ndarray
    """The vectors that could be read, shape (good items, dim), in request order. A read-only view of the message."""
    present: np.ndarray
    """One bool an item of the request: whether it is in `values`."""
    errors: list
    """The items that are not, as (item, grpc.StatusCode number, message)."""
    etag: str
    """The version of the dataset: `if_match` of a later call, which then reads this version or fails."""


class Ranking(NamedTuple):
    """The best candidates of one query."""

    ids: np.ndarray
    """Best first; those with equal scores by id."""
    scores: np.ndarray
    """The score of each, as float64."""
    unscored: int
    """Candidates left out because their score is not a finite number."""
    errors: list
    """Candidates that could not be read, as (position in the query's ids, grpc.StatusCode number, message)."""


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Sends a token with every call. gRPC's own call credentials refuse to without TLS, also on loopback."""

    def __init__(self, token: str):
        self.header = ("authorization", f"Bearer {token}")

    def _with_token(self, proceed, details, request):
        return proceed(details._replace(metadata=[*(details.metadata or ()), self.header]), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _with_token


def _is_loopback(address: str) -> bool:
    """Whether HOST:PORT is of this host alone."""
    host = (address.rpartition(":")[0] or address).strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Client:
    """One channel to one daemon. Use it as a context manager, or call `close`.

    `token` is sent with every call. `ca` is the PEM (bytes) of the authorities that the server's certificate is checked
    against, and `own` the pair (key, certificates) of the client's; with either, or with `tls`, the channel uses TLS. Without
    `ca` the authorities are gRPC's own list of public ones. Raises ValueError for a token that would leave the host in plaintext.
    """

    def __init__(self, address: str, token: str = "", ca: bytes | None = None, own: tuple[bytes, bytes] = (None, None),
                 tls: bool = False):
        tls = tls or ca is not None or own != (None, None)
        if token and not tls and not _is_loopback(address):
            raise ValueError(f"{address}: a token needs TLS, except to a loopback address: use ca=..., or tls=True")
        if not tls:
            # A proxy of the environment would get the token, for loopback addresses, too.
            self.channel = grpc.insecure_channel(address, options=(*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)))
        else:
            credentials = grpc.ssl_channel_credentials(ca, *own)
            self.channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._connected = self.channel
        if token:
            self.channel = grpc.intercept_channel(self.channel, _Bearer(token))
        self.fetch = _made["fetch_pb2_grpc"].FetchServiceStub(self.channel)
        self.datasets = _made["dataset_pb2_grpc"].DatasetServiceStub(self.channel)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Closes the channel."""
        self.channel.close()

    def wait_until_ready(self, timeout_s: float = 30.0):
        """Returns when the channel is connected; raises grpc.FutureTimeoutError after `timeout_s`."""
        grpc.channel_ready_future(self._connected).result(timeout=timeout_s)

    def fetch_vectors(self, dataset: str, ids, timeout_s: float = 30.0, if_match: str = "") -> Vectors:
        """Fetches vectors by id, of the version `if_match` if it is given. Raises grpc.RpcError for what fails the call, and
        ValueError for an answer that does not fit, as the other methods do."""
        request = fetch_pb2.FetchVectorsRequest(dataset=dataset, ids=ids, if_match=if_match)
        answer = vectors(self.fetch.FetchVectors(request, timeout=timeout_s), len(request.ids))
        # A server that does not know `if_match` ignores it.
        _check(if_match in ("", answer.etag), f"version {answer.etag!r}, where {if_match!r} was asked for")
        return answer

    def score_vectors(self, dataset: str, queries, metric: str, limit: int, threshold=None, timeout_s: float = 30.0) -> list:
        """Ranks candidates by dot, cosine, euclidean or manhattan: a `Ranking` for each of `queries`, which are pairs of a
        vector (float32) and candidate ids. The vectors stay with the daemon."""
        request = fetch_pb2.ScoreVectorsRequest(
            dataset=dataset, metric=f"METRIC_{metric.upper()}", limit=limit, threshold=threshold,
            queries=[fetch_pb2.ScoreQuery(vector=vector, ids=ids) for vector, ids in queries])
        results = self.fetch.ScoreVectors(request, timeout=timeout_s).results
        _check(len(results) == len(request.queries), f"{len(results)} results for {len(request.queries)} queries")
        for result in results:
            _check(len(result.ids) == len(result.scores) <= limit, f"{len(result.ids)} ids with {len(result.scores)} scores")
        return [Ranking(np.array(result.ids, dtype=np.uint64), np.array(result.scores), result.unscored, errors(result))
                for result in results]

    def fetch_blocks(self, dataset: str, indices, timeout_s: float = 30.0):
        """Fetches blocks by index: (blocks as an array of shape (good items, block bytes), errors)."""
        request = fetch_pb2.FetchBlocksRequest(dataset=dataset, indices=indices)
        response = self.fetch.FetchBlocks(request, timeout=timeout_s)
        return _rows(response, len(request.indices), np.dtype("u1"), response.block_bytes), errors(response)


def errors(response):
    """The failed items of any fetch response, as (item, code, message)."""
    return [(error.item, error.code, error.message) for error in response.errors]


def _check(holds: bool, problem: str):
    if not holds:
        raise ValueError(f"the answer breaks the contract: {problem}")


def _rows(response, items: int, dtype: np.dtype, width: int) -> np.ndarray:
    """The good items as rows. With more or fewer of them than there are ids without an error, a row would be another id's."""
    failed = {error.item for error in response.errors}
    _check(len(failed) == len(response.errors) and all(item < items for item in failed), f"errors of {sorted(failed)} of {items} items")
    good, row_bytes = items - len(failed), width * dtype.itemsize
    _check(row_bytes > 0 and len(response.data) == good * row_bytes, f"{len(response.data)} bytes for {good} items of {row_bytes}")
    # frombuffer and reshape make views: the bytes that protobuf decoded are the array's memory.
    return np.frombuffer(response.data, dtype=dtype).reshape(good, width)


def vectors(response, items: int) -> Vectors:
    """A FetchVectorsResponse as arrays. Items that failed have no bytes in `data`, so the rows are the good ones."""
    _check(response.dtype in NUMPY_DTYPES, f"unknown dtype {response.dtype}")
    values = _rows(response, items, NUMPY_DTYPES[response.dtype], response.dim)
    present = np.ones(items, dtype=bool)
    present[[error.item for error in response.errors]] = False
    return Vectors(values, present, errors(response), response.etag)
