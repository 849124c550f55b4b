# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Every alarm among the real parts: the fault is planted in a PPO job with a real policy, or in a
critic's update, and the alarm fires; a healthy job is silent."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.algorithms.alarms import sampling_ratio_metrics
from nemo_aligner.algorithms.critic_server_trainer import CriticServerTrainer
from nemo_aligner.core.errors import NonFiniteError
from nemo_aligner.core.tensors import create_mask
from nemo_aligner.core.types import Scores
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTActorModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.servers import schema
from tests.ppo_fakes import FakeLogger, make_trainer
from tests.tiny_models import PPO, tiny_config

pytestmark = pytest.mark.slow

# Defaults of gpt_ppo_actor.yaml, but for the critic: the fake one knows nothing.
THRESHOLDS = {"sampling_mismatch": 0.05, "first_update_kl": 0.001, "clip_fraction": 0.3}
THRESHOLDS |= {"explained_variance": None, "truncated_fraction": 0.9}
THRESHOLDS["replica_check_interval"] = 1
NAN = float("nan")


def make_actor(tokenizer_dir, hidden_dropout=0.0, **sampling):
    sampling = sampling | {"end_strings": list("abcdefghijklmnoprstu ")}
    settings = {"length_params": {"max_length": 8}, "sampling_params": sampling}
    settings["entropy_bonus"] = 0.0
    own = {"ppo": OmegaConf.merge(PPO, settings), "micro_batch_size": 2}
    own |= {"init_method_std": 0.3, "hidden_dropout": hidden_dropout}
    return MegatronGPTActorModel(tiny_config(tokenizer_dir, **own))


def make_job(actor, **thresholds):
    """A PPO trainer with a real policy and optimizer, and a fake critic: two steps of eight
    responses.
    """
    thresholds = THRESHOLDS | thresholds
    trainer = make_trainer(max_steps=2, alarms=thresholds, initial_policy_kl_penalty=0.02)
    trainer.model, trainer.tokenizer = actor, actor.tokenizer
    actor.set_reference_policy()
    trainer.optimizer, trainer.scheduler = actor.setup_megatron_optimization(max_steps=10)
    sent = trainer.sent = []
    score = trainer.score

    def infer_rm_critic(rollout):
        sent.append(rollout)
        future = score(rollout)
        rewards, values = future.value.rewards, future.value.values
        future.value = Scores(rewards / 10, values.nan_to_num() / 100)
        return future

    trainer.score = infer_rm_critic
    return trainer


def weights_of(model):
    return [value.clone() for value in model.weights_to_cpu().values()]


def alarms_of(warnings):
    return [text.split()[1] for text in warnings if text.startswith("alarm: ")]


# ----------------------------------------------------------------------------------- the sampler


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"use_greedy": True, "temperature": 0.7},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    ],
)
def test_sampler_and_trainer_agree_in_every_mode_of_sampling(tiny_tokenizer_dir, sampling):
    actor = make_actor(tiny_tokenizer_dir, **sampling)
    actor.prepare_for_inference()
    prompts = {"text": torch.randint(0, 299, (6, 5)), "length": torch.tensor([1, 5, 3, 2, 4, 5])}
    assert "sampling_logprobs" not in actor.infer(prompts)
    rollout = actor.infer(prompts | {"return_logprobs": True})
    tokens = rollout["response_tokens"]
    lengths = rollout["prompt_lengths"], rollout["response_lengths"]
    mask = create_mask(tokens[:, 1:], *lengths)
    logprobs = actor.get_inference_log_probs(tokens)
    metrics = sampling_ratio_metrics(logprobs, rollout["sampling_logprobs"], mask)
    assert not rollout["sampling_logprobs"][mask == 0].any()
    assert 0 < metrics["sampling_ratio_mean_error"] < 1e-5
    assert metrics["sampling_ratio_max"] < 1 + 1e-4


def test_a_healthy_job_is_silent_and_measures_all(tiny_tokenizer_dir, warnings):
    trainer = make_job(make_actor(tiny_tokenizer_dir, temperature=0.7))
    trainer.fit()
    assert alarms_of(warnings) == []
    series = trainer.logger.series
    assert series("train_rollouts/policy_reference_difference") == [(0, 0.0)]
    assert series("train_rollouts/alarms_active") == [(0, 0), (1, 0)]
    errors = [value for _, value in series("train_rollouts/sampling_ratio_mean_error")]
    assert len(errors) == 2 and all(0 < value < 1e-4 for value in errors)
    assert all(1 <= value < 1.001 for _, value in series("train_rollouts/sampling_ratio_max"))
    assert len(series("train_rollouts/explained_variance")) == 2
    assert len(series("timers/replica_check")) == 2
    assert all("sampling_logprobs" not in batch for batch in trainer.rm_critic.train_batches)


