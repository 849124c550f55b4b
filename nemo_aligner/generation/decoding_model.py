# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a Megatron model for decoding, on a GPU with its steps as CUDA graphs:
Megatron Core's layers rotate all cached keys and expand those of grouped queries in every step.
Shapes: b rows, s tokens of each, h hidden size, np heads, ng query groups and hn channels per head
on this rank.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import is_layer_window_attention
from nemo.utils import logging
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_aligner.generation.cache import AttentionSettings, KeyValueCache, Pass
from nemo_aligner.generation.split import Split
from nemo_aligner.parallel.device import packed_linear
from nemo_aligner.parallel.vocab_parallel import scaled_logits


class DecodingModel:
    """The chunks (bare `GPTModel`s) of this pipeline stage, as functions of tokens and a cache;
    ids from `vocab_size` on are dropped. Make and use one inside
    `megatron_switches.decoding_mode`, after the last change of the weights' tensors.
    """

    def __init__(self, chunks: Sequence[Any], vocab_size: int, split: Split) -> None:
        self.chunks = chunks
        self.split = split
        self.vocab_size = vocab_size
        self._stages: list[list[_Layer]] = []
        self.num_layers = 0
        for chunk in chunks:
            layers = enumerate(chunk.decoder.layers, self.num_layers)
            self._stages.append([_Layer(layer, n, split.tensor) for n, layer in layers])
            self.num_layers += len(chunk.decoder.layers)
        self._rotations = [_Rotation(chunks[0], local) for local in (False, True)]
        self._output: _Function | None = None
        if chunks[-1].post_process:
            last, layer = chunks[-1], chunks[-1].output_layer
            shared = last.share_embeddings_and_output_weights
            weight = last.shared_embedding_or_output_weight() if shared else layer.weight
            self._output = _product(weight, layer.bias)
        final_norm = chunks[-1].decoder.final_layernorm
        self._final_norm = None if final_norm is None else _norm(final_norm)

    def forward(self, tokens: Tensor, which: Pass) -> Tensor | None:
        """`[s, b, h]` for int64 `tokens` `[b, s]`; None but on the last stage; all call it."""
        rotate = [each.at(which.positions, which.cache.width) for each in self._rotations]
        samples, width = tokens.shape
        group = self.split.pipeline
        stage = torch.distributed.get_rank(group)
        ranks = torch.distributed.get_process_group_ranks(group)
        for chunk, layers in zip(self.chunks, self._stages, strict=True):
            if chunk.pre_process:
                hidden = chunk.embedding(tokens, which.positions.expand(samples, -1))
            else:
                config, shape = chunk.config, (width, samples, chunk.config.hidden_size)
                hidden = torch.empty(shape, dtype=config.pipeline_dtype, device=tokens.device)
                torch.distributed.recv(hidden, src=ranks[stage - 1], group=group)
            for layer in layers:
                hidden = layer(hidden, rotate[layer.local], which)
            if not chunk.post_process:
                after = ranks[(stage + 1) % len(ranks)]
                torch.distributed.send(hidden.contiguous(), dst=after, group=group)
        return hidden if chunk.post_process else None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 `[b, V]` of the last stage's output `[1, b, h]`; its TP group calls it."""
        assert self._output is not None
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(
            self._output(hidden), group=self.split.tensor
        )
        return scaled_logits(logits[0, :, : self.vocab_size], self.chunks[-1].config).float()

    def new_cache(self, slots: int) -> KeyValueCache:
        return KeyValueCache(slots, self.num_layers)


class _Layer:
    def __init__(self, layer: Any, number: int, group: ProcessGroup) -> None:
        config, attention = layer.config, layer.self_attention
        skipped = config.window_attn_skip_freq
        windowed = is_layer_window_attention(config.window_size, skipped, layer.layer_number)
        window = config.window_size[0] if windowed else None
        self.local = windowed and config.rotary_base_local is not None
        softcap = config.attn_logit_softcapping
        self.how = AttentionSettings(number, config.softmax_scale, window, softcap)
        self.input_norm = _norm(layer.input_layernorm)
        self.mlp_norm = None if config.parallel_attention else _norm(layer.pre_mlp_layernorm)
        self.attention = attention
        if attention.q_layernorm is not None:
            self.query_norm = _norm(attention.q_layernorm)
            self.key_norm = _norm(attention.k_layernorm)
        self.rotated = not (config.no_rope_freq and config.no_rope_freq[layer.layer_number - 1])
        self.qkv = _linear(attention.linear_qkv, group)
        self.projection = _linear(attention.linear_proj, group)
        self.mlp = _mlp(layer.mlp, group)

    def __call__(self, hidden: Tensor, rotate: "_Function | None", which: Pass) -> Tensor:
        normed, attention = self.input_norm(hidden), self.attention
        groups = attention.num_query_groups_per_partition
        heads = attention.num_attention_heads_per_partition // groups
        channels = attention.hidden_size_per_attention_head
        # Of each group its queries, its key, its value: `[s, b, ng, np / ng + 2, hn]`.
        mixed = self.qkv(normed).view(*normed.shape[:2], groups, heads + 2, channels)
        if attention.q_layernorm is not None:
            query, key, value = mixed.split([heads, 1, 1], dim=3)
            query, key = self.query_norm(query), self.key_norm(key)
            mixed = torch.cat([query, key, value], dim=3)
        if rotate is not None and self.rotated:
            mixed = rotate(mixed)
        hidden = hidden + self.projection(which.attend(mixed, self.how))
        return hidden + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(hidden))


