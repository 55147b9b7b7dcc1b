"""Conclusions of the soak's parts, without running a daemon: python3 -m unittest discover bench"""

import collections
import contextlib
import io
import os
import pathlib
import random
import re
import shutil
import socket
import ssl
import sys
import tempfile
import threading
import time
import types
import unittest
import unittest.mock
import xml.dom.minidom

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import soak
import soak_access
import soak_daemon
import soak_data
import soak_faults
import soak_load
import soak_report
import soak_wire
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import PingAckReceived, StreamEnded
from hyperframe.frame import DataFrame, GoAwayFrame, PingFrame, RstStreamFrame
from processes import run
from soak_load import Answer, Ask, Judge

EVERY = sorted(soak_faults.FAULTS)


class Wire(unittest.TestCase):
    def called(self, answer, wait_s=10):
        """What a call returns, or its exception's name; whether the connection is going; the answers to its server's pings. The server
        sends what `answer` returns, or hangs up for None."""
        http2, pings = H2Connection(H2Configuration(client_side=False)), []
        http2.initiate_connection()

        def serve():
            peer, _ = server.accept()
            with peer, contextlib.suppress(ConnectionResetError):
                while data := peer.recv(4096):
                    for event in http2.receive_data(data):
                        if isinstance(event, PingAckReceived):
                            pings.append(event.ping_data)
                        if isinstance(event, StreamEnded):
                            sent = answer(http2)
                            if sent is None:
                                return
                            peer.sendall(sent)

        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=serve)
            thread.start()
            connection = soak_wire.Connection(server.getsockname())
            try:
                returned = connection.call("/ringfetch.v1.FetchService/FetchBlocks", soak_wire.MESSAGES["FetchBlocksRequest"](), 1, wait_s)
            except (soak_wire.Broken, soak_wire.Late, *soak_wire.INVALID) as error:
                returned = type(error).__name__
            connection.close()
            thread.join()
        return returned, connection.going, pings

    @staticmethod
    def response(http2, *messages):
        http2.send_headers(1, [(":status", "200")])
        for message in messages:
            data = message.SerializeToString()
            # In parts.
            http2.send_data(1, b"\0" + len(data).to_bytes(4, "big"))
            http2.send_data(1, data)
        http2.send_headers(1, [("grpc-status", "0"), ("grpc-message", "good")], end_stream=True)
        return http2.data_to_send()

    def test_a_call_ends_late_broken_or_with_its_status(self):
        messages = [soak_wire.MESSAGES["FetchBlocksResponse"](block_bytes=8, data=b"x" * length) for length in (0, 1, 20_000)]

        def failed(http2):
            http2.send_headers(1, [(":status", "200"), ("grpc-status", "5")], end_stream=True)
            return http2.data_to_send()

        reset, headless = RstStreamFrame(1, error_code=8).serialize(), DataFrame(1, flags=["END_STREAM"]).serialize()
        for expected, answer in (("Late", lambda http2: b""), ("Broken", lambda http2: None), ("Broken", lambda http2: reset),
                                 ((5, "", []), failed), ((0, "good", messages), lambda http2: self.response(http2, *messages)),
                                 ("ProtocolError", lambda http2: headless)):
            returned, going, _ = self.called(answer, 0.2 if expected == "Late" else 10)
            self.assertEqual((returned, going), (expected, False))

    def test_after_goaway_only_the_calls_that_it_names_go_on(self):
        ping = PingFrame(0, opaque_data=b"draining").serialize()
        for last, expected in ((1, (0, "good", [])), (2**31 - 1, (0, "good", [])), (0, "Broken")):
            goaway = GoAwayFrame(0, last_stream_id=last).serialize()
            returned, going, pings = self.called(lambda http2, goaway=goaway, last=last: goaway + ping + (self.response(http2) if last else b""))
            self.assertEqual((returned, going, pings), (expected, True, [b"draining"]))


