# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Every name of Megatron Core that this project changes, overrides or uses although it is private.

Four lists, of which `TOUCHED` is the whole:

* `REMAPPED_CONSTANTS` and `REPLACED` are changed for the whole process, and only without CUDA,
  where Megatron Core names the device "cuda" and means "the device of this process".
  `adapt_megatron_core()` applies them; its one caller is `parallel_state.initialize()`, which runs
  before any model is built. So the order of imports does not matter.
* `REPLACED_FOR_NATIVE_ADAM` are changed for the whole process where neither Transformer Engine nor
  apex is installed, with CUDA too.
* `SWITCHED` are changed on single objects or for the duration of a `with` block, with CUDA too.
  Each entry says where.
* `PRIVATE` are private names that subclasses of ours override, or that our code calls. Each entry
  says where.

Not listed are the public hooks of Megatron Core's configuration objects that its own training loop
sets as well (`finalize_model_grads_func`, `no_sync_func`, `grad_scale_func`, `clip_grad`), layer
specifications, and public methods that subclasses override.
"""

import dis
import functools
import importlib.util
import inspect
import types
from typing import Any, NamedTuple

import megatron.core
import torch
from packaging.version import Version

_TENSOR_TYPE = "sorts parameters by the type name 'torch.cuda.…Tensor'"
_ONE_RANK = "gloo copies the whole buffer, twice, in a group of one rank"
_RNG = "random-number tracker of tensor parallelism"

# module -> name -> reason. The constants of these functions say "cuda"; they are rewritten to
# "cpu".
REMAPPED_CONSTANTS = {
    "megatron.core.pipeline_parallel.schedules": {
        "forward_backward_no_pipelining": "token counter allocated on 'cuda'",
        "forward_backward_pipelining_without_interleaving": "token counter allocated on 'cuda'",
        "forward_backward_pipelining_with_interleaving": "token counter allocated on 'cuda'",
    },
    "megatron.core.transformer.utils": {
        "get_default_causal_mask": "causal mask allocated on 'cuda'",
    },
    "megatron.core.tensor_parallel.data": {
        "_build_key_size_numel_dictionaries": "sizes broadcast from 'cuda'",
    },
    "megatron.core.optimizer.optimizer": {
        "FP32Optimizer.__init__": "loss scale allocated on 'cuda'",
        "MixedPrecisionOptimizer.__init__": "overflow buffers allocated on 'cuda'",
        "Float16OptimizerWithFloat16Params.__init__": _TENSOR_TYPE,
        "MegatronOptimizer.has_grad_norm_group": "a count reduced over ranks from 'cuda'",
    },
    "megatron.core.optimizer.distrib_optimizer": {
        "DistributedOptimizer.__init__": _TENSOR_TYPE,
        "DistributedOptimizer._build_model_and_main_param_groups": _TENSOR_TYPE,
    },
    "megatron.core.optimizer.clip_grads": {
        "get_grad_norm_fp32": "norm allocated on 'cuda'",
        "clip_grad_by_total_norm_fp32": "expects 'torch.cuda.FloatTensor'",
        "count_zeros_fp32": "counter allocated on 'cuda'",
    },
    "megatron.core.optimizer.grad_scaler": {
        "MegatronGradScaler.__init__": "fp16 loss scale allocated on 'cuda'",
        "DynamicGradScaler.__init__": "fp16 loss scale allocated on 'cuda'",
    },
    "megatron.core.utils": {"local_multi_tensor_l2_norm": "norm allocated on 'cuda'"},
}

# module -> name -> reason. Replaced by a CPU counterpart, see `megatron_counterparts.py`.
REPLACED = {
    "torch.cuda": {
        "current_device": "Megatron Core allocates on the 'current device' everywhere",
        "current_stream": "0.19: gradient reduction makes it wait for CUDA graphs",
        "synchronize": "called after pipeline communication and around checkpoints; a CPU has no "
        "streams",
        "get_rng_state": _RNG,
        "manual_seed": _RNG,
    },
    "torch": {
        "Tensor.cuda": "broadcast_data and the exchange of checkpoints move tensors with it",
    },
    "megatron.core.tensor_parallel.random": {
        "_get_cuda_rng_state": _RNG,
        "_set_cuda_rng_state": _RNG,
    },
    "megatron.core.models.common.embeddings.rope_utils": {
        "_apply_rotary_pos_emb_bshd": "reads and writes the heads six times where two are enough",
    },
    "megatron.core.models.common.embeddings.rotary_pos_embedding": {
        "get_pos_emb_on_this_cp_rank": "asks for pinned memory, which needs CUDA",
    },
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": {
        "get_pos_emb_on_this_cp_rank": "asks for pinned memory, which needs CUDA",
    },
    "megatron.core.distributed.param_and_grad_buffer": {
        "dist_all_gather_func": _ONE_RANK,
        "dist_reduce_scatter_func": _ONE_RANK,
    },
    "megatron.core.transformer.moe.token_dispatcher": {
        "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream": "the constructor makes a CUDA stream "
        "unless there is one",
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize": "copies the sizes of the "
        "exchange to the host on a CUDA stream; on a CPU they are there",
    },
    "megatron.core.tensor_parallel.mappings": {
        "_gather_along_first_dim": "experts with tensor parallelism gather shares of unequal "
        "sizes, which gloo cannot",
        "_reduce_scatter_along_first_dim": "the backward pass of the same",
    },
}

# module -> name -> reason. Replaced on any device where Megatron Core trains with PyTorch's Adam,
# because neither Transformer Engine nor apex is installed; see `megatron_counterparts.py`.
REPLACED_FOR_NATIVE_ADAM = {
    "megatron.core.optimizer.distrib_optimizer": {
        "DistributedOptimizer._set_main_param_and_optimizer_states": "loads in place into leaves "
        "that need a gradient, and asks for a 'step' that the checkpoint lacks",
        "DistributedOptimizer.load_state_dict": "one 'step' tensor shared by all parameters would "
        "be advanced once per parameter",
    },
}

_DECODING = "megatron_switches.decoding_mode"
_WHOLE_SEQUENCE = "generation does not split sequences while they grow"
_ONE_CONTEXT_RANK = "generation computes as with one context-parallel rank"

# module -> name -> (reason, where). Changed on single objects.
SWITCHED = {
    "megatron.core.model_parallel_config": {
        "ModelParallelConfig.sequence_parallel": (_WHOLE_SEQUENCE, _DECODING),
        "ModelParallelConfig.context_parallel_size": (_ONE_CONTEXT_RANK, _DECODING),
    },
    "megatron.core.models.common.embeddings.language_model_embedding": {
        "LanguageModelEmbedding.scatter_to_sequence_parallel": (_WHOLE_SEQUENCE, _DECODING),
        "LanguageModelEmbedding.reduce_scatter_embeddings": (_WHOLE_SEQUENCE, _DECODING),
    },
    "megatron.core.tensor_parallel.layers": {
        "ColumnParallelLinear.sequence_parallel": (_WHOLE_SEQUENCE, _DECODING),
        "RowParallelLinear.sequence_parallel": (_WHOLE_SEQUENCE, _DECODING),
        "VocabParallelEmbedding.reduce_scatter_embeddings": (_WHOLE_SEQUENCE, _DECODING),
        "RowParallelLinear.explicit_expert_comm": (
            "autograd refuses the bias that is added in place to a sum over one rank",
            "models/nlp/gpt/megatron_layers.py",
        ),
    },
    "megatron.core.models.common.embeddings.rotary_pos_embedding": {
        "RotaryEmbedding.cp_group": (_ONE_CONTEXT_RANK, _DECODING),
        "RotaryEmbedding.forward.cache_clear": (
            "the cache of embeddings knows their length alone, not the context-parallel ranks",
            _DECODING,
        ),
    },
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": {
        "YarnRotaryEmbedding.forward.cache_clear": (
            "the cache of embeddings knows their length alone, not the context-parallel ranks",
            _DECODING,
        ),
    },
    "transformer_engine.pytorch": {
        "DotProductAttention.set_context_parallel_group": (_ONE_CONTEXT_RANK, _DECODING),
    },
    "megatron.core": {
        "ModelParallelConfig.variable_seq_lengths": (
            "micro-batches of one pass differ in shape, those of another pass do not",
            "megatron_switches.shapes_exchanged",
        ),
    },
    "megatron.core.optimizer.optimizer": {
        "Float16OptimizerWithFloat16Params.float16_groups": (
            "a checkpoint would name the bf16 weights alone, and miss those of a float32 head",
            "megatron_switches.all_weights_named",
        ),
        "MegatronOptimizer._filter_and_reorder_param_groups": (
            "matches parameter groups by settings, which groups of different dtype may share",
            "megatron_switches.groups_in_order",
        ),
    },
    "megatron.core.distributed.param_and_grad_buffer": {
        "_ParamAndGradBuffer.param_index_map": (
            "counts the padding between buckets, which a checkpoint's gathered state has not",
            "megatron_switches.places_without_padding",
        ),
    },
    "megatron.core.distributed": {
        "DistributedDataParallel.__init__": (
            "reads the mark `allreduce` of a weight: False gives it the optimizer of the experts",
            "training/optim.py",
        ),
    },
    "megatron.core.distributed.finalize_model_grads": {
        "_allreduce_non_tensor_model_parallel_grads": (
            "reads the mark `sequence_parallel` of a weight; norms and heads of ours carry it",
            "models/nlp/gpt/megatron_config.py and gpt_reward_model.py",
        ),
    },
    "megatron.core.transformer.moe.experts": {
        "SequentialMLP.local_experts": (
            "built for all experts of a layer, so that weights do not depend on the split",
            "models/nlp/gpt/megatron_layers.py",
        ),
        "SequentialMLP.num_local_experts": (
            "goes with `local_experts`",
            "models/nlp/gpt/megatron_layers.py",
        ),
    },
    "megatron.core.transformer.moe.moe_utils": {
        "get_moe_layer_wise_logging_tracker": (
            "the table of balance losses is read and emptied",
            "megatron_switches.take_balance_table",
        ),
    },
    "torch.distributed.checkpoint.default_planner": {
        "DefaultLoadPlanner.load_bytes": (
            "objects of a checkpoint are unpickled: they are read as data first",
            "checkpoint/data_only.py",
        ),
    },
    "megatron.core.transformer.moe.moe_logging": {
        "destroy_moe_metrics_tracker": (
            "the table of balance losses is read and emptied",
            "megatron_switches.take_balance_table",
        ),
    },
}

# module -> name -> (reason, where). Private names that are overridden or called.
PRIVATE = {
    "torch.distributed.checkpoint.filesystem": {
        "_metadata_fn": (
            "read: the name of a checkpoint's table of contents",
            "checkpoint/data_only.py",
        ),
    },
    "torch.distributed.checkpoint.utils": {
        "_create_file_view": (
            "called: a part of a tar file is read as a file",
            "checkpoint/torch_dist_stream.py",
        ),
    },
    "megatron.core.models.gpt.gpt_model": {
        "GPTModel._postprocess": (
            "overridden: the head of a reward model stands in the place of the output layer",
            "models/nlp/gpt/gpt_reward_model.py",
        ),
    },
    "megatron.core.transformer.moe.router": {
        "TopKRouter._apply_expert_bias": (
            "overridden: there is no expert bias, and asking for it starts a C++ compiler",
            "models/nlp/gpt/megatron_layers.py",
        ),
    },
    "megatron.core.dist_checkpointing.strategies.torch": {
        "_replace_state_dict_keys_with_sharded_keys": (
            "called: plans a checkpoint that is written without further processes",
            "checkpoint/dist_ckpt.py",
        ),
    },
    "megatron.core.datasets.indexed_dataset": {
        "_INDEX_HEADER": (
            "read: tells an index from another file, where Megatron Core asserts",
            "data/nlp/sources.py",
        ),
    },
}

# (module, name) -> the first release that has it, and the first that does without: it is gone, or
# not touched any more. The other names are in all supported releases.
SINCE = {
    ("megatron.core.optimizer.optimizer", "MegatronOptimizer.has_grad_norm_group"): "0.19",
    ("megatron.core.transformer.moe.moe_logging", "destroy_moe_metrics_tracker"): "0.19",
}
UNTIL = {("megatron.core.transformer.moe.moe_utils", "get_moe_layer_wise_logging_tracker"): "0.19"}


_RELEASE = Version(Version(megatron.core.__version__).base_version)  # 0.19.0 for 0.19.0rc1


class Touched(NamedTuple):
    """One name of Megatron Core (or of what it is built on) and why it is touched."""

    module: str
    name: str
    reason: str
    where: str


def _flat(names: dict, where: str = "") -> list[Touched]:
    touched = []
    for module, entries in names.items():
        for name, entry in entries.items():
            reason, place = entry if isinstance(entry, tuple) else (entry, where)
            if _is_in_this_release(module, name):
                touched.append(Touched(module, name, reason, place))
    return touched


def _is_in_this_release(module: str, name: str) -> bool:
    """Whether the installed megatron-core is one whose `name` is touched."""
    since, until = SINCE.get((module, name)), UNTIL.get((module, name))
    return (since is None or _RELEASE >= Version(since)) and (
        until is None or _RELEASE < Version(until)
    )


TOUCHED = [
    *_flat(REMAPPED_CONSTANTS, "megatron_adaptation.adapt_megatron_core"),
    *_flat(REPLACED, "megatron_counterparts.cpu_replacements"),
    *_flat(REPLACED_FOR_NATIVE_ADAM, "megatron_counterparts.adam_replacements"),
    *_flat(SWITCHED),
    *_flat(PRIVATE),
]


def _sets_in_constructor(owner: object, name: str) -> bool:
    """True if `owner` is a class whose instances get the attribute `name` in `__init__`."""
    constructors = [vars(base).get("__init__") for base in getattr(owner, "__mro__", ())]
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name
        for constructor in map(inspect.unwrap, filter(inspect.isfunction, constructors))
        for instruction in dis.get_instructions(constructor)
    )


def resolve(module_name: str, dotted: str) -> tuple[Any, str, Any]:
    """(owner, attribute name, value) of `dotted` in a module; None for an instance's.

    Raises:
        ImportError: the installed release does not have it; the message names it.
    """
    try:
        owner = importlib.import_module(module_name)
        *parents, name = dotted.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        if not hasattr(owner, name) and _sets_in_constructor(owner, name):
            return owner, name, None
        return owner, name, getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{module_name}.{dotted}, which nemo_aligner touches, is not found ({error}); "
            f"megatron-core {megatron.core.__version__} is installed. Install the releases that "
            "setup.py names; docs/megatron_core.md says how to move to another."
        ) from error


def check_touched_names() -> None:
    """Check that every name that is touched exists, in Transformer Engine where it is installed;
    the `ImportError` names one that does not.
    """
    for touched in TOUCHED:
        if importlib.util.find_spec(touched.module.split(".")[0]) is not None:
            resolve(touched.module, touched.name)


def _cpu_constant(constant: Any) -> Any:
    """`constant` of a code object with CPU counterparts of "cuda" and CUDA's tensor types."""
    if isinstance(constant, str):
        if constant == "cuda":
            return "cpu"
        if constant.startswith("torch.cuda.") and constant.rstrip(", ").endswith("Tensor"):
            return constant.replace("torch.cuda.", "torch.")
        return constant
    if isinstance(constant, tuple):
        return tuple(map(_cpu_constant, constant))
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=tuple(map(_cpu_constant, constant.co_consts)))
    return constant


@functools.cache
def adapt_megatron_core() -> None:
    """Check the names that are touched, and make Megatron Core usable in a process without CUDA,
    and its distributed optimizer usable with PyTorch's Adam.

    `parallel_state.initialize()` calls it, and nothing else needs to.

    Raises:
        ImportError: a listed name is missing from the installed megatron-core; the message names
            it.
    """
    check_touched_names()
    from nemo_aligner.parallel import megatron_counterparts  # which imports the optimizers

    if megatron_counterparts.native_adam_is_used():
        _replace(REPLACED_FOR_NATIVE_ADAM, megatron_counterparts.adam_replacements())
    if torch.cuda.is_available():
        return
    for touched in _flat(REMAPPED_CONSTANTS):
        _owner, _name, function = resolve(touched.module, touched.name)
        function = inspect.unwrap(getattr(function, "__func__", function))
        function.__code__ = _cpu_constant(function.__code__)
    _replace(REPLACED, megatron_counterparts.cpu_replacements())


def _replace(names: dict, counterparts: dict[tuple[str, str], Any]) -> None:
    for touched in _flat(names):
        owner, name, _value = resolve(touched.module, touched.name)
        setattr(owner, name, counterparts[touched.module, touched.name])
