# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Where parameter-efficient fine-tuning belongs in a model class; NeMo removed its mixin of the
same name.
"""

from omegaconf import DictConfig

from nemo_aligner.core.errors import ConfigError


class NLPAdapterModelMixin:
    """Says whether a model trains adapters; so far none does (`peft_scheme: none`)."""

    use_peft = False

    def init_peft(self, peft_cfg: DictConfig | None) -> None:
        """Set up adapters before the optimizer is built; all ranks call it.

        Args:
            peft_cfg: section `model.peft`; None: no adapters.

        Raises:
            ConfigError: a scheme other than "none".
        """
        scheme = None if peft_cfg is None else peft_cfg["peft_scheme"]
        if scheme not in (None, "none"):
            raise ConfigError(
                f"model.peft.peft_scheme={scheme!r} is not available yet; set it to none (all "
                "weights train)."
            )
