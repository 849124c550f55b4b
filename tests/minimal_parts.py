# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts as a user writes them for NeMo-Aligner: the methods and arguments of its interface, and
nothing else. `run` drives a trainer with them.
"""

import collections
import functools
import types

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from nemo_aligner.core.endings import JobStopped
from nemo_aligner.data.nlp.samplers import (
    DefaultBatchIterator,
    MegatronPretrainingBatchSampler,
    MegatronPretrainingSampler,
)
from nemo_aligner.models.alignable_interface import AlignableGenerativeInterface
from nemo_aligner.parallel import parallel_state
from tests.ppo_fakes import NUM_PROMPTS, FakeTokenizer, sampler_of

NEW_TOKENS = 3


class Prompts(torch.utils.data.Dataset):
    """What NeMo-Aligner's data set gives: the prompt's number is not in it."""

    def __len__(self):
        return NUM_PROMPTS

    def __getitem__(self, i):
        return {"text": torch.arange(2) + i + 1, "length": 2, "loss_multiplier": True}


def collate(items):
    text = torch.zeros(len(items), 2 + NEW_TOKENS, dtype=torch.long)
    text[:, :2] = torch.stack([item["text"] for item in items])
    return {"text": text, "length": torch.full((len(items),), 2)}


class Model(AlignableGenerativeInterface):
    """log-prob of a token: -(its id % 7) * weight."""

    def __init__(self, section):
        self.section = section
        self.cfg = OmegaConf.create({"seed": 1, "global_batch_size": 4})
        self.tokenizer = FakeTokenizer()
        self.seen = collections.Counter()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def prepare_for_inference(self):
        self.training = False

    def finish_inference(self):
        self.training = True

    def prepare_for_training(self): ...

    def finish_training(self): ...

    def prepare_for_training_step(self):
        self.weight.grad = None

    def finish_training_step(self):
        dist.all_reduce(self.weight.grad, group=parallel_state.get_data_parallel_group())

    def infer(self, inference_batch):
        tokens = inference_batch["text"].clone()
        for row in tokens:
            self.seen[int(row[0])] += 1  # the responses to a prompt differ
            row[2:] = row[1] * self.seen[int(row[0])] + torch.arange(1, 1 + NEW_TOKENS)
        lengths = inference_batch["length"]
        rollout = {"response_tokens": tokens, "response_lengths": lengths + NEW_TOKENS}
        rollout["prompt_lengths"] = lengths
        # NeMo-Aligner's policy for rejection sampling gives no `is_end`.
        return rollout if self.section == "rs" else rollout | {"is_end": lengths > 0}

    def get_inference_log_probs(self, response_tokens, forward_micro_batch_size=None):
        return self.log_probs(response_tokens, self.weight.detach())

    def get_init_policy_logprobs(self, response_tokens):
        return self.log_probs(response_tokens, 0.5)

    def log_probs(self, tokens, weight):
        return -(tokens[:, 1:] % 7) * weight

    def get_loss_and_metrics(self, batch, forward_only):
        if self.section == "sft":
            loss = ((self.weight - batch) ** 2).sum() / 4
        else:
            log_probs = self.log_probs(batch["response_tokens"], self.weight)
            gain = batch["advantages"] if self.section == "ppo" else 1.0
            if self.section == "reinforce":
                gain = (batch["rewards_with_kl"] - batch["baseline"])[:, None]
            loss = -(log_probs * gain * batch["mask"]).sum() / 100
        if not forward_only:
            loss.backward()
        loss = loss.detach().clone()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return float(loss), {}


class Optimizer(torch.optim.SGD):
    """Says of a step what Megatron's says; it need not clip."""

    config = types.SimpleNamespace(clip_grad=0.0)

    def step(self):
        super().step()
        return True, None, None


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """Of the library's own interface: NeMo-Aligner's scripts get it from the model."""

    def step(self, increment=1):
        super().step()


def future(result):
    return types.SimpleNamespace(result=result)


