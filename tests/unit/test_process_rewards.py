# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards of steps and tokens: from a function or a model over the wire's arrays to advantages,
against loops over plain numbers.
"""

import math
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nemo_aligner.algorithms.rollouts import PPORolloutBatch
from nemo_aligner.config.server_rules import check_kind_of_rewards
from nemo_aligner.config.values import Values
from nemo_aligner.core.advantages import reward_at_last_token
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.servers.reward_function import (
    RewardFunction,
    RewardFunctionError,
    scores_of_places,
    step_ends,
    steps_of,
)
from nemo_aligner.servers.schema import ReplyError, reward_model_endpoint, validate_reply
from nemo_aligner.servers.scoring_clients import RMFutureResult
from tests.ppo_fakes import make_trainer
from tests.unit.test_ppo_data import ROWS, STAND_IN, WIDTH, scored_rollout
from tests.unit.test_reward_server import make_server

NAN = float("nan")
EOS = 0


class Letters:
    """One id per character; 0 is the end, which decodes to nothing."""

    eos_id, bos_id, vocab_size = EOS, None, 128

    def text_to_ids(self, text):
        return [ord(character) for character in text]

    def ids_to_text(self, ids):
        return "".join(chr(i) for i in ids if i != EOS)


class Pieces(Letters):
    """Ids of several characters: 1 is a line break and a letter, 2 two line breaks."""

    def ids_to_text(self, ids):
        special = {1: "\na", 2: "\n\n"}
        return "".join(special.get(i, chr(i)) for i in ids if i != EOS)


def ids(text: str) -> list[int]:
    return Letters().text_to_ids(text)


# --------------------------------------------------------------------------------- where they are


@pytest.mark.parametrize("step_end", ["\n", "##", "aa"])
def test_ends_of_steps_against_a_loop_over_all_prefixes(step_end):
    generator = torch.Generator().manual_seed(3)
    alphabet = ids("ab\n#") + [1, 2]
    tokenizer = Pieces()
    for _ in range(200):
        length = int(torch.randint(0, 12, (1,), generator=generator))
        picks = torch.randint(0, len(alphabet), (length,), generator=generator).tolist()
        response = [alphabet[pick] for pick in picks]
        counts = [tokenizer.ids_to_text(response[:n]).count(step_end) for n in range(length + 1)]
        naive = [t for t in range(length) for _ in range(counts[t + 1] - counts[t])]
        assert step_ends(tokenizer, response, step_end) == naive


@pytest.mark.parametrize(
    "response, places",
    [
        (ids("ab\ncd\n"), [2, 5]),
        (ids("ab\ncd\n") + [EOS], [2, 5]),
        (ids("ab\ncd") + [EOS], [2, 5]),  # the end token completes the last step
        (ids("ab\ncd"), [2, 4]),
        (ids("ab\n ") + [EOS], [2]),  # nothing but a blank follows
        (ids("ab"), [1]),
        ([EOS], [0]),
        ([], []),
    ],
)
def test_a_response_without_an_end_of_a_step_is_one_step(response, places):
    text, found = steps_of(Letters(), response, "\n")
    assert found == places and text == Letters().ids_to_text(response)


class Chat(Pieces):
    """As a Hugging Face tokenizer of chats: 3 ends a turn, 4 a step, and the text has them only
    if it is asked for.
    """

    def __init__(self):
        self.tokenizer = SimpleNamespace(
            all_special_ids=[EOS], get_added_vocab=lambda: {"<turn>": 3, "<step>": 4}
        )

    def ids_to_text(self, ids, remove_special_tokens=True):
        names = {3: "<turn>", 4: "<step>", EOS: "<end>"}
        plain, kept = super().ids_to_text, not remove_special_tokens
        return "".join(names[i] * kept if i in names else plain([i]) for i in ids)


@pytest.mark.parametrize(
    ("response", "step_end", "places", "text"),
    [
        (ids("ab") + [2] + ids("c"), "\n", [2, 2, 3], "ab\n\nc"),  # one token ends two steps
        (ids("ab\n") + [3, EOS], "\n", [2], "ab\n"),  # end tokens are no step
        (ids("ab\n") + [3], "\n", [2], "ab\n"),
        (ids("ab") + [4] + ids("c") + [4, 3], "<step>", [2, 4], "ab<step>c<step>"),
        (ids("ab") + [4] + ids("c") + [3], "<step>", [2, 4], "ab<step>c"),
        ([3, EOS], "\n", [1], ""),
    ],
)
def test_the_function_can_count_the_steps_of_its_text(response, step_end, places, text):
    assert steps_of(Chat(), response, step_end) == (text, places)
    *ended, rest = text.split(step_end)
    assert len(places) == len(ended) + bool(rest.strip() or not ended)


def test_a_models_scores_are_read_at_its_step_tokens_alone():
    rows = [ids("p\nq") + ids("a\nb\nc") + [EOS], ids("pq") + ids("abc") + [EOS] * 4]
    tokens = torch.tensor(rows)
    scores = torch.arange(18.0).view(2, 9)
    lengths, prompts = torch.tensor([9, 6]), torch.tensor([3, 2])
    got = scores_of_places(scores, tokens, lengths, prompts, Letters(), "step", "\n")
    assert got[0].nan_to_num(-1).tolist() == [-1, -1, -1, -1, 4, -1, 6, -1, -1]
    assert got[1].isnan().all()
    every = scores_of_places(scores, tokens, lengths, prompts, Letters(), "token", None)
    assert every[1].nan_to_num(-1).tolist() == [-1, -1, 11, 12, 13, 14, -1, -1, -1]
    scores[0, 6] = NAN
    with pytest.raises(RuntimeError, match="scores of the tokens of row 0 are not finite"):
        scores_of_places(scores, tokens, lengths, prompts, Letters(), "step", "\n")


def test_kinds_that_do_not_go_together():
    def check(per, step_end):
        check_kind_of_rewards(Values({"x": {"rewards_per": per, "step_end": step_end}}), "x")

    for per, step_end in (("step", None), ("step", ""), ("response", "\n"), ("token", "\n")):
        with pytest.raises(ConfigError, match="x.step_end=.*do not go together"):
            check(per, step_end)


# -------------------------------------------------------------------------------- from a function

FUNCTION = """
    def score(prompts, responses, lengths):
        (response,), (length,) = responses, lengths
        returned = {
            "one": [[1.0]], "flat": [1.0, 2.0, 3.0], "number": [1.0], "none": None,
            "nan": [[0.5, float("nan"), 1.0, 0.0]], "words": [["a", "b", "c", "d", "e", "f"]],
            "many": [[0.0] * 99], "text": ["abc"],
        }
        if response in returned:
            return returned[response]
        if "\\n" in response or response == "":
            steps = [step for step in response.split("\\n") if step.strip()] or [""]
            return [[float(len(step)) for step in steps]]
        return [[float(i) for i in range(length)]]
