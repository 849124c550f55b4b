# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""SteerLM 2.0: the loss against a naive loop and autograd, the data set by hand, and the model
against autograd through whole log-probs.
"""

import math

import numpy as np
import pytest
import torch
from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer
from omegaconf import OmegaConf

from nemo_aligner.config.defaults import complete_config
from nemo_aligner.config.jobs.supervised import check_steerlm2
from nemo_aligner.config.values import Values, resolved
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.preference import prompt_weights, target_weights
from nemo_aligner.data.nlp.builders import build_steerlm2_dataset
from nemo_aligner.data.nlp.steerlm import LOG_P_ATTRIBUTES, LOG_P_RESPONSE, LOG_Q, SteerLM2Dataset
from nemo_aligner.models.nlp.gpt import gpt_sft_model
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSteerLMModel
from tests.data_sets import MARKS
from tests.oracles import nemo_aligner_steerlm2_loss
from tests.tiny_models import assert_gradients_of, tiny_config

# --- the loss -----------------------------------------------------------------------------------


def naive(log_policy, log_q, targets, tokens):
    """The losses of prompts and their divergences, by loops over the responses that count."""
    losses, divergences = [], []
    for prompt in range(len(tokens)):
        rows = [n for n in range(tokens.shape[1]) if tokens[prompt, n] > 0]
        ratios = [math.exp(log_policy[prompt, n] - log_q[prompt, n]) for n in rows]
        divergence = 0.0
        for row, ratio in zip(rows, ratios, strict=True):
            if (wanted := float(targets[prompt, row])) > 0:
                divergence += wanted * math.log(wanted / (ratio / sum(ratios)))
        length = sum(float(tokens[prompt, n]) for n in rows) / max(len(rows), 1)
        divergences.append(divergence)
        losses.append(divergence / max(length, 1))
    return losses, divergences


def ragged(masked_value):
    """Four prompts of up to three responses; one has none, one a target of 0 and 1."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.tensor([[4, 9, 2], [7, 0, 5], [0, 0, 0], [3, 3, 0]])
    counts = tokens > 0

    def numbers(mean):
        values = mean + torch.randn(4, 3, generator=generator)
        return torch.where(counts, values, masked_value)

    log_policy, log_q = numbers(-30.0), numbers(-29.5)
    targets = torch.rand(4, 3, generator=generator)
    targets = targets * counts / (targets * counts).sum(1, keepdim=True).clamp(min=1e-9)
    targets[3] = torch.tensor([0.0, 1.0, 0.0])
    return log_policy, log_q, torch.where(counts, targets, masked_value), tokens


@pytest.mark.parametrize("masked_value", [0.0, math.nan])
def test_losses_equal_a_naive_loop(masked_value):
    found = prompt_weights(*ragged(masked_value))
    losses, divergences = naive(*ragged(0.0))
    assert found.losses.tolist() == pytest.approx(losses, rel=1e-6, abs=1e-12)
    assert found.divergences.tolist() == pytest.approx(divergences, rel=1e-6, abs=1e-12)
    assert losses[2] == 0 and min(losses[:2]) > 1e-3
    assert found.factors.sum(1).tolist() == pytest.approx([0] * 4, abs=1e-6)


@pytest.mark.parametrize("masked_value", [0.0, math.nan])
def test_factors_are_the_gradient_by_autograd(masked_value):
    """KL of the target from softmax(log Q - log Q'), each prompt by itself."""
    log_policy, log_q, targets, tokens = ragged(0.0)
    leaf = log_policy.double().requires_grad_()
    for prompt in range(4):
        rows = tokens[prompt] > 0
        if rows.any():
            weights = torch.softmax((leaf - log_q)[prompt][rows], 0)
            wanted = targets[prompt][rows].double()
            kl = torch.xlogy(wanted, wanted).sum() - (wanted * weights.log()).sum()
            (kl / tokens[prompt][rows].double().mean()).backward()
    found = prompt_weights(*ragged(masked_value)).factors
    torch.testing.assert_close(found.double(), leaf.grad, rtol=1e-5, atol=1e-8)
    assert found[2].tolist() == [0, 0, 0] and found[1, 1] == found[3, 2] == 0


