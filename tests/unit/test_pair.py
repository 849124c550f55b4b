# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""An actor and a critic that died at any moment of a save, or one of whose checkpoints is damaged,
resume from the same step, with weights that belong together.

Actor and critic are two small models of this process that learn side by side; the critic is
reached as the client would reach it.
"""

import pytest
from omegaconf import OmegaConf

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.rollout_job import load_state_of_pair
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from tests.cases import some_of
from tests.tiny_models import tiny_config
from tests.unit.test_checksums import Death, die_at, flip
from tests.unit.test_megatron_gpt_model import train_step

pytestmark = pytest.mark.slow

CONFIG = OmegaConf.create({"exp_manager": {"resume_if_exists": True}})


class Side:
    """A job with a model that learns: one update per step of the actor."""

    keep = 0  # checkpoints beside the last two

    def __init__(self, folder, tokenizer_dir, counter, seed):
        self.model = MegatronGPTModel(tiny_config(tokenizer_dir, num_layers=1, seed=seed))
        self.training = self.model.setup_megatron_optimization(max_steps=20)
        self.callback = CheckpointCallback(
            folder, self.model, *self.training, name="x", save_top_k=self.keep
        )
        self.counter, self.step, self.losses = counter, 0, {}

    def learn(self):
        self.step += 1
        self.losses[self.step] = train_step(self.model, *self.training)

    def save(self):
        self.callback.custom_save({"step": self.step}, trainer_state={self.counter: self.step})

    def continue_from(self, state):
        self.step = 0 if state is None else state[self.counter]


class Critic(Side):
    """What the client shows of a critic server."""

    def __init__(self, folder, tokenizer_dir):
        super().__init__(folder / "critic", tokenizer_dir, "actor_step", seed=2)
        self.continue_from(self.callback.load_latest())
        if not self.callback.saved_at("actor_step"):
            self.save()

    def status(self):
        return {"checkpoints": self.callback.saved_at("actor_step")}

    def go_to(self, actor_step):
        try:
            self.continue_from(self.callback.load_at("actor_step", actor_step))
        except UserError:
            assert actor_step not in self.status()["checkpoints"]
            return False
        return True


class Pair:
    """Both jobs, started with the same commands as ever."""

    def __init__(self, folder, tokenizer_dir):
        self.critic = Critic(folder, tokenizer_dir)
        self.actor = Side(folder / "actor", tokenizer_dir, "step", seed=1)
        self.actor.continue_from(load_state_of_pair(CONFIG, self.actor.callback, self.critic))
        assert self.actor.step == self.critic.step

    def run(self, steps, interval=2):
        while self.actor.step < steps:
            self.critic.learn()
            self.actor.learn()
            if self.actor.step % interval == 0:
                self.critic.save()
                self.actor.save()
        return self


@pytest.fixture(scope="module")
def whole(tiny_tokenizer_dir, tmp_path_factory):
    """Losses of six undisturbed steps."""
    pair = Pair(tmp_path_factory.mktemp("whole"), tiny_tokenizer_dir).run(6)
    return pair.actor.losses, pair.critic.losses


def assert_same_bits(pair, whole):
    for side, losses in zip((pair.actor, pair.critic), whole, strict=True):
        assert side.losses and {step: losses[step] for step in side.losses} == side.losses


@pytest.mark.parametrize(
    "mark",
    # In `make test` a save of the critic and one of the actor.
    [pytest.param(n, marks=[pytest.mark.full] * (n not in (2, 5))) for n in range(2, 8)],
    ids=lambda n: f"at mark {n}",
)
def test_death_in_any_save_is_healed_by_the_same_command(
    tiny_tokenizer_dir, tmp_path, monkeypatch, whole, mark
):
    """Mark 1 is that of the critic's first weights; then critic and actor take turns."""
    with monkeypatch.context() as patch:
        die_at(patch, "nemo_aligner.checkpoint.folders.mark", mark)
        with pytest.raises(Death):
            Pair(tmp_path, tiny_tokenizer_dir).run(6)
    saved_by_both = 2 * ((mark - 2) // 2)
    pair = Pair(tmp_path, tiny_tokenizer_dir)
    assert pair.actor.step == saved_by_both
    pair.run(6)
    assert_same_bits(pair, whole)
    for side in (pair.actor, pair.critic):
        assert sorted(side.callback.saved_at(side.counter)) == [4, 6]


def test_death_again_and_again_with_another_interval(
    tiny_tokenizer_dir, tmp_path, monkeypatch, whole
):
    """The actor dies in its save of step 4, then of step 3, then of step 3 again: what the critic
    has of step 4 belongs to another run, and pushes nothing out.
    """
    pair = Pair(tmp_path, tiny_tokenizer_dir).run(2)
    for interval, step in ((2, 4), (3, 3), (3, 3)):
        with monkeypatch.context() as patch:
            die_at(patch, "nemo_aligner.checkpoint.folders.mark", 2)
            with pytest.raises(Death):
                pair.run(6, interval)
        pair = Pair(tmp_path, tiny_tokenizer_dir)
        assert pair.actor.step == 2 and step in pair.critic.status()["checkpoints"]
    pair.run(6)
    assert_same_bits(pair, whole)
    assert sorted(pair.critic.status()["checkpoints"]) == [4, 6]


@some_of("side", ["actor", "critic"])
def test_a_damaged_checkpoint_takes_the_pair_to_the_one_before(
    tiny_tokenizer_dir, tmp_path, whole, side
):
    """Found by the actor when it chooses, by the critic when it starts."""
    Pair(tmp_path, tiny_tokenizer_dir).run(4)
    damaged = tmp_path / side / "checkpoints/checkpoint-step=4"
    flip(damaged / "weights/__0_0.distcp", 20000)
    pair = Pair(tmp_path, tiny_tokenizer_dir)
    assert pair.actor.step == 2 and damaged.with_name(damaged.name + ".damaged").is_dir()
    assert_same_bits(pair.run(6), whole)


def test_damage_that_the_critic_finds_later(tiny_tokenizer_dir, tmp_path, monkeypatch, whole):
    """The actor dies in its save of step 6 and asks for 4, which is damaged."""
    monkeypatch.setattr(Side, "keep", -1)
    with monkeypatch.context() as patch:
        die_at(patch, "nemo_aligner.checkpoint.folders.mark", 7)
        with pytest.raises(Death):
            Pair(tmp_path, tiny_tokenizer_dir).run(6)
    flip(tmp_path / "critic/checkpoints/checkpoint-step=4/weights/__0_0.distcp", 20000)
    pair = Pair(tmp_path, tiny_tokenizer_dir)
    assert pair.actor.step == 2
    assert_same_bits(pair.run(6), whole)


@some_of("new", ["actor", "critic"])
def test_a_job_in_another_folder_takes_nothing_from_the_other(tiny_tokenizer_dir, tmp_path, new):
    """What two saves and more have learned is not given up for a job that starts anew."""
    Pair(tmp_path, tiny_tokenizer_dir).run(6)
    (tmp_path / new).rename(tmp_path / "elsewhere")
    critic = Critic(tmp_path, tiny_tokenizer_dir)
    actor = Side(tmp_path / "actor", tiny_tokenizer_dir, "step", seed=1)
    actor.continue_from(load_state_of_pair(CONFIG, actor.callback, critic))
    assert (actor.step, critic.step) == ((0, 6) if new == "actor" else (6, 0))
    kept = [4, 6] if new == "critic" else []
    assert sorted(actor.callback.saved_at("step")) == kept
