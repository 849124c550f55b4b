# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of commands."""

from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.fields import inert, key, section
from nemo_aligner.config.keys.data import Chat, ExampleSet
from nemo_aligner.config.keys.model import Model
from nemo_aligner.config.keys.rollouts import LengthParams, SamplingParams
from nemo_aligner.config.keys.servers import Inference


@dataclass
class TeacherInference(Inference):
    """A teacher's server.

    Attributes:
        top_k: logits of each token, at most the size of the vocabulary
    """

    top_k: int = key(100, at_least=1)


@dataclass
class RewardModelFile:
    """The model that a reward server serves.

    Attributes:
        rm_model_file: the reward model's `.nemo`; with `reward_fn` the `.nemo` whose tokenizer
            decodes (the policy's)
    """

    rm_model_file: Any = key(None)


@dataclass
class RewardServerModel(Model):
    """A model that a reward server serves."""

    global_batch_size: Any = inert(0)


@dataclass
class CommandSampling(SamplingParams):
    """How tokens are chosen.

    Attributes:
        add_BOS: plain prompts begin with the bos token; null: as the tokenizer itself does it, as
            in the jobs
    """

    add_BOS: bool | None = key(None)


@dataclass
class CommandLength(LengthParams):
    """How long responses are.

    Attributes:
        max_length: tokens of a response at most; null: half of `model.encoder_seq_length`, but
            1024 at most
    """

    max_length: int | None = key(None, at_least=1)  # type: ignore[assignment]


@dataclass
class GenerateCommand:
    """`nemo-aligner generate`.

    Attributes:
        responses_per_prompt: responses to each prompt of a file
        micro_batch_size: samples that a data-parallel rank decodes together
    """

    responses_per_prompt: int = key(1, at_least=1)
    micro_batch_size: int = key(8, at_least=1)
    sampling_params: CommandSampling = section()
    length_params: CommandLength = section()


@dataclass
class EvaluateRewards:
    """Functions that judge responses.

    Attributes:
        reward_fn_workers, reward_fn_timeout_s: **new**: processes that call it; time limit per
            sample in seconds
        reward_fn_fallback: **new**: score of a sample for which it raised or took too long; null:
            the request fails, and with it the job that sent it
    """

    reward_fn_workers: int = key(2, at_least=1)
    reward_fn_timeout_s: float = key(10.0, above=0)
    reward_fn_fallback: float | None = key(None)


@dataclass
class EvaluateCommand(GenerateCommand):
    """`nemo-aligner evaluate`.

    Attributes:
        reward_model: keys of `model` in `conf/inference_rm.yaml` for the reward model, such as
            `reward_model.forward_micro_batch_size=8`
    """

    reward_model: Any = key({}, free=True)


@dataclass
class TopKChat(Chat):
    """Conversations of which a teacher gives the logits.

    Attributes:
        one_turn_per_sample: conversations: a chat template (**new**), also of SPIN with a sample
            for each turn, or NeMo's chat format ([data](data.md))
        allow_empty_prompt: as for the actors; `{input: question, output: answer}`
    """

    one_turn_per_sample: bool = key(False)
    allow_empty_prompt: bool = key(False)
    sample: Any = inert(False)
    num_workers: Any = inert(0)
    dataloader_type: Any = inert("single")


@dataclass
class TopKSet(ExampleSet):
    """Examples of which a teacher gives the logits, in their order."""

    max_seq_length: int | None = key(  # type: ignore[assignment]
        "${model.encoder_seq_length}", at_least=2
    )
    shuffle: Any = inert(True)
    drop_last: Any = inert(True)


@dataclass
class TopKModel(Model):
    """A model that reads examples.

    Attributes:
        global_batch_size: examples that are computed and written together
    """

    micro_batch_size: int = key(1, at_least=1, fallback=1)
    global_batch_size: int = key(8, at_least=1)
    megatron_amp_O2: bool = key(True)
    mcore_gpt: Any = inert(True)


@dataclass
class TeacherModel(Model):
    """A teacher."""

    micro_batch_size: int = key(4, at_least=1, fallback=1)
    megatron_amp_O2: bool = key(True)


@dataclass
class TopKCommand:
    """The command that writes the logits of a teacher.

    Attributes:
        top_k: logits of each token, at most the size of the vocabulary
        output_path: the jsonl file to write
        start_from_idx, end_at_idx: first and last example, which counts too; null: all. Several
            jobs can share the data, each with a file of its own
    """

    top_k: int = key(100, at_least=1)
    output_path: Any = key(None, required=True)
    start_from_idx: int | None = key(None, at_least=0)
    end_at_idx: int | None = key(None, at_least=0)


@dataclass
class Bootstrap:
    """How intervals are made.

    Attributes:
        resamples, confidence, seed: number of draws, share of them inside an interval, seed
    """

    resamples: int = key(1000, at_least=1)
    confidence: float = key(0.95, above=0, at_most=1)
    seed: int = key(1234, at_least=0)
