# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA, arXiv 2106.09685, eq. 3) on the linear layers of Megatron Core, and
`NLPAdapterModelMixin`, by NeMo's name: a model that trains them instead of all weights.

A linear layer W `[out, in]` computes `W x + alpha/dim * B A x` with A `[dim, in]` and B `[out,
dim]`. The layer stays the same object; its class becomes a subclass that adds the second term.

Under tensor parallelism the adapter is split along the same axis as W, its rows (qkv, fc1) or its
columns (proj, fc2), and its other half is held whole by every rank, with complete gradients; under
sequence parallelism each rank has those of its share of the positions, which Megatron Core adds up
for parameters that are marked `sequence_parallel`.

Notation: S positions and b samples on this rank; t tensor-parallel ranks.
"""

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from nemo.utils import logging
from omegaconf import DictConfig, open_dict
from torch import Tensor

from nemo_aligner.checkpoint import adapters
from nemo_aligner.checkpoint.sources import Source, open_source
from nemo_aligner.checkpoint.stored_weights import TensorSource
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.peft_rules import (
    FREE_KEYS,
    LORA,
    NONE,
    SPLIT_BY_ROWS,
    TARGETS,
    LoRASettings,
    check_peft,
)
from nemo_aligner.config.values import Values, plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.lora import delta, expand_blocks, gated_blocks, qkv_blocks
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.megatron_switches import changed

ADAPTER = "lora"  # name of the adapter in its linear layer
GATED = "mlp_fc1"


def blocks_of_rows(target: str, rows: int, config: TransformerConfig) -> Tensor:
    """int64 `[rows]`: projection of each row of a fused weight or of a rank's part; else 0."""
    if target == "attention_qkv":
        size = config.kv_channels
        per_group = config.num_attention_heads // config.num_query_groups
        return qkv_blocks(rows // (size * (per_group + 2)), per_group, size)
    if target == GATED and config.gated_linear_unit:
        return gated_blocks(rows)
    return torch.zeros(rows, dtype=torch.int64)


class LoRA(torch.nn.Module):
    """The adapter of one linear layer on this rank.

    Args:
        linear: the layer, of Megatron Core or Transformer Engine.
        layer_number: of the transformer layer, from 1, over all stages.
        seed: of the initial values, which do not depend on the split.

    Attributes:
        a: `[dim, in]`, or `[blocks * dim, in]` of the variant "canonical"; `in / t` columns of a
            layer that is split along its columns.
        b: `[out, dim]`; `out / t` rows of a layer that is split along its rows.
        enabled, merged: the layer computes with the adapter; its weight holds it.
    """

    blocks: Tensor

    def __init__(
        self,
        linear: Any,
        target: str,
        layer_number: int,
        settings: LoRASettings,
        config: TransformerConfig,
        seed: int,
    ):
        super().__init__()
        self.target, self.layer_number = target, layer_number
        self.scale = settings.scale
        self.dropout, self.dropout_position = settings.dropout, settings.dropout_position
        self.tp = parallel_state.get_tensor_model_parallel_world_size()
        self.sequence_parallel = bool(config.sequence_parallel) and self.tp > 1
        self.by_rows = target in SPLIT_BY_ROWS
        self.gated = target == GATED and bool(config.gated_linear_unit)
        self.enabled, self.merged = True, False
        rows, columns = linear.weight.shape
        blocks = blocks_of_rows(target, rows, config)
        if settings.variant == "nemo":
            blocks = torch.zeros_like(blocks)
        self.num_blocks = int(blocks.max()) + 1
        self.register_buffer("blocks", blocks.to(linear.weight.device), persistent=False)
        number = 1 if settings.weight_tying else layer_number
        digest = hashlib.sha256(f"{seed}/{number}/{target}".encode()).digest()
        stream = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        whole_rows = rows * (self.tp if self.by_rows else 1)
        whole_columns = columns * (1 if self.by_rows else self.tp)
        shape = self.num_blocks, settings.dim, whole_columns
        a = _drawn(stream, settings.column_init_method, *shape)
        b = _drawn(stream, settings.row_init_method, 1, whole_rows, settings.dim)
        if self.tp > 1:
            rank = parallel_state.get_tensor_model_parallel_rank()
            if self.by_rows:  # of gate and up projection those of each
                parts = b.chunk(2) if self.gated else (b,)
                b = torch.cat([part.chunk(self.tp)[rank] for part in parts])
            else:
                a = a.chunk(self.tp, dim=1)[rank]
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.a = torch.nn.Parameter(a.to(**like))
        self.b = torch.nn.Parameter(b.to(**like))
        split, whole = (self.b, self.a) if self.by_rows else (self.a, self.b)
        mark = tensor_parallel.set_tensor_model_parallel_attributes
        mark(split, True, 0 if self.by_rows else 1, 1)
        mark(whole, False, 0, 1)
        if self.sequence_parallel:
            whole.sequence_parallel = True  # type: ignore[attr-defined]  # Megatron Core reads it

    def wide_b(self) -> Tensor:
        """B with a column for each row of A."""
        return self.b if self.num_blocks == 1 else expand_blocks(self.b, self.blocks)

    def add(self, output: Tensor, inputs: Tensor) -> Tensor:
        """`output` `[S, b, out]` of the layer plus the adapter's of normed inputs `[S, b, in]`."""
        if not self.enabled or self.merged:
            return output
        dropping = self.training and self.dropout > 0
        if dropping and self.dropout_position == "pre":
            inputs = self._drop(inputs, split=self.sequence_parallel or not self.by_rows)
        hidden = F.linear(inputs, self.a)
        if self.tp > 1:
            hidden = self._exchange(hidden)
        b = self.wide_b()
        if dropping and self.dropout_position == "post":
            added = F.linear(hidden, b)
            added = self._drop(added, split=self.sequence_parallel or self.by_rows)
            return output + self.scale * added
        added = torch.addmm(output.flatten(0, -2), hidden.flatten(0, -2), b.t(), alpha=self.scale)
        return added.view_as(output)

    def _exchange(self, hidden: Tensor) -> Tensor:
        """What B is applied to: if split by rows all positions' states, else the ranks' sum."""
        if self.by_rows:
            if self.sequence_parallel:
                return tensor_parallel.gather_from_sequence_parallel_region(hidden)
            return tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        if self.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(hidden)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(hidden)

    def _drop(self, values: Tensor, split: bool) -> Tensor:
        """Dropout; ranks that hold different values draw different masks."""
        split = split and self.tp > 1
        with tensor_parallel.get_cuda_rng_tracker().fork() if split else nullcontext():
            return F.dropout(values, self.dropout)

    def sharded(self, prefix: str) -> dict[str, Any]:
        """Entries of a sharded state dict; the linear layer's names begin with `prefix`."""
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        rank = parallel_state.get_tensor_model_parallel_rank()
        result: dict[str, Any] = {}
        for name, parameter in (("a", self.a), ("b", self.b)):
            is_split = (name == "b") == self.by_rows
            axis = 0 if name == "b" else 1
            tensor: Any = ShardedTensor.from_rank_offsets(
                f"{prefix}{ADAPTER}.{self.layer_number}.{name}",
                parameter,
                *([(axis, rank, self.tp)] if is_split else []),
                replica_id=(0, 0 if is_split else rank, replica),
            )
            if self.gated and name == "b":
                tensor = apply_swiglu_sharded_factory(tensor, ())
            result[f"{prefix}{ADAPTER}.{name}"] = tensor
        return result


def _drawn(
    generator: torch.Generator, method: str, blocks: int, rows: int, columns: int
) -> Tensor:
    """Initial values float32 `[blocks * rows, columns]`, each block drawn by itself."""
    whole = torch.zeros(blocks * rows, columns)
    for values in whole.split(rows):
        if method == "xavier":
            torch.nn.init.xavier_normal_(values, generator=generator)
        elif method == "normal":
            values.normal_(std=0.2, generator=generator)
        elif method == "kaiming":
            torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return whole


class _WithAdapter:
    lora: LoRA

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        output, *rest = parent.forward(inputs, *args, **kwargs)
        if len(rest) == 2:  # Transformer Engine's norm and linear layer in one: bias, normed input
            rest, inputs = rest[:1], rest[1]
        elif isinstance(output, tuple):  # the same without a separate bias
            output, inputs = output
        return self.lora.add(output, inputs), *rest

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        parent: Any = super()
        entries = parent.sharded_state_dict(prefix, sharded_offsets, metadata)
        own = f"{prefix}{ADAPTER}."
        base = {name: entry for name, entry in entries.items() if not name.startswith(own)}
        return base | self.lora.sharded(prefix)


@functools.cache
def _class_with_adapter(kind: type) -> type:
    return type(f"{kind.__name__}WithLoRA", (_WithAdapter, kind), {})


def linear_layers(module: Any) -> Iterator[tuple[int, str, Any]]:
    """(number of the transformer layer, target, linear layer) of a bare `GPTModel`."""
    for layer in module.decoder.layers:
        for target, path in TARGETS.items():
            linear = layer
            for name in path.split("."):
                linear = getattr(linear, name, None)
            if linear is not None:
                yield layer.layer_number, target, linear


def add_adapters(
    modules: list[Any], settings: LoRASettings, config: TransformerConfig, seed: int
) -> list[tuple[Any, LoRA]]:
    """Give the linear layers of `settings` adapters; return both."""
    added: list[tuple[Any, LoRA]] = []
    tied: dict[str, LoRA] = {}
    for module in modules:
        for number, target, linear in linear_layers(module):
            chosen = settings.layers is None or number in settings.layers
            if target not in settings.targets or not chosen:
                continue
            adapter = LoRA(linear, target, number, settings, config, seed)
            if settings.weight_tying:
                first = tied.setdefault(target, adapter)
                adapter.a, adapter.b = first.a, first.b
            kind: Any = type(linear)
            linear.__class__ = _class_with_adapter(kind)
            linear.lora = adapter
            if hasattr(linear, "return_layernorm_output"):
                linear.return_layernorm_output = True
            added.append((linear, adapter))
    return added


class NLPAdapterModelMixin(MegatronGPTModel):
    """A model that trains all its weights, or, after `init_peft` with `peft_scheme: lora`, only
    adapters and its head: then gradients, optimizer, checkpoints, `.nemo` files and host copies
    hold these alone. `lora`: the form of the adapters, or None; `starts_as_reference`: those, if
    any, changed nothing when they were made.
    """

    lora: LoRASettings | None = None
    starts_as_reference = True
    _merge_for_generation = True
    _adapters: Sequence[tuple[Any, LoRA]] = ()
    _base: adapters.Base

    @property
    def use_peft(self) -> bool:
        return self.lora is not None

    def init_peft(self, peft_cfg: DictConfig | Mapping[str, Any] | None) -> None:
        """Set up the adapters that the section `model.peft` asks for; all ranks call it, once,
        after the weights of the base are loaded and before the optimizer is built.

        With `restore_from_path` (a `.nemo` or a checkpoint folder with adapters) or
        `restore_from_ckpt` they start from those, whose form wins over `lora_tuning`; else they
        change no bit of the output. `ConfigError`: adapters that cannot be built; `UserError`:
        those to start from do not exist or have another base.
        """
        if self.use_peft or self._optimizer is not None:
            when = "twice" if self.use_peft else "after the optimizer was built"
            raise UserError(f"{type(self).__name__}.init_peft was called {when}.")
        given = (
            plain_dict(peft_cfg, resolve=True)
            if isinstance(peft_cfg, DictConfig)
            else dict(peft_cfg or {})
        )
        peft = complete(DictConfig(given), "gpt_ppo_actor", "model.peft")
        check_peft(Values({"model": {**plain_dict(self.cfg, resolve=True), "peft": peft}}))
        if peft.peft_scheme in (None, NONE):
            return
        settings = LoRASettings.from_config(plain_dict(peft.lora_tuning, resolve=True))
        start = _adapters_to_start_from(peft, self.cfg)
        if start is not None:
            settings = _settings_of(start, settings, self.cfg)
            tuning = {"peft_scheme": LORA, "lora_tuning": settings.to_config()}
            check_peft(Values({"model": {**plain_dict(self.cfg, resolve=True), "peft": tuning}}))
        path = None if self.restore_path is None else str(self.restore_path)
        self._base = adapters.Base(path, self.checksum_of_base())
        self._adapters = add_adapters(
            self.unwrapped(), settings, self.transformer_config, self.cfg.seed
        )
        self.lora = settings
        initial = settings.column_init_method, settings.row_init_method
        self.starts_as_reference = start is None and "zero" in initial  # A or B, and so BA, is 0
        self._merge_for_generation = bool(peft.merge_for_generation)
        for module in self.unwrapped():
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(self._is_trained(name))
        self._let_gradients_through()
        with open_dict(self.cfg):
            self.cfg.peft = {
                "peft_scheme": LORA,
                "restore_from_path": None,
                "restore_from_ckpt": {"checkpoint_dir": None, "checkpoint_name": None},
                "merge_for_generation": self._merge_for_generation,
                "lora_tuning": settings.to_config(),
            }
        if start is not None:
            self.load_adapters(start)
        weights = [parameter for module in self.unwrapped() for parameter in module.parameters()]
        trained = sum(weight.numel() for weight in weights if weight.requires_grad)
        number = sum(weight.numel() for weight in weights)
        begin = "" if start is None else f"; they start from {start}"
        logging.info(f"LoRA: {trained:,} of {number:,} weights on this rank are trained{begin}")

    def _is_trained(self, name: str) -> bool:
        return adapters.is_adapter(name) or name.startswith(self.fresh_weights())

    def _let_gradients_through(self) -> None:
        """Make the embeddings require a gradient: recomputation and pipelines need it."""

        def require(_embedding: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            return output.requires_grad_() if torch.is_grad_enabled() else output

        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if stages > 1 or self.transformer_config.recompute_granularity is not None:
            for module in self.unwrapped():
                if module.pre_process:
                    module.embedding.register_forward_hook(require)

    def adapters_disabled(self) -> AbstractContextManager[None]:
        """Inside, the model computes as its base; without adapters nothing changes."""
        return changed((adapter, "enabled", False) for _linear, adapter in self._adapters)

    @contextmanager
    def adapters_merged(self) -> Iterator[None]:
        """Inside, copies of the weights hold the adapters; then their very tensors are back."""
        before = [(linear.weight, linear.weight.data) for linear, _adapter in self._adapters]
        try:
            with torch.no_grad():
                for (linear, adapter), (_, whole) in zip(self._adapters, before, strict=True):
                    added = delta(adapter.a, adapter.wide_b(), adapter.scale)
                    linear.weight.data = (whole.float() + added).to(whole.dtype)
                    adapter.merged = True
            yield
        finally:
            for (_linear, adapter), (weight, whole) in zip(self._adapters, before, strict=True):
                weight.data, adapter.merged = whole, False

    def adapters_for_generation(self) -> AbstractContextManager[None]:
        """`adapters_merged` while responses are generated, unless the configuration says no."""
        return self.adapters_merged() if self._merge_for_generation else nullcontext()

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super()._named_weights():
            if not self.use_peft or self._is_trained(name.partition(".")[2]):
                yield name, tensor

    def sharded_weights(self, metadata: dict | None = None) -> dict[str, dict[str, Any]]:
        """As the base class; with adapters only what is trained, of the chunks that have any."""
        sharded = super().sharded_weights(metadata)
        if not self.use_peft:
            return sharded
        for entries in sharded.values():
            for name in [n for n in entries if not self._is_trained(n.removeprefix("model."))]:
                del entries[name]
        return {chunk: entries for chunk, entries in sharded.items() if entries}

    def load_sharded_weights(self, loaded: dict[str, dict[str, Any]], strict: bool = True) -> None:
        """As the base class; with adapters the base's weights stay as they are."""
        # A chunk without adapters has nothing to load.
        nothing: dict[str, dict[str, Any]] = {f"model{i}": {} for i in range(len(self.model))}
        super().load_sharded_weights(nothing | loaded, strict=strict and not self.use_peft)

    def load_adapters(self, path: str | PathLike[str]) -> None:
        """Load adapters, and heads that the file has, at the split of this job; all ranks call it.
        `UserError`: they belong to another base, or have other shapes.
        """
        checkpoint = open_source(path, "adapters")
        base = adapters.base_in(checkpoint.stored_config(self.cfg))
        assert base is not None and self._base.checksum is not None
        adapters.check_base(base, self._base.checksum, str(path), self._base.path or "this model")
        with checkpoint.own_tensors(self.cfg) as source:
            # Of adapters of a language model the head stays new.
            self.load_stored(checkpoint, source, missing_ok=self.fresh_weights())

    def check_checkpoint(self, folder: Path) -> None:
        """Raise `UserError` unless a checkpoint has adapters of this form and base, or none."""
        super().check_checkpoint(folder)
        config = open_source(folder, "exp_manager.resume_from_checkpoint").stored_config()
        base = adapters.base_in(config)
        if (base is None) == self.use_peft:
            was, now = ("all weights", LORA) if base is None else ("adapters", NONE)
            raise UserError(
                f"{folder} is a checkpoint of a job that trained {was}, but this job has "
                f"model.peft.peft_scheme={now}. Resume with the former, or in another folder."
            )
        if base is None:
            return
        assert self._base.checksum is not None
        adapters.check_base(base, self._base.checksum, str(folder), self._base.path or "the model")
        assert self.lora is not None
        before, now_ = adapters.settings_in(config).to_config(), self.lora.to_config()
        changed = [
            f"{key}={now_[key]} (checkpoint: {before[key]})"
            for key in now_
            if now_[key] != before[key] and key not in FREE_KEYS
        ]
        if changed:
            keys = f"model.peft.lora_tuning.{', '.join(changed)}"
            raise UserError(f"{folder} has adapters of another form: {keys}. Resume with those.")

    def _write_hugging_face(self, folder: Path, source: TensorSource) -> None:
        if self.lora is None:
            super()._write_hugging_face(folder, source)
            return
        from nemo_aligner.checkpoint.hugging_face import peft

        peft.write_folder(folder, source, self.cfg, self.lora, self._base, drop_head_bias=True)

    def _resolved_config(self) -> DictConfig:
        config = super()._resolved_config()
        if self.use_peft:
            with open_dict(config):
                config[adapters.BASE_SECTION] = self._base.to_config()
        return config


def _adapters_to_start_from(peft: DictConfig, model: DictConfig) -> Source | None:
    """The adapters that `peft` names; `UserError`: none exist, or it is a whole model."""
    key, path = "model.peft.restore_from_path", peft.restore_from_path
    ckpt = peft.restore_from_ckpt
    if ckpt.checkpoint_dir is not None:
        key, path = "model.peft.restore_from_ckpt", Path(ckpt.checkpoint_dir, ckpt.checkpoint_name)
    if path is None:
        return None
    source = open_source(path, key)
    if adapters.base_in(source.stored_config(model)) is None:
        remedy = "name it as the checkpoint that the job starts from."
        raise UserError(f"{key}={source} holds all weights of a model, not adapters; {remedy}")
    return source


def _settings_of(source: Source, wanted: LoRASettings, model: DictConfig) -> LoRASettings:
    """The form of stored adapters, with what does not concern their weights as wanted."""
    asked = wanted.to_config()
    stored = adapters.settings_in(source.stored_config(model)).to_config()
    merged = {**stored, **{key: asked[key] for key in FREE_KEYS}}
    differing = [f"{key}={merged[key]}" for key in merged if merged[key] != asked[key]]
    if differing:
        logging.warning(f"model.peft.lora_tuning is as in {source}: {', '.join(differing)}")
    return LoRASettings.from_config(merged)
