# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTModel`: a GPT of Megatron Core behind NeMo's `ModelPT`, with what every role (actor,
critic, reward model, SFT) shares: construction from NeMo-style keys, tokenizer, weights,
optimizer. Roles add losses; `nemo_aligner.training.megatron_steps` runs the passes.
"""

import contextlib
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import Trainer
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from nemo.core import ModelPT
from nemo.core.classes.common import ALLOWED_TARGET_PREFIXES
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from nemo_aligner.checkpoint import adapters, nemo_archive
from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.checkpoint.sources import open_source
from nemo_aligner.checkpoint.stored_weights import TensorSource, load_weights, sharded_tensors
from nemo_aligner.checkpoint.torch_dist_stream import TorchDistTensors
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.inert_keys import check_model_keys
from nemo_aligner.config.parallel_rules import check_pipeline_stages, count_vocab_rows
from nemo_aligner.config.values import entries
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.losses import loss_count, loss_weights
from nemo_aligner.core.tensors import counted_lengths
from nemo_aligner.models.nlp.gpt.megatron_config import build_transformer_config, torch_dtype
from nemo_aligner.models.nlp.gpt.megatron_layers import (
    GPTModel,
    add_to_module,
    build_layer_spec,
    compute_logits_batch_first,
    compute_swiglu_at_once,
)
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.environment import is_rank_zero
from nemo_aligner.training import optim
from nemo_aligner.training.megatron_steps import Batch, forward_backward

_STEPS = "nemo_aligner.training.megatron_steps."
# method -> what replaces it
RETIRED_HOOKS = {
    name: instead
    for names, instead in entries(f"""
get_forward_output_and_loss_func get_actor_forward_output_and_loss_func loss_func bt_loss_func
    reg_loss_func split_output_tensor | override get_loss_and_metrics(batch, forward_only), which
    passes a loss function of plain tensors to {_STEPS}forward_backward
get_forward_output_only_func get_logprob_output_only_func forward_step | use
    {_STEPS}forward_collect with an output function of plain tensors
model_provider_func | override module_provider(pre_process, post_process, vp_stage), which builds
    the module
""")
    for name in names.split()
}


class RetiredHooks:
    """Retired methods, which raise `UserError`; `ConfigError`: a subclass overrides one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, instead in RETIRED_HOOKS.items():
            if name in vars(cls):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called in this package: {instead}."
                )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: RetiredHooks, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(f"{type(self).__name__}.{name} is not used: {RETIRED_HOOKS[name]}.")

    return refuse


for _name in RETIRED_HOOKS:
    setattr(RetiredHooks, _name, _refusing(_name))


def weights_of_samples(loss_mask: Tensor) -> tuple[Tensor, float]:
    """Weights float32 `[B]` (of `loss_weights`) of the samples with a token in `loss_mask` `[B,
    S]`, and the number of such samples of all ranks, which call it.
    """
    valid = loss_mask.ne(0).any(dim=-1).float().to(get_device())
    return loss_weights(valid, sum_over_dp=sum_over_dp), float(sum_over_dp(valid.sum()))


# NeMo instantiates only classes below these prefixes.
if isinstance(ALLOWED_TARGET_PREFIXES, list) and "nemo_aligner." not in ALLOWED_TARGET_PREFIXES:
    ALLOWED_TARGET_PREFIXES.append("nemo_aligner.")