def test_a_wrong_temperature_is_heard_once(tiny_tokenizer_dir, warnings):
    for threshold in (0.05, None):
        actor = make_actor(tiny_tokenizer_dir, temperature=0.7)
        actor.temperature = 1.0
        trainer = make_job(actor, sampling_mismatch=threshold)
        trainer.fit()
        assert alarms_of(warnings) == ["sampling_mismatch"]  # once, and not where it is off
        errors = trainer.logger.series("train_rollouts/sampling_ratio_mean_error")
        assert bool(errors) == bool(threshold) and all(value > 0.1 for _, value in errors)
        assert all(("sampling_logprobs" in each) == bool(threshold) for each in trainer.sent)


@pytest.mark.parametrize("resumed", [False, True])
def test_dropout_left_on_is_heard_by_both_policies(tiny_tokenizer_dir, warnings, resumed):
    actor = make_actor(tiny_tokenizer_dir, hidden_dropout=0.2)
    actor.set_eval = actor.set_train
    trainer = make_job(actor)
    trainer.resumed = resumed  # then policy and reference may differ
    if resumed:
        trainer.fit()
        assert alarms_of(warnings)[0] == "sampling_mismatch"
    else:
        said = "before the first update, log-probs of the policy and of the referen"
        with pytest.raises(RuntimeError, match=said):
            trainer.fit()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_dropout_in_training_is_heard_at_the_first_update(tiny_tokenizer_dir, warnings, dropout):
    trainer = make_job(make_actor(tiny_tokenizer_dir, hidden_dropout=dropout))
    trainer.fit()
    (_, kl), *_ = trainer.logger.series("train_optim/approx_kl")
    (_, ratio), *_ = trainer.logger.series("train_optim/ppo_ratio")
    assert (kl < 1e-8 and abs(ratio - 1) < 1e-5) == (dropout == 0)
    assert ("first_update_kl" in alarms_of(warnings)) == (dropout > 0)


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("rewards", r"^PPO step 0: rewards of sample 5 \(.* is nan; 1 of 8 are not finite"),
        # A real client refuses such values by itself. One is enough: advantages are normalized
        # over all responses.
        ("values", r"^PPO step 0: update 1 of its rollout: the loss is nan \(first in samples \d"),
    ],
)
def test_a_reward_or_a_value_that_is_not_finite_ends_the_run(tiny_tokenizer_dir, part, words):
    actor = make_actor(tiny_tokenizer_dir)
    before = weights_of(actor)
    trainer = make_job(actor)
    score = trainer.score

    def infer_rm_critic(rollout):
        future = score(rollout)
        if len(trainer.sent) == 3:
            getattr(future.value, part)[1] = NAN
        return future

    trainer.score = infer_rm_critic
    with pytest.raises(NonFiniteError, match=words):
        trainer.fit()
    assert all(map(torch.equal, weights_of(actor), before))


def test_a_critic_update_that_is_not_finite_is_refused_and_the_critic_goes_on(
    tiny_tokenizer_dir, tmp_path, monkeypatch
):
    """The error is that of a request, so a server sends it to the actor's future."""
    nemo = str(tmp_path / "rm.nemo")
    MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir)).save_to(nemo)
    own = {"output_sequence": True, "loss_clip_val": 0.2, "reward_model_type": "binary_ranking"}
    cfg = tiny_config(tiny_tokenizer_dir, **own)
    critic = load_from_nemo(MegatronGPTCriticModel, cfg, None, restore_path=nemo)
    optimizer, scheduler = critic.setup_megatron_optimization(max_steps=10)
    cfg = {"combine_rm_and_critic_server": False, "alarms": {"replica_check_interval": 1}}
    parts = {"model": critic, "optimizer": optimizer, "scheduler": scheduler}
    parts |= {"logger": FakeLogger(), "ckpt_callback": None, "tokenize_func": None}
    sizes = {"gbs": 2, "model_forward_micro_batch_size": 2}
    server = CriticServerTrainer(cfg=OmegaConf.create(cfg), **parts, **sizes)
    numbers = lambda: np.zeros((4, 4), np.float32)
    request = {"tokens": np.ones((4, 5), np.int64), "mask": numbers() + 1}
    request |= {"returns": numbers(), "prev_values": numbers()}
    before = weights_of(critic)
    returns = request["returns"].copy()
    returns[1, 2] = 1e30  # finite; its square is not
    monkeypatch.setattr(schema, "LARGEST_NUMBER", 1e31)
    said = r"^critic step 1: the loss is inf \(first in sample 1 of the share"
    with pytest.raises(NonFiniteError, match=said):
        server.run_training(**request | {"returns": returns})
    server._recover(None)
    assert server.step == 0
    assert all(map(torch.equal, weights_of(critic), before))
    assert np.isfinite(server.run_training(**request)["loss_mean"]) and server.step == 2
