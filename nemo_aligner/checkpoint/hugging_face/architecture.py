# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the table of an architecture declares: the keys of a model and the names of its weights, in
both directions. `model_keys` and `hugging_face_config` refuse by name what the other side cannot
express.

A tensor of Megatron Core is a sequence of *runs*: consecutive rows (first dimension) of a tensor
of Hugging Face. They serve reading, in parts for the ranks of a split, and writing.

Names are templates with `{layer}` and, of experts, `{expert}`; they end in a dot or in the name's
last word, to which `weight` or `bias` is added.
"""

import collections
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nemo_aligner.checkpoint import stored_weights
from nemo_aligner.checkpoint.stored_weights import Heads
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.schema import ARCHITECTURE_KEYS
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError


@dataclass(frozen=True)
class Run:
    """`count` rows of the tensor `name` from row `start` on."""

    name: str
    start: int
    count: int


class Rule:
    """How tensors of Hugging Face of equal size, such as an MLP's gate and its partner, make one
    of Megatron Core, in this order.

    Args:
        names: of the tensors of Hugging Face.
        transposed: whether Hugging Face stores the matrices transposed (GPT-2 does).
    """

    def __init__(self, *names: str, transposed: bool = False):
        self.names, self.transposed = names, transposed

    def runs(self, rows: int, heads: Heads) -> list[Run]:
        """The runs of a tensor of Megatron Core with `rows` rows, in its order."""
        share = rows // len(self.names)
        return [Run(name, 0, share) for name in self.names]

    def shapes(self, shape: tuple[int, ...], heads: Heads) -> dict[str, tuple[int, ...]]:
        """Shapes of Hugging Face's tensors, by name, that make one of `shape`."""
        rows: collections.Counter[str] = collections.Counter()
        for run in self.runs(shape[0], heads):
            rows[run.name] += run.count
        step = -1 if self.transposed else 1
        return {name: (count, *shape[1:])[::step] for name, count in rows.items()}


class Attention(Rule):
    """Megatron Core stores each query group's queries, then its key head, then its value head;
    Hugging Face has three tensors, or one with all queries, all keys and all values.
    """

    def runs(self, rows: int, heads: Heads) -> list[Run]:
        query, key = heads.queries * heads.size, heads.size
        names, starts = self.names, [0, 0, 0]
        if len(names) == 1:
            names *= 3
            starts = [0, heads.groups * query, heads.groups * (query + key)]
        return [
            Run(name, start + group * width, width)
            for group in range(heads.groups)
            for name, start, width in zip(names, starts, (query, key, key), strict=True)
        ]


def spread(runs: Sequence[Run], values: Tensor, into: Mapping[str, Tensor]) -> None:
    """Write the rows of a tensor of Megatron Core into those of Hugging Face, by their names."""
    for run, theirs, own in within(runs, slice(0, len(values))):
        into[run.name][theirs] = values[own]


def within(runs: Sequence[Run], rows: slice) -> Iterator[tuple[Run, slice, slice]]:
    """The runs with some of `rows`, their place in Hugging Face's tensor, and among `rows`."""
    first = 0
    for run in runs:
        start, stop = max(rows.start, first), min(rows.stop, first + run.count)
        if start < stop:
            shift = run.start - first
            own = slice(start - rows.start, stop - rows.start)
            yield run, slice(start + shift, stop + shift), own
        first += run.count


