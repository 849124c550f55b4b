# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How many of the tokens that a pass computes are real, for samples of skewed lengths.

    OMP_NUM_THREADS=1 python benchmarks/padding.py

64 samples of 32 prompt tokens and a geometric number of response tokens (mean 32, at most 128) are
scored by a critic and by a reward model, get their log-probs from the policy, and train policy and
critic. The model is a small one of the shape of Llama (2 layers, hidden 128, vocabulary 8192,
1,024 positions): the numbers of tokens depend on the lengths alone.

* *all padding*: requests as wide as the model's positions (`pad_to_length=1024`), everything else
  as wide as the longest sample, micro-batches of 4 samples in their order.
* *4 samples*: the same micro-batch size, as passes are run now.
* *tokens*: with `model.dynamic_micro_batch_tokens`.

The counts are those that jobs log as `tokens/` (docs/metrics.md).
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import countdown
import measure
import torch
from torch import Tensor

SAMPLES, PROMPT, MICRO_BATCH = 64, 32, 4
SHAPE = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 352,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "bias": False,
    "share_embeddings_and_output_weights": False,
}
WAYS = ("all padding", f"{MICRO_BATCH} samples", "tokens")


def samples() -> dict[str, Tensor]:
    """A rollout; what the models computed of it is random."""
    generator = torch.Generator().manual_seed(3)
    responses = countdown.skewed_lengths(SAMPLES)
    lengths = PROMPT + responses
    width = int(lengths.max())
    tokens = torch.randint(1, countdown.VOCABULARY - 1, (SAMPLES, width), generator=generator)
    columns = torch.arange(width - 1)
    mask = (columns >= PROMPT - 1) & (columns < lengths.unsqueeze(1) - 1)
    numbers = [torch.randn(SAMPLES, width - 1, generator=generator) for _ in range(3)]
    return {
        "response_tokens": tokens,
        "response_lengths": lengths,
        "is_end": torch.ones(SAMPLES, dtype=torch.bool),
        "mask": mask.float(),
        **dict(zip(("advantages", "returns", "values"), numbers, strict=True)),
    }


class Models:
    """The models that the passes belong to, and the passes by name."""

    def __init__(self, tokenizer: Path, batch: dict[str, Tensor]):
        from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
        from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
        from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel

        keys = countdown.model_keys(
            **SHAPE,
            tokenizer={"library": "huggingface", "type": str(tokenizer)},
            micro_batch_size=MICRO_BATCH,
            forward_micro_batch_size=MICRO_BATCH,
            ppo={"forward_micro_batch_size": MICRO_BATCH},
        )
        self.actor = MegatronGPTActorModel(keys)
        self.critic = MegatronGPTCriticModel({**keys, "output_sequence": True})
        self.reward_model = MegatronGPTRewardModel(keys)
        self.all = (self.actor, self.critic, self.reward_model)
        for model in (self.actor, self.critic):
            model.setup_megatron_optimization(max_steps=10)
        self.batch = batch
        self.padded = False
        batch["prev_logprobs"] = self.log_probs()

    def choose(self, way: str, tokens: int) -> None:
        """Compute in one of `WAYS` from here on."""
        self.padded = way == WAYS[0]
        for model in self.all:
            model.micro_batch_tokens = tokens if way == WAYS[2] else None

    def passes(self) -> dict[str, Callable[[], object]]:
        """Functions that each run one kind of pass over the samples."""
        return {
            "scoring, critic": lambda: self.score(self.critic),
            "scoring, reward model": lambda: self.score(self.reward_model),
            "log-probs": self.log_probs,
            "update of the policy": lambda: self.update(self.actor),
            "update of the critic": lambda: self.update(self.critic),
        }

    def score(self, model: Any) -> Tensor:
        """Values or rewards, of the tokens as a request carries them."""
        from nemo_aligner.servers.scoring_clients import scoring_payload

        pad_to_length = countdown.POSITIONS if self.padded else None
        request = scoring_payload(self.batch, pad_to_length, max_length=countdown.POSITIONS)
        tokens, lengths = (
            torch.from_numpy(request[name]) for name in ("tokens", "sequence_lengths")
        )
        if self.padded:  # a pass that knows no lengths
            lengths = torch.full_like(lengths, tokens.size(1))
        model.prepare_for_inference()
        return model.infer((tokens, lengths))

    def log_probs(self) -> Tensor:
        """Log-probs of the policy."""
        self.actor.set_eval()
        lengths = None if self.padded else self.batch["response_lengths"]
        return self.actor.get_inference_log_probs(
            self.batch["response_tokens"], response_lengths=lengths
        )

    def update(self, model: Any) -> None:
        """Loss and gradient of one global batch."""
        batch = self.batch
        if self.padded:  # as if the last columns counted
            batch = {**batch, "mask": torch.ones_like(batch["mask"])}
        if model is self.critic:
            names = {"tokens": "response_tokens", "prev_values": "values"}
            keys = ("tokens", "returns", "prev_values", "mask")
            batch = {key: batch[names.get(key, key)] for key in keys}
        model.prepare_for_training_step()
        model.get_loss_and_metrics(batch=batch, forward_only=False)


def computed_tokens(function: Callable[[], object]) -> int:
    """Tokens that the passes of `function` compute."""
    from nemo_aligner.training import passes

    passes.forget_token_counts()
    function()
    names = {passes.FORWARD: "x", passes.TRAIN: "y"}
    counts = passes.token_metrics(names, {})
    return int(sum(value for key, value in counts.items() if key.endswith("_computed")))


def main() -> None:
    parser = measure.arguments(__doc__, repeats=1)
    parser.add_argument("--tokens", type=int, default=384, help="model.dynamic_micro_batch_tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = samples()
    real = int(batch["response_lengths"].sum())
    with tempfile.TemporaryDirectory() as folder:
        countdown.write_tokenizer(Path(folder))
        models = Models(Path(folder), batch)
        rows = []
        for case, function in models.passes().items():
            row: dict[str, Any] = {"case": case}
            seconds = {}
            for way in WAYS:
                models.choose(way, args.tokens)
                name = f"{args.tokens} tokens" if way == WAYS[2] else way
                row[f"{name}: real"] = round(real / computed_tokens(function), 3)
                seconds[f"{name}: CPU s"] = round(measure.seconds_of(function, args.repeats), 2)
            rows.append(row | seconds)
    measure.report("padding", "Real over computed tokens", rows, args.json)


if __name__ == "__main__":
    main()
