# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the checkpoints of a job were made from: stored in each, and compared when a job resumes.

    {"base": {...}, "data": {...}, "objective": {...}, "settings": {...}, "facts": {...}}

Each group has values by their names. What is known by its content, such as a base that may have
moved, is `{"shown": text, "content": hash}`. "facts" has what a run decided once; it is not
compared.
"""

import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint.checksums import MANIFEST
from nemo_aligner.checkpoint.dist_ckpt import gathered
from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel.environment import is_rank_zero

MadeFrom = dict[str, dict[str, Any]]
FIXED = ("base", "data", "objective")  # another one is refused
# Data files above this size (bytes) are known by their size and these samples of their content.
SMALL = 4 << 20
SAMPLES, SAMPLE_BYTES = 64, 4096
# Last names of the keys that say what is optimized.
OBJECTIVE = frozenset(
    """preference_loss ref_policy_kl_penalty label_smoothing preference_average_log_probs
    sft_average_log_probs gt_reward_scale preference_loss_weight sft_loss_weight
    desirable_loss_weight undesirable_loss_weight kd_loss jsd_beta outside_top_k
    target_logits_scale logits_scale kd_loss_weight cross_tokenizer fraction advantage_estimator
    initial_policy_kl_penalty use_absolute_kl kl_estimator target discount_factor gae_lambda
    critic_gae_lambda normalize_advantages advantage_clip reward_clip process_rewards
    whiten_rewards overlong_buffer_len overlong_penalty_factor entropy_bonus kl_loss_coef
    kl_loss_estimator train_on_truncated top_n_rollouts loss_reduction answer_only_loss
    reward_model_type loss_func num_attributes merge_attributes attribute_weights loss_mask_val
    loss_clip_val enable mean std""".split()
)


def made_from(cfg: DictConfig, section: str, loader: Any = None) -> MadeFrom:
    """What a job is made from, as rank 0 finds it; all ranks call it.

    Args:
        cfg: the whole configuration.
        section: of `cfg.trainer`, with the job's own settings.
        loader: of its training data, as a PyTorch data loader; None: it has none.
    """
    found: MadeFrom = {}
    if is_rank_zero():
        values = _settings(cfg, section)
        objective = {key: value for key, value in values.items() if _last(key) in OBJECTIVE}
        found = {
            "base": _base(cfg),
            "data": {} if loader is None else _data(loader) | {"model.seed": cfg.model.seed},
            "objective": {"job": section} | objective,
            "settings": {key: value for key, value in values.items() if key not in objective},
        }
    return gathered(json.loads(json.dumps(found)))[0]


def compare(now: MadeFrom, stored: dict[str, Any], folder: Path) -> None:
    """Compare what a job is made from with what a checkpoint says; what differs is shown.

    Args:
        stored: contents of its `state.json`.
        folder: the checkpoint.

    Raises:
        UserError: another base, other data or another objective; with the remedies.
    """
    before = stored.get("made_from")
    if before is None:
        logging.warning(
            f"{folder} does not say what it was made from (an earlier version wrote it): base, "
            "data and objective are not compared."
        )
        return
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


def content_samples(path: Path) -> bytes:
    """The content of a file; of one above `SMALL`, samples of it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= SMALL:
            return file.read()
        starts = np.linspace(0, size - SAMPLE_BYTES, SAMPLES).astype(np.int64).tolist()
        return b"".join((file.seek(start), file.read(SAMPLE_BYTES))[1] for start in starts)


def content_hash(path: Path) -> str:
    """A hash of the content of a file or folder, wherever it lies; of a `.nemo` or a checkpoint
    that has checksums, of these.
    """
    if path.is_dir():
        files = [f for f in path.rglob("*") if f.is_file() and _is_read(f.relative_to(path))]
        if (path / MANIFEST).is_file():
            files = [path / MANIFEST]
        return _hash(*(f"{f.relative_to(path)} {content_hash(f)}" for f in sorted(files)))
    if path.suffix == ".nemo" and tarfile.is_tarfile(path):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None and member.name.removeprefix("./") == MANIFEST:
                    inner = _hash(str(member.size), content.read())
                    return _hash(f"{MANIFEST} {inner}")
    return _hash(str(path.stat().st_size), content_samples(path))


def _is_read(name: Path) -> bool:
    """Whether a file of a folder may be of the model: not a page about it, nor of git."""
    return name.suffix != ".md" and not any(part.startswith(".") for part in name.parts)


def _hash(*parts: str | bytes) -> str:
    joined = b"\n".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(joined).hexdigest()


def _base(cfg: DictConfig) -> dict[str, Any]:
    base: dict[str, Any] = {"base": "random weights"}
    for key, name in (
        ("model.restore_from_path", "base"),
        ("pretrained_checkpoint.restore_from_path", "base"),
        ("model.peft.restore_from_path", "adapters to start from"),
    ):
        path = OmegaConf.select(cfg, key)
        if path:
            base[name] = {"shown": str(path), "content": content_hash(Path(path))}
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


def _settings(cfg: DictConfig, section: str) -> dict[str, Any]:
    """The values of `OBJECTIVE` and the optimizer, and the numbers beside them, by dotted keys."""
    own = (section, "regression", "reward_standardization", "optim")
    model = {key: cfg.model[key] for key in cfg.model if not OmegaConf.is_config(cfg.model[key])}
    model |= {key: cfg.model[key] for key in own if key in cfg.model}
    tree = OmegaConf.create({"trainer": {section: cfg.trainer[section]}, "model": model})
    return {
        key: value
        for key, value in _leaves(OmegaConf.to_container(tree, resolve=True))
        if isinstance(value, int | float)
        or _last(key) in OBJECTIVE
        or key.startswith("model.optim.")
    }


def _leaves(node: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _content(value: Any) -> Any:
    return value["content"] if isinstance(value, dict) and "content" in value else value


def _shown(value: Any) -> str:
    is_hashed = isinstance(value, dict) and "content" in value
    return f"{value['shown']} ({value['content'][:8]})" if is_hashed else str(value)
