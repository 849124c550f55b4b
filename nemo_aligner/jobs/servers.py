# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The jobs that serve others until SIGTERM or SIGINT."""

import dataclasses
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config import server_rules
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.jobs.supervised import reward_model_type
from nemo_aligner.config.values import Values, plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports


# The jobs beside each other: this one, the actor, and the rewards if they are elsewhere.
@job_main(
    "gpt_ppo_critic", jobs=lambda cfg: 2 if cfg.trainer.ppo.combine_rm_and_critic_server else 3
)
def serve_critic(cfg: DictConfig) -> None:
    r"""Serve the critic of a PPO job, and its reward model too.

    The latter with `trainer.ppo.combine_rm_and_critic_server=True`.

        nemo-aligner serve critic pretrained_checkpoint.restore_from_path=reward_model.nemo \
            trainer.ppo.port=5556

    Both start from the reward model: one of pairs, or a regression reward model, whose attributes
    are merged. With `combine_rm_and_critic_server=False` the critic may also start from a language
    model, with a new head, or from a critic; rewards then come from elsewhere (`serve reward`).
    The server runs until SIGTERM or SIGINT; the actor (`train ppo`) has it trained and saved.
    """
    with long_imports():
        from nemo_aligner.algorithms.critic_server_trainer import CriticServerTrainer
        from nemo_aligner.launch import experiment
        from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel

    reward_model_type(cfg.model.reward_model_type)  # refuses a kind that does not exist
    job, model = experiment.start_with_model(cfg, MegatronGPTCriticModel)
    if cfg.trainer.ppo.combine_rm_and_critic_server:
        # Before a checkpoint is resumed: rewards come from the model that the job started from.
        model.set_reward_model()

    parts = experiment.set_up_training(cfg, job, model, max_steps=cfg.trainer.ppo.max_steps)
    critic_trainer = CriticServerTrainer(
        **parts,
        tokenize_func=model.tokenize,
        gbs=cfg.model.global_batch_size,
        model_forward_micro_batch_size=cfg.model.forward_micro_batch_size,
        server=cfg.server,
    )
    state = experiment.load_trainer_state(cfg, parts["ckpt_callback"])
    if state is not None:
        critic_trainer.load_state_dict(state)
    critic_trainer.keep_first_weights()
    critic_trainer.run_server()


@job_main("inference_rm", jobs=3)
def serve_reward(cfg: DictConfig) -> None:
    r"""Serve a reward model, or a Python function as reward.

    It is for rejection sampling and REINFORCE, and for PPO whose critic has a server of its own.

        nemo-aligner serve reward rm_model_file=reward_model.nemo inference.port=5555
        nemo-aligner serve reward rm_model_file=policy.nemo \
            inference.reward_fn=path/to/file.py:function

    The server runs until SIGTERM or SIGINT. A regression model that does not merge its attributes
    gives all of them (docs/algorithms.md). A function, `(prompts, responses, lengths) -> scores`,
    is served by one process with `inference.reward_fn_workers` workers; the .nemo gives the
    tokenizer only. With `inference.rewards_per` step or token both give rewards of the steps or
    tokens of a response.
    """
    if cfg.inference.reward_fn is None:
        _serve_model(cfg)
    else:
        _serve_function(cfg)


def _serve_model(cfg: DictConfig) -> None:
    """Every rank calls it."""
    with long_imports():
        from nemo_aligner.algorithms.reward_server import RewardModelServer
        from nemo_aligner.checkpoint.sources import open_source
        from nemo_aligner.launch.experiment import start_processes
        from nemo_aligner.launch.model_loading import complete_model_config, load_reward_model
        from nemo_aligner.servers.reward_function import scores_of_places

    source = open_source(cfg.rm_model_file, "rm_model_file")
    cfg.model = complete_model_config(source, cfg.model, "inference_rm")
    attributes = server_rules.served_attributes(cfg.model)
    per, step_end = cfg.inference.rewards_per, cfg.inference.step_end
    per_token = per != "response"
    if per_token:
        server_rules.check_one_reward_per_sample(cfg.model)
        Values({"model": cfg.model}).refuse(
            """model.use_avg_pool | : this reward model scores the mean over all tokens, not single
            ones; set inference.rewards_per=response"""
        )
        cfg.model.output_sequence = True
    trainer = start_processes(cfg, "inference_rm")
    model = load_reward_model(cfg.model, trainer, source, "rm_model_file")

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
        **_options(cfg, model),
    ).run_server()


