# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which variants of PPO are refused, and that the remedy named in the message works."""

import pytest

from nemo_aligner.core import estimators
from nemo_aligner.core.errors import ConfigError
from tests.unit.test_config_checks import check

SEPARATE = "remote_critic_rm.combine_rm_and_critic_server=False"
TEACHER = f"trainer.ppo.advantage_estimator=teacher; trainer.ppo.teacher_kl_coef=1; {SEPARATE}; "
TEACHER += "trainer.ppo.initial_policy_kl_penalty=0"
GRPO = f"trainer.ppo.advantage_estimator=grpo; model.ppo.num_rollouts_per_prompt=4; {SEPARATE}"


def test_names_of_choices_are_those_of_the_math():
    from nemo_aligner.core import advantages, kl, surrogates

    assert estimators.KL_ESTIMATORS == kl.KL_ESTIMATORS
    assert estimators.POLICY_LOSSES == tuple(surrogates.SURROGATES)
    named = {*advantages.TOKEN_ESTIMATORS, *advantages.RESPONSE_ESTIMATORS}
    assert set(estimators.ADVANTAGE_ESTIMATORS) == named


@pytest.mark.parametrize(
    "overrides",
    [
        GRPO,
        f"trainer.ppo.advantage_estimator=reinforce_plus_plus; {SEPARATE}",
        "trainer.ppo.adaptive_kl.enable=True; trainer.ppo.kl_estimator=k3; "
        "trainer.ppo.target_kl=0.1",
        "trainer.ppo.overlong_buffer_len=128; trainer.ppo.reward_clip=5; "
        "trainer.ppo.advantage_clip=3",
        "model.ppo.dual_clip=3; model.ppo.kl_loss_coef=0.001; trainer.ppo.critic_gae_lambda=1",
        "model.ppo.rollout_logprobs=sampler",
        "model.ppo.ratio_eps_high=0.28; model.ppo.loss_reduction=constant",
        f"{GRPO}; model.ppo.policy_loss=gmpo; model.ppo.loss_reduction=sequence; "
        "model.ppo.ratio_eps=0.4; model.ppo.ratio_eps_high=0.5",
        GRPO.replace("=grpo", "=dr_grpo"),
        f"{GRPO}; trainer.ppo.dynamic_sampling_rounds=9",
        GRPO.replace("=grpo", "=gdpo") + "; trainer.ppo.initial_policy_kl_penalty=0; "
        "remote_critic_rm.reward_models={kind: {ip: a, port: 1}, terse: {ip: b, port: 2}}",
        "trainer.ppo.sampler_correction={weights: token, reject: sequence}; "
        "trainer.ppo.covariance.rule=kl; trainer.ppo.ppo_epochs=2",
        "model.ppo.generation.reshard=auto; model.ppo.generation.kv_cache_gb=0.5",
        "model.ppo.generation.reshard={tp: 1, pp: 1}; model.tensor_model_parallel_size=2; "
        "trainer.devices=2",
        "model.ppo.num_rollouts_per_prompt=2",  # several responses are of use with a critic too
    ],
)
def test_variants_that_work_pass_without_a_note(tmp_path, overrides):
    assert check("gpt_ppo_actor", tmp_path, *overrides.split("; ")) == []