# What a model is for; the endings of most names of its classes.
CAUSAL_LM, PER_SAMPLE, PER_TOKEN = (
    "ForCausalLM",
    "ForSequenceClassification",
    "ForTokenClassification",
)
# Keys of `config.json` that do not change what is computed in evaluation.
NO_INFLUENCE = frozenset(
    """transformers_version architectures output_hidden_states output_attentions return_dict dtype
    torch_dtype chunk_size_feed_forward is_encoder_decoder id2label label2id num_labels
    problem_type use_cache initializer_range pad_token_id bos_token_id eos_token_id _name_or_path
    model_type attention_dropout output_router_logits router_aux_loss_coef router_jitter_noise
    pretraining_tp _attn_implementation attn_implementation""".split()
)
# Keys of how a model is drawn, regularized, read or trained, and of heads, compared elsewhere.
NOT_COMPARED = frozenset(
    """make_vocab_size_divisible_by override_vocab_size init_method_std use_scaled_init_method
    hidden_dropout attention_dropout moe_router_load_balancing_type reward_model_type use_avg_pool
    encoder_seq_length qkv_bias bias_activation_fusion openai_gelu pad_token_id""".split()
)
_ROPE_KEYS = tuple(
    """rotary_percentage rotary_interleaved seq_len_interpolation_factor scale_positional_embedding
    scale_factor""".split()
)


class Unsupported(UserError):
    """A value of a configuration that the other side cannot express."""


@dataclass(frozen=True)
class Part:
    """One aspect of a configuration in both directions."""

    reads: Sequence[str]  # keys of `config.json` that `keys` reads
    # `config.json` -> keys of `model`; raises `Unsupported`
    keys: Callable[[Mapping[str, Any]], dict[str, Any]]
    config: Callable[[Mapping[str, Any]], dict[str, Any]]  # complete keys -> `config.json`


@dataclass(frozen=True)
class Architecture:
    model_type: str  # `model_type` of `config.json`
    same: Mapping[str, str]  # keys of `config.json` -> keys of `model` with the same value
    always: Mapping[str, Any]  # keys of `model` that every model of the architecture has
    # names of the weights:
    base: str  # prefix of all but those of the heads; a folder of the base model lacks it
    # how tensors of Megatron Core outside the layers are made; "/": of a head, not below `base`
    outside: Mapping[str, Rule]
    layer: Mapping[str, Rule]  # the same within a layer, for names after `decoder.layers.`
    layers: str = "layers.{layer}."  # where Hugging Face has the tensors of a layer, after `base`
    token_head: str = "/score."  # of the head of a critic, in the place of `rm_head.` in `outside`
    # keys of `config.json` -> accepted values -> the keys of `model` that each means
    choices: Mapping[str, Mapping[Any, Mapping[str, Any]]] = field(default_factory=dict)
    parts: Sequence[Part] = ()  # positions, windows and what else takes more than a table
    implied: Sequence[str] = ()  # keys of `config.json` that follow from others

    def class_for(self, role: str) -> str:
        """The name of a class; `Unsupported`: the installed transformers has none."""
        from transformers.models.auto import modeling_auto

        names = {
            CAUSAL_LM: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            PER_SAMPLE: modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
            PER_TOKEN: modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        }[role]
        if self.model_type not in names:
            raise Unsupported(
                f"transformers has no class {role} of {self.model_type} that a folder could name."
            )
        return names[self.model_type]