def _serve_function(cfg: DictConfig) -> None:
    """The workers of the function end with the job. There is no process group."""
    from nemo_aligner.algorithms.reward_server import RewardModelServer
    from nemo_aligner.launch.experiment import log_config
    from nemo_aligner.launch.watchdog import watch
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import build_tokenizer
    from nemo_aligner.servers.requests import no_sentences
    from nemo_aligner.servers.reward_function import RewardFunction

    tokenizer = build_tokenizer(_tokenizer_config(cfg))
    OmegaConf.resolve(cfg)
    log_config(cfg, "inference_rm")
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
            tokenize_func=no_sentences,
            model_forward_micro_batch_size=1,  # no samples are added to fill up a request
            needs_prompt_lengths=True,
            per_token=options.rewards_per != "response",
            # A few rounds of all workers.
            slice_rows=8 * function.workers,
            **_options(cfg, function),
        ).run_server()


def _tokenizer_config(cfg: DictConfig) -> DictConfig:
    """`tokenizer` of `rm_model_file`, if any, with what `model.tokenizer` gives over it."""
    from nemo_aligner.checkpoint.sources import open_source
    from nemo_aligner.launch.model_loading import load_and_override_model_config

    model_cfg = cfg.model
    if cfg.rm_model_file is not None:
        source = open_source(cfg.rm_model_file, "rm_model_file")
        # Apart from the job: the checks of a model's configuration are not for a function.
        alone = OmegaConf.masked_copy(model_cfg, ["tokenizer", "overwrite_base_config"])
        model_cfg = load_and_override_model_config(source, alone)
    return complete(model_cfg.tokenizer, "inference_rm", "model.tokenizer")


def _options(cfg: DictConfig, model: Any) -> dict[str, Any]:
    """The arguments of `RewardModelServer` that follow from the configuration and from `model`, or
    a function in its place.
    """
    from nemo_aligner.algorithms.reward_server import RewardModelServer
    from nemo_aligner.servers.scoring import model_limits

    names = {field.name for field in dataclasses.fields(RewardModelServer)}
    options = plain_dict(cfg.inference, resolve=True)
    vocab_size, max_length = model_limits(model)
    return {
        **{name: value for name, value in options.items() if name in names},
        **{"tokenizer": model.tokenizer, "vocab_size": vocab_size, "max_length": max_length},
        **cfg.server,
    }


@job_main("inference_teacher", jobs=2)
def serve_teacher(cfg: DictConfig) -> None:
    r"""Serve a teacher to a student that learns from it while it responds itself.

    The student is `train distill` with `model.knowledge_distillation.on_policy.fraction`, or
    `train ppo` with `trainer.ppo.teacher_kl_coef`.

        nemo-aligner serve teacher pretrained_checkpoint.restore_from_path=teacher.nemo \
            inference.port=5556 inference.top_k=100

    The server gives its largest logits behind each token of the samples that it is sent, and the
    log-prob of the next one, until SIGTERM or SIGINT. docs/algorithms.md says more.
    """
    with long_imports():
        from nemo_aligner.algorithms.reward_server import TeacherServer
        from nemo_aligner.launch.experiment import start_with_teacher
        from nemo_aligner.models.nlp.gpt import megatron_gpt_knowledge_distillation as models
        from nemo_aligner.servers.requests import no_sentences

    model = start_with_teacher(cfg, "inference_teacher", models.TopKTeacherModel)
    model.set_eval()
    top_k, options = cfg.inference.top_k, _options(cfg, model)
    if options["vocab_size"] is not None and top_k > options["vocab_size"]:
        raise UserError(
            f"inference.top_k={top_k} is above the {options['vocab_size']} tokens of the "
            "vocabulary; lower it."
        )
    TeacherServer(
        infer_fn=lambda samples: model.top_logits(*samples, top_k),
        tokenize_func=no_sentences,
        model_forward_micro_batch_size=cfg.model.micro_batch_size,
        **options,
    ).run_server()
