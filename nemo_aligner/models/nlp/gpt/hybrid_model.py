# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron Core's `HybridModel` (since 0.19) in the place of its `GPTModel`: the same arguments,
names of weights, checkpoints and numbers.

In a `HybridModel` attention and MLP are layers of their own. Here a layer is a GPT's, of both, so
that layers keep their numbers, weights their names, and checkpoints load in either.
"""

from contextlib import nullcontext
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    _get_block_submodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from nemo_aligner.parallel.megatron_switches import changed


class _Layer:
    """Builds each layer from its own specification; a `HybridStack` has one for all of a kind."""

    def __new__(cls, specs: Any, layer_number: int, pp_layer_offset: int, **more: Any) -> Any:
        spec = specs[layer_number - pp_layer_offset - 1]
        return build_module(spec, layer_number=layer_number, **more)


class _Layers(HybridStack):
    """The layers of a stage, the last one's norm (Megatron Core's would be Transformer Engine's)
    and, under sequence parallelism, dropout that differs between ranks, as in a `GPTModel`.
    """

    sharded_state_dict = TransformerBlock.sharded_state_dict

    def __init__(self, config: TransformerConfig, layer_norm: Any, vp_stage: Any, **more: Any):
        super().__init__(config, post_layer_norm=False, **more)
        self.vp_stage = vp_stage
        self.final_layernorm = None
        if self.post_process:
            self.final_layernorm = layer_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        split = self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if split else nullcontext():
            hidden = super().forward(*args, **kwargs)
        if self.final_layernorm is None:
            return hidden
        normed = self.final_layernorm(hidden)
        return make_viewless_tensor(normed, requires_grad=True, keep_graph=True)


class HybridGPTModel(HybridModel):
    """`HybridModel` with the arguments of `GPTModel`."""

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        *,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        seq_len_interpolation_factor: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        **more: Any,
    ):
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        block = _get_block_submodules(config, transformer_layer_spec, vp_stage, groups.pp.rank())
        layers = HybridStackSubmodules(
            attention_layer=ModuleSpec(_Layer, params={"specs": block.layer_specs})
        )
        own = {"layer_norm": block.layer_norm, "vp_stage": vp_stage}
        chunks = config.virtual_pipeline_model_parallel_size
        stages = [
            "*" * get_num_layers_to_build(config, chunk, rank)
            for chunk in (range(chunks) if chunks else [None])
            for rank in range(groups.pp.size())
        ]
        sizes = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        # The pattern holds the sizes of stages, which it would be refused with.
        with changed([(config, name, None) for name in sizes]):
            super().__init__(
                config,
                ModuleSpec(_Layers, own, layers),
                vocab_size,
                max_sequence_length,
                hybrid_layer_pattern="|".join(stages),
                position_embedding_type=position_embedding_type,
                rotary_percent=rotary_percent,
                rotary_base=rotary_base,
                seq_len_interpolation_factor=seq_len_interpolation_factor,
                pg_collection=groups,
                vp_stage=vp_stage,
                **more,
            )
        self.rotary_percent = rotary_percent
        if position_embedding_type == "rope":  # with what a `HybridModel` leaves out
            self.rotary_pos_emb = RotaryEmbedding(
                kv_channels=config.kv_channels,
                rotary_percent=rotary_percent,
                rotary_interleaved=config.rotary_interleaved,
                seq_len_interpolation_factor=seq_len_interpolation_factor,
                rotary_base=rotary_base,
                rope_scaling=rope_scaling,
                rope_scaling_factor=rope_scaling_factor,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=groups.cp,
            )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """As of a `GPTModel`, which stores nothing of the output layer but its weight."""
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        sharded.pop(f"{prefix}output_layer._extra_state", None)
        return sharded