class Data(unittest.TestCase):
    def test_files_hold_what_the_formula_says(self):
        # Every kind: any range of the file is what `range` says, any item what `items` says.
        with tempfile.TemporaryDirectory() as directory:
            chance = random.Random(1)
            for dataset in soak_data.datasets(3, directory, directory, small=True).values():
                if dataset.kind == "objects":
                    name = next(name for name, length in dataset.lengths.items() if length == 20_000)
                    dataset.write(name, 2)
                    path = pathlib.Path(dataset.directory, name)
                    self.assertEqual(path.read_bytes(), dataset.object(name, 2))
                    self.assertEqual(len(path.read_bytes()), 20_074)
                    continue
                if dataset.name == "ballast":
                    continue
                dataset.write(1)
                whole = b"".join(pathlib.Path(path).read_bytes() for path in dataset.paths)
                self.assertEqual(len(whole), dataset.length)
                for _ in range(20):
                    offset = chance.choice([0, chance.randrange(dataset.length)])
                    length = min(chance.randint(1, 9000), dataset.length - offset)
                    self.assertEqual(whole[offset:offset + length], dataset.range(1, offset, length), dataset.name)
                    item = chance.randrange(dataset.count)
                    at, length = dataset.place(item)
                    self.assertEqual(whole[at:at + length], dataset.items(1, item, 1), dataset.name)

    def test_versions_overlap_while_they_change_and_not_after(self):
        history = soak_data.History()
        before = time.monotonic()
        with history.change(1):
            during = time.monotonic()
            self.assertEqual(history.between(during, during), [1, 0])
        time.sleep(0.001)
        after = time.monotonic()
        self.assertEqual(history.between(after, after), [1])
        self.assertEqual(history.between(before - 1, before - 0.5), [0])

    def test_a_fault_explains_its_codes_its_datasets_and_its_time(self):
        faults = soak_data.Faults()
        with faults.window("eio", {"DATA_LOSS"}, {"slow"}):
            now = time.monotonic()
            self.assertEqual(faults.explains("slow", {"DATA_LOSS"}, now, now), ("eio", "DATA_LOSS"))
            self.assertIsNone(faults.explains("blocks", {"DATA_LOSS"}, now, now))
            self.assertIsNone(faults.explains("slow", {"INTERNAL"}, now, now))
        later = time.monotonic() + 1
        self.assertIsNone(faults.explains("slow", {"DATA_LOSS"}, later, later))


