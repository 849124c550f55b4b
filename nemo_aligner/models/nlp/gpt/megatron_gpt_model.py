# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTModel`: a GPT of Megatron Core behind NeMo's `ModelPT`.

It owns what every role (actor, critic, reward model, SFT) shares: construction from NeMo-style
keys, the tokenizer, weights in and out (`.nemo`, host copies, swaps) and the optimizer. Roles add
losses; `nemo_aligner.training.megatron_steps` runs the passes.
"""

import contextlib
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.common.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from nemo.core import ModelPT
from nemo.core.classes.common import ALLOWED_TARGET_PREFIXES
from omegaconf import DictConfig, OmegaConf, open_dict

from nemo_aligner.checkpoint import nemo_archive
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.models.nlp.gpt.megatron_config import (
    build_layer_spec,
    build_transformer_config,
    pad_vocab_size,
    torch_dtype,
)
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.optim import (
    build_optimizer,
    build_scheduler,
    chained_optimizers,
    wrap_with_ddp,
)

# NeMo instantiates only classes whose path it knows.
if isinstance(ALLOWED_TARGET_PREFIXES, list) and "nemo_aligner." not in ALLOWED_TARGET_PREFIXES:
    ALLOWED_TARGET_PREFIXES.append("nemo_aligner.")


def build_tokenizer(cfg: DictConfig):
    """NeMo tokenizer from `model.tokenizer`.

    Library `sentencepiece` takes `model`, a file; `huggingface` takes `type`, a folder or name.

    Raises:
        ConfigError: unknown library.
        UserError: the named file or folder does not exist or cannot be read.
    """
    library = cfg.get("library", "sentencepiece")
    if library == "sentencepiece":
        path = cfg.get("model", None)
        if not path or not Path(path).is_file():
            raise UserError(
                f"model.tokenizer.model={path} does not exist; give the path of a SentencePiece "
                ".model file."
            )
        return SentencePieceTokenizer(path, legacy=cfg.get("sentencepiece_legacy", False) or False)
    if library == "huggingface":
        name = cfg.get("type", None)
        if not name or (str(name).startswith(("/", ".")) and not Path(name).is_dir()):
            raise UserError(
                f"model.tokenizer.type={name} does not exist; give the folder of a Hugging Face "
                "tokenizer."
            )
        try:
            tokenizer = AutoTokenizer(name, use_fast=cfg.get("use_fast", True))
        except (ValueError, OSError) as error:
            raise UserError(
                f"model.tokenizer.type={name} cannot be loaded as a Hugging Face tokenizer: "
                f"{error}"
            ) from error
        if tokenizer.tokenizer.eos_token_id is None:
            raise UserError(
                f"the tokenizer in {name} has no eos token; add one to its tokenizer_config.json."
            )
        return tokenizer
    raise ConfigError(
        f"model.tokenizer.library={library!r} is not supported; use sentencepiece or huggingface."
    )


class MegatronGPTModel(ModelPT):
    """GPT on Megatron Core.

    Args:
        cfg: model configuration (NeMo keys; see docs/config.md). Parallel sizes come from it.
        trainer: Lightning trainer; it knows devices and nodes and starts the processes of this
            job.

    Attributes:
        model: list of this pipeline stage's model chunks. `setup_megatron_optimization` wraps them
        for training.
        tokenizer: NeMo tokenizer.
        transformer_config: Megatron Core's configuration.
        padded_vocab_size: rows of the embedding table; ids from `tokenizer.vocab_size` on are
        padding.

    Every rank constructs the model, once the job's processes are there
    (`launch.processes.init_distributed`); the constructor sets up Megatron's process groups.
    """

    def __init__(self, cfg: DictConfig, trainer=None):
        world_size = 1 if trainer is None else trainer.world_size
        if world_size > 1 and not torch.distributed.is_initialized():
            raise UserError(
                f"{type(self).__name__} was built in a job of {world_size} processes that are not "
                "connected yet; call nemo_aligner.launch.processes.init_distributed(trainer) "
                "first, or build the model with load_from_nemo, which does."
            )
        parallel_state.initialize(
            tensor_model_parallel_size=cfg.get("tensor_model_parallel_size", 1) or 1,
            pipeline_model_parallel_size=cfg.get("pipeline_model_parallel_size", 1) or 1,
            virtual_pipeline_model_parallel_size=cfg.get(
                "virtual_pipeline_model_parallel_size", None
            ),
            context_parallel_size=cfg.get("context_parallel_size", 1) or 1,
            expert_model_parallel_size=cfg.get("expert_model_parallel_size", 1) or 1,
            seed=cfg.get("seed", 1234),
        )
        super().__init__(cfg, trainer=trainer)
        self.tokenizer = build_tokenizer(self.cfg.tokenizer)
        self.transformer_config = build_transformer_config(self.cfg)
        self.padded_vocab_size = pad_vocab_size(
            self.tokenizer.vocab_size,
            self.cfg.get("make_vocab_size_divisible_by", 128),
            self.transformer_config.tensor_model_parallel_size,
        )
        # The same initial weights whatever happened before, and others on each pipeline stage.
        torch.manual_seed(
            self.cfg.get("seed", 1234) + 100 * parallel_state.get_pipeline_model_parallel_rank()
        )
        self.model = [self._build_chunk(stage) for stage in range(self._num_chunks())]
        if parallel_state.get_context_parallel_world_size() > 1:
            parallel_state.seed_generators(self.cfg.get("seed", 1234), by_context_rank=True)

    # --- construction ---------------------------------------------------------------------------------------------

    def _num_chunks(self) -> int:
        return self.transformer_config.virtual_pipeline_model_parallel_size or 1

    def _build_chunk(self, vp_stage: int):
        virtual = self._num_chunks() > 1
        first = parallel_state.is_pipeline_first_stage() and vp_stage == 0
        last = parallel_state.is_pipeline_last_stage() and vp_stage == self._num_chunks() - 1
        module = self.module_provider(first, last, vp_stage if virtual else None)
        module.to(get_device())
        if self.transformer_config.bf16:
            module = Float16Module(self.transformer_config, module)
        return module

    def module_args(self) -> dict:
        """Constructor arguments of `GPTModel` that come from the configuration."""
        position = {"rope": "rope", "learned_absolute": "learned_absolute", "none": "none"}.get(
            self.cfg.get("position_embedding_type", "learned_absolute")
        )
        if position is None:
            raise ConfigError(
                f"model.position_embedding_type={self.cfg.position_embedding_type!r} is not "
                "supported; use rope, "
                "learned_absolute or none."
            )
        return dict(
            config=self.transformer_config,
            vocab_size=self.padded_vocab_size,
            max_sequence_length=self.cfg.get("max_position_embeddings", None)
            or self.cfg.encoder_seq_length,
            parallel_output=True,
            share_embeddings_and_output_weights=self.cfg.get(
                "share_embeddings_and_output_weights", True
            ),
            position_embedding_type=position,
            rotary_percent=self.cfg.get("rotary_percentage", 1.0),
            rotary_base=self.cfg.get("rotary_base", 10000),
            seq_len_interpolation_factor=self.cfg.get("seq_len_interpolation_factor", None),
        )

    def module_provider(
        self, pre_process: bool, post_process: bool, vp_stage: int | None = None
    ) -> torch.nn.Module:
        """The bare Megatron module of one chunk; roles with a head override it."""
        return GPTModel(
            transformer_layer_spec=build_layer_spec(self.transformer_config, vp_stage),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            **self.module_args(),
        )

    def setup_training_data(self, *_args, **_kwargs):
        """Data is set up by the scripts, not by the model."""

    def setup_validation_data(self, *_args, **_kwargs):
        """Data is set up by the scripts, not by the model."""

    def list_available_models(self):
        """No pretrained models are distributed."""
        return []

    # --- modules and modes ----------------------------------------------------------------------------------------

    def unwrapped(self) -> list[torch.nn.Module]:
        """The bare Megatron modules, without DDP and precision wrappers."""
        return unwrap_model(self.model)

    def set_train(self) -> None:
        for chunk in self.model:
            chunk.train()

    def set_eval(self) -> None:
        for chunk in self.model:
            chunk.eval()

    # --- optimization ---------------------------------------------------------------------------------------------

    def setup_megatron_optimization(self, max_steps: int):
        """Wrap the chunks for data parallelism and build optimizer and schedule; all ranks call
        it, once.

        Args:
            max_steps: optimizer updates of the whole job (horizon of the learning rate).

        Returns:
            (optimizer, scheduler): Megatron Core's `MegatronOptimizer` and
            `OptimizerParamScheduler`.
        """
        self.model = wrap_with_ddp(self.model, self.cfg.optim)
        for chunk in self.model:
            chunk.broadcast_params()  # replicas start equal whatever they were loaded from
        optimizer = build_optimizer(
            self.model, self.cfg.optim, torch_dtype(self.cfg.get("precision", 32))
        )
        if self.transformer_config.bf16:
            for chunk in self.model:
                chunk.config.grad_scale_func = optimizer.scale_loss
        self._optimizer = optimizer
        return optimizer, build_scheduler(optimizer, self.cfg.optim, max_steps)

    def _move_adam_states(self, device: torch.device) -> None:
        # Not the optimizer's weights: where they are fp32 they are the model's own, which
        # inference needs in place.
        for part in chained_optimizers(self._optimizer):
            for state in part.optimizer.state.values() if part.optimizer is not None else ():
                tensors = {
                    name: value for name, value in state.items() if isinstance(value, torch.Tensor)
                }
                state.update(
                    {name: value.to(device) for name, value in tensors.items() if value.dim() > 0}
                )

    def offload_optimizer(self, wanted: bool = True) -> None:
        """Move Adam's states to host memory until `onload_optimizer`; nothing without CUDA."""
        if wanted and torch.cuda.is_available() and hasattr(self, "_optimizer"):
            self._move_adam_states(torch.device("cpu"))
            torch.cuda.empty_cache()

    def onload_optimizer(self, wanted: bool = True) -> None:
        """Bring back what `offload_optimizer` moved; nothing if it is there."""
        if wanted and torch.cuda.is_available() and hasattr(self, "_optimizer"):
            self._move_adam_states(get_device())

    def prepare_for_training_step(self) -> None:
        """Before the forward-backward pass of one global batch: train mode and empty gradient
        buffers.
        """
        self.set_train()
        for chunk in self.model:
            # The fp32 optimizer leaves `grad` pointing into the buffer; the next backward would
            # count it twice.
            chunk.zero_grad(set_to_none=True)
            chunk.zero_grad_buffer()

    def finish_training_step(self) -> None:
        """Gradients are already reduced over ranks: Megatron's schedule does it when the last
        micro-batch is done.
        """

    def prepare_for_validation_step(self) -> None:
        self.set_eval()

    def finish_validation_step(self) -> None:
        self.set_train()

    # --- weights --------------------------------------------------------------------------------------------------

    def _named_weights(self):
        for index, module in enumerate(self.unwrapped()):
            for name, tensor in module.state_dict(keep_vars=True).items():
                if isinstance(tensor, torch.Tensor):
                    yield f"{index}.{name}", tensor

    @torch.no_grad()
    def weights_to_cpu(
        self, into: dict[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Copy of this rank's weights in host memory (pinned with CUDA); `into` is a former copy
        to write over.
        """
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
    def load_cpu_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Write weights from `weights_to_cpu` into the model, in place (optimizer and DDP buffers
        stay attached).
        """
        for name, tensor in self._named_weights():
            tensor.copy_(weights[name], non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def swapped_weights(self, weights: dict[str, torch.Tensor]):
        """Inside, the model computes with `weights`; afterwards with its own again."""
        self._swap_buffer = self.weights_to_cpu(into=getattr(self, "_swap_buffer", None))
        self.load_cpu_weights(weights)
        try:
            yield
        finally:
            self.load_cpu_weights(self._swap_buffer)

    def sharded_weights(self, metadata: dict | None = None) -> dict:
        """Megatron Core sharded state dict of the weights, under NeMo's key prefix `model.`; all
        ranks call it.
        """
        sharded = {}
        for index, chunk in enumerate(self.unwrapped()):
            # Virtual chunks share one name space: Megatron Core numbers layers globally.
            sharded[f"model{index}"] = chunk.sharded_state_dict(prefix="model.", metadata=metadata)
        return sharded

    def load_sharded_weights(self, loaded: dict, strict: bool = True) -> None:
        """Put what `dist_checkpointing.load` made of `sharded_weights()` into the modules."""
        for index, chunk in enumerate(self.unwrapped()):
            weights = {
                name.removeprefix("model."): value
                for name, value in loaded[f"model{index}"].items()
            }
            chunk.load_state_dict(weights, strict=strict)

    def save_to(self, save_path: str) -> None:
        """Write a `.nemo`; all ranks call it. A path that ends in "/" or in no suffix becomes a
        directory.
        """
        as_directory = str(save_path).endswith("/") or not Path(save_path).suffix
        config = OmegaConf.create(OmegaConf.to_container(self.cfg, resolve=True))
        nemo_archive.write_nemo(
            save_path, config, self.sharded_weights(), as_directory=as_directory
        )

    def load_nemo_weights(
        self,
        restore_path,
        strict: bool = True,
        missing_ok: tuple[str, ...] = (),
        skip: tuple[str, ...] = (),
    ) -> None:
        """Load the weights of a `.nemo` at whatever split this job runs; all ranks call it.

        Args:
            missing_ok: names (prefixes after `model.`) that the file may lack, such as a fresh
                head; they keep their initial values.
            skip: prefixes of weights to leave at their initial values even if the file has them.

        Raises:
            UserError: the file lacks other weights of this model, or their shapes differ.
        """
        sharded = self.sharded_weights()
        with nemo_archive.weights_folder(restore_path) as folder:
            stored = dist_checkpointing.load_tensors_metadata(str(folder))
            for chunk in sharded.values():
                for name, tensor in list(chunk.items()):
                    bare = name.removeprefix("model.")
                    if bare.startswith(skip or ("\0",)) or (
                        bare.startswith(missing_ok or ("\0",)) and tensor.key not in stored
                    ):
                        del chunk[name]
            wanted = [
                t
                for c in sharded.values()
                for t in c.values()
                if isinstance(t, dist_checkpointing.ShardedTensor)
            ]
            missing = sorted({t.key for t in wanted} - set(stored))
            if strict and missing:
                raise UserError(
                    f"{restore_path} lacks {len(missing)} weight(s) of this model, such as "
                    f"{missing[0]!r}: it holds "
                    "another architecture. Compare its model_config.yaml."
                )
            for tensor in wanted:
                have = tuple(stored[tensor.key].global_shape) if tensor.key in stored else None
                # Embedding tables may differ in their padding rows, which depend on the split.
                if (
                    have not in (None, tuple(tensor.global_shape))
                    and not tensor.allow_shape_mismatch
                ):
                    raise UserError(
                        f"{restore_path} holds {tensor.key} of shape {have}, but this model's is "
                        f"{tuple(tensor.global_shape)}. Set the model's keys as in its "
                        "model_config.yaml (a learned "
                        "position embedding: model.encoder_seq_length and "
                        "model.max_position_embeddings)."
                    )
            loaded = dist_checkpointing.load(sharded, str(folder))
        self.load_sharded_weights(loaded, strict=strict and not missing_ok)

    @classmethod
    def restore_from(
        cls,
        restore_path,
        override_config_path=None,
        map_location=None,
        strict: bool = True,
        return_config: bool = False,
        save_restore_connector=None,
        trainer=None,
        validate_access_integrity: bool = True,
    ):
        """Build the model that a `.nemo` describes and load its weights (NeMo's signature); all
        ranks call it.

        Args:
            override_config_path: configuration to use instead of the file's own (a `DictConfig`).
            return_config: only return the configuration.

        `map_location`, `save_restore_connector` and `validate_access_integrity` have no effect:
        weights go to this process's device, and this format needs no connector.
        """
        restore_path = nemo_archive.check_restore_path(restore_path, key="restore_path")
        if return_config:
            return nemo_archive.read_config(restore_path)
        cfg = (
            override_config_path
            if override_config_path is not None
            else nemo_archive.read_config(restore_path)
        )
        with open_dict(cfg):
            cfg.pop("target", None)
        model = cls(cfg, trainer=trainer)
        model.load_nemo_weights(restore_path, strict=strict, missing_ok=cls.fresh_weights())
        return model

    @classmethod
    def fresh_weights(cls) -> tuple[str, ...]:
        """Name prefixes of weights that a base checkpoint may lack."""
        return ()


__all__ = ["MegatronGPTModel", "build_tokenizer"]
