# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts: prompts repeated for several responses, the micro-batches of all ranks joined, dealt
out to the ranks again, and measured.

Shapes: N samples of a rollout over all data-parallel (DP) ranks, B of them on this rank, S padded
length (prompt + response). `nemo_aligner.core.types` names the columns and their alignment.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tensors import create_mask, sample_seeds
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.core.types import InferenceBatch, PromptLoader, Rollout, RolloutBatch, Scores
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered, rebalance_nd_tensor
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers.futures import FutureScores

# ---------------------------------------------------------------------------- joining and dealing


class PPORolloutBatch(UserDict[str, Tensor]):
    """Columns of a rollout by name; the leading dimension of each is the samples."""

    @property
    def columns(self) -> RolloutBatch:
        return cast(RolloutBatch, self.data)

    @classmethod
    def from_rollout_batches(
        cls, rollout_batches: list[Any], eos_id: int, rollout_batch_seq_length: int | None
    ) -> PPORolloutBatch:
        """Join this rank's micro-batches, padded on the right to one width over all ranks; all
        ranks call it.

        Args:
            rollout_batches: equal keys; values `[b]` or `[b, width]`; empty without prompts.
            eos_id: fills `response_tokens`; everything else is filled with 0.
            rollout_batch_seq_length: least width of `response_tokens`, less 1 of others; or None.
        """
        batch = cls()
        for key, (dtype, width) in sorted(_common_layout(rollout_batches).items()):
            if not all(key in rollout for rollout in rollout_batches):
                raise UserError(
                    f"some samples of the rollout have '{key}' and others do not: the servers of "
                    "one reward model must give the same kind of rewards "
                    "(inference.rewards_per)."
                )
            parts = [rollout[key].to(get_device()) for rollout in rollout_batches]
            shape: tuple[int, ...] = (0,)
            if width is not None:
                is_tokens = key == "response_tokens"
                if rollout_batch_seq_length is not None:
                    width = max(width, rollout_batch_seq_length - (not is_tokens))
                pad = partial(torch.nn.functional.pad, value=eos_id if is_tokens else 0)
                parts = [pad(part, (0, width - part.size(1))) for part in parts]
                shape = (0, width)
            empty = torch.empty(shape, dtype=dtype, device=get_device())
            batch[key] = torch.cat(parts) if parts else empty
        return batch

    def gather_and_balance_globally(self) -> PPORolloutBatch:
        """The samples of all DP ranks, in the order of the ranks, on every rank; all call it."""
        gathered = type(self)()
        for key, tensor in sorted(self.data.items()):
            gathered[key] = rebalance_nd_tensor(
                tensor, group=parallel_state.get_data_parallel_group()
            )
        return gathered

    def select(self, samples: Tensor) -> PPORolloutBatch:
        """A copy of the samples at the given places (int64 `[n]`), in that order."""
        return type(self)(
            {key: tensor[samples.to(tensor.device)] for key, tensor in self.data.items()}
        )

    def chunk(
        self, rank: int, split_size: int, seed: int, global_batch_size: int | None = None
    ) -> PPORolloutBatch:
        """One rank's share of the shuffled samples, which every rank holds; `seed` is that of the
        permutation, which is dealt in global batches (`deal`), or as consecutive pieces.
        """
        sizes = {key: len(tensor) for key, tensor in self.data.items()}
        num_samples = next(iter(sizes.values()))
        assert set(sizes.values()) == {num_samples}, (
            f"columns of one rollout have different numbers of samples: {sizes}"
        )
        permutation = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
        return self.select(permutation[deal(num_samples, rank, split_size, global_batch_size)])


