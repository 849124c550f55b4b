# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling of a Megatron policy against reward models in other processes.

`RSTrainer.run_step` is the algorithm: generate several responses to each prompt, score them, keep
the best of each prompt, and train on them with the likelihood loss. (Llama 2, arXiv:2307.09288,
section 3.2.3, calls it rejection sampling fine-tuning; RAFT, arXiv:2304.06767, is the same with
one response kept.) `RolloutTrainer` runs the steps. The trainer speaks to the policy only through
`AlignableGenerativeInterface` and to the reward models only through futures (`RewardSource` of
`core/interfaces.py`).

Shapes: N samples of a rollout over all DP ranks (prompts x responses to each), M of them selected,
B of these on this rank, S padded length (prompt + response). Tensors per transition are
`[B, S-1]`; `nemo_aligner.core.types` has their alignment.

As in PPO, the split of the work does not change the numbers: a sample's random stream depends on
(seed, step, dataset index, number of the response), the gathered samples are put in the order of
(dataset index, number of the response), and one seeded permutation of the selected ones is dealt
to the updates and ranks.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any, cast

import torch
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.algorithms.rollout_log import TRAIN_TABLE_ROWS
from nemo_aligner.algorithms.rollout_trainer import RolloutTrainer
from nemo_aligner.algorithms.rollouts import (
    PPORolloutBatch,
    compute_num_rollout_microbatches,
    compute_rollout_metrics,
    local_share,
    response_mask,
    sample_table,
    shares_of_global_batches,
)
from nemo_aligner.config.defaults import complete
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.interfaces import (
    CheckpointWriter,
    Logger,
    Optimizer,
    PendingScores,
    PromptLoader,
    RewardSource,
    RunTimer,
    Scheduler,
)
from nemo_aligner.core.rewards import select_topk
from nemo_aligner.core.types import InferenceBatch, Rollout, RSTrainBatch, Scores
from nemo_aligner.models.alignable_interface import AlignableGenerativeInterface
from nemo_aligner.training.schedule import endless_batches


def compute_global_rollout_metrics(rollout: Rollout, scores: Scores) -> dict[str, Any]:
    """Means over all samples of a step, gathered from all ranks; lengths in tokens.

    `global_response_lengths_mean` is that of the responses alone, `response_lengths` counts the
    prompt too.
    """
    metrics = compute_rollout_metrics(rollout, scores)
    return {
        "global_rewards": metrics.pop("rewards"),
        "global_response_lengths_mean": metrics.pop("generation_length"),
        "global_prompt_lengths": metrics.pop("prompt_lengths"),
    } | metrics


