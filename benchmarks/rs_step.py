# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole step of rejection sampling against a loop written with Hugging Face's parts: 4 responses
to each of 8 prompts, their rewards, and one update on the best response to each.

    OMP_NUM_THREADS=1 python benchmarks/rs_step.py

Policy and reward model have the shape of `benchmarks/countdown.py`, in fp32 and in one process:
ours calls what the reward server calls, without a server between. All responses have 128 tokens,
or skewed lengths of at most 128. Both decode 16 samples at a time.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import countdown
import measure
import torch
from ppo_step import LR, MICRO_BATCH, PROMPT, Prompts, Ready, Silent, collate, write_reward_model
from torch import Tensor

PROMPTS, COPIES = 8, 4
LENGTHS = {
    "32 + 128 tokens": countdown.fixed_lengths(PROMPTS),
    "skewed lengths": countdown.skewed_lengths(PROMPTS),
}


class RewardInProcess(Silent):
    """A `RewardSource` that calls the model."""

    def __init__(self, model: Any):
        self.model = model

    def infer_rm(self, rollout: dict[str, Tensor]) -> Ready:
        from nemo_aligner.core.types import Scores

        samples = rollout["response_tokens"], rollout["response_lengths"]
        return Ready(Scores(torch.as_tensor(self.model.infer(samples)).flatten(), None))


def build_ours(
    at: countdown.Folders, reward_model: countdown.Folders
) -> dict[str, Callable[[], object]]:
    """One step of `RSTrainer` with each kind of lengths."""
    from omegaconf import OmegaConf

    from nemo_aligner.algorithms.rs import RSTrainer
    from nemo_aligner.data.nlp.builders import build_dataloader
    from nemo_aligner.launch.model_loading import load_from_nemo
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
    from nemo_aligner.models.nlp.gpt.megatron_gpt_rs_actor import MegatronGPTRSModel

    optim = {"name": "distributed_fused_adam", "lr": LR, "sched": {"name": "constant"}}
    sizes = {"micro_batch_size": MICRO_BATCH, "global_batch_size": PROMPTS, "optim": optim}
    keys = countdown.model_keys(**sizes)
    keys.rs = keys.pop("ppo")
    actor = load_from_nemo(MegatronGPTRSModel, keys, None, restore_path=at.nemo)
    training = actor.setup_megatron_optimization(max_steps=10**6)
    keys = countdown.model_keys(**sizes, forward_micro_batch_size=PROMPTS)
    del keys.ppo
    rewards = load_from_nemo(MegatronGPTRewardModel, keys, None, restore_path=reward_model.nemo)
    rewards.prepare_for_inference()
    whole = OmegaConf.create({"model": {"seed": 1234, "data": {"num_workers": 0}}})
    functions: dict[str, Callable[[], object]] = {}
    for name, lengths in LENGTHS.items():
        loader = build_dataloader(
            whole,
            Prompts(lengths, steps=1000),
            0,
            mbs=PROMPTS,
            gbs=PROMPTS,
            load_gbs=False,
            use_random_sampler=False,
            collate_fn=collate,
        )
        trainer = RSTrainer(
            cfg=OmegaConf.create({"max_steps": 1000, "model_gbs": PROMPTS}),
            model=actor,
            optimizer=training[0],
            scheduler=training[1],
            train_dataloader=loader,
            val_dataloader=loader,
            logger=Silent(),
            ckpt_callback=Silent(),
            run_timer=Silent(),
            num_rollouts_per_prompt=COPIES,
            top_n_rollouts=1,
            rm=RewardInProcess(rewards),
        )

        def step(trainer: Any = trainer) -> None:
            trainer.run_step()
            trainer.step += 1

        functions[name] = step
    return functions


def build_peer(
    at: countdown.Folders, reward_model: countdown.Folders
) -> dict[str, Callable[[], object]]:
    """The same step with `generate`, a classifier and a fused AdamW."""
    from transformers import AutoModelForSequenceClassification

    policy = countdown.load_peer(at)
    rewards = AutoModelForSequenceClassification.from_pretrained(reward_model.hugging_face).eval()
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.1, fused=True
    )

    def best_responses(lengths: Tensor) -> Tensor:
        prompts = countdown.prompts(lengths, PROMPT)
        policy.eval()
        with torch.no_grad():
            parts = [
                policy.generate(
                    rows,
                    attention_mask=torch.ones_like(rows),
                    max_new_tokens=int(lengths.max()),
                    do_sample=True,
                    top_k=0,
                    num_return_sequences=COPIES,
                )
                for rows in prompts.split(PROMPTS // COPIES)
            ]
            width = max(part.size(1) for part in parts)
            samples = torch.cat(
                [torch.nn.functional.pad(part, (0, width - part.size(1))) for part in parts]
            )
            scores = torch.cat(
                [rewards(rows, use_cache=False).logits for rows in samples.split(PROMPTS)]
            )
        best = scores.view(PROMPTS, COPIES).argmax(1)
        return samples.view(PROMPTS, COPIES, -1)[torch.arange(PROMPTS), best]

    def step(lengths: Tensor) -> None:
        tokens = best_responses(lengths)
        policy.train()
        inside = torch.arange(tokens.size(1)) < (PROMPT + lengths).unsqueeze(1)
        labels = torch.where(inside, tokens, -100)
        labels[:, :PROMPT] = -100
        for rows, targets in zip(
            tokens.split(MICRO_BATCH), labels.split(MICRO_BATCH), strict=True
        ):
            logits = policy(rows, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum"
            )
            (loss / lengths.sum()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {name: lambda lengths=lengths: step(lengths) for name, lengths in LENGTHS.items()}


def main() -> None:
    args = measure.arguments(__doc__, repeats=2).parse_args()
    rows = []
    with countdown.folders() as at, tempfile.TemporaryDirectory() as folder:
        models = at, write_reward_model(at, Path(folder))
        with (
            measure.Side(build_ours, *models) as ours,
            measure.Side(build_peer, *models) as peer,
        ):
            for name in LENGTHS:
                figures = measure.in_turns({"ours": ours, "peer": peer}, name, args.repeats)
                per_sample = round(figures["ours"].seconds / PROMPTS / COPIES, 3)
                case = f"{COPIES} responses to {PROMPTS} prompts, {name}, 32"
                rows.append(
                    measure.pair_row(case, figures, **{"ours, CPU s per response": per_sample})
                )
    measure.report("rs_step", "A step of rejection sampling", rows, args.json)


if __name__ == "__main__":
    main()
