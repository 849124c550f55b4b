# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules of NeMo's removed collection `nlp`, as NeMo-Aligner's scripts import them, and what of
this package stands in for each name.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PREFIX = "nemo.collections.nlp"
_MEGATRON = f"{PREFIX}.data.language_modeling.megatron"
_PARTS = f"{PREFIX}.parts"
_OWN_CLASSES = "nemo_aligner.compat.nemo_classes"

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


# Scripts of NeMo-Aligner 0.7.0, and the names that each imports from the removed collection.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "train_gpt_ppo_actor.py": (),
    "serve_ppo_critic.py": (),
    "train_gpt_rs_actor.py": (),
    "train_gpt_reinforce_actor.py": (),
    "train_reward_model.py": (),
    "train_gpt_dpo.py": (),
    "train_gpt_kto.py": (),
    "train_gpt_spin.py": (),
    "train_gpt_sft.py": (
        "get_prompt_template_example",
        "MegatronPretrainingBatchSampler",
        "MegatronGPTModel",
        "MegatronTrainerBuilder",
    ),
    "train_steerlm2.py": (
        "get_prompt_template_example",
        "MegatronPretrainingBatchSampler",
        "MegatronGPTModel",
        "MegatronTrainerBuilder",
    ),
    "serve_reward_model.py": ("NLPDDPStrategy",),
}
# Its other scripts, by algorithm; paths below its folder examples/.
_GPT = "nlp/gpt/"
OTHER_SCRIPTS: dict[str, tuple[str, ...]] = {
    "packed pairs of DPO": ("nlp/data/dpo/prepare_packed_dpo_dataset.py",),
    "knowledge distillation": (
        f"{_GPT}train_gpt_knowledge_distillation.py",
        "nlp/synthetic_data_gen/compute_topk_logits.py",
    ),
    "DRaFT+ (images)": (
        "mm/stable_diffusion/train_sd_draftp.py",
        "mm/stable_diffusion/train_sdxl_draftp.py",
        "mm/stable_diffusion/anneal_sdxl.py",
        "mm/clip/train_reward_model.py",
        "mm/clip/test_reward_model.py",
    ),
}
# Its scripts that write data: those that this package has by the same path and arguments, those
# that import nothing of NeMo, and those that import classes of its removed collection without a
# stand-in.
OWN_DATA_SCRIPTS = (
    "nlp/cai/generate_rl_cai_dataset.py",
    "nlp/cai/generate_sl_cai_dataset.py",
    "nlp/data/steerlm/attribute_annotate.py",
    "nlp/data/steerlm/preprocess_helpsteer_data.py",
    "nlp/data/steerlm/preprocess_helpsteer2_data.py",
    "nlp/data/steerlm/preprocess_openassistant_data.py",
    "nlp/data/steerlm/process_to_regression_format.py",
)
FREE_DATA_SCRIPTS = (
    "nlp/cai/process_anthropic_hh_using_chat_prompt.py",
    "nlp/data/kto/preprocess_anthropichh_data.py",
    "nlp/data/steerlm/common.py",
)
BOUND_DATA_SCRIPTS = ("nlp/cai/cai_utils.py", "nlp/data/sft/remove_long_dialogues.py")


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `STAND_INS` and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_package = any(module.startswith(f"{fullname}.") for module in STAND_INS)
        if not fullname.startswith(PREFIX) or not (is_package or fullname in STAND_INS):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        names = STAND_INS.get(module.__name__, {})

        def stand_in(name: str) -> Any:
            is_module = self.find_spec(f"{module.__name__}.{name}", None) is not None
            if name not in names and is_module:  # Python imports it after an AttributeError
                raise AttributeError(f"{module.__name__}.{name} is not imported yet")
            if name not in names:
                # Of an AttributeError Python would keep only "cannot import name".
                raise (AttributeError if name.startswith("__") else ImportError)(
                    f"nothing of nemo_aligner stands in for {module.__name__}.{name}, which NeMo "
                    "removed; remove it from the script"
                )
            own_module, _, own_name = names[name].partition(":")
            return getattr(importlib.import_module(own_module), own_name)

        module.__dict__["__getattr__"] = stand_in


def install() -> None:
    """Let the modules of `STAND_INS` be imported, unless NeMo itself has its collection `nlp`."""
    if importlib.util.find_spec("nemo.collections") and importlib.util.find_spec(PREFIX) is None:
        sys.meta_path.append(_StandIns())