def _common_layout(rollout_batches: list[Any]) -> dict[str, tuple[torch.dtype, int | None]]:
    """`{key: (dtype, width or None for 1-D)}` over all ranks, which all call it, once."""
    own = dict.fromkeys(
        (key, tensor.dtype, tensor.size(1) if tensor.dim() > 1 else None)
        for rollout in rollout_batches
        for key, tensor in rollout.items()
    )
    layout: dict[str, tuple[torch.dtype, int | None]] = {}
    # A rank whose queue was empty knows neither keys nor dtypes: it learns them from the others.
    for key, dtype, width in itertools.chain(*gathered(own)):
        known = layout[key][1] if key in layout else None
        layout[key] = dtype, width if width is None or known is None else max(width, known)
    return layout


def deal(
    num_samples: int, rank: int, split_size: int, global_batch_size: int | None = None
) -> Tensor:
    """Places in a shuffled rollout, int64 `[num_samples / split_size]`, that belong to one of
    `split_size` ranks.

    With `global_batch_size` G, places k*G .. (k+1)*G-1 are global batch k whatever `split_size`
    is; a rank gets a consecutive share of each. 8 samples, G = 4, 2 ranks: rank 0 gets 0 1 4 5,
    rank 1 gets 2 3 6 7.
    """
    places = torch.arange(num_samples)
    if global_batch_size is None:
        return places.tensor_split(split_size)[rank]
    return places.view(-1, split_size, global_batch_size // split_size)[:, rank].flatten()


def local_places(num_samples: int, global_batch_size: int) -> Tensor:
    """Places in the shuffled rollout of this rank's samples, int64 `[B]`."""
    rank, size = _rank_and_size()
    return deal(num_samples, rank, size, global_batch_size).to(get_device())


def own_samples(gathered: Tensor, count: int) -> Tensor:
    """The `count` samples of this DP rank among those of all; ranks have equal shares."""
    first = parallel_state.get_data_parallel_rank() * count
    return gathered[first : first + count]


def local_share(
    rollout: PPORolloutBatch, seed: int, step: int, global_batch_size: int, epoch: int = 0
) -> PPORolloutBatch:
    """This rank's samples of a gathered rollout, shuffled for each step and each epoch over it."""
    # Prompts use streams of index >= 0 of this step, so negative ones are free for shuffling.
    shuffle_seed = int(sample_seeds(seed, step, torch.tensor([-2 - epoch]))[0])
    rank, size = _rank_and_size()
    return rollout.chunk(rank, size, shuffle_seed, global_batch_size)


def shares_of_global_batches(
    share: Mapping[str, Any], global_batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """This rank's share of one global batch after the other, from what `local_share` gave it."""
    per_rank = global_batch_size // parallel_state.get_data_parallel_world_size()
    for start in range(0, len(share["mask"]), per_rank):
        yield {key: tensor[start : start + per_rank] for key, tensor in share.items()}


def _rank_and_size() -> tuple[int, int]:
    return (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())


# ------------------------------------------------------------------------------ around inference


def compute_num_rollout_microbatches(dataloader: PromptLoader) -> int:
    """Micro-batches of one rollout on each DP rank; `ConfigError`: the numbers do not divide."""
    sampler = dataloader.batch_sampler
    num_samples, micro_batch_size = sampler.global_batch_size, sampler.micro_batch_size
    dp_size = parallel_state.get_data_parallel_world_size()
    if num_samples % (micro_batch_size * dp_size):
        raise ConfigError(
            f"a rollout of {num_samples} samples (num_rollout_samples or num_val_samples) is not "
            f"divisible by the rollout micro-batch size {micro_batch_size} x {dp_size} "
            "data-parallel rank(s); change one."
        )
    return num_samples // (micro_batch_size * dp_size)


def with_indices(batches: Iterable[InferenceBatch], first: int) -> Iterator[InferenceBatch]:
    """The batches with `idx`: without, each prompt's place in the data in its stead, counted from
    `first` as a sampler in order deals them to the ranks.
    """
    rank, dp_size = _rank_and_size()
    for batch in batches:
        size = len(batch["length"])
        if "idx" not in batch:
            places = torch.arange(size) + first + rank * size
            batch = cast(InferenceBatch, {**batch, "idx": places})
            first += size * dp_size
        yield batch


def repeat_prompts(
    batches: Iterable[InferenceBatch], num_responses: int, seed: int, step: int
) -> Iterator[InferenceBatch]:
    """Each prompt `num_responses` times in a row, in batches of the same sizes: responses to one
    prompt are generated together and share the pass over it. The batches carry `idx`, int64 `[b]`.

    Yields:
        The batch with `sample_seeds` int64 `[b]`, which depend on (seed, step, index, number of
        the response) alone, so that asking for more responses leaves the first ones what they
        were; and `sample_key` int64 `[b]`, unique and in the order of index and response.
    """
    for batch in batches:
        prompts = cast(dict[str, Tensor], batch)
        first = sample_seeds(seed, step, prompts["idx"])
        others = [sample_seeds(seed, number, first) for number in range(1, num_responses)]
        columns = {key: x.repeat_interleave(num_responses, 0) for key, x in prompts.items()}
        columns["sample_seeds"] = torch.stack([first, *others], dim=1).flatten()
        numbers = torch.arange(num_responses)
        columns["sample_key"] = (prompts["idx"][:, None] * num_responses + numbers).flatten()
        size = len(prompts["idx"])
        for start in range(0, size * num_responses, size):
            part = {key: x[start : start + size] for key, x in columns.items()}
            yield cast(InferenceBatch, part)


def with_prompt_columns(rollout: Rollout, batch: InferenceBatch) -> dict[str, Tensor]:
    """What `infer` returned for a batch, with the columns of prompts that stay with samples."""
    prompts, columns = cast(dict[str, Tensor], batch), dict(cast(dict[str, Tensor], rollout))
    if "is_end" not in columns:  # NeMo-Aligner's policy for rejection sampling does not say
        columns["is_end"] = torch.ones_like(columns["response_lengths"], dtype=torch.bool)
    for key in ("token_rewards", "record"):  # those come back as scores; these are for who scores
        columns.pop(key, None)
    kept = {"idx", "sample_key", "loss_multiplier"} & prompts.keys()
    return columns | {key: prompts[key].to(get_device()) for key in kept}


def score_columns(scores: Scores) -> dict[str, Tensor]:
    """The scores as columns of a rollout, those of an ensemble's model as `rewards_<name>`."""
    columns = {key: column for key, column in vars(scores).items() if isinstance(column, Tensor)}
    columns["rewards"] = scores.rewards.flatten()
    return columns | {f"rewards_{name}": part.flatten() for name, part in scores.parts.items()}


def take_scores(rollout: PPORolloutBatch) -> Scores:
    """Remove the `score_columns`, and return them as scores."""
    named = {field.name for field in dataclasses.fields(Scores)} & rollout.keys()
    parts = [key for key in rollout if key.startswith("rewards_")]
    return Scores(
        **{name: rollout.pop(name) for name in named},
        parts={key.removeprefix("rewards_"): rollout.pop(key) for key in parts},
    )


def part_columns(scores: Scores) -> dict[str, Tensor]:
    """`reward_parts` f32 `[b, K]`, of an ensemble's K models in the order of names."""
    parts = [scores.parts[name] for name in sorted(scores.parts)]
    return {"reward_parts": torch.stack(parts, dim=1)} if parts else {}


def gather_scores(scores: list[Scores], width: int, order: Tensor) -> Scores:
    """The scores of all DP ranks on every rank; all ranks call it.

    Args:
        scores: of this rank's micro-batches.
        width: S of the gathered rollout; values get S-1 columns.
        order: int64 `[N]`, places among the samples in the order of the ranks.
    """
    columns = [score_columns(each) for each in scores]
    own = PPORolloutBatch.from_rollout_batches(columns, 0, width)
    return take_scores(own.gather_and_balance_globally().select(order))


@dataclasses.dataclass(frozen=True)
class CollectedRollout:
    """A generated rollout whose scores are still on their way."""

    # the samples of all DP ranks on every rank, in the order of `sample_key`
    rollout: PPORolloutBatch
    # int64 `[N]`, for each of them its place among the samples in the order of the ranks
    order: Tensor
    # the scores of this rank's micro-batches, in the order of generation
    pending: list[FutureScores]


# ---------------------------------------------------------------------------------- measurements


def response_mask(rollout: Rollout) -> Tensor:
    """f32 `[B, S-1]`: 1 on the transitions of the responses, their end tokens included; 0 on
    prompts, observations and padding, and in rows of unusable prompts (`loss_multiplier` 0).
    """
    tokens = rollout["response_tokens"]
    mask = create_mask(
        values=torch.empty(tokens.size(0), tokens.size(1) - 1, device=tokens.device),
        prompt_lengths=rollout["prompt_lengths"],
        response_lengths=rollout["response_lengths"],
    )
    if "observed" in rollout:
        mask = mask * ~rollout["observed"]
    if "loss_multiplier" in rollout:
        mask = mask * (rollout["loss_multiplier"] > 0)[:, None]
    return mask


def generated_tokens(rollout: Rollout) -> Tensor:
    """How many tokens of each sample the policy has generated, int64 `[B]`."""
    tokens = rollout["response_lengths"] - rollout["prompt_lengths"]
    return tokens - rollout["observed"].sum(1) if "observed" in rollout else tokens


def sample_table(
    rollout: Rollout, scores: Scores, tokenizer: Tokenizer, num_samples: int | None = None
) -> list[dict[str, Any]]:
    """The first samples (None: all), decoded, with reward and whether they ended by themselves."""
    return [
        {
            **_texts(rollout, i, tokenizer),
            "reward": scores.rewards[i].item(),
            "is_end": bool(rollout["is_end"][i]),
        }
        for i in range(len(scores.rewards))[:num_samples]
    ]


def compute_rollout_metrics(rollout: Rollout, scores: Scores) -> dict[str, Any]:
    """Means over the samples of a gathered rollout (lengths in tokens), with `rewards_<name>` for
    each reward model of an ensemble; with an environment `turns`, responses of a sample. Stand-ins
    for prompts that could not be used (`loss_multiplier` 0) are left out.
    """
    lengths = rollout["response_lengths"].float()
    counts = torch.ones_like(lengths)
    if "loss_multiplier" in rollout and (rollout["loss_multiplier"] > 0).any():
        counts = (rollout["loss_multiplier"] > 0).to(lengths)

    def mean(values: Tensor) -> float:
        return ((values.float() * counts).sum() / counts.sum()).item()

    turns = {}
    if "observed" in rollout and scores.token_rewards is not None:
        has_reward = response_mask(rollout).bool() & ~scores.token_rewards.isnan()
        turns["turns"] = mean(has_reward.sum(1))
    return {
        "rollout_size": len(lengths),
        "response_lengths": mean(lengths),  # prompt + response
        "prompt_lengths": mean(rollout["prompt_lengths"]),
        "generation_length": mean(generated_tokens(rollout)),
        **turns,
        "rewards": mean(scores.rewards),
        **{f"rewards_{name}": mean(part) for name, part in scores.parts.items()},
        "fraction_of_samples_properly_ended": mean(rollout["is_end"]),
    }


def first_sample(rollout: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"reward": float(rollout["rewards"][0]), **_texts(rollout, 0, tokenizer)}


def _texts(rollout: Any, i: int, tokenizer: Tokenizer) -> dict[str, Any]:
    start, end = int(rollout["prompt_lengths"][i]), int(rollout["response_lengths"][i])
    tokens = rollout["response_tokens"][i].tolist()
    text = tokenizer.ids_to_text
    return {"prompt": text(tokens[:start]), "response": text(tokens[start:end])}
