# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes the log-probs of the reference policy for whole datasets, once, and keeps them in files
(`data/nlp/reference_log_probs.py`).
"""

import contextlib
import errno
import hashlib
import json
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from nemo.utils import logging
from omegaconf import OmegaConf
from torch.utils.data import default_collate
from tqdm import tqdm

from nemo_aligner.checkpoint.checksums import MANIFEST, check_files_together, write_manifest
from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.config.schema import ARCHITECTURE_KEYS
from nemo_aligner.core import leftovers
from nemo_aligner.core.errors import DamagedFileError
from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.data.nlp.index_files import code_fingerprint, file_fingerprint, key
from nemo_aligner.data.nlp.reference_log_probs import META, ShardWriter, WithReferenceLogProbs
from nemo_aligner.models.nlp.gpt.log_probs import ReferencePolicyMixin
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered

FORM = 1  # of the files, and of what is computed
# Micro-batches that are computed together, then written: samples of similar length share one.
TOGETHER = 16


def with_reference_log_probs(
    model: ReferencePolicyMixin, dataset: Any, root: Path, checkpoint: Path, name: str
) -> WithReferenceLogProbs:
    """`dataset` with the log-probs of the reference policy, which is `model` with its present
    weights (without adapters). They are computed unless a job before has; all ranks call it.

    Each data-parallel rank computes a share of the items and writes a file, so `root` is on a file
    system that all ranks see. Of several jobs that compute the same, each does, and the first one
    that is ready keeps its files.

    Args:
        dataset: `DPOModelDataset` or `KTOModelDataset`.
        root: for each dataset and each model it gets a folder.
        checkpoint: file or folder that the weights come from.
        name: of the dataset.

    Raises:
        SaveError: a file cannot be written; on all ranks.
        UserError: as `WithReferenceLogProbs`.
    """
    folder = root / f"{name}-{_key(model, dataset, checkpoint)}"
    if not _is_whole(folder):
        with model.as_reference_policy():
            _compute(model, dataset, folder, name)
    return WithReferenceLogProbs(dataset, folder, model.REFERENCE_COLUMNS)


def _key(model: ReferencePolicyMixin, dataset: Any, checkpoint: Path) -> str:
    """A hash of all that the log-probs depend on but the split; what rank 0 finds counts."""
    weights = model.checksum_of_base()
    found = ""
    if parallel_state.get_rank() == 0:
        lines = dataset.lines
        network = {name: str(OmegaConf.select(model.cfg, name)) for name in ARCHITECTURE_KEYS}
        found = key(
            [FORM, code_fingerprint()],
            [weights, _fingerprint_of_checkpoint(checkpoint), str(model.cfg.precision)],
            {name: value for name, value in network.items() if not _is_free(name)},
            [tokenizer_fingerprint(model.tokenizer), dataset.encoder.settings()()],
            [type(dataset).__name__, dataset.seq_length, [c.fields for c in lines.columns]],
            [file_fingerprint(file) for source in lines.sources for file in source.files],
            hashlib.sha256(dataset.documents.tobytes()).hexdigest(),
        )
    return str(gathered(found)[0])


def _is_free(name: str) -> bool:
    """Whether a key says nothing about the log-probs (of the tokenizer, its fingerprint does)."""
    return name.startswith("tokenizer.") or name.endswith(("parallel_size", "_dropout"))


def _fingerprint_of_checkpoint(path: Path) -> str:
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return key([(str(each.relative_to(path)), file_fingerprint(each)) for each in files])


def _is_whole(folder: Path) -> bool:
    """Whether a folder has the files that were written to it; a damaged one is removed."""
    is_first = parallel_state.get_rank() == 0
    there, sealed = gathered((folder.is_dir(), (folder / MANIFEST).is_file()) if is_first else ())[
        0
    ]
    if not there:
        return False
    try:
        if not sealed:
            raise DamagedFileError(f"{folder} is damaged or incomplete: it has no {MANIFEST}.")
        check_files_together(folder)
    except DamagedFileError as error:
        what = str(error).split(" (see")[0].rstrip(".")
        logging.warning(f"{what}. The reference policy's log-probs are computed again.")
        # Another job may be removing it too.
        with failing_together(folder), contextlib.suppress(FileNotFoundError):
            if is_first:
                shutil.rmtree(folder)
        return False
    # Another job may have found it damaged and removed it just now.
    return bool(gathered((folder / MANIFEST).is_file() if is_first else None)[0])


def _compute(model: ReferencePolicyMixin, dataset: Any, folder: Path, name: str) -> None:
    is_first = parallel_state.get_rank() == 0
    token = gathered(secrets.token_hex(8) if is_first else None)[0]
    partial = folder.parent.absolute() / f"partial_{token}"
    logging.info(f"the reference policy's log-probs of {name} are computed, for {folder}")
    try:
        with failing_together(folder.parent):
            if is_first:
                folder.parent.mkdir(parents=True, exist_ok=True)
                leftovers.claim(folder.parent, "partial_", token).mkdir()
        _write_shards(model, dataset, partial, folder, name)
        with failing_together(folder):
            if is_first:
                shards = parallel_state.get_data_parallel_world_size()
                meta = {"items": len(dataset), "shards": shards}
                (partial / META).write_text(json.dumps(meta))
                write_manifest(partial, {})
                _rename(partial, folder)
    finally:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        logging.info(f"another job has written {folder} in the meantime")


def _write_shards(
    model: ReferencePolicyMixin, dataset: Any, partial: Path, folder: Path, name: str
) -> None:
    """Compute the log-probs of all items; of each TP x PP x CP group one rank writes a shard to
    `partial`, which will be `folder`.
    """
    shard = parallel_state.get_data_parallel_rank()
    shards = parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_rank()
    writes = rank == parallel_state.get_model_parallel_src_rank()
    columns, samples = model.REFERENCE_COLUMNS, len(model.REFERENCE_COLUMNS)
    size = TOGETHER * max(1, model.forward_micro_batch_size // samples)
    steps = -(-len(dataset) // (shards * size))  # of the rank with the most items
    with failing_together(folder):
        writer = ShardWriter(partial, shard) if writes else None
    for step in tqdm(range(steps), desc=f"Reference: {name}", disable=rank != 0):
        places = range(shard + step * size * shards, len(dataset), shards)[:size]
        items = [dataset[place] for place in places]
        # Ranks that hold each other's experts must make equally many passes.
        logprobs = model.get_ref_policy_logprobs(default_collate(items or [dataset[0]]))
        rows = torch.stack(logprobs.chunk(samples), dim=1).cpu()
        # In each step, because a rank that left alone would have the others wait for it.
        with failing_together(folder):
            if writer is not None:
                for item, row in zip(items, rows, strict=False):
                    writer.add(item, columns, row.unbind())
    with failing_together(folder):
        if writer is not None:
            writer.close()