class Judgement(unittest.TestCase):
    def setUp(self):
        self.judge = Judge(soak_data.Faults())
        self.blocks = soak_data.Dataset(1, "blocks", "/nonexistent", 100)
        self.objects = soak_data.Objects(1, "objects", "/nonexistent", [0, 1, 600])
        self.last = "part-2/object-002"

    def judged(self, ask, answer, took=0.0):
        now = time.monotonic()
        self.judge.answer("test", ask, answer, now - took, now)
        kinds = [kind for _, kind, _ in self.judge.violations]
        self.judge.violations.clear()
        return kinds

    def test_right_bytes_are_counted(self):
        ask = Ask(self.blocks, "blocks", [3, 100, 7])
        good = Answer("OK", [self.blocks.items(0, 3, 1), "OUT_OF_RANGE", self.blocks.items(0, 7, 1)])
        self.assertEqual(self.judged(ask, good), [])
        self.assertEqual(self.judge.counts["items"], 2)

    def test_what_the_daemon_before_answered_is_not_the_next_ones(self):
        ask, answer = Ask(self.blocks, "blocks", [3]), Answer("OK", [self.blocks.items(0, 3, 1)])
        self.judged(ask, answer)
        self.assertEqual((self.judge.items, self.judge.counts["calls by token"]), ({"blocks": 1}, 1))
        self.judge.new_life()
        self.judged(ask, answer, took=1.0)
        self.assertEqual((self.judge.items["blocks"], self.judge.counts["items"]), (0, 2))

    def test_one_wrong_byte_another_place_and_an_old_version_are_wrong(self):
        right = self.blocks.items(0, 3, 1)
        ask = Ask(self.blocks, "blocks", [3])
        for found in (right[:-1] + bytes([right[-1] ^ 1]), self.blocks.items(0, 4, 1), self.blocks.items(1, 3, 1), right[:-1], b""):
            self.assertEqual(self.judged(ask, Answer("OK", [found])), ["wrong bytes"])
        with self.blocks.history.change(1):
            pass
        time.sleep(0.001)
        self.assertEqual(self.judged(ask, Answer("OK", [right])), ["wrong bytes"])

    def test_one_answer_of_two_versions_is_wrong(self):
        ask = Ask(self.blocks, "blocks", [3, 4])
        with self.blocks.history.change(1):
            old, new = (self.blocks.items(version, 3, 2) for version in (0, 1))
            self.assertEqual(self.judged(ask, Answer("OK", [old[:4096], old[4096:]])), [])
            self.assertEqual(self.judged(ask, Answer("OK", [new[:4096], new[4096:]])), [])
            self.assertEqual(self.judged(ask, Answer("OK", [old[:4096], new[4096:]])), ["wrong bytes"])

    def test_an_error_needs_a_fault(self):
        ask = Ask(self.blocks, "blocks", [3])
        for answer in (Answer("UNAVAILABLE"), Answer("OK", ["DATA_LOSS"]), Answer("OK", ["OUT_OF_RANGE"])):
            self.assertEqual(self.judged(ask, answer), ["unexplained error"])
        with self.judge.faults.window("kill", {"UNAVAILABLE"}):
            self.assertEqual(self.judged(ask, Answer("UNAVAILABLE")), [])
        self.assertEqual(self.judge.explained["kill", "UNAVAILABLE"], 1)

    def test_conditions_are_held_against_the_versions_of_their_time(self):
        # Version 0 has the tag "a". Then it is replaced.
        ask, right = Ask(self.blocks, "blocks", [3]), self.blocks.items(0, 3, 1)
        self.assertEqual(self.judged(ask, Answer("OK", [right], '"a"')), [])
        always = types.SimpleNamespace(random=lambda: 0.6, choice=lambda of: of[0])
        match = self.judge.conditional(always, ask)
        self.assertEqual(match.condition, ("If-Match", '"a"', 0))
        none_match = match._replace(condition=("If-None-Match", '"a"', 0))
        failed = Answer("OK", ["FAILED_PRECONDITION"])
        self.assertEqual(self.judged(match, Answer("OK", [right], '"a"')), [])
        self.assertEqual(self.judged(match, failed), ["condition"])
        self.assertEqual(self.judged(none_match, Answer("NOT_MODIFIED", etag='"a"')), [])
        self.assertEqual(self.judged(match, Answer("NOT_MODIFIED", etag='"a"')), ["condition"])
        self.assertEqual(self.judged(none_match, Answer("NOT_MODIFIED", etag='"b"')), ["condition"])
        self.assertEqual(self.judged(none_match, Answer("OK", [right], '"a"')), ["condition"])
        with self.blocks.history.change(1):
            pass
        time.sleep(0.001)
        new = self.blocks.items(1, 3, 1)
        self.assertEqual(self.judged(ask, Answer("OK", [new], '"a"')), ["condition"])
        self.assertEqual(self.judged(match, failed), [])
        self.assertEqual(self.judged(match, Answer("OK", [new], '"b"')), ["condition"])
        self.assertEqual(self.judged(none_match, Answer("OK", [new], '"b"')), [])
        self.assertEqual(self.judged(none_match, Answer("NOT_MODIFIED", etag='"a"')), ["condition"])

    def test_a_late_answer_is_a_violation(self):
        ask = Ask(self.blocks, "blocks", [3])
        answer = Answer("OK", [self.blocks.items(0, 3, 1)])
        self.assertEqual(self.judged(ask, answer, soak_load.DEADLINE_S + soak_load.MARGIN_S + 0.1), ["unexplained error"])

    def test_a_cut_file_explains_what_is_lost_and_no_more(self):
        self.blocks.cut_at, self.blocks.cut_until = 3 * 4096 + 1, float("inf")
        self.assertEqual(self.judged(Ask(self.blocks, "blocks", [3]), Answer("OK", ["DATA_LOSS"])), [])
        self.assertEqual(self.judged(Ask(self.blocks, "blocks", [2]), Answer("OK", ["DATA_LOSS"])), ["unexplained error"])
        self.assertEqual(self.judged(Ask(self.blocks, "ranges", [(3 * 4096, 1)]), Answer("OK", ["DATA_LOSS"])), ["unexplained error"])
        self.assertEqual(self.judged(Ask(self.blocks, "blocks", [3]), Answer("OK", [bytes(4096)])), ["wrong bytes"])

    def test_an_object_may_be_missing_only_where_it_is(self):
        ask = Ask(self.objects, "objects", [self.last])
        self.assertEqual(self.judged(ask, Answer("OK", [self.objects.object(self.last, 0)])), [])
        self.assertEqual(self.judged(ask, Answer("OK", ["NOT_FOUND"])), ["unexplained error"])
        with self.objects.objects[self.last].change(None):
            self.assertEqual(self.judged(ask, Answer("OK", ["NOT_FOUND"])), [])

    def test_what_comes_of_an_object_before_an_error_is_compared(self):
        name, whole = self.last, self.objects.object(self.last, 0)
        with self.judge.faults.window("eio", {"DATA_LOSS"}):
            ask = Ask(self.objects, "whole", [name])
            self.assertEqual(self.judged(ask, Answer("DATA_LOSS", [whole[:100]])), [])
            self.assertEqual(self.judged(ask, Answer("DATA_LOSS", [bytes(100)])), ["wrong bytes"])

    def test_a_version_over_grpc_is_of_one_content(self):
        ask = Ask(self.blocks, "blocks", [3, 4])
        old, new = (self.blocks.items(version, 3, 2) for version in (0, 1))
        self.assertEqual(self.judged(ask, Answer("OK", [old[:4096], old[4096:]], "a")), [])
        with self.blocks.history.change(1):
            pass
        time.sleep(0.001)
        self.assertEqual(self.judged(ask, Answer("OK", [new[:4096], new[4096:]], "b")), [])
        self.assertEqual(self.judged(ask, Answer("OK", [new[:4096], new[4096:]], "a")), ["condition"])

    def test_scores_are_held_against_the_formula(self):
        vectors = soak_data.Vectors(1, "u8bin", "/nonexistent", 50, 8, "u8bin")
        weights = soak_load.query(vectors)
        right = sorted(((item, sum(w * x for w, x in zip(weights, vectors.items(0, item, 1), strict=True))) for item in (1, 2, 3)),
                       key=lambda one: (-one[1], one[0]))
        ask = Ask(vectors, "score", [3, 1, 2, 1])
        self.assertEqual(self.judged(ask, Answer("OK", [right, {}])), [])
        self.assertEqual(self.judged(ask, Answer("OK", [right[:2], {}])), ["wrong bytes"])

    def test_a_batch_is_cut_by_its_lengths(self):
        self.assertEqual(soak_load.cut(b"aabbb", 3, [2, 0, 3], None, {1: "DATA_LOSS"}), [b"aa", "DATA_LOSS", b"bbb"])
        for lengths, errors in (([2, 3], {}), ([2, 0, 2], {}), ([2, 1, 2], {1: "DATA_LOSS"})):
            with self.assertRaises(soak_load.Malformed):
                soak_load.cut(b"aabbb", 3, lengths, None, errors)


