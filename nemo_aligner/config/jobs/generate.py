# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands `generate` and `evaluate`."""

from dataclasses import replace
from typing import Any

from nemo_aligner.config.data_rules import check_chat
from nemo_aligner.config.fields import Configuration, Section, key, section
from nemo_aligner.config.keys import common, rollouts
from nemo_aligner.config.keys.data import Chat
from nemo_aligner.config.keys.model import Model
from nemo_aligner.config.rollout_rules import check_generation, check_responses_differ
from nemo_aligner.config.values import Values


class CommandSampling(rollouts.SamplingParams):
    """How tokens are chosen.

    add_BOS: plain prompts begin with the bos token; null: as the tokenizer itself does it, as in
        the jobs
    """

    add_BOS: bool | None = key(None)


class CommandLength(rollouts.LengthParams):
    """How long responses are.

    max_length: tokens of a response at most; null: half of `model.encoder_seq_length`, but 1024 at
        most
    """

    max_length: int | None = key(None, at_least=1)  # type: ignore[assignment]


class GenerateCommand(Section):
    """`nemo-aligner generate`.

    responses_per_prompt: responses to each prompt of a file
    micro_batch_size: samples that a data-parallel rank decodes together
    """

    responses_per_prompt: int = key(1, at_least=1)
    micro_batch_size: int = key(8, at_least=1)
    sampling_params: CommandSampling = section()
    length_params: CommandLength = section()


class EvaluateCommand(GenerateCommand):
    """`nemo-aligner evaluate`.

    reward_model: keys of `model` in `conf/inference_rm.yaml` for the reward model, such as
        `reward_model.forward_micro_batch_size=8`
    """

    reward_model: Any = key({}, free=True)


class Bootstrap(Section):
    """How intervals are made.

    resamples, confidence, seed: number of draws, share of them inside an interval, seed
    """

    resamples: int = key(1000, at_least=1)
    confidence: float = key(0.95, above=0, at_most=1)
    seed: int = key(1234, at_least=0)


def check(v: Values, dp: dict[str, int], ranks: int) -> None:
    check_chat(v.get("model.data", {}))
    check_generation(v)
    check_responses_differ(v, "", "responses_per_prompt")


_SECTIONS: dict[str, type] = {
    "trainer": common.Machines,
    "pretrained_checkpoint": common.Pretrained,
    "model": Model,
    "model.data": Chat,
}

GENERATE = Configuration(
    "generate",
    {"": GenerateCommand, **_SECTIONS},
    {
        **common.PARALLEL,
        **common.NO_RECOMPUTATION,
        "model.virtual_pipeline_model_parallel_size": 1,
    },
    without=frozenset(("model.dynamic_micro_batch_tokens", "model.micro_batch_size")),
    check=check,
)

_MORE = {"bootstrap": Bootstrap, "inference": rollouts.FunctionWorkers}
EVALUATE = replace(GENERATE, name="evaluate", sections={"": EvaluateCommand, **_SECTIONS, **_MORE})