def test_the_surrogate_is_that_of_nemo_aligner():
    """Its gradient, by NeMo-Aligner's own loss of micro-batches: the negative log-likelihood of a
    response times (w - b), over the mean length of the prompt's responses.
    """
    log_policy, log_q, targets, tokens = (x[:1] for x in ragged(0.0))
    w, b = targets.double(), torch.softmax((log_policy - log_q).double(), -1)
    prompts, responses, micro_batches = 1, 3, 3
    average = tokens.double().mean(-1, keepdim=True) / (micro_batches / prompts)
    mask = torch.arange(10) < tokens[0][:, None]
    losses = torch.rand(responses, 10, dtype=torch.float64).requires_grad_()
    for row in range(micro_batches):  # each divided by their number, as by the schedule
        one = slice(row, row + 1)
        loss = nemo_aligner_steerlm2_loss(mask[one], average[0], losses[one], (w - b)[0, one])
        (loss / micro_batches).backward()
    found = prompt_weights(log_policy, log_q, targets, tokens).factors.double()
    expected = -found[0][:, None] * mask
    torch.testing.assert_close(losses.grad, expected, rtol=1e-6, atol=1e-9)


def test_targets_are_the_normalized_importance_weights():
    a, p, q = (torch.tensor(x) for x in ([-1.0, -2.0], [-10.0, -12.0], [-9.0, -13.0]))
    weights = [math.exp(-1 - 10 + 9), math.exp(-2 - 12 + 13)]
    expected = [weight / sum(weights) for weight in weights]
    assert target_weights(a, p, q).tolist() == pytest.approx(expected)
    far = target_weights(torch.tensor([0.0, -2000.0]), torch.zeros(2), torch.zeros(2))
    assert far.tolist() == [1.0, 0.0]
    found = prompt_weights(torch.zeros(1, 2), torch.zeros(1, 2), far[None], torch.ones(1, 2))
    assert found.divergences.item() == pytest.approx(math.log(2))


# --- the data set -------------------------------------------------------------------------------


def response(text, *numbers, speaker="Assistant"):
    keys = (LOG_P_ATTRIBUTES, LOG_P_RESPONSE, LOG_Q)
    return {"from": speaker, "value": text, **dict(zip(keys, numbers, strict=True))}


def record(**changes):
    turns = ("User", "hello"), ("Assistant", "the film"), ("User", "more")
    numbers = {"a joy": (-0.5, -8.0, -7.0), "dull": (-3, -9, -10.5), "x": (-0.1, -4, -3.5)}
    return {
        "system": "Be kind.",
        "prompt_turns": [{"from": speaker, "value": value} for speaker, value in turns],
        "label": "quality:4",
        "responses": [response(text, *numbers[text]) for text in numbers],
        **changes,
    }


SHORT = {"prompt_turns": [{"from": "User", "value": "hi"}], "label": None}
SHORT["responses"] = [response("one", -1, -5, -5), response("two", -2, -5, -5)]


def data_of(path, tokenizer=None, **section):
    cfg = OmegaConf.create({"file_path": path, "max_seq_length": 128, **section})
    tokenizer = tokenizer or ByteLevelTokenizer({})
    return build_steerlm2_dataset(cfg, tokenizer, special_tokens=MARKS)


PROMPT = "\x00System\nBe kind.\n\x11User\nhello\n\x11Assistant\nthe film\n"
PROMPT += "\x11User\nmore\n\x11Assistant\n\x12quality:4\n"


