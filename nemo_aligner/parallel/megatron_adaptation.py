# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Every name of Megatron Core that this project changes, overrides or uses although it is private.

Five lists, of which `TOUCHED` is the whole:

* `REMAPPED_CONSTANTS` and `REPLACED` are changed for the whole process, and only without CUDA,
  where Megatron Core names the device "cuda" and means "the device of this process".
* `REPLACED_FOR_NATIVE_ADAM` are changed for the whole process, with CUDA too, where neither
  Transformer Engine nor apex is installed and Megatron Core trains with PyTorch's Adam.
* `SWITCHED` are changed on single objects or for the duration of a `with` block, with CUDA too.
* `PRIVATE` are private names that subclasses of ours override, or that our code calls or reads.

Not listed are the public hooks of Megatron Core's configuration objects that its own training loop
sets as well (`finalize_model_grads_func`, `no_sync_func`, `grad_scale_func`, `clip_grad`), layer
specifications, and public methods that subclasses override.
"""

import dis
import functools
import importlib.util
import inspect
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import megatron.core
import megatron.core.optimizer
import torch
from packaging.version import Version
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_aligner.parallel.device import apply_rotary

# The first release that has a name, and the first that has it no more or where it is not touched.
SINCE = {
    "megatron.core.optimizer.optimizer:MegatronOptimizer.has_grad_norm_group": "0.19",
    "megatron.core.transformer.moe.moe_logging:destroy_moe_metrics_tracker": "0.19",
}
UNTIL = {"megatron.core.transformer.moe.moe_utils:get_moe_layer_wise_logging_tracker": "0.19"}
_RELEASE = Version(Version(megatron.core.__version__).base_version)  # 0.19.0 for 0.19.0rc1


class Touched(NamedTuple):
    module: str
    name: str
    reason: str
    where: str
    replacement: Callable[[Any], Any]  # makes what takes its place from the original


def _touched(
    where: str,
    reason: str,
    names: str,
    replacement: Callable[[Any], Any] = lambda original: original,
) -> list[Touched]:
    """`names`, "module:name ...", as far as the installed release has them."""
    return [
        Touched(module, name, reason, where, replacement)
        for module, name in (each.split(":") for each in names.split())
        if Version(SINCE.get(f"{module}:{name}", "0")) <= _RELEASE
        and _RELEASE < Version(UNTIL.get(f"{module}:{name}", "99"))
    ]


def _gather_unequal_shares(
    original: Callable[..., Tensor],
    input_: Tensor,
    group: ProcessGroup,
    output_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """`_gather_along_first_dim`; shares of unequal sizes travel padded to the largest."""
    if output_split_sizes is None or group.size() == 1:
        return original(input_, group, output_split_sizes, use_global_buffer)
    padded = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    shares = [torch.empty_like(padded) for _ in output_split_sizes]
    torch.distributed.all_gather(shares, padded, group=group)
    sizes = zip(shares, output_split_sizes, strict=True)
    return torch.cat([share[:size] for share, size in sizes])


def _reduce_scatter_unequal_shares(
    original: Callable[..., Tensor],
    input_: Tensor,
    group: ProcessGroup,
    input_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """`_reduce_scatter_along_first_dim`; shares of unequal sizes are cut from the whole sum."""
    if input_split_sizes is None or group.size() == 1:
        return original(input_, group, input_split_sizes, use_global_buffer)
    total = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return total.split(input_split_sizes)[group.rank()].contiguous()


def _chunks_of_context_rank(embeddings: Tensor, seq_dim: int, cp_group: ProcessGroup) -> Tensor:
    chunks = embeddings.chunk(2 * cp_group.size(), seq_dim)
    return torch.cat([chunks[cp_group.rank()], chunks[-1 - cp_group.rank()]], seq_dim)


def _sizes_on_host(
    self: Any, _point: str, tokens_per_expert: Tensor | None = None
) -> Tensor | None:
    for name in ("input_splits", "output_splits"):
        sizes = getattr(self, name)
        if isinstance(sizes, Tensor):
            setattr(self, name, sizes.tolist())  # gloo's all-to-all takes a list
    return tokens_per_expert


def _unless_alone(
    original: Callable[..., Any],
    output: Tensor,
    input_: Tensor,
    group: ProcessGroup,
    async_op: bool = False,
    **options: Any,
) -> Any:
    """A collective over the shares of one buffer; one rank has the result where it belongs."""
    alone = group.size() == 1 and not async_op and output.data_ptr() == input_.data_ptr()
    return None if alone else original(output, input_, group=group, async_op=async_op, **options)


def _set_optimizer_states(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    destination = {"param": main_param, **self.optimizer.state[main_param]}
    with torch.no_grad():
        for key, tensor in tensors.items():
            destination[key].copy_(tensor)


def _loading_with_own_steps(load_state_dict: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load_state_dict)
    def load(self: Any, state_dict: dict) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load


_ADAPT = "megatron_adaptation.adapt_megatron_core"

# The constants of these functions that say "cuda" or name CUDA's types become those of the CPU.
REMAPPED_CONSTANTS = _touched(
    _ADAPT,
    "allocates on 'cuda', or sorts parameters by the type name 'torch.cuda.…Tensor'",
    """
    megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining
    megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving
    megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving
    megatron.core.transformer.utils:get_default_causal_mask
    megatron.core.tensor_parallel.data:_build_key_size_numel_dictionaries
    megatron.core.optimizer.optimizer:FP32Optimizer.__init__
    megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.__init__
    megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__
    megatron.core.optimizer.optimizer:MegatronOptimizer.has_grad_norm_group
    megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__
    megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups
    megatron.core.optimizer.clip_grads:get_grad_norm_fp32
    megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32
    megatron.core.optimizer.clip_grads:count_zeros_fp32
    megatron.core.optimizer.grad_scaler:MegatronGradScaler.__init__
    megatron.core.optimizer.grad_scaler:DynamicGradScaler.__init__
    megatron.core.utils:local_multi_tensor_l2_norm
    """,  # noqa: E501
)


def _replaced(reason: str, counterpart: Any, names: str) -> list[Touched]:
    return _touched(_ADAPT, reason, names, lambda _original: counterpart)


def _around(function: Callable[..., Any], reason: str, names: str) -> list[Touched]:
    """Replaced by `function`, which gets the original as its first argument."""
    return _touched(_ADAPT, reason, names, lambda original: functools.partial(function, original))


_EMBEDDINGS = "megatron.core.models.common.embeddings"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_RNG = "random-number tracker of tensor parallelism"

REPLACED = [
    *_replaced(
        "Megatron Core allocates on the 'current device' everywhere",
        lambda: torch.device("cpu"),
        "torch.cuda:current_device",
    ),
    *_replaced(
        "a CPU has no streams: called after pipeline communication and around checkpoints, and in "
        "0.19 gradient reduction makes the stream wait for CUDA graphs",
        lambda *_args, **_kwargs: None,
        "torch.cuda:current_stream torch.cuda:synchronize",
    ),
    *_replaced(
        _RNG,
        lambda *_args, **_kwargs: torch.random.get_rng_state(),
        "torch.cuda:get_rng_state megatron.core.tensor_parallel.random:_get_cuda_rng_state",
    ),
    *_replaced(
        _RNG,
        lambda new_state, *_args, **_kwargs: torch.random.set_rng_state(new_state),
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    ),
    *_replaced(_RNG, torch.manual_seed, "torch.cuda:manual_seed"),
    *_replaced(
        "broadcast_data and the exchange of checkpoints move tensors with it",
        lambda tensor, *_args, **_kwargs: tensor,
        "torch:Tensor.cuda",
    ),
    *_around(
        apply_rotary,
        "reads and writes the heads six times where two are enough",
        f"{_EMBEDDINGS}.rope_utils:_apply_rotary_pos_emb_bshd",
    ),
    *_replaced(
        "asks for pinned memory, which needs CUDA",
        _chunks_of_context_rank,
        f"{_EMBEDDINGS}.rotary_pos_embedding:get_pos_emb_on_this_cp_rank "
        f"{_EMBEDDINGS}.yarn_rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
    ),
    *_around(
        _unless_alone,
        "gloo copies the whole buffer, twice, in a group of one rank",
        "megatron.core.distributed.param_and_grad_buffer:dist_all_gather_func "
        "megatron.core.distributed.param_and_grad_buffer:dist_reduce_scatter_func",
    ),
    *_replaced(
        "the constructor makes a CUDA stream unless there is one",
        "none on a CPU",
        f"{_DISPATCHER}.cuda_dtoh_stream",
    ),
    *_replaced(
        "copies the sizes of the exchange to the host on a CUDA stream; on a CPU they are there",
        _sizes_on_host,
        f"{_DISPATCHER}._maybe_dtoh_and_synchronize",
    ),
    *_around(
        _gather_unequal_shares,
        "experts with tensor parallelism gather shares of unequal sizes, which gloo cannot",
        "megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
    ),
    *_around(
        _reduce_scatter_unequal_shares,
        "the backward pass of the same",
        "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
    ),
]

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
REPLACED_FOR_NATIVE_ADAM = [
    *_replaced(
        "loads in place into leaves that need a gradient, and asks for a 'step' that the "
        "checkpoint lacks",
        _set_optimizer_states,
        f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
    ),
    *_touched(
        _ADAPT,
        "one 'step' tensor shared by all parameters would be advanced once per parameter",
        f"{_OPTIMIZER}.load_state_dict",
        _loading_with_own_steps,
    ),
]


def _table(text: str) -> list[Touched]:
    """From paragraphs `where | reason`, with the names in indented lines below."""
    entries = re.findall(r"^(\S.*?) \| (.*?)\n((?: +\S+\n)+)", text, re.MULTILINE | re.DOTALL)
    return [each for where, why, names in entries for each in _touched(where, why, names)]


SWITCHED = _table(f"""
megatron_switches.decoding_mode | generation does not split sequences while they grow
    megatron.core.model_parallel_config:ModelParallelConfig.sequence_parallel
    {_EMBEDDINGS}.language_model_embedding:LanguageModelEmbedding.scatter_to_sequence_parallel
    {_EMBEDDINGS}.language_model_embedding:LanguageModelEmbedding.reduce_scatter_embeddings
    megatron.core.tensor_parallel.layers:ColumnParallelLinear.sequence_parallel
    megatron.core.tensor_parallel.layers:RowParallelLinear.sequence_parallel
    megatron.core.tensor_parallel.layers:VocabParallelEmbedding.reduce_scatter_embeddings
