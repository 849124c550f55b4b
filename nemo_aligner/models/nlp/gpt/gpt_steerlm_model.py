# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`GPTSteerLMModel`: a policy that learns from weighted responses of an earlier one (SteerLM 2.0).

Notation: B prompts on this data-parallel rank, n responses to each, S padded length.
"""

from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.losses import loss_weights, sft_loss
from nemo_aligner.core.masks import counted_lengths, masked_mean, masked_sum
from nemo_aligner.core.preference import prompt_weights
from nemo_aligner.data.nlp.steerlm import LOG_Q
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.megatron_steps import Batch, forward_collect
from nemo_aligner.training.micro_batches import micro_batch_group


class GPTSteerLMModel(GPTSFTModel):
    """Policy of SteerLM 2.0; it starts from the one that sampled the responses. `cfg`: section
    `model` of `gpt_sft.yaml`; `steerlm2` has the sizes of micro-batches, in responses.
    """

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.forward_micro_batch_size = self.cfg.steerlm2.forward_micro_batch_size

    def check_responses(self, num_responses: int) -> None:
        """Raise `ConfigError` unless n responses make whole micro-batches of an update."""
        if self.micro_batch_tokens is not None:
            return
        prompts = self.cfg.global_batch_size // parallel_state.get_data_parallel_world_size()
        size = self.cfg.steerlm2.micro_batch_size
        group = micro_batch_group(self.model)
        if prompts * num_responses % (size * group):
            unit = f"groups of {group} micro-batches" if group > 1 else "micro-batches"
            raise ConfigError(
                f"model.steerlm2.micro_batch_size={size}: the {prompts} prompts x {num_responses} "
                f"responses of a rank make no whole {unit}; change it, or model.global_batch_size."
            )

    def get_loss_and_metrics(  # type: ignore[override]  # it learns from other batches
        self, batch: Batch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Divergence of the policy from the target over a global batch
        (`SteerLM2Dataset.collate_fn`), and its gradient unless `forward_only`; all ranks call it
        with their share. The weights need the log-probs of all responses to a prompt, which have a
        forward pass of their own, without dropout.

        Returns the loss and, over the prompts of the global batch: `loss` (the divergence of a
        prompt divided by the mean number of tokens of its responses), `distance` (not divided),
        `log_ratio` (mean over responses of |log Q - log Q'|), `effective_responses` (1 / sum of
        squares of the target's weights) and `weights`, the number of prompts.
        """
        mask = batch["loss_mask"].to(get_device())
        tokens = mask.ne(0).sum(-1)
        valid = tokens.any(-1).float()
        shares = loss_weights(valid, sum_over_dp=sum_over_dp)
        rows = {key: batch[key].flatten(0, 1) for key in ("tokens", "labels")}
        log_q, targets = (batch[key].to(get_device()) for key in (LOG_Q, "ws"))
        log_policy = self.response_log_probs({**rows, "mask": mask.flatten(0, 1)})
        log_policy = log_policy.view_as(log_q).double()
        found = prompt_weights(log_policy, log_q, targets, tokens)

        def mean(values: Tensor) -> float:
            return float(sum_over_dp(masked_sum(shares.double() * values, shares)))

        metrics: dict[str, float] = {}
        if not forward_only:
            self.set_train()
            factors = (found.factors * shares.unsqueeze(1)).flatten()
            # Of log Q; `sft_loss` takes the negative log-likelihood.
            rows["weights"] = mask.flatten(0, 1).ne(0) * -factors.unsqueeze(1)
            _, metrics = self.compute_loss(
                sft_loss, rows, False, micro_batch_size=self.cfg.steerlm2.micro_batch_size
            )
        metrics["loss"] = mean(found.losses)
        metrics["distance"] = mean(found.divergences)
        metrics["log_ratio"] = mean(masked_mean((log_policy - log_q).abs(), tokens, 1))
        metrics["effective_responses"] = mean(1 / masked_sum(targets.square(), tokens, 1))
        metrics["weights"] = float(sum_over_dp(valid.sum()))
        return metrics["loss"], metrics

    def response_log_probs(self, batch: Batch) -> Tensor:
        """Log-prob float32 `[R]` of each of R responses: `tokens`, `labels` int64 `[R, S]`, `mask`
        `[R, S]` (non-zero where the label is the response's). All ranks call it.
        """
        self.set_eval()
        return forward_collect(
            self.model,
            batch,
            micro_batch_size=self.forward_micro_batch_size,
            output_fn=lambda logits, rows: masked_sum(
                self.logprobs(logits, rows["labels"], True, labels=True), rows["mask"], 1
            ),
            lengths=counted_lengths(batch["mask"], batch["tokens"].size(1)),
            micro_batch_tokens=self.micro_batch_tokens,
        )
