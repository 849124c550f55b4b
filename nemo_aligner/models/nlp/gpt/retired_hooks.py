# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Methods of NeMo-Aligner's models that nothing calls here.

They were called inside a pass, so a class of one's own overrode them to change the loss or the
module. Such an override would be ignored: defining the class is an error that says what to
override instead.
"""

from typing import Any, NoReturn

from nemo_aligner.core.errors import ConfigError, UserError

_LOSS = (
    "override get_loss_and_metrics(batch, forward_only), which passes a loss function of plain "
    "tensors to nemo_aligner.training.megatron_steps.forward_backward"
)
_OUTPUT = (
    "use nemo_aligner.training.megatron_steps.forward_collect with an output function of plain "
    "tensors"
)
# method -> what replaces it
RETIRED_HOOKS = {
    "get_forward_output_and_loss_func": _LOSS,
    "get_actor_forward_output_and_loss_func": _LOSS,
    "loss_func": _LOSS,
    "bt_loss_func": _LOSS,
    "reg_loss_func": _LOSS,
    "split_output_tensor": _LOSS,
    "get_forward_output_only_func": _OUTPUT,
    "get_logprob_output_only_func": _OUTPUT,
    "forward_step": _OUTPUT,
    "model_provider_func": (
        "override module_provider(pre_process, post_process, vp_stage), which builds the module"
    ),
}


class RetiredHooks:
    """Base class of models: refuses classes that override what nothing calls (`ConfigError`)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, instead in RETIRED_HOOKS.items():
            if name in vars(cls):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called in this package: {instead}."
                )

    def get_forward_output_and_loss_func(self, validation_step: bool = False) -> NoReturn:
        """Raise `UserError`; see `RETIRED_HOOKS`."""
        self._refuse("get_forward_output_and_loss_func")

    def get_actor_forward_output_and_loss_func(self) -> NoReturn:
        """Raise `UserError`; see `RETIRED_HOOKS`."""
        self._refuse("get_actor_forward_output_and_loss_func")

    def loss_func(self, output_tensor: Any, label_tensor: Any = None) -> NoReturn:
        """Raise `UserError`; see `RETIRED_HOOKS`."""
        self._refuse("loss_func")

    def bt_loss_func(self, output_tensor: Any, label_tensor: Any) -> NoReturn:
        """Raise `UserError`; see `RETIRED_HOOKS`."""
        self._refuse("bt_loss_func")

    def reg_loss_func(self, output_tensor: Any, label_tensor: Any) -> NoReturn:
        """Raise `UserError`; see `RETIRED_HOOKS`."""
        self._refuse("reg_loss_func")

    def split_output_tensor(self, output_tensor: Any) -> NoReturn:
        """Raise `UserError`; see `RETIRED_HOOKS`."""
        self._refuse("split_output_tensor")

    def get_forward_output_only_func(self) -> NoReturn:
        """Raise `UserError`; see `RETIRED_HOOKS`."""
        self._refuse("get_forward_output_only_func")

    def get_logprob_output_only_func(self, inference_only: bool = True) -> NoReturn:
        """Raise `UserError`; see `RETIRED_HOOKS`."""
        self._refuse("get_logprob_output_only_func")

    def forward_step(
        self, data_iter: Any, micro_batch_size: int, sequence_length: int, num_microbatches: int
    ) -> NoReturn:
        """Raise `UserError`; see `RETIRED_HOOKS`."""
        self._refuse("forward_step")

    def model_provider_func(self, pre_process: bool, post_process: bool) -> NoReturn:
        """Raise `UserError`; see `RETIRED_HOOKS`."""
        self._refuse("model_provider_func")

    def _refuse(self, name: str) -> NoReturn:
        raise UserError(f"{type(self).__name__}.{name} is not used: {RETIRED_HOOKS[name]}.")
