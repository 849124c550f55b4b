# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts: joining the micro-batches of all ranks, dealing them out to the ranks again, and
measuring them.

Shapes: N samples of a rollout over all DP ranks, B of them on this rank, S padded length (prompt +
response).
"""

from collections import UserDict
from collections.abc import Iterable, Iterator

import torch

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.masks import create_mask
from nemo_aligner.core.seeds import sample_seeds
from nemo_aligner.core.types import Scores
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import rebalance_nd_tensor
from nemo_aligner.parallel.device import get_device


class PPORolloutBatch(UserDict):
    """Tensors of a rollout by name; the leading dimension of each is the samples."""

    @classmethod
    def from_rollout_batches(
        cls, rollout_batches: list[dict], eos_id: int, rollout_batch_seq_length: int | None
    ) -> "PPORolloutBatch":
        """Join this rank's micro-batches, padded on the right to one width over all ranks; all
        ranks call it.

        Args:
            rollout_batches: dicts with equal keys; values `[b]` or `[b, width]`. Empty on a rank
                that drew no prompt.
            eos_id: fills `response_tokens`; everything else is filled with 0.
            rollout_batch_seq_length: least width of `response_tokens` (and, less 1, of other 2-D
                tensors); None: the width of the widest.
        """
        batch = cls()
        for key, (dtype, width) in sorted(_common_layout(rollout_batches).items()):
            parts = [rollout[key].to(get_device()) for rollout in rollout_batches]
            if width is None:
                batch[key] = (
                    torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=get_device())
                )
                continue
            is_tokens = key == "response_tokens"
            if rollout_batch_seq_length is not None:
                width = max(
                    width, rollout_batch_seq_length if is_tokens else rollout_batch_seq_length - 1
                )
            pad_value = eos_id if is_tokens else 0
            padded = [
                torch.nn.functional.pad(part, (0, width - part.size(1)), value=pad_value)
                for part in parts
            ]
            batch[key] = (
                torch.cat(padded)
                if padded
                else torch.empty((0, width), dtype=dtype, device=get_device())
            )
        return batch

    def gather_and_balance_globally(self) -> "PPORolloutBatch":
        """The rows of all DP ranks, in the order of the ranks, on every rank; all ranks call
        it.
        """
        gathered = type(self)()
        for key, tensor in sorted(self.data.items()):
            gathered[key] = rebalance_nd_tensor(
                tensor, group=parallel_state.get_data_parallel_group()
            )
        return gathered

    def select(self, rows: torch.Tensor) -> "PPORolloutBatch":
        """A copy of the given rows (int64 `[n]`), in that order."""
        return type(self)(
            {key: tensor[rows.to(tensor.device)] for key, tensor in self.data.items()}
        )

    def chunk(
        self, rank: int, split_size: int, seed: int, global_batch_size: int | None = None
    ) -> "PPORolloutBatch":
        """This rank's share of the shuffled rows; needs no communication, every rank holds all
        rows.

        Args:
            rank, split_size: which share, of how many.
            seed: of the permutation, the same on every rank.
            global_batch_size: deal the permutation in global batches of this many rows (see
                `deal`); None: as `split_size` consecutive pieces.
        """
        sizes = {key: len(tensor) for key, tensor in self.data.items()}
        num_rows = next(iter(sizes.values()))
        assert set(sizes.values()) == {num_rows}, (
            f"tensors of one rollout have different numbers of rows: {sizes}"
        )
        permutation = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
        return self.select(permutation[deal(num_rows, rank, split_size, global_batch_size)])


def _common_layout(rollout_batches: list[dict]) -> dict:
    """`{key: (dtype, width or None for 1-D)}` over all ranks, one exchange for all keys; all ranks
    call it.
    """
    layout = {}
    for rollout in rollout_batches:
        for key, tensor in rollout.items():
            width = tensor.size(1) if tensor.dim() > 1 else None
            if width is not None and key in layout:
                width = max(width, layout[key][1])
            layout[key] = (tensor.dtype, width)
    if parallel_state.get_world_size() == 1:
        return layout
    # A rank whose queue was empty knows neither keys nor dtypes: it learns them from the others.
    layouts = [None] * parallel_state.get_world_size()
    torch.distributed.all_gather_object(layouts, layout)
    common = {}
    for other in layouts:
        for key, (dtype, width) in other.items():
            if width is not None and key in common:
                width = max(width, common[key][1])
            common[key] = (dtype, width)
    return common


def deal(
    num_rows: int, rank: int, split_size: int, global_batch_size: int | None = None
) -> torch.Tensor:
    """Places in a shuffled rollout, int64 `[num_rows / split_size]`, that belong to one of
    `split_size` ranks.

    With `global_batch_size` G, rows k*G .. (k+1)*G-1 are global batch k whatever `split_size` is;
    a rank gets a consecutive share of each. 8 rows, G = 4, 2 ranks: rank 0 gets 0 1 4 5, rank 1
    gets 2 3 6 7.
    """
    places = torch.arange(num_rows)
    if global_batch_size is None:
        return places.tensor_split(split_size)[rank]
    return places.view(-1, split_size, global_batch_size // split_size)[:, rank].flatten()


def compute_num_rollout_microbatches(dataloader) -> int:
    """Micro-batches of one rollout on each DP rank.

    Raises:
        ConfigError: the numbers do not divide.
    """
    sampler = dataloader.batch_sampler
    num_samples, micro_batch_size = sampler.global_batch_size, sampler.micro_batch_size
    dp_size = parallel_state.get_data_parallel_world_size()
    if num_samples % (micro_batch_size * dp_size):
        raise ConfigError(
            f"a rollout of {num_samples} samples (num_rollout_samples or num_val_samples) is not "
            "divisible "
            f"by the rollout micro-batch size {micro_batch_size} x {dp_size} data-parallel "
            "rank(s); change one."
        )
    return num_samples // (micro_batch_size * dp_size)


def answers_to(batches: Iterable[dict], answers: int, seed: int, step: int) -> Iterator[dict]:
    """Each batch of prompts `answers` times, for one answer to each of its prompts after the
    other.

    Args:
        batches: must carry `idx`, int64 `[b]`, the dataset indices.
        seed: of the run.
        step: of training, so that a prompt that comes back is answered anew.

    Yields:
        The batch with `sample_seeds` int64 `[b]`, which depend on (seed, step, index, number of
        the answer) alone, so that with more answers the first ones stay what they were; and
        `sample_key` int64 `[b]`, unique and in the order of index and answer.
    """
    for batch in batches:
        first = sample_seeds(seed, step, batch["idx"])
        for answer in range(answers):
            seeds = first if answer == 0 else sample_seeds(seed, answer, first)
            yield batch | {"sample_seeds": seeds, "sample_key": batch["idx"] * answers + answer}


def with_prompt_columns(rollout: dict, batch: dict) -> dict:
    """What `infer` returned for a batch of prompts, and what must stay with each row of them."""
    kept = ("idx", "sample_key", "loss_multiplier")
    return dict(rollout) | {key: batch[key].to(get_device()) for key in kept if key in batch}


def reward_columns(scores: Scores) -> dict[str, torch.Tensor]:
    """Return the columns f32 `[b]` of a scored micro-batch: `rewards`, and `rewards_<name>` for
    each model of an ensemble.
    """
    parts = {f"rewards_{name}": part for name, part in scores.parts.items()}
    return {"rewards": scores.rewards} | parts


def answer_mask(rollout) -> torch.Tensor:
    """f32 `[B, S-1]`: 1 on the transitions of the answers, their end tokens included; never on
    padding, nor in the row of a stand-in for a prompt that could not be used (`loss_multiplier`
    0).
    """
    tokens = rollout["response_tokens"]
    mask = create_mask(
        values=torch.empty(tokens.size(0), tokens.size(1) - 1, device=tokens.device),
        prompt_lengths=rollout["prompt_lengths"],
        response_lengths=rollout["response_lengths"],
    )
    if "loss_multiplier" in rollout:
        mask = mask * (rollout["loss_multiplier"] > 0)[:, None]
    return mask


def sample_rows(rollout_batch, tokenizer, num_rows: int) -> list[dict]:
    """Prompt and response of the first samples as text, with reward and whether the response ended
    by itself.
    """
    rows = []
    for i in range(min(num_rows, len(rollout_batch["rewards"]))):
        tokens = rollout_batch["response_tokens"][i].tolist()
        prompt_length, length = (
            int(rollout_batch[key][i]) for key in ("prompt_lengths", "response_lengths")
        )
        rows.append(
            {
                "prompt": tokenizer.ids_to_text(tokens[:prompt_length]),
                "response": tokenizer.ids_to_text(tokens[prompt_length:length]),
                "reward": rollout_batch["rewards"][i].item(),
                "is_end": bool(rollout_batch["is_end"][i]),
            }
        )
    return rows


def compute_rollout_metrics(rollout_batch) -> dict[str, float]:
    """Means over the samples of a gathered rollout (lengths in tokens), with those of an
    ensemble's `rewards_<name>`.

    Stand-ins for prompts that could not be used (`loss_multiplier` 0) train nothing and are left
    out of the means.
    """
    lengths, prompt_lengths = (
        rollout_batch["response_lengths"].float(),
        rollout_batch["prompt_lengths"].float(),
    )
    counts = torch.ones_like(lengths)
    if "loss_multiplier" in rollout_batch and (rollout_batch["loss_multiplier"] > 0).any():
        counts = (rollout_batch["loss_multiplier"] > 0).to(lengths)

    def mean(values):
        return ((values.float() * counts).sum() / counts.sum()).item()

    return {
        "rollout_size": len(lengths),
        "response_lengths": mean(lengths),  # prompt + response
        "prompt_lengths": mean(prompt_lengths),
        "generation_length": mean(lengths - prompt_lengths),
        "rewards": mean(rollout_batch["rewards"]),
        **{
            key: mean(values)
            for key, values in rollout_batch.items()
            if key.startswith("rewards_")
        },
        "fraction_of_samples_properly_ended": mean(rollout_batch["is_end"]),
    }
