# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Models by their names on the Hugging Face Hub: in the local cache, or from a Hub that this
machine plays.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from nemo_aligner.checkpoint import sources
from nemo_aligner.checkpoint.forms import check_restore_path
from nemo_aligner.core.errors import UserError
from tests import hugging_face
from tests.peft_folders import TOKENS, load, outputs_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
KEY = "pretrained_checkpoint.restore_from_path"


@pytest.fixture
def folder(write_folder):
    return write_folder(hugging_face.randomized(hugging_face.FOLDERS["Llama 3.2"]))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_model_that_is_not_there_is_named_with_the_command(cache):
    with pytest.raises(UserError, match=r"restore_from_path=our/tiny .*`hf download our/tiny`"):
        check_restore_path("our/tiny", KEY)
    with pytest.raises(UserError, match=r"runs/sft.nemo does not exist; give the path"):
        check_restore_path("runs/sft.nemo", KEY)
    with pytest.raises(UserError, match=r"hf:/.*our/tiny cannot be downloaded: .*OFFLINE"):
        check_restore_path("hf://our/tiny", KEY)


def test_a_model_is_downloaded_where_the_name_asks_for_it(folder, cache):
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    info = {"id": "our/tiny", "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]}
    sizes = {name: len(content) for name, content in files.items()}
    tree = [{"type": "file", "path": name, "size": n, "oid": "0"} for name, n in sizes.items()]
    tree.append({"type": "file", "path": "old.bin", "size": 1, "oid": "0"})  # is not wanted

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.startswith("/api/"):
                content = json.dumps(tree if "/tree/" in self.path else info).encode()
            else:
                content = files[self.path.rpartition("/")[2]]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", hashlib.sha256(content).hexdigest())
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_args):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    environment |= {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    code = "from nemo_aligner.checkpoint.forms import check_restore_path\n"
    code += f"print(check_restore_path('hf://our/tiny', {KEY!r}))"
    try:
        options = {"capture_output": True, "text": True, "timeout": 120, "check": True}
        done = subprocess.run([sys.executable, "-c", code], env=environment, **options)
        found = Path(done.stdout.splitlines()[-1])
    finally:
        server.shutdown()
        server.server_close()
    assert {file.name: file.read_bytes() for file in found.iterdir()} == files
    # From now on it is found in the cache.
    assert check_restore_path("our/tiny", KEY) == found
    assert str(sources.open_source("our/tiny")) == str(found)
    assert torch.equal(outputs_of(load("our/tiny"), TOKENS), outputs_of(load(folder), TOKENS))
