# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the batches hold, the one alignment convention of the project, and what trainers expect of
loaders of prompts.

Notation: B samples, S padded number of tokens, P prompt length, R **total** length (prompt +
response, with its end token). `response_tokens` holds prompt + response, and `response_lengths` is
R, everywhere.

**Alignment.** A per-transition tensor has width S-1; its column t belongs to the prediction of
token t+1 from the tokens 0..t. So for a sample with P=3 prompt tokens, R=6 tokens in all and S=8:

    token index       0   1   2   3   4   5   6   7
    response_tokens   p0  p1  p2  a   b   eos pad pad      [S]
    column t          0   1   2   3   4   5   6            [S-1]
    predicts token    p1  p2  a   b   eos pad pad
    mask              0   0   1   1   1   0   0            True on [P-1, R-1): R-P ones, eos too
    logprobs          .   .   a   b   eos .   .            log-prob of the predicted token
    values            .   .   p2  a   b   .   .            the critic's value of "tokens 0..t"
    reward            .   .   .   .   2.0 .   .            at R-2, the last masked column

Where the mask is False a slot may hold anything, NaN included: no loss, gradient or metric depends
on it. A sample of several turns is prompt, response, observation, response, ..., response; R
counts all of it, and the mask is False at the columns that predict observed tokens.

Batches are plain dicts, because Megatron's data iterator and the wire need dicts; the classes
below name their entries.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from torch import Tensor
from typing_extensions import NotRequired


class InferenceBatch(TypedDict, total=False):
    """Prompts, as the collate function gives them to `infer`."""

    text: Tensor  # int64 [B, max(P) + max_length]: prompt, then eos
    length: Tensor  # int64 [B]: P
    loss_multiplier: Tensor  # float32 [B]: 0 for a sample that must not be trained on, else weight
    idx: Tensor  # int64 [B]: index in the data set
    record: Tensor  # int64 [B], optional: number of the prompt's record (`PromptColumns`)
    sample_key: Tensor  # int64 [B]: unique; in the order of index in the data set and response
    sample_seeds: Tensor  # int64 [B], optional: seed of each sample's own random stream
    return_logprobs: bool  # ask for the sampler's log-probs too
    rank_batches: int | None  # batches of this rank's share of the rollout; None: not known


class _Responses(TypedDict):
    response_tokens: Tensor  # int64 [B, S]: prompt + response, then eos
    response_lengths: Tensor  # int64 [B]: R
    prompt_lengths: Tensor  # int64 [B]: P
    is_end: Tensor  # bool [B]: True if the response reached an end token or string


class Rollout(_Responses, total=False):
    """What `infer` returns for prompts, with those of their columns that trainers keep."""

    sampling_logprobs: Tensor  # float32 [B, S-1]: with `return_logprobs`; 0 outside the response
    observed: Tensor  # bool [B, S-1]: True where an observation is predicted; in several turns
    # float32 [B, S-1], optional: rewards of tokens, with an environment those of its responses at
    # their last tokens; NaN where a token has none
    token_rewards: Tensor
    record: Tensor  # int64 [B], optional: as in the prompts, for who scores
    idx: Tensor  # int64 [B]: as in the prompts, and so are the next two
    sample_key: Tensor  # int64 [B]
    loss_multiplier: Tensor  # float32 [B]


class RolloutBatch(Rollout, total=False):
    """One data-parallel rank's share of a rollout, scored by models (policy included)."""

    logprobs: Tensor  # float32 [B, S-1]: of the policy that generated, at its temperature
    init_logprobs: Tensor  # float32 [B, S-1]: of the reference; only if a KL is measured
    rewards: Tensor  # float32 [B]: of the whole response; the sum of `token_rewards` if given
    # float32 [B, K]: of an ensemble's models in the order of their names, without their weights
    reward_parts: Tensor
    values: Tensor  # float32 [B, S-1]: of the critic; absent without one
    teacher_logprobs: Tensor  # float32 [B, S-1]: of a teacher; absent without one
    sample_order: Tensor  # int64 [B]: place of the sample in the shuffled rollout of all ranks


