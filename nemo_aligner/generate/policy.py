# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The policy that generates, from a `.nemo` or a job's newest checkpoint, and the form of its
texts.
"""

import logging as python_logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.pytorch import Trainer
from nemo.utils import logging
from omegaconf import DictConfig

from nemo_aligner.checkpoint.folders import newest_checkpoint
from nemo_aligner.checkpoint.forms import CONFIG_FILE
from nemo_aligner.checkpoint.sources import Source, open_source
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.rules import check_values
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer, begins_with_bos
from nemo_aligner.data.nlp.chat_records import ConversationForm, Message
from nemo_aligner.data.nlp.fields import holds_conversation
from nemo_aligner.data.nlp.record_encoder import RecordEncoder
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.generate.settings import RESTORE_KEY
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.launch.model_loading import load_and_override_model_config, load_from_nemo
from nemo_aligner.launch.processes import launch_processes
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.servers.control_group import ControlGroup

# Models of Hugging Face have long contexts; a cache for half of them would not fit.
LONGEST_BY_DEFAULT = 1024
# Classes, by a part of their names, whose weights hold a head in place of the output layer.
WITH_HEADS = ("RewardModel", "Critic")


@dataclass(frozen=True)
class Policy:
    """A policy that is ready to generate; every rank holds its part."""

    path: Path  # of its weights
    tokenizer: Tokenizer
    generator: MegatronGenerator
    params: GenerationParams  # how it generates; with log-probs
    add_bos: bool  # plain prompts begin with the bos token
    encoder: RecordEncoder  # to tokens, conversations in the form of `model.data`
    responses_per_prompt: int  # this and the next two as in `conf/generate.yaml`
    micro_batch_size: int
    seed: int
    group: ControlGroup  # joins all ranks of the job

    def with_end_strings(self, more: Sequence[str]) -> "Policy":
        """This policy, whose responses end with one of `more` too."""
        return replace(self, params=self.params.with_end_strings(more))


def load_policy(cfg: DictConfig, trainer: Trainer | None) -> Policy:
    """The policy that a checked configuration of `conf/generate.yaml` names; every rank calls it.
    `UserError`: no policy can be loaded from there, or it does not fit the settings.
    """
    cfg = cfg.copy()
    source = newest_weights(cfg.pretrained_checkpoint.restore_from_path, RESTORE_KEY)
    refuse_heads(source)
    data = cfg.model.data
    cfg.model = model_config(source, cfg.model)
    cfg.model.data = data  # not that of the training
    if cfg.length_params.max_length is None:
        longest = max(cfg.model.encoder_seq_length // 2, 1)
        cfg.length_params.max_length = min(longest, LONGEST_BY_DEFAULT)
    check_values(cfg, "generate", complete=True)  # again, now with what the checkpoint says
    cfg.model = complete_model(cfg.model, "generate")
    cfg.trainer.precision = cfg.model.precision
    launch_processes(trainer)
    group = ControlGroup()
    check_same_weights(group, source)
    model = load_from_nemo(MegatronGPTModel, cfg.model, trainer, restore_path=source)
    assert isinstance(model, MegatronGPTModel)
    model.set_eval()
    params = GenerationParams.from_config(cfg.length_params, cfg.sampling_params)
    add_bos = begins_with_bos(
        model.tokenizer, cfg.sampling_params.add_BOS, "sampling_params.add_BOS"
    )
    return Policy(
        path=Path(source),
        tokenizer=model.tokenizer,
        generator=MegatronGenerator(
            model.model, model.tokenizer, max_sequence_length=model.cfg.encoder_seq_length
        ),
        params=params,
        add_bos=add_bos,
        encoder=RecordEncoder(model.tokenizer, {**data, "add_bos": add_bos}),
        responses_per_prompt=cfg.responses_per_prompt,
        micro_batch_size=cfg.micro_batch_size,
        seed=model.cfg.seed,
        group=group,
    )


def newest_weights(path: str | Path, key: str) -> Source:
    """The value `path` of `key`, or the newest complete checkpoint in this folder of a job.
    `UserError`: the path does not exist or does not load.
    """
    path = Path(path).expanduser()
    if path.is_dir() and not (path / CONFIG_FILE).is_file():
        path = newest_checkpoint(path) or path
    return open_source(path, key)


def model_config(source: Source, given: DictConfig) -> DictConfig:
    """The model's configuration with `given` keys over it; a null precision means its own."""
    given = given.copy()
    if given.precision is None:
        del given.precision
    return load_and_override_model_config(source, given)


def refuse_heads(source: Source) -> None:
    """Raise `UserError` if the model is a reward model or a critic: it has no output layer."""
    cfg = source.config()
    name = str(cfg.get("target") or "").rpartition(".")[2]
    if not name and cfg.get("reward_model_type"):  # of Hugging Face: its head says it
        name = "CriticModel" if cfg.get("output_sequence") else "RewardModel"
    if any(part in name for part in WITH_HEADS):
        raise UserError(
            f"{source} holds a {name}, which gives rewards or values and cannot generate; name a "
            "policy (of SFT, PPO or rejection sampling)."
        )


def check_same_weights(group: ControlGroup, source: Source) -> None:
    """Raise `UserError` on all ranks if they found different newest checkpoints."""
    found = {str(other) for other in group.gather_objects(str(source))}
    if len(found) > 1:
        raise UserError(
            f"the job wrote a checkpoint while its newest one was looked for: "
            f"{', '.join(sorted(found))}; start again, or name one of them."
        )


def quiet_logs() -> None:
    """Log warnings and errors alone: the terminal is for the text."""
    logging.setLevel(logging.WARNING)
    for name in ("lightning.pytorch", "lightning.fabric"):
        python_logging.getLogger(name).setLevel(python_logging.WARNING)


@dataclass(frozen=True)
class ChatForm:
    """Whether a text is a user's message in the form of conversations (`chat_form`)."""

    chat: bool | None  # False: a text is continued as it is; None: True if there is a form
    system: str | None = None

    def resolve(self, form: ConversationForm | None) -> bool:
        """Whether texts are written in `form`; `UserError`: it is asked for, and there is none."""
        wanted = self.chat or (self.chat is None and self.system is not None)
        if wanted and form is None:
            raise UserError(
                "the tokenizer has no chat template of Hugging Face, so there is no form for a "
                "message; leave --chat and --system out, and write prompts in the form that the "
                "policy was trained with, or give model.data.chat_template=FILE."
            )
        return form is not None if self.chat is None else self.chat

    def record(self, prompt: Record, form: ConversationForm | None) -> Record:
        """The record of a written prompt: messages where it is one, after the system message."""
        text = prompt_text(prompt)
        if text is not None and self.resolve(form):
            return {"messages": [*self.opening(), {"role": "user", "content": text}]}
        if text is None and self.system is not None:
            return {**prompt, "system": self.system}
        return prompt

    def opening(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def prompt_text(prompt: Record) -> str | None:
    """The text of a prompt's record; None for a conversation."""
    if holds_conversation(prompt):
        return None
    return str(prompt["text"] if "text" in prompt else prompt["prompt"])
