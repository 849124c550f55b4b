# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""SteerLM as users run it: a regression reward model is served, labels conversations, and a policy
learns them; SteerLM 2.0 on two ranks, resumed.
"""

import pytest
import torch

from nemo_aligner.data.nlp.steerlm import ALL_STEERLM_ATTRIBUTES, scored_turns
from nemo_aligner.servers.ports import find_free_port
from tests.data_sets import read
from tests.functional.jobs import (
    ScriptJob,
    assert_ended_well,
    must_succeed,
    read_metrics,
    reward_server,
    wait_until_serving,
    write_lines,
)
from tests.functional.test_sft_rm_scripts import LORA, must_resume_exactly, texts, training
from tests.golden.jobs import RECORDS
from tests.tiny_models import tiny_config
from tests.unit.test_steerlm import conversation, run, write

pytestmark = pytest.mark.timeout(300)
CONTEXT = {"encoder_seq_length": 384, "max_position_embeddings": 384}
CHAT = ["model.data.chat=True", "model.data.chat_prompt_tokens.system_turn_start='<extra_id_0>'"]
CHAT += ["model.data.chat_prompt_tokens.turn_start='<extra_id_1>'"]
CHAT += ["model.data.chat_prompt_tokens.label_start='<extra_id_2>'"]


@pytest.fixture(scope="module")
def base(tiny_tokenizer_dir, tmp_path_factory):
    """A policy with random weights."""
    from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel

    path = tmp_path_factory.mktemp("base") / "base.nemo"
    GPTSFTModel(tiny_config(tiny_tokenizer_dir, **CONTEXT)).save_to(str(path))
    return path


@pytest.fixture(scope="module")
def attribute_model(tiny_tokenizer_dir, tmp_path_factory):
    """A regression model whose attributes are spread over -2 to 6, and its file."""
    from nemo_aligner.models.nlp.gpt.megatron_gpt_regression_reward_model import (
        MegatronGPTRegressionRewardModel,
    )

    regression = {"num_attributes": len(ALL_STEERLM_ATTRIBUTES), "merge_attributes": False}
    own = {"reward_model_type": "regression", "regression": regression, **CONTEXT}
    cfg = tiny_config(tiny_tokenizer_dir, seed=5, force_head_dtype="float32", **own)
    model = MegatronGPTRegressionRewardModel(cfg)
    head = model.unwrapped()[0].rm_head
    with torch.no_grad():
        head.weight.mul_(8.0)
        head.bias.copy_(torch.linspace(-1.0, 5.0, len(ALL_STEERLM_ATTRIBUTES)))
    model.prepare_for_inference()
    path = tmp_path_factory.mktemp("attributes") / "rm.nemo"
    model.save_to(str(path))
    return model, path


def train(script, base, data, log_dir, *overrides, **kwargs) -> ScriptJob:
    """Four updates."""
    settings = [*CHAT, f"model.restore_from_path={base}", "model.encoder_seq_length=384"]
    settings += [*texts(data, data), "model.data.train_ds.global_batch_size=4"]
    settings += ["model.data.train_ds.micro_batch_size=1", "trainer.sft.max_steps=4"]
    settings += ["trainer.sft.val_check_interval=2", *overrides]
    return training(script, log_dir, *settings, **kwargs)


def expected_label(model, text: str) -> str:
    """The label of one text, by the model itself and plain arithmetic."""
    ids = model.tokenizer.text_to_ids(text)
    numbers = model.infer((torch.tensor([ids]), torch.tensor([len(ids)])))[0].tolist()
    whole = [min(max(round(number), 0), 4) for number in numbers]
    return ",".join(f"{a}:{n}" for a, n in zip(ALL_STEERLM_ATTRIBUTES, whole, strict=True))


@pytest.mark.full
def test_a_policy_learns_what_a_served_model_has_labelled(
    attribute_model, base, tmp_path, monkeypatch, capsys
):
    model, path = attribute_model
    given = [conversation(n) for n in range(16)]
    source, out = write(tmp_path / "in.jsonl", given), tmp_path / "labelled.jsonl"
    port = find_free_port()
    with reward_server(path, tmp_path / "server", port) as server:
        wait_until_serving(server)
        files = [f"--input-file={source}", f"--output-file={out}", f"--port={port}"]
        run("attribute_annotate", monkeypatch, capsys, *files, "--host=127.0.0.1")
        # Too long for the model: one line, and what was complete stays.
        long = conversation(16)
        long["conversations"][1]["value"] = "xyz" * 200
        write(tmp_path / "in.jsonl", [*given, long])
        error = run("attribute_annotate", monkeypatch, capsys, *files, "--host=127.0.0.1")
        assert "conversation 17 of" in error and "encoder_seq_length=384" in error
        assert_ended_well(server, server.stop())
    labelled = read(out)
    assert len(labelled) == len(given)
    seen = set()
    for record, original in zip(labelled, given, strict=True):
        for number, text in scored_turns(original):
            label = record["conversations"][number]["label"]
            assert label == expected_label(model, text)
            seen.add(label)
    assert len(seen) > 1

    must_succeed(train("train_gpt_sft.py", base, out, tmp_path / "sft"))
    losses = read_metrics(tmp_path / "sft", "validation/loss")
    assert losses[1] < losses[0]


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Prompts with two or three responses."""
    path = tmp_path_factory.mktemp("scored") / "data.jsonl"
    write_lines(path, [RECORDS["steerlm2"](n) for n in range(18)])
    return path


@pytest.mark.full
@pytest.mark.parametrize("options", [[], LORA], ids=["full", "lora"])
def test_steerlm2_on_two_data_parallel_ranks_learns_and_resumes_exactly(
    base, scored, tmp_path, options
):
    own = ["model.steerlm2.micro_batch_size=2", "model.steerlm2.forward_micro_batch_size=3"]
    own += [*options, "model.hidden_dropout=0.1", "model.optim.lr=3e-3"]

    def job(folder):
        return train("train_steerlm2.py", base, scored, folder, *own, ranks=2)

    whole = tmp_path / "whole"
    must_succeed(job(whole))
    validation = read_metrics(whole, "validation/distance")
    assert validation[1] < validation[0]
    assert len(read_metrics(whole, "train/effective_responses")) == 4
    assert (whole / "checkpoints" / "megatron_gpt_sft.nemo").is_file()
    must_resume_exactly(job, whole)
