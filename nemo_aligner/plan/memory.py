# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank needs in each phase of a job.

What stands all the time follows Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 3.1), for
the optimizer of `training/optim.py`. Activations follow Korthikanti et al. 2022 (arXiv:2205.05198,
section 4), but count the tensors that autograd keeps for the layers as they are built here.
docs/parallelism.md says what is left out, and how the figures were checked.

Symbols: n tokens of a micro-batch on a rank, H hidden size, F width of the feed-forward layer, V
rows of the embedding table, e bytes of a number.
"""

from dataclasses import dataclass, replace

from nemo_aligner.plan.parameters import BF16, FP32, Architecture, Split, Weights, count_weights

Parts = dict[str, float]  # name of a kind of memory -> bytes

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, CACHE, TEMPORARY = "activations", "logits", "KV cache", "temporary"
MERGED, PACKED, GATHERED = "merged adapters", "packed weights", "weights of other stages"
PARTS = (
    *(WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS),
    *(CACHE, MERGED, PACKED, GATHERED, TEMPORARY),
)

# Elements of a working buffer of the log-probs (parallel/vocab_parallel.py), and how many exist
# at once: with the entropy, and of fp32 or bf16 logits without it (benchmarks/README.md).
CHUNK_ELEMENTS, CHUNK_ELEMENTS_GPU = 1 << 18, 1 << 24
CHUNKS_WITH_ENTROPY, CHUNKS, CHUNKS_BF16 = 4, 2, 3
# Bytes per id while a token is drawn: logits, fp32 copy, fp32 and fp64 probabilities, fp64 sums.
SAMPLING_BYTES = FP32 + FP32 + 8 + 8
GRAPHS = 96 << 20  # bytes that cuBLAS works in while a graph of a step runs, as measured
PREFILL_TOKENS = 4096  # most tokens of one pass over prompts (generation/engine.py)


def sum_of(parts: Parts) -> float:
    return sum(parts.values())


@dataclass(frozen=True)
class Workload:
    """What a job computes at once."""

    trains: bool = True  # it has gradients and an optimizer
    width: int = 4096  # longest sample in tokens
    samples: int = 1  # of a micro-batch in training
    micro_batches: int = 1  # of an update, per rank
    forward_samples: int = 0  # of a forward pass without gradient; 0: there is none
    unit: int = 1  # samples that the key of a forward pass counts as one
    by_tokens: bool = False  # `model.dynamic_micro_batch_tokens` gives both numbers of samples
    rollout_samples: int = 0  # that generate together; 0: the job does not generate
    cache_memory: float = 0  # bytes of a rank that decide their number instead; 0: they do not
    response: int = 0  # most tokens that are generated
    merges: bool = False  # adapters are merged into a copy of their weights meanwhile
    graphs: bool = False  # steps may be CUDA graphs: what one computes keeps its memory
    generation: tuple[int, int] | None = None  # tp and pp meanwhile; None: those of training
    reference: bool = False  # weights in host memory, unless adapters are trained
    swaps: bool = False  # so are those of a reward model, which takes turns with the critic
    offloads: bool = False  # Adam's states are in host memory while the job does not train
    recompute: str | None = None  # None, "selective" or "full"
    recompute_layers: int = 1  # that are recomputed together (uniform), or of each stage (block)
    block: bool = False  # `recompute_layers` has the second meaning
    distributed_optimizer: bool = True  # optimizer states are spread over the data-parallel ranks
    state_bytes: int = 8  # of a weight in the optimizer, beside the fp32 copy of a bf16 weight
    on_gpu: bool = True  # layers and attention are Transformer Engine's


@dataclass(frozen=True)
class RankMemory:
    """What one rank needs."""

    phases: dict[str, Parts]  # name of a phase -> kind of memory -> bytes on the device
    host: Parts  # kind -> bytes in host memory
    stage: int  # pipeline stage of the rank

    @property
    def peak(self) -> float:
        return max(map(sum_of, self.phases.values()))

    @property
    def tightest(self) -> str:
        return max(self.phases, key=lambda name: sum_of(self.phases[name]))


# --- what stands all the time --------------------------------------------------------------------


def weight_bytes(a: Architecture, weights: Weights) -> float:
    """Of the weights on a rank; the head of a reward model has its own dtype."""
    numbers = weights.dense + weights.expert + (weights.adapters or 0)
    return numbers * a.number_bytes + weights.head * a.head_bytes


def optimizer_bytes(
    a: Architecture, weights: Weights, split: Split, w: Workload, copies: bool = True
) -> float:
    """Of Adam's two moments, and with `copies` of the fp32 copy of a bf16 weight; each rank holds
    a share. Experts have fewer replicas than other weights, so their shares are larger.
    """
    replicas = split.dp * split.cp if w.distributed_optimizer else 1
    own, head = (
        w.state_bytes + (FP32 if copies and size == BF16 else 0)
        for size in (a.number_bytes, a.head_bytes)
    )
    trained = weights.trained
    shared = trained.dense * own + trained.head * head
    return shared / replicas + trained.expert * own / max(replicas // split.ep, 1)


# --- one layer -----------------------------------------------------------------------------------


def norm_bytes(a: Architecture, on_gpu: bool) -> float:
    """Per token and unit of H; PyTorch's RMSNorm in bf16 also keeps fp32 copies."""
    if on_gpu or a.layernorm or a.number_bytes == FP32:
        return 2 * a.number_bytes
    return (FP32 if a.lora else 2 * FP32) + a.number_bytes