def model_keys(
    architecture: Architecture, config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Keys of the section `model` for a complete `config.json`; keys that are not known here must
    have their value of `defaults`. `Unsupported`: a value cannot be expressed or is not known.
    """
    keys = dict(architecture.always)
    for name, key in architecture.same.items():
        if config.get(name) is not None:
            keys[key] = config[name]
    for name, values in architecture.choices.items():
        value = config.get(name)
        if value not in values:
            accepted = ", ".join(str(value) for value in values)
            raise Unsupported(
                f"{name}={value!r} of {architecture.model_type} is not supported; what is: "
                f"{accepted}."
            )
        keys |= values[value]
    for part in architecture.parts:
        keys |= part.keys(config)
    read = keys_read(architecture) | {*architecture.implied, *NO_INFLUENCE}
    for name, default in defaults.items():
        if name not in read and config.get(name) != default:
            raise Unsupported(
                f"{name}={config.get(name)!r} of {architecture.model_type} is not known here and "
                f"differs from its default {default!r}; the model may compute something else."
            )
    return keys


def keys_read(architecture: Architecture) -> set[str]:
    """The keys of `config.json` that say what a model computes."""
    parts = {name for part in architecture.parts for name in part.reads}
    return {*architecture.same, *architecture.choices, *parts}


def hugging_face_config(architecture: Architecture, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `config.json` for a model; `Unsupported`: names every key that would change."""
    wanted = computed(keys)
    # Always: a class may have another default than hidden_size / heads.
    sized = {**keys, "kv_channels": int(wanted["kv_channels"])}
    config: dict[str, Any] = {"model_type": architecture.model_type}
    for name, key in architecture.same.items():
        if sized.get(key) is not None:
            config[name] = sized[key]
    for name, values in architecture.choices.items():
        config[name] = next(
            (value for value in values if computed({**keys, **values[value]}) == wanted),
            next(iter(values)),
        )
    for part in architecture.parts:
        config |= part.config(keys)
    again = computed(model_keys(architecture, as_class_reads(config), {}))
    changed = sorted(key for key in {**wanted, **again} if wanted.get(key) != again.get(key))
    if changed:
        raise Unsupported(
            f"{architecture.model_type} cannot express "
            + ", ".join(f"model.{key}={wanted.get(key)!r}" for key in changed)
            + "."
        )
    return config


def as_class_reads(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` with the defaults of its class; `Unsupported`: the class refuses it."""
    from transformers import AutoConfig  # takes a second to import

    kind = config["model_type"]
    try:
        whole = type(AutoConfig.for_model(kind)).from_dict(copy.deepcopy(dict(config))).to_dict()
    except Exception as error:  # whatever the checks of that class raise
        raise Unsupported(f"transformers refuses the configuration of {kind}: {error}") from error
    return {**config, **whole}


def computed(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say what a model computes, in one spelling each."""
    values = plain_dict(complete_model(dict(keys)))
    result = {
        key: values[key]
        for key in ARCHITECTURE_KEYS
        if key in values and key not in NOT_COMPARED and not key.endswith("_parallel_size")
    }
    hidden, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
    result["kv_channels"] = int(values["kv_channels"] or hidden // heads)
    result["add_qkv_bias"] = bool(values["bias"] or values["add_qkv_bias"])
    result["normalization"] = str(values["normalization"]).lower()
    if result["normalization"] == "layernorm1p":
        result |= {"normalization": "layernorm", "layernorm_zero_centered_gamma": True}
    if result["normalization"] == "rmsnorm":
        result["layernorm_bias"] = None
    name = str(values["activation"]).lower().removeprefix("fast-")
    tanh = values["openai_gelu"] or values["bias_activation_fusion"]
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        name = "gelu-tanh"
    elif name in ("gelu", "geglu") and tanh:  # without the error function
        name += "-tanh"
    result["activation"] = name
    kind = values["position_embedding_type"]
    for key in result:
        if (key in _ROPE_KEYS and kind != "rope") or (key.startswith("yarn_") and kind != "yarn"):
            result[key] = None
    if kind in ("rope", "yarn"):
        result["rotary_base"] = float(values["rotary_base"])
        if not values["scale_positional_embedding"]:
            result["scale_factor"] = None
    if kind != "learned_absolute":
        result["max_position_embeddings"] = None
    if result["query_pre_attn_scalar"] is None:
        result["query_pre_attn_scalar"] = float(result["kv_channels"])
    result["no_rope_freq"] = layers_without_rotation(values)
    result["window_attn_skip_freq"] = windows = windowed_layers(values)
    result["window_size"] = values["window_size"] if windows else None
    if not any(windows):
        result["rotary_base_local"] = None
    if not values["num_moe_experts"]:
        result |= {key: None for key in result if key.startswith("moe_")}
    else:
        result["moe_layer_freq"] = expert_layers(values)
        if all(result["moe_layer_freq"]):
            result["ffn_hidden_size"] = None
    return result


def windowed_layers(keys: Mapping[str, Any]) -> list[int]:
    """For each layer 1 if its attention has a window, else 0; empty if none has."""
    window, freq = keys.get("window_size"), keys.get("window_attn_skip_freq")
    if window is None or list(window) == [-1, -1]:
        return []
    layers = int(keys["num_layers"])
    if isinstance(freq, int):  # as Megatron Core counts: each layer with this number has none
        return [int((layer + 1) % freq != 0) for layer in range(layers)]
    return [1] * layers if freq is None else list(freq)


def layers_without_rotation(keys: Mapping[str, Any]) -> list[int]:
    """For each layer 1 if it leaves out the rotation, else 0; empty if none does."""
    freq, layers = keys.get("no_rope_freq"), int(keys["num_layers"])
    if isinstance(freq, int):
        return [int((layer + 1) % freq == 0) for layer in range(layers)]
    return list(freq) if freq and any(freq) else []


def expert_layers(keys: Mapping[str, Any]) -> list[int]:
    """For each layer 1 if it has experts, else 0."""
    freq, layers = keys["moe_layer_freq"], int(keys["num_layers"])
    if isinstance(freq, int):
        return [int(layer % freq == 0) for layer in range(layers)]
    return list(freq)


PREFIX = "model."  # of all names in a sharded state dict
HEAD = "rm_head."
HEAD_KEY = PREFIX + HEAD
# Padded to a split's vocabulary; the second may be tied to the first.
TABLES = ("model.embedding.word_embeddings.weight", "model.output_layer.weight")
KINDS = ("weight", "bias")


class Layout:
    """The names of the weights of a model with the section `keys`, in both forms."""

    def __init__(self, architecture: Architecture, keys: Mapping[str, Any]):
        self.architecture = architecture
        self.outside = dict(architecture.outside)
        if keys.get("output_sequence"):
            self.outside[HEAD] = Rule(architecture.token_head)
        self.heads = stored_weights.heads_of(keys)
        self.layers = int(keys["num_layers"])
        self.experts = int(keys.get("num_moe_experts") or 0)
        self.keys = keys
        # By names but for `weight` or `bias`.
        self.rules = {PREFIX + name: rule for name, rule in self.outside.items()}
        self.rules |= {
            stored_weights.LAYERS + name: rule for name, rule in architecture.layer.items()
        }

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the matrices, or of each expert's, by the complete keys."""
        keys, heads = self.keys, self.heads
        hidden, vocab = int(keys["hidden_size"]), int(keys.get("override_vocab_size") or 0)
        queries = heads.groups * heads.queries * heads.size
        ffn = int(keys["ffn_hidden_size"] or 4 * hidden)
        expert = int(keys.get("moe_ffn_hidden_size") or 0)
        parts = 2 if stored_weights.is_gated(keys) else 1
        return {
            "embedding.word_embeddings.": (vocab, hidden),
            "output_layer.": (vocab, hidden),
            "self_attention.linear_qkv.": (queries + 2 * heads.groups * heads.size, hidden),
            "self_attention.linear_proj.": (hidden, queries),
            "mlp.linear_fc1.": (parts * ffn, hidden),
            "mlp.linear_fc2.": (hidden, ffn),
            "mlp.experts.experts.linear_fc1.": (parts * expert, hidden),
            "mlp.experts.experts.linear_fc2.": (hidden, expert),
        }

    def rule(self, key: str, index: tuple[int, ...] = ()) -> Rule | None:
        """How `key` is made, with whole names, or None; `index`: the layer, if not in the key, and
        the expert.
        """
        name, layer = stored_weights.unnumbered(key)
        if index and stored_weights.is_stacked(key):
            layer, index = index[0], index[1:]
        kind = KINDS[name.endswith(KINDS[1])]
        rule = self.rules.get(name.removesuffix(kind))
        return None if rule is None else self.named(rule, kind, layer, *index[:1])

    def named(
        self, rule: Rule, kind: str, layer: int | None = None, expert: int | None = None
    ) -> Rule:
        """A rule of the architecture with the whole names of a `weight` or `bias`."""
        before = self.architecture.base
        if layer is not None:
            before += self.architecture.layers

        def whole(template: str) -> str:
            if template.startswith("/"):
                return template[1:] + kind
            return (before + template + kind).format(layer=layer, expert=expert)

        return type(rule)(*map(whole, rule.names), transposed=rule.transposed)
