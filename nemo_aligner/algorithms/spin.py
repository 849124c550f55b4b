# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Self-play fine-tuning (SPIN, Chen et al. 2024, arXiv:2401.01335, algorithm 1).

An iteration is `max_epochs` passes over the data. Its reference (the opponent of the paper) is the
policy with which it began. Each step compares the response of the data with one that the reference
gave to the same prompt, by the logistic loss of eq. 4.7 (`core/preference.py:dpo_loss`).

The reference generates for several steps ahead. A response depends on (seed, step, index in the
data set) alone, so a resumed job generates the same ones. Shapes: B samples of a global batch on
this rank, S padded length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nemo_aligner.algorithms.supervised import SupervisedTrainer
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tensors import batch_pad_to_fixed_len, create_mask, sample_seeds
from nemo_aligner.core.types import InferenceBatch, SelfPlayBatch, SelfPlayPrompts
from nemo_aligner.data.nlp.sft import response_span
from nemo_aligner.parallel import parallel_state

SHOWN_SAMPLES = 5  # of each generation, in train_samples.jsonl


class SPINTrainer(SupervisedTrainer):
    """Trains a policy against its former self; see the module.

    The arguments are those of `SupervisedTrainer`: `cfg` is `trainer.spin`, `model` a
    `MegatronGPTSPINModel`. `train_dataloader` yields `SelfPlayPrompts` (`spin_custom_collate`),
    the others batches of supervised fine-tuning: validation measures the likelihood of the data.
    """

    JOB = ("gpt_spin", "trainer.spin")
    counts_batches = True  # an iteration does

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rollout_micro_batch_size = int(self.model.cfg.spin.rollout_micro_batch_size)

    # --- iterations -----------------------------------------------------------------------------

    @property
    def steps_per_iteration(self) -> int:
        return self.num_steps_per_epoch * int(self.cfg.max_epochs)

    @property
    def iteration(self) -> int:
        return self.step // self.steps_per_iteration

    @property
    def epoch(self) -> int:
        return self.step // self.num_steps_per_epoch % int(self.cfg.max_epochs)

    @property
    def objective_age(self) -> int:
        """Finished steps of this iteration: it begins with a policy that is its reference."""
        return self.step % self.steps_per_iteration

    def begin_iteration(self) -> None:
        """The policy becomes its own reference, unless a checkpoint has brought it."""
        if self.objective_age == 0:
            self.model.set_reference_policy()
        self.model.set_KL_penalty_by_iteration(self.iteration)

    # --- batches --------------------------------------------------------------------------------

    def training_batches(self) -> Iterator[SelfPlayBatch]:
        prompts = super().training_batches()
        while True:
            self.begin_iteration()
            yield from self.play([next(prompts) for _ in range(self.steps_ahead())])

    def steps_ahead(self) -> int:
        """For how many steps the reference generates together: until it has as many prompts as are
        decoded together, within the iteration, the pass over the data and the training.
        """
        sampler: Any = self.train_dataloader.batch_sampler
        steps_per_pass = int(sampler.total_samples) // self.global_batch_size
        samples: int = self.model.responses_together(self.rollout_micro_batch_size)
        samples *= parallel_state.get_data_parallel_world_size()
        return min(
            math.ceil(samples / self.global_batch_size),
            self.steps_per_iteration - self.objective_age,
            steps_per_pass - self.consumed_samples // self.global_batch_size % steps_per_pass,
            self.max_steps - self.step,
        )

    @torch.no_grad()
    def play(self, batches: Sequence[SelfPlayPrompts]) -> list[SelfPlayBatch]:
        """The reference's responses to the prompts of the next global batches beside those of the
        data, with its log-probs of both; all ranks call it. `batches`: this rank's shares.
        """
        self.model.prepare_for_inference()
        with self.model.reference_policy():
            with self.timer("generate"):
                prompts = [self._prompts(batch, self.step + i) for i, batch in enumerate(batches)]
                responses = self._generate(prompts)
            with self.timer("ref_policy_logprobs_time"):
                pairs = [self._pairs(*both) for both in zip(prompts, responses, strict=True)]
        self.model.finish_inference()
        self.model.prepare_for_training()
        self._log_samples(pairs[0], prompts[0])
        return pairs

    def _prompts(self, batch: SelfPlayPrompts, step: int) -> dict[str, Tensor]:
        """A batch whose samples fit into the model, with `sample_seeds` int64 `[B]`, and
        `loss_multiplier` float32 `[B]`: 0 where nothing of the response of the data is left, in
        whose place the last token stands for it.
        """
        longest = int(self.model.cfg.encoder_seq_length)
        lengths = batch["combined_lengths"].clamp(max=longest)
        starts = torch.minimum(batch["prompt_lengths"], lengths - 1).clamp(min=1)
        return {
            "tokens": batch["prompts_and_answers"][:, :longest],
            "lengths": lengths,
            "prompt_lengths": starts,
            "sample_seeds": sample_seeds(self.model.cfg.seed, step, batch["idx"]),
            "loss_multiplier": (batch["prompt_lengths"] < lengths).float(),
        }

    def _generate(self, batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Any]]:
        """Responses, as one queue: by batch `tokens`, a list of int64 `[R]`, and `is_end`."""
        lengths = torch.cat([batch["prompt_lengths"] for batch in batches])
        prompts = [
            row[:length]
            for batch in batches
            for row, length in zip(batch["tokens"], batch["prompt_lengths"], strict=True)
        ]
        columns = {
            "text": batch_pad_to_fixed_len(
                prompts, int(lengths.max()), self.model.tokenizer.eos_id
            ),
            "length": lengths,
            "sample_seeds": torch.cat([batch["sample_seeds"] for batch in batches]),
            "sample_key": torch.arange(len(lengths)),
        }
        size = self.rollout_micro_batch_size
        parts = [torch.split(x, size) for x in columns.values()]
        count = {"rank_batches": len(parts[0])}
        queue = (
            cast(InferenceBatch, dict(zip(columns, part, strict=True)) | count)
            for part in zip(*parts, strict=True)
        )
        tokens: dict[int, Tensor] = {}
        is_end = torch.empty(len(lengths), dtype=torch.bool)
        for group, rollout in self.model.infer_all(queue):
            keys, ends = group["sample_key"].tolist(), rollout["response_lengths"].tolist()
            for key, end, row in zip(keys, ends, rollout["response_tokens"].cpu(), strict=True):
                tokens[key] = row[:end]
            is_end[keys] = rollout["is_end"].cpu()
        sizes = [len(batch["lengths"]) for batch in batches]
        return [
            {"tokens": [tokens[key] for key in own.tolist()], "is_end": is_end[own]}
            for own in torch.split(torch.arange(len(lengths)), sizes)
        ]

    def _pairs(self, batch: Mapping[str, Tensor], responses: Mapping[str, Any]) -> SelfPlayBatch:
        eos_id = self.model.tokenizer.eos_id
        generated_length = torch.tensor([len(tokens) for tokens in responses["tokens"]])
        width = int(max(batch["lengths"].max(), generated_length.max()))
        sides = {
            "actual": (batch["tokens"][:, :width], batch["lengths"]),
            "generated": (responses["tokens"], generated_length),
        }
        pairs: dict[str, Tensor] = {"is_end": responses["is_end"]}
        for name, (tokens, lengths) in sides.items():
            pairs[name] = batch_pad_to_fixed_len(list(tokens), width, eos_id)
            pairs[f"{name}_length"] = lengths
            transitions = create_mask(
                torch.empty(len(lengths), width - 1), batch["prompt_lengths"], lengths
            )
            # Column t+1 of a mask of tokens is column t of one of transitions.
            pairs[f"{name}_mask"] = torch.nn.functional.pad(transitions, (1, 0))
        pairs["loss_mask"] = pairs["actual_mask"] * batch["loss_multiplier"][:, None]
        actual, generated = self.model.get_ref_policy_logprobs(pairs).chunk(2)
        pairs["ref_policy_log_probs_actual"] = actual
        pairs["ref_policy_log_probs_generated"] = generated
        return cast(SelfPlayBatch, pairs)

    def _log_samples(self, pairs: SelfPlayBatch, batch: Mapping[str, Tensor]) -> None:
        text = self.model.tokenizer.ids_to_text
        rows = []
        for i in range(min(SHOWN_SAMPLES, len(batch["lengths"]))):
            start = int(batch["prompt_lengths"][i])
            generated = pairs["generated"][i, : pairs["generated_length"][i]].tolist()
            actual = pairs["actual"][i, : pairs["actual_length"][i]].tolist()
            rows.append(
                {
                    "prompt": text(generated[:start]),
                    "response": text(generated[start:]),
                    "actual": text(actual[start:]),
                    "is_end": bool(pairs["is_end"][i]),
                }
            )
        self.logger.log_samples("train_samples", rows, step=self.step)

    # --- steps ----------------------------------------------------------------------------------

    def train_single_step(self, batch: Any) -> dict[str, float]:
        iteration = self.iteration + 1
        return super().train_single_step(batch) | {"iteration": iteration}

    def validation_step(self, batch: Any) -> tuple[float, Mapping[str, float | Tensor]]:
        self.model.prepare_for_validation_step()
        loss, metrics = self.model.get_loss_and_metrics_vanilla_sft(batch, forward_only=True)
        self.model.finish_validation_step()
        return loss, metrics

    # --- checkpoint, resume ---------------------------------------------------------------------

    def save(
        self, extra_candidates: dict[str, Any] | None = None, is_train_end: bool = False
    ) -> None:
        """Save a checkpoint; all ranks call it. Between iterations it holds no reference."""
        if self.objective_age == 0:
            self.model.forget_reference_policy()
        super().save(extra_candidates, is_train_end)

    def state_dict(self) -> dict[str, int]:
        return super().state_dict() | {
            "iteration": self.iteration,
            "steps_per_iteration": self.steps_per_iteration,
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """See the base class.

        Raises:
            ConfigError: an iteration has another length than in the job that `state_dict` is of.
            UserError: the reference of the iteration was not loaded.
        """
        super().load_state_dict(state_dict)
        before = state_dict.get("steps_per_iteration", self.steps_per_iteration)
        if before != self.steps_per_iteration:
            raise ConfigError(
                f"the checkpoint is of a job whose iterations have {before} steps, but here they "
                f"have {self.steps_per_iteration}. Resume with the same data, "
                "model.global_batch_size, trainer.spin.max_epochs and limit_train_batches, or "
                "start in another folder from the .nemo file of that job."
            )
        if self.objective_age:
            self.model.check_reference_policy()


def spin_custom_collate(
    batch: list[dict[str, Any]], eos_id: int, *_args: Any, **_kwargs: Any
) -> SelfPlayPrompts:
    """A batch of items of `build_sft_dataset`, padded with `eos_id`; the other arguments are
    NeMo-Aligner's, and not used. `UserError`: an example has no prompt to respond to.
    """
    spans = [response_span(item) for item in batch]
    for item, (start, _end) in zip(batch, spans, strict=True):
        if not start:
            raise UserError(
                f"example {item['idx']} (index in the data set) has no prompt to respond to; "
                "remove it, or set add_bos=True in the data section."
            )
    starts, ends = zip(*spans, strict=True)
    whole = [torch.tensor(item["tokens"][:end]) for item, end in zip(batch, ends, strict=True)]
    return {
        "prompts_and_answers": batch_pad_to_fixed_len(whole, max(ends), eos_id),
        "prompt_lengths": torch.tensor(starts),
        "combined_lengths": torch.tensor(ends),
        "idx": torch.tensor([item["idx"] for item in batch]),
    }
