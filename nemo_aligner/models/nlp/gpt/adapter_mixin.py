# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The place of parameter-efficient fine-tuning in a model class; NeMo removed its mixin of the
same name.
"""

from nemo_aligner.core.errors import ConfigError


class NLPAdapterModelMixin:
    """What a model knows of adapters: whether it has them. Full-parameter training (`peft_scheme:
    none`) has none.
    """

    use_peft = False

    def init_peft(self, peft_cfg) -> None:
        """Set up `model.peft` before the optimizer is built; all ranks call it.

        Raises:
            ConfigError: a scheme other than "none".
        """
        scheme = (peft_cfg or {}).get("peft_scheme", "none")
        if scheme not in (None, "none"):
            raise ConfigError(
                f"model.peft.peft_scheme={scheme!r} is not available yet; set it to none (all "
                "weights train)."
            )
