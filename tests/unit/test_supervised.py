# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`SupervisedTrainer` driven by a fake model: y = w * x on real samplers, in milliseconds."""

import copy
import itertools
import multiprocessing
import re
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.algorithms.supervised import SupervisedTrainer
from nemo_aligner.core.endings import ExitCode, JobStopped
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp.builders import build_dataloader
from nemo_aligner.training.stop_requests import stop_requests
from tests.cases import some_of
from tests.ppo_fakes import FakeCheckpoints, FakeLogger, FakeRunTimer, fit_until_stopped

GBS = 4


class FakeModel:
    """Loss: mean of (w - index)^2; records what it is asked to do."""

    def __init__(self):
        self.cfg = OmegaConf.create({"global_batch_size": GBS})
        self.weight = 0.0
        self.gradient = None
        self.batches, self.calls = [], []
        self.summary = dict

    def get_loss_and_metrics(self, batch, forward_only):
        valid = batch[batch >= 0].double()
        self.calls.append("forward" if forward_only else "backward")
        if not forward_only:
            self.batches.append(batch.tolist())
            self.gradient = (2 * (self.weight - valid)).mean().item()
        loss = ((self.weight - valid) ** 2).mean().item() if len(valid) else float("nan")
        share = valid.mean().item() if len(valid) else float("nan")
        return loss, {"acc": share, "weights": float(len(valid))}

    def summarize_metrics(self, metrics):
        return self.summary(metrics)

    def __getattr__(self, name):
        if name.startswith(("prepare_for_", "finish_")):
            return lambda: self.calls.append(name)
        raise AttributeError(name)


class FakeOptimizer:
    """Plain gradient descent, and its own schedule: the learning rate falls with every step."""

    def __init__(self, model):
        self.model = model
        self.param_groups = [{"lr": 0.1}]
        self.config = SimpleNamespace(clip_grad=None)
        self.clips = []

    def zero_grad(self):
        self.model.calls.append("zero_grad")
        self.model.gradient = None

    def step(self, increment=None):
        if increment is not None:  # as the scheduler
            self.param_groups[0]["lr"] *= 0.9
            return None
        self.model.calls.append("step")
        self.clips.append(self.config.clip_grad)
        self.model.weight -= self.param_groups[0]["lr"] * self.model.gradient
        return True, abs(self.model.gradient), None


class Checkpoints(FakeCheckpoints):
    """Keeps copies of everything that a checkpoint would hold."""

    def __init__(self, model, optimizer):
        super().__init__(model.calls)
        self.model, self.optimizer, self.saves = model, optimizer, []

    def custom_save(self, monitor_candidates, is_train_end, trainer_state):
        model = (self.model.weight, self.optimizer.param_groups[0]["lr"])
        save = {"candidates": monitor_candidates, "end": is_train_end, "state": trainer_state}
        self.saves.append(SimpleNamespace(**save, model=model))


def of(trainer, prefix):
    """What was logged under `prefix`, by step."""
    found = {}
    for name, step, value in trainer.logger.metrics:
        if name.startswith(prefix):
            found.setdefault(step, {})[name.removeprefix(prefix)] = value
    return found


def dataloader(size, random=True, consumed=0, workers=0, drop_last=True, gbs=GBS):
    cfg = OmegaConf.create({"model": {"seed": 5, "data": {"num_workers": workers}}})
    return build_dataloader(
        cfg,
        Numbers(size),
        consumed,
        2 - gbs % 2,
        gbs,
        drop_last=drop_last,
        pad_samples_to_global_batch_size=not drop_last,
        use_random_sampler=random,
    )


class Batches(list):
    """A data loader of these batches."""

    batch_sampler = SimpleNamespace(consumed_samples=0)


