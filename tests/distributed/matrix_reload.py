# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A training checkpoint saved at one split, loaded at another: the weights are the same bits, the
next step is that of a job that was never interrupted.

Every split saves after its first step; then it loads what others saved (`test_matrix.sources`),
with as many ranks or others, and takes the second step. The job without interruption is that of
one rank (`matrix.write_expected`).
"""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.folders import complete_checkpoints
from nemo_aligner.training.optim import optimizer_step
from tests.distributed.launcher import progress
from tests.distributed.matrix import (
    ROLES,
    SPLITS,
    STEP_SIZE,
    apart,
    build,
    expected_file,
    gathered,
    global_batch,
    loss_and_gradient,
    of_all_samples,
    reference_logprobs,
)

# Architecture and role of the checkpoints: with and without biases and a head, all weights or
# adapters and a head; with a reference policy that the checkpoint holds.
CASES = (("gpt2", "critic"), ("llama", "actor"), ("moe", "sft"), ("lora", "critic"))
CASES += (("llama", "spin"), ("lora", "spin"))


def cases(name: str) -> list[tuple[str, str]]:
    """Those that run at the split; in bf16 those with a head or without, and nothing more."""
    split = SPLITS[name]
    roles = ROLES if split.precision == 32 else ("actor", "critic")
    return [case for case in CASES if case[0] in split.architectures and case[1] in roles]


def _callback(
    folder, name: str, architecture: str, role: str, model, optimizer, scheduler
) -> CheckpointCallback:
    root = Path(folder) / "checkpoints" / f"{name} {architecture} {role}"
    own = {"name": role, "save_nemo_on_train_end": False}
    return CheckpointCallback(root, model, optimizer, scheduler, **own)


def step(model, optimizer, scheduler, role: str) -> dict[str, float]:
    """One update with the batch of the matrix; loss, metrics and gradient norm."""
    metrics = loss_and_gradient(
        model, global_batch(role, float("nan")), ROLES[role].reductions[0], STEP_SIZE
    )
    metrics["gradient norm"] = optimizer_step(optimizer, scheduler, 0.5)
    return metrics


def save(tokenizer_dir, folder, name: str) -> None:
    """The first step of all cases at a split, and a checkpoint after it."""
    for architecture, role in cases(name):
        training = build(tokenizer_dir, folder, architecture, role, SPLITS[name].model)
        if role == "spin":
            training[0].set_reference_policy()
        step(*training, role)
        callback = _callback(folder, name, architecture, role, *training)
        callback.custom_save({}, trainer_state={"step": 1})
        progress(f"saved {name} {architecture} {role}")
        weights = gathered(training[0])
        if weights is not None:
            torch.save(weights, f"{folder}/weights {name} {architecture} {role}.pt")


def load(tokenizer_dir, folder, name: str, sources: list[str]) -> dict[tuple, dict[str, float]]:
    """The second step at the split `name` from what each source saved: deviations on rank 0. One
    model loads one after the other: nothing of the step before may stay.
    """
    report, split = {}, SPLITS[name]
    for architecture, role in cases(name):
        training = build(tokenizer_dir, folder, architecture, role, split.model)
        for source in (source for source in sources if (architecture, role) in cases(source)):
            saved = _callback(folder, source, architecture, role, *training)
            state = saved.load_latest(complete_checkpoints(saved.root)[-1][0])
            assert state == {"step": 1}
            loaded = gathered(training[0])
            reference = {}
            if role == "spin":  # that from before the first step
                reference = of_all_samples(reference_logprobs(training[0], role))
            metrics = step(*training, role)
            weights = gathered(training[0])
            progress(f"loaded {source} at {name}: {architecture} {role}")
            if dist.get_rank() == 0:
                expected = torch.load(expected_file(folder, architecture, role, split.precision))
                same = torch.load(f"{folder}/weights {source} {architecture} {role}.pt")
                report[source, name, architecture, role] = {
                    "loaded weights": apart(loaded, same),
                    "step 2": apart(metrics, expected["step 2"], precision=split.precision),
                    "weights 2": apart(weights, expected["weights 2"], precision=split.precision),
                    **{key: apart(found, expected[key]) for key, found in reference.items()},
                }
    return report


def save_all(tokenizer_dir, folder, names: list[str]) -> None:
    """Body of a rank: save at each of the splits."""
    for name in names:
        save(tokenizer_dir, folder, name)
        destroy_model_parallel()


def load_all(tokenizer_dir, folder, sources: dict[str, list[str]]) -> dict:
    """Body of a rank: load at each split what each of its sources has saved."""
    report = {}
    for name, saved_at in sources.items():
        report |= load(tokenizer_dir, folder, name, saved_at)
        destroy_model_parallel()
    return report
