# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`NLPAdapterModelMixin`: training with adapters (LoRA) instead of all weights, by NeMo's name."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from nemo.utils import logging
from omegaconf import DictConfig, open_dict
from torch import Tensor

from nemo_aligner.checkpoint import adapters
from nemo_aligner.checkpoint.sources import Source, open_source
from nemo_aligner.checkpoint.stored_weights import TensorSource, load_weights
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.peft_rules import FREE_KEYS, LORA, NONE, LoRASettings, check_peft
from nemo_aligner.config.values import Values, plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt import lora_layers
from nemo_aligner.models.nlp.gpt.lora_layers import LoRA
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel import parallel_state


class NLPAdapterModelMixin(MegatronGPTModel):
    """A model that trains all its weights, or, after `init_peft` with `peft_scheme: lora`, only
    adapters and its head: then gradients, optimizer, checkpoints, `.nemo` files and host copies
    hold these alone. `lora`: the form of the adapters, or None; `starts_as_reference`: those, if
    any, changed nothing when they were made.
    """

    lora: LoRASettings | None = None
    starts_as_reference = True
    _merge_for_generation = True
    _adapters: list[tuple[Any, LoRA]]
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
        self._adapters = lora_layers.add_adapters(
            self.unwrapped(), settings, self.transformer_config, self.cfg.seed
        )
        self.lora = settings
        initial = settings.column_init_method, settings.row_init_method
        self.starts_as_reference = start is None and "zero" in initial  # A or B, and so BA, is 0
        self._merge_for_generation = bool(peft.merge_for_generation)
        for name, parameter in self._parameters_of_chunks():
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
        self._log_sizes(start)

    def _parameters_of_chunks(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for module in self.unwrapped():
            yield from module.named_parameters()

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

    def _log_sizes(self, start: Source | None) -> None:
        trained, all_of_them = 0, 0
        for _name, parameter in self._parameters_of_chunks():
            all_of_them += parameter.numel()
            trained += parameter.numel() if parameter.requires_grad else 0
        begin = "" if start is None else f"; they start from {start}"
        logging.info(
            f"LoRA: {trained:,} of {all_of_them:,} weights on this rank are trained{begin}"
        )

    def adapters_disabled(self) -> AbstractContextManager[None]:
        """Inside, the model computes as its base; without adapters nothing changes."""
        return lora_layers.disabled(self._adapters) if self.use_peft else nullcontext()

    def adapters_merged(self) -> AbstractContextManager[None]:
        """Inside, weights hold the adapters (faster for short passes; a copy); then their former
        bits.
        """
        return lora_layers.merged(self._adapters) if self.use_peft else nullcontext()

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
        sharded = self.sharded_weights()
        with checkpoint.own_tensors(self.cfg) as source:
            stored = source.shapes()
            for chunk in sharded.values():
                for name, entry in list(chunk.items()):
                    head = name.removeprefix("model.").startswith(self.fresh_weights())
                    if head and entry.key not in stored:
                        del chunk[name]  # adapters of a language model: the head stays new
            self.check_stored_weights(checkpoint, stored, sharded)
            loaded = load_weights(source, sharded)
        self.load_sharded_weights(loaded)

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
