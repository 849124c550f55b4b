# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The package from Python: a policy in the hand, jobs, and the names of `nemo_aligner`."""

import json
import re
from pathlib import Path

import pytest
import torch

import nemo_aligner as na
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from tests.distributed.launcher import run_ranks
from tests.tiny_models import logprobs_by_hand, tiny_config

pytestmark = pytest.mark.slow
PROMPTS, RESPONSES = ["the film", "a bad film, and long"], [" was a joy", " is dull"]
README = Path(__file__).resolve().parents[2] / "README.md"
CPU = {"trainer.accelerator": "cpu"}


@pytest.fixture(scope="module")
def saved(tiny_tokenizer_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("api") / "sft.nemo"
    GPTSFTModel(tiny_config(tiny_tokenizer_dir)).save_to(str(path))
    return path


def test_every_name_is_there():
    for name in na.__all__:
        assert getattr(na, name) is not None
    assert {"PPO", "Policy", "losses"} <= set(dir(na))
    assert na.losses.sft_loss and na.advantages.calculate_advantages_and_returns
    with pytest.raises(AttributeError, match="no attribute 'PPQ'"):
        na.PPQ  # noqa: B018


def test_the_snippet_of_the_readme(saved, monkeypatch, capsys):
    """It runs as it stands, with a policy beside it."""
    monkeypatch.chdir(saved.parent)
    snippet = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    names = {}
    exec(snippet, names)
    assert capsys.readouterr().out.strip()
    (logprobs,) = names["logprobs"]
    assert logprobs.dtype == torch.float32 and float(logprobs.max()) < 0


def test_log_probs_are_those_of_the_response(saved):
    policy = na.Policy.load(saved, CPU)
    tokens, starts, ends = policy.tokenize(PROMPTS, RESPONSES)
    expected, _ = logprobs_by_hand(policy.model, tokens, 1.0)
    found = policy.logprobs(PROMPTS, RESPONSES)
    for row, logprobs in enumerate(found):
        start, end = int(starts[row]), int(ends[row])
        assert policy.tokenizer.ids_to_text(tokens[row, start:end].tolist()).strip() == (
            RESPONSES[row].strip()
        )
        wanted = expected[row, start - 1 : end - 1]
        torch.testing.assert_close(logprobs, wanted, atol=1e-5, rtol=1e-5)
    assert policy.logprobs([], []) == policy.generate([]) == []
    for texts, says in (
        ((["the film"], [""]), r"sample 0 has \d+ tokens of a prompt and 0 of a response"),
        ((["the film"], []), "1 prompts with 0 responses"),
        (("the film", " was"), "'the film' is one text"),
    ):
        with pytest.raises(UserError, match=says):
            policy.logprobs(*texts)


def test_responses_are_greedy_unless_sampling_is_asked_for(saved):
    policy = na.Policy.load(saved, CPU)
    greedy = policy.generate(PROMPTS, max_length=6)
    assert greedy == policy.generate(PROMPTS, max_length=6) and len(greedy) == 2
    assert greedy == policy.generate(PROMPTS, max_length=6, temperature=1e-4)
    assert greedy != policy.generate(PROMPTS, max_length=6, temperature=5.0)
    with pytest.raises(ConfigError, match="temperature"):
        policy.generate(PROMPTS, temperature=-1)


def weighted(logprobs, weights, rewards):
    """A loss of one's own."""
    return -(weights * rewards.unsqueeze(1) * logprobs).sum(), {}


def test_it_learns_by_a_loss_of_ones_own(saved, tmp_path):
    policy = na.Policy.load(saved, CPU | {"model.micro_batch_size": 2, "model.optim.lr": 1e-2})
    tokens, starts, ends = policy.tokenize(PROMPTS, RESPONSES)
    place = torch.arange(1, tokens.size(1))
    mask = (place >= starts.unsqueeze(1)) & (place < ends.unsqueeze(1))
    columns = {"tokens": tokens, "rewards": torch.tensor([1.0, -1.0])}
    by_hand = [float(row.sum()) for row in policy.logprobs(PROMPTS, RESPONSES)]

    first = policy.evaluate(weighted, columns, mask=mask)
    assert first["loss"] == pytest.approx((by_hand[1] - by_hand[0]) / int(mask.sum()), abs=1e-5)
    for _ in range(5):
        metrics = policy.train(weighted, columns, mask=mask)
    assert metrics["lr"] == 1e-2 and metrics["grad_norm"] > 0
    likely, unlikely = (float(row.sum()) for row in policy.logprobs(PROMPTS, RESPONSES))
    assert likely > by_hand[0] and unlikely < by_hand[1]
    with pytest.raises(TypeError, match="rewards"):
        policy.train(weighted, {"tokens": tokens}, mask=mask)
    for wrong, options, says in (
        (columns, {}, "a loss needs a mask"),
        ({**columns, "rewards": torch.ones(3)}, {"mask": mask}, "'tokens': 2, 'rewards': 3"),
        (columns, {"mask": mask, "clip": 0.0}, "clip=0.0: give a norm above 0, or None"),
    ):
        with pytest.raises(UserError, match=says):
            policy.train(weighted, wrong, **options)

    policy.save(tmp_path / "trained.nemo")
    policy.save_hf(f"{tmp_path}/hf-3.2/")
    with pytest.raises(UserError, match="hf-3.2 exists"):
        policy.save_hf(tmp_path / "hf-3.2")
    expected = policy.logprobs(PROMPTS, RESPONSES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf-3.2", "trained.nemo"]
    for name in ("trained.nemo", "hf-3.2"):
        found = na.Policy.load(tmp_path / name, CPU).logprobs(PROMPTS, RESPONSES)
        torch.testing.assert_close(found, expected)


def three_updates(path, settings):
    policy = na.Policy.load(path, {**CPU, "model.optim.lr": 1e-2, **settings})
    tokens, starts, _ = policy.tokenize(PROMPTS, RESPONSES)
    columns = {"tokens": tokens, "rewards": torch.tensor([1.0, -1.0])}
    mask = torch.arange(1, tokens.size(1)) >= starts.unsqueeze(1)
    metrics = [policy.train(weighted, columns, mask=mask) for _ in range(3)]
    return metrics, torch.cat(policy.logprobs(PROMPTS, RESPONSES)), policy.generate(PROMPTS)


def test_two_ranks_give_the_numbers_of_one(saved):
    (one,) = run_ranks(three_updates, 1, 60, saved, {})
    for metrics, logprobs, responses in run_ranks(
        three_updates, 2, 60, saved, {"model.tensor_model_parallel_size": 2}
    ):
        assert metrics == [pytest.approx(each, rel=1e-4) for each in one[0]]
        torch.testing.assert_close(logprobs, one[1], atol=1e-4, rtol=1e-4)
        assert responses == one[2]


def test_adapters_leave_the_weights(saved):
    settings = {"model.peft.peft_scheme": "lora", "model.optim.lr": 1e-2}
    policy = na.Policy.load(saved, CPU | settings)
    before = {name: value.clone() for name, value in policy.model._named_weights()}
    tokens, *_ = policy.tokenize(PROMPTS[:1], RESPONSES[:1])
    weights = torch.ones(1, tokens.size(1) - 1)
    policy.train(na.losses.sft_loss, {"tokens": tokens, "weights": weights})
    weights = policy.model._named_weights()
    moved = {name for name, value in weights if not torch.equal(value, before[name])}
    assert moved and all(".lora." in name for name in moved)


def test_what_is_no_policy_or_no_setting_is_refused(saved, tiny_tokenizer_dir, tmp_path):
    MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir)).save_to(str(tmp_path / "rm.nemo"))
    with pytest.raises(UserError, match="RewardModel, which gives rewards"):
        na.Policy.load(tmp_path / "rm.nemo")
    with pytest.raises(ConfigError, match="did you mean model.micro_batch_size"):
        na.Policy.load(saved, {"model.micro_batchsize": 2})
    with pytest.raises(ConfigError, match="model.optim.lr='x' must be a finite number"):
        na.Policy.load(saved, {"model.optim.lr": "x"})
    for section in ("exp_manager", "model"):
        with pytest.raises(ConfigError, match=f"{section}: give keys of model and trainer"):
            na.Policy.load(saved, {section: None})
    with pytest.raises(UserError, match="does not exist"):
        na.Policy.load(tmp_path / "none.nemo")