class Machine(unittest.TestCase):
    def test_the_thread_that_waited_longest_for_a_cpu_counts(self):
        # Scenario: of three threads one waits for half of the time, one hardly, one is new. Expected: a half; 0 for an idle
        # process.
        starved = soak_daemon.Starved()
        starved.share({"1": 10**9, "2": 0})
        starved.at -= 2
        self.assertEqual(starved.share({"1": 2 * 10**9, "2": 10**8, "3": 10**12}), 0.5)
        self.assertIn(str(threading.get_native_id()), soak_daemon.waited_ns(os.getpid()))
        self.assertEqual(soak_daemon.Starved().share({}), 0)


    def test_a_metric_that_does_not_exist_is_not_0(self):
        metrics = {("reads_total", 'result="ok"'): 2.0, ("reads_total", 'result="error"'): 1.0}
        self.assertEqual((soak_daemon.total(metrics, "reads_total"), soak_daemon.total(metrics, "reads_total", 'result="ok"')), (3, 2))
        with self.assertRaises(LookupError):
            soak_daemon.total(metrics, "read_total")

    def test_the_bound_of_memory_is_the_documented_one(self):
        text = (pathlib.Path(soak.__file__).parents[1] / "docs" / "OPERATIONS.md").read_text()
        fixed, times, each, with_tls = map(int, re.search(
            r"(\d+) MiB \+ engine\.memory_budget \+ (\d+) x limits\.request_memory \+ (\d+) KiB x connections \(with TLS: (\d+) KiB\)",
            text).groups())
        sums = (fixed << 20) + soak_daemon.BUDGET_BYTES + times * soak_daemon.REQUEST_MEMORY_BYTES
        self.assertEqual([soak_daemon.memory_bound(1000, tls) for tls in (False, True)],
                         [sums + 1000 * (kib << 10) for kib in (each, with_tls)])

    def signalled(self, counts, window=None):
        """Violations of a SIGHUP to a daemon whose reloads are counted like this."""
        judge = Judge(soak_data.Faults())
        metrics = iter([*counts, *[counts[-1]] * 10_000])
        name = "ringfetch_config_reloads_total"
        daemon = types.SimpleNamespace(process=types.SimpleNamespace(send_signal=lambda _: None),
                                       metrics=lambda: {(name, 'result="ok"'): next(metrics), (name, 'result="error"'): time.monotonic()})
        run = types.SimpleNamespace(daemon=daemon, judge=judge)
        run._reloads = lambda: soak.Soak._reloads(run)
        with unittest.mock.patch("soak.HANG_UP_SECONDS", 0.1), judge.faults.window(*window) if window else contextlib.nullcontext():
            followed = soak.Soak.hang_up(run)
        return followed, [kind for _, kind, _ in judge.violations]

    def test_a_signal_that_is_lost_or_refused_is_a_violation(self):
        # Scenario: the daemon reloads at the third look; never, or refuses; never, while it is restarted.
        self.assertEqual(self.signalled([4, 4, 5]), (True, []))
        self.assertEqual(self.signalled([4]), (False, ["unexplained error"]))
        self.assertEqual(self.signalled([4], ("kill", soak_faults.GONE)), (False, []))

    def test_a_fault_acts_again_until_it_has_done_something(self):
        # Scenario: faults in a phase of 3 s that do something at once, at the third time, and never; each takes its time. Expected: they
        # act once; three times; and until 60 s after the phase.
        for effective, expected in ((1, 1), (3, 3), (None, 21)):
            now, acted, run = [0], [], types.SimpleNamespace(effects=collections.Counter())

            def act(soak, _, until, now=now, acted=acted, effective=effective):
                acted.append(until - now[0])
                now[0] = until
                soak.effects["slow"] += len(acted) == effective

            fault = soak_faults.Fault("slow", act, False, frozenset())
            clock = types.SimpleNamespace(monotonic=lambda now=now: now[0])
            with unittest.mock.patch.dict(soak_faults.FAULTS, slow=fault), unittest.mock.patch("soak.time", clock):
                soak.Soak._act(run, "slow", random.Random(1), 3)
            self.assertEqual(acted, [3] * expected)

    def test_a_fault_that_did_nothing_is_named(self):
        phases = [(soak_faults.Phase(0, ("kill", "flip"), 3), {}), (soak_faults.Phase(1, ("vanish",), 3), {})]
        run = types.SimpleNamespace(phases=phases, effects=collections.Counter(kill=1, vanish=0))
        self.assertEqual(soak.Soak.idle_faults(run), ["flip", "vanish"])


