"""gRPC over HTTP/2, and Protocol Buffers, as far as the soak needs them, with the standard library only. Its own client, so
that only the daemon enforces deadlines, and connections can be left in any state."""

import socket
import struct
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
WINDOW_BYTES = 4 << 20
# Code lengths of the symbols in bits, from A = 5 (RFC 7541, appendix B). The code is canonical: the lengths define it.
HUFFMAN_BITS = ("ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJBKABABABBBACCBBBABCBAABCCCCCK"
                "GJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRSVVPORSRUVVVWWVTUOQVWWVWTQQVVXWWWPTPQRQQSRRUUTTVSV"
                "WVVWWWWWXWWWWWV")


class Broken(Exception):
    """The connection was refused, reset or ended before the answer."""


class Late(Exception):
    """No answer in time."""


def _huffman():
    codes, code, before = {}, 0, 5
    for bits, symbol in sorted((60 + ord(letter) - 120, symbol) for symbol, letter in enumerate(HUFFMAN_BITS)):
        code <<= bits - before
        codes[bits, code] = symbol
        code, before = code + 1, bits
    return codes


HUFFMAN = _huffman()


def unhuffman(data):
    out, bits, code = bytearray(), 0, 0
    for byte in data:
        for place in range(7, -1, -1):
            code, bits = code << 1 | byte >> place & 1, bits + 1
            symbol = HUFFMAN.get((bits, code))
            if symbol is not None:
                out.append(symbol)
                bits = code = 0
    return bytes(out)


class Hpack:
    """Decodes header blocks. Of the static table only `:status` matters here."""

    STATIC_ENTRIES = 61
    STATUSES = (b"200", b"204", b"206", b"304", b"400", b"404", b"500")

    def __init__(self):
        self.dynamic = []

    def _number(self, data, at, bits):
        value, most = data[at] & (1 << bits) - 1, (1 << bits) - 1
        at += 1
        if value < most:
            return value, at
        shift = 0
        while True:
            byte = data[at]
            value, at, shift = value + ((byte & 127) << shift), at + 1, shift + 7
            if byte < 128:
                return value, at

    def _text(self, data, at):
        length, after = self._number(data, at, 7)
        text = bytes(data[after:after + length])
        return (unhuffman(text) if data[at] & 128 else text), after + length

    def _entry(self, index):
        if index <= self.STATIC_ENTRIES:
            return (b":status", self.STATUSES[index - 8]) if 8 <= index < 15 else (b"static-%d" % index, b"")
        return self.dynamic[index - self.STATIC_ENTRIES - 1]

    def decode(self, data):
        found, at = {}, 0
        while at < len(data):
            first = data[at]
            if first & 128:
                index, at = self._number(data, at, 7)
                name, value = self._entry(index)
            elif first & 224 == 32:
                _, at = self._number(data, at, 5)
                self.dynamic.clear()
                continue
            else:
                index, at = self._number(data, at, 6 if first & 64 else 4)
                name, at = (self._entry(index)[0], at) if index else self._text(data, at)
                value, at = self._text(data, at)
                if first & 64:
                    self.dynamic.insert(0, (name, value))
            found[name.decode()] = value.decode(errors="replace")
        return found


def _length(text):
    return bytes([len(text)]) if len(text) < 127 else b"\x7f" + varint(len(text) - 127)


def encode_headers(pairs):
    """Literals without indexing and without Huffman coding."""
    return b"".join(b"\0" + _length(part[0]) + part[0] + _length(part[1]) + part[1]
                    for part in ((name.encode(), str(value).encode()) for name, value in pairs))