@pytest.mark.parametrize(
    "overrides, words, remedy",
    [
        ("trainer.ppo.advantage_estimator=gape", ["gape", "rloo"], ""),
        (
            "model.ppo.environment.path=a.py:A; model.ppo.environment.port=5600",
            ["model.ppo.environment.port=5600", "set one to null"],
            "model.ppo.environment.path=null",
        ),
        (
            "model.ppo.environment.port=5600; model.ppo.environment.host=0.0.0.0",
            ["model.ppo.environment.host=0.0.0.0", "needs a token"],
            "model.ppo.environment.host=127.0.0.1",
        ),
        (
            "model.ppo.environment.host=0.0.0.0",
            ["environment.host=0.0.0.0 has no effect", "nothing listens for agents"],
            "model.ppo.environment.host=127.0.0.1",
        ),
        (
            "model.ppo.environment.token_file=no.txt",
            [
                "environment.token_file=no.txt has no effect",
                "model.ppo.environment.token_file=null",
            ],
            "model.ppo.environment.token_file=null",
        ),
        (
            f"{GRPO}; model.ppo.environment.port=5600; trainer.ppo.overlong_buffer_len=64",
            ["overlong_buffer_len=64 is for single responses", "environment.port=5600"],
            "trainer.ppo.overlong_buffer_len=0",
        ),
        (
            f"trainer.ppo.advantage_estimator=teacher; {SEPARATE}; "
            "trainer.ppo.initial_policy_kl_penalty=0",
            ["advantage_estimator=teacher learns from a teacher alone", "teacher_kl_coef=0"],
            "trainer.ppo.teacher_kl_coef=1",
        ),
        (
            TEACHER.replace("penalty=0", "penalty=0.01"),
            ["initial_policy_kl_penalty=0.01 is part of the reward"],
            "trainer.ppo.initial_policy_kl_penalty=0",
        ),
        (
            f"{TEACHER}; remote_critic_rm.reward_model.port=5999",
            ["reward_model={'name': 'reward_model'", "is not asked", "in remote_critic_rm"],
            "remote_critic_rm.reward_model.port=5555",
        ),
        (
            f"{TEACHER}; remote_teacher.teachers={{a: {{port: 5557}}, b: {{port: 5558}}}}",
            ["remote_teacher.column=None", "do not go together"],
            "remote_teacher.column=teacher",
        ),
        (
            f"{TEACHER}; remote_teacher.column=teacher; remote_teacher.teachers={{a: 5557}}",
            ["must map names to sections with host, port or name"],
            "remote_teacher.teachers={a: {port: 5557}}",
        ),
        (
            f"{GRPO}; model.ppo.policy_loss=gmpo; model.ppo.loss_reduction=sequence; "
            "trainer.ppo.teacher_kl_coef=1",
            ["policy_loss=gmpo", "and teacher_kl_coef"],
            "trainer.ppo.teacher_kl_coef=0",
        ),
        (
            f"{GRPO}; trainer.ppo.process_rewards=steps; trainer.ppo.overlong_buffer_len=64",
            ["overlong_buffer_len=64", "process_rewards=steps"],
            "",
        ),
        (
            GRPO.replace("=grpo", "=gdpo"),
            ["advantage_estimator=gdpo", "reward_models"],
            "trainer.ppo.advantage_estimator=grpo",
        ),
        (
            "trainer.ppo.sampler_correction.weights=token; model.ppo.rollout_logprobs=sampler",
            ["weights=token", "rollout_logprobs=sampler"],
            "model.ppo.rollout_logprobs=recompute",
        ),
        (
            f"{GRPO}; model.ppo.policy_loss=gmpo; model.ppo.loss_reduction=sequence; "
            "trainer.ppo.covariance.rule=clip",
            ["covariance.rule=clip", "policy_loss=gmpo"],
            "trainer.ppo.covariance.rule=null",
        ),
        (
            "trainer.ppo.covariance.rule=kl; model.ppo.num_rollout_samples=64",
            ["covariance.rule=kl", "second update"],
            "trainer.ppo.covariance.rule=clip",
        ),
        (
            "trainer.ppo.covariance.high=0.5",
            ["covariance.low=1.0", "covariance.high=0.5"],
            "trainer.ppo.covariance.low=0",
        ),
        (
            "trainer.ppo.sampler_correction.cap=0",
            ["sampler_correction.cap=0", "above 0"],
            "trainer.ppo.sampler_correction.cap=1",
        ),
        (
            f"{GRPO}; trainer.ppo.dynamic_sampling_rounds=2; trainer.ppo.process_rewards=steps",
            ["dynamic_sampling_rounds=2", "process_rewards=steps"],
            "trainer.ppo.process_rewards=sum",
        ),
        (
            "trainer.ppo.dynamic_sampling_rounds=2",
            ["dynamic_sampling_rounds=2", "advantage_estimator=gae"],
            "trainer.ppo.dynamic_sampling_rounds=0",
        ),
        ("model.ppo.dual_clip=1", ["dual_clip=1", "above 1"], "model.ppo.dual_clip=null"),
        (
            "model.ppo.policy_loss=gspo",
            ["policy_loss=gspo", "loss_reduction=token", "set loss_reduction=sequence"],
            "model.ppo.loss_reduction=sequence",
        ),
        (
            "model.ppo.policy_loss=cispo; model.ppo.dual_clip=3",
            ["dual_clip=3 is for policy_loss=clip, gspo, not cispo"],
            "model.ppo.dual_clip=null",
        ),
        (
            "model.ppo.policy_loss=sapo; model.ppo.ratio_eps_high=0.28",
            ["ratio_eps_high=0.28 is for policy_loss=clip, gspo, cispo, gmpo, not sapo"],
            "model.ppo.ratio_eps_high=null",
        ),
        (
            "model.ppo.policy_loss=gmpo; model.ppo.loss_reduction=sequence",
            ["policy_loss=gmpo", "Use grpo, dr_grpo or rloo"],
            GRPO,
        ),
        (
            "model.ppo.policy_loss=sapo; trainer.ppo.loss=mine.py:loss",
            ["trainer.ppo.loss=mine.py:loss takes the place of model.ppo.policy_loss=sapo"],
            "trainer.ppo.loss=null",
        ),
        ("model.ppo.generation.reshard=tp", ["reshard", "auto"], ""),
        (
            "model.ppo.generation.cuda_graphs=maybe",
            ["cuda_graphs='maybe'", "auto, True, False"],
            "model.ppo.generation.cuda_graphs=False",
        ),
        ("model.ppo.generation.reshard={tp: 1}", ["reshard={tp: 1}", "both sizes"], ""),
        ("model.ppo.generation.reshard={tp: 0, pp: 1}", ["reshard.tp=0", "at least 1"], ""),
        (
            "model.ppo.generation.reshard={tp: 3, pp: 1}; model.tensor_model_parallel_size=2; "
            "trainer.devices=2",
            ["{tp: 3, pp: 1}", "2 ranks", "divide"],
            "model.ppo.generation.reshard=auto",
        ),
        (
            "model.ppo.generation.reshard={tp: 2, pp: 1}; trainer.devices=2; "
            "trainer.ppo.batch_iterator.use_flask=True",
            ["use_flask", "{tp: 2, pp: 1}"],
            "trainer.ppo.batch_iterator.use_flask=False",
        ),
        (
            "model.ppo.generation.reshard={tp: 2, pp: 1}; model.context_parallel_size=2; "
            "trainer.devices=4",
            ["{tp: 2, pp: 1}", "context_parallel_size=2"],
            "model.ppo.generation.reshard=auto",
        ),
        (
            "model.ppo.generation.reshard={tp: 1, pp: 1}; model.tensor_model_parallel_size=2; "
            "model.sequence_parallel=True; trainer.devices=2; model.bias=False; "
            "model.num_moe_experts=4",
            ["{tp: 1, pp: 1}", "num_moe_experts=4"],
            "model.ppo.generation.reshard=auto",
        ),
        (
            "model.ppo.generation.reshard=auto; model.peft.peft_scheme=lora; "
            "model.peft.merge_for_generation=False",
            ["merge_for_generation=False", "reshard=none"],
            "model.ppo.generation.reshard=none",
        ),
        (
            "trainer.ppo.trt_llm.enable=True; trainer.ppo.trt_llm.reshard=True; "
            "model.peft.peft_scheme=lora; model.peft.merge_for_generation=False",
            ["model.ppo.generation.reshard=auto", "merge_for_generation=False"],
            "trainer.ppo.trt_llm.enable=False",
        ),
        ("trainer.ppo.target_kl=0", ["target_kl=0", "above 0"], "trainer.ppo.target_kl=null"),
        (
            "trainer.ppo.overlong_buffer_len=5000",
            ["5000", "set it to at most 2048"],
            "trainer.ppo.overlong_buffer_len=2048",
        ),
        (
            "trainer.ppo.adaptive_kl.enable=True; trainer.ppo.adaptive_kl.target=null",
            ["trainer.ppo.adaptive_kl.target is not set"],
            "trainer.ppo.adaptive_kl.enable=False",
        ),
        (
            "trainer.ppo.adaptive_kl.enable=True; trainer.ppo.adaptive_kl.horizon=null",
            ["trainer.ppo.adaptive_kl.horizon is not set"],
            "trainer.ppo.adaptive_kl.horizon=10000",
        ),
        ("remote_critic_rm.critic.port=null", ["critic.port is not set", "gae"], GRPO),
        (
            "trainer.ppo.adaptive_kl.enable=True; trainer.ppo.initial_policy_kl_penalty=0",
            ["initial_policy_kl_penalty=0", "stays 0"],
            "trainer.ppo.initial_policy_kl_penalty=0.01",
        ),
        (
            "trainer.ppo.adaptive_kl.enable=True; trainer.ppo.adaptive_kl.horizon=100",
            ["512 samples", "above 102.4"],
            "trainer.ppo.adaptive_kl.horizon=5120",
        ),
        (
            f"{GRPO}; model.ppo.num_rollouts_per_prompt=1",
            ["grpo", "num_rollouts_per_prompt=1"],
            "model.ppo.num_rollouts_per_prompt=2",
        ),
        (
            f"{GRPO}; trainer.ppo.whiten_rewards=True",
            ["whiten_rewards=True", "grpo", "length"],
            "trainer.ppo.whiten_rewards=False",
        ),
        (
            f"{GRPO}; model.ppo.sampling_params.use_greedy=True",
            ["4 responses", "the same"],
            "model.ppo.sampling_params.use_greedy=False",
        ),
        (
            f"{GRPO}; remote_critic_rm.combine_rm_and_critic_server=True",
            ["combine_rm_and_critic_server=True", "reward_model"],
            SEPARATE,
        ),
        (
            f"{GRPO}; trainer.ppo.critic_warmup_steps=2",
            ["critic_warmup_steps=2"],
            "trainer.ppo.critic_warmup_steps=0",
        ),
        (
            f"{GRPO}; trainer.ppo.critic_gae_lambda=1.0",
            ["critic_gae_lambda=1.0"],
            "trainer.ppo.critic_gae_lambda=null",
        ),
        (
            f"{GRPO}; trainer.ppo.discount_factor=0.9",
            ["discount_factor=0.9"],
            "trainer.ppo.discount_factor=1.0",
        ),
        (
            "trainer.ppo.target_kl=0.1; model.global_batch_size=512",
            ["only one", "512 samples"],
            "trainer.ppo.ppo_epochs=2",
        ),
    ],
)
def test_variants_that_cannot_work_are_refused_and_the_remedy_works(
    tmp_path, overrides, words, remedy
):
    with pytest.raises(ConfigError) as caught:
        check("gpt_ppo_actor", tmp_path, *overrides.split("; "))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    if remedy:
        assert check("gpt_ppo_actor", tmp_path, *f"{overrides}; {remedy}".split("; ")) == []