def attention_bytes(a: Architecture, split: Split, w: Workload) -> float:
    """What the attention of a layer keeps, beside the input of its first matrix."""
    e, queries, keys = a.number_bytes, a.queries / split.tp, a.keys / split.tp
    positions = w.width / split.cp
    tokens = w.samples * positions
    total = e * tokens * (2 * queries + 2 * keys)
    if a.rotary:
        total += e * tokens * (queries + keys) + 4 * e * positions * a.head_size
    elif a.groups < a.heads:  # queries of several groups are copied to lie together
        total += e * tokens * queries
    if a.qk_norm:
        total += (norm_bytes(a, w.on_gpu) - e) * tokens * (queries + keys)
    heads = a.heads / split.tp
    total += FP32 * tokens * heads
    if a.capped_scores:  # of each head: the tanh, the weights, and those in the model's dtype
        total += (2 * FP32 + e * (e != FP32)) * tokens * heads * w.width
    if w.on_gpu:
        return total
    if split.cp > 1:  # keys and values of the whole sequence take the place of the rank's own
        own = 2 * keys + (queries + keys if a.rotary else 0)
        total += e * tokens * (2 * keys * split.cp - own + (queries if a.rotary else 0))
    if a.dropout:
        total += 3 * FP32 * heads * tokens * w.width
    elif a.window or split.cp > 1:
        total += e * positions * w.width  # the mask
    return total


def adapter_bytes(a: Architecture, split: Split, tokens: float, residual: float) -> float:
    """What adapters keep, less what frozen layers do not, where nothing else keeps it."""
    if a.lora is None:
        return 0.0
    total = 0.0
    for target, (_, _, projections) in a.linear_layers().items():
        blocks = projections if a.lora.variant == "canonical" else 1
        if not a.frozen(target):
            total += tokens * a.lora.dim * blocks
    total -= residual * a.hidden * (a.frozen("attention_qkv") + a.frozen("mlp_fc1"))
    if not a.experts and a.frozen("mlp_fc2"):
        total -= tokens * a.ffn / split.tp
    return a.number_bytes * total


def gate_numbers(a: Architecture, on_gpu: bool, training: bool) -> int:
    """Numbers per unit of a dense feed-forward layer: the first product, what becomes of it."""
    if not a.gated:
        return 2
    # With experts anywhere in the model nothing is fused on a GPU.
    if not a.swiglu or (on_gpu and a.expert_ffn):
        return 5
    return 4 if training and not on_gpu else 3


