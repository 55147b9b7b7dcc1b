"""The requests of a soak's clients, over both transports, and the check of the answers."""

import collections
import http.client
import json
import random
import ssl
import threading
import time

from soak_wire import INVALID, MESSAGES, Broken, Connection, Late

DEADLINE_S = 3.0
# An answer this long after its deadline is late: clients, daemon and everything else share two CPUs.
MARGIN_S = 3.0
ITEMS_MAX = 24
RANGE_BYTES_MAX = 40_000
# Per kind: how many are listed in the report, and how many printed as they happen.
VIOLATIONS_KEPT, VIOLATIONS_TOLD = 1000, 5
FETCH = "/ringfetch.v1.FetchService/"
GRPC_CODES = {1: "CANCELLED", 2: "UNKNOWN", 3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 5: "NOT_FOUND", 7: "PERMISSION_DENIED",
              8: "RESOURCE_EXHAUSTED", 9: "FAILED_PRECONDITION", 10: "ABORTED", 11: "OUT_OF_RANGE", 12: "UNIMPLEMENTED",
              13: "INTERNAL", 14: "UNAVAILABLE", 15: "DATA_LOSS", 16: "UNAUTHENTICATED"}
# Last segment of the problem's type, and gRPC's code for the same cause.
PROBLEMS = {"index-out-of-range": "OUT_OF_RANGE", "range-out-of-range": "OUT_OF_RANGE", "truncated": "DATA_LOSS",
            "device-error": "DATA_LOSS", "object-not-found": "NOT_FOUND", "dataset-not-found": "NOT_FOUND",
            "overloaded": "RESOURCE_EXHAUSTED", "deadline-exceeded": "DEADLINE_EXCEEDED", "draining": "UNAVAILABLE",
            "out-of-files": "UNAVAILABLE", "revoked": "UNAVAILABLE", "engine-failed": "INTERNAL", "object-unreadable": "INTERNAL",
            "precondition-failed": "FAILED_PRECONDITION", "changing": "ABORTED", "unauthenticated": "UNAUTHENTICATED",
            "forbidden": "PERMISSION_DENIED", "unreadable": "UNAVAILABLE"}

# `how`: blocks, vectors, ranges, objects, score, whole. `items`: indices, (offset, length), names. `condition`: None, or
# (If-Match or If-None-Match, an ETag, the version that it belongs to).
Ask = collections.namedtuple("Ask", "dataset how items condition", defaults=(None,))
# `code`: OK or the call's; `items`: for each its bytes or its code (a str); `etag`: the dataset's.
Answer = collections.namedtuple("Answer", "code items etag text", defaults=([], "", ""))


class Malformed(Exception):
    """An answer that breaks the contract."""


def choose(chance, dataset):
    """A random request for a dataset. A few reach past its end."""
    count = chance.randint(1, ITEMS_MAX)
    if dataset.kind == "objects":
        names = list(dataset.objects)
        if chance.random() < 0.3:
            return Ask(dataset, "whole", [chance.choice(names)])
        small = [name for name in names if dataset.lengths[name] <= 70_001]
        return Ask(dataset, "objects", chance.choices(small, k=min(count, 8)))
    if chance.random() < 0.3:
        def one():
            offset, length = chance.randrange(dataset.length - 1), chance.randint(1, RANGE_BYTES_MAX)
            return offset, min(length, dataset.length - offset)
        return Ask(dataset, "ranges", [one() for _ in range(min(count, 8))])
    beyond = 1 if chance.random() < 0.03 else 0
    if chance.random() < 0.3:
        # Adjacent items, which are merged.
        first = chance.randrange(max(dataset.count - count, 1))
        items = list(range(first, first + count))
    else:
        items = [chance.randrange(dataset.count) for _ in range(count)]
    items += [dataset.count + chance.randrange(3)] * beyond
    if dataset.name == "u8bin" and chance.random() < 0.3:
        return Ask(dataset, "score", items[:12])
    return Ask(dataset, dataset.kind, items)


