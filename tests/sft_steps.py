# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of SFT of this package, and the same ones of a model of transformers or PEFT."""

from collections.abc import Iterator

import torch

from nemo_aligner.training.optim import optimizer_step

OPTIM = {"name": "distributed_fused_adam", "lr": 0.01, "weight_decay": 0.1}
OPTIM |= {"betas": [0.9, 0.95], "eps": 1e-8, "sched": {"name": "constant"}}


def batches(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of SFT with the first 5 to 8 tokens as the prompt."""
    generator = torch.Generator().manual_seed(6)
    for _ in range(steps):
        tokens = torch.randint(0, 300, (4, 25), generator=generator)
        mask = (torch.arange(24) >= torch.arange(5, 9)[:, None]).float()
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def train(model, optimizer, scheduler, steps: int) -> list[float]:
    """The losses of some steps of a model of this package."""
    losses = []
    for batch in batches(steps):
        optimizer.zero_grad()
        model.prepare_for_training_step()
        losses.append(model.get_loss_and_metrics(batch, forward_only=False)[0])
        optimizer_step(optimizer, scheduler, 1.0)
    return losses


def train_in_transformers(model, steps: int, weight_decay: float = 0.1) -> list[float]:
    """The losses of the same steps with what a model of others learns."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        learned, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay
    )
    losses = []
    for batch in batches(steps):
        logprobs = torch.log_softmax(model(batch["tokens"]).logits, -1)
        nll = -logprobs.gather(-1, batch["labels"][..., None])[..., 0]
        loss = (nll * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
