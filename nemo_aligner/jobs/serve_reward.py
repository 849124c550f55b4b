# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Serve a reward model, or a Python function as reward.

It is for rejection sampling and REINFORCE, and for PPO whose critic has a server of its own.

    nemo-aligner serve reward rm_model_file=reward_model.nemo inference.port=5555
    nemo-aligner serve reward rm_model_file=policy.nemo \
        inference.reward_fn=path/to/file.py:function

The server runs until SIGTERM or SIGINT. A regression model that does not merge its attributes
gives all of them (docs/steerlm.md). A function, `(prompts, responses, lengths) -> scores`, is
served by one process with `inference.reward_fn_workers` workers; the .nemo gives the tokenizer
only. With `inference.rewards_per` step or token both give rewards of the steps or tokens of a
response.
"""

import dataclasses
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.defaults import complete
from nemo_aligner.config.server_rules import (
    check_one_reward_per_sample,
    check_scores_of_tokens,
    served_attributes,
)
from nemo_aligner.config.values import plain_dict
from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "inference_rm"


@job_main(CONFIG_NAME, jobs=3)
def main(cfg: DictConfig) -> None:
    if cfg.inference.reward_fn is None:
        serve_model(cfg)
    else:
        serve_function(cfg)


def serve_model(cfg: DictConfig) -> None:
    """Serve the model of `rm_model_file` until the job is stopped; every rank calls it."""
    with long_imports():
        from nemo_aligner.algorithms.reward_server import RewardModelServer
        from nemo_aligner.checkpoint.nemo_archive import check_restore_path
        from nemo_aligner.launch.experiment import log_config
        from nemo_aligner.launch.model_loading import complete_model_config, load_reward_model
        from nemo_aligner.launch.processes import init_distributed, resolve_and_create_trainer
        from nemo_aligner.servers.reward_function import scores_of_places
        from nemo_aligner.servers.scoring import model_limits

    restore_path = check_restore_path(cfg.rm_model_file, "rm_model_file")
    cfg.model = complete_model_config(restore_path, cfg.model, CONFIG_NAME)
    attributes = served_attributes(cfg.model)
    per, step_end = cfg.inference.rewards_per, cfg.inference.step_end
    per_token = per != "response"
    if per_token:
        check_one_reward_per_sample(cfg.model)
        check_scores_of_tokens(cfg.model)
        cfg.model.output_sequence = True
    trainer = resolve_and_create_trainer(cfg)
    log_config(cfg, CONFIG_NAME)
    init_distributed(trainer)

    model = load_reward_model(cfg.model, trainer, restore_path, "rm_model_file")
    vocab_size, max_length = model_limits(model)

    def rewards_of_places(tokens: Any, lengths: Any, prompt_lengths: Any) -> Any:
        scores = model.infer((tokens, lengths))
        return scores_of_places(
            scores, tokens, lengths, prompt_lengths, model.tokenizer, per, step_end
        )

    RewardModelServer(
        infer_fn=rewards_of_places if per_token else model.infer,
        needs_prompt_lengths=per_token,
        per_token=per_token,
        attributes=attributes,
        tokenize_func=model.tokenize,
        model_forward_micro_batch_size=cfg.model.forward_micro_batch_size,
        vocab_size=vocab_size,
        max_length=max_length,
        tokenizer=model.tokenizer,
        **endpoint_options(cfg.inference),
        **cfg.server,
    ).run_server()


def serve_function(cfg: DictConfig) -> None:
    """Serve `inference.reward_fn` until the job is stopped; its workers end with it. There is no
    process group.
    """
    from nemo_aligner.algorithms.reward_server import RewardModelServer
    from nemo_aligner.launch.experiment import log_config
    from nemo_aligner.launch.watchdog import watch
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import build_tokenizer
    from nemo_aligner.servers.reward_function import RewardFunction

    tokenizer = build_tokenizer(tokenizer_config(cfg))
    OmegaConf.resolve(cfg)
    log_config(cfg, CONFIG_NAME)
    watch(cfg.trainer.hang_timeout_s)
    options = cfg.inference
    with RewardFunction(
        options.reward_fn,
        tokenizer,
        workers=options.reward_fn_workers,
        timeout_s=options.reward_fn_timeout_s,
        fallback=options.reward_fn_fallback,
        per=options.rewards_per,
        step_end=options.step_end,
    ) as function:
        RewardModelServer(
            infer_fn=function.infer,
            tokenize_func=function.no_sentences,
            model_forward_micro_batch_size=1,  # no samples are added to fill up a request
            vocab_size=tokenizer.vocab_size,
            needs_prompt_lengths=True,
            per_token=options.rewards_per != "response",
            tokenizer=tokenizer,
            # A few rounds of all workers.
            slice_rows=8 * function.workers,
            **endpoint_options(options),
            **cfg.server,
        ).run_server()


def tokenizer_config(cfg: DictConfig) -> DictConfig:
    """`tokenizer` of `rm_model_file`, with what is given in `model.tokenizer` over it; without a
    file the latter.
    """
    from nemo_aligner.checkpoint.nemo_archive import check_restore_path
    from nemo_aligner.launch.model_loading import load_and_override_model_config

    model_cfg = cfg.model
    if cfg.rm_model_file is not None:
        restore_path = check_restore_path(cfg.rm_model_file, "rm_model_file")
        # Apart from the job: the checks of a model's configuration are not for a function.
        alone = OmegaConf.masked_copy(model_cfg, ["tokenizer", "overwrite_base_config"])
        model_cfg = load_and_override_model_config(restore_path, alone)
    return complete(model_cfg.tokenizer, CONFIG_NAME, "model.tokenizer")


def endpoint_options(inference_cfg: DictConfig) -> dict[str, Any]:
    """The arguments of `RewardModelServer` that stand in `inference` of the configuration."""
    from nemo_aligner.algorithms.reward_server import RewardModelServer

    names = {field.name for field in dataclasses.fields(RewardModelServer)}
    options = plain_dict(inference_cfg, resolve=True)
    return {name: value for name, value in options.items() if name in names}
