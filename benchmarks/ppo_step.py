# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole PPO step against TRL's PPO trainer: rollout, rewards, values, log-probs of policy and
reference, and the updates of policy and critic.

    OMP_NUM_THREADS=1 python benchmarks/ppo_step.py

`make bench` installs the peer, `benchmarks/peers.txt`. Both sides have a policy, a reference, a
critic and a reward model of the shape of `benchmarks/countdown.py`, in fp32 and in one process:
ours calls what the critic server calls (`CriticServerTrainer.run_inference` and `run_training`) on
the arrays that would be sent, without a server between. Its costs are in `benchmarks/wire.py`.

A step has 32 samples of 32 + 128 tokens, or of skewed lengths with at most 128, and one update of
policy and critic with micro-batches of 4. The lengths of the responses are checked.

TRL takes the policy's log-probs of the rollout from decoding. Ours computes them once more, or
with `model.ppo.rollout_logprobs=sampler` does as TRL.
"""

import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import countdown
import measure
import torch
from torch import Tensor

SAMPLES, PROMPT, MICRO_BATCH, LR = 32, 32, 4, 1e-7
LENGTHS = {
    "32 + 128 tokens": countdown.fixed_lengths(SAMPLES),
    "skewed lengths": countdown.skewed_lengths(SAMPLES),
}


# By what is added to the name of a case: `model.ppo.rollout_logprobs`.
LOGPROBS = {"": "recompute", ", log-probs from decoding": "sampler"}


class Prompts(torch.utils.data.Dataset):
    """The prompts of one step, again and again."""

    def __init__(self, lengths: Tensor, steps: int = 1):
        self.tokens, self.steps = countdown.prompts(lengths, PROMPT), steps

    def __len__(self) -> int:
        return len(self.tokens) * self.steps

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"idx": index, "input_ids": self.tokens[index % len(self.tokens)]}


# --- ours ----------------------------------------------------------------------------------------


class Silent:
    """Logger, checkpoint writer and timer of a job that keeps nothing."""

    def __getattr__(self, _name: str) -> Callable[..., dict]:
        return lambda *_arguments, **_named: {}


class Ready:
    """The outcome of a request that was computed at once."""

    pending = ()

    def __init__(self, outcome: Any):
        self.outcome = outcome

    def result(self) -> Any:
        return self.outcome

    scores = result


class CriticInProcess(Silent):
    """A `Critic` that calls the server's trainer."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def infer_rm_critic(self, rollout: dict[str, Tensor]) -> Ready:
        from nemo_aligner.core.types import Scores
        from nemo_aligner.servers.scoring_clients import scoring_payload

        reply = self.trainer.run_inference(scoring_payload(rollout, None))
        rewards, values = (torch.from_numpy(reply[name]) for name in ("rewards", "values"))
        columns = rollout["response_tokens"].size(1) - 1
        values = torch.nn.functional.pad(values, (0, max(columns - values.size(1), 0)))
        return Ready(Scores(rewards.flatten(), values[:, :columns]))

    def train(self, batch: dict[str, Tensor]) -> Ready:
        from nemo_aligner.servers.critic_client import training_payload

        return Ready(float(self.trainer.run_training(training_payload(batch))["loss_mean"][0]))


def write_reward_model(at: countdown.Folders, folder: Path) -> countdown.Folders:
    """A reward model with the same layers and a random head, in both forms."""
    from transformers import AutoModelForSequenceClassification

    from nemo_aligner.convert import conversions as convert

    found = countdown.Folders(folder / "hugging_face", folder / "nemo")
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_pretrained(at.hugging_face, num_labels=1)
    model.save_pretrained(found.hugging_face)
    countdown.write_tokenizer(found.hugging_face)
    options = convert.Options(dtype="float32", progress=False)
    convert.to_nemo(found.hugging_face, found.nemo, options)
    return found


def build_critic(reward_model: countdown.Folders) -> CriticInProcess:
    """Critic and reward model."""
    from omegaconf import OmegaConf

    from nemo_aligner.algorithms.critic_server_trainer import CriticServerTrainer
    from nemo_aligner.launch.model_loading import load_from_nemo
    from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel

    keys = countdown.model_keys(**_sizes())
    del keys.ppo
    model = load_from_nemo(MegatronGPTCriticModel, keys, None, restore_path=reward_model.nemo)
    model.set_reward_model()
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=10**6)
    trainer = CriticServerTrainer(
        cfg=OmegaConf.create({"combine_rm_and_critic_server": True}),
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        logger=Silent(),
        ckpt_callback=Silent(),
        tokenize_func=model.tokenize,
        gbs=SAMPLES,
        model_forward_micro_batch_size=SAMPLES,
    )
    return CriticInProcess(trainer)


def _sizes() -> dict[str, Any]:
    optim = {"name": "distributed_fused_adam", "lr": LR, "sched": {"name": "constant"}}
    return {"micro_batch_size": MICRO_BATCH, "global_batch_size": SAMPLES, "optim": optim}


def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """An `InferenceBatch`."""
    return {
        "text": torch.stack([item["input_ids"] for item in items]),
        "length": torch.full((len(items),), PROMPT),
        "loss_multiplier": torch.ones(len(items)),
        "idx": torch.tensor([item["idx"] for item in items]),
    }


