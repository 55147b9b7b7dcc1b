"""Checks a running demo daemon from Python: every byte against the pattern, and the errors of the contract.

    python test_client.py --grpc 127.0.0.1:7410 --http 127.0.0.1:7411
"""

import argparse
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.request
from concurrent import futures
from pathlib import Path
from unittest import mock

import grpc
import numpy as np
import pattern
from google.rpc import error_details_pb2, status_pb2
from ringfetch_client import Client, dataset_pb2, fetch_pb2

HERE = Path(__file__).resolve().parent
SEED = 42
BLOCK_BYTES = 4096
BLOCKS = (128 << 20) // BLOCK_BYTES
DIM = 128
VECTORS = 65_536
# google.rpc.Code
INVALID_ARGUMENT, NOT_FOUND, OUT_OF_RANGE = 3, 5, 11

KILLED_WHILE_WRITING = """
import os
from pathlib import Path
from grpc_tools import protoc

def killed(arguments, compile=protoc.main):
    compile(arguments)
    made = next(argument.partition("=")[2] for argument in arguments if argument.startswith("--python_out="))
    next(Path(made).rglob("fetch_pb2.py")).write_text("")
    os._exit(9)

protoc.main = killed
import ringfetch_client
"""

address = "127.0.0.1:7410"
http_address = "127.0.0.1:7411"


def serve(test, *handlers):
    """A server of these handlers, until the test ends; returns its address."""
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    test.addCleanup(server.stop, None)
    return f"127.0.0.1:{port}"


def answering(answers):
    """A handler that answers each method with the message that `answers` has at that time."""
    def method(name):
        return grpc.unary_unary_rpc_method_handler(lambda *_: answers[name], None, lambda message: message.SerializeToString())
    return grpc.method_handlers_generic_handler("ringfetch.v1.FetchService", {name: method(name) for name in answers})


class Token(unittest.TestCase):
    def test_a_token_is_sent_with_every_kind_of_call(self):
        # A server that answers no method: what it was sent is what is looked at.
        sent = []

        class Handler(grpc.GenericRpcHandler):
            def service(self, details):
                sent.append((details.method.rsplit("/", 1)[1], dict(details.invocation_metadata).get("authorization")))

        with Client(serve(self, Handler()), token="secret") as client:
            client.wait_until_ready()
            for call in (
                lambda: client.fetch_vectors("v", [1]),
                lambda: list(client.fetch.ReadObject(fetch_pb2.ReadObjectRequest())),
                lambda: list(client.fetch.FetchStream(iter([fetch_pb2.FetchStreamRequest()]))),
            ):
                with self.assertRaises(grpc.RpcError):
                    call()
        self.assertEqual(sent, [(name, "Bearer secret") for name in ("FetchVectors", "ReadObject", "FetchStream")])

    def test_a_token_goes_over_plaintext_to_loopback_only(self):
        # Scenario: addresses with a token, and without TLS. Expectation: only this host's own are accepted.
        for local in ("127.0.0.1:7410", "127.8.8.8:7410", "localhost:7410", "[::1]:7410"):
            Client(local, token="secret").close()
        for remote in ("10.0.0.1:7410", "db1:7410", "[2001:db8::1]:7410", "127.0.0.1.example.org:7410", "dns:///localhost:7410"):
            with self.assertRaises(ValueError) as raised:
                Client(remote, token="secret")
            self.assertNotIn("secret", str(raised.exception))
            Client(remote).close()
            Client(remote, token="secret", tls=True).close()

    def test_no_proxy_gets_a_token_for_loopback(self):
        # Scenario: a proxy is set in the environment, as gRPC reads it, and a client calls a loopback address. Expectation: the proxy
        # gets no connection, and the server the call.
        address = serve(self, answering({"FetchVectors": fetch_pb2.FetchVectorsResponse()}))
        with socket.create_server(("127.0.0.1", 0)) as proxy:
            variables = {"http_proxy": f"http://127.0.0.1:{proxy.getsockname()[1]}", "no_proxy": "", "no_grpc_proxy": ""}
            with mock.patch.dict(os.environ, variables), Client(address, token="secret") as client:
                client.fetch.FetchVectors(fetch_pb2.FetchVectorsRequest(), timeout=10)
            proxy.setblocking(False)
            with self.assertRaises(BlockingIOError):
                proxy.accept()

    def test_tls_needs_no_authority_of_ones_own(self):
        # Scenario: a server whose certificate one of gRPC's default authorities vouches for. Expectation: `tls` reaches it.
        with tempfile.TemporaryDirectory() as scratch:
            key, certificate = Path(scratch, "key.pem"), Path(scratch, "certificate.pem")
            request = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                       "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
            subprocess.run(["openssl", *request, "-keyout", key, "-out", certificate], check=True, capture_output=True)
            server = grpc.server(futures.ThreadPoolExecutor(1))
            pair = [(key.read_bytes(), certificate.read_bytes())]
            port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials(pair))
            server.start()
            self.addCleanup(server.stop, None)
            # gRPC reads this once in a process.
            environment = {**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(certificate)}
            connect = f"from ringfetch_client import Client; Client('localhost:{port}', tls=True).wait_until_ready()"
            subprocess.run([sys.executable, "-c", connect], check=True, cwd=HERE, env=environment)