def cut(data, count, lengths, uniform, errors):
    """The items of a batch: each its bytes or its code."""
    lengths = lengths or [uniform] * count
    if len(lengths) != count or sum(lengths) != len(data):
        raise Malformed(f"{count} items, {len(lengths)} lengths of {sum(lengths)} bytes, {len(data)} bytes of data")
    found, at = [], 0
    for item, length in enumerate(lengths):
        if item in errors and length:
            raise Malformed(f"item {item} has an error and {length} bytes")
        found.append(errors.get(item, data[at:at + length]))
        at += length
    return found


METHODS = {"blocks": "FetchBlocks", "vectors": "FetchVectors", "ranges": "FetchRanges", "objects": "FetchObjects",
           "score": "ScoreVectors", "whole": "ReadObject"}
# Fields of FetchStream's request and response.
STREAMED = {"blocks": "blocks", "vectors": "vectors", "ranges": "ranges", "objects": "objects", "score": "scores"}


def _request(ask):
    fields = {"blocks": lambda: {"indices": ask.items}, "vectors": lambda: {"ids": ask.items}, "objects": lambda: {"names": ask.items},
              "ranges": lambda: {"offsets": [offset for offset, _ in ask.items], "lengths": [length for _, length in ask.items]},
              "score": lambda: {"queries": [{"vector": query(ask.dataset), "ids": ask.items}], "metric": "METRIC_DOT", "limit": len(ask.items)},
              "whole": lambda: {"name": ask.items[0]}}[ask.how]()
    return MESSAGES[METHODS[ask.how] + "Request"](dataset=ask.dataset.name, **fields)


class ItemCode(str):
    """The code of a failed item; `text` is the message."""

    text = ""


def _errors(errors):
    found = {}
    for error in errors:
        found[error.item] = item = ItemCode(GRPC_CODES.get(error.code, f"code {error.code}"))
        item.text = error.message
    return found


def _answer(ask, response):
    if ask.how == "score":
        [result] = response.results
        return Answer("OK", [list(zip(result.ids, result.scores, strict=True)), _errors(result.errors)], response.etag)
    uniform = ask.dataset.item_bytes if ask.how in ("blocks", "vectors") else 0
    # Each object has its own version.
    etag = "" if ask.how == "objects" else response.etag
    return Answer("OK", cut(response.data, len(ask.items), response.lengths, uniform, _errors(response.errors)), etag)


class GrpcClient:
    """One HTTP/2 connection with one call after the other; with `pipelined`, through one FetchStream."""

    transport = "grpc"

    def __init__(self, daemon, by_certificate, pipelined=False):
        self.principals, self.credential = daemon.principals, daemon.credential(by_certificate)
        context = daemon.client_context("h2", credential=self.credential)
        self.connection = Connection(daemon.addresses["grpc"], context, token=self.credential.token)
        self.made, self.pipelined, self.stream, self.next = self.connection.made, pipelined, None, 0

    def close(self):
        self.connection.close()

    def usable(self):
        # A stream keeps the token that it started with, a connection its certificate.
        return not self.connection.going and self.principals.is_current(self.credential)

    def ask(self, ask):
        wait_s = DEADLINE_S + MARGIN_S
        status, text, messages = self.connection.call(FETCH + METHODS[ask.how], _request(ask), DEADLINE_S, wait_s)
        if ask.how == "whole" and messages:
            return self._whole(status, text, messages)
        if status:
            return Answer(GRPC_CODES.get(status, str(status)), text=text)
        if len(messages) != 1:
            raise Malformed(f"{len(messages)} messages")
        return _answer(ask, messages[0])

    @staticmethod
    def _whole(status, text, messages):
        data = b""
        for message in messages:
            if message.offset != len(data):
                raise Malformed(f"offset {message.offset} after {len(data)} bytes")
            data += message.data
        if status:
            return Answer(GRPC_CODES.get(status, str(status)), [data], text=text)
        if messages[0].object_length_bytes != len(data):
            raise Malformed(f"an object of {messages[0].object_length_bytes} bytes brought {len(data)}")
        return Answer("OK", [data])

    def ask_all(self, asks):
        """Sends several requests on the stream at once; returns their answers in the order of `asks`."""
        connection, until = self.connection, time.monotonic() + DEADLINE_S + MARGIN_S
        if self.stream is None:
            self.stream = connection.start(FETCH + "FetchStream", more=True)
        waiting = {}
        for ask in asks:
            self.next += 1
            waiting[self.next] = ask
            connection.send(self.stream, MESSAGES["FetchStreamRequest"](
                id=self.next, deadline_ms=int(DEADLINE_S * 1000), **{STREAMED[ask.how]: _request(ask)}))
        call, found = connection.calls[self.stream], {}
        while len(found) < len(asks):
            if call.ended:
                raise call.broken()
            connection.pump(until)
            for message in call.messages():
                ask, kind = waiting.get(message.id), message.WhichOneof("response")
                if ask is None or message.id in found:
                    raise Malformed(f"an answer to {message.id}, which nobody waits for")
                if kind == "status":
                    found[message.id] = Answer(GRPC_CODES.get(message.status.code, str(message.status.code)), text=message.status.message)
                elif kind == STREAMED[ask.how]:
                    found[message.id] = _answer(ask, getattr(message, kind))
                else:
                    raise Malformed(f"{kind} to a request for {ask.how}")
        return [found[number] for number in waiting]


