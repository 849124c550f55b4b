# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation without a server: the batches that are made of the student's responses,
the draw of the updates, what a teacher serves, and the loss against trl's and a naive loop.
"""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import default_collate

from nemo_aligner.algorithms.alarms import Alarms
from nemo_aligner.algorithms.distillation import OnPolicyDistillationTrainer, response_batch
from nemo_aligner.algorithms.reward_server import TeacherServer
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.types import Scores
from nemo_aligner.data.nlp.datasets import ResponseDataset
from nemo_aligner.generation import GenerationOutput
from nemo_aligner.generation.decoding_model import DecodingModel
from nemo_aligner.launch.model_loading import complete_model_config
from nemo_aligner.models.nlp.gpt.megatron_gpt_knowledge_distillation import (
    GPTKnowledgeDistillationModel,
    TopKTeacherModel,
)
from nemo_aligner.servers import schema
from nemo_aligner.servers.requests import no_sentences
from nemo_aligner.servers.schema import ReplyError, RequestError, validate_reply
from nemo_aligner.servers.teachers import PolicyTeachers, TeacherLogits
from nemo_aligner.training.schedule import ScopedTimer
from tests.oracles import trl_jsd
from tests.ppo_fakes import FakeFuture
from tests.tiny_models import tiny_config
from tests.unit.test_config_checks import check, load

WIDTH, VOCAB = 24, 300
SAID = {"the film": " was a joy", "a": " is dull, and far too long", "the play": " bad"}
RECORDS = [{"prompt": prompt, "response": response} for prompt, response in SAID.items()]


@pytest.fixture
def data(tiny_tokenizer, write):
    return ResponseDataset([write(*RECORDS)], tiny_tokenizer, WIDTH)


@pytest.fixture
def batch(data):
    return default_collate([data[i] for i in range(3)])


def test_items_have_the_tokens_of_the_responses_as_labels(data, tiny_tokenizer):
    for item, record in zip(data, RECORDS, strict=True):
        prompt = tiny_tokenizer.text_to_ids(record["prompt"])
        response = tiny_tokenizer.text_to_ids(record["prompt"] + record["response"])[len(prompt) :]
        assert item["tokens"].tolist()[: int(item["lengths"])] == prompt + response
        assert item["prompt_lengths"] == len(prompt)
        assert item["labels"][item["loss_mask"] == 1].tolist() == response
    assert not data[-1]["loss_mask"].any() and data[-1]["idx"] == -1


def test_a_prompt_that_the_tokenizer_joins_with_its_response_is_refused(tiny_tokenizer, write):
    data = ResponseDataset([write({"prompt": "h", "response": "e x"})], tiny_tokenizer, WIDTH)
    with pytest.raises(UserError, match="train data: the tokenizer joins a prompt.*'he x"):
        data[0]


def test_own_responses_take_the_place_of_the_datas(data):
    batch = default_collate([data[0], data[-1], data[2]])
    prompts = batch["prompt_lengths"].tolist()
    width = max(prompts) + 4
    tokens = torch.arange(3 * width).view(3, width)
    ends = torch.tensor([prompts[0] + 4, prompts[1] + 2, prompts[2] + 1])
    found = response_batch(batch, GenerationOutput(tokens, ends, torch.ones(3).bool()))
    for row in range(3):
        counts = found["loss_mask"][row].nonzero().flatten()
        wanted = range(prompts[row] - 1, int(ends[row]) - 1)
        assert counts.tolist() == ([] if row == 1 else [*wanted])  # an empty slot stays empty
        assert found["labels"][row, counts].equal(tokens[row, counts + 1])
    assert found["lengths"].tolist() == ends.tolist() and found["tokens"].equal(tokens)
    assert found["idx"].tolist() == [0, -1, 2]


def trainer_of(model, fraction=1.0, teacher=None, step=0):
    trainer = OnPolicyDistillationTrainer.__new__(OnPolicyDistillationTrainer)
    trainer.model, trainer.fraction, trainer.teacher = model, fraction, teacher
    trainer.seed, trainer.step = 7, step
    return trainer


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_updates_are_on_policy_with_the_asked_probability(fraction):
    trainer = trainer_of(None, fraction)
    draws = [trainer.is_on_policy(step) for step in range(4000)]
    assert sum(draws) / 4000 == pytest.approx(fraction, abs=0.03 if 0 < fraction < 1 else 0)
    assert draws == [trainer.is_on_policy(step) for step in range(4000)]


@pytest.fixture(scope="module")
def models(tiny_tokenizer_dir):
    """A student and a teacher."""
    distillation = {"on_policy": {"length_params": {"max_length": 6}}, "outside_top_k": "bucket"}
    cfg = tiny_config(tiny_tokenizer_dir, knowledge_distillation=distillation)
    student = GPTKnowledgeDistillationModel(cfg)
    student.setup_megatron_optimization(10)
    teacher = TopKTeacherModel(tiny_config(tiny_tokenizer_dir, seed=8))
    for model in (student, teacher):
        model.set_eval()
    return student, teacher


def server_of(teacher, top_k=VOCAB, **options):
    return TeacherServer(
        infer_fn=lambda samples: teacher.top_logits(*samples, top_k),
        tokenize_func=no_sentences,
        model_name="teacher_logits",
        port=1,
        inference_micro_batch_size=4,
        model_forward_micro_batch_size=2,
        tokenizer=teacher.tokenizer,
        **options,
    )


class Served:
    """A teacher that is asked without a network, in place of `RemoteTeacherClient`."""

    def __init__(self, server):
        self.server = server

    def logits(self, tokens, lengths):
        lengths = lengths.view(-1, 1).numpy()
        reply = self.server.infer(tokens=tokens.numpy(), sequence_lengths=lengths)
        validate_reply(schema.teacher_endpoint(TeacherLogits._fields), reply, len(tokens))
        arrays = [torch.from_numpy(reply[name]) for name in TeacherLogits._fields]
        return TeacherLogits(arrays[0], arrays[1].long(), arrays[2])


@pytest.mark.slow
def test_a_reply_has_the_largest_logits_and_the_log_prob_of_the_token_behind_each(models, batch):
    _, teacher = models
    tokens, lengths = batch["tokens"], batch["lengths"]
    server = server_of(teacher, 5, strip_sequence_length_to_multiple=8)
    reply = server.infer(tokens=tokens.numpy(), sequence_lengths=lengths.view(-1, 1).numpy())
    some, whole = (Served(each).logits(tokens, lengths) for each in (server, server_of(teacher)))
    assert some.topk_logits.shape == (3, WIDTH, 5) and some.log_sum_exp_logits.shape == (3, WIDTH)
    dense = plain_logits(teacher, tokens).double().log_softmax(-1)
    for row, length in enumerate(lengths.tolist()):
        wanted = [float(dense[row, t, tokens[row, t + 1]]) for t in range(length - 1)]
        assert reply["log_probs"][row, : length - 1].tolist() == pytest.approx(wanted, abs=1e-4)
        alone = teacher.top_logits(tokens[row : row + 1, :length], lengths[row : row + 1], 5)
        torch.testing.assert_close(some.topk_logits[row, :length], alone.logits[0])
        assert some.topk_token_ids[row, :length].equal(alone.token_ids[0])
        probabilities = whole.topk_logits[row, :length].exp().sum(-1).log()
        torch.testing.assert_close(probabilities, whole.log_sum_exp_logits[row, :length])


def generalized_jsd(student, teacher, beta):
    """Generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649) of logits [T, V]: beta
    KL(teacher || M) + (1 - beta) KL(student || M), M = beta teacher + (1 - beta) student, whose
    limits are the KLs; mean over the tokens.
    """
    p, q = teacher.softmax(-1), student.softmax(-1)
    kl = lambda a, b: (a * (a / b).log()).sum(-1).mean()
    if beta in (0, 1):
        return kl(q, p) if beta else kl(p, q)
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def plain_logits(model, tokens):
    (module,) = model.unwrapped()
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    return module(tokens, positions, None)[..., :VOCAB].float()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kd_loss", "beta"), [("fwd_kl", 0), ("bwd_kl", 1), ("jsd", 0.5), ("jsd", 0.1)]
)
def test_loss_and_gradient_on_own_responses_are_those_of_gkd(models, batch, kd_loss, beta):
    student, teacher = models
    student.loss_settings |= {"kd_loss": kd_loss, "jsd_beta": beta or 0.5}
    trainer = trainer_of(student, teacher=Served(server_of(teacher)))
    own, ended = trainer.with_own_responses(batch)
    assert ended.shape == (3,) and own["loss_mask"].sum() > 3
    again, _ = trainer_of(student, step=1).with_own_responses(batch)
    assert not own["tokens"].equal(again["tokens"])  # another step, other responses
    full = trainer.with_logits(own)

    student.set_eval()
    with torch.no_grad():
        target = plain_logits(teacher, full["tokens"])
    mine = plain_logits(student, full["tokens"])
    counts = full["loss_mask"] != 0
    expected = generalized_jsd(mine[counts], target[counts], beta)
    if beta == 0.5:  # this release of trl exchanges the weights of the mixture
        labels = full["labels"].masked_fill(~counts, -100)
        theirs = trl_jsd(mine.detach(), target, labels, beta)
        assert float(expected.detach()) == pytest.approx(float(theirs), rel=1e-5)
    parameters = [p for module in student.unwrapped() for p in module.parameters()]
    wanted = torch.autograd.grad(expected, parameters)
    student.prepare_for_training_step()
    loss, metrics = student.get_loss_and_metrics(full)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert metrics["teacher_mass"] == pytest.approx(1, abs=1e-5)
    norm = torch.cat([gradient.flatten() for gradient in wanted]).norm()
    for parameter, gradient in zip(parameters, wanted, strict=True):
        assert (parameter.main_grad - gradient).norm() < 1e-4 * norm


@pytest.mark.slow
def test_responses_are_the_same_however_many_are_generated_together(models, batch, monkeypatch):
    student, _ = models
    cached, new_cache = [], DecodingModel.new_cache
    counted = lambda self, slots: cached.append(slots) or new_cache(self, slots)
    monkeypatch.setattr(DecodingModel, "new_cache", counted)
    own = []
    for together in (None, 1, 2):
        monkeypatch.setattr(student, "rollout_micro_batch_size", together)
        own.append(trainer_of(student).with_own_responses(batch)[0]["tokens"])
    assert cached == [3, 1, 2]
    assert own[0].equal(own[1]) and own[0].equal(own[2])


@pytest.mark.slow
def test_the_alarms_see_how_many_own_responses_end(models, batch):
    student, teacher = models
    trainer = trainer_of(student, teacher=Served(server_of(teacher)))
    trainer.optimizer, trainer.scheduler = student.setup_megatron_optimization(10)
    trainer.cfg = SimpleNamespace(gradient_clip_val=1.0)
    trainer.timer = ScopedTimer(reduction="mean", sync_cuda=False, buffer_size=1)
    trainer.alarms = Alarms("alarms", {"truncated_fraction": 0.1})
    said = []
    trainer.alarms._warn = said.append
    trainer.consumed_samples, trainer.global_batch_size, trainer.num_steps_per_epoch = 0, 3, 9
    trainer.passes, trainer.used, trainer.more_steps = 0, 0, 0
    trainer.sampler = SimpleNamespace(total_samples=27)
    metrics = trainer.train_single_step(batch)
    assert metrics["fraction_of_samples_properly_ended"] < 0.9  # of six tokens at most
    assert metrics["alarms_active"] == 1 and "truncated_fraction" in said[0]


# --- bad input


def test_what_a_teacher_refuses(models):
    _, teacher = models
    server = server_of(teacher, 5, vocab_size=VOCAB, max_length=48)
    tokens, lengths = np.zeros((1, 3), np.int64), np.array([[3]])
    with pytest.raises(RequestError, match="'sentences' came, but send 'tokens'"):
        server.infer(sentences=np.array([[b"text"]]))
    with pytest.raises(UserError, match="tokenizer"):
        server.infer(tokens=tokens, sequence_lengths=lengths, tokenizer=np.array([[b"other"]]))
    with pytest.raises(UserError, match="300"):
        server.infer(tokens=tokens + VOCAB, sequence_lengths=lengths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("topk_token_ids"), "has no tensor 'topk_token_ids'"),
        (lambda r: r.update(topk_logits=r["topk_logits"][:1]), r"shape \[1, 3, 5\] for 2 sample"),
        (lambda r: r["topk_logits"].__setitem__((1, 2, 0), np.nan), "nan in sample 1, column 2"),
        (lambda r: r.update(topk_token_ids=r["topk_logits"]), "came as float32, not"),
        (lambda r: r["log_probs"].__setitem__((0, 1), np.nan), "'log_probs' is nan in sample 0"),
    ],
)
def test_replies_that_cannot_be_used(change, message):
    top = (2, 3, 5)
    reply = {"topk_logits": np.zeros(top, np.float32), "topk_token_ids": np.zeros(top, np.int32)}
    reply |= {name: np.zeros((2, 3), np.float32) for name in ("log_sum_exp_logits", "log_probs")}
    validate_reply(schema.teacher_endpoint(), reply, 2)
    change(reply)
    with pytest.raises(ReplyError, match=message):
        validate_reply(schema.teacher_endpoint(), reply, 2)


STUDENT = "gpt_knowledge_distillation"
LOSS = "model.knowledge_distillation."


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (STUDENT, ["{own}fraction=1", "model.data.top_k=5"], "top_k=5"),
        (STUDENT, ["{own}fraction=0.1"], "outside_top_k=renormalize leaves"),
        (
            STUDENT,
            ["{own}fraction=1", f"{LOSS}outside_top_k=bucket", f"{LOSS}sft_loss_weight=0.1"],
            "sft_loss_weight=0.1; set it to 0",
        ),
        ("inference_teacher", ["inference.host=0.0.0.0"], "needs a token"),
    ],
)
def test_what_cannot_work_is_refused_at_start(tmp_path, name, overrides, message):
    assert check(name, tmp_path) == []
    with pytest.raises(ConfigError, match=message):
        check(name, tmp_path, *(text.format(own=f"{LOSS}on_policy.") for text in overrides))


@pytest.mark.parametrize("given", [[], ["++model.encoder_seq_length=null"]])
def test_a_served_teacher_takes_as_much_as_its_checkpoint(tiny_tokenizer_dir, tmp_path, given):
    folder = tmp_path / "teacher.nemo"
    folder.mkdir()
    cfg = tiny_config(tiny_tokenizer_dir, encoder_seq_length=WIDTH)
    OmegaConf.save(cfg, folder / "model_config.yaml")
    own = complete_config(load("inference_teacher", tmp_path, *given), "inference_teacher")
    model = complete_model_config(folder, own.model, "inference_teacher")
    assert model.encoder_seq_length == WIDTH


# --- several teachers of a policy, without a network


class FakeFleet:
    """Its log-prob of a token is the token times `factor`; of columns that were sent."""

    def __init__(self, factor):
        self.factor, self.sent = factor, []

    def submit(self, payload):
        self.sent.append(payload)
        future, following = Future(), torch.from_numpy(payload["tokens"]).roll(-1, 1).float()
        future.set_result({"log_probs": (following * self.factor).numpy()})
        return future

    describe = staticmethod(lambda: "a fake")


def test_each_sample_is_sent_to_its_teacher_and_gets_its_log_probs_back():
    teachers = PolicyTeachers.__new__(PolicyTeachers)
    teachers._fleets = {name: FakeFleet(factor) for name, factor in (("a", 1), ("b", 100))}
    teachers.fingerprint, teachers.pad_to_length, teachers.max_length = "f", None, 64
    named = {40: "b", 41: "a", 42: "b"}
    teachers._named = lambda records: [named[record] for record in records.tolist()]
    tokens = torch.arange(1, 31).view(3, 10)
    lengths = torch.tensor([6, 10, 4])
    rollout = {"response_tokens": tokens, "response_lengths": lengths}
    rollout["record"] = torch.tensor([42, 41, 40])
    scores = FakeFuture([], "scored", Scores(torch.ones(3)))
    found = teachers.beside(scores, rollout).scores()
    assert found.rewards.tolist() == [1, 1, 1]
    assert [len(fleet.sent) for fleet in teachers._fleets.values()] == [1, 1]
    assert teachers._fleets["b"].sent[0]["sequence_lengths"].flatten().tolist() == [6, 4]
    for row, factor in enumerate((100, 1, 100)):
        span = slice(0, int(lengths[row]) - 1)
        wanted = (tokens[row, 1:] * factor).float()
        assert found.teacher_logprobs[row, span].equal(wanted[span])