class Requests(unittest.TestCase):
    def test_a_long_request_is_left_to_the_server_to_refuse(self):
        # Scenario: a request of 5 MiB, to a server that answers no method. Expectation: it is the server that refuses it.
        with Client(serve(self)) as client, self.assertRaises(grpc.RpcError) as raised:
            client.channel.unary_unary("/x.Y/Z")(bytes(5 << 20), timeout=30)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.UNIMPLEMENTED, raised.exception.details())


class Restarts(unittest.TestCase):
    def test_a_call_outlives_the_restart_of_the_only_server(self):
        # Scenario: a server ends, and two seconds later another one serves at its address, which nothing else uses; calls of a client
        # that was connected, and of a new one, meanwhile. Expectation: their answers. A call whose timeout is shorter fails.
        answer = fetch_pb2.FetchBlocksResponse(data=b"abcd", block_bytes=4)

        def serve_at(address):
            server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[answering({"FetchBlocks": answer})])
            port = server.add_insecure_port(address)
            server.start()
            self.addCleanup(server.stop, None)
            return server, port

        first, port = serve_at("127.83.4.3:0")
        address = f"127.83.4.3:{port}"
        with Client(address) as connected, Client(address) as new, futures.ThreadPoolExecutor(2) as callers:
            connected.fetch_blocks("d", [1])
            first.stop(None).wait()
            with self.assertRaises(grpc.RpcError):
                new.fetch_blocks("d", [1], timeout_s=0.3)
            again = threading.Timer(2, serve_at, [address])
            again.start()
            calls = [callers.submit(client.fetch_blocks, "d", [1]) for client in (connected, new)]
            self.assertEqual([call.result()[0].tobytes() for call in calls], [b"abcd"] * 2)
            again.join()


