# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What PPO and REINFORCE share: rollouts with the log-probs of the policy and of its reference,
scored, and dealt to the ranks as training data. What becomes of the rewards (`make_data`) and
`learn` are the algorithms' own.

Shapes: N samples of a rollout over all data-parallel (DP) ranks (prompts x responses to each), B
of them on this rank, S padded length (prompt + response). Tensors per transition are `[B, S-1]`;
`nemo_aligner.core.types` has their alignment.

The split of the work does not change the numbers:

* a sample's random stream depends on (seed, step, dataset index, number of the response) alone;
* a gathered rollout is put in the order of dataset index and response before it is shuffled;
* one seeded permutation of the N samples is cut into global batches of G, and each of these into
  one share per DP rank, so update k sees the same G samples with any number of ranks (`deal`).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.algorithms import rollouts
from nemo_aligner.algorithms.alarms import check_policy_equals_reference, rollout_health
from nemo_aligner.algorithms.rollout_trainer import RolloutTrainer
from nemo_aligner.algorithms.training_loop import TRAIN_TABLE_ROWS, Parts, log_probs
from nemo_aligner.core import types
from nemo_aligner.core.tensors import sample_seeds
from nemo_aligner.models.alignable_interface import PolicyWithReference
from nemo_aligner.servers.futures import FutureScores