class Credentials(unittest.TestCase):
    def test_the_file_has_what_is_accepted_and_mistakes_are_other_files(self):
        # Scenario: principals with certificates, of a daemon without TLS, then with it. Expected: their lines are present
        # with TLS only.
        made = []
        certificates = types.SimpleNamespace(make_client=made.append)
        with tempfile.TemporaryDirectory() as directory:
            principals = soak_access.Principals(pathlib.Path(directory, "principals"), certificates)
            self.assertEqual(principals.path.read_text(), principals.text())

            def owners():
                return [line.split()[0] for line in principals.path.read_text().splitlines()]

            self.assertEqual(owners(), ["clients", "attacker", "operator"])
            self.assertTrue(any("certificate:" in text for text in principals.mistakes()))
            principals.with_certificates = True
            for kind, owner in (("token", "clients"), ("certificate", "holders")):
                old, new = principals.credential(kind), principals.make(kind)
                principals.accept(old, new)
                self.assertEqual(owners().count(owner), 2)
                self.assertTrue(principals.is_current(old))
                principals.accept(new)
                principals.use(new)
                self.assertEqual((owners().count(owner), principals.is_current(old), principals.is_current(new)), (1, False, True))
                self.assertIn(f"{owner} {new.in_file()} *\n", principals.path.read_text())
            self.assertNotIn(principals.text(), principals.mistakes())
            self.assertIn(principals.credential("certificate").value, made)

    def test_a_request_has_one_credential(self):
        token, certificate = soak_access.Credential("token", "secret"), soak_access.Credential("certificate", "CN=a")
        self.assertEqual((token.token(), token.headers()), ("secret", {"Authorization": "Bearer secret"}))
        self.assertEqual((certificate.token(), certificate.headers(), certificate.in_file()), (None, {}, "certificate:CN=a"))

    @unittest.skipUnless(shutil.which("openssl"), "needs openssl")
    def test_certificates_have_their_names_and_forged_ones_another_authority(self):
        with tempfile.TemporaryDirectory() as directory:
            made = soak_access.Certificates(pathlib.Path(directory, "tls"))
            for name, shown in (("a.soak", "DNS:a.soak"), ("spiffe://soak/a", "URI:spiffe://soak/a"), ("CN=a", "CN = a|CN=a")):
                made.make_client(name)
                file = made.path(soak_access.file_of(name) + ".pem")
                text = run(["openssl", "x509", "-in", file, "-noout", "-subject", "-ext", "subjectAltName"])
                self.assertRegex(text, shown)
                self.assertIn("DNS:other.soak", text)
                issuer = run(["openssl", "x509", "-in", made.path(made.forged(name) + ".pem"), "-noout", "-issuer"])
                self.assertIn("another authority", issuer)
                self.assertIsNot(made.context(client=name), made.context())

    def test_who_is_let_in_wrongly_is_a_violation(self):
        judge = Judge(soak_data.Faults())
        certificates = types.SimpleNamespace(forged=lambda name: f"forged {name}")
        good = {"old": 401, "new": 200}
        for kind, changes, violations in (("token", {}, 0), ("token", {"old": 200}, 1), ("token", {"new": 401}, 1), ("certificate", {}, 0),
                                          ("certificate", {"old": 200}, 1), ("certificate", {"forged new": 401}, 1)):
            def get(_, credential, found=good | changes):
                if credential.value not in found:
                    raise ssl.SSLError("unknown authority")
                return found[credential.value], b""

            run = types.SimpleNamespace(judge=judge, daemon=types.SimpleNamespace(get=get, certificates=certificates))
            judge.violations.clear()
            soak_faults.refused_and_let_in(run, *(soak_access.Credential(kind, value) for value in ("old", "new")))
            self.assertEqual([kind for _, kind, _ in judge.violations], ["credential"] * violations)