megatron_switches.decoding_mode | generation computes as with one context-parallel rank
    megatron.core.model_parallel_config:ModelParallelConfig.context_parallel_size
    {_EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.cp_group
    transformer_engine.pytorch:DotProductAttention.set_context_parallel_group
megatron_switches.decoding_mode | the cache of embeddings knows their length alone, not the ranks
    {_EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.forward.cache_clear
    {_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward.cache_clear
models/nlp/gpt/megatron_layers.py | autograd refuses the bias that is added in place to a sum over
one rank
    megatron.core.tensor_parallel.layers:RowParallelLinear.explicit_expert_comm
models/nlp/gpt/megatron_layers.py | built for all experts of a layer, so that weights do not depend
on the split
    megatron.core.transformer.moe.experts:SequentialMLP.local_experts
    megatron.core.transformer.moe.experts:SequentialMLP.num_local_experts
models/nlp/gpt/megatron_layers.py | reads the mark `sequence_parallel` of a weight; norms of ours,
and heads of gpt_reward_model.py, carry it
    megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads
training/megatron_steps.py | micro-batches of one pass differ in shape, others do not
    megatron.core:ModelParallelConfig.variable_seq_lengths
megatron_switches.all_weights_named | a checkpoint would miss the weights of a float32 head
    megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.float16_groups
megatron_switches.groups_in_order | matches groups by settings, which several of them may share
    megatron.core.optimizer.optimizer:MegatronOptimizer._filter_and_reorder_param_groups
megatron_switches.places_without_padding | counts the padding between buckets, which a checkpoint's
gathered state has not
    megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.param_index_map
training/optim.py | reads the mark `allreduce` of a weight: False gives it the optimizer of the
experts
    megatron.core.distributed:DistributedDataParallel.__init__
megatron_switches.take_balance_table | the table of balance losses is read and emptied
    megatron.core.transformer.moe.moe_utils:get_moe_layer_wise_logging_tracker
    megatron.core.transformer.moe.moe_logging:destroy_moe_metrics_tracker
""")

PRIVATE = _table("""
checkpoint/torch_dist_stream.py | read: the name of a checkpoint's table of contents
    torch.distributed.checkpoint.filesystem:_metadata_fn
checkpoint/torch_dist_stream.py | called: a part of a tar file is read as a file
    torch.distributed.checkpoint.utils:_create_file_view
models/nlp/gpt/hybrid_model.py | called: takes the specification of a layer or of a stage
    megatron.core.transformer.transformer_block:_get_block_submodules
models/nlp/gpt/megatron_layers.py | overridden: there is no expert bias, and asking for it starts a
C++ compiler
    megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias
checkpoint/dist_ckpt.py | called: the first part of the names of a rank's files
    torch.distributed.checkpoint.filesystem:_StoragePrefix
data/nlp/sources.py | read: tells an index from another file, where Megatron Core asserts
""")

TOUCHED = [*REMAPPED_CONSTANTS, *REPLACED, *REPLACED_FOR_NATIVE_ADAM, *SWITCHED, *PRIVATE]


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
    `ImportError`: the installed release does not have it.
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
            "setup.py names; docs/architecture.md says how to move to another."
        ) from error


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
    """Check the names that are touched, and adapt Megatron Core to a process without CUDA or with
    PyTorch's Adam. `parallel_state.initialize()` calls it before any model is built.
    `ImportError`: the installed megatron-core or Transformer Engine lacks a listed name.
    """
    for touched in TOUCHED:
        if importlib.util.find_spec(touched.module.split(".")[0]) is not None:
            resolve(touched.module, touched.name)
    native_adam_is_used = megatron.core.optimizer.Adam is torch.optim.AdamW
    replaced = REPLACED_FOR_NATIVE_ADAM if native_adam_is_used else []
    if not torch.cuda.is_available():
        replaced = [*replaced, *REPLACED]
        for touched in REMAPPED_CONSTANTS:
            _owner, _name, function = resolve(touched.module, touched.name)
            function = inspect.unwrap(getattr(function, "__func__", function))
            function.__code__ = _cpu_constant(function.__code__)
    for touched in replaced:
        owner, name, original = resolve(touched.module, touched.name)
        setattr(owner, name, touched.replacement(original))
