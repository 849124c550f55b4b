# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling of a Megatron policy against reward models in other processes.

`RSTrainer.generate_rollouts` and `RSTrainer.learn` are the algorithm: generate several responses
to each prompt, score them, keep the best, and train on them with the likelihood loss. (Llama 2,
arXiv:2307.09288, section 3.2.3, calls it rejection sampling fine-tuning; RAFT, arXiv:2304.06767,
keeps one response.) As in PPO (`policy_gradient.py`), the split of the work does not change the
numbers; the permutation is one of the selected samples.

Shapes: N samples of a rollout over all DP ranks (prompts x responses to each), M of them selected,
B of these on this rank, S padded length (prompt + response); per transition `[B, S-1]`, aligned as
in `nemo_aligner.core.types`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from omegaconf import DictConfig

from nemo_aligner.algorithms.rollout_trainer import RolloutTrainer
from nemo_aligner.algorithms.rollouts import (
    PPORolloutBatch,
    compute_num_rollout_microbatches,
    compute_rollout_metrics,
    first_sample,
    local_share,
    response_mask,
    sample_table,
    shares_of_global_batches,
)
from nemo_aligner.algorithms.training_loop import TRAIN_TABLE_ROWS, Parts
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.config.jobs.actors import check_top_n
from nemo_aligner.core import types
from nemo_aligner.core.advantages import select_topk
from nemo_aligner.models.alignable_interface import AlignableGenerativeInterface
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers.scoring_clients import RemoteGPTRMClient
from nemo_aligner.training.loggers import CustomLoggerWrapper
from nemo_aligner.training.schedule import Timer, endless_batches