class HttpClient:
    """One HTTP/1.1 connection."""

    transport = "http"

    def __init__(self, daemon, by_certificate):
        self.open, self.principals, self.credential = True, daemon.principals, daemon.credential(by_certificate)
        self.connection = daemon.http_connection(self.credential, DEADLINE_S + MARGIN_S)
        self.made = time.monotonic()
        self.connection.connect()

    def close(self):
        self.connection.close()

    def usable(self):
        return self.open and self.principals.is_current(self.credential)

    def _exchange(self, method, path, body=None, headers=()):
        try:
            self.connection.request(method, path, body, {**dict(headers), **self.credential.headers()})
            response = self.connection.getresponse()
            data = response.read()
        except TimeoutError:
            raise Late from None
        except http.client.IncompleteRead as error:
            raise Broken(f"a short body: {len(error.partial)} bytes") from None
        except (OSError, http.client.HTTPException) as error:
            raise Broken(f"{type(error).__name__}: {error}") from None
        self.open = not response.will_close
        return response, data

    def ask(self, ask):
        base = f"/v1/datasets/{ask.dataset.name}"
        if ask.how == "score":
            query_items = [{"vector": query(ask.dataset), "ids": ask.items}]
            body = {"queries": query_items, "metric": "dot", "limit": len(ask.items)}
            return self._batch(ask, f"{base}/vectors:score", body)
        path, headers = single(ask), {}
        if path:
            if ask.how == "ranges":
                offset, length = ask.items[0]
                headers["Range"] = f"bytes={offset}-{offset + length - 1}"
            if ask.condition:
                headers[ask.condition[0]] = ask.condition[1]
            return self._one("GET", base + path, headers)
        body = {"blocks": lambda: {"indices": ask.items}, "vectors": lambda: {"ids": ask.items},
                "ranges": lambda: {"ranges": [{"offset": offset, "length": length} for offset, length in ask.items]},
                "objects": lambda: {"objects": [{"name": name} for name in ask.items]}}[ask.how]()
        return self._batch(ask, f"{base}/{ask.how}:batchFetch", body)

    @staticmethod
    def _problem(response, data):
        try:
            problem = json.loads(data)
            slug, text = problem["type"].rpartition("/")[2], problem.get("detail", "")
        except (ValueError, KeyError):
            raise Malformed(f"HTTP {response.status} with {bytes(data[:200])!r}") from None
        return Answer(PROBLEMS.get(slug, slug), text=text)

    def _one(self, method, path, headers=()):
        response, data = self._exchange(method, path, headers=headers)
        if response.status == 304:
            if data:
                raise Malformed(f"{len(data)} bytes with 304")
            return Answer("NOT_MODIFIED", etag=response.headers.get("ETag", ""))
        if response.status not in (200, 206):
            answer = self._problem(response, data)
            # For a single item, the item's error is the call's.
            return Answer("OK", [answer.code], text=answer.text)
        return Answer("OK", [data], response.headers.get("ETag", ""))

    def _batch(self, ask, path, body):
        response, data = self._exchange("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        if response.status != 200:
            return self._problem(response, data)
        if ask.how == "score":
            result = json.loads(data)["results"][0]
            errors = {error["item"]: PROBLEMS.get(error["code"], error["code"]) for error in result["errors"]}
            return Answer("OK", [list(zip(result["ids"], result["scores"], strict=True)), errors])

        def listed(name):
            return [int(text) for text in response.headers.get(name, "").split(",") if text]

        # The octet format names the failed items but not the reasons.
        errors = dict.fromkeys(listed("Ringfetch-Error-Items"), "ANY")
        lengths, each = listed("Ringfetch-Lengths"), listed("Ringfetch-Item-Bytes")
        if not lengths:
            lengths = [0 if item in errors or not each else each[0] for item in range(len(ask.items))]
        return Answer("OK", cut(data, len(ask.items), lengths, None, errors))


def single(ask):
    """The path below the dataset of a single resource; otherwise None."""
    if ask.how == "whole":
        return f"/objects/{ask.items[0]}"
    if len(ask.items) != 1:
        return None
    return {"ranges": "/bytes", "blocks": f"/blocks/{ask.items[0]}", "vectors": f"/vectors/{ask.items[0]}"}.get(ask.how)


def resource(ask):
    """What an ETag refers to: the dataset, the kind, and which resource; all ranges of a dataset share one."""
    return (ask.dataset.name, ask.how, None if ask.how == "ranges" else ask.items[0])


def query(dataset):
    return [float(place % 7) for place in range(dataset.dim)]


# A judgement: `wrong` bytes, `unexplained` errors, or errors `explained` by a fault.
Verdict = collections.namedtuple("Verdict", "kind what")


class Judge:
    """Checks answers against the data and the current faults, and counts."""

    def __init__(self, faults, note=lambda kind, what: None):
        self.faults, self.note, self.lock = faults, note, threading.Lock()
        self.violations, self.counts, self.explained = [], collections.Counter(), collections.Counter()
        # Items received, by dataset, from calls since the daemon's last start.
        self.items, self.life_began = collections.Counter(), 0.0
        # By resource: the versions of its ETags, over all restarts. The most recent ETags of each kind of a dataset.
        self.versions = collections.defaultdict(dict)
        self.known = collections.defaultdict(lambda: collections.deque(maxlen=64))

    def conditional(self, chance, ask):
        """The request, or one for a resource of the same kind with a known ETag, with a condition."""
        if not single(ask) or chance.random() < 0.5:
            return ask
        with self.lock:
            known = self.known[ask.dataset.name, ask.how]
            if not known:
                return ask
            # Mostly one of the most recent.
            one, etag = known[-1] if chance.random() < 0.5 else chance.choice(known)
            version = self.versions[one][etag]
        items = ask.items if one[2] is None else [one[2]]
        return ask._replace(items=items, condition=(chance.choice(["If-Match", "If-None-Match"]), etag, version))

    def new_life(self):
        """Called while no daemon runs: answers still to be judged came from the previous one."""
        with self.lock:
            self.items.clear()
            self.life_began = time.monotonic()

    def violation(self, kind, what):
        with self.lock:
            self.counts[kind] += 1
            # A defect that fails every call needs only its first lines.
            if self.counts[kind] <= VIOLATIONS_KEPT:
                self.violations.append((time.monotonic(), kind, what))
                if self.counts[kind] <= VIOLATIONS_TOLD:
                    self.note(kind, what)

    def error(self, where, dataset, codes, begun, ended, detail):
        """Records an error as explained by a fault, or as a violation."""
        fault = self.faults.explains(dataset.name, frozenset(codes), begun, ended)
        with self.lock:
            if fault:
                self.explained[fault] += 1
        if not fault:
            self.violation("unexplained error", f"{where} {dataset.name}: {'/'.join(sorted(codes))}: {detail[:300]}")

    def answer(self, where, ask, answer, begun, ended, by="token"):
        dataset = ask.dataset
        with self.lock:
            self.counts.update(("calls", f"calls by {by}"))
        if ended - begun > DEADLINE_S + MARGIN_S:
            self.error(where, dataset, {"LATE"}, begun, ended, f"{ask.how} took {ended - begun:.1f} s")
        if ask.condition and self._is_by_condition(where, ask, answer, begun, ended):
            return
        if answer.code != "OK":
            possible = dataset.possible(ask.items[0], begun, ended) if ask.how == "whole" else []
            # What came of an object before the error.
            for found in answer.items:
                if not any(version is not None and dataset.object(ask.items[0], version).startswith(found) for version in possible):
                    self.violation("wrong bytes", f"{where} {dataset.name} {ask.items[0]}: {len(found)} bytes before {answer.code}")
            if not (answer.code == "NOT_FOUND" and None in possible):
                self.error(where, dataset, {answer.code}, begun, ended, f"{ask.how}: {answer.text}")
            return
        if ask.how == "score":
            self._scores(where, ask, answer, begun, ended)
        elif dataset.kind == "objects":
            self._objects(where, ask, answer, begun, ended)
        else:
            self._items(where, ask, answer, begun, ended)

    def _is_by_condition(self, where, ask, answer, begun, ended):
        """Whether this is the answer to a condition, which must be true of a version of that time."""
        header, etag, version = ask.condition
        possible = (ask.dataset.possible(ask.items[0], begun, ended) if ask.dataset.kind == "objects"
                    else ask.dataset.history.between(begun, ended))
        told = f"{where} {ask.dataset.name} {ask.how} {header}: {etag} (version {version}; possible: {possible}): {answer.code} {answer.etag}"
        if answer.code == "NOT_MODIFIED":
            if header != "If-None-Match" or version not in possible or answer.etag != etag:
                self.violation("condition", told)
            return True
        if answer.items == ["FAILED_PRECONDITION"] and header == "If-Match":
            if set(possible) == {version}:
                self.violation("condition", told)
            return True
        is_served = answer.code == "OK" and not isinstance(answer.items[0], str)
        if is_served and (answer.etag == etag) != (header == "If-Match"):
            self.violation("condition", told)
        return False

    def _learn(self, where, ask, etag, versions):
        """Records that an ETag came with the bytes of one of these versions. Over HTTP it is quoted, and of a resource; over gRPC it
        is the dataset's."""
        of_resource = etag.startswith('"')
        if not etag or (of_resource and not single(ask)):
            return
        of = resource(ask) if of_resource else ask.dataset.name
        with self.lock:
            known = self.versions[of]
            before = known.get(etag)
            if before is None and len(versions) == 1:
                known[etag] = versions[0]
                if of_resource:
                    self.known[ask.dataset.name, ask.how].append((of, etag))
        if before is not None and before not in versions:
            self.violation("condition", f"{where} {of}: {etag} of version {before} came with {versions}")

    def _good(self, dataset, count, length, begun, has_read=True):
        with self.lock:
            self.items[dataset.name] += count if has_read and begun > self.life_began else 0
            self.counts["items"] += count
            self.counts["bytes"] += length

    def _item_error(self, where, ask, place, code, begun, ended, text):
        """Whether the item's error is right without a fault: past the end, or where the file is truncated."""
        dataset, item = ask.dataset, ask.items[place]
        if ask.how in ("blocks", "vectors", "score") and item >= dataset.count:
            if code not in ("OUT_OF_RANGE", "ANY"):
                self.violation("unexplained error", f"{where} {dataset.name}: {code} for item {item}, past the end")
            return
        offset, length = item if ask.how == "ranges" else dataset.place(item)
        is_cut = begun <= dataset.cut_until and offset + length > dataset.cut_at
        codes = ({"DATA_LOSS", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"} if code == "ANY" else {code})
        if "DATA_LOSS" in codes and is_cut:
            with self.lock:
                self.explained["truncate", "DATA_LOSS"] += 1
            return
        self.error(where, dataset, codes, begun, ended, f"{ask.how} {item}: {text}")

    def _items(self, where, ask, answer, begun, ended):
        dataset = ask.dataset
        candidates, good, length = dataset.history.between(begun, ended), 0, 0
        for place, (item, found) in enumerate(zip(ask.items, answer.items, strict=True)):
            if isinstance(found, str):
                self._item_error(where, ask, place, found, begun, ended, getattr(found, "text", answer.text))
                continue
            if ask.how != "ranges" and item >= dataset.count:
                self.violation("wrong bytes", f"{where} {dataset.name}: {len(found)} bytes for item {item}, past the end")
                continue

            def expected(version, item=item):
                return dataset.range(version, *item) if ask.how == "ranges" else dataset.items(version, item, 1)

            fitting = [version for version in candidates if expected(version) == found]
            if not fitting:
                self.violation("wrong bytes", f"{where} {dataset.name} {ask.how} {item}: " + difference(
                    found, expected(candidates[0]), {version: expected(version) for version in range(dataset.history.newest + 1)},
                    candidates))
                continue
            candidates, good, length = fitting, good + 1, length + len(found)
        if good:
            self._learn(where, ask, answer.etag, candidates)
        self._good(dataset, good, length, begun)

    def _objects(self, where, ask, answer, begun, ended):
        dataset, good, length = ask.dataset, 0, 0
        for name, found in zip(ask.items, answer.items, strict=True):
            possible = dataset.possible(name, begun, ended)
            if isinstance(found, str):
                if not (found in ("NOT_FOUND", "ANY") and None in possible):
                    codes = {"DATA_LOSS", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL"} if found == "ANY" else {found}
                    self.error(where, dataset, codes, begun, ended, f"{ask.how} {name}: {getattr(found, 'text', answer.text)}")
                continue
            fitting = [version for version in possible if version is not None and dataset.object(name, version) == found]
            if fitting:
                self._learn(where, ask, answer.etag, fitting)
                good, length = good + 1, length + len(found)
                continue
            every = {version: dataset.object(name, version) for version in range(dataset.objects[name].newest + 1)}
            self.violation("wrong bytes", f"{where} {dataset.name} {ask.how} {name}: " + difference(
                found, every[0], every, possible))
        # An empty object that is read whole needs no read.
        self._good(dataset, good, length, begun, has_read=ask.how != "whole")

    def _scores(self, where, ask, answer, begun, ended):
        dataset, (ranked, errors) = ask.dataset, answer.items
        for place, code in errors.items():
            self._item_error(where, ask, place, code, begun, ended, answer.text)
        weights = query(dataset)
        ids = {item for place, item in enumerate(ask.items) if place not in errors}
        for version in dataset.history.between(begun, ended):
            scored = [(item, sum(w * x for w, x in zip(weights, dataset.items(version, item, 1), strict=True)))
                      for item in ids if item < dataset.count]
            if sorted(scored, key=lambda one: (-one[1], one[0])) == ranked:
                self._good(dataset, len(ids), 0, begun)
                return
        self.violation("wrong bytes", f"{where} {dataset.name}: scores {ranked[:3]}... of {ask.items}")


def difference(found, expected, every, possible):
    """What is wrong with the bytes."""
    for version, data in every.items():
        if data == found:
            return f"version {version}, where {possible} were possible"
    if len(found) != len(expected):
        return f"{len(found)} bytes instead of {len(expected)} (possible: {possible})"
    at = next((place for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)) if ours != theirs), 0)
    return f"differs from byte {at} of {len(expected)} on: {found[at:at + 16].hex()}, {found.count(0)} zeros (possible: {possible})"


class Worker(threading.Thread):
    """Requests one kind of dataset over one kind of connection, until the soak ends; disconnects while it pauses."""

    def __init__(self, soak, name, client, datasets, pause_s, calls_a_connection=None, by_certificate=False):
        super().__init__(name=name, daemon=True)
        self.soak, self.client_kind, self.datasets, self.pause_s = soak, client, datasets, pause_s
        self.calls_a_connection, self.by_certificate = calls_a_connection, by_certificate
        self.chance = random.Random(f"{soak.options.seed}/{name}")
        self.client, self.idle = None, threading.Event()

    def run(self):
        while not self.soak.ended.is_set():
            if self.soak.paused.is_set():
                self._drop()
                self.idle.set()
                self.soak.ended.wait(0.05)
                continue
            self.idle.clear()
            try:
                self._once()
            except Exception as error:  # A defect of the soak must not look like silence.
                self.soak.judge.violation("defect of the soak", f"{self.name}: {type(error).__name__}: {error}")
                self._drop()
                self.soak.ended.wait(0.5)
            self.soak.ended.wait(self.pause_s * self.chance.uniform(0.2, 1.8))
        self._drop()
        self.idle.set()

    def _drop(self):
        if self.client:
            self.client.close()
            self.client = None

    def _once(self):
        judge, dataset = self.soak.judge, self.soak.datasets[self.chance.choice(self.datasets)]
        batch = self.chance.randint(2, 12) if self.client_kind == "stream" else 1
        asks = [choose(self.chance, self.soak.datasets[self.chance.choice(self.datasets)]) for _ in range(batch)]
        asks = [ask for ask in asks if batch == 1 or ask.how in STREAMED] or [Ask(dataset, "ranges", [(0, 1)])]
        if self.client_kind == "http":
            asks = [judge.conditional(self.chance, ask) for ask in asks]
        if self.client and not self.client.usable():
            self._drop()
        if self.client is None:
            begun, self.calls = time.monotonic(), 0
            try:
                self.client = (HttpClient(self.soak.daemon, self.by_certificate) if self.client_kind == "http"
                               else GrpcClient(self.soak.daemon, self.by_certificate, self.client_kind == "stream"))
            except (OSError, ssl.SSLError) as error:
                judge.error(self.name, asks[0].dataset, {"CONNECT"}, begun, time.monotonic(), f"{type(error).__name__}: {error}")
                self.soak.ended.wait(0.05)
                return
        begun = time.monotonic()
        try:
            answers = self.client.ask_all(asks) if self.client_kind == "stream" else [self.client.ask(asks[0])]
        except Broken as error:
            # The connection may have been broken before the call.
            judge.error(self.name, asks[0].dataset, {"BROKEN"}, self.client.made, time.monotonic(), f"{asks[0].how}: {error}")
            self._drop()
            return
        except Late:
            # A new connection may wait to be accepted; one that was served before may not.
            judge.error(self.name, asks[0].dataset, {"HANG"} if self.calls else {"HANG", "HANG-NEW"}, begun, time.monotonic(),
                        f"no answer to {asks[0].how} within {DEADLINE_S + MARGIN_S} s")
            self._drop()
            return
        except (Malformed, ValueError, KeyError, *INVALID) as error:
            judge.violation("malformed answer", f"{self.name} {asks[0]}: {type(error).__name__}: {error}")
            self._drop()
            return
        ended = time.monotonic()
        for ask, answer in zip(asks, answers, strict=True):
            judge.answer(self.name, ask, answer, begun, ended, self.client.credential.kind)
        self.calls += 1
        if not self.client.usable() or (self.calls_a_connection and self.calls >= self.calls_a_connection):
            self._drop()
