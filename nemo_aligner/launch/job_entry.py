# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The entry of every job of nemo_aligner/jobs; the models, data files and first records that its
configuration names, checked before the heavy imports by functions that the job uses too. Imports
nothing heavy.
"""

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint.forms import HUB, check_complete, check_restore_path
from nemo_aligner.config import parallel_rules
from nemo_aligner.config.checks import check_config, check_sections
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.config.inert_keys import to_plain
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.rules import PREFIX_DATA_JOBS, restore_key, why_nothing_is_kept
from nemo_aligner.config.values import Values, plain_dict, resolved
from nemo_aligner.core.endings import ending_file
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.estimators import ADVANTAGE_ESTIMATORS
from nemo_aligner.data.nlp.fields import (
    PAIR,
    Columns,
    EqualPairError,
    Record,
    by_our_names,
    check_text,
    conversation_field,
    holds_conversation,
    holds_pair,
    missing,
    prompt_hint,
)
from nemo_aligner.data.nlp.record_encoder import RecordEncoder
from nemo_aligner.data.nlp.records import CHUNK_ID, DataFile, Records, data_paths, open_quickly
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.launch.start_up import share_cores
from nemo_aligner.training.stop_requests import stop_requests

ROWS = 100  # that are looked at in each data file
# With a key `file_path`, of a job that reads examples.
EXAMPLES = ("model.data.train_ds", "model.data.validation_ds", "data.data")
READ = {  # by what a record holds: how to read it, and the fields that continue its prompt
    "pair": (RecordEncoder.pair_length, PAIR),
    **dict.fromkeys(("labelled", "logits"), (RecordEncoder.response_length, ("response",))),
}
CHARACTERS: Any = SimpleNamespace(  # stands for the job's tokenizer, which is loaded later
    bos_id=0, eos_id=0, text_to_ids=lambda text: [*map(ord, text)]
)
RESUME = "exp_manager.resume_from_checkpoint"
TOKENIZER = [f"model.tokenizer.{name}" for name in ("model", "vocab_file", "merge_file")]
MODELS = ("model.peft.restore_from_path", RESUME, *TOKENIZER)
CODE = {key.name: key.code for job in JOBS.values() for key in job.keys.values() if key.code}


def check_inputs(cfg: DictConfig, config_name: str) -> None:
    """`UserError`: a model, file or record that a complete `cfg` names is missing or unusable. A
    model named as on the Hugging Face Hub becomes the path of its folder.
    """
    given = {key: OmegaConf.select(cfg, key) for key in (restore_key(config_name), *MODELS, *CODE)}
    for key, value in given.items():
        if value is None or ("://" in str(value) and not str(value).startswith(HUB)):
            continue
        if key in CODE:
            from nemo_aligner.servers.user_code import split_spec

            split_spec(value, key, CODE[key], "code.py:name")
        elif key == RESUME:
            check_complete(Path(value))
        elif key in TOKENIZER:
            if not Path(value).is_file():
                raise UserError(f"{key}={value} does not exist; give a file.")
        else:
            found = str(check_restore_path(value, key))
            if found != str(Path(value).expanduser()):  # named as on the Hub
                OmegaConf.update(cfg, key, found)
    for key, file, section, is_first in _data_files(cfg, config_name):
        columns = Columns(section.columns if file.columns is None else file.columns)
        form = (section.get("data_impl") or "jsonl").removeprefix("chunked_")
        reader = _Reader(cfg, section, config_name)
        try:
            sources = open_quickly(Path(file.path), form, section.index_mapping_dir)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None
        for source in sources:
            before: Record | None = None  # the first line of a pair
            for _at, number, row in itertools.islice(source.scan(), ROWS):
                try:
                    record = columns(row)
                    reader.check(record, set(row) - columns.sources, before)
                    # A pair may begin in one file and end in the next.
                    before = record if is_first and not before else None
                except EqualPairError:  # the error says where all such pairs are
                    Records([file], (), reader.whole_pair, data_cfg={"columns": section.columns})
                except UserError as error:
                    where = f"{source.path}, {source.unit} {number}"
                    raise UserError(f"{where}: {error}") from None


def _data_files(
    cfg: DictConfig, config_name: str
) -> Iterator[tuple[str, DataFile, DictConfig, bool]]:
    """Of each: key, file, the section that says how it is read, whether it is the first of its
    list.
    """
    lists = {
        f"{key}.file_path": OmegaConf.select(cfg, key)
        for key in EXAMPLES
        if JOBS[config_name].records == "example" and f"{key}.file_path" in JOBS[config_name].keys
    }
    if config_name in PREFIX_DATA_JOBS:
        prefix, key = cfg.model.data.data_prefix, "model.data.data_prefix"
        parts = [f"{key}.{part}" for part in prefix] if isinstance(prefix, DictConfig) else [key]
        lists = dict.fromkeys(parts, cfg.model.data)
    for key, section in lists.items():
        files = OmegaConf.select(cfg, key)
        for number, file in enumerate(data_paths(files, key)[0] if files else ()):
            yield key, file._replace(path=file.path.replace(CHUNK_ID, "0")), section, number == 0


class _Reader(RecordEncoder):
    """Reads the records of a data file without the tokenizer and the form of conversations, which
    are known later; `section` says how.
    """

    def __init__(self, cfg: DictConfig, section: DictConfig, config_name: str) -> None:
        self.data: Any = cfg.get("data") or cfg.model.data
        super().__init__(CHARACTERS, self.data, form=False)
        self.model, self.section, self.kind = cfg.model, section, JOBS[config_name].records

    def form_of(self, record: Record) -> Any:
        if not (self.template or holds_conversation(record)):
            return None
        from nemo_aligner.data.nlp.chat_records import UnwrittenForm

        self.form = self.form or UnwrittenForm()
        return self.form

    def whole_pair(self, record: Record) -> int:
        return self.pair_length(by_our_names(record), sys.maxsize)

    def check(self, record: Record, others: set[str], before: Record | None) -> None:
        """`UserError`: a data set would refuse a record, or its prompt is empty and no key allows
        it; `others` are columns that may hold the prompt, `before` is the first line of a pair.
        """
        names, is_empty, kind = ["prompt", "text"], False, self.kind
        fraction = OmegaConf.select(self.model, "knowledge_distillation.on_policy.fraction")
        if "prompt_turns" in record:  # of SteerLM 2
            return
        if self.data.chat:  # NeMo's format, whose parts have other names
            if kind == "example" and not holds_conversation(record):
                from nemo_aligner.data.nlp.chat_records import conversation_messages

                conversation_messages(record)
        elif kind == "example":
            label = self.section.label_key
            if self.template or (conversation_field(record) and label not in record):
                from nemo_aligner.data.nlp.chat_records import (
                    conversation_messages,
                    speaks_to_assistant,
                )

                conversation_messages(record)
                names, is_empty = [""], not speaks_to_assistant(record)
            else:
                names = re.findall(r"{(\w+)}", self.section.prompt_template)
                check_text(record, *names, allow_blank=True)
                names = [field for field in names if field != label]
                is_empty = bool(names) and not any(record[field].strip() for field in names)
        elif kind == "scored":
            self._check_scored(by_our_names(record), before)
        elif kind == "logits" and fraction is None:
            if "topk_logits" not in record:
                raise missing(["topk_logits"], record)
        else:
            record = by_our_names(record)
            length, responses = READ.get(kind, (RecordEncoder.prompt_length, ()))
            if kind == "labelled" and "preference" not in record:
                raise missing(("response", "preference"), record)
            length(self, record, sys.maxsize)
            is_empty = self.prompt_is_empty(record, *responses)
            names = names if self.form_of(record) is None else [""]
        if is_empty and not self.data.allow_empty_prompt:
            hint = prompt_hint(names[0], record, others.difference(names))
            raise UserError(
                f"the prompt is empty.{hint} Remove the line, or set "
                "model.data.allow_empty_prompt=True."
            )

    def _check_scored(self, record: Record, before: Record | None) -> None:
        has_label = self.model.reward_model_type == "regression"
        if has_label and "label" not in record:
            raise missing(["label"], record)
        if holds_pair(record):
            self.pair_length(record, sys.maxsize)
        elif not has_label or not ("responses" in record or isinstance(record.get("text"), list)):
            self.sample_length(record, sys.maxsize)
            try:
                if before is not None and not has_label:
                    self.in_common(before, record)
            except UserError as error:
                raise UserError(
                    f"no pair with the line before: {error} Two neighbouring lines are responses "
                    "to one prompt; conversations for supervised fine-tuning are no pairs."
                ) from None


Main = Callable[[DictConfig], None]


def job_main(
    config_name: str,
    jobs: int | Callable[[DictConfig], int] = 1,
    check: Main = lambda cfg: None,
) -> Callable[[Main], Any]:
    """Decorator of a job, which gets its configuration complete and checked, and ends the process
    as `user_errors_end_the_job` says. `jobs` is that of `share_cores`, or computes it; `check`
    raises `ConfigError` for what a checked configuration cannot have in this job.
    """

    def decorator(main: Any) -> Any:
        main.config_name, main.check = config_name, check

        @functools.partial(user_errors_end_the_job, is_job=True)
        @functools.wraps(main)
        def run(cfg: DictConfig) -> None:
            check_sections(plain_dict(cfg), config_name)
            cfg = complete_config(cfg, config_name)
            check_job(cfg, config_name)
            check(cfg)
            beside = jobs if isinstance(jobs, int) else jobs(cfg)
            share_cores(to_plain(cfg.trainer.devices), beside)
            if cfg.trainer.precision is None:
                cfg.trainer.precision = parallel_rules.default_precision(cfg.trainer.accelerator)
            main(cfg)
            file = ending_file()
            if file is not None and stop_requests.has_trained:
                from nemo_aligner.report.ending import last_lines  # heavy

                nothing = why_nothing_is_kept(Values(resolved(cfg)), config_name)
                print(f"\n{last_lines(file.parent, config_name, nothing)}", flush=True)

        return run

    return decorator


def check_job(cfg: DictConfig, config_name: str) -> list[str]:
    """Check a complete configuration, then the files that it names; returns notes of
    `check_config`.
    """
    accelerator, devices = cfg.trainer.accelerator, to_plain(cfg.trainer.devices)
    gpus = None
    if accelerator != "cpu" and str(devices) not in ("auto", "-1"):
        gpus = parallel_rules.count_devices(devices)  # as if they were there
    notes = check_config(
        cfg, config_name, visible_devices=gpus, before_notes=lambda: check_inputs(cfg, config_name)
    )
    if gpus is not None:
        parallel_rules.check_accelerator(accelerator, devices, parallel_rules.cuda_devices())
    return notes


def reward_servers(cfg: DictConfig, kind: str) -> int:
    """How many servers give the rewards of the job `kind`: none if it has them by itself."""
    return 0 if _given(cfg, kind) or has_no_rewards(cfg, kind) else 1


def has_no_rewards(cfg: DictConfig, kind: str) -> bool:
    """Whether the job `kind` learns from a teacher alone."""
    estimator = ADVANTAGE_ESTIMATORS.get(cfg.trainer[kind].get("advantage_estimator"))
    if estimator is None or not estimator.of_teacher:
        return False
    return not (_given(cfg, kind) or cfg.remote_critic_rm.reward_models)


def _given(cfg: DictConfig, kind: str) -> bool:
    """Whether the job has its rewards by itself."""
    environment, own = cfg.model[kind].environment, cfg.trainer[kind]
    return any((environment.path, environment.port, own.reward_fn, own.judge.url))