def test_texts_masks_and_weights_by_hand(write):
    data = data_of(write(record(), {**SHORT}))
    assert len(data) == 2 and data.num_responses == 3
    for answer, text in zip(data[0]["responses"], ("a joy", "dull", "x"), strict=True):
        assert bytes(answer.tokens).decode() == f"{PROMPT}{text}\n\x11"
        trained = [t for t, on in zip(answer.tokens, answer.is_response, strict=True) if on]
        assert bytes(trained).decode() == f"{text}\n\x11"
    logs = [-0.5 - 8 + 7, -3 - 9 + 10.5, -0.1 - 4 + 3.5]
    expected = np.exp(logs) / np.exp(logs).sum()
    np.testing.assert_allclose(data[0]["ws"], expected, rtol=1e-12)
    assert bytes(data[1]["responses"][1].tokens).decode() == (
        "\x00System\n\n\x11User\nhi\n\x11Assistant\ntwo\n\x11"
    )
    prompt = data.get_prompt("Be kind.", record()["prompt_turns"])
    assert prompt == PROMPT.partition("\x11Assistant\n\x12")[0]

    batch = data.collate_fn([data[1], data[0], data[-1]])
    width = 16 * math.ceil(len(f"{PROMPT}a joy\n\x11") / 16)
    assert batch["tokens"].shape == batch["loss_mask"].shape == (3, 3, width)
    assert batch["loss_mask"].sum(-1).tolist() == [[5, 5, 0], [7, 6, 3], [0, 0, 0]]
    assert batch[LOG_Q].tolist() == [[-5, -5, 0], [-7, -10.5, -3.5], [-7, -10.5, -3.5]]
    for row, mask in zip(batch["labels"][1], batch["loss_mask"][1], strict=True):
        assert bytes(row[mask == 1].tolist()).decode() in ("a joy\n\x11", "dull\n\x11", "x\n\x11")
    torch.testing.assert_close(batch["labels"][..., :-1], batch["tokens"][..., 1:])


def test_a_prompt_whose_response_is_too_long_is_left_out(write):
    long = record(responses=[response("x" * 90, -1, -5, -5), response("y", -1, -5, -5)])
    path = write(record(), long, SHORT)
    longest = len(f"{PROMPT}a joy\n\x11")
    assert len(data_of(path, max_seq_length=longest - 1)) == 2  # the last token is a label only
    with pytest.raises(UserError, match="all 3 prompts have a response that is longer"):
        data_of(path, max_seq_length=10)


class JoinsNewlines(ByteLevelTokenizer):
    """Two newlines are one token, as those of GPT-2 and Llama 3 have it."""

    def text_to_ids(self, text):
        joined = []
        for token in super().text_to_ids(text):
            if joined and joined[-1] == token == ord("\n"):
                joined[-1] = 2 * token
            else:
                joined.append(token)
        return joined


def test_a_response_that_the_tokenizer_joins_with_its_prompt_is_refused(write):
    """Behind a label no token ends the prompt then."""
    paths = [
        write(record(responses=[response(text, -1, -5, -5)]), name=name)
        for name, text in {"inside": "a\nb", "begin": "\na joy"}.items()
    ]
    (answer,) = data_of(paths[0], JoinsNewlines({}))[0]["responses"]
    assert sum(answer.is_response) == len("a\nb\n\x11")
    with pytest.raises(UserError, match=r"line 1: the tokenizer joins .*'\\na joy'"):
        data_of(paths[1], JoinsNewlines({}))


