# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Attributes of responses, from a served regression reward model (SteerLM).

The file grows in the order of the input, a line per conversation, so that a command that was
stopped goes on where it ended. Requests are in flight while others are written.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from labels import rounded_label, with_labels
from nemo.utils import logging

from nemo_aligner.config.access import client_tls, read_token
from nemo_aligner.config.server_rules import RewardModelSpec
from nemo_aligner.core.errors import LostPeerError, ServerRequestError, UserError
from nemo_aligner.data.nlp.index_files import append_lines, complete_lines
from nemo_aligner.data.nlp.records import Records
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.data.nlp.steerlm import scored_turns
from nemo_aligner.servers.fleet import Fleet
from nemo_aligner.servers.futures import PendingReply, SentRequest
from nemo_aligner.servers.schema import Arrays, attributes_endpoint

REQUESTS_IN_FLIGHT = 4


class AttributeModel:
    """A served reward model with several attributes; call `close()` or use it in a `with` block.

    Args:
        init_timeout_s: how long to wait while the server does not reply, at the start and later.
        inference_timeout_s: how long it may take over a request.
        token_file, tls_ca_file: as in `remote_rm` (docs/config.md).

    Raises:
        ConfigError: token or certificates cannot be read.
        ServerUnreachableError: no reply within `init_timeout_s`.
        ServerMismatchError: what is served there gives no attributes of texts.
    """

    def __init__(
        self,
        host: str,
        port: int,
        model_name: str,
        init_timeout_s: float,
        inference_timeout_s: float,
        token_file: str | None = None,
        tls_ca_file: str | None = None,
    ) -> None:
        setting = "attribute_annotate"
        self._fleet = Fleet(
            RewardModelSpec(None, model_name, ((host, port),), 1.0, setting),
            attributes_endpoint(),
            init_timeout_s,
            inference_timeout_s,
            token=read_token(token_file, setting),
            tls=client_tls(tls_ca_file, setting),
        )
        try:
            while not self._fleet.wait_until_ready(init_timeout_s):
                pass
        except UserError:
            self.close()
            raise

    def __enter__(self) -> "AttributeModel":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def submit(self, texts: Sequence[str]) -> PendingReply:
        """Send N texts; the reply holds `rewards`, float32 `[N, A]`."""
        sentences = np.array([[text.encode("utf-8")] for text in texts], dtype=object)
        future: Future[Arrays] = self._fleet.submit({"sentences": sentences})
        return PendingReply({"attributes": SentRequest(future, self._fleet.describe)})

    def close(self) -> None:
        self._fleet.close()


class _Asked(NamedTuple):
    """A request in flight: the numbers of its records, and the turns that it holds of each."""

    numbers: list[int]
    turns: list[list[tuple[int, str]]]
    reply: PendingReply


def annotate(
    records: Records,
    out: Path,
    attributes: Sequence[str],
    connect: Callable[[], AttributeModel],
    turns_per_request: int,
) -> int:
    """Write the conversations of `records` to `out`, each response with a label of its attributes.

    Args:
        records: checked by `check_conversation`.
        out: of the file. Lines of the same conversations that it holds already stay.
        attributes: names of the numbers that the model gives, in their order.
        connect: makes the client; not called if nothing is left to do.
        turns_per_request: responses of a request; those of one conversation stay together.

    Returns:
        How many conversations were asked for.

    Raises:
        UserError: `out` holds something else, or the model gives another number of attributes.
        ServerRequestError: the server refuses a conversation, which is named, or has gone. What
            was complete before is in the file.
        SaveError: the file cannot be written.
    """
    done = complete_lines(out, lambda number, line: _check_line(line, number, records, out))
    if done:
        logging.info(f"{out} holds {done} of {len(records)} conversations already")
    if done == len(records):
        return 0
    with connect() as model:
        in_flight: deque[_Asked] = deque()
        for asked in _requests(records, done, model, turns_per_request):
            in_flight.append(asked)
            if len(in_flight) == REQUESTS_IN_FLIGHT:
                _write(in_flight.popleft(), records, out, attributes, model)
        while in_flight:
            _write(in_flight.popleft(), records, out, attributes, model)
    return len(records) - done


def _requests(
    records: Records, first: int, model: AttributeModel, turns_per_request: int
) -> Iterator[_Asked]:
    """The requests for the records from `first` on; each is sent when it is asked for."""
    numbers: list[int] = []
    size = 0
    for number in range(first, len(records)):
        numbers.append(number)
        size += int(records.notes[number])
        if size >= turns_per_request or number == len(records) - 1:
            turns = [scored_turns(records[number]) for number in numbers]
            texts = [text for of_one in turns for _, text in of_one]
            yield _Asked(numbers, turns, model.submit(texts))
            numbers, size = [], 0


def _write(
    asked: _Asked, records: Records, out: Path, attributes: Sequence[str], model: AttributeModel
) -> None:
    """Wait for a reply and append its conversations."""
    try:
        values = asked.reply.result()["rewards"]
    except LostPeerError:
        raise
    except ServerRequestError as error:
        if len(asked.numbers) == 1:
            raise ServerRequestError(_about(records, asked.numbers[0], str(error))) from error
        # One of them is to blame: those before it are written.
        for number, turns in zip(asked.numbers, asked.turns, strict=True):
            reply = model.submit([text for _, text in turns])
            _write(_Asked([number], [turns], reply), records, out, attributes, model)
        return
    if values.shape[1] != len(attributes):
        raise UserError(
            f"the served model gives {values.shape[1]} number(s) for a response, but there are "
            f"{len(attributes)} attributes ({', '.join(attributes)}). Serve a regression reward "
            "model of these attributes with model.regression.merge_attributes=False, or name "
            "those of the model with --attributes."
        )
    rows = iter(values)
    lines = []
    for number, turns in zip(asked.numbers, asked.turns, strict=True):
        labels = {turn: rounded_label(next(rows), attributes) for turn, _ in turns}
        line = json.dumps(with_labels(records[number], labels), ensure_ascii=False)
        lines.append(line + "\n")
    append_lines(out, lines)


def _about(records: Records, number: int, error: str) -> str:
    return (
        f"conversation {number + 1} of {', '.join(map(str, records.paths))}: {error} Correct or "
        "remove it and start the command again: it goes on there."
    )


def _check_line(line: bytes, number: int, records: Records, out: Path) -> None:
    """Raise `UserError` unless the line is conversation `number` with other labels."""
    expected = _without_labels(records[number]) if number < len(records) else None
    try:
        found = _without_labels(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError):
        found = None
    if found is None or found != expected:
        raise UserError(
            f"{out}, line {number + 1}: it is not conversation {number + 1} of "
            f"{', '.join(map(str, records.paths))}. Give another --output-file, or remove it to "
            "start afresh."
        )


def _without_labels(record: Record) -> Any:
    turns = [{**turn, "label": None} for turn in record["conversations"]]
    return {**record, "conversations": turns, "type": None}
