# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which variants of PPO are refused, and that the remedy named in the message works."""

import re

import pytest

from nemo_aligner.core import estimators
from nemo_aligner.core.errors import ConfigError
from tests.cases import rows, says
from tests.unit.test_config_checks import check

SHORT = {
    "GRPO": "T.advantage_estimator=grpo; M.num_rollouts_per_prompt=4; SEPARATE",
    "TEACHER": "T.advantage_estimator=teacher; T.teacher_kl_coef=1; SEPARATE; "
    "T.initial_policy_kl_penalty=0",
    "SEPARATE": "R.combine_rm_and_critic_server=False",
    "R.": "remote_critic_rm.",
    "T.": "trainer.ppo.",
    "M.": "model.ppo.",
}


def long(text):
    """`text` with what the names of `SHORT` stand for."""
    for name, stands_for in SHORT.items():
        text = re.sub(rf"\b{re.escape(name)}", stands_for, text)
    return text


GRPO = long("GRPO")


def test_names_of_choices_are_those_of_the_math():
    from nemo_aligner.core import advantages, kl

    assert estimators.KL_ESTIMATORS == kl.KL_ESTIMATORS
    assert estimators.POLICY_LOSSES == tuple(kl.SURROGATES)
    named = {*advantages.TOKEN_ESTIMATORS, *advantages.RESPONSE_ESTIMATORS}
    assert set(estimators.ADVANTAGE_ESTIMATORS) == named


