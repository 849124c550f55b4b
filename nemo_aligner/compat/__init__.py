# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs scripts that import modules of NeMo's removed collection `nlp`: what of this package stands
in for each name. See `python -m nemo_aligner.compat`; nothing in the package imports it.
"""

import importlib
import importlib.util
from typing import Any

from nemo_aligner.utils import Doors

PREFIX = "nemo.collections.nlp"
_MEGATRON = f"{PREFIX}.data.language_modeling.megatron"
_PARTS = f"{PREFIX}.parts"
_OWN_CLASSES = f"{__name__}.nemo_classes"

# module of NeMo -> name -> "module:name" of this package
STAND_INS: dict[str, dict[str, str]] = {
    f"{_MEGATRON}.gpt_sft_chat_dataset": {
        "get_prompt_template_example": f"{_OWN_CLASSES}:get_prompt_template_example",
    },
    f"{_MEGATRON}.megatron_batch_samplers": {
        name: f"nemo_aligner.data.nlp.samplers:{name}"
        for name in ("MegatronPretrainingBatchSampler", "MegatronPretrainingRandomBatchSampler")
    },
    f"{_MEGATRON}.data_samplers": {
        name: f"nemo_aligner.data.nlp.samplers:{name}"
        for name in ("MegatronPretrainingSampler", "MegatronPretrainingRandomSampler")
    },
    f"{PREFIX}.models.language_modeling.megatron_gpt_model": {
        "MegatronGPTModel": "nemo_aligner.models.nlp.gpt.megatron_gpt_model:MegatronGPTModel",
    },
    f"{PREFIX}.models.language_modeling.megatron_gpt_sft_model": {
        "MegatronGPTSFTModel": "nemo_aligner.models.nlp.gpt.gpt_sft_model:GPTSFTModel",
    },
    f"{PREFIX}.parts.mixins.nlp_adapter_mixins": {
        "NLPAdapterModelMixin": "nemo_aligner.models.nlp.gpt.adapter_mixin:NLPAdapterModelMixin",
    },
    f"{_PARTS}.megatron_trainer_builder": {
        "MegatronTrainerBuilder": f"{_OWN_CLASSES}:MegatronTrainerBuilder",
    },
    f"{_PARTS}.nlp_overrides": {
        "NLPDDPStrategy": f"{_OWN_CLASSES}:NLPDDPStrategy",
        "NLPSaveRestoreConnector": (
            "nemo_aligner.checkpoint.nemo_archive:CustomSaveRestoreConnector"
        ),
    },
}


def _stand_in(module: str, name: str) -> Any:
    """What stands in for `name` of `module` of NeMo."""
    own = STAND_INS.get(module, {}).get(name)
    if own is not None:
        own_module, _, own_name = own.partition(":")
        return getattr(importlib.import_module(own_module), own_name)
    is_module = any(f"{each}.".startswith(f"{module}.{name}.") for each in STAND_INS)
    # Of an AttributeError Python keeps only "cannot import name", and imports a module after it.
    raise (AttributeError if is_module or name.startswith("__") else ImportError)(
        f"nothing of nemo_aligner stands in for {module}.{name}, which NeMo removed; remove it "
        "from the script"
    )


def install() -> None:
    """Let the modules of `STAND_INS` be imported, unless NeMo itself has its collection `nlp`."""
    if importlib.util.find_spec("nemo.collections") and importlib.util.find_spec(PREFIX) is None:
        Doors(STAND_INS, _stand_in).install()