BAD = [
    ({"responses": []}, "field 'responses' is an empty list"),
    ({"prompt_turns": [{"from": "User"}]}, "message 1 of field 'prompt_turns' .* no 'value'"),
    ({"label": 4}, "field 'label' must be text, not int"),
    ({"prompt_turns": record()["prompt_turns"][:2]}, "of Assistant to a turn of Assistant"),
    (
        {"responses": [response("a", 0, 0, 0), response("b", 0, 0, 0, speaker="Bot")]},
        "the responses are of Assistant, Bot",
    ),
    ({"responses": [response("a", 0, float("nan"), 0)]}, r"'log\(P\(y\|x\)\)' of response 1"),
    ({"responses": [{"from": "A", "value": "b"}]}, r"'log\(P\(a\|x,y\)\)' of response 1 is None"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_a_bad_record_is_named_with_file_and_line(changes, message, write):
    path = write(record(), record(**changes))
    with pytest.raises(UserError, match=f"data.jsonl, line 2: .*{message}"):
        data_of(path)


def test_the_call_of_nemo_aligners_script(tmp_path, write):
    path = write(record())
    parts = {"file_path": path, "tokenizer": ByteLevelTokenizer({}), "max_seq_length": 128}
    parts |= {"min_seq_length": 1, "add_bos": False, "sep_id": 0, "label_key": "output"}
    parts |= {"answer_only_loss": True, "index_mapping_dir": str(tmp_path), "hf_dataset": True}
    parts |= {"special_tokens": MARKS, "output_original_text": False}
    data = SteerLM2Dataset(**parts)
    assert bytes(data[0]["responses"][2].tokens).decode() == f"{PROMPT}x\n\x11"
    assert data.data_cfg["index_mapping_dir"] == str(tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"restore_from_path": None}, "model.restore_from_path is not set"),
        ({"data": {"chat": False}}, "model.data.chat=False"),
        ({"loss_reduction": "sequence"}, "model.loss_reduction=sequence"),
        ({"data": {"chat": True, "train_ds": {"packed_sequence": True}}}, "packed_sequence=True"),
    ],
)
def test_what_cannot_be_trained_is_refused(keys, message):
    def check(**keys):
        model = {"restore_from_path": "a.nemo", "data": {"chat": True}, **keys}
        check_steerlm2(Values(resolved(complete_config({"model": model}, "gpt_sft"))))

    check()
    with pytest.raises(ConfigError, match=message):
        check(**keys)


# --- the model ----------------------------------------------------------------------------------


def ragged_batch(tokenizer, write):
    """Prompts of one to three responses, the last an empty slot; the log-probs are not those of
    the model.
    """
    records = []
    for n in range(3):
        answers = [
            response("a joy" * (1 + (n + k) % 3), -0.3 * k, -9.0 + k, -8.0 - 0.7 * k - n)
            for k in range(3 - n % 2)
        ]
        turns = [{"from": "User", "value": f"b{n}"}]
        records.append({"prompt_turns": turns, "label": "q:4", "responses": answers})
    data = SteerLM2Dataset(write(*records), tokenizer, 64, special_tokens=MARKS)
    return data.collate_fn([data[n] for n in (0, 1, 2, -1)])


def config(tokenizer_dir, micro_batch_size=2, **changes):
    sizes = {"encoder_seq_length": 64, "max_position_embeddings": 64}
    steps = {"micro_batch_size": micro_batch_size, "forward_micro_batch_size": 2}
    return tiny_config(tokenizer_dir, steerlm2=steps, **sizes, **changes)


