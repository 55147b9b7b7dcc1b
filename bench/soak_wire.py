"""The soak's gRPC client, on h2 and protobuf: a blocking socket for each connection, so that only the daemon enforces deadlines,
and connections can be left in any state."""

import importlib.util
import pathlib
import socket
import subprocess
import sys
import time

try:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessages
    from h2.config import H2Configuration
    from h2.connection import H2Connection
    from h2.errors import ErrorCodes
    from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
    from h2.exceptions import ProtocolError
    from h2.settings import SettingCodes, Settings
except ImportError as error:
    sys.exit(f"soak: needs python3-h2 and python3-protobuf (with pip: h2 and protobuf): {error}")

PROTO = pathlib.Path(__file__).resolve().parents[1] / "proto"
WINDOW_BYTES, FRAME_BYTES = 4 << 20, 256 << 10
# Raised for what is no HTTP/2, or no message of its type.
INVALID = (ProtocolError, DecodeError)


def _messages():
    """The messages of the contract, by name. Made of descriptors: generated code needs the protobuf package of its compiler's version."""
    compiler = [sys.executable, "-m", "grpc_tools.protoc"] if importlib.util.find_spec("grpc_tools") else ["protoc"]
    command = [*compiler, f"--proto_path={PROTO}", "--include_imports", "--descriptor_set_out=/dev/stdout", "ringfetch/v1/fetch.proto",
               "ringfetch/v1/admin.proto"]
    try:
        descriptors = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"soak: needs protobuf-compiler and libprotobuf-dev (with pip: grpcio-tools): {error}")
    return {name.rpartition(".")[2]: kind for name, kind in GetMessages(FileDescriptorSet.FromString(descriptors).file).items()}


MESSAGES = _messages()


class Broken(Exception):
    """The connection was refused, reset or ended before the answer."""


class Late(Exception):
    """No answer in time."""


class Http2(H2Connection):
    """For h2 a connection ends with a GOAWAY (python-hyper/h2, issue 1181). Here the calls that it leaves go on, up to `last`."""

    last = None

    def _receive_goaway_frame(self, frame):
        self.last = frame.last_stream_id
        return [], []


class Call:
    """One call as its response arrives."""

    def __init__(self, path):
        self.response = MESSAGES[path.rpartition("/")[2] + "Response"]
        self.head, self.body, self.ended, self.reset = {}, bytearray(), False, None

    def messages(self):
        """Complete messages so far, removed from the body."""
        found = []
        while len(self.body) >= 5:
            length = int.from_bytes(self.body[1:5], "big")
            if len(self.body) < 5 + length:
                break
            found.append(self.response.FromString(bytes(self.body[5:5 + length])))
            del self.body[:5 + length]
        return found

    def broken(self):
        return Broken(f"the call ended with {self.head}, reset {self.reset}")


class Connection:
    """An HTTP/2 connection to (host, port), over TLS if there is a TLS context; each call has the current token. Raises
    OSError if it cannot be opened."""

    def __init__(self, address, context=None, timeout_s=5.0, window_bytes=WINDOW_BYTES, source="127.0.0.1", token=lambda: None):
        self.address, self.made, self.token, self.calls = address, time.monotonic(), token, {}
        self.http2 = Http2(H2Configuration(header_encoding="utf-8"))
        # Not `update_settings`, which h2 applies too late for a frame that arrives together with its acknowledgement.
        self.http2.local_settings = Settings(initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window_bytes,
                                                             SettingCodes.MAX_FRAME_SIZE: FRAME_BYTES})
        self.http2.max_inbound_frame_size = FRAME_BYTES
        self.http2.initiate_connection()
        self.http2.increment_flow_control_window(WINDOW_BYTES - 65535)
        raw = socket.create_connection(address, timeout_s, (source, 0))
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket = context.wrap_socket(raw, server_hostname=address[0]) if context else raw
            self.socket.sendall(self.http2.data_to_send())
        except BaseException:
            raw.close()
            raise

    def close(self):
        self.socket.close()

    @property
    def going(self):
        """Whether the daemon takes no more calls here."""
        return self.http2.last is not None

    def _flush(self):
        data = self.http2.data_to_send()
        try:
            if data:
                self.socket.sendall(data)
        except OSError as error:
            raise Broken(f"sending: {error}") from None

    def _add(self, number, message, end):
        data = message.SerializeToString()
        self.http2.send_data(number, b"\0" + len(data).to_bytes(4, "big") + data, end_stream=end)

    def start(self, path, message=None, deadline_s=None, more=False):
        """Sends a call's head and, if there is one, its message. Returns the call's number."""
        number = self.http2.get_next_available_stream_id()
        self.calls[number] = Call(path)
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", f"{self.address[0]}:{self.address[1]}"),
                ("content-type", "application/grpc"), ("te", "trailers")]
        token = self.token()
        if token is not None:
            head.append(("authorization", f"Bearer {token}"))
        if deadline_s is not None:
            head.append(("grpc-timeout", f"{int(deadline_s * 1000)}m"))
        self.http2.send_headers(number, head)
        if message is not None:
            self._add(number, message, end=not more)
        self._flush()
        return number

    def send(self, number, message):
        if self.calls[number].ended:
            raise self.calls[number].broken()
        self._add(number, message, end=False)
        self._flush()

    def cancel(self, number):
        del self.calls[number]
        self.http2.reset_stream(number, ErrorCodes.CANCEL)
        self._flush()

    def _receive(self, until):
        rest = until - time.monotonic()
        if rest <= 0:
            raise Late
        try:
            self.socket.settimeout(rest)
            data = self.socket.recv(1 << 18)
        except TimeoutError:
            raise Late from None
        except OSError as error:
            raise Broken(f"receiving: {error}") from None
        finally:
            self.socket.settimeout(None)
        if not data:
            raise Broken("the connection ended")
        return data

    def pump(self, until):
        """Receives what there is; waits for something."""
        for event in self.http2.receive_data(self._receive(until)):
            call = self.calls.get(getattr(event, "stream_id", None))
            if call is None:
                continue
            match event:
                case DataReceived():
                    self.http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    call.body += event.data
                case ResponseReceived() | TrailersReceived():
                    call.head.update(event.headers)
                case StreamReset():
                    call.reset, call.ended = event.error_code, True
                case StreamEnded():
                    call.ended = True
        self._flush()
        if self.going and any(number > self.http2.last and not call.ended for number, call in self.calls.items()):
            raise Broken("GOAWAY before the call")

    def call(self, path, message, deadline_s, wait_s):
        """(grpc-status, its message, messages) of a call with one request. `deadline_s` is sent to the daemon; waits for
        `wait_s`."""
        number = self.start(path, message, deadline_s)
        call, until = self.calls[number], time.monotonic() + wait_s
        while not call.ended:
            self.pump(until)
        del self.calls[number]
        if "grpc-status" not in call.head:
            raise call.broken()
        return int(call.head["grpc-status"]), call.head.get("grpc-message", ""), call.messages()
