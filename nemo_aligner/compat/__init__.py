# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs scripts that import modules of NeMo's removed collection `nlp`: what of this package stands
in for each name. See `python -m nemo_aligner.compat`; nothing in the package imports it.
"""

import importlib
import importlib.util
import re
from typing import Any

from nemo_aligner.utils import Doors

PREFIX = "nemo.collections.nlp"

# names of NeMo below `PREFIX`, and where this package has them
_TABLE = """
data.language_modeling.megatron.gpt_sft_chat_dataset.get_prompt_template_example
    compat.nemo_classes:get_prompt_template_example
data.language_modeling.megatron.megatron_batch_samplers.MegatronPretrainingBatchSampler
    data.nlp.samplers:MegatronPretrainingBatchSampler
data.language_modeling.megatron.megatron_batch_samplers.MegatronPretrainingRandomBatchSampler
    data.nlp.samplers:MegatronPretrainingRandomBatchSampler
data.language_modeling.megatron.data_samplers.MegatronPretrainingSampler
    data.nlp.samplers:MegatronPretrainingSampler
data.language_modeling.megatron.data_samplers.MegatronPretrainingRandomSampler
    data.nlp.samplers:MegatronPretrainingRandomSampler
models.language_modeling.megatron_gpt_model.MegatronGPTModel
    models.nlp.gpt.megatron_gpt_model:MegatronGPTModel
models.language_modeling.megatron_gpt_sft_model.MegatronGPTSFTModel
    models.nlp.gpt.gpt_sft_model:GPTSFTModel
parts.mixins.nlp_adapter_mixins.NLPAdapterModelMixin
    models.nlp.gpt.adapter_mixin:NLPAdapterModelMixin
parts.megatron_trainer_builder.MegatronTrainerBuilder compat.nemo_classes:MegatronTrainerBuilder
parts.nlp_overrides.NLPDDPStrategy compat.nemo_classes:NLPDDPStrategy
parts.nlp_overrides.NLPSaveRestoreConnector checkpoint.nemo_archive:CustomSaveRestoreConnector
"""
# module of NeMo -> name -> "module:name" of this package
STAND_INS: dict[str, dict[str, str]] = {}
for _theirs, _own in map(str.split, re.split(r"\n(?! )", _TABLE.strip())):
    _module, _, _name = _theirs.rpartition(".")
    STAND_INS.setdefault(f"{PREFIX}.{_module}", {})[_name] = f"nemo_aligner.{_own}"


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