def build_ours(
    at: countdown.Folders, reward_model: countdown.Folders
) -> dict[str, Callable[[], object]]:
    """One step of `PPOTrainer` with each kind of lengths."""
    from omegaconf import OmegaConf

    from nemo_aligner.algorithms.ppo import PPOTrainer
    from nemo_aligner.data.nlp.builders import build_dataloader
    from nemo_aligner.data.nlp.samplers import get_batch_iterator_cls

    actor = countdown.load_actor(at, **_sizes())
    actor.set_reference_policy()
    optimizer, scheduler = actor.setup_megatron_optimization(max_steps=10**6)
    critic = build_critic(reward_model)
    whole = OmegaConf.create({"model": {"seed": 1234, "data": {"num_workers": 0}}})
    settings = {"max_steps": 1000, "initial_policy_kl_penalty": 0.05, "model_gbs": SAMPLES}
    functions: dict[str, Callable[[], object]] = {}
    for (kind, lengths), (suffix, rollout_logprobs) in itertools.product(
        LENGTHS.items(), LOGPROBS.items()
    ):
        prompts = Prompts(lengths, steps=1000)

        def loader(consumed_samples: int, prompts: Prompts = prompts) -> Any:
            sizes = {"mbs": SAMPLES, "gbs": SAMPLES, "load_gbs": False}
            return build_dataloader(
                whole, prompts, consumed_samples, use_random_sampler=False, **sizes
            )

        trainer = PPOTrainer(
            cfg=OmegaConf.create(settings),
            model=actor,
            optimizer=optimizer,
            scheduler=scheduler,
            train_dataloader_builder=loader,
            val_dataloader_builder=loader,
            collate_fn=collate,
            rm_critic=critic,
            batch_iterator_cls=get_batch_iterator_cls(OmegaConf.create({"use_flask": False})),
            logger=Silent(),
            ckpt_callback=Silent(),
            run_timer=Silent(),
            max_response_length=countdown.LONGEST,
            rollout_logprobs=rollout_logprobs,
        )
        # The policy of all but the first trainer has left the reference.
        trainer.step = len(functions)

        def step(trainer: Any = trainer, lengths: Tensor = lengths) -> None:
            metrics = trainer.run_step()
            trainer.step += 1
            found = metrics["response_lengths"] - PROMPT
            assert abs(found - float(lengths.float().mean())) < 1e-3, found

        functions[kind + suffix] = step
    return functions


# --- the peer ------------------------------------------------------------------------------------


def build_peer(
    at: countdown.Folders, reward_model: countdown.Folders, peers: str, output: str
) -> dict[str, Callable[[], object]]:
    """One step of TRL's trainer with each kind of lengths."""
    sys.path.insert(0, peers)
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(at.hugging_face, padding_side="left")

    def head() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(reward_model.hugging_face)

    functions: dict[str, Callable[[], object]] = {}
    for name, lengths in LENGTHS.items():
        config = PPOConfig(
            output_dir=output,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            optim="adamw_torch_fused",
            learning_rate=LR,
            weight_decay=0.1,
            max_grad_norm=1.0,
            lr_scheduler_type="constant",
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=SAMPLES // MICRO_BATCH,
            num_mini_batches=1,
            num_ppo_epochs=1,
            total_episodes=SAMPLES,
            local_rollout_forward_batch_size=SAMPLES,
            response_length=int(lengths.max()),
            stop_token="eos",
            kl_coef=0.05,
            num_sample_generations=0,
            gradient_checkpointing=False,
        )
        trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer,
            model=countdown.load_peer(at),
            ref_model=countdown.load_peer(at),
            reward_model=head(),
            value_model=head(),
            train_dataset=Prompts(lengths),
            eval_dataset=Prompts(lengths),
            data_collator=lambda items: {
                "input_ids": torch.stack([item["input_ids"] for item in items])
            },
        )

        def step(trainer: Any = trainer) -> None:
            trainer.train()
            # Each response has one end; what follows it is padding.
            ends = trainer.state.log_history[-1]["val/num_eos_tokens"]
            assert ends == SAMPLES, ends

        functions[name] = step
    return functions


def main() -> None:
    parser = measure.arguments(__doc__, repeats=2)
    parser.add_argument("--peers", default=str(Path(sys.prefix, "peers")), help="where TRL lies")
    args = parser.parse_args()
    if not Path(args.peers, "trl").is_dir():
        parser.error(f"{args.peers} has no trl: run `make bench`, or name its folder by --peers")
    rows = []
    with countdown.folders() as at, tempfile.TemporaryDirectory() as folder:
        reward_model = write_reward_model(at, Path(folder))
        with (
            measure.Side(build_ours, at, reward_model) as ours,
            measure.Side(build_peer, at, reward_model, args.peers, folder) as peer,
        ):
            for kind in LENGTHS:
                # The peer has one way, which is measured once.
                cases = {kind + suffix: kind + suffix for suffix in LOGPROBS} | {"peer": kind}
                sides = dict.fromkeys(cases, ours) | {"peer": peer}
                figures = measure.in_turns(sides, cases, args.repeats)
                for name in [kind + suffix for suffix in LOGPROBS]:
                    both = {"ours": figures[name], "peer": figures["peer"]}
                    rows.append(measure.pair_row(f"32 samples, {name}, 32", both))
    measure.report("ppo_step", "A PPO step, against TRL", rows, args.json)


if __name__ == "__main__":
    main()
