# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What NeMo-Aligner's commands and YAML files say that means something else here, or nothing.

`OLD_FORMS` are values and combinations of keys, each accepted with a warning. Keys without any
effect are in `inert_keys.py`, what is refused so far in `LATER`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.schema import CONFIG_NAMES
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError

RECOMPUTE = "model.activations_checkpoint_"
TRAINING_JOBS = tuple(name for name in CONFIG_NAMES if name != "inference_rm")


@dataclass(frozen=True)
class OldForm:
    """A form of NeMo-Aligner that does something else here, or nothing."""

    form: str  # as a command or a YAML file writes it
    happens: str  # what becomes of it, and what to write instead
    # whether a configuration, without its checkpoint's values, holds the form
    is_used: Callable[[Values], bool]
    # the configurations in which it is a form of NeMo-Aligner
    jobs: tuple[str, ...] = CONFIG_NAMES


def _counts_elsewhere(v: Values, name: str) -> bool:
    value = v.get(f"trainer.{name}")
    own = [v.get(f"trainer.{job.algo}.{name}") for job in JOBS.values() if job.algo]
    return value not in (None, -1, *own)


def _recomputes_attention(v: Values) -> bool:
    return v.get(RECOMPUTE + "granularity") == "selective"


def _recomputes_nothing(v: Values) -> bool:
    return v.is_null(RECOMPUTE + "granularity")


def _is_set(v: Values, key: str) -> bool:
    return v.get(key) is not None


def _is_true(v: Values, key: str) -> bool:
    return bool(v.get(key))


OLD_FORMS = (
    OldForm(
        form=f"{RECOMPUTE}granularity=selective with {RECOMPUTE}method=uniform",
        happens=f"{RECOMPUTE}method has no effect, here and in NeMo-Aligner: selective recomputes "
        "the attention of every layer; set it to null",
        is_used=lambda v: _recomputes_attention(v) and _is_set(v, RECOMPUTE + "method"),
    ),
    OldForm(
        form=f"{RECOMPUTE}granularity=null with {RECOMPUTE}method or {RECOMPUTE}num_layers",
        happens="nothing is recomputed, here and in NeMo-Aligner; for less memory set "
        f"{RECOMPUTE}granularity=full",
        is_used=lambda v: (
            _recomputes_nothing(v)
            and (_is_set(v, RECOMPUTE + "method") or _is_set(v, RECOMPUTE + "num_layers"))
        ),
    ),
    OldForm(
        form="trainer.gradient_clip_val other than trainer.<algorithm>.gradient_clip_val",
        happens="the latter counts; NeMo-Aligner's mcore_distributed_optim read the former",
        is_used=partial(_counts_elsewhere, name="gradient_clip_val"),
        jobs=TRAINING_JOBS,
    ),
    OldForm(
        form="trainer.max_steps other than trainer.<algorithm>.max_steps",
        happens="the latter counts",
        is_used=partial(_counts_elsewhere, name="max_steps"),
        jobs=TRAINING_JOBS,
    ),
    OldForm(
        form="exp_manager=null",
        happens="the job writes no logs, no metrics and no checkpoints, and resumes from none",
        is_used=lambda v: v.is_null("exp_manager"),
        jobs=TRAINING_JOBS,
    ),
    OldForm(
        form="model.optim without lr",
        happens="the learning rate is PyTorch's default; set model.optim.lr",
        is_used=lambda v: _is_set(v, "model.optim") and v.get("model.optim.lr") is None,
        jobs=TRAINING_JOBS,
    ),
    *(
        OldForm(
            form=f"trainer.{kind}.trt_llm.enable=True",
            happens="TensorRT-LLM is gone; the built-in engine serves instead. "
            f"trt_llm.reshard=True acts as model.{kind}.generation.reshard=auto",
            is_used=partial(_is_true, key=f"trainer.{kind}.trt_llm.enable"),
            jobs=(f"gpt_{kind}_actor",),
        )
        for kind in ("ppo", "reinforce")
    ),
    OldForm(
        form="model.answer_only_loss=False",
        happens="the loss counts the prompts too. NeMo-Aligner never read this key (False in its "
        "gpt_sft.yaml) and trained on the responses only: set it to True for that",
        is_used=lambda v: v.get("model.answer_only_loss") is False,
        jobs=("gpt_sft",),
    ),
    OldForm(
        form="inference.micro_batch_size",
        happens="the name of inference.inference_micro_batch_size until NeMo-Aligner 0.3; it "
        "counts where the latter is not given",
        is_used=lambda v: (
            v.get("inference.micro_batch_size") != v.get("model.forward_micro_batch_size")
        ),
        jobs=("inference_rm",),
    ),
)

# What NeMo-Aligner has and this package refuses so far. (config name, key) -> (values that are
# accepted, what to do instead). Checked for the job that reads the key: a checkpoint's own
# configuration may well hold it.
LATER = {
    **{
        (job, f"model.data.{split}.{key}"): ((False,), remedy)
        for job in ("gpt_sft", "gpt_spin")
        for split in ("train_ds", "validation_ds", "test_ds")
        for key, remedy in {
            "add_sep": "no separator is put between prompt and response; write it into "
            "prompt_template, and set it to False",
        }.items()
    },
    ("gpt_knowledge_distillation", "model.knowledge_distillation.cross_tokenizer"): (
        (False,),
        "logits of another vocabulary would be compared by their rank alone; distil from the "
        "teacher's texts (SFT), or from a teacher with the student's tokenizer, and set it to "
        "False",
    ),
    ("gpt_sft", "trainer.sft.inference_metrics"): (
        (),
        "metrics of generated responses are not computed yet; compute them from the .nemo with "
        "GPTSFTModel.infer and nemo_aligner.metrics.InferenceMetricsHandler, and remove the key",
    ),
}


def old_form_notes(values: Values, config_name: str) -> list[str]:
    """One line for each of `OLD_FORMS` that a job's configuration holds."""
    return [
        f"{old.form}: {old.happens}"
        for old in OLD_FORMS
        if config_name in old.jobs and old.is_used(values)
    ]


def check_later(values: Values, config_name: str) -> None:
    """Raise `ConfigError` where a job asks for what NeMo-Aligner has and this package has not yet
    (`LATER`).
    """
    for (job, key), (accepted, remedy) in LATER.items():
        value = values.get(key)
        if job == config_name and value is not None and value not in accepted:
            raise ConfigError(f"{key}={value!r} is not supported yet: {remedy}.")