class Answers(unittest.TestCase):
    def test_an_answer_that_does_not_fit_is_refused(self):
        # Scenario: answers to requests for two items, of which each that was not asked for or does not add up comes after one
        # that is right. Expectation: ValueError for each of them, where a row would be taken for another id's.
        answers = dict.fromkeys(("FetchVectors", "FetchBlocks", "ScoreVectors"))
        with Client(serve(self, answering(answers))) as client:
            def vectors(if_match="v", **fields):
                fields = {"dim": 2, "dtype": fetch_pb2.DTYPE_U8, "data": b"abcd", "etag": "v", **fields}
                answers["FetchVectors"] = fetch_pb2.FetchVectorsResponse(**fields)
                return client.fetch_vectors("d", [5, 6], if_match=if_match)

            def blocks(**fields):
                answers["FetchBlocks"] = fetch_pb2.FetchBlocksResponse(**{"block_bytes": 2, "data": b"abcd", **fields})
                return client.fetch_blocks("d", [5, 6])

            def scores(*results):
                answers["ScoreVectors"] = fetch_pb2.ScoreVectorsResponse(results=results)
                return client.score_vectors("d", [([1.0], [5, 6])], "dot", 1)

            result, error = fetch_pb2.ScoreResult, fetch_pb2.ItemError
            first, second, third = (error(item=item, code=OUT_OF_RANGE) for item in range(3))
            self.assertEqual(vectors().values.tolist(), [[97, 98], [99, 100]])
            self.assertEqual(vectors(data=b"", errors=[first, second]).values.shape, (0, 2))
            for fields in ({"data": b"ab"}, {"data": b"abcdef"}, {"dim": 0}, {"dtype": 99}, {"etag": "w"}, {"errors": [first]},
                           {"data": b"ab", "errors": [third]}, {"data": b"", "errors": [first, first]}):
                with self.subTest(fields=fields), self.assertRaises(ValueError):
                    vectors(**fields)
            self.assertEqual(vectors(if_match="", etag="w").etag, "w")
            self.assertEqual(blocks()[0].tolist(), [[97, 98], [99, 100]])
            for fields in ({"data": b"ab"}, {"block_bytes": 0}):
                with self.subTest(fields=fields), self.assertRaises(ValueError):
                    blocks(**fields)
            self.assertEqual(scores(result(ids=[5], scores=[1.0]))[0].ids.tolist(), [5])
            for wrong in ([], [result(ids=[5])], [result(ids=[5, 6], scores=[2.0, 1.0])]):
                with self.subTest(wrong=wrong), self.assertRaises(ValueError):
                    scores(*wrong)


class Stubs(unittest.TestCase):
    def setUp(self):
        # A copy of what the client is made of, without stubs.
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.home = Path(scratch.name, "clients/python")
        self.proto = Path(scratch.name, "proto")
        self.home.mkdir(parents=True)
        shutil.copy(HERE / "ringfetch_client.py", self.home)
        shutil.copytree(HERE.parents[1] / "proto", self.proto)

    def run_python(self, program):
        return subprocess.run([sys.executable, "-c", program], check=False, cwd=self.home).returncode

    def test_many_processes_can_make_them_at_once(self):
        # Scenario: four processes without stubs. Expectation: all can use them, and they are there once.
        program = [sys.executable, "-c", "import ringfetch_client"]
        processes = [subprocess.Popen(program, cwd=self.home) for _ in range(4)]
        self.assertEqual([process.wait() for process in processes], [0] * 4)
        self.assertEqual(len(list(self.home.glob("build*"))), 1)

    def test_what_a_killed_process_has_left_is_not_used(self):
        # Scenario: a process ends while it writes a stub. Expectation: the next one makes its own.
        self.assertEqual(self.run_python(KILLED_WHILE_WRITING), 9)
        self.assertEqual(self.run_python("import ringfetch_client"), 0)

    def test_those_of_another_contract_are_not_used(self):
        # Scenario: the contract gets a field, in a file that is older than the stubs. Expectation: new stubs, with the field.
        self.assertEqual(self.run_python("import ringfetch_client"), 0)
        fetch = self.proto / "ringfetch/v1/fetch.proto"
        text = fetch.read_text()
        changed = text.replace("message FetchBlocksRequest {", "message FetchBlocksRequest {\n  bool is_new = 999;")
        self.assertNotEqual(changed, text)
        fetch.write_text(changed)
        os.utime(fetch, (0, 0))
        use = "import ringfetch_client; ringfetch_client.fetch_pb2.FetchBlocksRequest(is_new=True)"
        self.assertEqual(self.run_python(use), 0)


