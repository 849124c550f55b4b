# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The losses of preference pairs: a naive loop, numbers by hand and invariances; and what the
configurations of DPO, KTO and SPIN refuse. test_oracle_losses.py has the other libraries.
"""

import itertools
import math

import pytest
import torch

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import DIRECT_PREFERENCE_LOSSES
from nemo_aligner.core.losses import loss_weights
from nemo_aligner.core.preference import dpo_loss, reward_statistics
from tests.unit.test_config_checks import check

PAIRS, WIDTH, BETA = 5, 9, 0.4
LENGTHS = torch.tensor([9, 2, 4, 7, 1, 1, 3, 8, 6, 5])  # of the masks; each begins at a column
STARTS = torch.tensor([0, 3, 1, 2, 8, 0, 4, 1, 3, 2])
EMPTY = 3  # a pair that does not count


def batch(seed: int = 0):
    random = torch.Generator().manual_seed(seed)
    columns = torch.arange(WIDTH)
    mask = ((columns >= STARTS[:, None]) & (columns < (STARTS + LENGTHS)[:, None])).float()
    logprobs, ref_logprobs = -3 * torch.rand(2, 2 * PAIRS, WIDTH, generator=random).double()
    valid = torch.ones(PAIRS)
    valid[EMPTY] = 0
    gaps = torch.randn(PAIRS, generator=random)
    return logprobs, ref_logprobs, mask, valid, gaps


def naive(logprobs, ref_logprobs, mask, valid, gaps, name, smoothing, average, sft, sft_average):
    """The mean over the pairs that count, one response after the other."""
    s = lambda x: 1 / (1 + torch.exp(-x))

    def total(row, values, mean):
        terms = values[row, mask[row] != 0]
        return terms.mean() if mean else terms.sum()

    losses = []
    for pair in range(PAIRS):
        if not valid[pair]:
            continue
        ratio = lambda row: total(row, logprobs, average) - total(row, ref_logprobs, average)
        chosen, rejected = ratio(2 * pair), ratio(2 * pair + 1)
        d, g = chosen - rejected, gaps[pair].double()
        p, q = s(g), s(BETA * d)
        loss = {
            "dpo": -(1 - smoothing) * torch.log(q) - smoothing * torch.log(1 - q),
            "ipo": (d - 0.5 / BETA) ** 2,
            "rpo_sq": (BETA * d - g) ** 2,
            "rpo_bwd_kl": p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q)),
            "rpo_fwd_kl": q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p)),
        }[name]
        losses.append(0.8 * loss - sft * total(2 * pair, logprobs, sft_average))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("name", DIRECT_PREFERENCE_LOSSES)
@pytest.mark.parametrize("average", [False, True])
def test_loss_and_gradient_are_those_of_a_naive_loop(name, average):
    logprobs, ref_logprobs, mask, valid, gaps = batch()
    theirs = logprobs.clone().requires_grad_()
    settings = name, 0.15, average, 0.3, not average
    expected = naive(theirs, ref_logprobs, mask, valid, gaps, *settings)
    expected.backward()

    unused = (mask == 0) | (valid.repeat_interleave(2) == 0)[:, None]
    ours, reference = (torch.where(unused, torch.nan, x).float() for x in (logprobs, ref_logprobs))
    ours.requires_grad_()
    gaps[EMPTY] = torch.nan
    parts = {"logprobs": ours, "ref_logprobs": reference, "mask": mask}
    parts |= {"weights": loss_weights(valid), "beta": BETA, "preference_loss": name}
    parts |= {"label_smoothing": 0.15, "average_log_probs": average, "reward_gaps": gaps}
    parts |= {"preference_loss_weight": 0.8, "sft_loss_weight": 0.3}
    parts |= {"sft_average_log_probs": not average}
    loss, metrics = dpo_loss(**parts)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-6, rtol=1e-4)
    assert all(math.isfinite(value) for value in metrics.values())


def test_metrics_by_hand():
    logprobs = torch.tensor([[-1.0, -1.0], [-2.0, -9.0], [-3.0, -3.0], [-1.0, -1.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    given = {"logprobs": logprobs, "ref_logprobs": torch.full_like(logprobs, -2.0)}
    _, metrics = dpo_loss(**given, mask=mask, weights=torch.full((2,), 0.5), beta=1.0)
    metrics = {key: float(value) for key, value in metrics.items()}
    reward_statistics(metrics)  # rewards: 2 against 0, -2 against 2
    assert metrics["acc"] == 0.5
    assert metrics["rewards_chosen_mean"] == 0 and metrics["rewards_rejected_mean"] == 1
    assert metrics["rewards_all_mean"] == 0.5
    assert metrics["rewards_all_std"] == pytest.approx(math.sqrt(3 - 0.25))
    assert metrics["logprobs_chosen_mean"] == -4 and metrics["logprobs_rejected_mean"] == -2
    assert metrics["sft_loss"] == 4


@pytest.mark.parametrize("name", DIRECT_PREFERENCE_LOSSES)
def test_large_differences_stay_finite(name):
    for sign, gap in itertools.product((-1, 1), (-500.0, 500.0)):
        logprobs = torch.tensor([[sign * 400.0], [-sign * 400.0]], requires_grad=True)
        ones = {"mask": torch.ones(2, 1), "weights": torch.ones(1), "beta": 1.0}
        given = {"ref_logprobs": torch.zeros(2, 1), "reward_gaps": torch.tensor([gap])}
        loss, _ = dpo_loss(logprobs=logprobs, preference_loss=name, **given, **ones)
        loss.backward()
        assert loss.isfinite() and logprobs.grad.isfinite().all()


# Overrides of keys below `model.`, and the message.
REFUSED = {
    "dpo": [
        ("dpo.label_smoothing=0.1 dpo.preference_loss=ipo", "preference_loss=dpo, not .*=ipo"),
        ("dpo.preference_loss_weight=0", "both 0: nothing would be learned"),
        ("data.data_impl=mmap", "where a response begins"),
        ("dpo.ref_log_probs_dir=True", "ref_log_probs_dir=True must be a text"),
    ],
    "kto": [
        ("kto.desirable_loss_weight=0 kto.undesirable_loss_weight=0", "nothing would be learned"),
        ("kto.preference_loss_weight=0", "both 0: nothing would be learned"),
        ("data.data_impl=mmap", "where a response begins"),
    ],
    "spin": [
        ("spin.ref_policy_kl_penalty=0", "ref_policy_kl_penalty=0"),
        ("spin.ref_policy_kl_penalty=[0.1,0.2]", r"has 2 value\(s\) for .*iterations=3"),
        ("spin.ref_policy_kl_penalty=[0.1,0.2,-1]", "must be a number above 0, or a list"),
        ("spin.ref_policy_kl_penalty=null", "ref_policy_kl_penalty is not set"),
        ("spin.length_params.max_length=4096", "leaves no room for a prompt"),
        ("data.chat_template=tokenizer", "two forms of a conversation"),
        ("data.train_ds.packed_sequence=True", "packed_sequence"),
        ("data.train_ds.max_seq_length=9999", "max_seq_length=9999 is above"),
        ("data.train_ds.add_sep=True", "add_sep"),
    ],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_work_is_refused_at_start(tmp_path, kind):
    name = f"gpt_{kind}"
    assert check(name, tmp_path) == []
    for given, message in [*REFUSED[kind], (f"{kind}.beta=0.1", f"model.{kind}.beta")]:
        with pytest.raises(ConfigError, match=message):
            check(name, tmp_path, *(f"model.{override}" for override in given.split()))
    with pytest.raises(ConfigError, match="restore_from_path is not set"):
        check(name, tmp_path, "pretrained_checkpoint.restore_from_path=null")