class PolicyGradientTrainer(RolloutTrainer):
    """Learns from advantages of the policy's own responses; see the base class for the loop.

    Attributes:
        compute_init_policy_kl: rollouts need the reference's log-probs.
        resumed: the state is that of a checkpoint.
        dynamic_sampling_rounds: most rounds of further prompts in a step; 0: none are drawn.
    """

    model: PolicyWithReference
    dynamic_sampling_rounds = 0

    def __init__(
        self,
        parts: Parts,
        train: types.PromptLoaderBuilder,
        validation: types.PromptLoaderBuilder | None,
        collate_fn: Any,
        iterator: types.PromptIterator,
        num_rollouts_per_prompt: int,
        score: Callable[[types.Rollout], FutureScores],
    ):
        """See `PPOTrainer`; `iterator` is its `batch_iterator_cls`."""
        # Sizes that do not fit are refused now, not after the first steps.
        if validation is not None:
            validation(consumed_samples=0)
        sampler = train(consumed_samples=0).batch_sampler
        super().__init__(parts, sampler, num_rollouts_per_prompt, score)
        self.train_builder, self.validation_builder = train, validation
        self.collate_fn, self.iterator = collate_fn, iterator
        self.has_validation = validation is not None
        self.resumed = False
        self.compute_init_policy_kl = self.cfg.initial_policy_kl_penalty > 0

    def check_rollout(self, responses_key: str) -> None:
        """`check_sizes` of a rollout; `responses_key` names `num_rollouts_per_prompt`."""
        prompts, responses = self.num_rollout_samples, self.num_rollouts_per_prompt
        name = f"model.{self.SECTION}.num_rollout_samples"
        if responses != 1:
            name += f"={prompts} x {responses_key}={responses}"
        self.check_sizes(prompts * responses, name)

    # ------------------------------------------------------------------------------- the algorithm

    def generate_rollouts(
        self, sampling_step: int | None = None
    ) -> tuple[Any, dict[str, Any], dict[str, float]]:
        """One rollout with the current policy: `(data, metrics, timings)`; all ranks call it.
        `UserError`: a KL is to be measured, and the policy has no reference.

        `sampling_step` selects the random streams; None: `self.step`. `data` is that of
        `make_data`, with `sample_order` int64 `[B]`, places in the shuffled rollout of all ranks.
        """
        if self.compute_init_policy_kl:
            self.model.check_reference_policy()
        sampling_step = self.step if sampling_step is None else sampling_step
        with self.inference():
            collected = self._draw(sampling_step)
            rollout, scores, drawn = collected.rollout, None, collected.rollout
            draw_metrics: dict[str, float] = {}
            if self.dynamic_sampling_rounds:
                rollout, scores, drawn, draw_metrics = self._redraw(collected, sampling_step)
            local = self._with_logprobs(rollout)
            scores = scores or self.wait_for_scores(collected)
            columns = rollouts.score_columns(scores) | rollouts.part_columns(scores)
            local.update(self._local_share(rollouts.PPORolloutBatch(columns)).columns)
            data, data_metrics = self.make_data(local)
            data_metrics |= rollout_health(local, data)
            data_metrics |= self._check_first_kl(local, data["mask"])
            data["sample_order"] = local["sample_order"]

        table = rollouts.sample_table(
            rollout.columns, scores, self.model.tokenizer, TRAIN_TABLE_ROWS
        )
        metrics = self.rollout_metrics(rollout.columns, scores) | draw_metrics | data_metrics
        metrics |= {"table": table, "consumed_samples": self.consumed_samples}
        return data, metrics, self.generation_timings(drawn.columns)

    @abstractmethod
    def make_data(self, local: types.RolloutBatch) -> tuple[Any, dict[str, Any]]:
        """What the updates consume, of this rank's samples, `mask` f32 `[B, S-1]` among it, and
        metrics over all ranks, who all call it.
        """

    @property
    def needs_sampling_logprobs(self) -> bool:
        return self.alarms.needs_sampling_logprobs

    @property
    def source_of_logprobs(self) -> str | None:
        """Where they come from: a pass to "recompute" them, the "sampler", or None: not needed."""
        return "recompute"

    def compute_rollout_metrics(self, rollout_batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Means over a `Rollout` with `rewards` f32 `[N]`, with `table`, its first sample."""
        scores = types.Scores(rollout_batch["rewards"])
        metrics = self.rollout_metrics(cast(types.Rollout, rollout_batch), scores)
        return {**metrics, "table": rollouts.first_sample(rollout_batch, self.model.tokenizer)}

    # ---------------------------------------------------------------------------- parts of a step

    def validation_prompts(self) -> Iterable[types.InferenceBatch]:
        assert self.validation_builder is not None
        return self._prompts(self.validation_builder, 0)

    def _prompts(
        self, dataloader_builder: types.PromptLoaderBuilder, consumed_samples: int
    ) -> Iterable[types.InferenceBatch]:
        dataloader = dataloader_builder(consumed_samples=consumed_samples)
        num_microbatches = rollouts.compute_num_rollout_microbatches(dataloader)
        with self.timer("batch_iterator_init"):
            sampler, dataset = iter(dataloader.batch_sampler), dataloader.dataset
            return self.iterator(sampler, num_microbatches, dataset, self.collate_fn)

    def _draw(self, sampling_step: int) -> rollouts.CollectedRollout:
        prompts = self._prompts(self.train_builder, self.consumed_samples)
        source = self.source_of_logprobs
        compared = self.needs_sampling_logprobs and source is not None
        return self.draw(prompts, sampling_step, compared or source == "sampler")

    def _redraw(
        self, collected: rollouts.CollectedRollout, sampling_step: int
    ) -> tuple[rollouts.PPORolloutBatch, types.Scores, rollouts.PPORolloutBatch, dict[str, float]]:
        """Dynamic sampling, from a first round on: `(rollout, scores, all drawn, metrics)`."""
        drawn = DrawnPrompts(
            self.num_rollout_samples,
            self.num_rollouts_per_prompt,
            (self.seed, sampling_step),
            self.model.tokenizer.eos_id,
        )
        drawn.add(collected.rollout, self.wait_for_scores(collected))
        for _ in range(self.dynamic_sampling_rounds):
            if all(drawn.differ[place] for place in drawn.places):
                break  # every prompt to train on has a signal
            collected = self._draw(sampling_step)
            drawn.add(collected.rollout, self.wait_for_scores(collected))
        rollout, scores, everything = drawn.chosen()
        return rollout, scores, everything, drawn.metrics(everything)

    def _local_share(
        self, rollout: rollouts.PPORolloutBatch, epoch: int = 0
    ) -> rollouts.PPORolloutBatch:
        return rollouts.local_share(rollout, self.seed, self.step, self.cfg.model_gbs, epoch)

    def _with_logprobs(self, rollout: rollouts.PPORolloutBatch) -> types.RolloutBatch:
        local = self._local_share(rollout).columns
        local["sample_order"] = rollouts.local_places(len(rollout["idx"]), self.cfg.model_gbs)
        tokens, lengths = local["response_tokens"], local["response_lengths"]
        if self.source_of_logprobs == "recompute":
            with self.timer("logprobs"):
                local["logprobs"] = log_probs(self.model.get_inference_log_probs, tokens, lengths)
        elif self.source_of_logprobs == "sampler":
            local["logprobs"] = local.pop("sampling_logprobs")
        if self.compute_init_policy_kl:
            with self.timer("init_logprobs"):
                local["init_logprobs"] = log_probs(
                    self.model.get_init_policy_logprobs, tokens, lengths
                )
        return local

    def _check_first_kl(self, local: types.RolloutBatch, mask: Tensor) -> dict[str, float]:
        """A fresh run's policy must be its reference, unless it starts from other weights."""
        is_fresh = not (self.optimization_step or self.resumed)
        if not (self.compute_init_policy_kl and is_fresh and self.model.starts_as_reference):
            return {}
        return check_policy_equals_reference(local["logprobs"], local["init_logprobs"], mask)

    def global_batches(
        self, data: Mapping[str, Any], epochs: int = 1
    ) -> Iterator[dict[str, Tensor]]:
        """This rank's share of each global batch, in `epochs` over the rollout in new orders."""
        first = rollouts.PPORolloutBatch(dict(data))
        gathered = first
        for epoch in range(epochs):
            if epoch == 1:  # later epochs deal all samples anew, so every rank needs all of them
                gathered = first.gather_and_balance_globally()
                gathered = gathered.select(gathered["sample_order"].argsort())
            share = first if epoch == 0 else self._local_share(gathered, epoch)
            trained_on = {key: tensor for key, tensor in share.items() if key != "sample_order"}
            yield from rollouts.shares_of_global_batches(trained_on, self.cfg.model_gbs)

    # ---------------------------------------------------------------------- checkpoint and resume

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.resumed = True


# ------------------------------------------------------------------------------ dynamic sampling
# Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2: in place of prompts whose responses all have
# the same reward, which teach nothing, others are drawn. N samples of the rounds over all ranks.


class DrawnPrompts:
    """The rounds of one step, of all data-parallel ranks on every rank: `wanted` prompts of a
    rollout, with `responses` to each; `seed` is of the step's choice among equals.
    """

    def __init__(self, wanted: int, responses: int, seed: tuple[int, int], eos_id: int):
        self.wanted, self.responses, self.seed, self.eos_id = wanted, responses, seed, eos_id
        self.rounds: list[dict[str, Tensor]] = []
        self.number: list[int] = []  # of each prompt's round
        self.idx: list[int] = []
        self.differ: list[bool] = []  # the rewards of its responses that count

    def add(self, rollout: rollouts.PPORolloutBatch, scores: types.Scores) -> None:
        """Add a round, in the order of `sample_key`."""
        self.rounds.append({**rollout.data, **rollouts.score_columns(scores)})
        counts = rollouts.response_mask(rollout.columns).any(1).view(-1, self.responses)
        rewards = scores.rewards.view(-1, self.responses)
        largest = rewards.masked_fill(~counts, -torch.inf).amax(1)
        self.differ += (largest > rewards.masked_fill(~counts, torch.inf).amin(1)).tolist()
        self.idx += rollout["idx"][:: self.responses].tolist()
        self.number += [len(self.rounds)] * (len(self.idx) - len(self.number))

    @property
    def places(self) -> list[int]:
        """Places among the drawn of the prompts to train on, in the order of the data set: those
        with a signal first, of them those of earlier rounds, of one round any. A prompt that
        comes back in a later round does not count again: it would get the same responses.
        """
        idx = np.array(self.idx)
        chance = sample_seeds(*self.seed, torch.tensor(self.idx)).numpy()
        _, fresh = np.unique(idx, return_index=True)
        order = np.lexsort((chance, np.array(self.number), ~np.array(self.differ)))
        chosen = order[np.isin(order, fresh)][: self.wanted]
        return [int(place) for place in chosen[idx[chosen].argsort()]]

    def chosen(self) -> tuple[rollouts.PPORolloutBatch, types.Scores, rollouts.PPORolloutBatch]:
        """`(rollout, scores, drawn)`: the prompts to train on, all rounds; all ranks call it."""
        drawn = rollouts.PPORolloutBatch.from_rollout_batches(self.rounds, self.eos_id, None)
        first = torch.tensor(self.places)[:, None] * self.responses
        kept = drawn.select((first + torch.arange(self.responses)).flatten())
        return kept, rollouts.take_scores(kept), drawn

    def metrics(self, drawn: rollouts.PPORolloutBatch) -> dict[str, float]:
        counts = rollouts.response_mask(drawn.columns).any(1)
        return {
            "prompts_drawn": len(self.idx),
            "fraction_of_drawn_prompts_without_signal": 1 - float(np.mean(self.differ)),
            "drawn_rewards": float(drawn["rewards"].double()[counts].mean()),
        }
