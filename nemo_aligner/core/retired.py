# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of NeMo-Aligner that have moved, or have lost their meaning: these can still be imported,
with a warning, because a script may import what it never uses. Using one is an error that says
what to do.
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from nemo_aligner.core.errors import UserError

_TRT = (
    "TensorRT-LLM is not used: the policy generates with the built-in engine "
    "(nemo_aligner.generation.MegatronGenerator); set trainer.ppo.trt_llm.enable=False"
)
_APEX = (
    "apex's optimizer is not used: model.offload_adam_states() and model.onload_adam_states() "
    "move the states of Megatron Core's"
)
_PACKED_PAIRS = (
    "pairs are not packed into one sequence; name the files that the packed ones were made of in "
    "model.data.data_prefix, and set model.dynamic_micro_batch_tokens"
)
_CHUNKS = "data sets have no chunks; name several jsonl files in model.data.data_prefix"

# module -> name -> what is true now
RETIRED: dict[str, dict[str, str]] = {
    "nemo_aligner.data.nlp.builders": {
        "ChunkedJsonl": _CHUNKS,
        "build_train_valid_test_dpo_packed_datasets": _PACKED_PAIRS,
    },
    "nemo_aligner.data.nlp.datasets": {"DPOPackedDataset": _PACKED_PAIRS},
    "nemo_aligner.utils.distributed": {
        "compute_topk_logits_in_batched_sequence": (
            "use nemo_aligner.models.nlp.gpt.megatron_gpt_knowledge_distillation."
            "TopKTeacherModel.top_logits, or the script compute_topk_logits.py"
        ),
    },
    "nemo_aligner.utils.parallel_state": {
        "enable_trt_llm_reshard_calls": _TRT,
        "trt_llm_reshard_region": _TRT,
    },
    "nemo_aligner.utils.text_generation_utils": {
        "TrackLengthGPTModelTextGenerationStrategy": (
            "NeMo's text generation strategies are gone; the built-in engine counts lengths "
            "itself (nemo_aligner.generation.MegatronGenerator, EndConditions)"
        ),
    },
    "nemo_aligner.utils.trt_llm": {"GPTGenerateTRTLLM": _TRT},
    "nemo_aligner.utils.utils": {
        "dist_adam_load_state_bucket_into_device": _APEX,
        "offload_distributed_adam": _APEX,
    },
}

_SFT, _STEERLM, _TOPK = (
    f"nemo_aligner.data.nlp.{name}" for name in ("sft", "steerlm", "topk_logits")
)
# module -> name -> where it is now
MOVED: dict[str, dict[str, str]] = {
    "nemo_aligner.data.nlp.builders": {
        "build_sft_dataset": _SFT,
        "build_steerlm2_dataset": _STEERLM,
        "build_train_valid_test_knowledge_distillation_datasets": _TOPK,
        **{
            f"build_train_valid_test_{kind}_datasets": "nemo_aligner.data.nlp.datasets"
            for kind in ("rm", "dpo", "kto", "regression_rm")
        },
    },
    "nemo_aligner.data.nlp.datasets": {
        **dict.fromkeys(("SFTDataset", "SFTChatDataset"), _SFT),
        "SteerLM2Dataset": _STEERLM,
        "KnowledgeDistillationDataset": _TOPK,
    },
}


class RetiredName:
    """What a retired name is bound to: making an object of it, or calling it, is an error."""

    instead: str

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(f"{cls.__module__}.{cls.__name__} cannot be used: {cls.instead}.")


def retired_names(module: str, stacklevel: int = 2) -> Callable[[str], Any]:
    """The `__getattr__` of `module` for its entries of `RETIRED` and `MOVED`."""

    def __getattr__(name: str) -> Any:
        if place := MOVED.get(module, {}).get(name):
            return getattr(importlib.import_module(place), name)
        instead = RETIRED.get(module, {}).get(name)
        if instead is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} cannot be used: {instead}.", stacklevel=stacklevel)
        return type(name, (RetiredName,), {"instead": instead, "__module__": module})

    return __getattr__
