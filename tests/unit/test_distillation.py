# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of distillation against the full softmax. Other libraries, and scales of the logits:
test_oracle_losses.py.
"""

import pytest
import torch

from nemo_aligner.core.estimators import DISTILLATION_LOSSES
from nemo_aligner.core.losses import distillation_loss, loss_weights
from nemo_aligner.parallel.vocab_parallel import candidate_logprobs, top_logits

B, S, V, K, BETA = 4, 7, 9, 3, 0.3
LENGTHS = torch.tensor([7, 1, 4, 0])  # of the masks; the last sample does not count
STARTS = torch.tensor([0, 5, 2, 0])


class Batch:
    """Logits of both models, labels and a ragged mask."""

    def __init__(self, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        self.student, self.teacher = 2 * torch.randn(2, B, S, V, generator=random).double()
        self.labels = torch.randint(0, V, (B, S), generator=random)
        columns = torch.arange(S)
        self.mask = (columns >= STARTS[:, None]) & (columns < (STARTS + LENGTHS)[:, None])

    def ours(self, top_k: int, bucket: bool, reduction: str = "token", **options):
        """(loss, gradient, metrics), with NaN in the slots that do not count."""
        dtype = torch.float64
        leaf = self.student.clone().requires_grad_()
        top = top_logits(self.teacher, top_k, S)
        candidates = torch.cat([top.token_ids, self.labels.unsqueeze(-1)], -1)
        bucket = bucket and top_k < V
        found = candidate_logprobs(leaf, candidates, rest_of=top_k if bucket else 0)

        def planted(x):
            mask = self.mask.reshape(B, S, *[1] * (x.dim() - 2))
            return torch.where(mask, x, torch.nan)

        loss, metrics = distillation_loss(
            logprobs=planted(found[..., :top_k]).to(dtype),
            label_logprobs=planted(found[..., top_k]),
            rest_logprobs=planted(found[..., -1]) if bucket else None,
            teacher_logits=planted(top.logits),
            teacher_log_sum_exp=planted(top.log_sum_exp),
            weights=loss_weights(self.mask, reduction),
            **options,
        )
        return loss.detach(), *torch.autograd.grad(loss, leaf), metrics


def naive(batch, top_k, bucket, name, reduction, sft):
    """One sample after the other, over the whole vocabulary."""
    leaf = batch.student.clone().requires_grad_()
    samples = []
    for row, keep in enumerate(batch.mask):
        p, q = batch.teacher[row, keep].softmax(-1), leaf[row, keep].softmax(-1)
        order = p.argsort(-1, descending=True)[:, :top_k]
        ps, qs = p.gather(-1, order), q.gather(-1, order)
        if bucket and top_k < V:
            ps, qs = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (ps, qs))
        else:
            ps, qs = (x / x.sum(-1, keepdim=True) for x in (ps, qs))
        ms = BETA * ps + (1 - BETA) * qs
        kl = lambda a, b: (a * (a / b).log()).sum(-1)
        values = {"fwd_kl": kl(ps, qs), "bwd_kl": kl(qs, ps)}
        values["jsd"] = BETA * kl(ps, ms) + (1 - BETA) * kl(qs, ms)
        labelled = q.gather(-1, batch.labels[row, keep].unsqueeze(-1)).squeeze(-1)
        samples += [values[name] - sft * labelled.log()] if keep.any() else []
    parts = [torch.cat(samples)] if reduction == "token" else samples
    loss = torch.stack([part.mean() for part in parts]).mean()
    return loss.detach(), *torch.autograd.grad(loss, leaf)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("bucket", [False, True], ids=["renormalize", "bucket"])
@pytest.mark.parametrize("top_k", [1, K, V])
@pytest.mark.parametrize("name", DISTILLATION_LOSSES)
def test_against_a_naive_loop_with_the_full_softmax(name, top_k, bucket, reduction):
    for seed, sft in ((0, 0.0), (1, 0.4)):
        batch = Batch(seed)
        loss, gradient, metrics = batch.ours(
            top_k, bucket, reduction, kd_loss=name, jsd_beta=BETA, sft_loss_weight=sft
        )
        expected, slope = naive(batch, top_k, bucket, name, reduction, sft)
        torch.testing.assert_close(loss.double(), expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(gradient, slope, atol=2e-6, rtol=1e-4)
        total = metrics["kd_loss"] + sft * metrics["sft_loss"]
        torch.testing.assert_close(metrics["loss"], total)


def test_a_bucket_knows_no_other_scale_of_the_teacher():
    with pytest.raises(ValueError, match="target_logits_scale=2.0"):
        Batch().ours(K, True, target_logits_scale=2.0)


@pytest.mark.parametrize("which", ["student", "teacher"])
def test_a_model_without_a_rest_gives_a_finite_loss(which):
    """Its candidates are so likely that float32 has nothing left for the others."""
    batch = Batch()
    candidates = batch.teacher.topk(2, -1).indices
    setattr(batch, which, getattr(batch, which).scatter(-1, candidates, 1000.0))
    for name in DISTILLATION_LOSSES:
        loss, gradient, _ = batch.ours(2, True, kd_loss=name)
        assert loss.isfinite() and gradient.isfinite().all(), name