class MegatronGPTModel(RetiredHooks, ModelPT):
    """GPT on Megatron Core. Every rank constructs the model, once the processes of the job are
    connected (`launch.processes.init_distributed`); it sets up Megatron's process groups.

    Args:
        cfg: section `model` of a configuration (NeMo keys; docs/config.md), which decides the
            parallel sizes. Missing keys get the defaults of `CONFIG_NAME`.

    Attributes:
        CONFIG_NAME: YAML file whose `model` section this class belongs to; None: a model of
            several jobs, with the fallbacks of `config/keys/model.py`.
        model: this pipeline stage's chunks, which `setup_megatron_optimization` wraps.
        padded_vocab_size: rows of the embedding table; ids from `tokenizer.vocab_size` on pad it.
        micro_batch_tokens: most tokens of a forward pass in place of a number of samples, or None.
        restore_path: checkpoint that the weights were loaded from; None: they are random.
        loss_reduction: what a loss is the mean of, one of `estimators.ROLLOUT_REDUCTIONS`.
        stored_dropout: keys of that checkpoint which are written again where this job has 0.

    `UserError`: processes not connected, tokenizer not readable; `ConfigError`: unsupported value.
    """

    CONFIG_NAME: str | None = None
    module_class: Any = GPTModel  # of the chunks; roles with a head have another
    loss_reduction: str = "token"
    longest: int | None = None
    to_offload_adam_states = True

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        world_size = 1 if trainer is None else trainer.world_size
        if world_size > 1 and not torch.distributed.is_initialized():
            raise UserError(
                f"the {world_size} processes of the job are not connected yet; call "
                "nemo_aligner.launch.processes.init_distributed(trainer) first."
            )
        cfg = complete_model(cfg, self.CONFIG_NAME)
        notes = check_model_keys(cfg)
        check_pipeline_stages(cfg)
        self.check_config(cfg)
        if notes and is_rank_zero():
            logging.warning("Without effect on the model:\n  " + "\n  ".join(notes))
        sizes = {name: cfg[name] for name in parallel_state.SIZES}
        parallel_state.initialize(**sizes, seed=cfg.seed)
        super().__init__(cfg, trainer=trainer)
        self.tokenizer = build_tokenizer(self.cfg.tokenizer)
        self.transformer_config = build_transformer_config(self.cfg)
        self.padded_vocab_size = count_vocab_rows(self.cfg, self.tokenizer.vocab_size)
        # Initial weights must not depend on earlier draws, and must differ between stages.
        torch.manual_seed(self.cfg.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
        chunks = self.transformer_config.virtual_pipeline_model_parallel_size or 1
        self.model: list[Any] = [self._build_chunk(stage, chunks) for stage in range(chunks)]
        if parallel_state.get_context_parallel_world_size() > 1:
            parallel_state.seed_generators(self.cfg.seed, by_context_rank=True)
        self._optimizer: MegatronOptimizer | None = None
        self._scheduler: OptimizerParamScheduler | None = None
        self._swap_buffer: dict[str, Tensor] | None = None
        self.micro_batch_tokens: int | None = self.cfg.dynamic_micro_batch_tokens
        self.restore_path: Path | None = None
        self.stored_dropout: dict[str, float] = {}

    # --- construction ---------------------------------------------------------------------------

    @classmethod
    def check_config(cls, cfg: DictConfig) -> None:
        """Check values that only this role reads in a complete `cfg`; raises `ConfigError`."""

    def _build_chunk(self, vp_stage: int, chunks: int) -> torch.nn.Module:
        first = parallel_state.is_pipeline_first_stage() and vp_stage == 0
        last = parallel_state.is_pipeline_last_stage() and vp_stage == chunks - 1
        module = self.module_provider(first, last, vp_stage if chunks > 1 else None)
        add_to_module(module, self.cfg.apply_embedding_scaling)
        compute_swiglu_at_once(module)
        if last and hasattr(module, "output_layer"):
            compute_logits_batch_first(module)
        module.to(get_device())
        if self.transformer_config.bf16:
            module = Float16Module(self.transformer_config, module)
        return module

    def module_args(self) -> dict[str, Any]:
        """Constructor arguments of `module_class` that come from the configuration."""
        cfg = self.cfg
        return dict(
            config=self.transformer_config,
            vocab_size=self.padded_vocab_size,
            parallel_output=True,
            share_embeddings_and_output_weights=cfg.share_embeddings_and_output_weights,
            max_sequence_length=cfg.max_position_embeddings,
            position_embedding_type=cfg.position_embedding_type,
            rotary_percent=cfg.rotary_percentage,
            rotary_base=cfg.rotary_base,
            seq_len_interpolation_factor=cfg.seq_len_interpolation_factor,
            rope_scaling=cfg.scale_positional_embedding,
            rope_scaling_factor=cfg.scale_factor,
        )

    def module_provider(
        self, pre_process: bool, post_process: bool, vp_stage: int | None = None
    ) -> torch.nn.Module:
        """The bare Megatron module of one chunk."""
        return self.module_class(
            transformer_layer_spec=build_layer_spec(self.transformer_config, vp_stage),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            **self.module_args(),
        )

    def setup_training_data(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the scripts set up the data."""

    setup_validation_data = setup_training_data

    def list_available_models(self) -> list:
        """No pretrained models are distributed."""
        return []

    # --- modules and modes ----------------------------------------------------------------------

    def unwrapped(self) -> list[Any]:
        """The bare Megatron modules, without DDP and precision wrappers."""
        return unwrap_model(self.model)

    def cuda(self, device: Any = None) -> "MegatronGPTModel":
        """The model itself: its weights are on `get_device()` since it was built."""
        return self

    def set_train(self) -> None:
        for chunk in self.model:
            chunk.train()

    def set_eval(self) -> None:
        for chunk in self.model:
            chunk.eval()

    # --- optimization ---------------------------------------------------------------------------

    def setup_megatron_optimization(
        self, max_steps: int
    ) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
        """Wrap chunks, build optimizer and schedule over `max_steps`; all ranks call it, once."""
        self.model = optim.wrap_with_ddp(self.model, self.cfg.optim)
        for chunk in self.model:
            chunk.broadcast_params()  # replicas start equal, whatever they were loaded from
        dtype = torch_dtype(self.cfg.precision)
        optimizer = optim.build_optimizer(self.model, self.cfg.optim, dtype)
        if self.transformer_config.bf16:
            for chunk in self.model:
                chunk.config.grad_scale_func = optimizer.scale_loss
        scheduler = optim.build_scheduler(optimizer, self.cfg.optim, max_steps)
        self._optimizer, self._scheduler = optimizer, scheduler
        return optimizer, scheduler

    def _move_adam_states(self, device: torch.device) -> None:
        wanted = self.to_offload_adam_states and torch.cuda.is_available()
        if not wanted or self._optimizer is None:
            return
        # Not the optimizer's weights: those in fp32 are the model's own, which inference needs.
        for part in optim.chained_optimizers(self._optimizer):
            for state in part.optimizer.state.values() if part.optimizer is not None else ():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        state[name] = value.to(device)
        if device.type == "cpu":
            torch.cuda.empty_cache()

    def offload_adam_states(self) -> None:
        """Move Adam's states to host memory, unless `to_offload_adam_states` is False."""
        self._move_adam_states(torch.device("cpu"))

    def onload_adam_states(self) -> None:
        """Bring back what `offload_adam_states` moved, if anything."""
        self._move_adam_states(get_device())

    def prepare_for_training_step(self) -> None:
        """Enter training mode and empty the gradient buffers, before a global batch."""
        self.set_train()
        for chunk in self.model:
            # The fp32 optimizer's `grad` points into the buffer; backward would add to it.
            chunk.zero_grad(set_to_none=True)
            chunk.zero_grad_buffer()

    def finish_training_step(self) -> None:
        """Do nothing: Megatron's schedule reduces the gradients over ranks."""

    def prepare_for_validation_step(self) -> None:
        self.set_eval()

    def finish_validation_step(self) -> None:
        self.set_train()

    def prepare_for_inference(self) -> None:
        self.set_eval()

    def finish_inference(self) -> None:
        self.set_train()

    # --- losses ---------------------------------------------------------------------------------

    def run_loss(
        self,
        loss_fn: Callable[[Tensor, Batch], tuple[Tensor, Batch]],
        columns: Batch,
        forward_only: bool,
        *,
        mask: Tensor | None = None,
        loss_reduction: str | None = None,
        micro_batch_size: int | None = None,
        lengths: Tensor | None = None,
        **options: Any,
    ) -> tuple[dict[str, float], Batch]:
        """`megatron_steps.forward_backward` of a global batch; all ranks call it with their share.

        Args:
            mask: `[B, S-1]` or `[B, S]`, non-zero where a token counts: `loss_fn` gets `weights`,
                by `loss_reduction`; None: they stand in `columns` (else `UserError`).
            loss_reduction, micro_batch_size: None: those of the model and its configuration.
            lengths: int64 `[B]`; None: up to the last token with a weight.
        """
        micro_batch_size = micro_batch_size or self.cfg.micro_batch_size
        loss_reduction = loss_reduction or self.loss_reduction
        if mask is not None:
            weights = loss_weights(
                mask, loss_reduction, micro_batch_size, sum_over_dp, self.longest
            )
            columns = {**columns, "weights": weights}
        if lengths is None:
            if "weights" not in columns:
                raise UserError("a loss needs a mask, or columns with the weights of the tokens.")
            lengths = counted_lengths(columns["weights"], columns["tokens"].size(1))
        return forward_backward(
            self.model,
            columns,
            micro_batch_size=micro_batch_size,
            loss_fn=loss_fn,
            forward_only=forward_only,
            lengths=lengths,
            micro_batch_tokens=self.micro_batch_tokens,
            keep_order=loss_reduction == "microbatch",
            **options,
        )

    def count_of_loss(self, mask: Tensor, loss_reduction: str, micro_batch_size: int) -> float:
        """How many of what `loss_reduction` averages over the batch has; all ranks call it."""
        count = loss_count(mask, loss_reduction, micro_batch_size)
        return float(sum_over_dp(torch.tensor(count, dtype=torch.float64, device=get_device())))

    # --- weights --------------------------------------------------------------------------------

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of all chunks with their names, which start with the chunk's number."""
        for index, module in enumerate(self.unwrapped()):
            for name, tensor in module.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor):
                    yield f"{index}.{name}", tensor

    @torch.no_grad()
    def weights_to_cpu(self, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Copy this rank's weights to host memory (pinned with CUDA), over the copy `into`."""
        if into is None:
            pin = torch.cuda.is_available()
            into = {
                n: torch.empty_like(t, device="cpu", pin_memory=pin)
                for n, t in self._named_weights()
            }
        for name, tensor in self._named_weights():
            into[name].copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return into

    @torch.no_grad()
    def load_cpu_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy weights from `weights_to_cpu` in place: optimizer and DDP buffers stay attached."""
        for name, tensor in self._named_weights():
            tensor.copy_(weights[name], non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def swapped_weights(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Inside, the model computes with `weights`; afterwards with its own again."""
        self._swap_buffer = self.weights_to_cpu(into=self._swap_buffer)
        self.load_cpu_weights(weights)
        try:
            yield
        finally:
            self.load_cpu_weights(self._swap_buffer)

    def sharded_weights(self, metadata: dict | None = None) -> dict[str, dict[str, Any]]:
        """Megatron Core's sharded state dict of each chunk, under `model.`; all ranks call it."""
        # Virtual chunks share one name space: Megatron Core numbers layers globally.
        return {
            f"model{index}": chunk.sharded_state_dict(prefix="model.", metadata=metadata)
            for index, chunk in enumerate(self.unwrapped())
        }

    def checksum_of_base(self) -> str:
        """Checksum of the weights without adapters, at any split the same; all ranks call it."""
        sharded = MegatronGPTModel.sharded_weights(self)  # not the adapters of a class below
        return adapters.checksum_of_model(sharded)

    def load_sharded_weights(self, loaded: dict[str, dict[str, Any]], strict: bool = True) -> None:
        """Load what `dist_checkpointing.load` returned for `sharded_weights()`."""
        for index, chunk in enumerate(self.unwrapped()):
            weights = loaded[f"model{index}"].items()
            named = {name.removeprefix("model."): value for name, value in weights}
            chunk.load_state_dict(named, strict=strict)

    def sharded_reference(
        self, weights: dict[str, dict[str, Any]], is_loading: bool
    ) -> dict[str, dict[str, Any]]:
        """What a checkpoint holds of a moving reference (`MovingReferenceMixin`): nothing."""
        return {}

    def load_sharded_reference(self, loaded: dict[str, dict[str, Any]]) -> None:
        """Take over what was loaded for `sharded_reference`."""

    def save_to(self, save_path: str) -> None:
        """Write a `.nemo`, or without a suffix a directory; all ranks call it."""
        as_directory = str(save_path).endswith("/") or not Path(save_path).suffix
        nemo_archive.write_nemo(
            save_path, self._resolved_config(), self.sharded_weights(), as_directory=as_directory
        )

    def check_hugging_face(self) -> None:
        """Check that Hugging Face can express the model; `UserError` names the keys."""
        from nemo_aligner.checkpoint.hugging_face import writing

        writing.check(self.cfg, has_head=bool(self.fresh_weights()))

    def save_hugging_face(self, folder: Path, weights: Path) -> None:
        """Write a Hugging Face folder with the weights of a checkpoint, without the bias of a
        reward model's head; all ranks call it, and rank 0 writes. `UserError` on all ranks.
        """
        from nemo_aligner.checkpoint.hugging_face import writing

        try:
            with failing_together():
                if parallel_state.get_rank() == 0:
                    source = TorchDistTensors(weights)
                    bias = writing.head_bias(source)
                    if bias and any(bias):
                        logging.warning(
                            f"{folder} lacks the bias {bias} of the head, for which Hugging Face "
                            "has no place."
                        )
                    self._write_hugging_face(folder, source)
                    logging.info(f"saved {folder}")
        except UserError as error:
            raise UserError(
                f"{folder} could not be written: {error}. The checkpoint is complete."
            ) from error

    def _write_hugging_face(self, folder: Path, source: TensorSource) -> None:
        from nemo_aligner.checkpoint.hugging_face import reading, writing

        rows = reading.vocab_rows(self.cfg, lambda: self.tokenizer.vocab_size)
        writing.write_folder(folder, source, self.cfg, rows, drop_head_bias=True)

    def save_config_to(self, folder: Path) -> None:
        """Write configuration and tokenizer into `folder`, as a `.nemo` has; one rank calls it."""
        nemo_archive.write_config(folder, self._resolved_config())

    def _resolved_config(self) -> DictConfig:
        config = OmegaConf.create(OmegaConf.to_container(self.cfg, resolve=True))
        config.update({key: self.cfg[key] or kept for key, kept in self.stored_dropout.items()})
        return config

    def load_nemo_weights(
        self,
        restore_path: str | PathLike[str],
        strict: bool = True,
        missing_ok: tuple[str, ...] = (),
        skip: tuple[str, ...] = (),
    ) -> None:
        """Load the weights of a `.nemo` at the split of this job; all ranks call it. `UserError`:
        shapes differ, or, `strict`, the file lacks weights of this model. Those with a prefix
        (after `model.`) in `missing_ok` may be absent, as of a new head; they and `skip` keep
        initial values.
        """
        checkpoint = open_source(restore_path)
        with checkpoint.tensors() as source:
            self.load_stored(checkpoint, source, strict, missing_ok, skip)
        self.restore_path = checkpoint.path

    def load_stored(
        self,
        path: PathLike[str],
        source: TensorSource,
        strict: bool = True,
        missing_ok: tuple[str, ...] = (),
        skip: tuple[str, ...] = (),
    ) -> None:
        """`load_nemo_weights` from the tensors of a checkpoint at `path`."""
        sharded, stored = self.sharded_weights(), source.shapes()
        missing = []
        for chunk in sharded.values():
            for name, item in list(chunk.items()):
                bare, parts = name.removeprefix("model."), sharded_tensors(item)
                absent = [part.key for part in parts if part.key not in stored]
                if bare.startswith(skip) or absent:
                    del chunk[name]  # it keeps its initial value
                if not bare.startswith((*skip, *missing_ok)):
                    missing += absent
                for part in parts if name in chunk else ():
                    shape, own = stored[part.key], tuple(part.global_shape)
                    # Embedding tables may differ in their padding, which depends on the split.
                    if not part.allow_shape_mismatch and shape != own:
                        raise UserError(
                            f"{path} holds {part.key} of shape {shape}, but this model's is "
                            f"{own}; set its keys as in its model_config.yaml (for learned "
                            "positions encoder_seq_length and max_position_embeddings)."
                        )
        if strict and missing:
            missing = sorted(set(missing))
            raise UserError(
                f"{path} lacks {len(missing)} weight(s) of this model, such as {missing[0]!r}: "
                "compare its model_config.yaml."
            )
        loaded = load_weights(source, sharded)
        self.load_sharded_weights(loaded, strict=strict and not missing_ok)

    def check_checkpoint(self, folder: Path) -> None:
        """Check, on all ranks, that a checkpoint belongs to this model, before it is loaded."""

    @classmethod
    def restore_from(
        cls,
        restore_path: str | PathLike[str],
        override_config_path: DictConfig | None = None,
        map_location: Any = None,
        strict: bool = True,
        return_config: bool = False,
        save_restore_connector: Any = None,
        trainer: Trainer | None = None,
        validate_access_integrity: bool = True,
    ) -> "MegatronGPTModel | DictConfig":
        """Build the model that a `.nemo` describes and load its weights (NeMo's signature); all
        ranks call it. `UserError`: the path does not exist or does not fit the model.

        Args:
            override_config_path: configuration to use instead of the file's own.
            strict: as for `load_nemo_weights`.
            save_restore_connector: `CustomSaveRestoreConnector`; of others nothing is used.
            map_location, validate_access_integrity: no effect.
        """
        source = open_source(restore_path, "restore_path")
        if return_config:
            return source.config()
        cfg = source.config() if override_config_path is None else override_config_path
        with open_dict(cfg):
            cfg.pop("target", None)
        model = cls(cfg, trainer=trainer)
        base_only = getattr(save_restore_connector, "load_base_model_only", False)
        model.load_nemo_weights(
            source,
            strict=strict,
            missing_ok=cls.fresh_weights(),
            skip=cls.fresh_weights() if base_only else (),
        )
        return model

    @classmethod
    def fresh_weights(cls) -> tuple[str, ...]:
        """Name prefixes of weights that a base checkpoint may lack."""
        return ()


__all__ = ["MegatronGPTModel", "build_tokenizer"]
