# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""SPIN as a whole: prompts of SFT data, iterations of trainer and model against a loop over a
model of transformers with trl's loss, and checkpoints in the middle of an iteration.
"""

import copy
import dataclasses
import math
from functools import partial

import pytest
import torch

from nemo_aligner.algorithms import alarms
from nemo_aligner.algorithms.spin import spin_custom_collate
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.torch_dist_stream import TorchDistTensors
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.generation.decoding_model import DecodingModel
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTSPINModel
from tests.cases import some_of
from tests.oracles import trl_dpo
from tests.preference_jobs import (
    CHAT,
    adamw,
    assert_same_weights,
    exported,
    padded,
    random_llama,
    update,
    write,
)
from tests.spin_jobs import (
    BETAS,
    EPOCHS,
    LONGEST_RESPONSE,
    LORA,
    PAIRS,
    STEPS,
    STEPS_PER_EPOCH,
    job,
    records,
    sft_data,
    tiny_model,
    trainer_of,
)
from tests.unit.test_config_checks import check

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tiny_tokenizer, tmp_path):
    return sft_data(tiny_tokenizer, write(tmp_path / "sft.jsonl", records()))


# --- prompts


def test_of_a_conversation_the_last_turn_that_is_whole_or_cut_is_the_response(
    tiny_tokenizer, tmp_path
):
    said = ["hello", "a joy", "and", "a bad one"], ["a", "b"]
    roles = ("user", "assistant") * 2
    turns = [[{"role": r, "content": text} for r, text in zip(roles, texts)] for texts in said]
    template = tmp_path / "template.jinja"
    template.write_text(CHAT)
    path = write(tmp_path / "chat.jsonl", [{"messages": messages} for messages in turns])
    for longest in range(99, 10, -4):
        data = sft_data(tiny_tokenizer, path, chat_template=str(template), max_seq_length=longest)
        item = data[0]
        if not any(item["trained"]):
            break
        batch = spin_custom_collate([item], eos_id=tiny_tokenizer.eos_id)
        start, end = int(batch["prompt_lengths"]), int(batch["combined_lengths"])
        tokens = batch["prompts_and_answers"][0].tolist()
        text = tiny_tokenizer.ids_to_text
        expected = ("a bad one", "a joy")
        response = text(tokens[start:end]).replace("</s>", "").strip()
        assert any(each.startswith(response) for each in expected), response
        before = text(tokens[:start]).replace(" ", "")
        assert before.endswith("assistant:")
        if longest == 99:
            assert response == "a bad one" and "joy" in before
            assert tokens[end - 1] == tiny_tokenizer.eos_id
    else:
        pytest.fail("the conversation was never cut to nothing")
    batch = spin_custom_collate([item], eos_id=tiny_tokenizer.eos_id)
    assert batch["prompt_lengths"] == batch["combined_lengths"] == len(item["tokens"])


def test_an_example_without_a_prompt_is_named(tiny_tokenizer, tmp_path):
    path = write(tmp_path / "sft.jsonl", [*records(), {"input": "", "output": "a joy"}])
    options = {"prompt_template": "{input}{output}", "allow_empty_prompt": True}
    data = sft_data(tiny_tokenizer, path, **options)
    with pytest.raises(UserError, match="example 12 .*has no prompt"):
        spin_custom_collate([data[0], data[12]], eos_id=1)


# --- training


def naive_iterations(hf, data, drawn, eos_id, average):
    """Metrics of each step, and the responses: transformers' greedy search on a copy of the policy
    as it was at the beginning of the iteration, trl's log-probs and loss, PyTorch's optimizer.
    """
    optimizer = adamw(hf)
    found = []
    for step, indices in enumerate(drawn):
        iteration = step // (STEPS_PER_EPOCH * EPOCHS)
        if step % (STEPS_PER_EPOCH * EPOCHS) == 0:
            reference = copy.deepcopy(hf)
        trl = trl_dpo(beta=BETAS[iteration], label_smoothing=0.0, loss_type="sigmoid")
        rows, labels, responses = [[], []], [[], []], []
        for item in (data[i] for i in indices):
            start = item["trained"].count(False)
            if start >= len(item["tokens"]):
                continue  # nothing of its response is left
            prompt = item["tokens"][:start]
            ends = {"eos_token_id": eos_id, "pad_token_id": eos_id, "do_sample": False}
            tokens = torch.tensor([prompt])
            own = reference.generate(tokens, max_new_tokens=LONGEST_RESPONSE, **ends)[0].tolist()
            for side, row in enumerate((item["tokens"], own)):
                rows[side].append(row)
                labels[side].append([-100] * start + row[start:])
            responses.append(own)
        rows, labels = sum(rows, []), sum(labels, [])
        tokens, targets = padded(rows, labels)

        def logps(model, trl=trl, tokens=tokens, targets=targets):
            sums, counts = trl.get_batch_logps(model(tokens).logits, targets)
            return (sums / counts if average else sums).chunk(2)

        with torch.no_grad():
            before = logps(reference)
        terms, actual, generated = trl.dpo_loss(*logps(hf), *before)
        update(hf, optimizer, terms.mean())
        beta, metrics = BETAS[iteration], {"responses": responses, "loss": terms.mean().item()}
        metrics["rewards_actual_mean"] = actual.mean().item() / beta
        metrics["rewards_generated_mean"] = generated.mean().item() / beta
        metrics["acc"] = (actual > generated).float().mean().item()
        metrics |= {"epoch": step // STEPS_PER_EPOCH % EPOCHS + 1, "iteration": iteration + 1}
        found.append(metrics | {"ref_policy_kl_penalty": beta})
    return found


@pytest.mark.full
@pytest.mark.parametrize("average", [False, True])
def test_two_iterations_end_at_the_weights_of_a_loop_with_trl(
    write_folder, tiny_tokenizer, tmp_path, average, data
):
    hf = random_llama()
    hf.generation_config.eos_token_id = tiny_tokenizer.eos_id
    cfg = job(sampling_params={"use_greedy": True}, preference_average_log_probs=average)
    model = load_from_nemo(MegatronGPTSPINModel, cfg, None, restore_path=write_folder(hf))
    trainer, log, drawn = trainer_of(model, data, tiny_tokenizer)
    played, play = [], trainer.play
    trainer.play = lambda batches: played.extend(pairs := play(batches)) or pairs
    trainer.fit()
    assert len(log) == len(drawn) == STEPS
    for start in range(0, STEPS, STEPS_PER_EPOCH):  # each pass has all examples
        assert sorted(sum(drawn[start : start + STEPS_PER_EPOCH], [])) == list(range(12))

    naive = naive_iterations(hf, data, drawn, tiny_tokenizer.eos_id, average)
    for step, (pairs, metrics, expected) in enumerate(zip(played, log, naive, strict=True)):
        valid = pairs["loss_mask"].any(dim=1)
        assert valid.sum() == len(expected["responses"])
        rows = zip(pairs["generated"], pairs["generated_length"], valid, strict=True)
        generated = [row[:length].tolist() for row, length, counts in rows if counts]
        assert generated == expected.pop("responses"), step
        if step % (STEPS_PER_EPOCH * EPOCHS) == 0:
            del expected["acc"]  # that of rounding errors
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, abs=1e-3 if name != "loss" else 1e-4)
        lengths = pairs["generated_mask"][valid].sum(1).mean().item()
        assert metrics["avg_generated_lengths"] == pytest.approx(lengths)
        ended = pairs["is_end"][valid].float().mean().item()
        assert metrics["fraction_of_samples_properly_ended"] == pytest.approx(ended)
    for first in (0, STEPS_PER_EPOCH * EPOCHS):  # the policy is its reference
        assert log[first]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert log[first]["margin"] == pytest.approx(0, abs=1e-5)
    assert log[5]["margin"] > 0.05 and log[-1]["margin"] > 0.05  # it has left it
    assert_same_weights(exported(trainer, tmp_path / "run", "spin"), dict(hf.named_parameters()))


def checkpoints_in(folder):
    return partial(CheckpointCallback, folder, name="spin", filename="{step}", save_top_k=-1)


@some_of("peft", [None, LORA], ids=["full", "lora"])
def test_a_job_resumes_within_an_iteration_and_between_two_as_if_it_had_not_stopped(
    tiny_tokenizer_dir, tiny_tokenizer, tmp_path, peft, data
):
    model = tiny_model(tiny_tokenizer_dir, peft)
    saving = {"saving": checkpoints_in(tmp_path / "run"), "save_interval": 1}
    trainer, log, _ = trainer_of(model, data, tiny_tokenizer, **saving)
    trainer.fit()
    whole = model.weights_to_cpu()

    for step in (4, 6, 10):  # within the first, between both, within the second
        folder = tmp_path / "run" / "checkpoints" / f"step={step}"
        stored = TorchDistTensors(folder / "weights", prefix=None).shapes()
        references = [key for key in stored if key.startswith("reference_policy.")]
        if step == 6:
            assert not references
        else:
            weights = [key for key in stored if key.startswith("model.")]
            assert sorted(references) == sorted(f"reference_policy.{key}" for key in weights)
        model = tiny_model(tiny_tokenizer_dir, peft)
        saving = checkpoints_in(tmp_path / f"again {step}")
        trainer, again, _ = trainer_of(model, data, tiny_tokenizer, saving)
        trainer.load_state_dict(trainer.ckpt_callback.load_latest(folder))
        assert (trainer.step, trainer.iteration) == (step, step // 6)
        trainer.fit()
        for name in ("loss", "grad_norm", "rewards_generated_mean", "avg_generated_lengths"):
            assert [m[name] for m in again] == [m[name] for m in log[step:]], (step, name)
        for name, weight in model.weights_to_cpu().items():
            assert torch.equal(weight, whole[name]), (step, name)


def test_with_adapters_the_reference_is_those_of_the_iteration_before(
    tiny_tokenizer_dir, tiny_tokenizer, data
):
    model = tiny_model(tiny_tokenizer_dir, LORA)
    trainer, log, _ = trainer_of(model, data, tiny_tokenizer, max_steps=7)
    batch = spin_custom_collate([data[i] for i in range(4)], eos_id=tiny_tokenizer.eos_id)
    tokens, lengths = batch["prompts_and_answers"], batch["combined_lengths"]
    pairs = dict.fromkeys(("actual_mask", "generated_mask", "loss_mask"), torch.ones(tokens.shape))
    pairs |= {"actual": tokens, "generated": tokens}
    pairs |= {"actual_length": lengths, "generated_length": lengths}

    def policy():
        model.set_eval()
        logprobs = model.get_inference_log_probs(tokens, None, lengths)
        model.set_train()
        return logprobs

    with pytest.raises(UserError, match="set_reference_policy"):
        model.get_ref_policy_logprobs(pairs)
    seen, begin = [], trainer.begin_iteration

    def spy():
        before = policy()
        begin()
        seen.append((trainer.step, before, model.get_ref_policy_logprobs(pairs).chunk(2)[0]))

    trainer.begin_iteration = spy
    trainer.fit()
    at = {step: (own, reference) for step, own, reference in seen}
    with model.adapters_disabled():
        base = policy()
    for first in (0, 6):
        assert torch.equal(*at[first])  # the policy with its adapters
        assert not torch.allclose(at[first][1], base, atol=1e-4)
    assert not torch.equal(at[6][1], at[0][1])
    assert torch.equal(at[3][1], at[0][1]) and not torch.equal(*at[3])


def test_iterations_of_another_length_are_refused(tiny_tokenizer_dir, tiny_tokenizer, data):
    model = tiny_model(tiny_tokenizer_dir)
    trainer, _, _ = trainer_of(model, data, tiny_tokenizer, max_epochs=1)
    state = {"step": 4, "consumed_samples": 16, "epoch": 1, "iteration": 0}
    with pytest.raises(ConfigError, match="iterations have 6 steps, but here they have 3"):
        trainer.load_state_dict({**state, "steps_per_iteration": 6})
    with pytest.raises(UserError, match="no reference"):
        trainer.load_state_dict(state)


def test_the_alarms_know_where_an_iteration_begins(
    tiny_tokenizer_dir, tiny_tokenizer, monkeypatch, data
):
    """A policy that is its reference orders pairs by chance, which is no reason for an alarm."""
    model = tiny_model(tiny_tokenizer_dir)
    thresholds = {"accuracy": 1.0, "identical_fraction": 0.5, "truncated_fraction": 0.1}
    trainer, log, _ = trainer_of(model, data, tiny_tokenizer, max_steps=7, alarms=thresholds)
    said = []
    trainer.alarms._warn = said.append
    as_they_are = alarms.WARNINGS
    late = [dataclasses.replace(each, first_step=6) for each in as_they_are if each.first_step]
    at_once = [each for each in as_they_are if not each.first_step]
    monkeypatch.setattr(alarms, "WARNINGS", (*late, *at_once))
    trainer.fit()
    assert log[6]["acc"] < 1  # the first step of the second iteration
    assert not any("accuracy" in text for text in said)
    assert any("truncated_fraction is 1 at step 0" in text for text in said)

    items = [data[i] for i in range(PAIRS)]
    pairs = trainer.play([spin_custom_collate(items, eos_id=1)])[0]
    for part in ("", "_length", "_mask"):
        pairs[f"generated{part}"] = pairs[f"actual{part}"]
    _, metrics = model.get_loss_and_metrics(pairs, forward_only=True)
    assert metrics["identical_fraction"] == 1
    trainer.alarms.watch(metrics, step=3)
    assert "identical_fraction is 1" in said[-1]


def test_the_memory_of_keys_says_how_many_steps_respond_together(
    tiny_tokenizer_dir, tiny_tokenizer, monkeypatch, data
):
    """With room for one response a step at a time; with room for all no more than there are."""
    cached, new_cache = [], DecodingModel.new_cache
    counted = lambda model, slots: cached.append(slots) or new_cache(model, slots)
    monkeypatch.setattr(DecodingModel, "new_cache", counted)
    for gigabytes, ahead, slots in ((1e-9, 1, 1), (1.0, 3, 12)):
        generation = {"kv_cache_gb": gigabytes}
        model = tiny_model(tiny_tokenizer_dir, generation=generation, rollout_micro_batch_size=4)
        trainer, _, _ = trainer_of(model, data, tiny_tokenizer, max_steps=3)
        assert trainer.steps_ahead() == ahead
        trainer.fit()
        assert cached == [slots] * (3 // ahead)
        cached.clear()


def test_samples_of_the_rollouts_are_written(tiny_tokenizer_dir, tiny_tokenizer, data):
    model = tiny_model(tiny_tokenizer_dir)
    trainer, log, drawn = trainer_of(model, data, tiny_tokenizer, max_steps=6)
    trainer.fit()
    steps = [row["step"] for row in log.samples]
    assert steps == [0] * 4 + [2] * 4 + [3] * 4 + [5] * 4  # two steps, then one, twice
    first = {row["prompt"]: row["response"] for row in log.samples[:8]}
    second = {row["prompt"]: row["response"] for row in log.samples[8:]}
    again = first.keys() & second.keys()
    assert again and all(first[prompt] != second[prompt] for prompt in again)
    for row, index in zip(log.samples[:4], drawn[0], strict=True):
        item = list(records())[index]
        if index != 5:
            assert row["prompt"].strip() == item["input"]
            assert row["actual"].replace("</s>", "").strip() == item["output"]
            assert row["response"] != row["actual"]


# --- the configuration


def test_a_penalty_for_each_iteration(tiny_tokenizer_dir, tmp_path):
    schedule = ["model.spin.ref_policy_kl_penalty=[0.1,0.2,0.3]"]
    assert check("gpt_spin", tmp_path, *schedule) == []
    model = tiny_model(tiny_tokenizer_dir)
    for iteration, beta in enumerate(BETAS):
        model.set_KL_penalty_by_iteration(iteration)
        assert model.ref_policy_kl_penalty == beta
    with pytest.raises(ConfigError, match="no value for iteration 3"):
        model.set_KL_penalty_by_iteration(2)
