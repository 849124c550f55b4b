# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A server's view of a request: decoded, tokenized and padded for the model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state


def decode_bytes_ndarray(str_ndarray: np.ndarray) -> np.ndarray:
    """Decode UTF-8 bytes of any shape to a flat array of str."""
    return np.char.decode(np.asarray(str_ndarray).astype("bytes"), "utf-8").reshape(-1)


def pad_input(
    value: np.ndarray | torch.Tensor | Sequence[Any] | None, size: int, pad_value: Any = 0
) -> tuple[list[Any] | None, int]:
    """Extend the rows of `value` by rows of `pad_value` to a multiple of `size`: the rows as a
    list, and how many were added; (None, 0) for None.
    """
    if value is None:
        return None, 0
    rows = value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else list(value)
    extra = -len(rows) % size
    row = [pad_value] * len(rows[0]) if rows and isinstance(rows[0], list) else pad_value
    return rows + [row] * extra, extra


def pad_rows(array: np.ndarray, multiple: int) -> np.ndarray:
    """Append rows of zeros up to a multiple of `multiple` rows; without need it is not copied."""
    extra = -array.shape[0] % multiple
    if not extra:
        return array  # not a copy: it may be large
    return np.pad(array, [(0, extra)] + [(0, 0)] * (array.ndim - 1))


def calculate_inference_batch_padding_multiple(
    current_size: int, model_forward_micro_batch_size: int
) -> int:
    """Return the multiple to which a batch of `current_size` samples is padded.

    Every data-parallel rank then gets whole micro-batches: DP for a small batch (one shorter
    micro-batch each), else `model_forward_micro_batch_size * DP`.
    """
    dp_size = parallel_state.get_data_parallel_world_size()
    full = model_forward_micro_batch_size * dp_size
    return dp_size if current_size <= full else full


def _decode_sentences(sentences: np.ndarray) -> list[str]:
    """Decode `sentences`, bytes [N] or [N, 1]; an error names the row that is not UTF-8."""
    if sentences.ndim > 1 and sentences.shape[1:] != (1,):
        raise UserError(
            f"'sentences' has shape {list(sentences.shape)}: send one text per row, [N, 1]."
        )
    texts = []
    # One by one: an array of texts has room for the longest in each of its rows, and drops the
    # zeros at their ends.
    for row, text in enumerate(sentences.reshape(-1)):
        try:
            texts.append(bytes(text).decode())
        except UnicodeDecodeError as error:
            raise UserError(
                f"'sentences' holds bytes in sample {row} that are not UTF-8 ({error.reason})."
            ) from error
    return texts


def process_inputs(
    inputs: Mapping[str, np.ndarray | None], tokenize_func: Callable[[list[str]], tuple]
) -> dict[str, np.ndarray]:
    """Return tokens and lengths of an infer request; `sentences` win over `tokens`.

    Args:
        tokenize_func: list of str -> (tokens [N, S], lengths [N]).

    Returns:
        {"inputs": int64 [N, S], "sequence_length": int64 [N]}.
    """
    sentences = inputs.get("sentences")
    if sentences is not None:
        tokens, lengths = tokenize_func(_decode_sentences(np.asarray(sentences)))
    else:
        tokens, lengths = inputs.get("tokens"), inputs.get("sequence_lengths")
        if tokens is None or lengths is None:
            missing = "'tokens'" if tokens is None else "'sequence_lengths'"
            raise UserError(
                f"{missing} is missing: send 'sentences', or 'tokens' together with "
                "'sequence_lengths'."
            )
    return {
        "inputs": np.asarray(tokens).astype(np.int64, copy=False),
        "sequence_length": np.asarray(lengths).astype(np.int64, copy=False).reshape(-1),
    }


def pad_batch_and_strip_sequence(
    tokens: np.ndarray,
    sequence_lengths: np.ndarray,
    pad_to_multiple: int,
    strip_sequence_length_to_multiple: int | None = None,
) -> tuple[dict[str, np.ndarray], int, int]:
    """Pad a batch with empty rows (tokens 0, length 0), and cut columns that no sample uses.

    Args:
        tokens: int64 [N, S].
        sequence_lengths: int64 [N].
        pad_to_multiple: the number of rows becomes a multiple of this.
        strip_sequence_length_to_multiple: cut S to the longest sample, rounded up to this
            multiple; None keeps S.

    Returns:
        ({"inputs": [N', S'], "sequence_length": [N']}, number of rows added, S).
    """
    rows, width = tokens.shape
    if strip_sequence_length_to_multiple is not None:
        longest = max(int(sequence_lengths.max()), 1)
        step = strip_sequence_length_to_multiple
        tokens = tokens[:, : min(width, -(-longest // step) * step)]
    tokens = pad_rows(tokens, pad_to_multiple)
    lengths = pad_rows(sequence_lengths, pad_to_multiple)
    return {"inputs": tokens, "sequence_length": lengths}, tokens.shape[0] - rows, width