class Numbers(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


def make(train=None, val=None, test=None, timer=None, section=None, **cfg):
    defaults = {"max_epochs": 2, "max_steps": -1, "val_check_interval": 2, "save_interval": 4}
    defaults |= {"gradient_clip_val": 1.5, "alarms": None}
    cfg = OmegaConf.create(defaults | {"limit_train_batches": 1.0, "limit_val_batches": 1.0} | cfg)
    model = FakeModel()
    optimizer = FakeOptimizer(model)
    parts = cfg, model, optimizer, optimizer, train or dataloader(22), val, test, FakeLogger()
    parts = *parts, Checkpoints(model, optimizer), timer or FakeRunTimer()
    return SupervisedTrainer(*parts, section=section)


def test_training_is_the_naive_loop():
    trainer = make()
    trainer.fit()
    # The same by hand: two epochs of five batches each.
    weight, lr = 0.0, 0.1
    sampler = iter(dataloader(22).batch_sampler), iter(dataloader(22, consumed=20).batch_sampler)
    batches = [*sampler[0], *sampler[1]]
    assert trainer.model.batches == batches and len(batches) == 10
    for step, batch in enumerate(batches):
        row = of(trainer, "train/")[step]
        gradient = sum(2 * (weight - x) for x in batch) / GBS
        assert row["loss"] == pytest.approx(sum((weight - x) ** 2 for x in batch) / GBS)
        assert row["lr"] == pytest.approx(lr) and row["grad_norm"] == pytest.approx(abs(gradient))
        assert (row["consumed_samples"], row["epoch"]) == (GBS * (step + 1), 1 + step // 5)
        assert row["step_time"] >= 0
        weight, lr = weight - lr * gradient, lr * 0.9
    assert trainer.model.weight == pytest.approx(weight)
    assert set(trainer.optimizer.clips) == {1.5}
    calls = "zero_grad prepare_for_training_step backward finish_training_step step".split()
    assert trainer.model.calls == calls * 10
    assert trainer.logger.finalized and trainer.run_timer.started == 1
    assert (trainer.step, trainer.consumed_samples, trainer.epoch) == (10, 40, 2)


def test_validation_is_weighted_and_monitored():
    loader = dataloader(6, random=False, drop_last=False)  # batches of four and of two samples
    hard = dataloader(4, random=False)
    trainer = make(val={"validation": loader, "validation_hard": hard}, max_epochs=1)
    trainer.fit()
    assert set(of(trainer, "validation/")) == {2, 4, 5} == set(of(trainer, "validation_hard/"))
    last = of(trainer, "validation/")[5]
    assert set(last) == {"loss", "acc"}
    assert last["acc"] == pytest.approx(2.5)
    assert of(trainer, "validation_hard/")[5]["acc"] == pytest.approx(1.5)
    mean = sum((trainer.model.weight - x) ** 2 for x in range(6)) / 6
    assert last["loss"] == pytest.approx(mean)
    assert of(trainer, "timers/")[5]["validation_time"] >= 0
    middle, end = trainer.ckpt_callback.saves
    assert (middle.end, end.end) == (False, True)
    place = {"global_batch_size": GBS, "passes": 0, "used": 16}
    assert middle.state == {"step": 4, "consumed_samples": 16, "epoch": 0, **place}
    assert end.candidates["val_loss"] == last["loss"] and end.candidates["step"] == 5
    assert end.candidates["train_loss"] == of(trainer, "train/")[4]["loss"]
    for name in ("prepare_for_validation_step", "finish_validation_step"):
        assert name in trainer.model.calls


def test_a_batch_of_empty_slots_does_not_spoil_the_mean():
    trainer = make()
    batches = Batches([torch.tensor([1, 2]), torch.tensor([-1, -1])])
    trainer._score("held out", batches, None)
    metrics, samples = trainer.held_out["held out"]
    assert metrics["acc"] == 1.5 and samples == 2


def test_the_model_summarizes_means_and_the_held_out_numbers_are_kept():
    loaders = {"test": dataloader(4, random=False)}
    loaders["val"] = dataloader(6, random=False, drop_last=False)
    trainer = make(**loaders, max_epochs=1)
    trainer.model.summary = lambda metrics: {"twice": 2 * metrics["acc"]} if metrics else {}
    trainer.fit()
    # Twice the mean of 0..5, not a mean of batches.
    assert of(trainer, "validation/")[5] == {"twice": 5.0}
    assert trainer.held_out == {"validation": ({"twice": 5.0}, 6.0), "test": ({"twice": 3.0}, 4.0)}
    assert of(trainer, "train/")[0]["twice"] == pytest.approx(sum(trainer.model.batches[0]) / 2)
    assert trainer.ckpt_callback.saves[-1].candidates["val_twice"] == 5.0


def test_limits_intervals_and_final_test():
    loaders = {"val": dataloader(20, random=False), "test": dataloader(8, random=False)}
    limits = {"limit_train_batches": 3, "limit_val_batches": 1, "val_check_interval": 0.7}
    trainer = make(**loaders, **limits, save_interval=-1)
    trainer.run_init_validation = True
    found = trainer.num_steps_per_epoch, trainer.max_steps, trainer.val_check_interval
    assert found == (3, 6, 2)
    trainer.fit()
    assert set(of(trainer, "validation/")) == {0, 2, 4, 6} and set(of(trainer, "test/")) == {6}
    assert of(trainer, "validation/")[0]["acc"] == 1.5  # the first batch alone
    assert of(trainer, "test/")[6]["acc"] == 3.5  # all of it
    assert not trainer.ckpt_callback.saves
    assert len(make(max_steps=3).model.batches) == 0 and make(max_steps=3).max_steps == 3
    assert make(max_epochs=None, max_steps=7).max_steps == 7


def test_intervals_of_parts_of_an_epoch():
    """Of validations and saves alike: the shipped YAML files have one for both."""
    trainer = make(val=dataloader(4, random=False), val_check_interval=0.5, save_interval=0.5)
    trainer.fit()  # 2 epochs of 5 steps
    assert [save.state["step"] for save in trainer.ckpt_callback.saves] == [2, 4, 6, 8, 10]
    assert sorted(of(trainer, "validation/")) == [2, 4, 6, 8, 10]
    saving = make(train=dataloader(140), val_check_interval=0.1, save_interval=0.5)
    assert (saving.num_steps_per_epoch, saving.val_check_interval) == (35, 3)
    assert saving.save_interval == 17
    assert make(save_interval=0.01, val_check_interval=0).save_interval == 1


def test_a_save_that_is_due_has_a_validation():
    """Whatever the two intervals are; checkpoints are ranked by it."""
    trainer = make(val=dataloader(4, random=False), val_check_interval=4, save_interval=3)
    trainer.fit()
    saves = trainer.ckpt_callback.saves
    assert [save.state["step"] for save in saves] == [3, 6, 9, 10]
    assert sorted(of(trainer, "validation/")) == [3, 4, 6, 8, 9, 10]
    assert all("val_loss" in save.candidates for save in saves)


def test_a_save_without_a_validation_has_no_metric_of_one(monkeypatch):
    """Else it would be ranked by weights that it does not hold."""
    signalled = JobStopped(ExitCode.PRE_EMPTED, "SIGTERM")
    at_three = lambda step, timer: signalled if step == 3 else None
    monkeypatch.setattr(stop_requests, "after_step", at_three)
    trainer = make(val=dataloader(4, random=False))
    assert fit_until_stopped(trainer) is signalled
    (save,) = trainer.ckpt_callback.saves
    assert trainer.step == 3 and 2 in of(trainer, "validation/")
    assert "train_loss" in save.candidates and "val_loss" not in save.candidates


@pytest.mark.parametrize("workers", [0, 2])
def test_each_validation_is_of_the_same_samples(workers):
    shuffled = dataloader(22, workers=workers)
    trainer = make(val=shuffled, limit_val_batches=0.5, val_check_interval=1)
    share = lambda batch: {"acc": float(batch.float().mean()), "weights": 4.0}
    trainer.model.get_loss_and_metrics = lambda batch, forward_only: (0.0, share(batch))
    found = [trainer.run_validation()["acc"] for _ in range(4)]
    assert len(set(found)) == 1


def test_a_job_that_died_before_its_test_scores_it():
    trainer = make(test=dataloader(8, random=False))
    trainer.load_state_dict({"step": 10, "consumed_samples": 40, "epoch": 2})
    trainer.fit()
    assert of(trainer, "test/")[10]["acc"] == 3.5 and trainer.logger.finalized
    assert not trainer.model.batches and "finish_export" in trainer.model.calls


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_equals_the_uninterrupted_run(workers):
    whole = make(train=dataloader(22, workers=workers), save_interval=2)
    whole.fit()
    for save in whole.ckpt_callback.saves[:-1]:
        resumed = make(train=dataloader(22, consumed=0, workers=workers), save_interval=2)
        resumed.load_state_dict(copy.deepcopy(save.state))
        resumed.model.weight, resumed.optimizer.param_groups[0]["lr"] = save.model
        resumed.fit()
        assert resumed.model.batches == whole.model.batches[save.state["step"] :]
        assert resumed.model.weight == whole.model.weight
        assert resumed.state_dict() == whole.state_dict()
        if workers:
            break


def test_workers_end_with_the_training():
    before = set(multiprocessing.active_children())
    trainer = make(train=dataloader(22, workers=2))
    trainer.fit()
    left = set(multiprocessing.active_children()) - before
    assert trainer.step == 10 and not left  # at the end of Python they would be waited for


@some_of("workers", [0, 2])
@pytest.mark.parametrize(
    ("sizes", "rests"),  # (global batch size, its last step), what is left out of each epoch
    [
        ([(4, 2), (2, 15)], [0, 0, 0]),  # 8 of 10 samples were used: the other two come first
        ([(4, 3), (2, 15)], [2, 0, 0]),
        ([(2, 3), (4, 99)], [0, 2, 2]),  # 6 of 10 samples were used, and then four more
        ([(2, 4), (4, 99)], [2, 2, 2]),
        ([(2, 2), (6, 4), (2, 99)], [0, 0, 0]),
        ([(2, 1), (4, 2), (1, 4), (2, 99)], [0, 0, 0]),
        ([(5, 2), (2, 99)], [0, 0, 0]),  # at the end of an epoch without a rest
    ],
)
def test_another_batch_size_goes_on_in_samples(sizes, rests, workers):
    state, seen, rows = None, [], []
    for size, last in sizes:
        loader = dataloader(10, gbs=size, workers=workers)
        trainer = make(train=loader, max_epochs=3, save_interval=1, val_check_interval=0)
        if state is not None:
            trainer.load_state_dict(state)
        trainer.max_steps = min(last, trainer.max_steps)
        trainer.fit()
        state = copy.deepcopy(trainer.ckpt_callback.saves[-1].state)
        assert state["consumed_samples"] == trainer.consumed_samples
        seen += [index for batch in trainer.model.batches for index in batch]
        rows += of(trainer, "train/").values()
    generator = torch.Generator()
    expected = []
    for epoch, rest in enumerate(rests):
        order = torch.randperm(10, generator=generator.manual_seed(5 + epoch)).tolist()
        expected += order[: 10 - rest]
    assert seen == expected and trainer.epoch == 3
    ends = list(itertools.accumulate(10 - rest for rest in rests))
    for row in rows:  # "epoch" is the one that the step belongs to
        assert ends[row["epoch"] - 1] - 10 < row["consumed_samples"] <= ends[row["epoch"] - 1]


def test_an_old_checkpoint_says_its_position_by_its_counters():
    trainer = make(train=dataloader(10, gbs=2), max_epochs=3)
    trainer.load_state_dict({"step": 3, "consumed_samples": 12, "epoch": 1})
    assert (trainer.passes, trainer.used) == (1, 4)
    trainer.fit()
    assert trainer.consumed_samples == 12 + 6 + 10 and trainer.epoch == 3


def test_steps_that_the_data_do_not_reach_are_said_at_the_start(warnings):
    said = "max_steps=60 is not reached.* after step 10, .* 5 steps in an epoch.*max_epochs=12"
    for asked, expected in ((60, said), (11, "max_epochs=3"), (10, None), (-1, None)):
        warnings.clear()
        make(max_steps=asked, section="trainer.dpo").fit()
        assert len(warnings) == bool(expected)
        assert expected is None or re.search(expected, warnings[0])


def test_time_limit_saves_and_stops_without_the_end():
    trainer = make(timer=FakeRunTimer(3), val=dataloader(4, random=False))
    assert fit_until_stopped(trainer).code == ExitCode.TIME
    (save,) = trainer.ckpt_callback.saves
    assert trainer.step == 3 and not save.end and "val_loss" in save.candidates


def test_refusals():
    for settings, message in (
        ({"train": dataloader(22, random=False)}, "2 epochs need a random sampler"),
        ({"max_epochs": None}, "max_epochs=null needs max_steps"),
        ({"limit_train_batches": 0}, "leaves no batch"),
        ({"save_interval": 2.5}, "save_interval=2.5: a float is a part of an epoch"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(**settings)
    trainer = make(train=dataloader(10, gbs=2), limit_train_batches=3)
    with pytest.raises(ConfigError, match="batch has 2 items .*checkpoint 4"):
        trainer.load_state_dict({"step": 1, "consumed_samples": 4, "epoch": 0})
    trainer = make(train=dataloader(22, random=False), max_epochs=1)
    trainer.load_state_dict({"step": 5, "consumed_samples": 20, "epoch": 1})
    trainer.max_steps = 7
    with pytest.raises(UserError, match="no training data left after 20 samples"):
        trainer.fit()