def feed_forward_bytes(a: Architecture, split: Split, tokens: float, on_gpu: bool) -> float:
    """Beside its input."""
    e = a.number_bytes
    if not a.experts:
        return e * tokens * gate_numbers(a, on_gpu, training=True) * a.ffn / split.tp
    copies = a.experts_per_token * tokens  # each token, once per expert that computes it
    kept = (6 if a.gated else 3) * a.expert_ffn / split.tp
    router = (FP32 if e == BF16 else 0) * tokens * a.hidden
    shared = (5 if a.gated else 2) * a.shared_ffn / split.tp
    shared += a.hidden if a.shared_gate else 0  # their output, before it is weighted
    return router + copies * e * (kept + a.hidden) + tokens * e * shared


def layer_bytes(a: Architecture, split: Split, w: Workload) -> float:
    """Of a micro-batch, for its backward pass."""
    tokens = w.samples * w.width / split.cp
    residual = tokens / (split.tp if split.sequence_parallel else 1)
    total = a.norms * norm_bytes(a, w.on_gpu) * residual * a.hidden
    total += attention_bytes(a, split, w)
    total += feed_forward_bytes(a, split, tokens, w.on_gpu)
    total += adapter_bytes(a, split, tokens, residual)
    if a.dropout:
        total += 2 * (1 if w.on_gpu else a.number_bytes) * residual * a.hidden
    return total


def kept_bytes(a: Architecture, split: Split, stage: int, w: Workload) -> tuple[float, float]:
    """What the layers of a stage keep of one micro-batch, and what recomputation adds backward."""
    kinds = [(layer_bytes(kind, split, w), count) for kind, count in a.kinds_of(stage, split.pp)]
    layers = len(a.layers_of(stage, split.pp))
    total = sum(count * layer for layer, count in kinds)
    if w.recompute != "full":
        return total, 0.0
    largest = max(layer for layer, _ in kinds)
    residual = w.samples * w.width / split.cp * a.hidden * a.number_bytes
    residual /= split.tp if split.sequence_parallel else 1
    together = min(w.recompute_layers, layers)
    if w.block:
        return together * residual + (layers - together) / layers * total, largest
    return layers / together * residual, together * largest


def layer_temporary(a: Architecture, split: Split, tokens: float) -> float:
    """Gradients that exist at once: of the feed-forward layer's output and the factors of a
    product.
    """
    e = a.number_bytes
    wide, copies = a.ffn / split.tp, 1.0
    if a.experts:  # one expert after another
        wide = a.expert_ffn / split.tp
        copies = a.experts_per_token / a.experts * split.ep
    gradient = e * copies * tokens * wide
    matrix = e * wide * a.hidden if a.lora is None else 0.0
    both = max(2 * gradient, gradient + matrix) if a.gated else gradient + matrix
    return e * tokens * a.hidden + both


# --- logits --------------------------------------------------------------------------------------


def logits_bytes(
    a: Architecture, split: Split, samples: int, w: Workload, training: bool
) -> tuple[float, float, float]:
    """Of this rank's slice of the logits of `samples`; while they are copied; and of the fp32
    buffers of the log-probs, which never hold all logits at once.
    """
    numbers = samples * w.width / split.cp * a.vocab_rows / split.tp
    logits = numbers * a.number_bytes * (1 + (training and a.capped_logits))
    # With sequence parallelism Megatron Core copies logits of several samples to [B, S, V].
    copies = 2 if split.sequence_parallel and samples > 1 else 1
    count = CHUNKS_BF16 if a.number_bytes == BF16 else CHUNKS
    count = CHUNKS_WITH_ENTROPY if training else count
    most = CHUNK_ELEMENTS_GPU if w.on_gpu else CHUNK_ELEMENTS
    return logits, copies * logits, count * FP32 * min(numbers, most)


def output_bytes(a: Architecture, split: Split, w: Workload) -> list[Parts]:
    """The moments between forward and backward pass, on the last stage, that may need most."""
    e = a.number_bytes
    tokens = w.samples * w.width / split.cp
    residual = tokens / (split.tp if split.sequence_parallel else 1)
    norm = norm_bytes(a, w.on_gpu) * residual * a.hidden
    if a.head_outputs:  # it computes in its own dtype
        return [{ACTIVATIONS: norm, TEMPORARY: 2 * (a.head_bytes * tokens * a.hidden)}]
    logits, copied, chunks = logits_bytes(a, split, w.samples, w, training=True)
    matrix = e * a.vocab_rows / split.tp * a.hidden if a.lora is None else 0.0
    return [
        {ACTIVATIONS: norm, LOGITS: logits, TEMPORARY: chunks},
        {ACTIVATIONS: norm, LOGITS: copied, TEMPORARY: e * tokens * a.hidden + matrix},
    ]


