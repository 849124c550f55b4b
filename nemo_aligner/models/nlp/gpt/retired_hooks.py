# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Methods of NeMo-Aligner's models that nothing calls here.

They were called inside a pass, so a class of one's own overrode them to change the loss or the
module. Such an override would be ignored: defining the class is an error that says what to
override instead.
"""

from collections.abc import Callable
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
    """Base class of models, with methods that raise `UserError` in the place of the retired ones:
    refuses classes that override these (`ConfigError`).
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, instead in RETIRED_HOOKS.items():
            if name in vars(cls):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called in this package: {instead}."
                )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: RetiredHooks, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(f"{type(self).__name__}.{name} is not used: {RETIRED_HOOKS[name]}.")

    return refuse


for _name in RETIRED_HOOKS:
    setattr(RetiredHooks, _name, _refusing(_name))