class DemoDaemon(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = Client(address)
        cls.addClassCleanup(cls.client.close)
        cls.client.wait_until_ready()
        cls.random = random.Random(SEED)

    def fails_with(self, code, call, request):
        """Makes a call that must fail with `code`; returns the error."""
        with self.assertRaises(grpc.RpcError) as raised:
            call(request, timeout=30)
        self.assertEqual(raised.exception.code(), code, raised.exception.details())
        self.assertTrue(raised.exception.details(), "an error without a message")
        return raised.exception

    def counted(self, metric, dataset):
        """The sum over a counter's series of one dataset."""
        with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=30) as response:
            text = response.read().decode()
        series = re.findall(rf'^{metric}{{[^}}]*dataset="{dataset}"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return sum(float(value) for value in series)

    def test_every_read_is_counted_once(self):
        # Scenario: 500 vectors in batches of 50, three of them past the end. Expectation: the counters grow by exactly
        # the items asked for and the bytes received. (Nobody else must be using the daemon.)
        before = [self.counted(f"ringfetch_{name}_total", "vectors") for name in ("reads", "read_bytes")]
        received = 0
        for batch in range(10):
            ids = self.random.sample(range(VECTORS), 50)
            ids[0] = VECTORS if batch < 3 else 0
            received += self.client.fetch_vectors("vectors", ids).values.nbytes
        after = [self.counted(f"ringfetch_{name}_total", "vectors") for name in ("reads", "read_bytes")]
        self.assertEqual([b - a for a, b in zip(before, after, strict=True)], [500, received])

    def test_health_and_listing(self):
        # Scenario: health and the list of datasets. Expectation: serving; three demo datasets of the known shapes.
        raw = self.client.channel.unary_unary("/grpc.health.v1.Health/Check")
        self.assertEqual(raw(b"", timeout=30), b"\x08\x01", "not SERVING")
        listing = self.client.datasets.ListDatasets(dataset_pb2.ListDatasetsRequest(), timeout=30)
        found = {dataset.name: dataset for dataset in listing.datasets}
        self.assertLessEqual({"blocks", "objects", "vectors"}, set(found))
        self.assertEqual((found["blocks"].kind, found["blocks"].count), (dataset_pb2.KIND_BLOCKS, BLOCKS))
        self.assertEqual(found["blocks"].block_bytes, BLOCK_BYTES)
        shape = found["vectors"].vectors
        self.assertEqual((found["vectors"].count, shape.dim, shape.layout), (VECTORS, DIM, "npy"))
        self.assertEqual(shape.dtype, fetch_pb2.DTYPE_F32)

    def test_blocks_are_the_patterns_bytes(self):
        # Scenario: first, last, random and repeated blocks. Expectation: the stream's bytes, in request order.
        indices = [0, BLOCKS - 1, 7, 7, *self.random.sample(range(BLOCKS), 252)]
        blocks, errors = self.client.fetch_blocks("blocks", indices)
        self.assertEqual((blocks.shape, errors), ((len(indices), BLOCK_BYTES), []))
        for index, block in zip(indices, blocks, strict=True):
            self.assertEqual(block.tobytes(), pattern.stream(SEED, index * BLOCK_BYTES, BLOCK_BYTES), f"block {index}")

    def test_vectors_are_the_patterns_elements_without_a_copy(self):
        # Scenario: first, last and random vectors. Expectation: exact f32 elements, in an array that owns no memory.
        ids = [0, VECTORS - 1, *self.random.sample(range(VECTORS), 254)]
        answer = self.client.fetch_vectors("vectors", ids)
        self.assertEqual((answer.values.shape, answer.errors), ((len(ids), DIM), []))
        self.assertFalse(answer.values.flags.owndata)
        for vector_id, values in zip(ids, answer.values, strict=True):
            np.testing.assert_array_equal(values, pattern.f32(SEED, vector_id * DIM, DIM), f"vector {vector_id}")

    def test_ranges_cross_blocks(self):
        # Scenario: unaligned ranges, one byte, across a block's border, the last byte. Expectation: the stream's bytes.
        end = BLOCKS * BLOCK_BYTES
        ranges = [(0, 1), (4095, 2), (10, 10_000), (end - 1, 1), (123_457, 65_537)]
        request = fetch_pb2.FetchRangesRequest(dataset="blocks", offsets=[o for o, _ in ranges], lengths=[n for _, n in ranges])
        response = self.client.fetch.FetchRanges(request, timeout=30)
        self.assertEqual((list(response.lengths), list(response.errors)), ([n for _, n in ranges], []))
        self.assertEqual(response.data, b"".join(pattern.stream(SEED, o, n) for o, n in ranges))

    def test_objects_whole_and_in_part(self):
        # Scenario: a page of objects, whole and as a part. Expectation: listed lengths; the part is that of the whole.
        page = self.client.datasets.ListObjects(dataset_pb2.ListObjectsRequest(dataset="objects", page_size=20), timeout=30)
        names = [entry.name for entry in page.objects]
        self.assertEqual(names, sorted(names))
        self.assertTrue(names)
        whole = self.client.fetch.FetchObjects(fetch_pb2.FetchObjectsRequest(dataset="objects", names=names), timeout=30)
        self.assertEqual(list(whole.lengths), [entry.length_bytes for entry in page.objects])
        longest = max(range(len(names)), key=lambda item: whole.lengths[item])
        at = sum(whole.lengths[:longest])
        part = fetch_pb2.FetchObjectsRequest(dataset="objects", names=[names[longest]], offsets=[3], lengths=[50])
        self.assertEqual(self.client.fetch.FetchObjects(part, timeout=30).data, whole.data[at + 3 : at + 53])

    def test_a_bad_item_does_not_fail_the_others(self):
        # Scenario: ids past the end among good ones. Expectation: their errors, no bytes for them, the rest whole.
        answer = self.client.fetch_vectors("vectors", [5, VECTORS, 6, 2**63])
        self.assertEqual([(item, code) for item, code, _ in answer.errors], [(1, OUT_OF_RANGE), (3, OUT_OF_RANGE)])
        self.assertEqual(answer.present.tolist(), [True, False, True, False])
        np.testing.assert_array_equal(answer.values[1], pattern.f32(SEED, 6 * DIM, DIM))
        names = ["../etc/passwd", "no-such-object", "/absolute"]
        response = self.client.fetch.FetchObjects(fetch_pb2.FetchObjectsRequest(dataset="objects", names=names), timeout=30)
        self.assertEqual([error.code for error in response.errors], [INVALID_ARGUMENT, NOT_FOUND, INVALID_ARGUMENT])
        self.assertEqual(response.data, b"")

    def test_errors_of_the_whole_call(self):
        # Scenario: requests that are wrong as a whole. Expectation: the contract's code for each.
        fetch, code = self.client.fetch, grpc.StatusCode
        blocks, vectors = fetch_pb2.FetchBlocksRequest, fetch_pb2.FetchVectorsRequest
        self.fails_with(code.NOT_FOUND, fetch.FetchBlocks, blocks(dataset="nothing", indices=[1]))
        self.fails_with(code.FAILED_PRECONDITION, fetch.FetchVectors, vectors(dataset="blocks", ids=[1]))
        self.fails_with(code.INVALID_ARGUMENT, fetch.FetchBlocks, blocks(dataset="blocks"))
        unpaired = fetch_pb2.FetchRangesRequest(dataset="blocks", offsets=[0, 1], lengths=[1])
        self.fails_with(code.INVALID_ARGUMENT, fetch.FetchRanges, unpaired)
        strict = blocks(dataset="blocks", indices=[1, BLOCKS], fail_fast=True)
        self.fails_with(code.OUT_OF_RANGE, fetch.FetchBlocks, strict)

    def test_a_request_over_the_limits_is_refused_with_its_reason(self):
        # Scenario: two million blocks at once. Expectation: RESOURCE_EXHAUSTED with google.rpc details, and life goes on.
        request = fetch_pb2.FetchBlocksRequest(dataset="blocks", indices=[0] * 2_000_000)
        error = self.fails_with(grpc.StatusCode.RESOURCE_EXHAUSTED, self.client.fetch.FetchBlocks, request)
        self.assertIn("grpc-status-details-bin", dict(error.trailing_metadata()))
        blocks, _ = self.client.fetch_blocks("blocks", [1])
        self.assertEqual(blocks[0].tobytes(), pattern.stream(SEED, BLOCK_BYTES, BLOCK_BYTES))

    def test_a_version_is_read_or_refused(self):
        # Scenario: vectors of the version of an answer, and of another. Expectation: the same version, and the one there is in
        # the refusal's metadata.
        etag = self.client.fetch_vectors("vectors", [1]).etag
        self.assertEqual(self.client.fetch_vectors("vectors", [2], if_match=etag).etag, etag)
        request = fetch_pb2.FetchVectorsRequest(dataset="vectors", ids=[1], if_match="0")
        error = self.fails_with(grpc.StatusCode.FAILED_PRECONDITION, self.client.fetch.FetchVectors, request)
        status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
        info = error_details_pb2.ErrorInfo()
        self.assertTrue(status.details[0].Unpack(info))
        self.assertEqual((info.reason, dict(info.metadata)), ("PRECONDITION_FAILED", {"etag": etag}))

    def test_an_object_is_streamed(self):
        # Scenario: each object by ReadObject. Expectation: version and length, then the bytes that a batch has.
        names = [info.name for info in self.client.datasets.ListObjects(dataset_pb2.ListObjectsRequest(dataset="objects")).objects]
        for name in names[:20]:
            request = fetch_pb2.ReadObjectRequest(dataset="objects", name=name)
            first, *rest = self.client.fetch.ReadObject(request, timeout=30)
            batch = self.client.fetch.FetchObjects(fetch_pb2.FetchObjectsRequest(dataset="objects", names=[name]), timeout=30)
            self.assertEqual((first.etag, first.object_length_bytes), (batch.etags[0], len(batch.data)))
            self.assertEqual(b"".join(message.data for message in rest), batch.data)

    def test_a_stream_answers_every_request_by_its_id(self):
        # Scenario: 300 requests on one stream, one of them bad. Expectation: each answered once, by id, in any order.
        bad = 150

        def requests():
            for number in range(300):
                name = "nothing" if number == bad else "vectors"
                batch = fetch_pb2.FetchVectorsRequest(dataset=name, ids=[number, number * 7])
                yield fetch_pb2.FetchStreamRequest(id=1000 + number, vectors=batch)

        answers = {answer.id - 1000: answer for answer in self.client.fetch.FetchStream(requests(), timeout=60)}
        self.assertEqual(sorted(answers), list(range(300)))
        refused = answers.pop(bad).status
        self.assertEqual(refused.code, NOT_FOUND)
        info = error_details_pb2.ErrorInfo()
        self.assertTrue(refused.details[0].Unpack(info))
        self.assertEqual(info.reason, "DATASET_NOT_FOUND")
        for number, answer in answers.items():
            expected = np.concatenate([pattern.f32(SEED, i * DIM, DIM) for i in (number, number * 7)])
            self.assertEqual(answer.vectors.data, expected.astype("<f4").tobytes(), f"request {number}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grpc", default=address, metavar="ADDRESS")
    parser.add_argument("--http", default=http_address, metavar="ADDRESS")
    arguments, rest = parser.parse_known_args()
    address, http_address = arguments.grpc, arguments.http
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
