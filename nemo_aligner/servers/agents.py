# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Agents as the environment of conversations (docs/rewards.md): programs that talk to the
policy as to any chat model, all of it in JSON:

    POST /v1/sessions                          the next session; 204: there is none for a while
    POST /v1/sessions/<id>/chat/completions    OpenAI's request; the rest is its `base_url`
    POST /v1/sessions/<id>/reward              {"reward": 1.0}; ends the session

A refusal is OpenAI's {"error": {"message": ...}}: 400, or 404 for a session that is over. Their
client would repeat a request that gets 409.

A conversation is a session. The policy reads the ids of the prompt, its own as it sampled them,
and between them those that the chat template writes for the agent's messages. A request must begin
with all that was said so far, so a repeated one gets the same reply, also from another agent.
"""

import json
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nemo.utils import logging

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer, decode_with_special_tokens, response_text
from nemo_aligner.data.nlp.chat_records import (
    ASSISTANT,
    Message,
    prompt_messages,
    read_messages,
    record_tools,
)
from nemo_aligner.data.nlp.chat_template import ChatTemplate
from nemo_aligner.data.nlp.fields import columns_asked
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.generation.interface import Details, GenerationParams, Reply
from nemo_aligner.servers.admission import (
    JSON,
    RefusedError,
    body_length,
    check_token,
    read_json,
)
from nemo_aligner.servers.admission import Reply as HttpReply
from nemo_aligner.servers.environment import RewardingEnvironment
from nemo_aligner.servers.http_server import HttpServer, Request
from nemo_aligner.servers.reward_function import shown
from nemo_aligner.servers.threads import future_of
from nemo_aligner.servers.worker import ALL_COLUMNS, BadValueError, finite_number

POLL_S = 5.0  # for which an agent may wait for a session
TRIES = 2  # agents that get a session, one after the other
LARGEST_BODY = 2**24
_PATH = re.compile(r"/v1/sessions(?:/(\w{1,64})/(chat/completions|reward))?/?")
# Fields of a request that change no response.
WITHOUT_EFFECT = """messages reward logprobs return_token_ids model user seed store metadata
    service_tier parallel_tool_calls stream_options""".split()


class Turn(NamedTuple):
    """What the policy said, and the number of tokens before it."""

    text: str
    ids: tuple[int, ...]
    before: int
    details: Details


@dataclass(eq=False)
class Session:
    number: int  # of the engine
    seed: int
    record: Record
    messages: list[Message]  # that were said so far
    turns: dict[int, Turn] = field(default_factory=dict)  # the policy's, by place in `messages`
    length: int = 0  # tokens that were said so far
    unread: tuple[int, ...] = ()  # an observation after which the policy cannot respond
    name: str | None = None  # for the agent that has it; None: it waits for one
    tries: int = 0  # agents that got it
    reached: int = 0  # messages of the longest request to which its agent got a reply
    heard: float = 0.0  # when something was last said, or the agent last got farther

    @property
    def waits_for_agent(self) -> bool:
        return len(self.messages) - 1 in self.turns


@dataclass(eq=False)
class AgentEnvironment(RewardingEnvironment):
    """An environment that replies to responses with what agents say.

    Args:
        form: writes the messages.
        record: from the number of a prompt's record to the record, with messages.
        params, longest, max_turns: of generation; what they forbid is refused.
        timeout_s: for something new of the agent after a response; then another gets the session.
        idle_timeout_s: for a sign of any agent while sessions wait and nobody has one.
    """

    form: ChatTemplate
    tokenizer: Tokenizer
    record: Callable[[int], Record]
    params: GenerationParams
    longest: int
    max_turns: int = 8
    timeout_s: float = 10.0
    fallback: float | None = None
    idle_timeout_s: float = 600.0
    section: str = "environment"

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._sessions: dict[int, Session] = {}  # by number
        self.outcomes = queue.SimpleQueue()
        self._heard = 0.0

    # --- the engine's side: one thread calls these ----------------------------------------------

    def submit(
        self,
        number: int,
        seed: int,
        prompt: tuple[int, ...],
        responses: tuple[tuple[int, ...], ...],
        details: Details,
    ) -> None:
        text = response_text(self.tokenizer, responses[-1])
        for end in self.form.end_strings:
            text = text.removesuffix(end)
        with self._changed:
            if len(responses) == 1:
                assert details.record is not None
                record = self.record(details.record)
                new = Session(number, seed, record, prompt_messages(record), length=len(prompt))
                self._sessions[number] = new
            session = self._sessions[number]
            turn = Turn(text, responses[-1], session.length, details)
            session.turns[len(session.messages)] = turn
            session.messages.append({"role": ASSISTANT, "content": text})
            session.length += len(turn.ids)
            session.heard = time.monotonic()
            self._changed.notify_all()

    def end(self, number: int) -> None:
        """Nothing: the agent has heard of it, and its reward is there."""

    def look(self) -> None:
        """`UserError`: no agent is heard of or left."""
        now = time.monotonic()
        with self._changed:
            sessions = list(self._sessions.values())
            if sessions and all(session.name is None for session in sessions):
                silent = now - max(self._heard, *(session.heard for session in sessions))
                if silent > self.idle_timeout_s:
                    raise UserError(
                        f"{len(sessions)} session(s) wait, and no agent was heard of for "
                        f"{silent:.0f} s. Start agents that ask at {self.section}.port."
                    )
            for session in sessions:
                is_late = session.waits_for_agent and now - session.heard > self.timeout_s
                if session.name is None or not is_late:
                    continue
                said = shown(session.messages[-1]["content"])
                message = (
                    f"an agent said nothing new for {self.timeout_s:g} s "
                    f"({self.section}.timeout_s) after response {len(session.turns)} of a "
                    f"session, {said}"
                )
                session.name, session.heard, session.unread = None, now, ()
                self._changed.notify_all()
                if session.tries < TRIES:
                    logging.warning(f"{message}. Another agent gets the session.")
                else:
                    del self._sessions[session.number]
                    message += ", and so was the one before"
                    reply = self.reply_to_failure(message, "Correct the agent")
                    self.outcomes.put((session.number, reply))

    # --- the agents' side: any thread calls these -----------------------------------------------

    def take(self, is_there: Callable[[], bool]) -> dict[str, Any] | None:
        """What an agent is told of its session; None: there is none, or the agent has left."""
        with self._changed:
            self._heard = time.monotonic()
            session = self._changed.wait_for(lambda: self._named(None), POLL_S)
            if session is None or not is_there():
                self._changed.notify_all()  # another agent may wait
                return None
            session.name, session.tries = secrets.token_hex(8), session.tries + 1
            session.heard = self._heard = time.monotonic()
            session.reached = 0
            return {
                "id": session.name,
                "messages": session.messages[: min(session.turns)],
                "tools": record_tools(session.record),
                "columns": columns_asked(session.record, (ALL_COLUMNS,)),
                "seed": session.seed % 2**64,
            }

    def chat(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """The policy's next message, a chat completion; waits for it."""
        given = [_plain(m) for m in read_messages(request.get("messages"), "messages")]
        given_reward = request.get("reward")
        place, reward = len(given), 0.0 if given_reward is None else _reward(given_reward)
        with self._changed:
            session = self._session(name)
            self._check_request(request, session)
            known = [_plain(message) for message in session.messages]
            for number, (one, other) in enumerate(zip(given, known), start=1):
                if one != other:
                    raise _refused(
                        f"message {number} is {shown(one)}, but in this session it was "
                        f"{shown(other)}. Send all that was said word for word, then new ones."
                    )
            if place > len(known):
                self._go_on(session, given, reward)
            elif place not in session.turns and (place < len(known) or session.waits_for_agent):
                raise _refused(f"message {place + 1} of this session is missing.")
            self._changed.wait_for(lambda: place in session.turns or session.name != name)
            self._session(name)
            if place > session.reached:  # the same again is no sign of an end
                session.reached, session.heard = place, time.monotonic()
            return self._completion(session, session.turns[place], request)

    def reward(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """End a session, with the reward of its last response."""
        reward = _reward(request.get("reward"))
        with self._changed:
            session = self._session(name)
            _check_policy_has_replied(session)
            del self._sessions[session.number]
            # The engine counts as cut off what the policy was refused to respond to.
            reply = Reply(session.unread, reward, not session.unread)
            self.outcomes.put((session.number, reply))
            self._changed.notify_all()
        return {}

    def _named(self, name: str | None) -> Session | None:
        return next((each for each in self._sessions.values() if each.name == name), None)

    def _session(self, name: str) -> Session:
        session = self._named(name)
        if session is None:
            raise RefusedError(
                404, f"there is no session {name[:20]!r}: it is over, or another agent has it now."
            )
        self._heard = time.monotonic()
        return session

    def _go_on(self, session: Session, given: list[Message], reward: float) -> None:
        _check_policy_has_replied(session)
        said = len(session.messages)
        if any(message["role"] == ASSISTANT for message in given[said:]):
            raise _refused(f"the policy has not said what follows message {said}.")
        last, why = session.turns[said - 1], None
        ids = tuple(self.form.continuation(given, session.record, last.ids))
        if not ids:
            raise _refused("the new messages have no token that the policy could read.")
        # Agent frameworks know these phrases as the end of a context.
        if not last.details.is_end:
            why = "the last response exceeds the configured limit length_params.max_length"
        elif len(session.turns) >= self.max_turns:
            limit = f"{self.section}.max_turns={self.max_turns}"
            why = f"one more exceeds the configured limit {limit}"
        elif session.length + len(ids) >= self.longest:
            why = f"this model's maximum context length is {self.longest} (encoder_seq_length)"
        if why is not None:
            session.unread = ids
            raise _refused(f"the session is over, as {why}: post its reward.")
        session.messages += given[said:]
        session.length += len(ids)
        self.outcomes.put((session.number, Reply(ids, reward, False)))
        self._changed.notify_all()

    def _check_request(self, request: dict[str, Any], session: Session) -> None:
        params, said = self.params, next(iter(session.turns.values()))
        if request.get("logprobs") and said.details.logprobs is None:
            raise _refused("this rollout computes no logprobs while it samples.")
        as_asked = {
            "temperature": (0 if params.use_greedy else params.temperature,),
            "tools": (record_tools(session.record), []),
            **{"top_p": (params.top_p,), "n": (1,), "stream": (False,)},
            **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
            **{"tool_choice": ("auto", "none"), "response_format": ({"type": "text"},)},
        }
        for key, value in request.items():
            is_limit = key in ("max_tokens", "max_completion_tokens") and isinstance(value, int)
            if value is None or key in WITHOUT_EFFECT or value in as_asked.get(key, ()):
                continue
            if not is_limit or value < params.max_length:
                raise _refused(
                    f"{key}={shown(value)} is not what this rollout does; leave it out (sampling "
                    "is that of the job, tools those of the session)."
                )

    def _completion(self, session: Session, turn: Turn, request: dict[str, Any]) -> dict[str, Any]:
        message = {"role": ASSISTANT, "content": turn.text}
        why = "stop" if turn.details.is_end else "length"
        choice = {"index": 0, "message": message, "finish_reason": why, "logprobs": None}
        if request.get("return_token_ids"):
            choice["token_ids"] = turn.ids
        if request.get("logprobs"):
            assert turn.details.logprobs is not None
            texts = (decode_with_special_tokens(self.tokenizer, [id_]) for id_ in turn.ids)
            pairs = zip(texts, turn.details.logprobs, strict=True)
            tokens = [{"token": t, "logprob": p, "top_logprobs": []} for t, p in pairs]
            choice["logprobs"] = {"content": tokens}
        count = {"prompt_tokens": turn.before, "completion_tokens": len(turn.ids)}
        return {
            "id": f"chatcmpl-{session.name}-{turn.before}",
            "object": "chat.completion",
            "created": 0,  # clients want a number
            "model": request.get("model") or "policy",
            "choices": [choice],
            "usage": {**count, "total_tokens": sum(count.values())},
        }


def _check_policy_has_replied(session: Session) -> None:
    if not session.waits_for_agent:
        raise _refused("the policy has not yet replied to the last request.")


def _refused(line: str) -> RefusedError:
    return RefusedError(400, line)


def _plain(message: Message) -> Message:
    """A message as far as a template reads it; libraries add fields to what the policy said."""
    if message["role"] != ASSISTANT or message.get("tool_calls"):
        return message
    return {"role": ASSISTANT, "content": message["content"]}


def _reward(value: Any) -> float:
    try:
        return finite_number(value, value)
    except BadValueError as error:
        raise _refused(f"the reward {shown(value)} cannot be used: {error}") from error


# --- the HTTP ------------------------------------------------------------------------------------


class AgentDoor(HttpServer):
    """Serves `environment` until `close`. `token`: every request must bring it as OpenAI's key."""

    def __init__(
        self, host: str, port: int, environment: AgentEnvironment, token: str | None, key: str
    ):
        super().__init__(host, port, key=key)
        self.environment, self.token = environment, token
        self.open()

    def error(self, status: int, line: str) -> HttpReply:
        return _json(status, {"error": {"message": line}})

    async def reply(self, request: Request) -> HttpReply:
        check_token(request.header, self.token)
        if request.method != "POST":
            raise RefusedError(501, f"Unsupported method ({request.method[:40]!r})")
        request.note_admitted()
        fields = await _read(request)
        act = self._action(request, fields, request.asker())
        try:
            session = await request.wait_for(future_of("agent", act))
        except UserError as error:
            raise RefusedError(400, str(error)) from error
        return (204, {}, b"") if session is None else _json(200, session)

    def _action(
        self, request: Request, fields: dict[str, Any], is_there: Callable[[], bool]
    ) -> Callable[[], dict[str, Any] | None]:
        environment, path = self.environment, _PATH.fullmatch(request.path)
        if path is None:
            raise RefusedError(404, f"nothing at {request.path[:200]!r}; start at /v1/sessions")
        if path[1] is not None:
            act = environment.reward if path[2] == "reward" else environment.chat
            return lambda: act(path[1], fields)
        host = request.header("Host") or f"{self.host}:{self.port}"

        def take() -> dict[str, Any] | None:
            session = environment.take(is_there)
            return session and session | {"base_url": f"http://{host}/v1/sessions/{session['id']}"}

        return take


async def _read(request: Request) -> dict[str, Any]:
    length = body_length(request.header)
    if length > LARGEST_BODY:
        raise RefusedError(413, f"a body has {LARGEST_BODY} bytes at most, not {length}")
    return read_json(await request.read(length) or b"{}")


def _json(status: int, content: dict[str, Any]) -> HttpReply:
    return status, {"Content-Type": JSON}, json.dumps(content).encode()
