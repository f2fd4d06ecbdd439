"""A webhook of the tests' own, on loopback: it keeps what it is sent."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """What was received, in order; `statuses` are the next answers, 200 after them."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    location: str | None = None
    """Sent along with each answer."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Serve until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.paths.append(self.path)
            receiver.bodies.append(json.loads(sent))
            receiver.headers.append(dict(self.headers))
            self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
            if receiver.location is not None:
                self.send_header("Location", receiver.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}/services/secret-key?token=secret")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