# --- phases --------------------------------------------------------------------------------------


def in_flight(split: Split, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage keeps (1F1B: Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2).
    """
    if split.vpp > 1:
        chunks = 2 * (split.pp - stage - 1) + (split.vpp - 1) * split.pp + 1
        return min(chunks / split.vpp, micro_batches)
    return min(split.pp - stage, micro_batches)


def update_parts(a: Architecture, split: Split, stage: int, w: Workload) -> Parts:
    """Beside weights, gradients and optimizer, the most that one update needs."""
    weights = count_weights(a, split, stage)
    kept, again = kept_bytes(a, split, stage, w)
    flights = in_flight(split, stage, w.micro_batches)
    tokens = w.samples * w.width / split.cp
    kinds = a.kinds_of(stage, split.pp)
    temporary = max(layer_temporary(kind, split, tokens) for kind, _ in kinds)
    moments = [{ACTIVATIONS: flights * kept + again, TEMPORARY: temporary}]
    if stage == split.pp - 1:
        ends = output_bytes(a, split, w)
        moments += [end | {ACTIVATIONS: flights * kept + end[ACTIVATIONS]} for end in ends]
    if stage == 0 and a.lora is None:  # at the end the gradient of the embedding table
        table = a.vocab_rows / split.tp * a.hidden * a.number_bytes
        moments.append({ACTIVATIONS: (flights - 1) * kept, TEMPORARY: table})
    if not w.on_gpu and w.distributed_optimizer and split.dp * split.cp > 1:
        # Gloo copies the gradients that it reduces and scatters.
        moments.append({TEMPORARY: FP32 * weights.trained.total})
    return max(moments, key=sum_of)


def forward_bytes(a: Architecture, split: Split, tokens: float, on_gpu: bool) -> float:
    """What a layer needs at once in a pass without gradient."""
    e, kept = a.number_bytes, 5 if a.gated else 2
    if not a.experts:
        kept = gate_numbers(a, on_gpu, training=False)
        return e * tokens * (kept * a.ffn / split.tp + 4 * a.hidden)
    rows = a.experts_per_token * tokens
    # One expert after another; with EP each has the tokens of all ranks of its group.
    wide = (kept + 1) * a.expert_ffn / split.tp * rows / a.experts * split.ep
    wide = max(wide, kept * a.shared_ffn / split.tp * tokens)
    # Copies of tokens on their way to the experts and back.
    moved = (4.5 if split.ep == 1 else 9.5) * rows * a.hidden
    return e * (wide + 4 * tokens * a.hidden + moved)


def scoring_parts(a: Architecture, split: Split, stage: int, w: Workload) -> Parts:
    """For log-probs, values or rewards."""
    tokens = w.forward_samples * w.width / split.cp
    kinds = a.kinds_of(stage, split.pp)
    layers = max(forward_bytes(kind, split, tokens, w.on_gpu) for kind, _ in kinds)
    moments: list[Parts] = [{ACTIVATIONS: layers}]
    if stage == split.pp - 1 and a.head_outputs:
        moments.append({ACTIVATIONS: (2 * a.number_bytes + a.head_bytes) * tokens * a.hidden})
    elif stage == split.pp - 1:
        logits, copied, chunks = logits_bytes(a, split, w.forward_samples, w, training=False)
        hidden = 2 * a.number_bytes * tokens * a.hidden
        moments.append({ACTIVATIONS: hidden, LOGITS: copied})
        moments.append({LOGITS: logits, TEMPORARY: chunks})
    return max(moments, key=sum_of)


def cache_bytes(a: Architecture, split: Split, stage: int, w: Workload) -> float:
    """Of keys and values of all positions; context-parallel ranks divide the samples."""
    samples = -(-w.rollout_samples // split.cp)
    per_layer = 2 * a.keys / split.tp * a.number_bytes * samples * w.width
    return len(a.layers_of(stage, split.pp)) * per_layer


def generation_parts(a: Architecture, split: Split, stage: int, w: Workload) -> Parts:
    """The cache, and a pass over prompts (whole on context-parallel ranks) or a token's choice."""
    weights = count_weights(a, split, stage)
    parts: Parts = {}
    if w.merges:
        parts[MERGED] = weights.merged * a.number_bytes
    tp, pp = w.generation or (split.tp, split.pp)
    if (tp, pp) != (split.tp, split.pp):
        # Copies divide the samples of a policy, or one copy has those of several.
        w = replace(w, rollout_samples=-(-w.rollout_samples * tp * pp // (split.tp * split.pp)))
        stays, own = (tp, pp) == (split.tp, 1), weights
        split, stage = replace(split, tp=tp, pp=pp), pp - 1
        weights = count_weights(a, split, stage)
        moved = weights.dense + weights.expert
        if stays:  # what the stage has itself
            moved -= own.dense + own.expert
        parts[GATHERED] = moved * a.number_bytes
    if w.cache_memory:
        one = cache_bytes(a, split, stage, replace(w, rollout_samples=1))
        w = replace(w, rollout_samples=max(1, int(w.cache_memory // one)) * split.cp)
    if not w.on_gpu:  # on most CPUs (parallel/device.py)
        own_table = stage == 0 and not (a.tied and split.pp == 1)  # none that is multiplied by
        table = a.vocab_rows // split.tp * a.hidden * own_table
        parts[PACKED] = (weights.dense - table) * a.number_bytes
    samples = -(-w.rollout_samples // split.cp)
    tokens = min(samples * max(w.width - w.response, 1), PREFILL_TOKENS)
    alone = replace(split, cp=1, sequence_parallel=False)
    kinds = a.kinds_of(stage, split.pp)
    layers = max(forward_bytes(kind, alone, tokens, w.on_gpu) for kind, _ in kinds)
    moments: list[Parts] = [{ACTIVATIONS: layers}]
    if stage == split.pp - 1:
        moments.append({LOGITS: samples * a.vocab_rows * (a.number_bytes + SAMPLING_BYTES)})
    most = max(moments, key=sum_of)
    if w.graphs and w.on_gpu and split.tp * split.pp == 1 and not a.experts:
        most = {**moments[0], **moments[1], TEMPORARY: GRAPHS}
    return {CACHE: cache_bytes(a, split, stage, w), **most, **parts}


def rank_memory(a: Architecture, split: Split, stage: int, w: Workload) -> RankMemory:
    weights = count_weights(a, split, stage)
    standing: Parts = {WEIGHTS: weight_bytes(a, weights)}
    if w.trains:
        standing[GRADIENTS] = FP32 * weights.trained.total
        standing[OPTIMIZER] = optimizer_bytes(a, weights, split, w)
    resting, host = dict(standing), Parts()
    trained = weight_bytes(a, weights.trained)
    if w.reference and a.lora is None:
        host["reference policy"] = host["policy while the reference computes"] = trained
    if w.swaps:
        host["reward model"] = host["critic while the reward model computes"] = trained
    if w.trains and w.offloads and w.on_gpu:
        moments = optimizer_bytes(a, weights, split, w, copies=False)
        host["Adam's states while not training"] = moments
        resting[OPTIMIZER] -= moments
    phases: dict[str, Parts] = {}
    if w.rollout_samples:
        phases["generation"] = resting | generation_parts(a, split, stage, w)
    if w.forward_samples:
        name = "scores" if a.head_outputs else "log-probs"
        phases[name] = resting | scoring_parts(a, split, stage, w)
    if w.trains:
        phases["update"] = standing | update_parts(a, split, stage, w)
    return RankMemory(phases, host, stage)


def job_memory(a: Architecture, split: Split, w: Workload) -> RankMemory:
    """Of the rank that needs most. Ranks of one stage need the same."""
    stages = (rank_memory(a, split, stage, w) for stage in range(split.pp))
    return max(stages, key=lambda memory: memory.peak)
