# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The recipes of examples/recipes, as they stand, with small random models of the same
architecture and small files of the same layout.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
import transformers

from nemo_aligner.servers.ports import find_free_port
from tests import hugging_face
from tests.functional.jobs import ROOT, read_metrics, write_lines
from tests.patience import patience, wait_until

RECIPES = ROOT / "examples" / "recipes"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# What a CPU and a small model change.
SHORT = ["trainer.precision=32", "model.encoder_seq_length=256"]
SMALL = [*SHORT, "model.micro_batch_size=2", "model.global_batch_size=4"]


def two_steps(section: str) -> list[str]:
    keys = ("max_steps", "val_check_interval", "save_interval")
    return [f"trainer.{section}.{key}=2" for key in keys]


SIZES = {"num_rollout_samples": 4, "num_val_samples": 4, "length_params.max_length": 8}
SIZES |= {f"{part}_micro_batch_size": 2 for part in ("rollout", "val_rollout", "forward")}
PPO = [*SMALL, *two_steps("ppo"), *(f"model.ppo.{key}={size}" for key, size in SIZES.items())]


def run(script, folder, *arguments: str, **environment: str) -> str:
    """Run a recipe to its end; returns its output. Nothing of it is left running."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    inherited = {key: value for key, value in os.environ.items() if key not in names}
    process = subprocess.Popen(
        ["bash", str(script), *arguments],
        cwd=folder,
        env=inherited
        | {
            "PYTHON": sys.executable,
            "ACCELERATOR": "cpu",
            "PORT": str(find_free_port()),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=patience(400))
        assert process.returncode == 0, output[-4000:]
        wait_until(lambda: not _members(process.pid), 10, lambda: str(_members(process.pid)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return output


def _members(group: int) -> list[psutil.Process]:
    """The processes of a group that still run."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != "zombie":
                found.append(process)
    return found


def tiny(write_folder, kind: str):
    sizes = {"vocab_size": 300, "max_position_embeddings": 512, "tie_word_embeddings": True}
    return write_folder(hugging_face.randomized(hugging_face.causal_lm(kind, **sizes)))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_gsm8k(write_folder, tmp_path):
    """From a copy of the examples, which need no checkout around them."""
    examples = tmp_path / "my examples"
    shutil.copytree(RECIPES.parent, examples, symlinks=True)
    model = tiny(write_folder, "Qwen2")
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": CHAT_TEMPLATE}
    file.write_text(json.dumps(config))
    source = tmp_path / "gsm8k"
    source.mkdir()
    for split, count in (("train", 12), ("test", 4)):
        sums = [(f"What is {i} + {i}?", f"It is {2 * i}.\n#### {2 * i}") for i in range(count)]
        lines = [{"question": question, "answer": answer} for question, answer in sums]
        write_lines(source / f"{split}.jsonl", lines)
    run(
        examples / "recipes/gsm8k/run.sh",
        tmp_path,
        *PPO,
        "model.ppo.num_rollouts_per_prompt=2",
        MODEL=model.name,  # relative to where the user is
        GSM8K="gsm8k",
        OUT="out",
    )
    (prompt, *_) = (tmp_path / "out/data/train.jsonl").read_text().splitlines()
    assert json.loads(prompt)["text"].startswith("<user>What is 0 + 0?\n\nThink")
    assert json.loads(prompt)["answer"] == "0"
    assert len(read_metrics(tmp_path / "out/actor", "train_rollouts/rewards")) == 2
    assert (tmp_path / "out/report.html").is_file()
    final = tmp_path / "out/actor/checkpoints/megatron_gpt_ppo_actor-hf"
    assert transformers.AutoTokenizer.from_pretrained(final).chat_template == CHAT_TEMPLATE


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_ultrafeedback(write_folder, tmp_path):
    model = tiny(write_folder, "Llama")
    for split, count in (("train", 12), ("test", 4)):
        lines = []
        for i in range(count):
            question = {"role": "user", "content": f"Tell me about {i}."}
            texts = f"{i} is a number.", f"{i} is nothing."
            chosen, rejected = ([question, {"role": "assistant", "content": x}] for x in texts)
            lines.append({"prompt": question["content"], "chosen": chosen, "rejected": rejected})
        write_lines(tmp_path / f"{split}.jsonl", lines)
    parts = {"train_ds.global_batch_size": 4, "train_ds.micro_batch_size": 2}
    parts |= {f"{part}_ds.max_seq_length": 256 for part in ("train", "validation")}
    sft = [*SHORT, *two_steps("sft"), *(f"model.data.{key}={n}" for key, n in parts.items())]
    own = {"SFT": sft, "RM": [*SMALL, *two_steps("rm")], "CRITIC": SMALL, "ACTOR": PPO}
    run(
        RECIPES / "ultrafeedback/run.sh",
        tmp_path,
        MODEL=model.name,
        TRAIN="train.jsonl",
        TEST="test.jsonl",
        OUT="out",
        **{f"{job}_ARGS": " ".join(words) for job, words in own.items()},
    )
    assert len(read_metrics(tmp_path / "out/actor", "train_rollouts/rewards")) == 2
    assert (tmp_path / "out/report.html").is_file()
    assert (tmp_path / "out/actor/checkpoints/megatron_gpt_ppo_actor-hf/config.json").is_file()


def test_the_reward_of_gsm8k():
    sys.path.insert(0, str(RECIPES / "gsm8k"))
    try:
        import reward
    finally:
        sys.path.pop(0)
    rewards = {"1,200 and 34.\n#### 1234": 1.0, "#### 7\nNo.\n#### $1,234": 1.0}
    rewards |= {"#### 1234.5": 0.1, "1234": 0.0, "": 0.0}
    n = len(rewards)
    found = reward.right_number(["How many?"] * n, list(rewards), [1] * n, ["1,234"] * n)
    assert found == list(rewards.values())
