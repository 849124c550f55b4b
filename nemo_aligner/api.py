# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The package from Python: jobs, and a policy to hold in the hand.

    import nemo_aligner as na

    na.DPO({"pretrained_checkpoint.restore_from_path": "sft.nemo", ...}).run()
    policy = na.Policy.load("results/gpt_dpo")
    print(policy.generate(["The film"], max_length=20))

`nemo_aligner` hands these names on and imports what is behind them when it is first asked for.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from nemo_aligner.config.checks import check_keys, check_sections
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.optim_rules import check_optim
from nemo_aligner.config.values import Values, plain_dict
from nemo_aligner.convert.conversions import Options, check_target, from_nemo
from nemo_aligner.core.endings import ExitCode, note_ending
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import begins_with_bos, text_tokens
from nemo_aligner.generate.policy import newest_weights, refuse_heads
from nemo_aligner.generation.batch import padded
from nemo_aligner.jobs import rollouts, servers, supervised
from nemo_aligner.launch.endings import end_at_once
from nemo_aligner.launch.job_entry import check_job
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.launch.processes import resolve_and_create_trainer
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.parallel.collectives import on_rank_zero
from nemo_aligner.parallel.environment import is_rank_zero
from nemo_aligner.training.megatron_steps import Batch
from nemo_aligner.training.optim import learning_rate, optimizer_step
from nemo_aligner.training.stop_requests import stop_requests

# Of `Policy.train`, where nothing else is given; a checkpoint's own are of another training.
OPTIM = {
    "name": "distributed_fused_adam",
    "lr": 1e-6,
    "sched": {"name": "constant", "warmup_steps": 0, "constant_steps": 0, "min_lr": 0.0},
}


def _tree(settings: Mapping[str, Any] | None) -> DictConfig:
    """Dotted keys as a configuration."""
    tree = OmegaConf.create({}, flags={"allow_objects": True})
    for key, value in (settings or {}).items():
        above = OmegaConf.select(tree, key.rpartition(".")[0]) if "." in key else tree
        if above is not None and not OmegaConf.is_dict(above):
            raise ConfigError(f"{key}={value!r} is below a key whose value is {above!r}.")
        OmegaConf.update(tree, key, value, force_add=True)
    return tree


def _checked(columns: Batch) -> Batch:
    rows = {name: len(column) for name, column in columns.items()}
    if len({*rows.values()}) != 1:
        raise UserError(f"columns have as many rows as there are samples, but these have {rows}.")
    return columns


def _texts(given: Sequence[str]) -> Sequence[str]:
    if isinstance(given, str):
        raise UserError(f"{given!r} is one text; give a list of them.")
    return given


class Job:
    """A job of the command line, such as `nemo-aligner train dpo`; `cfg` is its configuration,
    complete. `settings` have dotted keys; others have their defaults (`nemo-aligner config dpo`
    prints them). `job` is a function of `nemo_aligner.jobs`. `ConfigError`: a text in the place of
    a section, and the like.
    """

    def __init__(self, job: Any, settings: Mapping[str, Any] | None = None):
        self._job = job
        given = _tree(settings)
        check_sections(plain_dict(given), job.config_name)
        self.cfg: DictConfig = complete_config(given, job.config_name)

    def check(self) -> list[str]:
        """Check the configuration and the files that it names, as `run` does first; returns what a
        user should know of it. `UserError`: with the key, the value and the remedy.
        """
        notes = check_job(self.cfg, self._job.config_name)
        self._job.check(self.cfg)
        return notes

    def run(self) -> None:
        """Run the job to its end, from its last checkpoint if it has one. A server serves until
        the process is stopped. With several devices the script is started once for each, as by
        Lightning: keep what it does behind `if __name__ == "__main__":`. `UserError`: what the
        command would end with. `JobStopped`: after a save, at the time limit or a signal.
        """
        with stop_requests.watching(end_at_once):
            try:
                self._job.__wrapped__(self.cfg)
            except Exception as error:
                code, reason = ExitCode.FAILED, f"{type(error).__name__}: {error}"
                note_ending(code, reason, stop_requests.step)
                raise
            note_ending(ExitCode.FINISHED, "finished", stop_requests.step)