def test_a_job_runs_in_this_process(saved, tmp_path):
    data = tmp_path / "train.jsonl"
    lines = [{"input": p, "output": r} for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = na.SFT(
        {
            **CPU,
            "model.restore_from_path": str(saved),
            "model.data.train_ds.file_path": str(data),
            "model.data.train_ds.global_batch_size": 2,
            "model.data.train_ds.max_seq_length": 32,
            "trainer.sft.max_steps": 1,
            "exp_manager.explicit_log_dir": str(tmp_path / "results"),
        }
    )
    assert job.check() == [] and job.cfg.trainer.sft.max_epochs == 1
    job.run()
    ending = json.loads((tmp_path / "results" / "ending.json").read_text())
    assert (ending["code"], ending["reason"]) == (0, "finished")
    trained = na.Policy.load(tmp_path / "results", CPU)
    before = na.Policy.load(saved, CPU).logprobs(PROMPTS, RESPONSES)
    after = trained.logprobs(PROMPTS, RESPONSES)
    assert not torch.equal(before[0], after[0])


def test_a_job_says_what_is_wrong(saved, tmp_path):
    with pytest.raises(ConfigError, match="trainer='text' is a section"):
        na.PPO({"trainer": "text"})
    with pytest.raises(ConfigError, match="trainer.devices=2 is below a key whose value is 'tex"):
        na.PPO({"trainer": "text", "trainer.devices": 2})
    with pytest.raises(ConfigError, match="Unknown configuration key"):
        na.DPO({"trainer.dpo.max_step": 3}).check()
    paths = [f"model.data.{name}.file_path" for name in ("train_ds", "validation_ds")]
    start = CPU | {"model.restore_from_path": str(saved)}
    with pytest.raises(UserError, match=r"away\.jsonl.* does not exist"):
        na.SFT(start | dict.fromkeys(paths, "away.jsonl")).check()
    (tmp_path / "no.jsonl").write_text('{"input": "a", "output": "b"}\n')
    with pytest.raises(ConfigError, match="SteerLM 2 are in NeMo's chat format"):
        na.SteerLM2(start | dict.fromkeys(paths, str(tmp_path / "no.jsonl"))).check()