class _Rotation:
    def __init__(self, chunk: Any, local: bool) -> None:
        """`local`: of the layers with a window, where they have another."""
        config = chunk.config
        self.embedding: Any = None
        if chunk.position_embedding_type in ("rope", "yarn"):
            self.embedding = chunk.rotary_pos_emb
        if config.rotary_base_local is not None:
            self.embedding = self.embedding.local if local else self.embedding.whole
        elif local:
            self.embedding = None
        self.dtype = config.params_dtype
        self.interleaved = config.rotary_interleaved
        self.heads = config.num_attention_heads // config.num_query_groups
        self._tables: tuple[Tensor, Tensor] | None = None

    def at(self, positions: Tensor, width: int) -> "_Function | None":
        """The rotation of tokens at `positions` int64 `[b, s]`, all below `width`, or None."""
        if self.embedding is None:
            return None
        if self._tables is None or len(self._tables[0]) < width:
            self._tables = self._compute(max(256, 1 << (width - 1).bit_length()))
        cos, sin = (table[positions.T].unsqueeze(2) for table in self._tables)
        return partial(_turned, cos=cos, sin=sin, interleaved=self.interleaved)

    def _compute(self, width: int) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine `[width, np / ng + 2, channels]` in the model's dtype, for the
        queries and the key of a group; 1 and 0 for its value.
        """
        angles, scale = self.embedding(width), 1.0
        if isinstance(angles, tuple):  # of YaRN
            angles, scale = angles
        angles = angles[:, 0]
        cos, sin = (angles.cos() * scale).to(self.dtype), (angles.sin() * scale).to(self.dtype)
        pairs = sin.unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
        pairs.select(-1 if self.interleaved else -2, 0).neg_()
        cos, sin = (x.repeat(1, self.heads + 2, 1) for x in (cos, sin))
        cos[:, -1], sin[:, -1] = 1.0, 0.0
        return cos, sin


def _turned(mixed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs (x, y) of channels to (x cos - y sin, y cos + x sin); `cos` and `sin` are `[s,
    b, 1, np / ng + 2, channels]`. Pairs are neighbours (`interleaved`) or half of the channels
    apart.
    """
    channels = cos.size(-1)
    turned = mixed[..., :channels]
    if interleaved:
        partner = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = turned.roll(channels // 2, -1)
    turned = (turned * cos).add_(partner.mul_(sin))
    if channels == mixed.size(-1):
        return turned
    return torch.cat([turned, mixed[..., channels:]], -1)


_Function = Callable[[Tensor], Tensor]
_ENGINE_LAYERS = "megatron.core.extensions.transformer_engine"
_ENGINE_NORMS = ("RMSNorm", "LayerNorm")


def _linear(module: Any, group: ProcessGroup) -> _Function:
    """A linear layer, divided among `group`, that adds its bias, after a norm of Transformer
    Engine. The module itself, which starts slowly, is called only for an unmerged adapter.
    """
    adapter = getattr(module, "lora", None)
    if adapter is not None and not adapter.merged:
        return lambda x: _with_bias(*module(x))
    product, end = _linear_without_end(module, group), getattr(module, "branch_end", None)
    return product if end is None else lambda x: end(product(x))


def _linear_without_end(module: Any, group: ProcessGroup) -> _Function:
    if isinstance(module, tensor_parallel.ColumnParallelLinear):
        return _product(module.weight, module.bias)
    if isinstance(module, tensor_parallel.RowParallelLinear):
        return _product(module.weight, module.bias, group)
    if not any(kind.__module__ == _ENGINE_LAYERS for kind in type(module).__mro__):
        return lambda x: _with_bias(*module.forward(x))
    bias = module.bias if module.use_bias else None
    if module.parallel_mode == "row":
        return _product(module.weight, bias, group)
    product = _product(module.weight, bias)
    if not hasattr(module, "layer_norm_weight"):
        return product
    weights = module.layer_norm_weight, module.layer_norm_bias
    norm = _normalization(module.normalization, *weights, module.eps, module.zero_centered_gamma)
    return lambda x: product(norm(x))


def _norm(module: Any) -> _Function:
    kind, bias = type(module).__name__, getattr(module, "bias", None)
    engine = type(module).__module__.startswith("transformer_engine.")
    if kind not in _ENGINE_NORMS or not engine:
        return module
    return _normalization(kind, module.weight, bias, module.eps, module.zero_centered_gamma)


def _normalization(
    kind: str, weight: Tensor, bias: Tensor | None, eps: float, one_added: bool
) -> _Function:
    """`weight` counts from 1 if `one_added`, in float32: in bf16 1 + weight would lose digits."""
    shape = weight.shape
    if one_added:
        weight, bias = weight.float() + 1, None if bias is None else bias.float()

    def normalized(x: Tensor) -> Tensor:
        wide = x.float() if one_added else x
        if kind == "RMSNorm":
            return F.rms_norm(wide, shape, weight, eps).to(x.dtype)
        return F.layer_norm(wide, shape, weight, bias, eps).to(x.dtype)

    return normalized


def _product(weight: Tensor, bias: Tensor | None, group: ProcessGroup | None = None) -> _Function:
    """`x @ weight.T + bias`, on a CPU from a copy of the weight that is read faster; `group`: the
    ranks among which the inputs are divided.
    """
    if group is not None and torch.distributed.get_world_size(group) > 1:
        product = _product(weight, None)

        def summed(x: Tensor) -> Tensor:
            part = product(x)
            torch.distributed.all_reduce(part, group=group)
            return _with_bias(part, bias)

        return summed
    if weight.device.type == "cpu":
        return packed_linear(weight, bias)
    return lambda x: F.linear(x, weight, bias)


def _with_bias(output: Tensor, bias: Tensor | None) -> Tensor:
    return output if bias is None else output + bias


def _mlp(module: Any, group: ProcessGroup) -> _Function:
    config = module.config
    activation = config.activation_func
    # A fused GELU is the tanh form, a fused SwiGLU the same function.
    fused = config.bias_activation_fusion and activation is not F.silu
    if fused or config.use_te_activation_func or not isinstance(module, MLP):
        return lambda x: _with_bias(*module(x))
    first, second = _linear(module.linear_fc1, group), _linear(module.linear_fc2, group)
    if not config.gated_linear_unit:
        return lambda x: second(activation(first(x)))

    def gated(x: Tensor) -> Tensor:
        gate, linear = first(x).chunk(2, dim=-1)
        if config.bias_activation_fusion:  # as the kernel of training rounds
            return second(activation(gate.float()).mul_(linear).to(x.dtype))
        return second(activation(gate).mul_(linear))

    return gated


class StepGraphs:
    """Runs steps, as graphs if `wanted`; the error of a capture is raised if they are `required`.
    An object lives only while the weights and the cache stay where they are.
    """

    def __init__(self, wanted: bool, required: bool) -> None:
        self._wanted, self._required = wanted, required
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if wanted else None

    def run(self, shape: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """What `step` returns, which the next step may overwrite. `shape` names all that is not
        read from tensors: its first step warms up, the second one is captured. `step` works in
        place on the same tensors each time and waits for nothing.
        """
        if not self._wanted:
            return step()
        if shape not in self._captured:
            self._captured[shape] = None
            return step()
        captured = self._captured[shape]
        if captured is None:
            try:
                captured = self._captured[shape] = self._capture(step)
            except RuntimeError as error:
                if self._required:
                    raise
                cause = error.__context__ or error
                logging.warning(f"decoding steps run eagerly, since a capture failed: {cause}")
                self._wanted = False
                return step()
        graph, output = captured
        graph.replay()
        return output

    def close(self) -> None:
        """Free the memory of the graphs, but for what cuBLAS keeps."""
        if any(self._captured.values()):
            self._captured.clear()
            torch.cuda.empty_cache()

    def _capture(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """As `torch.cuda.graph`, which would give all cached memory back before each capture."""
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads of the job may use the GPU meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                output = step()
            finally:
                graph.capture_end()
        return graph, output


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One of the process: cuBLAS keeps 34 MB for each stream that it has worked on."""
    return torch.cuda.Stream()