class Schedule(unittest.TestCase):
    def test_a_seed_gives_one_schedule_and_another_another(self):
        self.assertEqual(soak_faults.schedule(5, 600, EVERY), soak_faults.schedule(5, 600, EVERY))
        self.assertNotEqual(soak_faults.schedule(5, 600, EVERY), soak_faults.schedule(6, 600, EVERY))

    def test_at_most_one_restart_at_a_time_and_every_fault_within_twenty_minutes(self):
        for seed in range(20):
            phases = soak_faults.schedule(seed, 1200, EVERY)
            for phase in phases:
                restarts = [name for name in phase.faults if soak_faults.FAULTS[name].restarts]
                self.assertLessEqual(len(restarts), 1)
                self.assertFalse(restarts and "truncate" in phase.faults)
            self.assertEqual(sorted({name for phase in phases for name in phase.faults}), EVERY)

    def test_the_smoke_has_every_fault_once(self):
        for names in (EVERY, ["flip", "kill"], ["flip"]):
            phases = soak_faults.smoke(1, names, 3)
            self.assertEqual(sorted(name for phase in phases for name in phase.faults), sorted(names))

    def test_only_names_faults(self):
        self.assertEqual(soak.parse(["--only", "kill,flip"]).names, ["kill", "flip"])
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            soak.parse(["--only", "flood"])


