# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Counterparts of the functions of Megatron Core that `megatron_adaptation` replaces: on a CPU
(`REPLACED`), and around PyTorch's Adam (`REPLACED_FOR_NATIVE_ADAM`), which Megatron Core's
distributed optimizer takes where neither Transformer Engine nor apex is installed.
"""

import functools
from collections.abc import Callable
from typing import Any

import megatron.core.optimizer
import torch
from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_aligner.parallel.cpu_operations import apply_rotary

_Gather = Callable[[Tensor, ProcessGroup, list[int] | None, bool], Tensor]


def _get_rng_state(*_args: Any, **_kwargs: Any) -> Tensor:
    return torch.random.get_rng_state()


def _set_rng_state(new_state: Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.random.set_rng_state(new_state)


def _gather_unequal_shares(
    original: _Gather,
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
    return torch.cat(
        [share[:size] for share, size in zip(shares, output_split_sizes, strict=True)]
    )


def _reduce_scatter_unequal_shares(
    original: _Gather,
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
    self: MoEAlltoAllTokenDispatcher, _point: str, tokens_per_expert: Tensor | None = None
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


def cpu_replacements() -> dict[tuple[str, str], Any]:
    """The CPU counterpart of each entry of `REPLACED`, by (module, name)."""
    dispatcher = "megatron.core.transformer.moe.token_dispatcher"
    rotary = "megatron.core.models.common.embeddings.rotary_pos_embedding"
    yarn = "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding"
    random = "megatron.core.tensor_parallel.random"
    return {
        ("torch.cuda", "current_device"): lambda: torch.device("cpu"),
        ("torch.cuda", "current_stream"): lambda *_args, **_kwargs: None,
        ("torch.cuda", "synchronize"): lambda *_args, **_kwargs: None,
        ("torch.cuda", "get_rng_state"): _get_rng_state,
        ("torch.cuda", "manual_seed"): torch.manual_seed,
        ("torch", "Tensor.cuda"): lambda tensor, *_args, **_kwargs: tensor,
        (random, "_get_cuda_rng_state"): _get_rng_state,
        (random, "_set_cuda_rng_state"): _set_rng_state,
        (rotary, "get_pos_emb_on_this_cp_rank"): _chunks_of_context_rank,
        (rope_utils.__name__, "_apply_rotary_pos_emb_bshd"): functools.partial(
            apply_rotary, rope_utils._apply_rotary_pos_emb_bshd
        ),
        (yarn, "get_pos_emb_on_this_cp_rank"): _chunks_of_context_rank,
        (buffers.__name__, "dist_all_gather_func"): functools.partial(
            _unless_alone, buffers.dist_all_gather_func
        ),
        (buffers.__name__, "dist_reduce_scatter_func"): functools.partial(
            _unless_alone, buffers.dist_reduce_scatter_func
        ),
        (dispatcher, "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream"): "none on a CPU",
        (dispatcher, "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize"): _sizes_on_host,
        (mappings.__name__, "_gather_along_first_dim"): functools.partial(
            _gather_unequal_shares, mappings._gather_along_first_dim
        ),
        (mappings.__name__, "_reduce_scatter_along_first_dim"): functools.partial(
            _reduce_scatter_unequal_shares, mappings._reduce_scatter_along_first_dim
        ),
    }


def native_adam_is_used() -> bool:
    return megatron.core.optimizer.Adam is torch.optim.AdamW


def _set_optimizer_states(
    self: DistributedOptimizer, model_param: Tensor, tensors: dict[str, Tensor]
) -> None:
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    destination = {"param": main_param, **self.optimizer.state[main_param]}
    with torch.no_grad():
        for key, tensor in tensors.items():
            destination[key].copy_(tensor)


def adam_replacements() -> dict[tuple[str, str], Any]:
    """The counterpart of each entry of `REPLACED_FOR_NATIVE_ADAM`, by (module, name)."""
    load_state_dict = DistributedOptimizer.load_state_dict

    @functools.wraps(load_state_dict)
    def load_with_own_steps(self: DistributedOptimizer, state_dict: dict) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    optimizer = "megatron.core.optimizer.distrib_optimizer"
    return {
        (
            optimizer,
            "DistributedOptimizer._set_main_param_and_optimizer_states",
        ): _set_optimizer_states,
        (optimizer, "DistributedOptimizer.load_state_dict"): load_with_own_steps,
    }
