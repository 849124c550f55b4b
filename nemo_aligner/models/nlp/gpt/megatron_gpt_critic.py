# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTCriticModel`: the critic of PPO, and in the same module, by swapping weights, the
reward model.

Notation: N rows, S padded length; column t of a [N, S-1] tensor belongs to the prediction of token
t+1.
"""

from enum import Enum

import torch
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.losses import loss_weights, ppo_critic_loss
from nemo_aligner.core.metrics import explained_variance_from_moments, explained_variance_moments
from nemo_aligner.models.alignable_interface import CriticModelInterface
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import (
    MegatronGPTRewardModel,
    num_attributes,
)
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.megatron_steps import forward_backward


class StateDictState(Enum):
    """Whose weights are in the module."""

    CRITIC = 0
    REWARD = 1


class MegatronGPTCriticModel(MegatronGPTRewardModel, CriticModelInterface):
    """Critic, and reward model on the side.

    The optimizer belongs to the critic's weights. The reward model's live in host memory and are
    in the module only while it scores; whatever trains, saves or loads puts the critic back first.
    Weights are copied in place, so that the optimizer and its fp32 copies of them notice nothing.

    Args:
        cfg: as the reward model's, and `loss_clip_val`, `loss_reduction`, `offload_adam_states`.
        trainer: Lightning trainer.

    Attributes:
        loaded_state_dict: whose weights are in the module.
        rm_state_dict_cpu, critic_state_dict_cpu: copies in host memory; the critic's is brought up
            to date when the reward model takes its place. `set_reward_model` makes the first.
    """

    def __init__(self, cfg: DictConfig, trainer=None):
        super().__init__(cfg, trainer=trainer)
        self.loss_clip_val = self.cfg.get("loss_clip_val", None)
        self.loss_reduction = self.cfg.get("loss_reduction", None) or "token"
        self.to_offload_adam_states = self.cfg.get("offload_adam_states", False)
        self.loaded_state_dict = StateDictState.CRITIC
        self.rm_state_dict_cpu = None
        self.critic_state_dict_cpu = None
        self._critic_copy_is_current = False
        self._set_output_sequence(True)

    # --- whose weights --------------------------------------------------------------------------------------------

    def set_reward_model(self) -> None:
        """Keep a copy of the present weights as the reward model; call it before a checkpoint is
        resumed.

        Raises:
            UserError: the weights were loaded without a reward head, so that rewards would be
                random.
            ConfigError: the reward model gives several attributes, and not their weighted sum.
        """
        if not self.has_trained_head:
            raise UserError(
                "the checkpoint of this critic holds no reward head (it is a language model or a "
                "critic): its rewards "
                "would mean nothing. Give a trained reward model in "
                "pretrained_checkpoint.restore_from_path, or serve "
                "rewards elsewhere with trainer.ppo.combine_rm_and_critic_server=False (and "
                "remote_critic_rm.combine_rm_and_critic_server=False in the actor's job)."
            )
        if num_attributes(self.cfg) > 1 and not self.cfg.regression.get("merge_attributes", False):
            raise ConfigError(
                "this reward model gives "
                f"model.regression.num_attributes={num_attributes(self.cfg)} numbers for a "
                "text, and PPO takes one; set model.regression.merge_attributes=True and, if they "
                "do not count alike, "
                "model.regression.attribute_weights."
            )
        self.rm_state_dict_cpu = self.weights_to_cpu(into=self.rm_state_dict_cpu)

    def _set_output_sequence(self, output_sequence: bool) -> None:
        """A number per position (critic), or one per row (reward model)."""
        for module in self.unwrapped():
            if module.post_process:
                module.rm_head.output_sequence = output_sequence

    def _load(self, wanted: StateDictState) -> None:
        """Put the weights of `wanted` into the module, if they are not there."""
        if wanted is self.loaded_state_dict:
            return
        if wanted is StateDictState.REWARD:
            if self.rm_state_dict_cpu is None:
                raise RuntimeError(
                    "there is no reward model beside the critic; call set_reward_model() at start."
                )
            if not self._critic_copy_is_current:
                self.critic_state_dict_cpu = self.weights_to_cpu(into=self.critic_state_dict_cpu)
                self._critic_copy_is_current = True
            self.load_cpu_weights(self.rm_state_dict_cpu)
        else:
            self.load_cpu_weights(self.critic_state_dict_cpu)
        self._set_output_sequence(wanted is StateDictState.CRITIC)
        self.loaded_state_dict = wanted

    def sharded_weights(self, metadata: dict | None = None) -> dict:
        """The critic's weights (see the base class)."""
        self._load(StateDictState.CRITIC)
        return super().sharded_weights(metadata=metadata)

    def load_sharded_weights(self, loaded: dict, strict: bool = True) -> None:
        """New weights for the critic (see the base class)."""
        self._load(StateDictState.CRITIC)
        self._critic_copy_is_current = False
        super().load_sharded_weights(loaded, strict=strict)

    # --- training -------------------------------------------------------------------------------------------------

    def prepare_for_training(self) -> None:
        """The critic's weights in place, Adam's states on the device."""
        self._load(StateDictState.CRITIC)
        self.onload_optimizer(self.to_offload_adam_states)

    def prepare_for_training_step(self) -> None:
        self._load(StateDictState.CRITIC)
        self._critic_copy_is_current = False
        super().prepare_for_training_step()

    def finish_training(self) -> None:
        """Nothing to undo: the host copy is renewed when it is needed."""

    def get_loss_and_metrics(
        self, batch: dict, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Value loss (`losses.ppo_critic_loss`) of a global batch, and its gradient unless
        `forward_only`.

        All ranks call it. A batch without a counting slot gives loss 0 and gradient 0.

        Args:
            batch: a `CriticTrainBatch`: `tokens` int64 [N, S]; `returns`, `prev_values`, `mask`
                [N, S-1].

        Returns:
            The loss and, over the global batch: `loss`, `value_clip_fraction` and, unless all
            returns are equal, `explained_variance` of the returns by the values in training.
        """
        self._load(StateDictState.CRITIC)
        micro_batch_size = self.cfg.micro_batch_size
        mask = batch["mask"].to(get_device())
        rows = {
            "tokens": batch["tokens"],
            "returns": batch["returns"],
            "prev_values": batch["prev_values"],
            "weights": loss_weights(mask, self.loss_reduction, micro_batch_size, sum_over_dp),
        }

        def loss_fn(values, rows):
            inputs = {
                "values": self._standardize(values[:, :-1]),
                "returns": rows["returns"],
                "weights": rows["weights"],
            }
            loss, metrics = ppo_critic_loss(
                **inputs, prev_values=rows["prev_values"], loss_clip_val=self.loss_clip_val
            )
            return loss, metrics | explained_variance_moments(**inputs)

        metrics = forward_backward(
            self.model,
            rows,
            micro_batch_size=micro_batch_size,
            loss_fn=loss_fn,
            forward_only=forward_only,
        )
        return metrics["loss"], explained_variance_from_moments(metrics)

    # --- inference ------------------------------------------------------------------------------------------------

    def prepare_for_inference(self) -> None:
        """Evaluation mode (dropout off), Adam's states in host memory if `offload_adam_states`."""
        super().prepare_for_inference()
        self.offload_optimizer(self.to_offload_adam_states)

    def infer(self, inputs, add_BOS: bool = False, add_EOS: bool = False) -> Tensor:
        """Values float32 [N, S] of the critic (see the base class)."""
        self._load(StateDictState.CRITIC)
        return super().infer(inputs, add_BOS=add_BOS, add_EOS=add_EOS)

    @torch.no_grad()
    def infer_rm_critic(
        self, inputs, add_BOS: bool = False, add_EOS: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Rewards float32 [N] and values float32 [N, S]; all ranks call it, with inputs as for
        `infer`.

        Who is in the module computes first, so that a call costs one swap of the weights.
        """
        outputs = {}
        other = (
            StateDictState.REWARD
            if self.loaded_state_dict is StateDictState.CRITIC
            else StateDictState.CRITIC
        )
        for state in (self.loaded_state_dict, other):
            self._load(state)
            outputs[state] = super().infer(inputs, add_BOS=add_BOS, add_EOS=add_EOS)
        return outputs[StateDictState.REWARD].reshape(-1), outputs[StateDictState.CRITIC]
