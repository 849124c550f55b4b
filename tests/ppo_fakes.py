# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A policy, a critic and their surroundings in a few lines each: enough to run a whole
`PPOTrainer` in milliseconds.

The policy has one weight. Its text depends on the sample seeds alone, its log-probs on tokens and
weight. Everything that the trainer calls is appended to `events`, so a test can check the order of
calls.
"""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.algorithms.ppo import PPOTrainer
from nemo_aligner.core.endings import JobStopped
from nemo_aligner.core.types import Scores
from nemo_aligner.data.nlp.samplers import DefaultBatchIterator, MegatronPretrainingSampler
from nemo_aligner.models.alignable_interface import AlignableGenerativeInterface
from nemo_aligner.parallel import parallel_state

EOS = 0
VOCAB = 50
NUM_PROMPTS = 24
MAX_NEW_TOKENS = 5


class Prompts(torch.utils.data.Dataset):
    """Prompt number i has 2 + i % 3 tokens."""

    def __len__(self):
        return NUM_PROMPTS

    def __getitem__(self, i):
        return {"idx": i, "tokens": torch.arange(2 + i % 3) + i + 1}


def collate(items):
    longest = max(len(item["tokens"]) for item in items)
    text = torch.full((len(items), longest + MAX_NEW_TOKENS), EOS)
    for row, item in zip(text, items, strict=True):
        row[: len(item["tokens"])] = item["tokens"]
    lengths = torch.tensor([len(item["tokens"]) for item in items])
    batch = {"text": text, "length": lengths, "loss_multiplier": torch.ones(len(items))}
    return batch | {"idx": torch.tensor([item["idx"] for item in items])}


def sampler_of(cls, global_batch_size, micro_batch_size, consumed_samples=0, total=NUM_PROMPTS):
    """A sampler of the project for this data-parallel rank."""
    ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    given = total, consumed_samples, micro_batch_size, *ranks
    return cls(*given, global_batch_size=global_batch_size, seed=5)


def dataloader_builder(
    global_batch_size,
    consumed_samples,
    micro_batch_size=2,
    seen=None,
    cls=MegatronPretrainingSampler,
):
    if seen is not None:
        seen.append(consumed_samples)
    sampler = sampler_of(cls, global_batch_size, micro_batch_size, consumed_samples)
    return SimpleNamespace(batch_sampler=sampler, dataset=Prompts())


class FakeTokenizer:
    eos_id = EOS

    def ids_to_text(self, ids):
        return " ".join(map(str, ids))


def sum_over_ranks(total):
    if parallel_state.get_data_parallel_world_size() > 1:
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total


class FakePolicy:
    """log-prob of token t is -(t % 7 + 1) / 10 * (1 + weight)."""

    infer_all = AlignableGenerativeInterface.infer_all

    def __init__(self, events):
        self.cfg = OmegaConf.create({"seed": 1234})
        self.tokenizer = FakeTokenizer()
        self.events = events
        self.weight = 0.0
        self.reference_offset = self.sampler_offset = 0.0
        self.batches = []

    def __getattr__(self, name):
        if name.startswith(("prepare_for_", "finish_")):
            return lambda: self.events.append(name)
        raise AttributeError(name)

    def infer(self, batch):
        self.events.append("infer")
        tokens, prompt_lengths = batch["text"].clone(), batch["length"]
        lengths = prompt_lengths + 1 + batch["sample_seeds"].abs() % MAX_NEW_TOKENS
        for row, prompt_length, length, seed in zip(
            tokens, prompt_lengths, lengths, batch["sample_seeds"], strict=True
        ):
            generator = torch.Generator().manual_seed(int(seed))
            new = torch.randint(1, VOCAB, (MAX_NEW_TOKENS,), generator=generator)
            row[prompt_length:length] = new[: length - prompt_length]
        rollout = {"response_tokens": tokens[:, : int(lengths.max())], "response_lengths": lengths}
        rollout |= {"prompt_lengths": prompt_lengths, "is_end": lengths % 2 == 0}
        if batch.get("return_logprobs"):
            given = rollout["response_tokens"], self.weight + self.sampler_offset
            rollout["sampling_logprobs"] = self._logprobs(*given)
        return rollout

    def _logprobs(self, tokens, weight):
        logprobs = -(tokens[:, 1:] % 7 + 1) / 10 * (1 + weight)
        # What pads hold must not matter.
        return logprobs.masked_fill(tokens[:, 1:] == EOS, torch.nan)

    def get_inference_log_probs(
        self, response_tokens, forward_micro_batch_size=None, response_lengths=None
    ):
        self.events.append("logprobs")
        return self._logprobs(response_tokens, self.weight)

    starts_as_reference = True

    def check_reference_policy(self):
        """There is a reference."""

    def get_init_policy_logprobs(self, response_tokens, response_lengths=None):
        self.events.append("init_logprobs")
        return self._logprobs(response_tokens, 0.0) + self.reference_offset

    def get_loss_and_metrics(self, batch, forward_only):
        assert not forward_only
        self.events.append("update")
        self.batches.append({key: value.clone() for key, value in batch.items()})
        return self.loss(batch, batch["mask"].bool())

    def loss(self, batch, mask):
        # A policy-gradient-like number: any change of the data changes the weight.
        gains = batch["advantages"] * batch["prev_logprobs"].exp()
        gradient = torch.where(mask, gains, 0).double().sum()
        moved = self._logprobs(batch["response_tokens"], self.weight) - batch["prev_logprobs"]
        kl = torch.where(mask, moved.exp() - 1 - moved, 0).double().sum()
        total = torch.stack([gradient, kl, mask.double().sum()])
        self.gradient, kl, count = sum_over_ranks(total).tolist()
        return self.gradient, {"ppo_ratio": 1.0, "approx_kl": kl / count}


class FakeOptimizer:
    """Plain gradient descent on the policy's weight, with the face of Megatron's optimizer."""

    def __init__(self, policy, events):
        self.policy, self.events = policy, events
        self.param_groups = [{"lr": 0.01}]
        self.config = SimpleNamespace(clip_grad=0.0)

    def zero_grad(self, set_to_none=True):
        self.policy.gradient = 0.0

    def step(self):
        self.events.append("optimizer_step")
        self.policy.weight -= self.param_groups[0]["lr"] * self.policy.gradient
        return True, abs(self.policy.gradient), None


class FakeScheduler:
    def __init__(self):
        self.num_steps = 0

    def step(self, increment=1):
        self.num_steps += increment


class FakeFuture:
    """Holds a result or an error; says in `events` when somebody waits for it."""

    def __init__(self, events, name, value):
        self.events, self.name, self.value = events, name, value
        self.pending = ()

    def result(self):
        self.events.append(self.name)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    scores = result


class FakeCritic:
    """Value of a position: its token / 10; reward: mean of all tokens / 10."""

    def __init__(self, events, fail_at_train=None):
        self.events = events
        self.fail_at_train = fail_at_train
        self.train_batches = []
        self.saved_steps = []
        self.checked = []

    def infer_rm_critic(self, rollout_batch):
        self.events.append("critic_infer")
        tokens = rollout_batch["response_tokens"]
        values = (tokens[:, :-1] / 10).masked_fill(tokens[:, :-1] == EOS, torch.nan)
        rewards = tokens.sum(-1) / rollout_batch["response_lengths"] / 10
        parts = {"kind": rewards, "terse": -rollout_batch["response_lengths"].float()}
        return FakeFuture(self.events, "critic_infer_result", Scores(rewards, values, parts))

    def check_status(self, expected_actor_step, checkpoints):
        self.checked.append((expected_actor_step, checkpoints))

    def train(self, data):
        self.events.append("critic_train")
        self.train_batches.append({key: value.clone() for key, value in data.items()})
        failed = self.fail_at_train == len(self.train_batches) - 1
        error = RuntimeError("remote traceback: critic lost")
        value = error if failed else 0.25 * len(self.train_batches)
        return FakeFuture(self.events, "critic_train_result", value)

    def save(self, actor_step=None):
        self.events.append("critic_save")
        self.saved_steps.append(actor_step)
        return FakeFuture(self.events, "critic_save_result", None)


class FakeRewards(FakeCritic):
    """The same rewards, without values, in the place of a critic."""

    def infer_rm_critic(self, rollout_batch):
        future = super().infer_rm_critic(rollout_batch)
        future.value = Scores(future.value.rewards, None, future.value.parts)
        return future

    def train(self, data):
        super().train(data)
        return FakeFuture(self.events, "critic_train_result", None)


class FakeTeacher:
    """Its log-probs depend on the tokens; it has none of pads."""

    def __init__(self, events):
        self.events = events

    def beside(self, scores, rollout_batch):
        self.events.append("teacher")
        tokens = rollout_batch["response_tokens"][:, 1:]
        found = (-(tokens % 5 + 1) / 8).masked_fill(tokens == EOS, torch.nan)
        scores.value = dataclasses.replace(scores.value, teacher_logprobs=found)
        return scores


class FakeLogger:
    def __init__(self):
        self.metrics, self.tables, self.phases, self.finalized = [], [], [], 0

    def log_metrics(self, metrics, step=None, prefix=""):
        self.metrics += [(f"{prefix}{key}", step, value) for key, value in metrics.items()]

    def log_table(self, key, dataframe, step):
        self.tables.append((key, step, dataframe.to_dict("records")))

    def log_samples(self, name, rows, step):
        if name == "timeline":
            self.phases += [(step, row["phase"]) for row in rows]
        else:
            self.tables.append((name, step, rows))

    def finalize(self):
        self.finalized += 1

    def series(self, name):
        return [(step, value) for key, step, value in self.metrics if key == name]


class FakeCheckpoints:
    is_saving = False  # True: saves go on in the background

    def __init__(self, events):
        self.events, self.saved = events, []

    def check_save(self):
        """Does not come to its end by itself."""

    def finish_save(self):
        if self.is_saving:
            self.events.append("actor_saved")

    def finish_export(self):
        self.events.append("finish_export")

    def saved_at(self, counter):
        return {state[counter]: f"step={state[counter]}" for _, _, state in self.saved}

    def custom_save(self, monitor_candidates, is_train_end=False, trainer_state=None):
        self.events.append("actor_save")
        self.saved.append((monitor_candidates, is_train_end, trainer_state))


def fit_until_stopped(trainer) -> JobStopped:
    """Train until the trainer leaves before its last step; why it does."""
    with pytest.raises(JobStopped) as stopped:
        trainer.fit()
    return stopped.value


def stopped_and_resumed(**settings):
    """The trainer that goes on after one that was stopped by its first step, when it has ended."""
    first = make_trainer(time_limit=1, **settings)
    fit_until_stopped(first)
    second = make_trainer(**settings)
    second.model.weight = first.model.weight
    second.load_state_dict(first.ckpt_callback.saved[-1][2])
    second.fit()
    return second


class FakeRunTimer:
    """Time is up after `limit` questions."""

    def __init__(self, limit=None):
        self.limit, self.started, self.asked = limit, 0, 0

    def start_time(self):
        self.started += 1

    def is_finished(self):
        self.asked += 1
        return self.limit is not None and self.asked >= self.limit


def config(**changes):
    defaults = {"critic_warmup_steps": 0, "max_epochs": 1, "max_steps": -1, "ppo_epochs": 1}
    defaults |= {"val_check_interval": 0, "save_interval": 0, "gradient_clip_val": 1.0}
    defaults |= {"initial_policy_kl_penalty": 0.01, "use_absolute_kl": False}
    defaults |= {"discount_factor": 1.0, "gae_lambda": 0.95, "normalize_advantages": True}
    defaults |= {"rollout_batch_seq_length": None, "alarms": None, "model_gbs": 4, "model_mbs": 2}
    return OmegaConf.create(defaults | changes)


def among_fakes(trainer_class, policy, changes, time_limit=None, **parts):
    """A trainer among fakes, `events` its record of calls."""
    trainer = trainer_class(
        cfg=config(**changes),
        model=policy,
        optimizer=FakeOptimizer(policy, policy.events),
        scheduler=FakeScheduler(),
        logger=FakeLogger(),
        ckpt_callback=FakeCheckpoints(policy.events),
        run_timer=FakeRunTimer(time_limit),
        **parts,
    )
    trainer.events = policy.events
    return trainer


def builders(rollout_size, micro_batch_size) -> dict:
    """Of data loaders for 24 prompts."""
    build = functools.partial(dataloader_builder, micro_batch_size=micro_batch_size)
    sizes = {"train_dataloader_builder": rollout_size, "val_dataloader_builder": 4}
    return {name: functools.partial(build, size) for name, size in sizes.items()}


def make_trainer(
    *,
    rollout_size=8,
    micro_batch_size=2,
    fail_at_train=None,
    time_limit=None,
    builder=None,
    has_validation=True,
    **changes,
):
    """24 prompts, rollouts of 8, global batches of 4. `changes`: of the section, and of some
    arguments of the trainer.
    """
    events = []
    critic_cls = FakeCritic if changes.get("advantage_estimator", "gae") == "gae" else FakeRewards
    parts = {"num_rollouts_per_prompt": 1, "max_response_length": MAX_NEW_TOKENS}
    parts |= {"kl_loss_coef": 0.0, "rollout_logprobs": "recompute", "reward_weights": ()}
    parts = {name: changes.pop(name, default) for name, default in parts.items()}
    parts |= builders(rollout_size, micro_batch_size)
    parts |= {"train_dataloader_builder": builder} if builder else {}
    parts |= {} if has_validation else {"val_dataloader_builder": None}
    parts |= {"collate_fn": collate, "batch_iterator_cls": DefaultBatchIterator}
    parts["rm_critic"] = critic_cls(events, fail_at_train)
    parts["teacher"] = FakeTeacher(events) if changes.get("teacher_kl_coef") else None
    return among_fakes(PPOTrainer, FakePolicy(events), changes, time_limit, **parts)
