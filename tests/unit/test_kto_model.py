# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""KTO as a whole: the data set, and updates of data set, trainer and model against trl's formulas
on the same model of transformers. test_kto.py has the loss.
"""

import copy

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.algorithms.dpo import KTOTrainer, kto_custom_collate
from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.datasets import KTOModelDataset
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTKTOModel
from tests import preference_jobs as jobs
from tests.oracles import trl_kto
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow

STEPS, SAMPLES, LENGTH = 20, jobs.BATCH, 44


def records(count):
    """Samples of ragged lengths, three of five desirable."""
    for i in range(count):
        kind = "chosen" if i % 5 < 3 else "rejected"
        prompt = "the film" + " so" * (i % 5) + f" {i}"
        yield {"prompt": prompt, "response": jobs.RESPONSES[i % 4], "preference": kind}


def data_of(tokenizer, folder, given, settings=None, length=LENGTH):
    path = jobs.write(folder / "samples.jsonl", given)
    return KTOModelDataset([path], tokenizer, length, settings)


# --- the data set


def tokens_of(tokenizer, prompt, response):
    """Tokens of prompt and of response; the tokenizer makes no token of two words."""
    first = tokenizer.text_to_ids(prompt)
    return first, tokenizer.text_to_ids(prompt + response)[len(first) :]


def test_items_are_the_tokens_of_the_texts_with_masks_of_the_responses(tiny_tokenizer, tmp_path):
    given = list(records(6))
    given[1]["preference"] = True  # as trl's data have it
    data = data_of(tiny_tokenizer, tmp_path, given, {"append_eod": True})
    partners = set()
    for index, (item, record) in enumerate(zip(data, records(6), strict=True)):
        prompt, response = tokens_of(tiny_tokenizer, record["prompt"], record["response"])
        response.append(tiny_tokenizer.eos_id)
        mask = [0] * len(prompt) + [1] * len(response)
        assert item["samples"].tolist()[: len(mask)] == prompt + response
        assert item["sample_length"] == len(mask)
        assert item["sample_mask"].tolist() == mask + [0] * (LENGTH - len(mask))
        assert item["preference"] == (index % 5 < 3)

        length = int(item["kl_sample_length"])
        mismatched = item["kl_samples"].tolist()[:length]
        assert mismatched[: len(prompt)] == prompt
        made = [tokens_of(tiny_tokenizer, each["prompt"], each["response"])[1] for each in given]
        wanted, end = mismatched[len(prompt) :], [tiny_tokenizer.eos_id]
        others = [i for i, ids in enumerate(made) if i != index and wanted == [*ids, *end]]
        assert others, "the response is of no other sample"
        partners.add((index + 2) % 6)
        assert (index + 2) % 6 in others
        mask = [0] * len(prompt) + [1] * (length - len(prompt))
        assert item["kl_sample_mask"].tolist() == mask + [0] * (LENGTH - length)
    assert len(partners) == 6  # each response is used once
    empty = data[-1]
    assert not empty["sample_mask"].any() and not empty["loss_mask"].any()
    assert not empty["kl_sample_mask"].any()


def test_a_mismatched_sample_is_cut_to_the_longest_length(tiny_tokenizer, tmp_path):
    long = {"prompt": "a", "response": " long" * 12, "preference": "chosen"}
    other = {"prompt": "the film" * 10, "response": " b", "preference": "rejected"}
    given = tiny_tokenizer, tmp_path, [long, other, long]
    limit = max(int(item["sample_length"]) for item in data_of(*given, length=99))
    data = data_of(*given, length=limit)
    lengths = [int(item["kl_sample_length"]) for item in data]
    assert max(lengths) == limit and all(item["kl_sample_mask"].any() for item in data)


def test_only_the_response_to_a_conversation_counts(tiny_tokenizer, tmp_path):
    first = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a joy"}]
    prompt = [*first, {"role": "user", "content": "and this?"}]
    responses = ("a dull one", "a warm one")
    own = [{"role": "assistant", "content": responses[0]}]
    given = [
        {"prompt": prompt, "response": own, "preference": "chosen"},
        {"prompt": "hello", "response": responses[1], "preference": "rejected"},
    ]
    template = tmp_path / "template.jinja"
    template.write_text(jobs.CHAT)
    data = data_of(tiny_tokenizer, tmp_path, given, {"chat_template": str(template)}, 90)
    for item, own, other in zip(data, responses, reversed(responses), strict=True):
        for key, response in (("sample", own), ("kl_sample", other)):
            counted = item[f"{key}s"][item[f"{key}_mask"].bool()].tolist()
            assert tiny_tokenizer.ids_to_text(counted[:-1]).strip() == response
            assert counted[-1] == tiny_tokenizer.eos_id


def test_a_sample_that_comes_several_times_is_not_compared_with_itself(tiny_tokenizer, tmp_path):
    """As in a blend that wants more of a file than it has."""
    whole = data_of(tiny_tokenizer, tmp_path, records(2))
    repeated = whole.select(np.array([0, 0, 0, 1, 0]))
    for place, document in enumerate((0, 0, 0, 1, 0)):
        expected = whole[document]["kl_samples"]
        assert torch.equal(repeated[place]["kl_samples"], expected)
    assert not torch.equal(whole[0]["kl_samples"], whole[0]["samples"])
    with pytest.raises(UserError, match="at least two samples.*1 of 2"):
        whole.select(np.array([1, 1]))


def test_samples_of_one_kind_are_warned_of(tiny_tokenizer, tmp_path, warnings):
    data_of(tiny_tokenizer, tmp_path, records(5))
    assert not warnings
    data_of(tiny_tokenizer, tmp_path, records(3))
    assert len(warnings) == 1 and "all 3 samples are chosen" in warnings[0]


# --- training


def job(**kto):
    return jobs.job_of("kto", **{"ref_policy_kl_penalty": 0.3, **kto})


def steps_of_trl(hf, given, tokenizer, weights):
    """Losses, margins and distances of a loop over the texts: a model of transformers, trl's
    log-probs and loss, PyTorch's optimizer.
    """
    trl = trl_kto(beta=0.3, desirable_weight=weights[0], undesirable_weight=weights[1])
    reference, optimizer = copy.deepcopy(hf), jobs.adamw(hf)
    shift = round(0.381966 * len(given))
    numbers = []
    for step in range(STEPS):
        rows, labels = [], []
        batch = range(step * SAMPLES, (step + 1) * SAMPLES)
        for other in (0, shift):
            for n in batch:
                partner = given[(n + other) % len(given)]
                prompt, _ = tokens_of(tokenizer, given[n]["prompt"], "")
                _, response = tokens_of(tokenizer, partner["prompt"], partner["response"])
                rows.append(prompt + response)
                labels.append([-100] * len(prompt) + response)
        tokens, labels = jobs.padded(rows, labels)
        good = torch.tensor([given[n]["preference"] == "chosen" for n in batch])

        def logps(model, tokens=tokens, labels=labels, good=good):
            own, mismatched = trl.get_batch_logps(model(tokens).logits, labels).chunk(2)
            return own[good], own[~good], mismatched

        with torch.no_grad():
            before = logps(reference)
        terms, chosen, rejected, kl = trl.kto_loss(*logps(hf), *before)
        loss = terms.mean()
        jobs.update(hf, optimizer, loss)
        rewards = [side.mean().item() / 0.3 for side in (chosen, rejected)]
        numbers.append((loss.item(), *rewards, kl.item()))
    return numbers


@pytest.mark.full
def test_twenty_steps_end_at_the_weights_of_trl(write_folder, tiny_tokenizer, tmp_path):
    hf = jobs.random_llama()
    kto = {"desirable_loss_weight": 1.3, "undesirable_loss_weight": 0.8}
    cfg = job(**kto, log_prob_forward_micro_batch_size=1)
    model = load_from_nemo(MegatronGPTKTOModel, cfg, None, restore_path=write_folder(hf))
    model.set_reference_policy()
    given = list(records(STEPS * SAMPLES))
    data = data_of(tiny_tokenizer, tmp_path, given, length=2 * LENGTH)
    trainer, log = jobs.trainer_of(KTOTrainer, model, data, STEPS)
    trainer.fit()

    expected = steps_of_trl(hf, given, tiny_tokenizer, (1.3, 0.8))
    losses, chosen, rejected, distances = zip(*expected, strict=True)
    assert [metrics["loss"] for metrics in log] == pytest.approx(losses, abs=1e-4)
    assert [metrics["kl"] for metrics in log] == pytest.approx(distances, abs=1e-3)
    for name, values in (("chosen", chosen), ("rejected", rejected)):
        found = [metrics.get(f"rewards_{name}_mean", float("nan")) for metrics in log]
        assert found == pytest.approx(values, abs=1e-3, nan_ok=True)
    assert log[0]["kl"] == 0 and max(distances) > 0.1  # the point has moved
    ours = jobs.exported(trainer, tmp_path / "run", "kto")
    jobs.assert_same_weights(ours, dict(hf.named_parameters()))


@pytest.fixture
def batch(tiny_tokenizer, tmp_path):
    data = data_of(tiny_tokenizer, tmp_path, records(4))
    return kto_custom_collate([data[i] for i in range(4)], eos_id=1)


def tiny_policy(tokenizer_dir, **keys):
    """A policy that is its reference."""
    model = MegatronGPTKTOModel(OmegaConf.merge(tiny_config(tokenizer_dir), job(), keys))
    model.set_reference_policy()
    return model


@pytest.mark.parametrize("forward_only", [False, True])
def test_the_reference_point_is_without_dropout_and_the_loss_with_it(
    tiny_tokenizer_dir, batch, forward_only
):
    """A policy that is its reference is at distance 0 of it, with dropout too; validation goes
    on without dropout.
    """
    model = tiny_policy(tiny_tokenizer_dir, hidden_dropout=0.5)
    model.setup_megatron_optimization(max_steps=1)
    own, mismatched = model.get_ref_policy_logprobs(batch).chunk(2)
    batch["ref_policy_log_probs_samples"] = own
    batch["ref_policy_log_probs_kl_samples"] = mismatched
    if forward_only:
        model.prepare_for_validation_step()
    else:
        model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=forward_only)
    assert metrics["kl"] == pytest.approx(0, abs=1e-5)
    assert (loss == pytest.approx(0.5, abs=1e-5)) == forward_only


def test_the_reference_point_is_a_mean_over_responses_and_at_least_0(tiny_tokenizer_dir, batch):
    model = tiny_policy(tiny_tokenizer_dir)
    batch["loss_mask"][1] = 0  # a sample that does not count
    _, mismatched = model.get_ref_policy_logprobs(batch).chunk(2)
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0]) / 3
    counts = batch["kl_sample_mask"].sum(1)
    for shift, expected in ((-0.5, 0.5 * float((weights * counts).sum())), (0.5, 0.0)):
        batch["ref_policy_log_probs_kl_samples"] = mismatched + shift
        point = model.reference_point(batch, weights)
        assert point.item() == pytest.approx(expected, abs=1e-4)
