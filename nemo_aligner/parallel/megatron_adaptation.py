# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What Megatron Core needs to run without CUDA: every name of it that this project touches.

On a machine with CUDA `adapt_megatron_core()` does nothing at all. Without CUDA it touches the
names listed in `TOUCHED`, each with its reason: Megatron Core names the device "cuda" in a few
places where it means "the device of this process".
"""

import functools
import importlib
import inspect
import types

import torch

# (module, dotted name, reason). The constants of these functions say "cuda" literally; they are
# rewritten to "cpu".
REMAPPED_CONSTANTS = [
    (
        "megatron.core.pipeline_parallel.schedules",
        "forward_backward_no_pipelining",
        "token counter allocated on 'cuda'",
    ),
    (
        "megatron.core.pipeline_parallel.schedules",
        "forward_backward_pipelining_without_interleaving",
        "token counter allocated on 'cuda'",
    ),
    (
        "megatron.core.pipeline_parallel.schedules",
        "forward_backward_pipelining_with_interleaving",
        "token counter allocated on 'cuda'",
    ),
    (
        "megatron.core.transformer.utils",
        "get_default_causal_mask",
        "causal mask allocated on 'cuda'",
    ),
    (
        "megatron.core.tensor_parallel.data",
        "_build_key_size_numel_dictionaries",
        "sizes broadcast from 'cuda'",
    ),
    (
        "megatron.core.optimizer.optimizer",
        "FP32Optimizer.__init__",
        "loss scale allocated on 'cuda'",
    ),
    (
        "megatron.core.optimizer.optimizer",
        "MixedPrecisionOptimizer.__init__",
        "overflow buffers allocated on 'cuda'",
    ),
    (
        "megatron.core.optimizer.optimizer",
        "Float16OptimizerWithFloat16Params.__init__",
        "sorts parameters by the type name 'torch.cuda.…Tensor'",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.__init__",
        "sorts parameters by the type name 'torch.cuda.…Tensor'",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._build_model_and_main_param_groups",
        "sorts parameters by the type name 'torch.cuda.…Tensor'",
    ),
    ("megatron.core.optimizer.clip_grads", "get_grad_norm_fp32", "norm allocated on 'cuda'"),
    (
        "megatron.core.optimizer.clip_grads",
        "clip_grad_by_total_norm_fp32",
        "expects 'torch.cuda.FloatTensor'",
    ),
    ("megatron.core.optimizer.clip_grads", "count_zeros_fp32", "counter allocated on 'cuda'"),
    (
        "megatron.core.optimizer.grad_scaler",
        "MegatronGradScaler.__init__",
        "fp16 loss scale allocated on 'cuda'",
    ),
    (
        "megatron.core.optimizer.grad_scaler",
        "DynamicGradScaler.__init__",
        "fp16 loss scale allocated on 'cuda'",
    ),
    ("megatron.core.utils", "local_multi_tensor_l2_norm", "norm allocated on 'cuda'"),
]


# (module, dotted name, reason). Replaced by a CPU equivalent in `_replacements`.
REPLACED = [
    ("torch.cuda", "current_device", "Megatron Core allocates on the 'current device' everywhere"),
    (
        "torch.cuda",
        "synchronize",
        "called after pipeline communication and around checkpoints; the CPU has no streams",
    ),
    ("torch.cuda", "get_rng_state", "random-number tracker of tensor parallelism"),
    ("torch.cuda", "manual_seed", "random-number tracker of tensor parallelism"),
    (
        "torch",
        "Tensor.cuda",
        "broadcast_data and checkpoint exchange move tensors to 'the device' with it",
    ),
    (
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        "random-number tracker of tensor parallelism",
    ),
    (
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        "random-number tracker of tensor parallelism",
    ),
    (
        "megatron.core.models.common.embeddings.rotary_pos_embedding",
        "get_pos_emb_on_this_cp_rank",
        "asks for pinned memory, which there is none of without CUDA",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        "native Adam: loads in place into leaves that need a gradient, and asks for a 'step' the "
        "checkpoint lacks",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.load_state_dict",
        "native Adam: one 'step' tensor shared by all parameters would be advanced once per "
        "parameter",
    ),
    (
        "megatron.core.transformer.moe.token_dispatcher",
        "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
        "the constructor makes a CUDA stream unless there is one",
    ),
    (
        "megatron.core.transformer.moe.token_dispatcher",
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
        "copies the sizes of the exchange to the host on a CUDA stream; on the CPU they are there",
    ),
    (
        "megatron.core.tensor_parallel.mappings",
        "_gather_along_first_dim",
        "experts with tensor parallelism gather shares of unequal sizes, which gloo cannot",
    ),
    (
        "megatron.core.tensor_parallel.mappings",
        "_reduce_scatter_along_first_dim",
        "likewise backward",
    ),
]


TOUCHED = REMAPPED_CONSTANTS + REPLACED


def _cpu_constant(constant):
    """`constant` of a code object with the device "cuda" and tensor type names replaced by their
    CPU counterparts.
    """
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


def _resolve(module_name: str, dotted: str):
    """(owner, attribute name, value) of `dotted` in a module; a clear error if a newer release
    moved it.
    """
    try:
        owner = importlib.import_module(module_name)
        *parents, name = dotted.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name, getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{module_name}.{dotted} is needed to run Megatron Core without CUDA, but this "
            "release of megatron-core "
            "does "
            "not have it. Install the megatron-core release that setup.py names."
        ) from error


def _get_rng_state(*_args, **_kwargs):
    return torch.random.get_rng_state()


def _set_rng_state(new_state, *_args, **_kwargs):
    torch.random.set_rng_state(new_state)


def _gather_unequal_shares(
    original, input_, group, output_split_sizes=None, use_global_buffer=False
):
    """Megatron Core's `_gather_along_first_dim`; shares of unequal sizes travel padded to the
    largest.
    """
    if output_split_sizes is None or group.size() == 1:
        return original(input_, group, output_split_sizes, use_global_buffer)
    padded = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    shares = [torch.empty_like(padded) for _ in output_split_sizes]
    torch.distributed.all_gather(shares, padded, group=group)
    return torch.cat(
        [share[:size] for share, size in zip(shares, output_split_sizes, strict=True)]
    )


def _reduce_scatter_unequal_shares(
    original, input_, group, input_split_sizes=None, use_global_buffer=False
):
    """Megatron Core's `_reduce_scatter_along_first_dim`; shares of unequal sizes are cut from the
    whole sum.
    """
    if input_split_sizes is None or group.size() == 1:
        return original(input_, group, input_split_sizes, use_global_buffer)
    total = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return total.split(input_split_sizes)[group.rank()].contiguous()


def _replacements():
    """CPU counterpart of each entry of `REPLACED`, by (module, dotted name)."""
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    distributed_optimizer = importlib.import_module(
        "megatron.core.optimizer.distrib_optimizer"
    ).DistributedOptimizer
    load_state_dict = distributed_optimizer.load_state_dict
    dispatcher = "megatron.core.transformer.moe.token_dispatcher"

    def set_states(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        destination = {"param": main_param, **self.optimizer.state[main_param]}
        with torch.no_grad():
            for key, tensor in tensors.items():
                destination[key].copy_(tensor)

    def chunks_of_context_rank(embeddings, seq_dim, cp_group):
        chunks = embeddings.chunk(2 * cp_group.size(), seq_dim)
        return torch.cat([chunks[cp_group.rank()], chunks[-1 - cp_group.rank()]], seq_dim)

    @functools.wraps(load_state_dict)
    def load_with_own_steps(self, state_dict):
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def sizes_on_host(self, _point, tokens_per_expert=None):
        for name in ("input_splits", "output_splits"):
            sizes = getattr(self, name)
            if isinstance(sizes, torch.Tensor):
                setattr(self, name, sizes.tolist())  # gloo's all-to-all takes a list
        return tokens_per_expert

    return {
        (
            "megatron.core.models.common.embeddings.rotary_pos_embedding",
            "get_pos_emb_on_this_cp_rank",
        ): chunks_of_context_rank,
        ("torch.cuda", "current_device"): lambda: torch.device("cpu"),
        ("torch.cuda", "synchronize"): lambda *_args, **_kwargs: None,
        ("torch.cuda", "get_rng_state"): _get_rng_state,
        ("torch.cuda", "manual_seed"): torch.manual_seed,
        ("torch", "Tensor.cuda"): lambda tensor, *_args, **_kwargs: tensor,
        ("megatron.core.tensor_parallel.random", "_get_cuda_rng_state"): _get_rng_state,
        ("megatron.core.tensor_parallel.random", "_set_cuda_rng_state"): _set_rng_state,
        (
            "megatron.core.optimizer.distrib_optimizer",
            "DistributedOptimizer._set_main_param_and_optimizer_states",
        ): set_states,
        (
            "megatron.core.optimizer.distrib_optimizer",
            "DistributedOptimizer.load_state_dict",
        ): load_with_own_steps,
        (mappings.__name__, "_gather_along_first_dim"): functools.partial(
            _gather_unequal_shares, mappings._gather_along_first_dim
        ),
        (mappings.__name__, "_reduce_scatter_along_first_dim"): functools.partial(
            _reduce_scatter_unequal_shares, mappings._reduce_scatter_along_first_dim
        ),
        (dispatcher, "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream"): "none on the CPU",
        (dispatcher, "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize"): sizes_on_host,
    }


@functools.cache
def adapt_megatron_core() -> None:
    """Make Megatron Core usable in a process without CUDA; does nothing where CUDA is.

    Every rank calls it once, before it builds a Megatron module
    (`nemo_aligner.parallel.parallel_state` does on import).

    Raises:
        ImportError: a listed name is missing from the installed megatron-core; the message names
            it.
    """
    if torch.cuda.is_available():
        return
    for module_name, dotted, _reason in REMAPPED_CONSTANTS:
        _owner, _name, function = _resolve(module_name, dotted)
        function = inspect.unwrap(getattr(function, "__func__", function))
        function.__code__ = _cpu_constant(function.__code__)
    replacements = _replacements()
    for module_name, dotted, _reason in REPLACED:
        owner, name, _value = _resolve(module_name, dotted)
        setattr(owner, name, replacements[module_name, dotted])
