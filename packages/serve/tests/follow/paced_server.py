"""A server that streams its drafter's name slowly: `python paced_server.py PORT DRAFTER`. Streams
wait while the drafter's folder has a file `hold`. It needs nothing but Python.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NUM_PARTS = 10
PART_SECONDS = 0.06


class Handler(BaseHTTPRequestHandler):
    """Answers every POST with a stream."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply(json.dumps({"data": [{"id": "paced"}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(NUM_PARTS):
            part = f"{sys.argv[2]} {number}\n".encode()
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            time.sleep(PART_SECONDS)
            while Path(sys.argv[2], "hold").exists():
                time.sleep(PART_SECONDS)
        self.wfile.write(b"0\r\n\r\n")

    def reply(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
