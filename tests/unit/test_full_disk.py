# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A real disk without space: a checkpoint that does not fit is refused before it is written, one
that meets the end of the disk says so, and in both cases the ones from before stay.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SAVES = """
import json, os, sys
from nemo_aligner.checkpoint import checksums
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.core.errors import SaveError
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from tests.tiny_models import tiny_config

folder, tokenizer = sys.argv[1:]
model = MegatronGPTModel(tiny_config(tokenizer, hidden_size=128, ffn_hidden_size=256))
callback = CheckpointCallback(folder, model, *model.setup_megatron_optimization(10), name="x")
callback.custom_save({"step": 1}, trainer_state={"step": 1})
filesystem = os.statvfs(folder)
free = filesystem.f_bavail * filesystem.f_frsize
with open(folder + "/ballast", "wb") as ballast:
    ballast.write(bytes(free - 400_000))
messages = []
for known in (True, False):
    if not known:
        checksums.check_space = lambda folder, needed: None
    try:
        callback.custom_save({"step": 2}, trainer_state={"step": 2})
    except SaveError as error:
        messages.append(str(error))
left = sorted(os.listdir(folder + "/checkpoints"))
os.unlink(folder + "/ballast")
callback.custom_save({"step": 3}, trainer_state={"step": 3})
loaded = callback.load_latest()
callback.async_save = True
with open(folder + "/ballast", "wb") as ballast:
    filesystem = os.statvfs(folder)
    ballast.write(bytes(filesystem.f_bavail * filesystem.f_frsize - 400_000))
callback.custom_save({"step": 4}, trainer_state={"step": 4})
try:
    callback.finish_save()
except SaveError as error:
    messages.append(str(error))
left_in_background = sorted(os.listdir(folder + "/checkpoints"))
os.unlink(folder + "/ballast")
callback.custom_save({"step": 5}, trainer_state={"step": 5})
callback.finish_save()
print(json.dumps({"messages": messages, "left": left, "loaded": loaded,
    "left_in_background": left_in_background, "loaded_at_last": callback.load_latest()}))
"""


@pytest.mark.full
def test_a_full_disk_is_named_and_spoils_nothing(tiny_tokenizer_dir, tmp_path):
    mount = "mount -t tmpfs -o size=40m none"
    inside = f'{mount} "$1" && exec "$2" -c "$3" "$1" "$4"'
    probe = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f"{mount} {tmp_path}"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted in a namespace here")
    arguments = [str(tmp_path), sys.executable, SAVES, tiny_tokenizer_dir]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "timeout": patience(120)}
    job = subprocess.run([*probe[:-1], inside, "sh", *arguments], env=environment, **options)
    assert job.returncode == 0, job.stderr[-3000:]
    found = json.loads(job.stdout.splitlines()[-1])
    assert found["left"] == ["checkpoint-step=1"] and found["loaded"] == {"step": 3}
    assert found["left_in_background"] == ["checkpoint-step=1", "checkpoint-step=3"]
    assert found["loaded_at_last"] == {"step": 5}
    for message, step in zip(found["messages"], (2, 2, 4), strict=True):
        place = f"{tmp_path}/checkpoints/checkpoint-step={step}.writing/weights"
        assert message.startswith(f"no space left (No space left on device) for {place}: ")
        assert " MB are needed, " in message and " MB are free. Free some" in message