class RSTrainer(RolloutTrainer):
    """Trains a policy with rejection sampling; `rs_optimization_step` counts the updates.
    `consumed_samples` alone says where in the data a resumed job continues.
    """

    SECTION, NAME = "rs", "RS"
    WAIT_TIMER = "rm_wait"

    def __init__(
        self,
        cfg: DictConfig,
        model: AlignableGenerativeInterface,
        optimizer: types.Optimizer,
        scheduler: types.Scheduler,
        train_dataloader: types.PromptLoader,
        val_dataloader: types.PromptLoader | None,
        logger: CustomLoggerWrapper,
        ckpt_callback: CheckpointCallback,
        run_timer: Timer,
        num_rollouts_per_prompt: int,
        top_n_rollouts: int,
        rm: RemoteGPTRMClient,
    ):
        """Every rank builds one.

        Args:
            cfg: `trainer.rs`; missing keys have the values of `conf/gpt_rs_actor.yaml`.
            model: the policy, with `cfg.seed`.
            train_dataloader, val_dataloader: of inference batches with `idx`, the dataset index,
                whose batch samplers yield this rank's micro-batches of rollouts.
            top_n_rollouts: how many of the best responses to each prompt are trained on.
        """
        check_top_n(int(top_n_rollouts), int(num_rollouts_per_prompt))
        parts = Parts(cfg, model, optimizer, scheduler, logger, ckpt_callback, run_timer)
        sampler = train_dataloader.batch_sampler
        super().__init__(parts, sampler, num_rollouts_per_prompt, rm.infer_rm)
        self.train_dataloader = train_dataloader
        self.val_dataloader = val_dataloader
        self.has_validation = val_dataloader is not None
        self.top_n_rollouts = int(top_n_rollouts)
        self.rm = rm

        kept, prompts = self.top_n_rollouts, self.num_rollout_samples
        name = f"model.rs.num_rollout_samples={prompts} x model.rs.top_n_rollouts={kept}"
        self.check_sizes(prompts * kept, name)
        self.num_train_microbatches = compute_num_rollout_microbatches(train_dataloader)
        if val_dataloader is not None:
            self.num_val_microbatches = compute_num_rollout_microbatches(val_dataloader)
        self.train_batches = endless_batches(train_dataloader, self)

    rs_optimization_step = property(attrgetter("optimization_step"))

    def learn(self, data: types.RSTrainBatch, rollout_metrics: dict[str, Any]) -> dict[str, Any]:
        return self.train_policy(shares_of_global_batches(data, self.cfg.model_gbs))

    def generate_rollouts(
        self,
        dataloader_iter: Iterator[types.InferenceBatch] | None = None,
        num_microbatches: int | None = None,
    ) -> tuple[Any, ...]:
        """Generate responses to the next prompts and select the best of them: `(data, metrics,
        timings)`; all ranks call it. With NeMo-Aligner's arguments, this rank's micro-batches and
        how many of them, `(data, metrics)`.
        """
        own = dataloader_iter is None
        if dataloader_iter is None:
            dataloader_iter, num_microbatches = self.train_batches, self.num_train_microbatches
        with self.inference():
            sampled = self.draw(islice(dataloader_iter, num_microbatches), self.step)
            all_scores = self.wait_for_scores(sampled)
            # Of equal samples the same ones with any number of ranks; two prompts of other `idx`
            # may have the same text.
            columns = sampled.rollout.data | {"rewards": all_scores.rewards}
            best = PPORolloutBatch(select_topk(columns, self.top_n_rollouts, group_by="idx"))
            best_scores = types.Scores(best.pop("rewards"))
            share = local_share(best, self.seed, self.step, self.cfg.model_gbs)

        table = sample_table(best.columns, best_scores, self.model.tokenizer, TRAIN_TABLE_ROWS)
        metrics = {
            **self.rollout_metrics(sampled.rollout.columns, all_scores),
            "selected_rewards": compute_rollout_metrics(best.columns, best_scores)["rewards"],
            "consumed_samples": self.consumed_samples,
            "table": table,
        }
        timings = self.generation_timings(sampled.rollout.columns)
        data = self.generate_rs_data(share.columns)
        return (data, metrics, timings) if own else (data, metrics)

    def generate_rs_data(self, rollout_batches: types.Rollout | Sequence[types.Rollout]) -> Any:
        """What the updates consume, of selected samples: `response_tokens` int64 `[B, S]`; `mask`
        f32 `[B, S-1]`, 1 on the responses' tokens. With a list of batches, as in NeMo-Aligner, of
        all of them, and an empty dict of metrics; all ranks call it then.
        """
        if not isinstance(rollout_batches, Mapping):
            joined = PPORolloutBatch.from_rollout_batches(
                list(rollout_batches),
                self.model.tokenizer.eos_id,
                self.cfg.rollout_batch_seq_length,
            )
            return self.generate_rs_data(joined.columns), {}
        return {
            "response_tokens": rollout_batches["response_tokens"],
            "mask": response_mask(rollout_batches),
        }

    def compute_global_rollout_metrics(self, rollout_batches: Sequence[Any]) -> dict[str, Any]:
        """Means over the samples of all ranks, with `table`, a sample, as NeMo-Aligner computes
        them; all ranks call it with their own batches, each a `Rollout` with `rewards` f32 `[b]`.
        """
        table = first_sample(rollout_batches[0], self.model.tokenizer) if rollout_batches else {}
        sums = torch.zeros(4, dtype=torch.float64, device=get_device())
        for batch in rollout_batches:
            lengths, totals = batch["prompt_lengths"], batch["response_lengths"]
            parts = ((totals - lengths).sum(), lengths.sum(), batch["rewards"].sum(), len(lengths))
            sums += torch.tensor([float(part) for part in parts], device=sums.device)
        responses, prompts, rewards, samples = sum_over_dp(sums).tolist()
        return {
            "table": table,
            "global_response_lengths_mean": responses / samples,
            "global_prompt_lengths": prompts / samples,
            "global_rewards": rewards / samples,
        }

    def validation_prompts(self) -> Iterable[types.InferenceBatch]:
        assert self.val_dataloader is not None
        self.val_dataloader.batch_sampler.consumed_samples = 0
        return islice(self.val_dataloader, self.num_val_microbatches)

    def rollout_metrics(self, rollout: types.Rollout, scores: types.Scores) -> dict[str, Any]:
        """`global_response_lengths_mean` is without prompts, `response_lengths` with them."""
        metrics = super().rollout_metrics(rollout, scores)
        return {
            "global_rewards": metrics.pop("rewards"),
            "global_response_lengths_mean": metrics.pop("generation_length"),
            "global_prompt_lengths": metrics.pop("prompt_lengths"),
        } | metrics