class CriticClient:
    """Of a reward model a tensor [b, 1] of rewards, or an error on one rank; and of a critic."""

    def __init__(self, fails_at=None):
        self.left, self.waited = fails_at, []

    def infer_rm(self, rollout_batch):
        if self.left is not None:
            self.left -= 1
        fails = self.left == 0 and dist.get_rank() == dist.get_world_size() - 1
        rewards = (rollout_batch["response_tokens"] % 5).float().mean(1, keepdim=True)
        return future(lambda: 1 / 0 if fails else rewards)

    def infer_rm_critic(self, rollout_batch):
        rewards = self.infer_rm(rollout_batch)
        values = rollout_batch["response_tokens"][:, :-1] / 50
        return future(lambda: (rewards.result().flatten(), values))

    def train(self, rollout_batch):
        if dist.get_rank() != 0:
            return None
        return future(lambda: self.waited.append("train") or {"loss_mean": torch.tensor([0.25])})

    def save(self):
        return future(lambda: self.waited.append("save") or dist.barrier())


class Checkpoints:
    def __init__(self, fails=False):
        self.saves, self.fails = [], fails

    def custom_save(self, monitor_candidates, is_train_end=False):
        if self.fails and dist.get_rank() == dist.get_world_size() - 1:
            raise OSError("no space")
        numbers = {key: value.item() for key, value in monitor_candidates.items()}
        self.saves.append((is_train_end, numbers))


class Logger:
    def __init__(self):
        self.names = set()

    def log_metrics(self, metrics, step=None, prefix=""):
        self.names |= {prefix + key for key in metrics}

    def log_table(self, key, dataframe, step):
        self.names.add(key)

    def finalize(self):
        self.names.add("finalized")


class Clock:
    """Time is over on the last rank alone: clocks differ."""

    def __init__(self, steps):
        self.steps = steps

    def start_time(self): ...

    def is_finished(self):
        self.steps -= 1
        return self.steps < 0 and dist.get_rank() == dist.get_world_size() - 1


def loader(consumed_samples=0):
    sampler = sampler_of(MegatronPretrainingSampler, 8, 2, consumed_samples)
    return types.SimpleNamespace(batch_sampler=sampler, dataset=Prompts())


def run(section, steps=9, client=None, checkpoints=None):
    """Train with `trainer.<section>`: weight, saves, names of what was logged, what was waited for
    of the critic, how the job ended.
    """
    from nemo_aligner.algorithms import ppo, reinforce, rs, supervised

    model, logger, checkpoints = Model(section), Logger(), checkpoints or Checkpoints()
    client = client or CriticClient()
    optimizer = Optimizer([model.weight], lr=0.1)
    scheduler = Schedule(optimizer, lambda step: 1 / (1 + step))
    cfg = {"val_check_interval": 2, "save_interval": 2, "model_gbs": 4, "model_mbs": 2}
    cfg |= {"num_rollouts_per_prompt": 2} if section == "reinforce" else {}
    cfg = OmegaConf.create(cfg | {"max_epochs": 1, "max_steps": -1})
    first = cfg, model, optimizer, scheduler
    last = logger, checkpoints, Clock(steps)
    if section in ("ppo", "reinforce"):
        cls = {"ppo": ppo.PPOTrainer, "reinforce": reinforce.ReinforceTrainer}[section]
        trainer = cls(*first, loader, loader, collate, client, DefaultBatchIterator, *last)
    elif section == "rs":
        samplers = [loader().batch_sampler for _ in range(2)]
        make = functools.partial(torch.utils.data.DataLoader, Prompts(), collate_fn=collate)
        loaders = [make(batch_sampler=sampler) for sampler in samplers]
        trainer = rs.RSTrainer(*first, *loaders, *last, 4, 1, client)
    else:
        sampler = sampler_of(MegatronPretrainingBatchSampler, 4, 2, total=12)
        numbers = torch.utils.data.DataLoader(torch.arange(12.0), batch_sampler=sampler)
        trainer = supervised.SupervisedTrainer(*first, numbers, numbers, numbers, *last)
    ending = "finished"
    try:
        trainer.fit()
    except JobStopped as stopped:
        ending = stopped.reason
    logged = {name for name in logger.names if "/" not in name or "timers" not in name}
    told = {"weight": model.weight.item(), "saves": checkpoints.saves, "logged": logged}
    told |= {"waited": client.waited, "ending": ending}
    return told | {"step": trainer.state_dict()["step"]}
