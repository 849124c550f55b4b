# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Constitutional AI: responses to red-teaming prompts that a model criticizes and revises
(supervised fine-tuning learns the revisions), and pairs of responses that a model compares by a
constitution (a reward model learns the comparisons).

Bai et al. 2022, arXiv:2212.08073, sections 3 and 4.
"""

import ast
import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chat_models import ChatModel, TextForm, Turn
from nemo.utils import logging

from nemo_aligner.core.errors import ServerRequestError, UserError
from nemo_aligner.data.nlp.chat_records import Message
from nemo_aligner.data.nlp.index_files import append_lines, complete_lines
from nemo_aligner.data.nlp.nemo_chat import RESPONDER, USER
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.parallel.collectives import on_rank_zero

Result = dict[str, Any]
NUMBER, SKIPPED = "number", "skipped"


class Progress:
    """The results of a command; all ranks of a job hold the same, and call each method together.

    Args:
        path: of the file, jsonl. A result is an object with its number; one with the field
            `skipped`, the reason, has nothing else to give.
        count: how many results there will be.
        expected: from a number to fields that its result must have: of this command.

    Raises:
        UserError: the file holds results of something else.
    """

    def __init__(
        self, path: Path, count: int, expected: Callable[[int], Mapping[str, Any]]
    ) -> None:
        self.path, self.count, self._expected = path, count, expected
        self._found: dict[int, Result] = on_rank_zero(self._read)

    def _read(self) -> dict[int, Result]:
        found: dict[int, Result] = {}

        def check(line: int, text: bytes) -> None:
            try:
                result = json.loads(text)
                number = result[NUMBER]
                same = 0 <= number < self.count and all(
                    result.get(key) == value for key, value in self._expected(number).items()
                )
            except (ValueError, KeyError, TypeError, AttributeError):
                same = False
            if not same:
                raise UserError(
                    f"{self.path}, line {line + 1}: it is no result of this command: the prompts, "
                    "the model, the seed or another setting were different. Give another output, "
                    "or remove the file to start afresh."
                )
            found[number] = result

        complete_lines(self.path, check)
        return found

    @property
    def missing(self) -> list[int]:
        return [number for number in range(self.count) if number not in self._found]

    def add(self, results: Sequence[Result]) -> None:
        """Keep results, in the file too; `SaveError` on all ranks if it cannot be written."""
        lines = [json.dumps(result, ensure_ascii=False) + "\n" for result in results]
        on_rank_zero(lambda: append_lines(self.path, lines))
        self._found |= {result[NUMBER]: result for result in results}

    def results(self) -> list[Result]:
        """All results in the order of their numbers, without those that were skipped."""
        whole = [self._found[number] for number in sorted(self._found)]
        return [result for result in whole if SKIPPED not in result]


# Of the candidates to compare, as in NeMo-Aligner.
TEMPERATURES = (0.01, 0.51, 1.01, 1.51)
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "system": "system"}


# --- what is read -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Principle:
    """How to ask for a critique of a response, and for its revision."""

    critique: str
    revision: str


def red_team_prompt(record: Record) -> str:
    """A record's `text` or `prompt`, or the first turn of a `transcript` of Anthropic's red-
    teaming attempts; `UserError` if there is none.
    """
    text = record.get("text", record.get("prompt"))
    if text is None and isinstance(record.get("transcript"), str):
        found = re.search(r"Human:(.*?)Assistant:", record["transcript"], re.DOTALL)
        text = None if found is None else found.group(1)
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            "there is no prompt in 'text', 'prompt' or 'transcript' (Human: ... Assistant: ...); "
            f"the line has {sorted(record)}."
        )
    return text.strip()


def read_principles(path: str) -> list[Principle]:
    """The requests in `{"harmful0": {"prompt": [critique], "edit_request": revision}}`.

    Raises:
        UserError: it cannot be read, or has another form.
    """
    content = read_json(path)
    principles = []
    try:
        for each in content.values():
            (critique,) = each["prompt"]
            principles.append(
                Principle(
                    critique.removeprefix("\n\nCritiqueRequest: ").removesuffix("\n\nCritique:"),
                    each["edit_request"]
                    .removeprefix("\n\nRevisionRequest: ")
                    .removesuffix("\n\nRevision:"),
                )
            )
    except (AttributeError, KeyError, TypeError, ValueError):
        principles = []
    if not principles:
        raise UserError(
            f'{path} must hold requests, {{"name": {{"prompt": ["criticize ..."], "edit_request": '
            '"rewrite ..."}, ...}.'
        )
    return principles


def read_few_shot(path: str) -> list[Message]:
    """The messages of a file `{"samples": [[{"role": "User", "content": ...}, ...], ...]}`, which
    every conversation begins with.

    Raises:
        UserError: it cannot be read, or has another form.
    """
    content = read_json(path)
    try:
        return [
            {"role": _ROLES[message["role"].lower()], "content": str(message["content"])}
            for sample in content["samples"]
            for message in sample
        ]
    except (AttributeError, KeyError, TypeError):
        raise UserError(
            f'{path} must hold {{"samples": [[{{"role": "User", "content": ...}}, ...], ...]}}.'
        ) from None


def read_json(path: str) -> Any:
    """The content of a JSON file; `UserError` if it cannot be read."""
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


# --- conversations in batches -------------------------------------------------------------------


@dataclass
class _Work:
    """An example on its way."""

    result: Result  # what is known of it
    messages: list[Message] = field(default_factory=list)  # of its conversation
    error: Exception | None = None  # that it failed with; it will be tried again

    @property
    def goes_on(self) -> bool:
        return self.error is None and SKIPPED not in self.result

    def say(self, role: str, content: str) -> None:
        self.messages = [*self.messages, {"role": role, "content": content}]


@dataclass(frozen=True)
class Generator:
    """Asks a model for the next message of many conversations."""

    model: ChatModel  # that responds
    seed: int  # of all random streams; each example and question has its own
    batch_size: int  # conversations at once
    # an example for which the model gives no response is left out for good
    skips_failed: bool = False

    def ask(
        self, works: Sequence[_Work], what: str, temperature: float | None = None
    ) -> dict[int, str]:
        """The next message of each conversation that goes on, by the number of its example.

        One that is empty, or that the model has no room for, ends its example.

        Args:
            what: the message is, for its random stream and for messages to the user.
        """
        asked = [work for work in works if work.goes_on]
        turns = [
            Turn(work.messages, stream_seed(self.seed, what, work.result[NUMBER]))
            for work in asked
        ]
        found = {}
        for work, text in zip(asked, self.model.respond(turns, temperature), strict=True):
            number = work.result[NUMBER]
            if isinstance(text, str) and text.strip():
                found[number] = text.strip()
            elif isinstance(text, Exception) and not self._is_final(text):
                work.error = text
            else:
                why = "is empty" if isinstance(text, str) else f"failed: {text}"
                work.result[SKIPPED] = f"the {what} {why}"
                logging.warning(f"prompt {number + 1} is left out: {work.result[SKIPPED]}")
        return found

    def fingerprint(self, *asked: Any) -> dict[str, str]:
        """A digest of what a result depends on: model, settings, seed, and what is `asked`."""
        text = json.dumps([self.model.settings, self.seed, *asked], sort_keys=True)
        return {"settings": hashlib.sha256(text.encode()).hexdigest()[:16]}

    def _is_final(self, error: Exception) -> bool:
        return self.skips_failed or isinstance(error, UserError)

    def run(
        self,
        path: Path,
        count: int,
        begin: Callable[[int], Result],
        work_on: Callable[[list[_Work]], None],
    ) -> list[Result]:
        """The results of `count` examples, kept in the file `path`: those that are missing there
        `begin` with fields of this command, and `work_on` adds the others, a batch at a time.

        Raises:
            ServerRequestError: for examples of a batch the server gave no response. Those that
                were complete are in the file.
        """
        progress = Progress(path, count, begin)
        missing = progress.missing
        done = progress.count - len(missing)
        if done:
            logging.info(f"{progress.path} holds {done} of {progress.count} results already")
        for start in range(0, len(missing), self.batch_size):
            numbers = missing[start : start + self.batch_size]
            works = [_Work({NUMBER: number, **begin(number)}) for number in numbers]
            work_on(works)
            progress.add([work.result for work in works if work.error is None])
            failed = [work for work in works if work.error is not None]
            if failed:
                raise ServerRequestError(
                    f"{len(failed)} of {len(works)} conversations of this batch failed, first "
                    f"that of prompt {failed[0].result[NUMBER] + 1}: {failed[0].error} What was "
                    f"complete is in {progress.path}; the same command goes on from there, with "
                    "--skip-failed without these."
                )
            logging.info(f"{done + start + len(works)} of {progress.count} done")
        return progress.results()


def stream_seed(seed: int, what: str, number: int) -> int:
    """The seed of a response, from that of the command, the question, and the example's number."""
    digest = hashlib.sha256(f"{seed} {what} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


# --- critique and revision ----------------------------------------------------------------------


def revise(
    generator: Generator,
    prompts: Sequence[str],
    principles: Sequence[Principle],
    few_shot: Sequence[Message],
    path: Path,
) -> list[Result]:
    """The critique and the revision of a response to each prompt; all ranks call it.

    Returns:
        `initial_prompt`, `initial_response`, `critique_prompt`, `critique_response`,
        `revision_prompt` and `revision_response` of each prompt for which all are there.
    """

    settings = generator.fingerprint(list(few_shot))

    def principle(number: int) -> Principle:
        return principles[stream_seed(generator.seed, "principle", number) % len(principles)]

    def begin(number: int) -> Result:
        chosen = principle(number)
        return {
            **settings,
            "initial_prompt": prompts[number],
            "critique_prompt": chosen.critique,
            "revision_prompt": chosen.revision,
        }

    def work_on(works: list[_Work]) -> None:
        for work in works:
            work.messages = list(few_shot)
        for what in ("initial", "critique", "revision"):
            for work in works:
                work.say("user", work.result[f"{what}_prompt"])
            found = generator.ask(works, f"{what} response")
            for work in works:
                if work.goes_on:
                    work.result[f"{what}_response"] = found[work.result[NUMBER]]
                    work.say("assistant", found[work.result[NUMBER]])

    return generator.run(path, len(prompts), begin, work_on)


def revised_conversation(result: Result) -> Record:
    """What supervised fine-tuning learns of a revision."""
    return {
        "system": "",
        "conversations": [
            {"from": USER, "value": result["initial_prompt"], "label": None},
            {"from": RESPONDER, "value": result["revision_response"], "label": None},
        ],
        "mask": USER,
        "dataset": "sl_cai_samples",
    }


# --- comparisons --------------------------------------------------------------------------------


def candidates(generator: Generator, prompts: Sequence[str], path: Path) -> list[Result]:
    """Responses to each prompt at the `TEMPERATURES`; all ranks call it.

    Returns:
        `prompt` and `responses`, by "response_t=<temperature>", of each prompt that has at least
        two different ones.
    """

    settings = generator.fingerprint(TEMPERATURES)

    def begin(number: int) -> Result:
        return {**settings, "prompt": prompts[number]}

    def work_on(works: list[_Work]) -> None:
        for work in works:
            work.result["responses"] = {}
            work.say("user", work.result["prompt"])
        for temperature in TEMPERATURES:
            found = generator.ask(works, f"response at temperature {temperature}", temperature)
            for work in works:
                if work.goes_on:
                    text = found[work.result[NUMBER]]
                    work.result["responses"][f"response_t={temperature}"] = text
        for work in works:
            if work.goes_on and len(set(work.result["responses"].values())) < 2:
                work.result[SKIPPED] = "all responses are the same"

    return generator.run(path, len(prompts), begin, work_on)


def compare(
    judge: Generator, found: Sequence[Result], constitution: str, path: Path
) -> list[Result]:
    """Which of the responses to each prompt a judge finds best and worst; all ranks call it.

    Returns:
        `prompt`, `chosen`, `rejected` and `raw` (how they were found) of each prompt for which
        the judge named two different responses.
    """

    def begin(number: int) -> Result:
        settings = judge.fingerprint(constitution, judge_request(found[number]))
        return {**settings, "prompt": found[number]["prompt"]}

    def work_on(works: list[_Work]) -> None:
        for work in works:
            work.say("system", constitution)
            work.say("user", judge_request(found[work.result[NUMBER]]))
        texts = judge.ask(works, "judgement")
        for work in works:
            if work.goes_on:
                _judge(work.result, found[work.result[NUMBER]]["responses"], texts)

    return judge.run(path, len(found), begin, work_on)


def judge_request(found: Result) -> str:
    """The message that asks the judge for a pair."""
    numbered = "\n".join(
        f"Response {number}:\n{text}\n"
        for number, text in enumerate(found["responses"].values(), start=1)
    )
    return (
        f"Prompt:\n{found['prompt']}\n\n{numbered}\n"
        'Reply with one line {"chosen": NUMBER, "rejected": NUMBER}, then with your reasons.'
    )


def _judge(result: Result, responses: dict[str, str], texts: dict[int, str]) -> None:
    """Add to `result` what the judge said of an example, or why it is left out."""
    text = texts[result[NUMBER]]
    names = list(responses)
    pair = read_judgement(text, len(names))
    if pair is None:
        result[SKIPPED] = f"the judgement names no pair: {text[:200]!r}"
        return
    chosen, rejected = (names[number - 1] for number in pair)
    if responses[chosen] == responses[rejected]:
        result[SKIPPED] = "the judgement names twice the same response"
        return
    result |= {"chosen": responses[chosen], "rejected": responses[rejected]}
    result["raw"] = {
        "chosen_response_key": chosen,
        "rejected_response_key": rejected,
        "judgement": text,
        "all_responses": responses,
    }


def read_judgement(text: str, count: int) -> tuple[int, int] | None:
    """(chosen, rejected), counted from 1 to `count`; None if the text does not name them."""
    found = re.search(r"\{.*?\}", text, re.DOTALL)
    if found is None:
        return None
    try:
        values = ast.literal_eval(found.group())
        numbers = [re.findall(r"\d+", str(values[key])) for key in ("chosen", "rejected")]
        ((chosen,), (rejected,)) = numbers
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        return None
    pair = int(chosen), int(rejected)
    return pair if all(1 <= number <= count for number in pair) else None


def preference_texts(result: Result, form: TextForm, eos: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) as PPO and a reward model read them: both responses begin with
    the prompt and end with `eos`.
    """
    asked: Message = {"role": "user", "content": result["prompt"]}
    prompt = form.text([asked])
    whole = []
    for side in ("chosen", "rejected"):
        text = form.text([asked, {"role": "assistant", "content": result[side]}])
        whole.append(text if not eos or text.endswith(eos) else text + eos)
    return prompt, whole[0], whole[1]


def check_shares(shares: Mapping[str, Any]) -> None:
    """Raise `UserError` unless the shares of --splits are numbers above 0 that add up to 1."""
    numbers = [share for share in shares.values() if type(share) in (int, float)]
    are_shares = len(numbers) == len(shares) and all(share > 0 for share in numbers)
    if not are_shares or not abs(sum(numbers) - 1) <= 1e-6:
        raise UserError(f"--splits {shares}: the shares must be above 0 and add up to 1.")


def split(
    results: Sequence[Result], shares: dict[str, float], shuffle: bool, seed: int
) -> dict[str, list[Result]]:
    """Divide results by shares, one at least to each part; `UserError`: shares that do not add up
    to 1, or fewer results than parts.
    """
    check_shares(shares)
    if len(results) < len(shares):
        raise UserError(
            f"there are {len(results)} comparisons for the parts {', '.join(shares)} of --splits; "
            "each needs one."
        )
    order = list(results)
    if shuffle:
        random.Random(seed).shuffle(order)
    parts: dict[str, list[Result]] = {}
    place, total = 0, 0.0
    for number, (name, share) in enumerate(shares.items()):
        total += share
        left = len(shares) - number - 1
        end = min(max(round(len(order) * total), place + 1), len(order) - left)
        parts[name] = order[place:end]
        place = end
    return parts
