# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of two ranks: each computes the checksums of its own file, damage to one is known on
both, and a rank that cannot write takes nobody with it into an endless wait.
"""

import errno
from pathlib import Path

from tests.distributed.launcher import run_ranks
from tests.tiny_models import tiny_config


def _callback(folder: str, tokenizer_dir: str):
    from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

    model = MegatronGPTModel(tiny_config(tokenizer_dir, tensor_model_parallel_size=2))
    training = model.setup_megatron_optimization(max_steps=10)
    return CheckpointCallback(folder, model, *training, name="x")


def damaged(folder: str, tokenizer_dir: str) -> dict:
    """What this rank sees of two checkpoints, of which the newer one is damaged."""
    from torch.distributed import barrier, get_rank

    from nemo_aligner.checkpoint.checksums import MANIFEST, parse_manifest

    callback = _callback(folder, tokenizer_dir)
    for step in (1, 2):
        newest = callback.custom_save({"step": step}, trainer_state={"step": step})
    listed = sorted(parse_manifest((newest / MANIFEST).read_bytes(), newest))
    sound = callback.is_sound(newest)
    barrier()
    if get_rank() == 0:
        file = newest / "weights/__1_0.distcp"  # of the other rank
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    return {"listed": listed, "sound": sound, "loaded": callback.load_latest()}


def test_each_rank_computes_its_checksums_and_knows_of_damage(tiny_tokenizer_dir, tmp_path):
    found = run_ranks(damaged, 2, 120, str(tmp_path), tiny_tokenizer_dir)
    assert found[0] == found[1]
    assert found[0]["sound"] and found[0]["loaded"] == {"step": 1}
    files = {"weights/__0_0.distcp", "weights/__1_0.distcp", "rng/rank_00001.pt", "state.json"}
    assert files <= set(found[0]["listed"])
    assert (tmp_path / "checkpoints/checkpoint-step=2.damaged").is_dir()


def one_rank_has_no_space(
    folder: str, tokenizer_dir: str, where: str, in_background: bool = False
) -> tuple:
    """The error of a save in which rank 1, or rank 0, cannot write; then a save that can."""
    from torch.distributed import barrier, get_rank

    from nemo_aligner.checkpoint import checkpointing, checksums, dist_ckpt
    from nemo_aligner.core.errors import SaveError

    callback = _callback(folder, tokenizer_dir)
    callback.async_save = in_background
    callback.custom_save({"step": 1}, trainer_state={"step": 1})
    callback.finish_save()
    full = OSError(errno.ENOSPC, "No space left on device")
    stream, names = checksums._Stream, ("write_durably", "write_manifest")
    modules = {"write_durably": checksums, "write_manifest": checkpointing}
    own = {name: getattr(modules[name], name) for name in names}

    class FullStream(stream):
        def write(self, data):
            if self.tell() + len(data) > 3000:
                self.files.error = full
                raise full
            return super().write(data)

    def refuse(*_arguments):
        raise full

    save_config = dist_ckpt.save_config

    def refuse_common(path, content):
        if path.name == "common.pt":
            raise full
        return own["write_durably"](path, content)

    if where == "weights" and get_rank() == 1:
        checksums._Stream = FullStream
    elif where in names and get_rank() == (where == "write_durably"):
        setattr(modules[where], where, refuse)
    elif where == "common" and get_rank() == 0:
        checksums.write_durably = refuse_common
    elif where == "form" and get_rank() == 0:
        dist_ckpt.save_config = refuse
    try:
        callback.custom_save({"step": 2}, trainer_state={"step": 2})
        while callback.is_saving:  # as after each step
            callback.check_save()
        message = None
    except SaveError as error:
        message = str(error)
    checksums._Stream = stream
    dist_ckpt.save_config = save_config
    for name in names:
        setattr(modules[name], name, own[name])
    barrier()
    left = sorted(path.name for path in Path(callback.root).iterdir())
    barrier()  # the next save begins to write there
    callback.custom_save({"step": 3}, trainer_state={"step": 3})
    callback.finish_save()
    return message, left, callback.load_latest()


def each_place(folder: str, tokenizer_dir: str) -> dict:
    places = {
        where: one_rank_has_no_space(f"{folder}/{where}", tokenizer_dir, where)
        for where in ("weights", "common", "form", "write_durably", "write_manifest")
    }
    for where in ("weights", "common", "form", "write_manifest"):
        name = f"{where}-in-background"
        places[name] = one_rank_has_no_space(f"{folder}/{name}", tokenizer_dir, where, True)
    return places


def test_a_full_disk_of_one_rank_is_one_error_on_all(tiny_tokenizer_dir, tmp_path):
    results = run_ranks(each_place, 2, 180, str(tmp_path), tiny_tokenizer_dir)
    for found in results:
        for where, (message, left, loaded) in found.items():
            assert message is not None and "no space left (No space left on device)" in message
            assert f"{tmp_path}/{where}/checkpoints/checkpoint-step=2" in message
            assert " MB are free" in message and "unexpected pos" not in message
            if "weights" in where:
                assert " MB are needed" in message
            assert left == ["checkpoint-step=1"] and loaded == {"step": 3}