def frame(kind, flags, stream, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


class Exchange:
    """One stream as it arrives."""

    def __init__(self):
        self.head, self.body, self.ended, self.reset = {}, bytearray(), False, None

    def messages(self):
        """Complete messages so far, removed from the body."""
        found = []
        while len(self.body) >= 5:
            length = int.from_bytes(self.body[1:5], "big")
            if len(self.body) < 5 + length:
                break
            found.append(bytes(self.body[5:5 + length]))
            del self.body[:5 + length]
        return found


class Connection:
    """An HTTP/2 connection to (host, port), over TLS if there is a TLS context; each call has the current token. Raises
    OSError if it cannot be opened."""

    def __init__(self, address, context=None, timeout_s=5.0, window_bytes=WINDOW_BYTES, source="127.0.0.1", token=lambda: None):
        self.address, self.made, self.going, self.token = address, time.monotonic(), False, token
        raw = socket.create_connection(address, timeout_s, (source, 0))
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket = context.wrap_socket(raw, server_hostname=address[0]) if context else raw
            settings = struct.pack(">HIHIHI", 1, 0, 4, window_bytes, 5, 256 << 10)
            grow = frame(WINDOW_UPDATE, 0, 0, (WINDOW_BYTES - 65535).to_bytes(4, "big"))
            self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + grow)
        except BaseException:
            raw.close()
            raise
        self.hpack, self.buffer, self.streams, self.next_id, self.taken, self.window_bytes = (
            Hpack(), bytearray(), {}, 1, 0, window_bytes)

    def close(self):
        self.socket.close()

    def _send(self, data):
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise Broken(f"sending: {error}") from None

    def start(self, path, message=None, deadline_s=None, more=False):
        """Sends a call's head and, if there is one, its message. Returns the stream's number."""
        stream, self.next_id = self.next_id, self.next_id + 2
        self.streams[stream] = Exchange()
        pairs = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", f"{self.address[0]}:{self.address[1]}"),
                 ("content-type", "application/grpc"), ("te", "trailers")]
        token = self.token()
        if token is not None:
            pairs.append(("authorization", f"Bearer {token}"))
        if deadline_s is not None:
            pairs.append(("grpc-timeout", f"{int(deadline_s * 1000)}m"))
        head = frame(HEADERS, END_HEADERS, stream, encode_headers(pairs))
        body = b"" if message is None else frame(DATA, 0 if more else END_STREAM, stream, b"\0" + struct.pack(">I", len(message)) + message)
        self._send(head + body)
        return stream

    def send(self, stream, message):
        self._send(frame(DATA, 0, stream, b"\0" + struct.pack(">I", len(message)) + message))

    def cancel(self, stream):
        self.streams.pop(stream, None)
        self._send(frame(RST_STREAM, 0, stream, (8).to_bytes(4, "big")))

    def _need(self, length, until):
        while len(self.buffer) < length:
            rest = until - time.monotonic()
            if rest <= 0:
                raise Late
            try:
                self.socket.settimeout(rest)
                got = self.socket.recv(1 << 18)
            except TimeoutError:
                raise Late from None
            except OSError as error:
                raise Broken(f"receiving: {error}") from None
            finally:
                self.socket.settimeout(None)
            if not got:
                raise Broken("the connection ended")
            self.buffer += got
        taken = bytes(self.buffer[:length])
        del self.buffer[:length]
        return taken

    def pump(self, until):
        """Receives one frame."""
        head = self._need(9, until)
        length, kind, flags, stream = int.from_bytes(head[:3], "big"), head[3], head[4], int.from_bytes(head[5:], "big")
        payload = self._need(length, until)
        exchange = self.streams.get(stream)
        if kind == DATA:
            self._give_back(stream, length, flags)
            if exchange:
                exchange.body += payload
        elif kind == HEADERS:
            while not flags & END_HEADERS:
                more = self._need(9, until)
                payload += self._need(int.from_bytes(more[:3], "big"), until)
                flags |= more[4] & END_HEADERS
            fields = self.hpack.decode(payload)
            if exchange:
                exchange.head.update(fields)
        elif kind == RST_STREAM and exchange:
            exchange.reset, exchange.ended = int.from_bytes(payload, "big"), True
        elif kind == SETTINGS and not flags & ACK:
            self._send(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._send(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            self.going = True
            last = int.from_bytes(payload[:4], "big")
            if any(number > last and not one.ended for number, one in self.streams.items()):
                raise Broken("GOAWAY before the call")
        if exchange and kind in (DATA, HEADERS) and flags & END_STREAM:
            exchange.ended = True

    def _give_back(self, stream, length, flags):
        self.taken += length
        update = b""
        if self.taken > WINDOW_BYTES // 4:
            update, self.taken = frame(WINDOW_UPDATE, 0, 0, self.taken.to_bytes(4, "big")), 0
        if length and not flags & END_STREAM:
            update += frame(WINDOW_UPDATE, 0, stream, length.to_bytes(4, "big"))
        if update:
            self._send(update)

    def call(self, path, message, deadline_s, wait_s):
        """(grpc-status, its message, messages) of a call with one request. `deadline_s` is sent to the daemon; waits for
        `wait_s`."""
        stream = self.start(path, message, deadline_s)
        exchange, until = self.streams[stream], time.monotonic() + wait_s
        while not exchange.ended:
            self.pump(until)
        del self.streams[stream]
        if exchange.reset is not None and "grpc-status" not in exchange.head:
            raise Broken(f"RST_STREAM {exchange.reset}")
        if "grpc-status" not in exchange.head:
            raise Broken(f"no grpc-status in {exchange.head}")
        return int(exchange.head["grpc-status"]), exchange.head.get("grpc-message", ""), exchange.messages()


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number, value):
    """A field of a message: text and bytes with their length, integers as varints."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def packed(number, values):
    return field(number, b"".join(map(varint, values)))


def _read_varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at


def varints(data):
    found, at = [], 0
    while at < len(data):
        value, at = _read_varint(data, at)
        found.append(value)
    return found


def parse(data):
    """A message as {field: [values]}; values are integers or bytes. Raises ValueError if it is invalid."""
    found, at = {}, 0
    try:
        while at < len(data):
            key, at = _read_varint(data, at)
            kind = key & 7
            if kind == 0:
                value, at = _read_varint(data, at)
            elif kind in (1, 5):
                length = 8 if kind == 1 else 4
                value, at = data[at:at + length], at + length
            elif kind == 2:
                length, at = _read_varint(data, at)
                value, at = data[at:at + length], at + length
            else:
                raise ValueError(f"wire type {kind}")
            if at > len(data):
                raise ValueError("the message is cut")
            found.setdefault(key >> 3, []).append(value)
    except IndexError:
        raise ValueError("the message is cut") from None
    return found
