# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From the configuration of a job to the numbers that the formulas need: the YAML file's defaults,
the checkpoint's values and the user's overrides, merged as in the job's script.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_aligner.config.checks import check_keys
from nemo_aligner.config.defaults import base_dropout, complete_config, complete_model, drop_unset
from nemo_aligner.config.fields import Configuration
from nemo_aligner.config.jobs import JOBS as CONFIGURATIONS
from nemo_aligner.config.optim_rules import OPTIMIZERS
from nemo_aligner.config.peft_rules import trains_adapters
from nemo_aligner.config.rollout_rules import asked_reshard, generation_sizes
from nemo_aligner.config.values import Values, laid_over, plain_dict
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import ADVANTAGE_ESTIMATORS
from nemo_aligner.plan.memory import Workload
from nemo_aligner.plan.parameters import Split

# What a job needs at start and has no part in its memory.
UNRELATED = {
    "model.data.data_prefix": {"train": ["train.jsonl"]},
    "model.data.train_ds.file_path": "train.jsonl",
    "model.data.validation_ds.file_path": "validation.jsonl",
}

ON_POLICY = "model.knowledge_distillation.on_policy.fraction"  # of a student's own responses


@dataclass(frozen=True)
class Job:
    """What it computes follows from its keys."""

    name: str  # as the command shows it
    config: Configuration
    script: str  # that starts it
    forward_key: str = ""  # of the samples of a forward pass without gradient; "": there is none
    needs: tuple[str, ...] = ()  # overrides without which the script refuses to start

    @property
    def trains(self) -> bool:
        return self.config.algo is not None

    @property
    def rollout_keys(self) -> tuple[str, ...]:
        """Of the samples that are generated together; none: it generates nothing."""
        keys = self.config.keys
        return tuple(key for key in keys if key.endswith("rollout_micro_batch_size"))

    @property
    def unit(self) -> int:
        """Samples that `forward_key` counts as one: 2 for pairs."""
        return 2 if self.config.records == "pair" else 1


def _job(
    config_name: str,
    name: str = "",
    script: str = "",
    forward_key: str = "",
    needs: tuple[str, ...] = (),
) -> Job:
    """The job of a configuration; one that trains has its `forward_key` in its own section."""
    config = CONFIGURATIONS[config_name]
    for key in ("forward_micro_batch_size", "log_prob_forward_micro_batch_size"):
        if f"model.{config.algo}.{key}" in config.keys:
            forward_key = forward_key or f"model.{config.algo}.{key}"
    script = f"examples/nlp/gpt/{script or f'train_{config_name}'}.py"
    return Job(name or str(config.algo).upper(), config, script, forward_key, needs)


CRITIC = _job("gpt_ppo_critic", "critic", "serve_ppo_critic", "model.forward_micro_batch_size")
REWARD_SERVER = _job(
    "inference_rm", "reward server", "serve_reward_model", "model.forward_micro_batch_size"
)
TEACHER = _job("inference_teacher", "teacher", "serve_teacher", "model.micro_batch_size")
# By the section of a job that has the address.
SERVERS = {"remote_critic_rm": CRITIC, "remote_rm": REWARD_SERVER, "remote_teacher": TEACHER}
STUDENT = _job("gpt_knowledge_distillation", "student")
STEERLM2 = _job(
    "gpt_sft",
    "SteerLM 2",
    "train_steerlm2",
    "model.steerlm2.forward_micro_batch_size",
    ("model.data.chat=True",),
)


def _jobs(config: Configuration) -> tuple[Job, ...]:
    """The jobs that run at the same time as that of `config`, which is the first."""
    servers = [server for section, server in SERVERS.items() if section in config.sections]
    name = "actor" if "model.data.data_prefix" in config.keys and servers else ""
    return (_job(config.name, name), *servers)


# What `--job` can be.
JOBS = {str(job.algo): _jobs(job) for job in CONFIGURATIONS.values() if job.algo}
JOBS["rm"] = (_job("training_rm", "reward model", "train_reward_model"),)
# The critic has the same section; whether there is a teacher, a key says.
JOBS["ppo"] = _jobs(CONFIGURATIONS["gpt_ppo_actor"])[:2]
JOBS["steerlm2"] = (STEERLM2,)
JOBS["distill"] = (STUDENT, *JOBS.pop("knowledge_distillation")[1:])
ACTOR = JOBS["ppo"][0]


def read_overrides(texts: list[str]) -> DictConfig:
    """`key=value` as Hydra takes them, with `+` and `++`; `ConfigError`: no key, or no value."""
    for text in texts:
        key, sign, _ = text.partition("=")
        if not sign or not key.strip("+ "):
            raise ConfigError(
                f"{text!r} is no override; give key=value, such as model.micro_batch_size=2."
            )
    try:
        return OmegaConf.from_dotlist([text.lstrip("+") for text in texts])
    except Exception as error:  # of YAML or OmegaConf, which share no base class
        raise ConfigError(f"an override cannot be read: {error}") from error


def chosen_jobs(kind: str, overrides: list[str]) -> tuple[Job, ...]:
    """The jobs that run at the same time; PPO without a critic has a reward server in its place,
    and only on-policy distillation and PPO with `teacher_kl_coef` a teacher. `ConfigError`: an
    override that none of the jobs knows.
    """
    jobs = JOBS[kind]
    given = Values(plain_dict(read_overrides(overrides)))
    estimator = ADVANTAGE_ESTIMATORS.get(str(given.get("trainer.ppo.advantage_estimator")))
    if kind == "ppo" and estimator is not None and not estimator.needs_critic:
        jobs = (ACTOR, REWARD_SERVER)
    if kind == "ppo" and given.get("trainer.ppo.teacher_kl_coef"):
        jobs = (*jobs, TEACHER)
    if kind == "distill" and given.get(ON_POLICY) is None:
        jobs = (STUDENT,)
    for text in overrides:
        if not any(knows(job, text) for job in jobs):
            check_keys(plain_dict(read_overrides([text])), jobs[0].config.name)
    return jobs


