# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From the configuration of a job to the numbers that the formulas need.

A job's configuration is that of its script: the YAML file's defaults, the checkpoint's values, the
user's overrides, in the order in which the script merges them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_aligner.config.checks import check_keys
from nemo_aligner.config.defaults import base_dropout, complete_config, complete_model, drop_unset
from nemo_aligner.config.jobs import JOBS as CONFIGURATIONS
from nemo_aligner.config.optim_rules import OPTIMIZERS
from nemo_aligner.config.peft_rules import trains_adapters
from nemo_aligner.config.rollout_rules import asked_reshard, generation_sizes
from nemo_aligner.config.rules import RESTORE_KEY, RESTORE_KEYS, SECTIONS
from nemo_aligner.config.values import Values, laid_over, plain_dict
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.plan.memory import Workload
from nemo_aligner.plan.parameters import Split

# What a job needs at start and has no part in its memory.
UNRELATED = {
    "model.data.data_prefix": {"train": ["train.jsonl"]},
    "model.data.train_ds.file_path": "train.jsonl",
    "model.data.validation_ds.file_path": "validation.jsonl",
}


@dataclass(frozen=True)
class Job:
    """One distributed job."""

    name: str  # as the command shows it
    config_name: str  # YAML file of its defaults
    script: str  # that starts it
    head: bool = False  # it has a head in place of the output layer
    # of the samples of a forward pass without gradient; empty: there is none
    forward_key: str = ""
    # of those that are generated together; none: it generates nothing
    rollout_keys: tuple[str, ...] = ()
    unit: int = 1  # samples that `forward_key` counts as one, 2 for pairs
    needs: tuple[str, ...] = ()  # overrides without which the script refuses to start
    trains: bool = True  # False for a server of a finished model

    @property
    def restore_key(self) -> str:
        """Key that names the weights the job starts from."""
        return RESTORE_KEYS.get(self.config_name, RESTORE_KEY)


SCRIPTS = "examples/nlp/gpt"
ON_POLICY = "model.knowledge_distillation.on_policy.fraction"  # of a student's own responses


def _policy(config_name: str) -> Job:
    """A policy that learns from rollouts."""
    section = f"model.{SECTIONS[config_name]}"
    return Job(
        "actor",
        config_name,
        f"{SCRIPTS}/train_{config_name}.py",
        forward_key=f"{section}.forward_micro_batch_size",
        rollout_keys=(
            f"{section}.rollout_micro_batch_size",
            f"{section}.val_rollout_micro_batch_size",
        ),
    )


def _direct(name: str, unit: int = 1, rollout_keys: tuple[str, ...] = ()) -> Job:
    """A policy that learns from what a reference policy says of responses."""
    return Job(
        name.upper(),
        f"gpt_{name}",
        f"{SCRIPTS}/train_gpt_{name}.py",
        forward_key=f"model.{name}.log_prob_forward_micro_batch_size",
        rollout_keys=rollout_keys,
        unit=unit,
    )


ACTOR, RS_ACTOR = _policy("gpt_ppo_actor"), _policy("gpt_rs_actor")
REINFORCE_ACTOR = _policy("gpt_reinforce_actor")
CRITIC = Job(
    "critic",
    "gpt_ppo_critic",
    f"{SCRIPTS}/serve_ppo_critic.py",
    head=True,
    forward_key="model.forward_micro_batch_size",
)
REWARD_SERVER = Job(
    "reward server",
    "inference_rm",
    f"{SCRIPTS}/serve_reward_model.py",
    head=True,
    forward_key="model.forward_micro_batch_size",
    trains=False,
)
SFT = Job("SFT", "gpt_sft", f"{SCRIPTS}/train_gpt_sft.py")
STEERLM2 = Job(
    "SteerLM 2",
    "gpt_sft",
    f"{SCRIPTS}/train_steerlm2.py",
    forward_key="model.steerlm2.forward_micro_batch_size",
    needs=("model.data.chat=True",),
)
REWARD_MODEL = Job("reward model", "training_rm", f"{SCRIPTS}/train_reward_model.py", head=True)
DPO, KTO = _direct("dpo", unit=2), _direct("kto")
# Its forward passes are of single responses, as is its rollout; only updates are of pairs.
SPIN = _direct("spin", rollout_keys=("model.spin.rollout_micro_batch_size",))
STUDENT = Job(
    "student",
    "gpt_knowledge_distillation",
    f"{SCRIPTS}/train_gpt_knowledge_distillation.py",
    rollout_keys=("model.knowledge_distillation.on_policy.rollout_micro_batch_size",),
)
TEACHER = Job(
    "teacher",
    "inference_teacher",
    f"{SCRIPTS}/serve_teacher.py",
    forward_key="model.micro_batch_size",
    trains=False,
)
# What `--job` can be: the jobs that run at the same time.
JOBS = {"ppo": (ACTOR, CRITIC), "rs": (RS_ACTOR, REWARD_SERVER), "sft": (SFT,)}
JOBS |= {"reinforce": (REINFORCE_ACTOR, REWARD_SERVER)}
JOBS |= {"rm": (REWARD_MODEL,), "dpo": (DPO,), "kto": (KTO,), "spin": (SPIN,)}
JOBS |= {"steerlm2": (STEERLM2,), "distill": (STUDENT, TEACHER)}


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