FACTS = {"date": "2000-01-01", "commit": "0", "cpus": 2, "kernel": "k", "file_system": "f", "command": "c"}


class Reporting(unittest.TestCase):
    def report(self, failure=None):
        judge = Judge(soak_data.Faults())
        judge.counts.update(calls=10, items=20, bytes=1 << 30)
        phase = soak_faults.Phase(0, ("kill", "flip"), 3)
        samples = [dict(zip(soak_report.COLUMNS, (0.5 * n, 0, "kill+flip", 1 << 24, 1 << 25, 40, 9, 0.25, 0.75, n, 2 * n, n), strict=True))
                   for n in range(9)]
        run = types.SimpleNamespace(judge=judge, phases=[(phase, {})], samples=samples, probes=[(1, 0.001)], begun=0.0, at=lambda: 5.0,
                                    daemon=types.SimpleNamespace(lives=2), effects=collections.Counter(kill=1, flip=2))
        return soak_report.Report(run, [phase], FACTS, {}, failure)

    def test_a_good_run_holds_and_each_kind_of_violation_is_named(self):
        report = self.report()
        self.assertTrue(report.held())
        self.assertIn("Every invariant holds", report.markdown())
        xml.dom.minidom.parseString(report.plot())
        for kind, what in soak_report.INVARIANTS:
            report = self.report()
            report.soak.judge.violation(kind, "<this & that>")
            self.assertFalse(report.held())
            self.assertIn(f"| no {what} | 1 | **does not hold** |", report.markdown())
            report.soak.begun = report.soak.judge.violations[0][0] - 3
            self.assertIn("waited for a CPU 25% of the time, some client 75%", report.markdown())
            xml.dom.minidom.parseString(report.plot())

    def test_a_run_that_was_broken_off_or_read_nothing_does_not_hold(self):
        self.assertFalse(self.report("interrupted").held())
        report = self.report()
        report.soak.judge.counts = collections.Counter()
        self.assertFalse(report.held())


if __name__ == "__main__":
    unittest.main()
