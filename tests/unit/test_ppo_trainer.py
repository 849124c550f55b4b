# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The PPO trainer with a fake policy and a fake critic: order of calls, futures, resume, warm-up,
passes, and the numbers of one rollout computed by hand."""

import functools
import math
from unittest.mock import Mock

import pytest
import torch

from nemo_aligner.algorithms import ppo
from nemo_aligner.algorithms.rollouts import compute_rollout_metrics
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.types import Scores
from nemo_aligner.training.stop_requests import stop_requests
from tests import ppo_fakes
from tests.ppo_fakes import fit_until_stopped, make_trainer
from tests.rs_fakes import make_reinforce_trainer, make_rs_trainer

NAN = float("nan")

both = pytest.mark.parametrize("make, name", [(make_trainer, "ppo"), (make_rs_trainer, "rs")])


def test_stand_ins_for_unusable_prompts_are_left_out_of_the_means():
    rollout = {"response_lengths": [4, 6, 90], "prompt_lengths": [2, 2, 2]}
    rollout |= {"is_end": [True, True, False], "loss_multiplier": [1.0, 1.0, 0.0]}
    rollout = {name: torch.tensor(column) for name, column in rollout.items()}
    metrics = compute_rollout_metrics(rollout, Scores(torch.tensor([1.0, 1.0, -5.0])))
    assert metrics["rewards"] == 1.0
    assert metrics["generation_length"] == metrics["rollout_size"] == 3
    assert metrics["fraction_of_samples_properly_ended"] == 1.0


def batch_rows(batch):
    """The rows of a training batch, sorted: which samples an update saw."""
    return sorted(tuple(row.tolist()) for row in batch["response_tokens"])


def logged(trainer):
    """Everything logged but times."""
    return [row for row in trainer.logger.metrics if not row[0].startswith(("timers/", "speed/"))]


# ----------------------------------------------------------------------------------- a whole run


def test_calls_of_a_step_come_in_order():
    trainer = make_trainer(max_steps=1)
    trainer.fit()
    rollout = ["infer", "critic_infer"] * 4
    update = ["prepare_for_training_step", "update", "finish_training_step", "optimizer_step"]
    assert trainer.events == [
        *["prepare_for_inference", *rollout, "logprobs", "init_logprobs"],
        *[*["critic_infer_result"] * 4, "finish_inference", "critic_train"],
        *["prepare_for_training", *update * 2, "finish_training", "critic_train_result"],
    ]


def test_run_counts_steps_and_logs_by_family():
    trainer = make_trainer()
    trainer.fit()
    state = trainer.state_dict()
    wanted = {"step": 3, "consumed_samples": 24, "epoch": 1, "ppo_optimization_step": 6}
    assert state == {**wanted, "num_rollout_samples": 8}
    assert all(type(value) is int for value in state.values())
    assert trainer.scheduler.num_steps == 6
    logger = trainer.logger
    assert [step for step, _ in logger.series("train_rollouts/rewards")] == [0, 1, 2]
    assert logger.series("train_rollouts/consumed_samples") == [(0, 8), (1, 16), (2, 24)]
    assert [step for step, _ in logger.series("train_optim/loss")] == [1, 2, 3, 4, 5, 6]
    assert logger.series("train_optim/actor_loss") == logger.series("train_optim/loss")
    assert logger.series("train_optim/critic_loss") == [(2, 0.25), (4, 0.5), (6, 0.75)]
    phases = "generate logprobs init_logprobs critic_wait train_time critic_train_wait".split()
    for name in ("rollout_time", *phases):
        assert len(logger.series(f"timers/{name}")) == 3, name
    assert all(value > 0 for _, value in logger.series("speed/generate_tokens_per_s"))
    assert logger.finalized == 1 and trainer.run_timer.started == 1
    tables = [(key, step) for key, step, _ in logger.tables]
    assert tables == [("table/train_rollouts", i) for i in range(3)]
    assert [row["step"] for row in logger.tables[-1][2]] == [0, 1, 2]
    assert {phase for step, phase in trainer.logger.phases if step == 1} >= set(phases)


def test_log_probs_of_the_sampler_save_a_pass_after_the_first_rollout():
    """The first one is compared with the reference to the bit."""
    expected = make_trainer(max_steps=3)
    expected.fit()
    trainer = make_trainer(max_steps=3, rollout_logprobs="sampler")
    trainer.fit()
    assert expected.events.count("logprobs") == 3
    assert trainer.events.count("logprobs") == 1
    assert trainer.events.count("init_logprobs") == 3
    assert trainer.model.weight == expected.model.weight != 0


def test_policy_that_differs_from_reference_at_step_0_is_refused():
    trainer = make_trainer()
    trainer.model.reference_offset = 0.125
    with pytest.raises(RuntimeError, match="differ by up to 1.250e-01"):
        trainer.fit()


def test_failed_critic_update_ends_the_run_before_the_next_rollout():
    trainer = make_trainer(fail_at_train=1)
    with pytest.raises(RuntimeError, match="remote traceback: critic lost"):
        trainer.fit()
    assert trainer.step == 1
    assert trainer.events.count("infer") == 8  # two rollouts of four micro-batches
    assert trainer.events[-1] == "critic_train_result"


def test_every_future_is_awaited_and_a_critic_update_before_the_next_request():
    trainer = make_trainer(critic_warmup_steps=2, val_check_interval=1, save_interval=1)
    trainer.fit()
    for name in ("critic_infer", "critic_train", "critic_save"):
        assert trainer.events.count(name) == trainer.events.count(f"{name}_result") > 0, name
    pending = False
    for event in trainer.events:
        assert not (pending and event in ("critic_infer", "critic_save", "critic_train")), event
        pending = (pending or event == "critic_train") and event != "critic_train_result"


GROUPS = {"advantage_estimator": "grpo", "num_rollouts_per_prompt": 2}
RESUMED = {"ppo": (make_trainer, {}), "grpo": (make_trainer, GROUPS)}
RESUMED |= {"reinforce": (make_reinforce_trainer, {}), "rs": (make_rs_trainer, {"max_epochs": 2})}


@pytest.mark.parametrize("kind", RESUMED)
def test_resume_continues_exactly(kind):
    make, settings = RESUMED[kind]
    settings = {"val_check_interval": 1, "save_interval": 1, **settings}
    whole, first, second = make(**settings), make(**settings, time_limit=1), make(**settings)
    whole.fit()
    fit_until_stopped(first)
    ((_, is_train_end, state),) = first.ckpt_callback.saved
    assert state["step"] == 1 and not is_train_end
    second.model.weight = first.model.weight
    if make is make_trainer:
        second.rm_critic.train_batches = list(first.rm_critic.train_batches)
    second.load_state_dict(state)
    second.fit()

    assert logged(first) + logged(second) == logged(whole)
    assert second.state_dict() == whole.state_dict()
    assert second.model.weight == whole.model.weight != 0
    rest = whole.model.batches[len(first.model.batches) :]
    for resumed, uninterrupted in zip(second.model.batches, rest, strict=True):
        assert resumed.keys() == uninterrupted.keys()
        for key, value in uninterrupted.items():
            torch.testing.assert_close(resumed[key], value, rtol=0, atol=0, equal_nan=True)


@both
def test_finished_run_writes_only_what_is_missing_and_says_so(monkeypatch, warnings, make, name):
    updates = f"{name}_optimization_step"
    trainer = make()
    trainer.load_state_dict({"step": 3, "consumed_samples": 24, updates: 6})
    monkeypatch.setattr(stop_requests, "has_trained", False)
    trainer.fit()
    assert not stop_requests.has_trained  # so that nothing is said after it
    assert trainer.events == ["prepare_for_training", "finish_export", "finish_training"]
    assert trainer.logger.finalized == 1
    said = "step 3 of 3: training is already complete, nothing was trained; raise trainer."
    assert warnings[-1].startswith(f"{said}{name}.max")
    warnings.clear()
    ongoing = make(max_steps=3)
    ongoing.load_state_dict({"step": 2, "consumed_samples": 16, updates: 4})
    ongoing.fit()
    assert stop_requests.has_trained
    assert ongoing.step == 3 and not any("complete" in line for line in warnings)


@both
def test_resume_with_other_steps_is_refused(make, name):
    """Epochs and max_steps count steps, so a step must stay what it was."""
    state = make(rollout_size=8).state_dict()
    assert state["num_rollout_samples"] == 8
    other = make(rollout_size=12)
    key = f"model.{name}.num_rollout_samples"
    said = f"{key}=12, but .* a job with 8: .* Set {key}=8, or start again from .*nemo"
    with pytest.raises(UserError, match=said):
        other.load_state_dict(state | {"step": 1})
    assert other.step == 0
    del state["num_rollout_samples"]  # an older checkpoint does not say
    other.load_state_dict(state | {"step": 1})
    assert other.step == 1


def test_warm_up_trains_the_critic_only_and_gives_its_prompts_back():
    positions = []
    builder = functools.partial(ppo_fakes.dataloader_builder, 8, seen=positions)
    warm = make_trainer(critic_warmup_steps=4, max_steps=2, builder=builder)
    cold = make_trainer(max_steps=2)
    warm.fit()
    cold.fit()
    # The constructor looks once; four warm-up rollouts (the fourth starts over), then the actor's
    # two.
    assert positions == [0, 0, 8, 16, 0, 0, 8]
    assert len(warm.rm_critic.train_batches) == 6
    awaited = [i for i, e in enumerate(warm.events) if e == "critic_train_result"]
    assert warm.events.index("update") > awaited[3]
    assert warm.state_dict() == cold.state_dict()
    # The actor's data are those of a run without warm-up; the warm-up's own responses to the same
    # prompts are others.
    assert list(map(batch_rows, warm.model.batches)) == list(map(batch_rows, cold.model.batches))
    batches = warm.rm_critic.train_batches
    assert batch_rows(batches[0]) != batch_rows(batches[4])
    assert [step for step, _ in warm.logger.series("critic_warmup/critic_loss")] == [0, 1, 2, 3]


def test_ppo_epochs_pass_over_the_rollout_in_other_orders():
    once, thrice = make_trainer(max_steps=1), make_trainer(max_steps=1, ppo_epochs=3)
    once.fit()
    thrice.fit()
    assert thrice.ppo_optimization_step == 6 and len(thrice.rm_critic.train_batches) == 1
    passes = [thrice.model.batches[i : i + 2] for i in (0, 2, 4)]
    whole = batch_rows(thrice.rm_critic.train_batches[0])
    for batches in passes:
        assert sorted(batch_rows(batches[0]) + batch_rows(batches[1])) == whole
    assert list(map(batch_rows, passes[0])) == list(map(batch_rows, once.model.batches))
    assert len({tuple(batch_rows(batches[0])) for batches in passes}) == 3
    # Rows stay whole: with their tokens travel their own advantages.
    rows = [pair for b in passes[0] for pair in zip(b["response_tokens"], b["advantages"])]
    advantage = {tuple(row.tolist()): a for row, a in rows}
    for batch in thrice.model.batches:
        for row, value in zip(batch["response_tokens"], batch["advantages"]):
            torch.testing.assert_close(value, advantage[tuple(row.tolist())], rtol=0, atol=0)


@both
def test_validation_scores_the_same_text_each_time(make, name):
    trainer = make(val_check_interval=1, save_interval=1, run_init_validation=True)
    trainer.fit()
    rewards = "rewards" if name == "ppo" else "global_rewards"
    found = trainer.logger.series(f"val_rollouts/{rewards}")
    assert [step for step, _ in found] == [0, 1, 2, 3]
    assert len({value for _, value in found}) == 1  # the text does not depend on the fake's weight
    assert {value for _, value in trainer.logger.series("val_rollouts/rollout_size")} == {4}
    for part in ("time", "generate", trainer.WAIT_TIMER):
        assert len(trainer.logger.series(f"timers/validation_{part}")) == 4
    assert trainer.logger.series("timers/validation_logprobs") == []
    assert trainer.events.count("logprobs") == 3 * (name == "ppo")  # never for a validation
    assert trainer.val_df.step.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert list(trainer.val_df.columns) == ["step", "prompt", "response", "reward"]
    candidates, is_train_end, state = trainer.ckpt_callback.saved[-1]
    assert is_train_end and state == trainer.state_dict()
    assert candidates[f"val_{rewards}"] == found[-1][1] and candidates["step"] == 3


def test_saves_in_the_background_are_waited_for_by_the_next_one():
    """By that of the critic too: it never has more than one checkpoint that the actor has not."""
    trainer = make_trainer(val_check_interval=1, save_interval=1)
    trainer.ckpt_callback.is_saving = True
    trainer.fit()
    events = [event for event in trainer.events if "save" in event]
    one = ["critic_save", "actor_save", "critic_save_result"]
    assert [event for event in events if event != "actor_saved"] == 3 * one
    for number, event in enumerate(events):
        if event == "critic_save_result":
            assert events[number - 1] == "actor_saved"


@both
def test_text_and_batches_do_not_depend_on_the_micro_batch(make, name):
    one, four = make(micro_batch_size=1), make(micro_batch_size=4)
    one.fit()
    four.fit()
    for a, b in zip(one.model.batches, four.model.batches, strict=True):
        for key in ("response_tokens", "mask", *(["advantages"] if name == "ppo" else [])):
            torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)


@pytest.mark.parametrize(
    "make, changes, message",
    [
        (make_trainer, {"model_gbs": 3}, "=8 is not a multiple of model.global_batch_size=3"),
        (make_trainer, {"ppo_epochs": 0}, "ppo_epochs=0"),
        (make_trainer, {"max_epochs": 2}, "trainer.ppo.max_epochs=2 needs a random sampler"),
        (make_trainer, {"advantage_estimator": "gro"}, "estimator='gro' must be one of gae, "),
        (make_trainer, {**GROUPS, "dynamic_sampling_rounds": 2}, "rounds=2 .* random sampler"),
        (make_rs_trainer, {"responses": 2, "top_n": 3}, "top_n_rollouts=3 must be from 1 to "),
        (
            make_rs_trainer,
            {"model_gbs": 6},
            "num_rollout_samples=8 x model.rs.top_n_rollouts=2=16 is not .*global_batch_size=6",
        ),
        (make_rs_trainer, {"micro_batch_size": 3}, "8 .* is not a multiple of 3"),
        (make_reinforce_trainer, {"num_rollouts_per_prompt": 1}, "prompt=1 must be at least 2"),
        (make_reinforce_trainer, {"model_gbs": 5}, "samples=8 x trainer.reinforce.num_rollouts"),
    ],
)
def test_values_that_cannot_work_are_refused(make, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_micro_batches_must_divide_the_rollout():
    loader = ppo_fakes.dataloader_builder(8, 0)
    loader.batch_sampler.micro_batch_size = 3
    with pytest.raises(ConfigError, match="8 samples .* micro-batch size 3 x 1"):
        ppo.compute_num_rollout_microbatches(loader)


def worked_rollout(length=6):
    """S=8, P=3, R=6: the response's transitions are columns 2 to 4; NaN outside of them."""
    columns = {
        "values": [NAN, NAN, 0.3, 0.4, 0.5, NAN, NAN],
        "logprobs": [NAN, NAN, -1.3, -0.6, -0.5, NAN, NAN],
        "init_logprobs": [NAN, NAN, -1.5, -0.5, -0.7, NAN, NAN],
    }
    rollout = {name: torch.tensor([column]) for name, column in columns.items()}
    rollout |= {"response_tokens": torch.arange(8)[None], "is_end": torch.tensor([True])}
    rollout |= {"prompt_lengths": torch.tensor([3]), "response_lengths": torch.tensor([length])}
    return rollout | {"rewards": torch.tensor([2.0])}