def job_config(
    job: Job, checkpoint: Mapping[str, Any], overrides: DictConfig, path: str
) -> dict[str, Any]:
    """The configuration that the script of the job would compute with, as plain values.

    Args:
        overrides: of the user, for this job.

    Raises:
        ConfigError: a key that the job does not have or that needs a value, or a reference that
            leads nowhere.
    """
    given = OmegaConf.merge(overrides, OmegaConf.create({}))
    assert isinstance(given, DictConfig)
    OmegaConf.update(given, job.restore_key, path, force_add=True)
    cfg = complete_config(given, job.config_name)
    for key, value in UNRELATED.items():
        section, _, name = key.rpartition(".")
        parent = OmegaConf.select(cfg, section)
        if isinstance(parent, DictConfig) and name in parent.keys():  # `in parent` misses "???"
            parent[name] = value
    check_keys(plain_dict(cfg), job.config_name)
    for known in CONFIGURATIONS[job.config_name].keys.values():
        known.check_null(Values(plain_dict(cfg)))
    OmegaConf.set_struct(cfg, False)
    if cfg.trainer.precision is None:
        cfg.trainer.precision = "bf16"  # of GPUs
    try:
        own = plain_dict(drop_unset(cfg.model), resolve=True)
        without = ("target", "optim", *base_dropout(cfg.model, checkpoint, job.config_name))
        base = {key: value for key, value in checkpoint.items() if key not in without}
        cfg.model = complete_model(OmegaConf.create(laid_over(base, own)), job.config_name)
        return plain_dict(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration of the {job.name} has no value: {error}") from error


def head_outputs(job: Job, model: Mapping[str, Any]) -> int:
    if not job.head:
        return 0
    return int((model.get("regression") or {}).get("num_attributes") or 1)


def read_workload(job: Job, cfg: Mapping[str, Any], split: Split, on_gpu: bool) -> Workload:
    """What a job computes at once, by `job_config` and the split's micro-batches."""
    model, trainer = cfg["model"], cfg["trainer"]
    by_tokens = model.get("dynamic_micro_batch_tokens") is not None
    unit = 1 if by_tokens else job.unit  # by tokens the responses of a pair are dealt out singly
    forward = _samples(job, cfg, Values(cfg).get(job.forward_key, 1), unit)
    common: dict[str, Any] = dict(
        width=_width(job, model), unit=unit, by_tokens=by_tokens, on_gpu=on_gpu
    )
    if not job.trains:
        return Workload(**common, trains=False, forward_samples=forward)
    common |= _training(job, cfg, split)
    if job in (ACTOR, RS_ACTOR, REINFORCE_ACTOR):
        kind = SECTIONS[job.config_name]
        settings = model[kind]
        kl = trainer[kind].get("initial_policy_kl_penalty", 0)
        with_logprobs = job is ACTOR or kl > 0
        return Workload(
            **common,
            forward_samples=forward if with_logprobs else 0,
            rollout_samples=max(Values(cfg).get(key) for key in job.rollout_keys),
            reference=kl > 0 or settings.get("kl_loss_coef", 0) > 0,
            **_generation(cfg, settings, split),
        )
    if job is SPIN:
        settings = model["spin"]
        return Workload(
            **common,
            forward_samples=forward,
            rollout_samples=settings["rollout_micro_batch_size"],
            reference=True,
            **_generation(cfg, settings, split),
        )
    if job is CRITIC:
        return Workload(
            **common,
            forward_samples=forward,
            swaps=bool(trainer["ppo"]["combine_rm_and_critic_server"]),
            offloads=bool(model["offload_adam_states"]),
        )
    if job in (DPO, KTO):
        kept = model["dpo" if job is DPO else "kto"]["ref_log_probs_dir"] is not None
        return Workload(**common, forward_samples=forward, reference=not kept)
    if job is STEERLM2:
        return Workload(**common, forward_samples=forward)
    if job is STUDENT and Values(cfg).get(ON_POLICY, 0) > 0:
        settings = model["knowledge_distillation"]["on_policy"]
        share = max(model["global_batch_size"] // split.dp, 1)
        return Workload(
            **common,
            rollout_samples=min(settings["rollout_micro_batch_size"] or share, share),
            response=settings["length_params"]["max_length"],
            merges=_merges(cfg),
            graphs=_whole_weights(cfg),
        )
    return Workload(**common)


def _samples(job: Job, cfg: Mapping[str, Any], size: int, together: int) -> int:
    """Of a micro-batch of the longest samples: `size` or what tokens allow, times `together`."""
    tokens = cfg["model"].get("dynamic_micro_batch_tokens")
    if tokens is not None:
        size = max(tokens // (_width(job, cfg["model"]) * together), 1)
    return int(size * together)


def _training(job: Job, cfg: Mapping[str, Any], split: Split) -> dict[str, Any]:
    model = cfg["model"]
    together = 2 if job in (REWARD_MODEL, DPO, SPIN) else 1  # pairs
    size = (model["steerlm2"] if job is STEERLM2 else model)["micro_batch_size"]
    own = _samples(job, cfg, size, together)
    micro_batches = max(model["global_batch_size"] * together // (own * split.dp), 1)
    if job is STEERLM2:  # the batch counts prompts, whose numbers of responses only the data know
        micro_batches = max(micro_batches, split.pp)
    optimizer = OPTIMIZERS[model["optim"]["name"]]
    if optimizer.kind == "sgd":
        state_bytes = 4 if model["optim"].get("momentum") else 0
    else:
        state_bytes = 8
    return {
        "samples": own,
        "micro_batches": micro_batches,
        "recompute": model["activations_checkpoint_granularity"],
        "recompute_layers": model["activations_checkpoint_num_layers"] or 1,
        "block": model["activations_checkpoint_method"] == "block",
        "distributed_optimizer": optimizer.distributed,
        "state_bytes": state_bytes,
    }


def is_on_policy(cfg: Mapping[str, Any]) -> bool:
    return Values(cfg).get(ON_POLICY) is not None


def _merges(cfg: Mapping[str, Any]) -> bool:
    """Whether adapters are merged into a copy of their weights for generation."""
    return trains_adapters(cfg) and bool(cfg["model"]["peft"]["merge_for_generation"])


def _whole_weights(cfg: Mapping[str, Any]) -> bool:
    """Whether no adapter lies beside the weights while responses are generated."""
    return _merges(cfg) or not trains_adapters(cfg)


def _generation(
    cfg: Mapping[str, Any], settings: Mapping[str, Any], split: Split
) -> dict[str, Any]:
    """What the generation of a policy needs, by `settings`, its section of `model`."""
    return {
        "cache_memory": (settings["generation"]["kv_cache_gb"] or 0) * 1e9,
        "response": settings["length_params"]["max_length"],
        "merges": _merges(cfg),
        "graphs": settings["generation"]["cuda_graphs"] is not False and _whole_weights(cfg),
        "generation": generation_sizes(asked_reshard(settings), split.tp, split.pp),
        "offloads": bool(settings["offload_adam_states"]),
    }


def _width(job: Job, model: Mapping[str, Any]) -> int:
    if job in (SFT, STEERLM2):
        return int(model["data"]["train_ds"]["max_seq_length"] or model["encoder_seq_length"])
    return int(model["encoder_seq_length"])
