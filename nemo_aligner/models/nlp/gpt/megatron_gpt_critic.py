# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTCriticModel`: the critic of PPO and, by swapped weights, the reward model.

Notation: N samples, S padded length; column t of a [N, S-1] tensor predicts token t+1.
"""

from enum import Enum
from typing import Any

from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.config.server_rules import check_attributes_are_merged
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.losses import ppo_critic_loss
from nemo_aligner.core.metrics import explained_variance_from_moments, explained_variance_moments
from nemo_aligner.core.types import CriticTrainBatch
from nemo_aligner.models.alignable_interface import CriticModelInterface
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.megatron_steps import Batch

# The metric that holds the moments of the explained variance during a pass.
MOMENTS = "explained_variance_moments"


class StateDictState(Enum):
    """Whose weights are in the module."""

    CRITIC = 0
    REWARD = 1


class MegatronGPTCriticModel(MegatronGPTRewardModel, CriticModelInterface):
    """Critic, and optionally a reward model beside it, whose weights stay in host memory and are
    in the module only while it scores; training, saving and loading put the critic back first.
    Weights are copied in place, so the critic's optimizer stays valid.

    Attributes:
        loaded_state_dict: whose weights are in the module.
        critic_state_dict_cpu: the critic's, renewed when the reward model takes its place.
    """

    CONFIG_NAME = "gpt_ppo_critic"

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.loss_clip_val: float | None = self.cfg.loss_clip_val
        self.loss_reduction: str = self.cfg.loss_reduction
        self.to_offload_adam_states: bool = self.cfg.offload_adam_states
        self.loaded_state_dict = StateDictState.CRITIC
        self._rm_state_dict_cpu: dict[str, Tensor] | None = None
        self.critic_state_dict_cpu: dict[str, Tensor] | None = None
        self._critic_copy_is_current = False
        self.set_output_sequence_flag(True)

    def set_reward_model(self) -> None:
        """Keep the present weights as the reward model, before a resume; `check_gives_rewards`."""
        self.check_gives_rewards()
        self._rm_state_dict_cpu = self.weights_to_cpu(into=self._rm_state_dict_cpu)

    @property
    def rm_state_dict_cpu(self) -> dict[str, Tensor] | None:
        """The reward model's weights in host memory; assigning calls `check_gives_rewards`."""
        return self._rm_state_dict_cpu

    @rm_state_dict_cpu.setter
    def rm_state_dict_cpu(self, weights: dict[str, Tensor] | None) -> None:
        if weights is not None:
            self.check_gives_rewards()
        self._rm_state_dict_cpu = weights

    def check_gives_rewards(self) -> None:
        """Raise `UserError` if the present weights were loaded without a trained reward head,
        `ConfigError` if they give several attributes instead of their weighted sum.
        """
        if not self.has_trained_head:
            raise UserError(
                "the checkpoint of this critic holds no reward head; give a reward model in "
                "pretrained_checkpoint.restore_from_path, or set combine_rm_and_critic_server="
                "False in trainer.ppo (in the actor's job in remote_critic_rm)."
            )
        check_attributes_are_merged(self.cfg)

    def set_output_sequence_flag(self, value_to_set: bool) -> None:
        """Give one number per position (critic), or one per sample (reward model)."""
        for module in self.unwrapped():
            if module.post_process:
                module.rm_head.output_sequence = value_to_set

    def _load(self, wanted: StateDictState) -> None:
        if wanted is self.loaded_state_dict:
            return
        if wanted is StateDictState.REWARD:
            if self._rm_state_dict_cpu is None:
                raise RuntimeError("there is no reward model; call set_reward_model() at start.")
            if not self._critic_copy_is_current:
                self.critic_state_dict_cpu = self.weights_to_cpu(into=self.critic_state_dict_cpu)
                self._critic_copy_is_current = True
            self.load_cpu_weights(self._rm_state_dict_cpu)
        else:
            assert self.critic_state_dict_cpu is not None  # made when the reward model was loaded
            self.load_cpu_weights(self.critic_state_dict_cpu)
        self.set_output_sequence_flag(wanted is StateDictState.CRITIC)
        self.loaded_state_dict = wanted

    def sharded_weights(self, metadata: dict | None = None) -> dict:
        self._load(StateDictState.CRITIC)
        return super().sharded_weights(metadata=metadata)

    def load_sharded_weights(self, loaded: dict, strict: bool = True) -> None:
        self._load(StateDictState.CRITIC)
        self._critic_copy_is_current = False
        super().load_sharded_weights(loaded, strict=strict)

    def prepare_for_training(self) -> None:
        """Put the critic's weights in place and Adam's states on the device."""
        self._load(StateDictState.CRITIC)
        self.onload_adam_states()

    def prepare_for_training_step(self) -> None:
        self._load(StateDictState.CRITIC)
        self._critic_copy_is_current = False
        super().prepare_for_training_step()

    def get_loss_and_metrics(  # type: ignore[override]  # it learns from other batches
        self, batch: CriticTrainBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Value loss (`losses.ppo_critic_loss`) of a global batch, and its gradient unless
        `forward_only`; all ranks call it with their share. An empty mask gives 0 for both.

        Metrics, over the global batch: `loss`, `value_clip_fraction` and, unless all returns are
        equal, `explained_variance` of the returns by the values in training.
        """
        self._load(StateDictState.CRITIC)
        columns = {key: batch[key] for key in ("tokens", "returns", "prev_values")}

        def loss_fn(output: Tensor, micro_batch: Batch) -> tuple[Tensor, Batch]:
            values = self._standardize(output[:, :-1])
            returns, weights = micro_batch["returns"], micro_batch["weights"]
            loss, metrics = ppo_critic_loss(
                values=values,
                prev_values=micro_batch["prev_values"],
                returns=returns,
                weights=weights,
                loss_clip_val=self.loss_clip_val,
            )
            moments = explained_variance_moments(values=values, returns=returns, weights=weights)
            return loss, {**metrics, MOMENTS: moments}

        mask = batch["mask"].to(get_device())
        metrics, moments = self.run_loss(loss_fn, columns, forward_only, mask=mask)
        return metrics["loss"], metrics | explained_variance_from_moments(moments[MOMENTS])

    def prepare_for_inference(self) -> None:
        """Enter evaluation mode; with `offload_adam_states` move Adam's states to host memory."""
        super().prepare_for_inference()
        self.offload_adam_states()

    def infer(self, *args: Any, **kwargs: Any) -> Tensor:
        """Values float32 [N, S] of the critic; arguments as of the base class."""
        self._load(StateDictState.CRITIC)
        return super().infer(*args, **kwargs)

    def infer_rm_critic(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Rewards float32 [N] and values float32 [N, S]; arguments and callers as for `infer`. The
        model whose weights are in the module computes first, so a call swaps them once.
        """
        outputs = {}
        for state in sorted(StateDictState, key=lambda state: state is not self.loaded_state_dict):
            self._load(state)
            outputs[state] = super().infer(*args, **kwargs)
        return outputs[StateDictState.REWARD].reshape(-1), outputs[StateDictState.CRITIC]

    def infer_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Rewards float32 [N] alone; arguments and callers as for `infer`."""
        self._load(StateDictState.REWARD)
        return super().infer(*args, **kwargs).reshape(-1)