class RSTrainer(RolloutTrainer):
    """Trains a policy with rejection sampling; see `run_step`, and `fit` of the base class.

    Attributes:
        step: finished steps (one rollout each).
        consumed_samples: prompts that rollouts have used; it alone says where in the data a
            resumed job goes on.
        rs_optimization_step: finished optimizer updates.
    """

    SECTION, NAME = "rs", "RS"
    POSTFIX_KEYS = (
        "train_global_rewards",
        "train_selected_rewards",
        "train_loss",
        "val_global_rewards",
    )
    WAIT_TIMER = "rm_wait"

    def __init__(
        self,
        cfg: DictConfig,
        model: AlignableGenerativeInterface,
        optimizer: Optimizer,
        scheduler: Scheduler,
        train_dataloader: PromptLoader,
        val_dataloader: PromptLoader,
        logger: Logger,
        ckpt_callback: CheckpointWriter,
        run_timer: RunTimer,
        num_rollouts_per_prompt: int,
        top_n_rollouts: int,
        rm: RewardSource,
    ):
        """Every rank builds one.

        Args:
            cfg: `trainer.rs`; missing keys take their values from `conf/gpt_rs_actor.yaml`.
            model: the policy, with `cfg.seed`.
            optimizer, scheduler: of the policy.
            train_dataloader, val_dataloader: data loaders of inference batches (they must carry
                `idx`, the dataset index) whose batch samplers yield this rank's micro-batches of
                one rollout after the other.
            logger, ckpt_callback, run_timer: see `core/interfaces.py`.
            num_rollouts_per_prompt: responses to each prompt.
            top_n_rollouts: how many of them are trained on, those with the highest rewards.
            rm: the reward models.

        Raises:
            ConfigError: values that cannot work together.
        """
        cfg = complete(cfg, "gpt_rs_actor", "trainer.rs")
        sampler = train_dataloader.batch_sampler
        super().__init__(
            cfg, model, optimizer, scheduler, sampler, logger, ckpt_callback, run_timer
        )
        self.train_dataloader = train_dataloader
        self.val_dataloader = val_dataloader
        self.num_rollouts_per_prompt = int(num_rollouts_per_prompt)
        self.top_n_rollouts = int(top_n_rollouts)
        self.rm = rm

        self._check_selection()
        trained, prompts = self.top_n_rollouts, self.num_rollout_samples
        name = f"model.rs.num_rollout_samples={prompts} x model.rs.top_n_rollouts={trained}"
        self.check_sizes(sampler, prompts * trained, name)
        self.num_train_microbatches = compute_num_rollout_microbatches(train_dataloader)
        self.num_val_microbatches = compute_num_rollout_microbatches(val_dataloader)
        self.train_batches = endless_batches(train_dataloader, self)

    def _check_selection(self) -> None:
        responses, kept = self.num_rollouts_per_prompt, self.top_n_rollouts
        if kept < 1:
            raise ConfigError(f"model.rs.top_n_rollouts={kept} must be at least 1.")
        if kept > responses:
            raise ConfigError(
                f"model.rs.top_n_rollouts={kept} is more than model.rs.num_rollouts_per_prompt="
                f"{responses}: that many of each prompt's responses are to be kept. Lower the "
                "one or raise the other."
            )

    @property
    def rs_optimization_step(self) -> int:
        return self.optimization_step

    # ------------------------------------------------------------------------------ the algorithm

    def run_step(self) -> dict[str, Any]:
        """Sample, select, and train on the selected."""
        with self.phase("rollout_time"):
            data, rollout_metrics, timings = self.generate_rollouts()
        rollout_metrics = self.log_rollouts(rollout_metrics)

        with self.phase("train_time"):
            batches = shares_of_global_batches(cast(dict[str, Tensor], data), self.cfg.model_gbs)
            _, train_metrics = self.run_training(batches)
        self.alarms.check_replicas(self.model, self.step, self.timer)
        self.log_timings(timings)
        return rollout_metrics | train_metrics

    @torch.no_grad()
    def generate_rollouts(self) -> tuple[RSTrainBatch, dict[str, Any], dict[str, float]]:
        """Responses to the next prompts, and the best of them: `(data, metrics, timings)`; all
        ranks call it.

        Returns:
            data: that of `generate_rs_data` for this rank's share of the selected samples.
        """
        with self.inference():
            collected = self.collect(
                islice(self.train_batches, self.num_train_microbatches),
                self.num_rollouts_per_prompt,
                self.step,
                min_width=self.cfg.rollout_batch_seq_length,
            )
            scores = self.wait_for_scores(collected)
            self.consumed_samples += self.num_rollout_samples
            selected, selected_scores = self._select_best(collected.rollout, scores)
            share = local_share(selected, self.seed, self.step, self.cfg.model_gbs)
            data = self.generate_rs_data(share.columns)

        metrics = self.rollout_metrics(collected.columns, scores)
        best = compute_rollout_metrics(selected.columns, selected_scores)
        metrics["selected_rewards"] = best["rewards"]
        metrics["consumed_samples"] = self.consumed_samples
        metrics["table"] = sample_table(
            selected.columns, selected_scores, self.model.tokenizer, TRAIN_TABLE_ROWS
        )
        mean_length = metrics["global_response_lengths_mean"]
        return data, metrics, self.generation_timings(metrics, mean_length)

    def generate_rs_data(self, rollout_batch: Rollout) -> RSTrainBatch:
        """What the updates consume, of selected samples: `response_tokens` int64 `[B, S]`; `mask`
        f32 `[B, S-1]`, 1 exactly on the responses' tokens (`response_mask`).
        """
        return {
            "response_tokens": rollout_batch["response_tokens"],
            "mask": response_mask(rollout_batch),
        }

    def run_training(
        self, dataloader_iter: Iterable[dict[str, Tensor]]
    ) -> tuple[float, dict[str, Any]]:
        """One optimizer update per global batch (each rank has its share of it); all ranks call
        it.

        Returns:
            Loss and metrics of the last update.
        """
        metrics: dict[str, Any] = {"loss": 0.0}
        for metrics in self.updates(dataloader_iter):  # noqa: B007  (the last ones are returned)
            pass
        return metrics["loss"], metrics

    # ---------------------------------------------------------------------------- parts of a step

    def score(self, rollout: Rollout) -> PendingScores:
        return self.rm.infer_rm(rollout)

    def validation_prompts(self) -> Iterable[InferenceBatch]:
        self.val_dataloader.batch_sampler.consumed_samples = 0
        return islice(self.val_dataloader, self.num_val_microbatches)

    def _select_best(
        self, rollout: PPORolloutBatch, scores: Scores
    ) -> tuple[PPORolloutBatch, Scores]:
        """The `top_n_rollouts` best samples of each prompt, with their rewards.

        The samples are in one order for any number of ranks, so that of equal rewards the same are
        kept. Prompts are told apart by their dataset index: two may have the same text.
        """
        columns = rollout.data | {"rewards": scores.rewards}
        selected = PPORolloutBatch(select_topk(columns, self.top_n_rollouts, group_by="idx"))
        return selected, Scores(selected.pop("rewards"))

    def rollout_metrics(self, rollout: Rollout, scores: Scores) -> dict[str, Any]:
        return compute_global_rollout_metrics(rollout, scores)
