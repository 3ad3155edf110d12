"""Remote storage on this machine: a real HTTP server with ranges and ETags, and ways for it to misbehave."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


def safetensors(*tensors: tuple[str, bytes]) -> bytes:
    """A file of safetensors that holds these as bytes."""
    header, at = {}, 0
    for name, data in tensors:
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, data in tensors)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        # Who asked went away: it had seen enough.
        pass


class Bucket:
    """Serves `objects` by name below /b/ while it is entered. `answer` may take a request over, and says whether."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects = dict(objects)
        self.tags: dict[str, str] = {}
        self.seen: list[tuple[str, str]] = []
        """(path with query, range) of every request."""
        self.answer: Callable[[BaseHTTPRequestHandler, str], bool] = lambda handler, name: False
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/b"

    def __enter__(self) -> Bucket:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                name = self.path.partition("?")[0].rpartition("/")[2]
                bucket.seen.append((self.path, self.headers.get("Range", "")))
                if not bucket.answer(self, name):
                    bucket.serve(self, name)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def serve(self, handler: BaseHTTPRequestHandler, name: str, most: int | None = None) -> None:
        """As well behaved storage does; with `most`, the connection breaks after so many bytes."""
        data = self.objects.get(name)
        if data is None:
            refuse(handler, 404)
            return
        tag = self.tags.get(name, '"1"')
        low, high = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers["Range"]).groups())  # type: ignore[union-attr]
        if handler.headers.get("If-Range") not in (None, tag):
            refuse(handler, 200, data)
            return
        if low >= len(data):
            refuse(handler, 416)
            return
        part = data[low : high + 1]
        handler.send_response(206)
        handler.send_header("ETag", tag)
        handler.send_header("Content-Range", f"bytes {low}-{low + len(part) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(part)))
        handler.end_headers()
        handler.wfile.write(part[:most])
        if most is not None:
            handler.close_connection = True


def refuse(handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    """An answer that is not a range."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