def test_ppo_data_of_the_worked_example():
    # By hand: gamma=1, lambda=.95, beta=.01, the absolute KL. r = -.002, -.001, 1.998; delta = r +
    # v' - v = .098, .099, 1.498; A4 = 1.498; A3 = .099 + .95 * 1.498 = 1.5221; A2 = .098 + .95 *
    # 1.5221 = 1.543995; returns = A + v. test_ppo_data.py has loops, for all variants.
    data, metrics = make_trainer(use_absolute_kl=True).generate_ppo_data(worked_rollout())
    assert data["mask"].tolist() == [[0, 0, 1, 1, 1, 0, 0]]
    found = {name: data[name][0, 2:5].tolist() for name in ("advantages", "returns", "values")}
    assert found["advantages"] == pytest.approx([1.204691, 0.039123, -1.243827], abs=2e-4)
    assert found["returns"] == pytest.approx([1.843995, 1.922100, 1.998000], abs=2e-6)
    assert found["values"] == pytest.approx([0.3, 0.4, 0.5], abs=2e-6)
    assert data["prev_logprobs"][0, 2:5].tolist() == pytest.approx([-1.3, -0.6, -0.5], abs=2e-6)
    expected = {"init_policy_kl": 0.5 / 3, "rewards_with_kl": 1.995 / 3, "values_mean": 0.4}
    expected |= {"advantages_mean": 1.521365, "advantages_std": math.sqrt(3.52858e-4)}
    expected["returns_mean"] = 5.764095 / 3
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=2e-6)
    # A rollout without any response token is harmless.
    data, metrics = make_trainer().generate_ppo_data(worked_rollout(length=3))
    assert data["mask"].sum() == 0 and all(math.isfinite(value) for value in metrics.values())


