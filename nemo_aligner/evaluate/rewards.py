# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards of responses: by a reward model on the ranks of this job, or by a Python function."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import begins_with_bos, text_tokens, tokenizer_fingerprint
from nemo_aligner.generate.responses import Response

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

BATCHES_AT_ONCE = 8  # micro-batches per data-parallel rank that are scored between two gatherings


def function_rewards(
    reward: str, sides: Sequence[Sequence[Response]], options: DictConfig, check: bool = False
) -> list[list[float]]:
    """The rewards that a function gives to each policy's responses, computed in worker processes;
    one rank calls it. Where a file of responses has no lengths, the length is 0. `check`: only see
    whether the function loads and gets its columns. `UserError`: it does not, or it failed on a
    sample and there is no fallback.
    """
    from nemo_aligner.data.nlp.fields import columns_asked
    from nemo_aligner.servers.reward_function import RewardFunction

    given = {key.removeprefix("reward_fn_"): value for key, value in plain_dict(options).items()}
    rewards = []
    with RewardFunction(reward, tokenizer=None, gives_columns=True, **given) as function:
        for side in sides:
            columns = [columns_asked(r.columns, function.columns) for r in side]
            texts = [r.prompt for r in side], [r.response for r in side]
            lengths = [r.length or 0 for r in side]
            rewards += [] if check else [function.score(*texts, lengths, columns).tolist()]
    return rewards


def reward_model_settings(reward: str, cfg: DictConfig) -> DictConfig:
    """`reward_model` of `conf/evaluate.yaml` over `conf/inference_rm.yaml`, by default with the
    policies' split and precision. `UserError`: an unknown key, or no reward model there.
    """
    from nemo_aligner.config.checks import check_config
    from nemo_aligner.config.defaults import complete_config
    from nemo_aligner.config.schema import ARCHITECTURE_KEYS
    from nemo_aligner.generate.policy import newest_weights

    keys = (*ARCHITECTURE_KEYS, "sequence_parallel")
    split = {key: cfg.model[key] for key in keys if key in cfg.model}
    source = newest_weights(reward, "--reward")
    rm_cfg = OmegaConf.create(
        {
            "trainer": OmegaConf.to_container(cfg.trainer, resolve=True),
            "rm_model_file": str(source),
            "model": split | {"precision": cfg.trainer.precision} | dict(cfg.reward_model),
        }
    )
    check_config(rm_cfg, "inference_rm")
    return complete_config(rm_cfg, "inference_rm")


def model_rewards(
    rm_cfg: DictConfig, trainer: "Trainer | None", sides: Sequence[Sequence[Response]]
) -> list[list[float]]:
    """The rewards that a reward model gives to the responses of each policy; all ranks call it,
    and rank 0 gets them. `UserError`: it is no reward model, or a sample is longer than it reads.
    """
    from nemo_aligner.checkpoint.sources import open_source
    from nemo_aligner.config.defaults import complete_model
    from nemo_aligner.config.rules import check_values
    from nemo_aligner.config.server_rules import check_one_reward_per_sample
    from nemo_aligner.generate.policy import check_same_weights, model_config
    from nemo_aligner.generation.batch import padded
    from nemo_aligner.launch.model_loading import load_reward_model
    from nemo_aligner.launch.processes import launch_processes
    from nemo_aligner.parallel import parallel_state
    from nemo_aligner.servers.scoring import Scorer

    source = open_source(rm_cfg.rm_model_file, "--reward")
    rm_cfg.model = model_config(source, rm_cfg.model)
    check_values(rm_cfg, "inference_rm", complete=True)  # again, now with what the file says
    rm_cfg.model = complete_model(rm_cfg.model, "inference_rm")
    check_one_reward_per_sample(rm_cfg.model)
    launch_processes(trainer)
    model = load_reward_model(rm_cfg.model, trainer, source, "--reward")
    scorer = Scorer(
        lambda tokens, lengths, _starts: {"rewards": model.infer((tokens, lengths))},
        tokenize_func=model.tokenize,
        micro_batch_size=rm_cfg.model.forward_micro_batch_size,
    )
    check_same_weights(scorer.control, source)
    samples = [
        tokens_of(response, model.tokenizer) for responses in sides for response in responses
    ]
    limit = model.cfg.encoder_seq_length
    if unfit := [len(ids) for ids in samples if not 1 <= len(ids) <= limit]:
        raise UserError(
            f"{len(unfit)} of {len(samples)} samples do not fit the reward model, which reads 1 "
            f"to {limit} tokens; the first has {unfit[0]}. Shorten the prompts or the responses "
            "(length_params.max_length), or use a reward model that reads more."
        )
    order = sorted(range(len(samples)), key=lambda number: len(samples[number]))
    size = (
        BATCHES_AT_ONCE
        * rm_cfg.model.forward_micro_batch_size
        * parallel_state.get_data_parallel_world_size()
    )
    rewards = np.zeros(len(samples))
    for start in range(0, len(order), size):
        part = order[start : start + size]
        rows = [samples[number] for number in part]
        tokens = padded(rows, torch.device("cpu"), model.tokenizer.eos_id).numpy()
        lengths = np.array([[len(ids)] for ids in rows], dtype=np.int64)
        outputs = scorer.run({"tokens": tokens, "sequence_lengths": lengths})
        if outputs:
            rewards[part] = outputs["rewards"].reshape(-1)
    bad = np.flatnonzero(~np.isfinite(rewards))
    if bad.size:
        raise UserError(
            f"{source} gives {bad.size} of {len(rewards)} samples a reward that is not finite; "
            "look for NaN in its weights, or use trainer.precision=32."
        )
    ends = np.cumsum([len(responses) for responses in sides])
    return [part.tolist() for part in np.split(rewards, ends[:-1])]


def tokens_of(response: Response, tokenizer: Any) -> list[int]:
    """The tokens of a sample: those that the policy read and wrote if its tokenizer is the same,
    else those of the texts, with the end token unless the response was cut off.
    """
    has_tokens = response.prompt_tokens is not None and response.response_tokens is not None
    if has_tokens and response.tokenizer == tokenizer_fingerprint(tokenizer):
        return [*response.prompt_tokens, *response.response_tokens]  # type: ignore[misc]
    with_bos = begins_with_bos(tokenizer, None)
    ids = text_tokens(tokenizer, response.prompt + response.response, with_bos)
    return ids if response.is_end is False else [*ids, tokenizer.eos_id]