SFT, RewardModel = partial(Job, supervised.train_sft), partial(Job, supervised.train_rm)
DPO, KTO = partial(Job, supervised.train_dpo), partial(Job, supervised.train_kto)
SPIN, SteerLM2 = partial(Job, supervised.train_spin), partial(Job, supervised.train_steerlm2)
Distillation = partial(Job, supervised.train_distill)
PPO, RS = partial(Job, rollouts.train_ppo), partial(Job, rollouts.train_rs)
REINFORCE = partial(Job, rollouts.train_reinforce)
CriticServer, RewardServer = partial(Job, servers.serve_critic), partial(Job, servers.serve_reward)
TeacherServer = partial(Job, servers.serve_teacher)


class Policy:
    """A policy to generate with, to score with and to train: `model`, a `GPTSFTModel`, with its
    `tokenizer`; every rank makes the same calls.
    """

    def __init__(self, model: GPTSFTModel):
        self.model, self.tokenizer = model, model.tokenizer

    @classmethod
    def load(cls, path: str | Path, settings: Mapping[str, Any] | None = None) -> "Policy":
        """The policy in a `.nemo`, a Hugging Face folder or the newest checkpoint of a job.
        `settings` of `trainer` and `model`, as of supervised fine-tuning, go over those of the
        checkpoint: `{"model.optim.lr": 1e-6, "model.peft.peft_scheme": "lora", "trainer.devices":
        2}`. `UserError`: the path does not exist, or holds no policy. `ConfigError`: a setting
        that cannot work.
        """
        source = newest_weights(path, "path")
        refuse_heads(source)
        cfg = OmegaConf.create({"trainer": {}, "model": {"optim": OPTIM}})
        given = _tree(settings)
        for section in given:
            if section not in cfg or given[section] is None:
                raise ConfigError(f"{section}: give keys of model and trainer.")
        check_sections(plain_dict(given), GPTSFTModel.CONFIG_NAME)
        cfg.merge_with(given)
        check_keys(plain_dict(cfg), GPTSFTModel.CONFIG_NAME)
        values = Values(plain_dict(cfg))
        for key in JOBS[GPTSFTModel.CONFIG_NAME].keys.values():
            if values.get(key.name) is not None:
                key.check(values)
        check_optim(cfg.model.optim)
        cfg.model.overwrite_base_config = {"optim": True}  # of the training before
        trainer = resolve_and_create_trainer(cfg)
        model = load_from_nemo(GPTSFTModel, cfg, trainer, restore_path=source)
        if "peft" in cfg.model:
            model.init_peft(model.cfg.peft)
        model.set_eval()
        return cls(model)

    def generate(
        self,
        prompts: Sequence[str],
        max_length: int = 30,
        *,
        min_length: int = 1,
        use_greedy: bool | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        end_strings: Sequence[str] = (),
    ) -> list[str]:
        """A response to each prompt, of `min_length` to `max_length` tokens (fewer after a long
        prompt). `use_greedy` None: unless `temperature`, `top_k` or `top_p` is given; others are
        as `sampling_params` of jobs. `UserError`: no room for a response. `ConfigError`: a value
        that cannot work.
        """
        if not _texts(prompts):
            return []
        self.model.set_eval()
        sampling = {
            "use_greedy": (temperature, top_k, top_p) == (1.0, 0, 1.0)
            if use_greedy is None
            else use_greedy,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
            "end_strings": list(end_strings),
        }
        lengths = {"max_length": max_length, "min_length": min_length}
        return list(self.model.generate(prompts, lengths, sampling)["predictions"])

    def logprobs(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Tensor]:
        """float32 `[tokens of the response]` for each pair, without dropout."""
        if not _texts(prompts):
            return []
        tokens, starts, ends = self.tokenize(prompts, responses)
        self.model.set_eval()
        found = self.model.get_inference_log_probs(tokens, response_lengths=ends)
        rows = zip(found, starts.tolist(), ends.tolist(), strict=True)
        return [row[start - 1 : end - 1] for row, start, end in rows]

    def tokenize(
        self, prompts: Sequence[str], responses: Sequence[str]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples as columns for a loss: `tokens` int64 `[B, S]`, padded with eos, and int64 `[B]`
        each: where the response begins, and where it ends. `UserError`: a prompt or response
        without a token, or a sample that is too long.
        """
        if not len(_texts(prompts)) == len(_texts(responses)) > 0:
            raise UserError(
                f"{len(prompts)} prompts with {len(responses)} responses; give a response to each."
            )
        with_bos = begins_with_bos(self.tokenizer, None, "add_BOS")
        rows, starts = [], []
        limit = self.model.cfg.encoder_seq_length
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            begin = text_tokens(self.tokenizer, prompt, with_bos)
            rows.append([*begin, *text_tokens(self.tokenizer, response, False)])
            starts.append(len(begin))
            if not 0 < len(begin) < len(rows[-1]) <= limit:
                raise UserError(
                    f"sample {number} has {len(begin)} tokens of a prompt and "
                    f"{len(rows[-1]) - len(begin)} of a response; both need one, and together "
                    f"they may have model.encoder_seq_length={limit}."
                )
        tokens = padded(rows, torch.device("cpu"), self.tokenizer.eos_id)
        return tokens, torch.tensor(starts), torch.tensor([len(row) for row in rows])

    def train(
        self,
        loss: Callable[..., tuple[Tensor, Batch]],
        columns: Batch,
        clip: float | None = 1.0,
        **options: Any,
    ) -> dict[str, float]:
        """One optimizer update by `loss` of a global batch. Returns the metrics of the loss, `lr`
        and, with clipping, `grad_norm`. `NonFiniteError`: the loss or the gradient is NaN or
        infinite; no weight has changed. `UserError`: a clip that is not positive, columns of
        unequal length.

        Args:
            loss, columns, options: as for `LogProbsMixin.compute_loss`: `loss` is your own
                function of the tensors that its parameters name, or one of `na.losses` that takes
                `logprobs` and `weights` of tokens (`sft_loss`, `reinforce_loss`; `ppo_actor_loss`
                with `functools.partial` for its settings); `columns` are this data-parallel rank's
                share.
            clip: largest norm of the gradient; None: no clipping.
        """
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip={clip!r}: give a norm above 0, or None for no clipping.")
        model, columns = self.model, _checked(columns)
        if model._optimizer is None:
            model.setup_megatron_optimization(max_steps=1)
        assert model._optimizer is not None and model._scheduler is not None
        model.prepare_for_training_step()
        _, metrics = model.compute_loss(loss, columns, False, **options)
        model.finish_training_step()
        metrics["lr"] = learning_rate(model._optimizer)
        norm = optimizer_step(model._optimizer, model._scheduler, clip)
        model.set_eval()
        return metrics if norm is None else metrics | {"grad_norm": float(norm)}

    def evaluate(
        self, loss: Callable[..., tuple[Tensor, Batch]], columns: Batch, **options: Any
    ) -> dict[str, float]:
        """The metrics of `loss`, as for `train`, without learning and without dropout."""
        self.model.set_eval()
        _, metrics = self.model.compute_loss(loss, _checked(columns), True, **options)
        return metrics

    def save(self, path: str | Path) -> None:
        """Write a `.nemo`, or without a suffix a folder; what every job and `load` take."""
        self.model.save_to(str(path))

    def save_hf(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write a Hugging Face folder, with `overwrite` in the place of one; adapters are merged
        into their base. `UserError`: on all ranks, if it exists or Hugging Face cannot express the
        model.
        """
        options = Options(overwrite=overwrite)
        target = on_rank_zero(lambda: check_target(Path(), Path(folder), options))
        place = on_rank_zero(lambda: tempfile.mkdtemp(prefix=".weights-", dir=target.parent))
        try:
            self.model.save_to(f"{place}/policy/")
            on_rank_zero(lambda: from_nemo(Path(place) / "policy", target, options))
        finally:
            if is_rank_zero():
                shutil.rmtree(place)