def log_probs_of(plain, batch, vocab):
    """[B, n]: the log-prob of each response, row by row, with its gradient."""
    rows = []
    columns = (batch[name] for name in ("tokens", "loss_mask", "labels"))
    for prompt, mask, labels in zip(*columns, strict=True):
        for tokens, counts, wanted in zip(prompt, mask, labels, strict=True):
            ids = tokens[None]
            logits = plain(ids, torch.arange(ids.shape[1])[None], None)[0, :, :vocab]
            chosen = torch.log_softmax(logits, -1).gather(-1, wanted[:, None])[:, 0]
            rows.append((chosen * counts).sum())
    return torch.stack(rows).view(batch["ws"].shape)


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_loss_and_gradient_equal_autograd_of_the_divergence(
    tiny_tokenizer_dir, tiny_tokenizer, write, micro_batch_size
):
    cfg = config(tiny_tokenizer_dir, micro_batch_size)
    batch = ragged_batch(tiny_tokenizer, write)
    plain = GPTSteerLMModel(cfg).unwrapped()[0]
    log_policy = log_probs_of(plain, batch, tiny_tokenizer.vocab_size)
    # Near the policy's own numbers, as those of an earlier policy are, and far enough apart.
    noise = 0.8 * torch.randn(batch[LOG_Q].shape, generator=torch.Generator().manual_seed(2))
    batch[LOG_Q] = log_policy.detach().double() + noise
    tokens = batch["loss_mask"].sum(-1)
    expected, distance = 0.0, 0.0
    for n in range(3):
        rows = tokens[n] > 0
        wanted = batch["ws"][n][rows]
        weights = torch.softmax((log_policy[n] - batch[LOG_Q][n])[rows], 0)
        kl = (wanted * (wanted / weights).log()).sum()
        expected = expected + kl / tokens[n][rows].mean() / 3
        distance += float(kl.detach()) / 3
    expected.backward()

    model = GPTSteerLMModel(cfg)
    model.setup_megatron_optimization(10)
    model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
    assert loss == metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
    assert metrics["distance"] == pytest.approx(distance, rel=1e-4)
    assert metrics["weights"] == 3
    gaps = [noise[n][tokens[n] > 0].abs().mean() for n in range(3)]
    assert metrics["log_ratio"] == pytest.approx(float(sum(gaps)) / 3, rel=1e-4)
    sizes = [1 / float(batch["ws"][n][tokens[n] > 0].square().sum()) for n in range(3)]
    assert metrics["effective_responses"] == pytest.approx(sum(sizes) / 3, rel=1e-6)
    assert_gradients_of(plain, model, rtol=1e-3, atol=2e-6)
    model.prepare_for_validation_step()
    alone, numbers = model.get_loss_and_metrics(batch, forward_only=True)
    assert alone == pytest.approx(loss, rel=1e-6) and numbers.keys() == metrics.keys()
    model.finish_validation_step()


def test_weights_of_responses_are_computed_without_dropout(
    tiny_tokenizer_dir, tiny_tokenizer, write
):
    """The earlier policy of the batch is the model itself."""
    model = GPTSteerLMModel(config(tiny_tokenizer_dir, hidden_dropout=0.3))
    batch = ragged_batch(tiny_tokenizer, write)
    rows = {key: batch[key].flatten(0, 1) for key in ("tokens", "labels")}
    log_q = model.response_log_probs({**rows, "mask": batch["loss_mask"].flatten(0, 1)})
    batch[LOG_Q] = log_q.view_as(batch["ws"]).double()
    model.setup_megatron_optimization(10)
    model.prepare_for_training_step()
    assert model.get_loss_and_metrics(batch)[1]["log_ratio"] == pytest.approx(0, abs=1e-5)
    assert all(chunk.training for chunk in model.model)


def test_responses_that_make_no_whole_micro_batches_are_refused(tiny_tokenizer_dir, monkeypatch):
    cfg = tiny_config(tiny_tokenizer_dir, global_batch_size=4, steerlm2={"micro_batch_size": 3})
    model = GPTSteerLMModel(cfg)
    model.check_responses(6)
    with pytest.raises(ConfigError, match="micro_batch_size=3: the 4 prompts x 2 responses of"):
        model.check_responses(2)
    # With virtual pipelining micro-batches come in groups.
    monkeypatch.setattr(gpt_sft_model, "micro_batch_group", lambda _model: 2)
    model.cfg.steerlm2.micro_batch_size = 4
    model.check_responses(2)
    with pytest.raises(ConfigError, match="4 prompts x 3 .* no whole groups of 2 micro-batches"):
        model.check_responses(3)
    model.micro_batch_tokens = 64  # as many responses as have so many tokens
    model.check_responses(2)