@dataclass(frozen=True)
class Scores:
    """Rewards and values of b samples, from reward models and critic."""

    rewards: Tensor  # float32 [b], scalar reward of the whole response
    values: Tensor | None = None  # float32 [b, S-1], the critic's; None where there is no critic
    # float32 [b] each: rewards by the name of an ensemble's model, without its weight; else empty
    parts: dict[str, Tensor] = field(default_factory=dict)
    # float32 [b, S-1], rewards of steps or tokens, whose sum is `rewards`: that of token t+1 in
    # column t, NaN where a token has none; None: there are none
    token_rewards: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # float32 [b, S-1], what a teacher thinks of tokens


class _PolicyTrainBatch(TypedDict):
    response_tokens: Tensor  # int64 [B, S]
    mask: Tensor  # float32 [B, S-1]: 1 on the response's transitions (see above), else 0
    is_end: Tensor  # bool [B]: False leaves the sample out of the policy loss, by default
    prev_logprobs: Tensor  # float32 [B, S-1]: log-probs at rollout time
    advantages: Tensor  # float32 [B, S-1]: normalized over all ranks if configured


class PPOTrainBatch(_PolicyTrainBatch, total=False):
    """What the optimizer steps of actor and critic consume (`generate_ppo_data`)."""

    init_logprobs: Tensor  # float32 [B, S-1]: of the reference policy, as above
    values: Tensor  # float32 [B, S-1]: critic's values at rollout time; absent without a critic
    returns: Tensor  # float32 [B, S-1]: target of the critic: advantages (not normalised) + values
    sample_order: Tensor  # int64 [B]: as above; not used by the updates
    old_kl_coefs: Tensor  # float32 [B, S-1]: with KL-Cov; weight of the KL to who generated


class RSTrainBatch(TypedDict):
    """What the optimizer steps of rejection sampling consume (`generate_rs_data`)."""

    response_tokens: Tensor  # int64 [B, S]: only the best responses to each prompt
    mask: Tensor  # float32 [B, S-1]: 1 on the response's transitions (see above), else 0


class ReinforceTrainBatch(TypedDict):
    """What the optimizer steps of REINFORCE consume (`generate_reinforce_data`)."""

    response_tokens: Tensor  # int64 [B, S]
    is_end: Tensor  # bool [B]: the response ended by itself; others do not count in the loss
    mask: Tensor  # float32 [B, S-1]: 1 on the response's transitions (see above), else 0
    rewards_with_kl: Tensor  # float32 [B]: reward less the KL penalty
    baseline: Tensor  # float32 [B]: what is subtracted from it to get the advantage


class CriticTrainBatch(TypedDict):
    """What `critic_train` receives, and the critic's loss uses."""

    tokens: Tensor  # int64 [B, S]
    returns: Tensor  # float32 [B, S-1]
    # float32 [B, S-1]: the critic's values at rollout time, the centre of value clipping
    prev_values: Tensor
    mask: Tensor  # float32 [B, S-1]


class PairBatch(TypedDict):
    """Preference pairs for reward-model training."""

    chosen: Tensor  # int64 [B, S]
    rejected: Tensor  # int64 [B, S]
    chosen_length: Tensor  # int64 [B]: tokens of `chosen` without padding
    rejected_length: Tensor  # int64 [B]
    loss_mask: Tensor  # float32 [B, S]: all zero where a pair must not count


class LabelledPairBatch(PairBatch):
    """Preference pairs that say how much better the chosen sample is."""

    margin: Tensor  # float32 [B], at least 0


class DirectPairBatch(PairBatch):
    """Preference pairs that a policy learns from directly."""

    chosen_mask: Tensor  # float32 [B, S]: 1 on the tokens of the response
    rejected_mask: Tensor  # float32 [B, S]
    chosen_reward: Tensor  # float32 [B]: what the data say of the response
    rejected_reward: Tensor  # float32 [B]
    ref_policy_log_probs_chosen: NotRequired[Tensor]  # float32 [B, S-1]: of the reference policy
    ref_policy_log_probs_rejected: NotRequired[Tensor]  # float32 [B, S-1]


class SelfPlayPrompts(TypedDict):
    """Prompts with the responses of the data, for SPIN."""

    prompts_and_answers: Tensor  # int64 [B, S]: padded with eos
    prompt_lengths: Tensor  # int64 [B]: P
    combined_lengths: Tensor  # int64 [B]: R
    idx: Tensor  # int64 [B]: index in the data set