def test_the_steps_of_actor_and_critic_are_compared_once_before_the_first_rollout():
    trainer = make_trainer(max_steps=2, save_interval=1, val_check_interval=1)
    trainer.load_state_dict(trainer.state_dict() | {"step": 1, "consumed_samples": 8})
    trainer.ckpt_callback.saved.append(({}, False, {"step": 1}))
    check = trainer.rm_critic.check_status
    trainer.rm_critic.check_status = Mock(side_effect=UserError("actor and critic do not match"))
    with pytest.raises(UserError, match="do not match"):
        trainer.fit()
    assert trainer.events == [] and trainer.step == 1
    trainer.rm_critic.check_status = check
    trainer.fit()
    assert trainer.rm_critic.checked == [(1, {1: "step=1"})]
    trainer.max_steps = 3
    trainer.fit()  # the critic has moved on with this actor
    assert len(trainer.rm_critic.checked) == 1 and trainer.step == 3


LOSS, PLAIN = {"kl_loss_coef": 0.1}, {"normalize_advantages": False}


@pytest.mark.parametrize(
    "settings, said",
    [
        (LOSS, "trainer.ppo.normalize_advantages=True divides"),
        (LOSS | PLAIN, None),
        (LOSS | PLAIN | {"whiten_rewards": True}, "trainer.ppo.whiten_rewards=True divides"),
        (LOSS | GROUPS, "trainer.ppo.advantage_estimator=grpo divides"),
        (LOSS | GROUPS | {"advantage_estimator": "rloo"}, None),
        (
            LOSS | PLAIN | {"initial_policy_kl_penalty": 0.01},
            "trainer.ppo.initial_policy_kl_penalty=0.01 and by model.ppo.kl_loss_coef=0.1",
        ),
    ],
)
def test_a_kl_in_the_loss_that_is_no_beta_or_counts_twice_is_warned_of(settings, said, warnings):
    make_trainer(**{"initial_policy_kl_penalty": 0.0, **settings, "kl_loss_coef": 0.0})
    assert warnings == []
    make_trainer(**{"initial_policy_kl_penalty": 0.0, **settings})
    assert len(warnings) == bool(said) and (said is None or said in warnings[0])