# Most others are the remedies below.
WORKS = rows("""
T.advantage_estimator=reinforce_plus_plus; SEPARATE
T.adaptive_kl.enable=True; T.kl_estimator=k3; T.target_kl=0.1
M.dual_clip=3; M.kl_loss_coef=0.001; T.critic_gae_lambda=1
M.ratio_eps_high=0.28; M.loss_reduction=constant
GRPO; M.policy_loss=gmpo; M.loss_reduction=sequence; M.ratio_eps=0.4; M.ratio_eps_high=0.5
GRPO; T.dynamic_sampling_rounds=9
T.advantage_estimator=gdpo; M.num_rollouts_per_prompt=4; SEPARATE; T.initial_policy_kl_penalty=0;
    R.reward_models={kind: {ip: a, port: 1}, terse: {ip: b, port: 2}}
T.sampler_correction={weights: token, reject: sequence}; T.covariance.rule=kl; T.ppo_epochs=2
M.generation.reshard={tp: 1, pp: 1}; model.tensor_model_parallel_size=2; trainer.devices=2
""")
# overrides -> what the error says, with ` & ` between -> the remedy that it names
REFUSED = rows("""
M.environment.path=a.py:A; M.environment.port=5600 -> M.environment.port=5600 & set one to null ->
    M.environment.path=null
M.environment.port=5600; M.environment.host=0.0.0.0 -> M.environment.host=0.0.0.0 & needs a token
    -> M.environment.host=127.0.0.1
M.environment.host=0.0.0.0 -> environment.host=0.0.0.0 has no effect & nothing listens for agents
    -> M.environment.host=127.0.0.1
M.environment.token_file=no.txt -> environment.token_file=no.txt has no effect &
    M.environment.token_file=null -> M.environment.token_file=null
M.environment.path=a.py:A; R.combine_rm_and_critic_server=True -> a.py:A gives the rewards &
    combine_rm_and_critic_server=True & set that to False -> SEPARATE
M.environment.path=a.py:A; SEPARATE; R.reward_models={a: {ip: b, port: 1}} -> would not be asked &
    leave it null -> R.reward_models=null
GRPO; M.environment.port=5600; T.overlong_buffer_len=64 -> overlong_buffer_len=64 is for single
    responses & environment.port=5600 -> T.overlong_buffer_len=0
T.advantage_estimator=teacher; SEPARATE; T.initial_policy_kl_penalty=0 ->
    advantage_estimator=teacher learns from a teacher alone & teacher_kl_coef=0 ->
    T.teacher_kl_coef=1
TEACHER; T.initial_policy_kl_penalty=0.01 -> initial_policy_kl_penalty=0.01 is part of the total
    -> T.initial_policy_kl_penalty=0
TEACHER; R.reward_model.port=5999 -> reward_model={name: reward_model & is not asked & in
    remote_critic_rm -> R.reward_model.port=5555
TEACHER; remote_teacher.teachers={a: {port: 5557}, b: {port: 5558}} -> remote_teacher.column=None &
    do not go together -> remote_teacher.column=teacher
TEACHER; remote_teacher.column=teacher; remote_teacher.teachers={a: 5557} -> must map names to
    sections with host, port or name -> remote_teacher.teachers={a: {port: 5557}}
GRPO; M.policy_loss=gmpo; M.loss_reduction=sequence; T.teacher_kl_coef=1 -> policy_loss=gmpo & and
    teacher_kl_coef -> T.teacher_kl_coef=0
GRPO; T.process_rewards=steps; T.overlong_buffer_len=64 -> overlong_buffer_len=64 &
    process_rewards=steps ->
T.advantage_estimator=gdpo; M.num_rollouts_per_prompt=4; SEPARATE -> advantage_estimator=gdpo &
    reward_models -> T.advantage_estimator=grpo
T.sampler_correction.weights=token; M.rollout_logprobs=sampler -> weights=token &
    rollout_logprobs=sampler -> M.rollout_logprobs=recompute
GRPO; M.policy_loss=gmpo; M.loss_reduction=sequence; T.covariance.rule=clip -> covariance.rule=clip
    & policy_loss=gmpo -> T.covariance.rule=null
T.covariance.rule=kl; M.num_rollout_samples=64 -> covariance.rule=kl & second update ->
    T.covariance.rule=clip
T.covariance.high=0.5 -> covariance.low=1.0 & covariance.high=0.5 -> T.covariance.low=0
GRPO; T.dynamic_sampling_rounds=2; T.process_rewards=steps -> dynamic_sampling_rounds=2 &
    process_rewards=steps -> T.process_rewards=sum
T.dynamic_sampling_rounds=2 -> dynamic_sampling_rounds=2 & advantage_estimator=gae ->
    T.dynamic_sampling_rounds=0
M.policy_loss=gspo -> policy_loss=gspo & loss_reduction=token & set loss_reduction=sequence ->
    M.loss_reduction=sequence
M.policy_loss=cispo; M.dual_clip=3 -> dual_clip=3 is for policy_loss=clip & =cispo ->
    M.dual_clip=null
M.policy_loss=sapo; M.ratio_eps_high=0.28 -> ratio_eps_high=0.28 is for policy_loss=clip & =sapo
    -> M.ratio_eps_high=null
M.policy_loss=gmpo; M.loss_reduction=sequence -> policy_loss=gmpo & Use grpo, dr_grpo or rloo ->
    GRPO
M.policy_loss=sapo; T.loss=mine.py:loss -> T.loss=mine.py:loss takes the place of
    M.policy_loss=sapo -> T.loss=null
M.generation.reshard={tp: 1} -> reshard={tp: 1} & both sizes ->
M.generation.reshard={tp: 3, pp: 1}; model.tensor_model_parallel_size=2; trainer.devices=2 -> {tp:
    3, pp: 1} & 2 ranks & divide -> M.generation.reshard=auto
M.generation.reshard={tp: 2, pp: 1}; trainer.devices=2; T.batch_iterator.use_flask=True ->
    use_flask & {tp: 2, pp: 1} -> T.batch_iterator.use_flask=False
M.generation.reshard={tp: 2, pp: 1}; model.context_parallel_size=2; trainer.devices=4 -> {tp: 2,
    pp: 1} & context_parallel_size=2 -> M.generation.reshard=auto
M.generation.reshard={tp: 1, pp: 1}; model.tensor_model_parallel_size=2;
    model.sequence_parallel=True; trainer.devices=2; model.bias=False; model.num_moe_experts=4 ->
    {tp: 1, pp: 1} & num_moe_experts=4 -> M.generation.reshard=auto
M.generation.reshard=auto; model.peft.peft_scheme=lora; model.peft.merge_for_generation=False ->
    merge_for_generation=False & reshard=none -> M.generation.reshard=none
T.trt_llm.enable=True; T.trt_llm.reshard=True; model.peft.peft_scheme=lora;
    model.peft.merge_for_generation=False -> M.generation.reshard=auto & merge_for_generation=False
    -> T.trt_llm.enable=False
T.overlong_buffer_len=5000 -> 5000 & max_length=2048; lower it -> T.overlong_buffer_len=2048
T.adaptive_kl.enable=True; T.adaptive_kl.target=null -> T.adaptive_kl.target is not set ->
    T.adaptive_kl.enable=False
R.critic.port=null -> critic.port is not set & gae -> GRPO
T.adaptive_kl.enable=True; T.initial_policy_kl_penalty=0 -> initial_policy_kl_penalty=0 & stays 0
    -> T.initial_policy_kl_penalty=0.01
T.adaptive_kl.enable=True; T.adaptive_kl.horizon=100 -> 512 samples & above 102.4 ->
    T.adaptive_kl.horizon=5120
GRPO; M.num_rollouts_per_prompt=1 -> grpo & num_rollouts_per_prompt=1 ->
    M.num_rollouts_per_prompt=2
GRPO; T.whiten_rewards=True -> whiten_rewards=True & grpo & length -> T.whiten_rewards=False
GRPO; M.sampling_params.use_greedy=True -> 4 responses & the same ->
    M.sampling_params.use_greedy=False
GRPO; R.combine_rm_and_critic_server=True -> combine_rm_and_critic_server=True & reward_model ->
    SEPARATE
GRPO; T.critic_warmup_steps=2 -> critic_warmup_steps=2 -> T.critic_warmup_steps=0
GRPO; T.critic_gae_lambda=1.0 -> critic_gae_lambda=1.0 -> T.critic_gae_lambda=null
GRPO; T.discount_factor=0.9 -> discount_factor=0.9 -> T.discount_factor=1.0
T.target_kl=0.1; model.global_batch_size=512 -> only one & 512 samples -> T.ppo_epochs=2
""")


@pytest.mark.parametrize("overrides", [overrides for [overrides] in WORKS])
def test_variants_that_work_pass_without_a_note(tmp_path, overrides):
    assert check("gpt_ppo_actor", tmp_path, *long(overrides).split("; ")) == []


@pytest.mark.parametrize(("overrides", "words", "remedy"), REFUSED)
def test_variants_that_cannot_work_and_that_remedies_do(tmp_path, overrides, words, remedy):
    with says(ConfigError, *long(words).split(" & ")):
        check("gpt_ppo_actor", tmp_path, *long(overrides).split("; "))
    if remedy:
        both = long(f"{overrides}; {remedy}")
        assert check("gpt_ppo_actor", tmp_path, *both.split("; ")) == []