"""


def function(folder, per, step_end=None, **options) -> RewardFunction:
    (folder / "reward.py").write_text(textwrap.dedent(FUNCTION))
    spec = f"{folder}/reward.py:score"
    return RewardFunction(spec, Letters(), workers=1, per=per, step_end=step_end, **options)


def request(texts: list[str], prompt: str = "pp") -> tuple[np.ndarray, ...]:
    rows = [ids(prompt) + ids(text) + [EOS] for text in texts]
    width = max(map(len, rows)) + 3
    tokens = np.array([row + [EOS] * (width - len(row)) for row in rows])
    lengths = np.array([[len(row)] for row in rows])
    return tokens, lengths, np.full_like(lengths, len(prompt))


def test_rewards_of_steps_stand_at_the_tokens_that_end_them(tmp_path):
    texts = ["ab\ncde\n", "ab\nc", "", "a\n\nbcd"]
    # The third has an empty step between two ends; the function leaves it out.
    with function(tmp_path, "step", "\n") as served:
        rewards = served.infer(*request(texts[:3]))
        assert rewards.shape == (3, 13) and rewards.dtype == np.float32
        rows = map(enumerate, rewards.tolist())
        seen = [{column: x for column, x in row if not math.isnan(x)} for row in rows]
        assert seen == [{4: 2.0, 8: 3.0}, {4: 2.0, 6: 1.0}, {2: 0.0}]
        words = "returned 2 rewards for a response of 3 .*rewards_per"
        with pytest.raises(RewardFunctionError, match=words):
            served.infer(*request(texts[3:]))


def test_rewards_of_two_steps_that_one_token_ends_add_up(tmp_path):
    count = "def score(prompts, responses, lengths):\n    return [[3.0, 4.0, 5.0]]\n"
    (tmp_path / "reward.py").write_text(count)
    tokens = np.array([ids("ppab") + [2] + ids("c") + [EOS]])
    spec = f"{tmp_path}/reward.py:score"
    with RewardFunction(spec, Pieces(), workers=1, per="step", step_end="\n") as served:
        rewards = served.infer(tokens, np.array([[7]]), np.array([[2]]))
    assert rewards[0, [4, 6]].tolist() == [7.0, 5.0] and np.isnan(rewards).sum() == 5


def test_rewards_of_tokens_are_as_many_as_the_response_has(tmp_path):
    with function(tmp_path, "token") as served:
        rewards = served.infer(*request(["abc", "x"]))
    assert rewards[0].tolist()[2:6] == [0.0, 1.0, 2.0, 3.0] and np.isnan(rewards[0, 6:]).all()
    assert rewards[1].tolist()[2:4] == [0.0, 1.0] and np.isnan(rewards[:, :2]).all()


@pytest.mark.parametrize(
    "text, words",
    [
        ("one", "it returned 1 rewards for a response of 4"),
        ("many", "it returned 99 rewards for a response of 5"),
        ("flat", "it returned 3 scores for 1 sample"),
        ("number", "whose item is a float, not a list of 7 numbers"),
        ("text", "whose item is a str, not a list of 5 numbers"),
        ("none", "it returned None, not a list with a list of 5 numbers per sample"),
        ("nan", "which is not a finite number in float32"),
        ("words", "whose score is a str, not a number"),
    ],
)
def test_what_is_not_one_list_of_numbers_per_response_is_one_error(tmp_path, text, words):
    with function(tmp_path, "token") as served:
        with pytest.raises(RewardFunctionError) as error:
            served.infer(*request([text]))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert f"response '{text}'" in str(error.value)


def test_a_fallback_is_the_reward_of_the_last_token(tmp_path):
    with function(tmp_path, "token", fallback=-2.0) as served:
        rewards = served.infer(*request(["one", "ab"]))
    assert np.flatnonzero(~np.isnan(rewards[0])).tolist() == [5] and rewards[0, 5] == -2.0
    assert np.nansum(rewards[1]) == 0 + 1 + 2


# ----------------------------------------------------------------------------------- over the wire


def test_a_server_sends_the_rewards_of_tokens_and_their_sum():
    def infer_fn(tokens, lengths, prompt_lengths):
        rewards = torch.full(tokens.shape, NAN)
        for row, start, end in zip(rewards, prompt_lengths.tolist(), lengths.tolist()):
            row[start:end] = 0.5
        return rewards

    server = make_server(infer_fn, per_token=True, needs_prompt_lengths=True)
    server.strip_sequence_length_to_multiple = 1
    tokens = np.ones((3, 6), dtype=np.int64)
    ends, starts = np.array([[3], [2], [4]]), np.array([[1], [2], [1]])
    reply = server.infer(tokens=tokens, sequence_lengths=ends, prompt_lengths=starts)
    assert reply["rewards"].tolist() == [[1.0], [0.0], [1.5]]
    expected = [[-1, 0.5, 0.5, -1, -1, -1], [-1] * 6, [-1, 0.5, 0.5, 0.5, -1, -1]]
    assert np.nan_to_num(reply["token_rewards"], nan=-1).tolist() == expected
    wrong = make_server(lambda *_: torch.zeros(2, 1), per_token=True, needs_prompt_lengths=True)
    two = {"sequence_lengths": ends[:2], "prompt_lengths": starts[:2]}
    with pytest.raises(RuntimeError, match=r"shape \[2, 1\] for tokens \[2, 6\]"):
        wrong.infer(tokens=tokens[:2], **two)


@pytest.mark.parametrize(
    "token_rewards, words",
    [
        (np.zeros((2, 4)), None),
        (np.full((2, 4), NAN), None),
        (np.zeros((1, 4)), "'token_rewards' came as float64"),
        (np.zeros(2), "'token_rewards' came as"),
        (np.zeros((2, 4), dtype=np.int64), "'token_rewards' came as int64"),
        (np.array([[0.0, NAN], [0.0, -np.inf]]), "'token_rewards' is -inf in sample 1, column 1"),
    ],
)
def test_replies_are_checked(token_rewards, words):
    reply = {"rewards": np.zeros((2, 1), np.float32), "token_rewards": token_rewards}
    if words is None:
        validate_reply(reward_model_endpoint(), reply, 2)
        return
    with pytest.raises(ReplyError, match=words):
        validate_reply(reward_model_endpoint(), reply, 2)


class Ready:
    def __init__(self, replies):
        self.replies = replies

    def done(self, timeout_s):
        return True

    def result(self):
        return self.replies


def test_an_ensemble_adds_rewards_of_tokens_and_of_responses():
    tokens = torch.zeros(2, 5, dtype=torch.long)
    rollout = {"response_tokens": tokens, "response_lengths": torch.tensor([4, 5])}
    of_tokens = [[NAN, NAN, 1.0, 2.0, NAN, NAN], [NAN, NAN, 4.0, NAN, NAN, NAN]]
    steps = {"rewards": [[3.0], [4.0]], "token_rewards": of_tokens}
    steps = {name: np.array(rewards, np.float32) for name, rewards in steps.items()}
    whole = {"rewards": np.array([[10.0], [20.0]], np.float32)}
    future = RMFutureResult(Ready({"s": steps, "w": whole}), rollout, {"s": 2.0, "w": 0.5})
    scores = future.scores()
    assert scores.rewards.tolist() == [11.0, 18.0]
    # Token 2's reward is in column 1; that of the whole in column R-2.
    assert scores.token_rewards.nan_to_num(-1).tolist() == [[-1, 2, 9, -1], [-1, 8, -1, 10]]
    alone = RMFutureResult(Ready({"m": steps}), rollout).scores()
    assert alone.token_rewards.nan_to_num(-1).tolist() == [[-1, 1, 2, -1], [-1, 4, -1, -1]]
    assert RMFutureResult(Ready({"m": whole}), rollout).scores().token_rewards is None
    narrow = {**steps, "token_rewards": steps["token_rewards"][:, :4]}
    cut = RMFutureResult(Ready({"m": narrow}), rollout).scores().token_rewards
    assert cut.nan_to_num(-1).tolist() == [[-1, 1, 2, -1], [-1, 4, -1, -1]]


def test_servers_of_one_model_that_give_different_kinds_are_an_error():
    whole = {"rewards": torch.zeros(1)}
    batches = [whole, {**whole, "token_rewards": torch.zeros(1, 3)}]
    with pytest.raises(UserError, match="must give the same kind of rewards"):
        PPORolloutBatch.from_rollout_batches(batches, 0, None)


# ------------------------------------------------------------------------------------- advantages


def with_token_rewards(rollout: dict) -> dict:
    """Rewards of some tokens of every response, NaN elsewhere; 99 outside the responses."""
    generator = torch.Generator().manual_seed(11)
    token_rewards = torch.randn(len(ROWS), WIDTH, generator=generator)
    token_rewards[torch.rand(len(ROWS), WIDTH, generator=generator) < 0.25] = NAN
    for i, (_, prompt_length, length, _) in enumerate(ROWS):
        outside = [*range(prompt_length - 1), *range(length - 1, WIDTH)]
        token_rewards[i, outside] = 99.0
    return rollout | {"token_rewards": token_rewards, "rewards": torch.full((len(ROWS),), NAN)}


def naive_advantages(rollout: dict, estimator: str, steps: bool, beta: float, clip: float):
    """Advantages of each row over its response, by the formulas of docs/rewards.md."""
    rows = [i for i in range(len(ROWS)) if i != STAND_IN]
    spans = {i: range(ROWS[i][1] - 1, ROWS[i][2] - 1) for i in rows}
    given, rewards = {}, {}
    for i in rows:
        given[i] = [float(rollout["token_rewards"][i, t]) for t in spans[i]]
        rewards[i] = []
        for t, reward in zip(spans[i], given[i]):
            kl = float(rollout["logprobs"][i, t]) - float(rollout["init_logprobs"][i, t])
            clipped = 0.0 if math.isnan(reward) else max(-clip, min(clip, reward))
            rewards[i].append(clipped - beta * kl)
    advantages = {}
    for i in rows:
        same = [j for j in rows if ROWS[j][0] == ROWS[i][0]]
        n = len(spans[i])
        if estimator == "gae":
            v = [float(rollout["values"][i, t]) for t in spans[i]] + [0.0]
            deltas = [rewards[i][t] + v[t + 1] - v[t] for t in range(n)]
            to_come = lambda t, d=deltas, n=n: sum(0.95 ** (k - t) * d[k] for k in range(t, n))
            advantages[i] = [to_come(t) for t in range(n)]
        elif steps:

            def step_rewards(j):
                found, start = {}, 0
                for t, reward in enumerate(given[j]):
                    if not math.isnan(reward):
                        found[t] = sum(rewards[j][start : t + 1])
                        start = t + 1
                return found

            every = [reward for j in same for reward in step_rewards(j).values()]
            mean = sum(every) / len(every)
            std = math.sqrt(sum((x - mean) ** 2 for x in every) / max(len(every) - 1, 1))
            scaled = {k: (x - mean) / (std + 1e-6) for k, x in step_rewards(i).items()}
            advantages[i] = [sum(x for k, x in scaled.items() if k >= t) for t in range(n)]
        else:
            sums = [sum(rewards[j]) for j in same]
            mine = sum(rewards[i])
            if estimator == "rloo":
                advantage = mine - (sum(sums) - mine) / (len(sums) - 1)
            else:
                mean = sum(sums) / len(sums)
                std = math.sqrt(sum((x - mean) ** 2 for x in sums) / (len(sums) - 1))
                advantage = (mine - mean) / (std + 1e-6)
            advantages[i] = [advantage] * n
    return advantages


@pytest.mark.parametrize("clip", [None, 0.6])
@pytest.mark.parametrize(
    "estimator, process_rewards",
    [("gae", "sum"), ("rloo", "sum"), ("grpo", "sum"), ("grpo", "steps")],
)
def test_advantages_equal_a_loop_over_plain_numbers(estimator, process_rewards, clip):
    settings = {"advantage_estimator": estimator, "process_rewards": process_rewards}
    settings |= {"initial_policy_kl_penalty": 0.3, "normalize_advantages": False}
    trainer = make_trainer(**settings, reward_clip=clip)
    rollout = with_token_rewards(scored_rollout(estimator == "gae"))
    data, metrics = trainer.generate_ppo_data(rollout)
    settings = process_rewards == "steps", 0.3, clip or math.inf
    expected = naive_advantages(rollout, estimator, *settings)
    for i, advantages in expected.items():
        span = slice(ROWS[i][1] - 1, ROWS[i][2] - 1)
        wanted = pytest.approx(advantages, rel=1e-4, abs=1e-5)
        assert data["advantages"][i, span].tolist() == wanted
    assert data["mask"][STAND_IN].sum() == 0
    assert all(math.isfinite(value) for value in metrics.values())
    spans = {i: slice(ROWS[i][1] - 1, ROWS[i][2] - 1) for i in expected}
    counted = sum(int((~rollout["token_rewards"][i, s].isnan()).sum()) for i, s in spans.items())
    assert metrics["rewards_per_response"] == pytest.approx(counted / len(expected))


def test_one_reward_at_the_end_is_the_reward_of_the_response():
    for estimator in ("gae", "reinforce_plus_plus", "rloo", "grpo"):
        trainer = make_trainer(advantage_estimator=estimator, reward_clip=1.25)
        rollout = scored_rollout(estimator == "gae")
        placed = reward_at_last_token(rollout["rewards"], rollout["response_lengths"], WIDTH + 1)
        expected, _ = trainer.generate_ppo_data(rollout)
        got, _ = trainer.generate_ppo_data(rollout | {"token_rewards": placed})
        mask = expected["mask"].bool()
        assert torch.equal(got["advantages"][mask], expected["advantages"][mask]), estimator


def test_process_supervision_by_hand():
    """Section 4.1.3 of arXiv:2402.03300: two responses with the step rewards 1, 0 and 1."""
    token_rewards = torch.tensor([[NAN, 1.0, NAN, 0.0], [NAN, NAN, 1.0, NAN]])
    rollout = {"response_tokens": torch.ones(2, 5, dtype=torch.long)}
    rollout |= {"prompt_lengths": torch.tensor([1, 2]), "response_lengths": torch.tensor([5, 5])}
    rollout |= {"is_end": torch.ones(2, dtype=torch.bool), "idx": torch.tensor([4, 4])}
    rollout |= {"rewards": torch.tensor([1.0, 1.0]), "token_rewards": token_rewards}
    rollout |= {"logprobs": torch.zeros(2, 4)}
    trainer = make_trainer(
        advantage_estimator="grpo", process_rewards="steps", initial_policy_kl_penalty=0.0
    )
    data, _ = trainer.generate_ppo_data(rollout)
    # mean 2/3, variance (1/9 + 4/9 + 1/9) / 2 = 1/3: 1 becomes 0.57735, 0 becomes -1.154701.
    expected = [[-0.57735, -0.57735, -1.154701, -1.154701], [0.0, 0.57735, 0.57735, 0.0]]
    torch.testing.assert_close(data["advantages"], torch.tensor(expected), rtol=0, atol=1e-5)


def test_steps_are_for_grpo_alone(tmp_path):
    from tests.unit.test_config_checks import check
    from tests.unit.test_ppo_rules import GRPO

    steps = "trainer.ppo.process_rewards=steps"
    assert check("gpt_ppo_actor", tmp_path, *GRPO.split("; "), steps) == []
    with pytest.raises(ConfigError, match="process_rewards=steps .*advantage_estimator=gae"):
        check("gpt_ppo_actor", tmp_path, steps)
