# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A web server that takes JSON and replies as a test wishes."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JsonServer:
    """Serves inside a `with` block.

    Args:
        reply: (path, fields of the request) -> what becomes JSON, or (HTTP status, bytes, and may
            be more headers), or None for silence.

    Attributes:
        requests, headers: of each request, in the order in which they came.
    """

    def __init__(self, reply):
        self.requests, self.headers, lock = [], [], threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append(fields)
                    outer.headers.append(dict(self.headers))
                found = reply(self.path.split("?")[0], fields)
                if found is None:
                    time.sleep(1.0)
                    return
                status, content, *more = found if isinstance(found, tuple) else (200, None)
                content = json.dumps(found).encode() if content is None else content
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                if 300 <= status < 400:
                    self.send_header("Location", "http://elsewhere/?key=hidden")
                for header in more[0].items() if more else ():
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
