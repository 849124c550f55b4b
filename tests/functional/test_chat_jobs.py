# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters trained on conversations: DPO, KTO, SPIN (in both forms of chat data), and
conversations of several turns with RLOO and REINFORCE, which all resume exactly; on-policy
distillation.
"""

import functools

import pytest

from nemo_aligner.servers.ports import find_free_port
from tests import hugging_face
from tests.chat_forms import FAMILIES
from tests.functional import test_ppo_job, test_rs_job
from tests.functional.jobs import (
    assert_same_metrics,
    metric_names,
    must_end_well,
    must_succeed,
    read_metrics,
    samples_of,
    wait_until_serving,
    write_lines,
)
from tests.functional.test_distillation_scripts import on_policy, served
from tests.functional.test_environment_job import settings
from tests.functional.test_sft_rm_scripts import (
    JOBS,
    RESPONSES,
    must_resume_exactly,
    preferences,
    texts,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all]"]
LORA += ["model.peft.lora_tuning.adapter_dim=4", "model.peft.lora_tuning.variant=canonical"]
LORA += ["model.data.chat_template=tokenizer", "model.encoder_seq_length=96"]
NEMO_LORA = ["model.data.chat=True", *(word for word in LORA if "chat_template" not in word)]


@pytest.fixture
def base(write_folder):
    """A Qwen2 folder whose tokenizer has a chat template and its special tokens."""
    from transformers import AutoTokenizer

    # 302: ids of the tokenizer with its two special tokens.
    qwen = hugging_face.causal_lm("Qwen2", vocab_size=302, max_position_embeddings=128)
    folder = write_folder(hugging_face.randomized(qwen))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = FAMILIES["chatml"].template
    tokenizer.save_pretrained(folder)
    return folder


def ask(number: int) -> dict:
    return {"role": "user", "content": f"film {number}?"}


def reply(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Conversations for each of the algorithms."""
    folder = tmp_path_factory.mktemp("conversations")
    for name, count in (("train", 24), ("validation", 6)):
        records = preferences(count, lambda n: [ask(n)], reply) | {
            "sft": [{"messages": [ask(i), *reply(RESPONSES[i % 4])]} for i in range(count)],
            "nemo": [
                {
                    "system": "Be kind.",
                    "mask": "User",
                    "conversations": [
                        {"from": "User", "value": f"film {i}?"},
                        {"from": "Assistant", "value": RESPONSES[i % 4]},
                    ],
                }
                for i in range(count)
            ],
            "own": [
                {"prompt": [ask(i)], "response": reply(RESPONSES[i % 4])} for i in range(count)
            ],
        }
        for kind, lines in records.items():
            write_lines(folder / f"{kind}_{name}.jsonl", lines)
    write_lines(folder / "prompts.jsonl", [{"messages": [ask(i)]} for i in range(48)])
    return folder


def job(algorithm, data, base, folder):
    without, options = "++model.hidden_dropout=0.0", LORA
    if algorithm in ("dpo", "kto"):
        options = [*LORA, "++model.data.append_eod=False"]
    elif algorithm == "spin in NeMo's format":
        options = [*texts(data / "nemo_train.jsonl", data / "nemo_validation.jsonl"), *NEMO_LORA]
    return JOBS[algorithm.split()[0]](data, base, folder, *options, without)


@pytest.mark.parametrize(
    "algorithm, key",
    [
        ("dpo", "train/margin"),
        ("kto", "train/rewards_margin"),
        ("spin", "train/margin"),
        ("spin in NeMo's format", "train/margin"),
    ],
)
def test_conversations_train_adapters(algorithm, key, data, base, tmp_path):
    run = functools.partial(job, algorithm, data, base)
    whole = tmp_path / "whole"
    must_succeed(run(whole))
    assert read_metrics(whole, key)[0] == pytest.approx(0, abs=1e-4)
    assert all(norm > 0 for norm in read_metrics(whole, "train/grad_norm"))
    if algorithm.startswith("spin"):
        texts = [sample["actual"].strip() for sample in samples_of(whole, "train")]
        assert all(text.startswith(tuple(RESPONSES)) for text in texts)
    must_resume_exactly(run, whole)


def test_a_student_ends_its_own_turns(data, base, tmp_path):
    """With the teacher's weights it writes what the teacher expects, in the form of the template:
    nothing is left to learn.
    """
    port, folder = find_free_port(), tmp_path / "same"
    options = [*LORA, "model.data.columns=null", "++model.hidden_dropout=0.0"]
    options += ["model.knowledge_distillation.on_policy.fraction=1"]
    prefix = f"{{train: [{data}/own_train.jsonl], validation: [{data}/own_validation.jsonl]}}"
    with served(base, tmp_path / "teacher.log", port, "inference.top_k=302") as server:
        wait_until_serving(server)
        options = [*options, f"model.data.data_prefix={prefix}"]
        must_succeed(on_policy(data, base, folder, port, *options))
    assert read_metrics(folder, "train/kd_loss")[0] == pytest.approx(0, abs=1e-6)
    assert read_metrics(folder, "train/on_policy") == [1] * 4


def actor(kind, data, base, folder, steps, port):
    """Conversations with an environment, by PPO with RLOO or by REINFORCE."""
    options = [*settings(folder, kind), *LORA, f"pretrained_checkpoint.restore_from_path={base}"]
    options += [f"trainer.{kind}.{key}_interval=2" for key in ("val_check", "save")]
    options.append("model.optim.sched.name=constant")
    if kind == "reinforce":
        options += [f"trainer.reinforce.max_steps={steps}"]
        return test_rs_job.actor(data, folder, port, *options, kind="reinforce")
    options += [f"trainer.ppo.max_steps={steps}", "model.ppo.train_on_truncated=True"]
    options += ["remote_critic_rm.combine_rm_and_critic_server=False"]
    return test_ppo_job.without_critic(data, folder, *options, estimator="rloo")


@pytest.mark.parametrize("kind", ["ppo", "reinforce"])
def test_conversations_of_several_turns_train_adapters(kind, data, base, tmp_path):
    port = find_free_port()  # nobody listens: the environment gives the rewards
    for folder, ends in ((tmp_path / "whole", [4]), (tmp_path / "parts", [2, 4])):
        for steps in ends:
            must_end_well(actor(kind, data, base, folder, steps, port))
    whole, parts = (tmp_path / name / "actor" for name in ("whole", "parts"))
    assert read_metrics(whole, "train_rollouts/init_policy_kl")[0] == 0
    assert max(read_metrics(whole, "train_rollouts/turns")) > 1
    # docs/rewards.md says why they may differ.
    names = [n for n in metric_names(whole) if "sampling_ratio" not in n]
    assert_same_metrics(parts, whole, names)