def knows(job: Job, override: str) -> bool:
    try:
        check_keys(plain_dict(read_overrides([override])), job.config.name)
    except ConfigError:
        return False
    return True


def job_config(
    job: Job, checkpoint: Mapping[str, Any], overrides: list[str], path: str
) -> dict[str, Any]:
    """What the script of the job would compute with, as plain values. `ConfigError`: a key that
    the job does not have or that needs a value, or a reference that leads nowhere.
    """
    given = read_overrides(overrides)
    for key, value in {job.config.restore_key: path, **UNRELATED}.items():
        if key in job.config.keys:
            OmegaConf.update(given, key, value, merge=False, force_add=True)
    cfg = complete_config(given, job.config.name)
    check_keys(plain_dict(cfg), job.config.name)
    for known in job.config.keys.values():
        known.check_null(Values(plain_dict(cfg)))
    OmegaConf.set_struct(cfg, False)
    if cfg.trainer.precision is None:
        cfg.trainer.precision = "bf16"  # of GPUs
    try:
        own = plain_dict(drop_unset(cfg.model), resolve=True)
        without = ("target", "optim", *base_dropout(cfg.model, checkpoint, job.config.name))
        base = {key: value for key, value in checkpoint.items() if key not in without}
        cfg.model = complete_model(OmegaConf.create(laid_over(base, own)), job.config.name)
        return plain_dict(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration of the {job.name} has no value: {error}") from error


def read_workload(job: Job, cfg: Mapping[str, Any], split: Split) -> Workload:
    """What a job computes at once, by `job_config` and the split's micro-batches."""
    v, model = Values(cfg), cfg["model"]
    width = model["encoder_seq_length"]
    if job.config is STEERLM2.config:  # SFT, too
        width = model["data"]["train_ds"]["max_seq_length"] or width
    tokens = model.get("dynamic_micro_batch_tokens")
    by_tokens = tokens is not None

    def samples(size: int, together: int) -> int:
        """Of a micro-batch of the longest: `size` or what tokens allow, times `together`."""
        return together * (max(tokens // (width * together), 1) if by_tokens else size)

    unit = 1 if by_tokens else job.unit  # by tokens the responses of a pair are dealt out singly
    forward = samples(v.get(job.forward_key), unit) if job.forward_key else 0
    w = Workload(job.trains, width, unit=unit, by_tokens=by_tokens, forward_samples=forward)
    if not job.trains:
        return w
    together = 2 if job.config.pairs else 1
    own = samples((model["steerlm2"] if job is STEERLM2 else model)["micro_batch_size"], together)
    optimizer = OPTIMIZERS[model["optim"]["name"]]
    w = replace(
        w,
        samples=own,
        # the batch of SteerLM 2 counts prompts, whose numbers of responses only the data know
        micro_batches=max(
            model["global_batch_size"] * together // (own * split.dp),
            split.pp if job is STEERLM2 else 1,
        ),
        recompute=model["activations_checkpoint_granularity"],
        recompute_layers=model["activations_checkpoint_num_layers"] or 1,
        block=model["activations_checkpoint_method"] == "block",
        distributed_optimizer=optimizer.distributed,
        state_bytes=8 if optimizer.kind != "sgd" else 4 * bool(model["optim"].get("momentum")),
    )
    if job.config is CRITIC.config:
        swaps = bool(cfg["trainer"]["ppo"]["combine_rm_and_critic_server"])
        return replace(w, swaps=swaps, offloads=bool(model["offload_adam_states"]))
    adapters = trains_adapters(cfg)
    merges = adapters and bool(model["peft"].get("merge_for_generation"))
    whole = merges or not adapters  # no adapter lies beside the weights
    if job is STUDENT and v.get(ON_POLICY, 0) > 0:
        settings = model["knowledge_distillation"]["on_policy"]
        share = max(model["global_batch_size"] // split.dp, 1)
        return replace(
            w,
            rollout_samples=min(settings["rollout_micro_batch_size"] or share, share),
            response=settings["length_params"]["max_length"],
            merges=merges,
            graphs=whole,
        )
    section, loop = f"model.{job.config.algo}", f"trainer.{job.config.algo}"
    if v.get(f"{section}.ref_policy_kl_penalty") is not None:  # preferences
        reference = v.get(f"{section}.ref_log_probs_dir") is None
    else:
        in_reward = v.get(f"{loop}.initial_policy_kl_penalty", 0)
        reference = in_reward > 0 or v.get(f"{section}.kl_loss_coef", 0) > 0
    w = replace(w, reference=reference)  # a copy of its weights
    if f"{section}.generation.kv_cache_gb" not in job.config.keys:
        return w
    settings = v.get(section)
    scores = w.reference or "rollout_logprobs" in settings
    return replace(
        w,
        forward_samples=forward if scores else 0,
        rollout_samples=max(v.get(key) for key in job.rollout_keys),
        cache_memory=(settings["generation"]["kv_cache_gb"] or 0) * 1e9,
        response=settings["length_params"]["max_length"],
        merges=merges,
        graphs=whole and settings["generation"]["cuda_graphs"] is not False,
        generation=generation_sizes(asked_reshard(settings), split.tp, split.pp),
        offloads=bool(settings["offload_adam_states"]),
    )
