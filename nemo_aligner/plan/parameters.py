# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How many weights a model has and one rank holds: exactly the tensors that Megatron Core builds.
Symbols: H hidden size, F width of the feed-forward layer, V rows of the embedding table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_aligner.config.parallel_rules import dtype_name, is_uneven, uneven_stages
from nemo_aligner.config.peft_rules import SPLIT_BY_ROWS, LoRASettings, trains_adapters
from nemo_aligner.config.values import Values

BF16, FP32 = 2, 4  # bytes of a number


@dataclass(frozen=True)
class Split:
    """Over how many ranks a job is spread; expert parallelism is among the DP x CP ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    vpp: int = 1  # chunks of layers per pipeline stage
    sequence_parallel: bool = False  # norms and residuals are split over TP ranks too

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True)
class Architecture:
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_size: int
    vocab_rows: int  # V, with padding
    positions: int = 0  # rows of a learned position embedding; 0 without one
    rotary: bool = True  # positions are rotated into queries and keys
    gated: bool = True  # the first feed-forward matrix is twice as wide
    swiglu: bool = True  # and it is SwiGLU
    bias: bool = False  # the linear layers have biases
    qkv_bias: bool = False  # that of queries, keys and values has one
    norms: int = 2  # of a layer
    qk_norm: bool = False  # queries and keys are normalized
    all_heads: bool = False  # by one norm for all heads
    layernorm: bool = False  # norms have a bias beside their scale
    capped_scores: bool = False  # attention scores are bounded, which no fused kernel does
    capped_logits: bool = False
    tied: bool = False  # the output layer is the embedding table
    experts: int = 0  # of a layer; 0: dense
    expert_ffn: int = 0  # F of an expert
    experts_per_token: int = 0  # that compute each token
    shared_ffn: int = 0  # F of the experts that compute every token; 0: none
    shared_gate: bool = False  # their output is weighted
    dense_layers: Sequence[int] = ()  # numbers of those without experts, in a model that has some
    number_bytes: int = BF16  # of a weight and an activation
    head_outputs: int = 0  # numbers that a reward model or critic gives; 0: a language model
    head_bytes: int = FP32  # of a weight of that head
    window: bool = False  # whether attention sees only a window, which takes an explicit mask
    dropout: bool = False  # whether activations are dropped in training
    stages: Sequence[int] = ()  # layers of each pipeline stage where they are uneven; empty: even
    lora: LoRASettings | None = None  # of adapters that are trained; None: all weights are

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.groups * self.head_size

    def layers_of(self, stage: int, pp: int) -> range:
        """The numbers of the layers of a pipeline stage."""
        counts = self.stages or [self.layers // pp] * pp
        return range(sum(counts[:stage]), sum(counts[: stage + 1]))

    def kinds_of(self, stage: int, pp: int) -> list[tuple["Architecture", int]]:
        """The layers of a pipeline stage by kind, dense or with experts: (all so, how many)."""
        layers = self.layers_of(stage, pp)
        dense = len(set(layers) & set(self.dense_layers))
        kinds = [(self, len(layers) - dense), (replace(self, experts=0, shared_ffn=0), dense)]
        return [(kind, count) for kind, count in kinds if count]

    def linear_layers(self) -> dict[str, tuple[int, int, int]]:
        """Linear layers of a layer that can have an adapter, by their names of `model.peft`:
        (numbers they read, numbers they give, projections that are fused in them).
        """
        gates = 1 + self.gated
        layers = {
            "attention_qkv": (self.hidden, self.queries + 2 * self.keys, 3),
            "attention_dense": (self.queries, self.hidden, 1),
        }
        if self.experts:  # these have no adapters
            return layers
        return layers | {
            "mlp_fc1": (self.hidden, self.ffn * gates, gates),
            "mlp_fc2": (self.ffn, self.hidden, 1),
        }

    def frozen(self, target: str) -> bool:
        """Whether a layer keeps its weight and has no adapter: what it reads is not kept."""
        return self.lora is not None and target not in self.lora.targets


@dataclass(frozen=True)
class Weights:
    """Numbers of weights on a rank, by their dtype and the ranks that share optimizer states."""

    dense: int  # all but the following
    expert: int = 0  # of experts
    head: int = 0  # of the head of a reward model or critic
    adapters: int | None = None  # of LoRA, without the head; None: all weights are trained
    merged: int = 0  # that hold the adapters while responses are generated

    @property
    def total(self) -> int:
        return self.dense + self.expert + self.head + (self.adapters or 0)

    @property
    def trained(self) -> "Weights":
        """Those that have gradients: all, or adapters and the head."""
        return self if self.adapters is None else Weights(self.adapters, head=self.head)


def read_architecture(
    model: Mapping[str, Any], vocab_rows: int, head_outputs: int = 0
) -> Architecture:
    """The sizes in a complete `model` section, with `vocab_rows`, V with padding, and the outputs
    of the job's head; 0: a language model.
    """
    v = Values({"model": model})
    hidden, heads = v.size("model.hidden_size"), v.size("model.num_attention_heads")
    experts = v.whole("model.num_moe_experts") or 0
    ffn = v.size("model.ffn_hidden_size")
    learned = model["position_embedding_type"] == "learned_absolute"
    number_bytes = FP32 if dtype_name(model["precision"]) == "float32" else BF16
    layers, pattern = v.size("model.num_layers"), (experts and model.get("moe_layer_freq")) or 1
    if isinstance(pattern, int):
        pattern = [layer % pattern == 0 for layer in range(layers)]
    dense_layers = (layer for layer, has_experts in enumerate(pattern) if not has_experts)
    narrow_head = str(model.get("force_head_dtype", "float32")).lower() in ("bf16", "bfloat16")
    return Architecture(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=v.whole("model.num_query_groups") or heads,
        head_size=v.whole("model.kv_channels") or hidden // heads,
        vocab_rows=vocab_rows,
        positions=v.size("model.max_position_embeddings") if learned else 0,
        rotary=model["position_embedding_type"] in ("rope", "yarn"),
        gated=str(model["activation"]).lower().endswith("glu"),
        swiglu=str(model["activation"]).lower().endswith("swiglu"),
        bias=bool(model["bias"]),
        qkv_bias=bool(model["bias"] or model["add_qkv_bias"]),
        norms={"before": 2 - bool(model["parallel_attention"]), "after": 2, "both": 4}[
            model["norm_position"]
        ],
        qk_norm=bool(model.get("qk_layernorm")),
        all_heads=bool(model["qk_layernorm_all_heads"]),
        layernorm=str(model["normalization"]).lower() != "rmsnorm" and model["layernorm_bias"],
        capped_scores=model["attn_logit_softcapping"] is not None,
        capped_logits=model["final_logit_softcapping"] is not None,
        tied=bool(model["share_embeddings_and_output_weights"]) and not head_outputs,
        experts=experts,
        expert_ffn=(v.whole("model.moe_ffn_hidden_size") or ffn) if experts else 0,
        experts_per_token=v.whole("model.moe_router_topk") or 0 if experts else 0,
        shared_ffn=(model.get("moe_shared_expert_intermediate_size") or 0) if experts else 0,
        shared_gate=bool(model.get("moe_shared_expert_gate")),
        dense_layers=tuple(dense_layers),
        number_bytes=number_bytes,
        head_outputs=head_outputs,
        # The head is never narrower than the model.
        head_bytes=max(number_bytes, BF16 if narrow_head else FP32),
        window=model.get("window_size") is not None,
        dropout=bool(model["hidden_dropout"] or model["attention_dropout"]),
        stages=tuple(uneven_stages(v)) if is_uneven(v) else (),
        lora=LoRASettings.from_config(model["peft"]["lora_tuning"])
        if trains_adapters({"model": model})
        else None,
    )


def count_layer(a: Architecture, tp: int = 1, ep: int = 1) -> Weights:
    qkv_width, proj_width = (a.queries + 2 * a.keys) // tp, a.queries // tp
    qkv = a.hidden * qkv_width + (qkv_width if a.qkv_bias else 0)
    # The bias after a matrix that is split along its input exists once, on every rank.
    proj = proj_width * a.hidden + (a.hidden if a.bias else 0)
    attention = a.norms * a.hidden * (1 + a.layernorm) + qkv + proj
    if a.qk_norm:  # one for the queries and one for the keys
        widths = a.queries + a.keys if a.all_heads else 2 * a.head_size
        attention += widths * (1 + a.layernorm)
    if a.experts:
        router = (a.hidden + a.bias) * a.experts
        expert = _feed_forward(a, a.expert_ffn // tp)
        shared = _feed_forward(a, a.shared_ffn // tp) if a.shared_ffn else 0
        shared += a.hidden if a.shared_gate else 0
        return Weights(attention + router + shared, expert * (a.experts // ep))
    return Weights(attention + _feed_forward(a, a.ffn // tp))


def count_adapters(a: Architecture, split: Split, stage: int = 0) -> tuple[int | None, int]:
    """Weights of the adapters on a rank of a stage (None: none), and that hold merged ones."""
    if a.lora is None:
        return None, 0
    own = merged = 0
    for target, (inputs, outputs, projections) in a.linear_layers().items():
        if a.frozen(target):
            continue
        blocks = projections if a.lora.variant == "canonical" else 1
        by_rows = target in SPLIT_BY_ROWS  # then A is whole on each rank, else B is
        own += a.lora.dim * blocks * inputs // (1 if by_rows else split.tp)
        own += a.lora.dim * outputs // (split.tp if by_rows else 1)
        merged += inputs * outputs // split.tp
    layers = [layer + 1 for layer in a.layers_of(stage, split.pp)]
    chosen = len(layers if a.lora.layers is None else set(layers) & set(a.lora.layers))
    return own * (min(chosen, 1) if a.lora.weight_tying else chosen), merged * chosen


ONE_RANK = Split()


def count_weights(a: Architecture, split: Split = ONE_RANK, stage: int = 0) -> Weights:
    layers = [
        (count_layer(kind, split.tp, split.ep), count)
        for kind, count in a.kinds_of(stage, split.pp)
    ]
    table = a.vocab_rows // split.tp * a.hidden
    dense = sum(count * layer.dense for layer, count in layers)
    expert = sum(count * layer.expert for layer, count in layers)
    head = 0
    if stage == 0:
        dense += table + a.positions * a.hidden
    if stage == split.pp - 1:
        dense += a.hidden * (1 + a.layernorm)
        if a.head_outputs:
            head = (a.hidden // split.tp + 1) * a.head_outputs
        elif not a.tied or stage > 0:  # a tied table has a copy where the output is
            dense += table
    return Weights(dense, expert, head, *count_adapters(a, split, stage))


def _feed_forward(a: Architecture, width: int) -> int:
    """Weights of two matrices with `width` numbers between them."""
    first = width * (1 + a.gated)
    biases = first + a.hidden if a.bias else 0
    return a.hidden * first + width * a.hidden + biases
