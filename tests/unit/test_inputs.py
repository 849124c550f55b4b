# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Wrong paths, keys, sizes and data forms are told by every job before its packages are imported
(launch/job_entry.py).
"""

import json
import shlex
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

MANY = """
import contextlib, io, json, sys
from nemo_aligner.__main__ import main
results = []
for words in json.loads(sys.stdin.read()):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main(words)
    results.append([said.getvalue(), "torch" in sys.modules])
print(json.dumps(results))
"""
BASE = "pretrained_checkpoint.restore_from_path=base"
SFT_BASE = "model.restore_from_path=base model.data.train_ds.file_path"
PREFIX = "'model.data.data_prefix={train: [%s]}'"
WRONG = {  # words of the command line -> what the one message says
    "serve critic pretrained_checkpoint.restore_from_path=away": "restore_from_path=away does not",
    "serve teacher pretrained_checkpoint.restore_from_path=.": "is a directory without model_conf",
    f"logits {BASE} output_path=o data.data.file_path=away": "file_path: data file away does not",
    f"train sft {SFT_BASE}=away.jsonl": "train_ds.file_path: data file away.jsonl does not exist",
    f"train sft {SFT_BASE}=broken.jsonl": "broken.jsonl, line 2: not valid JSON",
    f"train sft {SFT_BASE}=texts.jsonl": "line 1: fields 'input' and 'output' are missing; the",
    f"train sft {SFT_BASE}=asked.jsonl": '{input: question, output: answer}" reads what looks',
    f"train sft {SFT_BASE}=unsaid.jsonl": "line 1: message 1 of field 'messages' (user) has no",
    f"train sft {SFT_BASE}=sft.jsonl model.tokenizer.model=no": "model.tokenizer.model=no does n",
    f"train sft {SFT_BASE}=sft.jsonl exp_manager.resume_from_checkpoint=.": "(no COMPLETE file)",
    f"train sft {SFT_BASE}=sft.jsonl model.peft.restore_from_path=no": "model.peft.restore_from_p",
    "train sft model.restore_from_path=hf model.data.train_ds.file_path=a trainer.devices=256": (
        "global_batch_size=128 must be a multiple of 256"
    ),
    f"train sft {SFT_BASE}=alpaca.jsonl": "line 1: the prompt is empty. 'instruction' looks like",
    f"train rm {BASE} {PREFIX % 'two.jsonl'}": "two.jsonl, line 2: no pair with the line before: ",
    f"train dpo {BASE} {PREFIX % 'whole.jsonl'}": "line 1: field 'prompt' is missing",
    f"train dpo {BASE} {PREFIX % 'whole.jsonl'} model.data.prompt_end=A": "have no beginning in c",
    f"train ppo {BASE} {PREFIX % 'blank.jsonl'}": "line 1: the prompt is empty. Remove",
    f"train dpo {BASE} {PREFIX % 'equal.jsonl'}": "line 2, 4, 6, 8, 10, 12, 14, 16, 18 (",
    f"train spin {BASE} model.data.train_ds.file_path=texts.jsonl": "field 'messages' (or",
    f"train rm {BASE} {PREFIX % 'sft.jsonl'}".replace("train:", "trian:"): "has the keys trian",
    f"train rm {BASE} {PREFIX % 'sft.jsonl'}": "line 1: field 'text' is missing",
    f"train kto {BASE} {PREFIX % 'pairs.jsonl'}": "fields 'response' and 'preference' are m",
    f"train ppo {BASE} {PREFIX % 'texts.jsonl'} trainer.ppo.reward_fn=no.py:f": "no.py does not e",
    f"train rs {BASE} {PREFIX % 'texts.jsonl'} trainer.rs.reward_fn=no_code.py:f": "never closed",
    f"train rs {BASE} {PREFIX % 'away*.parquet'}": "prefix.train: no data file matches",
    f"train reinforce {BASE} {PREFIX % 'away'} model.data.data_impl=mmap": "away.idx does not ex",
    f"train distill {BASE} {PREFIX % 'sft.jsonl'}": "line 1: field 'topk_logits' is missing",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """(stderr, whether PyTorch was imported) of each command line, all in one process."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "base").mkdir()
    (folder / "base/model_config.yaml").write_text("{}")
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text("{}")
    message = {"role": "user", "content": "1+1="}
    answer = message | {"role": "assistant"}
    for name, *records in (
        ("sft", {"input": "1+1=", "output": "2"}),
        ("texts", {"text": "1+1="}),
        ("pairs", {"prompt": "1+1=", "chosen": "2", "rejected": "3"}),
        ("equal", *({"prompt": "1+1=", "chosen": n, "rejected": "3"} for n in ["2", "3"] * 70)),
        ("asked", {"question": "1+1=", "answer": "2"}),
        ("two", *({"messages": [message | {"content": text}, answer]} for text in "ab")),
        ("alpaca", {"instruction": "1+1=", "input": "", "output": "2"}),
        ("whole", {"chosen": "1+1=2", "rejected": "1+1=3"}),
        ("blank", {"text": " "}),
        ("unsaid", {"messages": [{"role": "user"}]}),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "broken.jsonl").write_text('{"input": "1", "output": "2"}\n{"input":\n')
    (folder / "f.py").write_text("def f(prompts, responses, lengths): ...")
    (folder / "no_code.py").write_text("def f(prompts")
    words = json.dumps([shlex.split(words) for words in WRONG])
    options = {"capture_output": True, "text": True, "cwd": folder}
    done = subprocess.run([sys.executable, "-c", MANY], input=words, **options)
    assert done.returncode == 0, done.stderr
    return dict(zip(WRONG, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("words", WRONG)
def test_it_is_one_message_before_torch_is_imported(words, said):
    text, has_torch = said[words]
    assert not has_torch
    assert WRONG[words] in text and text.startswith("\nERROR: ") and len(text.splitlines()) == 2


@pytest.mark.full
def test_under_torchrun_one_rank_tells_it(tmp_path):
    words = "train sft model.restore_from_path=away model.data.train_ds.file_path=away".split()
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m"]
    done = subprocess.run([*run, "nemo_aligner", *words], capture_output=True, text=True)
    assert done.stderr.count("ERROR: ") == 1 and done.returncode == 1