class SelfPlayBatch(TypedDict):
    """Responses of the data beside the policy's own (SPIN)."""

    actual: Tensor  # int64 [B, S]: prompt + response of the data
    generated: Tensor  # int64 [B, S]: prompt + response of the reference policy
    actual_length: Tensor  # int64 [B]: R
    generated_length: Tensor  # int64 [B]: R
    actual_mask: Tensor  # float32 [B, S]: 1 on the tokens of the response
    generated_mask: Tensor  # float32 [B, S]
    is_end: Tensor  # bool [B]: True if the generated response ended by itself
    loss_mask: Tensor  # float32 [B, S]: all zero where a pair must not count
    ref_policy_log_probs_actual: NotRequired[Tensor]  # float32 [B, S-1]: of the reference policy
    ref_policy_log_probs_generated: NotRequired[Tensor]  # float32 [B, S-1]


class LabelledResponseBatch(TypedDict):
    """Responses with a label, which a policy learns from directly (KTO)."""

    samples: Tensor  # int64 [B, S]: prompt + response
    kl_samples: Tensor  # int64 [B, S]: prompt + a response to another one
    sample_length: Tensor  # int64 [B]: tokens of `samples` without padding
    kl_sample_length: Tensor  # int64 [B]
    sample_mask: Tensor  # float32 [B, S]: 1 on the tokens of the response
    kl_sample_mask: Tensor  # float32 [B, S]
    preference: Tensor  # float32 [B]: 1 for a desirable response, else 0
    loss_mask: Tensor  # float32 [B, S]: all zero where a sample must not count
    ref_policy_log_probs_samples: NotRequired[Tensor]  # float32 [B, S-1]: of the reference policy
    ref_policy_log_probs_kl_samples: NotRequired[Tensor]  # float32 [B, S-1]


class RegressionBatch(TypedDict):
    """Labelled texts for regression reward-model training; A attributes."""

    inputs: Tensor  # int64 [B, S]
    lengths: Tensor  # int64 [B]: tokens of `inputs` without padding
    labels: Tensor  # float32 [B, A]; `regression.loss_mask_val` where there is none
    loss_mask: Tensor  # float32 [B, S]: all zero where a sample must not count


class _Examples(TypedDict):
    tokens: Tensor  # int64 [B, S]: prompt + response + eos, padded
    labels: Tensor  # int64 [B, S]: the token that follows
    loss_mask: Tensor  # [B, S]: non-zero where the label belongs to the response


class DistillationBatch(_Examples):
    """Examples with the K largest logits of a teacher at each position."""

    topk_logits: Tensor  # float32 [B, S, K]: in descending order, less the largest
    topk_token_ids: Tensor  # int64 [B, S, K]
    log_sum_exp_logits: Tensor  # float32 [B, S]: of all logits, less the largest


class ResponseBatch(_Examples):
    """Prompts with responses."""

    lengths: Tensor  # int64 [B]: prompt + response
    prompt_lengths: Tensor  # int64 [B]
    idx: Tensor  # int64 [B]: the sample's number in the data set


class SFTBatch(_Examples, total=False):
    """Prompt-response examples for supervised fine-tuning."""

    packed_position_ids: Tensor  # int64 [B, S]: of packed samples, 0 where one begins


# Megatron Core's, or what has the same: `param_groups`, `zero_grad()` and `step() -> (succeeded,
# norm of the gradient, number of zeros in it)` the first, `step(increment=updates)` the second.
Optimizer = Any
Scheduler = Any


class PromptSampler(Protocol):
    """Yields the dataset indices of this rank's micro-batches, one rollout after the other."""

    total_samples: int
    consumed_samples: int
    global_batch_size: int  # prompts of one rollout, over all ranks
    micro_batch_size: int
    drop_last: bool

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of one micro-batch after the other."""


class PromptLoader(Protocol):
    """A data loader of prompts."""

    batch_sampler: PromptSampler
    dataset: Any

    def __iter__(self) -> Iterator[InferenceBatch]:
        """The micro-batches."""


PromptLoaderBuilder = Callable[..., PromptLoader]  # called as builder(consumed_samples=...)
PromptIterator = Callable[..., Iterable[InferenceBatch]]  # see data/nlp/samplers.py
