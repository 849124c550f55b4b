# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the checkpoints of a job were made from: stored in each, and compared when a job resumes.

    {"base": {...}, "data": {...}, "objective": {...}, "settings": {...}}

Each group has values by name; what is known by content, such as a base that may have moved, is
`{"shown": text, "content": hash}`. If settings differ, they are shown; all else is refused.
"""

import contextlib
import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint.checksums import MANIFEST
from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.checkpoint.forms import locate
from nemo_aligner.config.access import shown_url
from nemo_aligner.config.server_rules import text_of
from nemo_aligner.config.values import leaves, plain_dict
from nemo_aligner.core.content import content_samples
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.kl import name_kl_estimator
from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.parallel.environment import is_rank_zero

MadeFrom = dict[str, dict[str, Any]]
FIXED = ("base", "data", "objective")  # another one is refused
# Endings of what is read of a folder.
READ = tuple(
    """.safetensors .bin .pt .distcp .json .yaml .model .jinja .tiktoken merges.txt vocab.txt
    """.split()
)
# Keys of what is optimized, with * for the job's own section. Numbers that tune it, such as the
# weight of a KL penalty, are settings.
OBJECTIVE = frozenset(
    """model.*.preference_loss model.*.preference_average_log_probs model.*.sft_average_log_probs
    model.*.loss_reduction model.loss_reduction model.answer_only_loss model.*.kd_loss
    model.*.outside_top_k model.reward_model_type model.loss_func model.regression.loss_func
    model.regression.num_attributes model.regression.merge_attributes
    model.regression.attribute_weights model.regression.loss_mask_val
    model.reward_standardization.enable model.reward_standardization.mean
    model.reward_standardization.std model.*.kl_loss_estimator model.*.train_on_truncated
    model.*.policy_loss
    trainer.*.advantage_estimator trainer.*.kl_estimator trainer.*.use_absolute_kl
    trainer.*.normalize_advantages trainer.*.whiten_rewards trainer.*.process_rewards
    trainer.*.rewards_per trainer.*.loss trainer.*.advantages""".split()
)
# These count only where another key has a value.
COUNTS_WITH = {
    "model.*.sft_average_log_probs": "model.*.sft_loss_weight",
    "model.*.kl_loss_estimator": "model.*.kl_loss_coef",
    "model.reward_standardization.mean": "model.reward_standardization.enable",
    "model.reward_standardization.std": "model.reward_standardization.enable",
    "trainer.*.kl_estimator": "trainer.*.initial_policy_kl_penalty",
    "trainer.*.rewards_per": "trainer.*.reward_fn",
}


def made_from(cfg: DictConfig, section: str, loader: Any = None) -> MadeFrom:
    """What a job is made from, as rank 0 finds it; all ranks call it. `section`: of `cfg.trainer`;
    `loader`: of its training data, or None.
    """
    found: MadeFrom = {}
    with failing_together():
        if is_rank_zero():
            objective, settings = _objective_and_settings(cfg, section)
            found = {
                "base": _base(cfg, section),
                "data": {} if loader is None else _data(loader) | {"model.seed": cfg.model.seed},
                "objective": objective,
                "settings": settings,
            }
    return gathered(json.loads(json.dumps(found)))[0]


def compare(now: MadeFrom, stored: dict[str, Any], folder: Path) -> None:
    """Show what differs from a `state.json`; `UserError`: other base, data or objective."""
    before = stored.get("made_from")
    if before is None:
        objective = stored["trainer"].get("objective")  # PPO's
        unknown = "base, data and objective are" if objective is None else "base and data are"
        if objective is None and now["objective"].get("trainer.ppo.kl_estimator", "abs") != "abs":
            unknown = f"trainer.ppo.use_absolute_kl, True by default then, {unknown}"
        logging.warning(
            f"{folder} does not say what it was made from (an earlier version wrote it): "
            f"{unknown} not compared."
        )
        before = dict.fromkeys(("objective", "settings"), objective or {})
    rows, is_refused = [("", "checkpoint", "this job")], False
    for group in (*FIXED, "settings"):
        then = before.get(group, {})
        for name, value in now.get(group, {}).items():
            if name in then and _content(then[name]) != _content(value):
                is_refused |= group in FIXED
                rows.append((name, _shown(then[name]), _shown(value)))
    if len(rows) == 1:
        return
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    table = "\n".join(f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows)
    if is_refused:
        raise UserError(
            f"{folder} was made from something else than this job:\n{table}\nA job resumes with "
            "the same base, data and objective. Give this one a folder of its own "
            "(exp_manager.explicit_log_dir), or set exp_manager.resume_if_exists=False to start "
            "afresh in this one. To train the weights of that checkpoint on, name it as the base "
            "of a job in a folder of its own."
        )
    logging.warning(f"this job resumes from {folder} with other settings:\n{table}")


def content_hash(path: Path) -> str:
    """A hash of a file or folder, wherever it lies; of its checksums, if any."""
    if path.is_dir():
        path = locate(path)
        is_flat = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
        found = path.glob("*") if is_flat else path.rglob("*")  # of Hugging Face: no folders in it
        files = [file for file in found if file.name.endswith(READ) and file.is_file()]
        if (path / MANIFEST).is_file():
            files = [path / MANIFEST]
        return _hash(*(f"{f.relative_to(path)} {content_hash(f)}" for f in sorted(files)))
    if path.suffix == ".nemo":
        # A compressed file would have to be unpacked.
        with contextlib.suppress(tarfile.ReadError), tarfile.open(path, "r:") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None and member.name.removeprefix("./") == MANIFEST:
                    inner = _hash(str(member.size), content.read())
                    return _hash(f"{MANIFEST} {inner}")
    return _hash(str(path.stat().st_size), content_samples(path))


def _hash(*parts: str | bytes) -> str:
    joined = b"\n".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(joined).hexdigest()


def _base(cfg: DictConfig, section: str) -> dict[str, Any]:
    base: dict[str, Any] = {"base": "random weights"}
    holder = "model" if section == "sft" else "pretrained_checkpoint"  # else it is of the base
    for key, name in (
        (f"{holder}.restore_from_path", "base"),
        ("model.peft.restore_from_path", "adapters to start from"),
    ):
        path = OmegaConf.select(cfg, key)
        if path:
            base[name] = {"shown": str(path), "content": content_hash(Path(path).expanduser())}
    return base


def _data(loader: Any) -> dict[str, Any]:
    dataset: Any = loader.dataset
    inner = getattr(dataset, "dataset", dataset)  # of packs, or with a reference's log-probs
    sources = getattr(getattr(inner, "lines", None), "sources", [])
    files = [file for source in sources for file in source.files]
    documents = getattr(inner, "documents", np.zeros(0)).tobytes()
    content = _hash(str(len(dataset)), *map(content_hash, files), documents)
    names = ", ".join(file.name for file in files) or type(dataset).__name__
    return {
        "training data": {"shown": f"{len(dataset)} samples of {names}", "content": content},
        "shuffled": bool(getattr(loader.batch_sampler, "is_random", False)),
    }


def _objective_and_settings(cfg: DictConfig, section: str) -> tuple[dict[str, Any], ...]:
    """What is optimized, and other settings, by dotted keys."""
    own = (section, "regression", "reward_standardization", "optim")
    model = {key: cfg.model[key] for key in cfg.model if not OmegaConf.is_config(cfg.model[key])}
    model |= {key: cfg.model[key] for key in own if key in cfg.model}
    tree = OmegaConf.create({"trainer": {section: cfg.trainer[section]}, "model": model})
    values = {
        key.replace(f".{section}.", ".*."): value
        for key, value in leaves(plain_dict(tree, resolve=True))
    }
    agents_port = values.pop("model.*.environment.port", None)  # which one, does not matter
    objective: dict[str, Any] = {"job": section}
    if "trainer.*.use_absolute_kl" in values:
        values["trainer.*.kl_estimator"] = name_kl_estimator(
            values.pop("trainer.*.use_absolute_kl"), values.get("trainer.*.kl_estimator")
        )
    settings = {
        key: value
        for key, value in values.items()
        if key not in OBJECTIVE
        and (isinstance(value, int | float | None) or key.startswith("model.optim."))
    }
    objective |= {
        key: values[key]
        for key in sorted(OBJECTIVE & values.keys())
        if key not in COUNTS_WITH or values.get(COUNTS_WITH[key])
    }
    if values.get("model.reward_model_type") == "binary_ranking":
        objective = {key: objective[key] for key in objective if ".regression." not in key}
    # null and tokenizer: the same for conversations, but not for plain texts.
    settings["model.precision"] = cfg.model.precision  # trainer.precision=null goes by the device
    given = OmegaConf.select(cfg, "model.data.chat_template")
    template = given or "tokenizer"
    settings["model.data.chat_template"] = str(given)
    objective["chat template"] = _by_content(template, template)
    if "trainer.*.reward_fn" in values:
        given = values.get("model.*.environment.path") or values["trainer.*.reward_fn"]
        source = str(given or (agents_port and "agents") or "servers of this package")
        file = source.rpartition(":")[0]
        # A web server may come up elsewhere, and a file may move.
        name = "web servers" if "://" in source else Path(source).name
        if values["trainer.*.judge.url"] is not None:
            source = name = f"the judge {values['trainer.*.judge.model']}"
            asked = (values[f"trainer.*.judge.{each}"] for each in ("prompt", "system", "score"))
            settings["texts of the judge"] = _hash(*(text_of(str(each)) for each in asked))
        objective["reward"] = {"shown": shown_url(source), "content": _hash(name)}
        if given and "://" not in source:
            settings["code of the reward"] = _by_content(source, file)
    return tuple(
        {key.replace(".*.", f".{section}."): value for key, value in group.items()}
        for group in (objective, settings)
    )


def _by_content(shown: str, file: str) -> Any:
    return {"shown": shown, "content": content_hash(Path(file))} if Path(file).is_file() else shown


def _content(value: Any) -> Any:
    return value["content"] if isinstance(value, dict) and "content" in value else value


def _shown(value: Any) -> str:
    is_hashed = isinstance(value, dict) and "content" in value
    return f"{value['shown']} ({value['content'][:8]})" if is_hashed else str(value)
