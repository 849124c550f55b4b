# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The walk-through docs/own_model.md, as it stands, with a small model of Hugging Face that can
count to nine: every command of the page runs, and its output has the lines that the page shows.
"""

import json
import os
import random
import re
import shlex

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.chat_forms import FAMILIES
from tests.functional.jobs import ROOT, read_metrics
from tests.hugging_face import causal_lm
from tests.patience import patience
from tests.warm_start import start_python

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PAGE = (ROOT / "docs" / "own_model.md").read_text()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PAIRS = sorted(((a, b) for a in range(1, 6) for b in range(1, 5)), key=lambda pair: pair != (3, 4))


def question(a: int, b: int) -> dict:
    return {"role": "user", "content": f"{a}+{b}"}


def write_model(folder) -> None:
    """A model that knows the form of an answer, and every third answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    own = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    own["chat_template"] = FAMILIES["chatml"].template
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **own)
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "max_position_embeddings": 64}
    sizes |= {"vocab_size": len(tokenizer), "initializer_range": 0.02}
    ids = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    model = causal_lm("Qwen2", **sizes, **ids, bos_token_id=None)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dice = random.Random(0)
    for _ in range(400):
        answers = [a + b if dice.random() < 0.3 else dice.randint(1, 9) for a, b in PAIRS]
        replies = [{"role": "assistant", "content": str(answer)} for answer in answers]
        chats = [[question(a, b), reply] for (a, b), reply in zip(PAIRS, replies)]
        ids = tokenizer.apply_chat_template(chats, return_tensors="pt", return_dict=True).input_ids
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_files(folder) -> None:
    """The page's files, with more lines of the same form; its Python as it stands."""
    chat, prompt = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.S))
    reply = {"role": "assistant", "content": "7"}
    assert chat == {"messages": [question(3, 4), reply]}
    assert prompt == {"messages": [question(3, 4)], "answer": "7"}
    chats, prompts = folder / "chats.jsonl", folder / "prompts.jsonl"
    with chats.open("w") as chats, prompts.open("w") as prompts:
        for a, b in PAIRS:
            messages, answer = [question(a, b)], str(a + b)
            prompts.write(json.dumps({"messages": messages, "answer": answer}) + "\n")
            messages.append(reply | {"content": answer})
            chats.write(json.dumps({"messages": messages}) + "\n")
    (folder / "reward.py").write_text(re.search(r"```python\n(.*?)```", PAGE, re.S).group(1))


def commands() -> list[tuple[list[str], list[str]]]:
    """Words of each command of the page, and the lines of output that it shows."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.S):
        for command in re.split(r"^\$ ", block.replace(" \\\n", " "), flags=re.M)[1:]:
            words, _, output = command.partition("\n")
            found.append((shlex.split(words), output.splitlines()))
    return found


def run(words: list[str], folder) -> str:
    assert words[0] == "nemo-aligner"
    log = folder / "output.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = start_python(["-m", "nemo_aligner", *words[1:]], environment, folder, log)
    assert process.wait(patience(240)) == 0, log.read_text()[-4000:]
    return log.read_text()


def shows(output: str, line: str) -> bool:
    """Whether the output has a line of the page, with any numbers in the place of those there."""
    pattern = re.sub(r"\d+(\\\.\d+)?", r"-?\\d+(\\.\\d+)?", re.escape(line.strip()))
    return re.search(pattern, output) is not None


def test_the_page_holds(tmp_path):
    write_model(tmp_path / "Qwen-tiny")
    write_files(tmp_path)
    assert len(commands()) == 6
    for words, lines in commands():
        output = run(words, tmp_path)
        for line in lines:
            assert shows(output, line), f"{shlex.join(words)}\n{line}\n---\n{output[-3000:]}"
    grpo_words = next(words for words, _ in commands() if words[1:3] == ["train", "ppo"])
    assert len(grpo_words) - 3 == 10  # settings, as the page says
    grpo = tmp_path / "results" / "grpo"
    rewards = read_metrics(grpo, "train_rollouts/rewards")
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5, rewards
    # What came back is the policy: the most likely answers are those that it learned to give.
    folder = tmp_path / "my-model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    right = 0
    for a, b in PAIRS:
        ids = tokenizer.apply_chat_template(
            [question(a, b)], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        text = tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0])
        right += text.endswith(f"assistant\n{a + b}<|im_end|>")
    assert right >= 10, right
