# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The mathematics of rollouts and rewards against other libraries (see tests/oracle_table.py)."""

from types import SimpleNamespace

import pytest
import torch

from nemo_aligner.core.advantages import (
    calculate_advantages_and_returns,
    calculate_grpo_advantages,
    calculate_overlong_penalty,
    calculate_ppo_rewards,
    calculate_reinforce_returns,
    calculate_rloo_advantages,
    calculate_rloo_baseline,
    clip_rewards,
    spread_over_response,
)
from nemo_aligner.core.kl import AdaptiveKLController, calculate_kl_penalty
from nemo_aligner.core.tensors import masked_mean, masked_std
from nemo_aligner.parallel.collectives import normalize_tensor
from tests.oracle_table import GROUP_SIZE, Case, Comparisons
from tests.oracles import nemo_aligner_ppo_utils, oracle

GAMMA, LAMBDA, CRITIC_LAMBDA, BETA = 0.97, 0.9, 0.98, 0.05

COMPARISONS = Comparisons()
# Quantities that fewer than two of the libraries have in a form that can be called.
ONLY_ONE = {
    "soft overlong penalty": "verl's decodes text; test_ppo_data.py has a loop",
}
compares = COMPARISONS.of


def trl_trainer(**config):
    """trl's PPO trainer without a trainer: its methods read nothing of it but these."""
    from trl.trainer.ppo_trainer import PPOTrainer

    fake = SimpleNamespace(config=SimpleNamespace(**config), kl_ctl=SimpleNamespace(value=BETA))
    fake._kl_penalty = lambda a, b: PPOTrainer._kl_penalty(fake, a, b)
    return PPOTrainer, fake


def verl():
    return oracle("verl.trainer.ppo.core_algos")


def openrlhf_experience(case: Case, estimator: str, **args):
    """The rollout after OpenRLHF's compute_advantages_and_returns: its `rewards` are the scores,
    its KL is 0.

    It finds the groups by position, so `index` says where each row stands when the rows are sorted
    by prompt.
    """
    maker = oracle("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    defaults = dict(n_samples_per_prompt=GROUP_SIZE, reward_clip_range=None)
    defaults |= dict(gamma=1.0, no_advantage_std_norm=False)
    args = SimpleNamespace(advantage_estimator=estimator, **(defaults | args))
    fake = SimpleNamespace(strategy=SimpleNamespace(args=args), args=args)
    fake.advantage_estimator, fake.kl_ctl = estimator, SimpleNamespace(value=BETA)
    fake.get_cumulative_returns = lambda *a: maker.get_cumulative_returns(None, *a)
    position = torch.empty_like(case.prompts)
    position[torch.argsort(case.prompts, stable=True)] = torch.arange(len(case.prompts))
    experience = SimpleNamespace(index=position.tolist(), rewards=case.scores.clone())
    experience.kl, experience.action_mask = torch.zeros_like(case.values), case.mask
    experience.info = {"response_length": case.mask.sum(1)}
    return maker.compute_advantages_and_returns(fake, [experience])[0]


@compares("GAE", "trl", "verl", "openrlhf", "torchrl", "nemo-aligner")
def _(case, library):
    """trl and verl whiten their advantages, so theirs are returns minus values."""
    for lam, critic_lam in ((LAMBDA, None), (LAMBDA, CRITIC_LAMBDA)):
        given = case.planted(case.values), case.planted(case.rewards)
        ours = calculate_advantages_and_returns(*given, GAMMA, lam, case.mask, critic_lam)
        advantages, returns = their_gae(case, library, lam)
        yield ours[0][case.keep], advantages[case.keep]
        if critic_lam is not None:  # decoupled GAE: the returns are those of another lambda
            returns = their_gae(case, library, critic_lam)[1]
        yield ours[1][case.keep], returns[case.keep]


def their_gae(case, library, lam):
    values, rewards, mask = case.values, case.rewards, case.mask
    if library == "trl":
        trainer, fake = trl_trainer(gamma=GAMMA, lam=lam, whiten_rewards=False)
        returns = trainer.compute_advantages(fake, values, rewards, mask)[2]
        return returns - values, returns
    if library == "verl":
        returns = verl().compute_gae_advantage_return(rewards, values, mask, GAMMA, lam)[1]
        return returns - values, returns
    if library == "openrlhf":
        maker = oracle("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
        return maker.get_advantages_and_returns(None, values, rewards, mask, GAMMA, lam)
    if library == "torchrl":
        # [B, T, 1]; the next state's value is given, and an episode is done at its last token.
        done = torch.arange(mask.shape[1]) == (case.lengths - 2)[:, None]
        following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
        estimate = oracle("torchrl.objectives.value.functional").generalized_advantage_estimate
        given = (x.unsqueeze(-1) for x in (values, following, rewards, done))
        results = estimate(GAMMA, lam, *given)
        return [x.squeeze(-1) for x in results]
    function = nemo_aligner_ppo_utils().calculate_advantages_and_returns
    return function(values, rewards, GAMMA, lam, mask)


@compares("whitening", "trl", "verl", "openrlhf")
def _(case, library):
    """trl and verl correct the variance (Bessel), OpenRLHF does not; ours are 0 outside the mask,
    theirs are not.
    """
    ours = normalize_tensor(case.planted(case.values), case.mask)
    assert not ours[~case.keep].any()
    if library == "openrlhf":
        normalize = oracle("openrlhf.models.utils").masked_normalize
        yield ours[case.keep], normalize(case.values, case.mask, dim=None)[case.keep]
        return
    module = "trl.core" if library == "trl" else "verl.utils.torch_functional"
    whiten = oracle(module).masked_whiten
    yield ours[case.keep] * case.bessel(), whiten(case.values, case.mask)[case.keep]
    # Rewards are divided by their deviation, their mean kept.
    mean = case.values[case.keep].mean()
    ours = normalize_tensor(case.planted(case.values), case.mask, shift_mean=False)[case.keep]
    theirs = whiten(case.values, case.mask, shift_mean=False)[case.keep]
    yield (ours - mean) * case.bessel() + mean, theirs


@compares("masked mean and deviation", "trl", "verl", "openrlhf")
def _(case, library):
    values = case.planted(case.values)
    if library == "openrlhf":
        module = oracle("openrlhf.models.utils")
        yield masked_mean(values, case.mask, 1), module.masked_mean(case.values, case.mask, 1)
    else:
        module = oracle("trl.core" if library == "trl" else "verl.utils.torch_functional")
        yield masked_std(values, case.mask), module.masked_var(case.values, case.mask).sqrt()
    yield masked_mean(values, case.mask), module.masked_mean(case.values, case.mask)


@compares("KL estimators", "trl", "verl", "openrlhf", "nemo-aligner")
def _(case, library):
    """trl has no k3 and calls k2 "mse"; verl and OpenRLHF keep k3 within 10, which these log-probs
    do not reach.
    """
    a, b = (x[case.keep] for x in (case.logprobs, case.ref_logprobs))
    theirs = {
        "trl": lambda name: trl_trainer(kl_penalty=name)[1]._kl_penalty(a, b),
        "verl": lambda name: verl().kl_penalty(a, b, name),
        "openrlhf": lambda name: oracle("openrlhf.models.utils").compute_approx_kl(a, b, name),
        "nemo-aligner": lambda is_abs: nemo_aligner_ppo_utils().calculate_kl_penalty(a, b, is_abs),
    }[library]
    names = {
        "trl": {"k1": "kl", "abs": "abs", "k2": "mse"},
        "verl": {name: name for name in ("k1", "abs", "k2", "k3")},
        "openrlhf": {name: name for name in ("k1", "k2", "k3")},
        "nemo-aligner": {"k1": False, "abs": True},
    }[library]
    for estimator, name in names.items():
        yield calculate_kl_penalty(a, b, estimator=estimator), theirs(name)
    assert (calculate_kl_penalty(a, b, estimator="k3") < 10).all()


@compares("adaptive KL controller", "verl", "openrlhf")
def _(case, library):
    target, horizon, samples = 6.0, 1000, 64
    module, name = {
        "verl": ("verl.trainer.ppo.core_algos", "target_kl"),
        "openrlhf": ("openrlhf.trainer.ppo_utils.kl_controller", "target"),
    }[library]
    settings = {"init_kl_coef": BETA, "horizon": horizon, name: target}
    theirs = oracle(module).AdaptiveKLController(**settings)
    ours = AdaptiveKLController(BETA, target, horizon)
    for kl in (0.0, 1.0, 5.5, 6.0, 6.7, 50.0):
        ours.update(kl, samples)
        theirs.update(kl, samples)
        yield torch.tensor(ours.value), torch.as_tensor(theirs.value, dtype=torch.float32)


@compares("token rewards", "openrlhf", "nemo-aligner")
def _(case, library):
    """All put the score on the response's last token; NeMo-Aligner's width is ours, S-1. OpenRLHF
    clips it first.
    """
    kl = calculate_kl_penalty(case.logprobs, case.ref_logprobs, use_absolute_kl=False)
    scores = clip_rewards(case.scores, 0.7) if library == "openrlhf" else case.scores
    given = case.values, scores, case.lengths, case.planted(kl)
    ours = calculate_ppo_rewards(*given, penalty_factor=BETA)
    if library == "openrlhf":
        reward = oracle("openrlhf.models.utils").compute_reward
        theirs = reward(case.scores, BETA, kl, case.mask, reward_clip_range=(-0.7, 0.7))
    else:
        reward = nemo_aligner_ppo_utils().calculate_ppo_rewards
        theirs = reward(case.values, case.scores, case.lengths, kl, penalty_factor=BETA)
    yield ours[case.keep], theirs[case.keep]


@compares("REINFORCE++", "verl", "openrlhf")
def _(case, library):
    """Returns and normalised advantages. verl corrects the variance (Bessel); OpenRLHF rewards the
    last token only.
    """
    if library == "verl":
        rewards, config, bessel = case.rewards, SimpleNamespace(gamma=GAMMA), case.bessel()
        advantages, returns = verl().compute_reinforce_plus_plus_outcome_advantage(
            rewards, case.mask, config
        )
    else:
        rewards = calculate_ppo_rewards(case.values, case.scores, case.lengths, 0.0)
        bessel, experience = 1.0, openrlhf_experience(case, "reinforce", gamma=GAMMA)
        advantages, returns = experience.advantages, experience.returns
    ours = calculate_reinforce_returns(case.planted(rewards), GAMMA, case.mask)
    yield ours[case.keep], returns[case.keep]
    yield normalize_tensor(ours, case.mask)[case.keep] * bessel, advantages[case.keep]


@compares("RLOO", "verl", "openrlhf", "nemo-aligner")
def _(case, library):
    """NeMo-Aligner has the baseline alone. trl 0.11 has RLOO inside a training loop only."""
    ours = spread_over_response(calculate_rloo_advantages(case.scores, case.prompts), case.mask)
    if library == "verl":
        for kind in ("", "vectorized_"):
            rloo = getattr(verl(), f"compute_rloo_{kind}outcome_advantage")
            yield ours, rloo(case.token_scores(), case.mask, case.prompts.numpy())[0]
    elif library == "openrlhf":
        yield ours[case.keep], openrlhf_experience(case, "rloo").advantages[case.keep]
    else:
        baseline = nemo_aligner_ppo_utils().calculate_rloo_baseline
        # With samples that do not count; NeMo-Aligner's own baseline is not used.
        valid = (case.lengths % 3 > 0).float()
        for mask in (torch.ones_like(case.scores), valid):
            keep = mask.bool()
            theirs = baseline(case.prompts[:, None], case.scores, mask)
            scores = torch.where(keep, case.scores, torch.nan)
            yield calculate_rloo_baseline(case.prompts, scores, mask)[keep], theirs[keep]
            advantages = calculate_rloo_advantages(scores, case.prompts, mask)
            yield advantages[keep], (case.scores - theirs)[keep]
            assert not advantages[~keep].any()


@compares("GRPO", "verl", "openrlhf")
def _(case, library):
    """All use the Bessel-corrected deviation, plus 1e-6 (verl, ours) or 1e-9 (OpenRLHF)."""
    ours = spread_over_response(calculate_grpo_advantages(case.scores, case.prompts), case.mask)
    doctor = calculate_grpo_advantages(case.scores, case.prompts, normalize_std=False)
    doctor = spread_over_response(doctor, case.mask)
    if library == "verl":
        index = case.prompts.numpy()
        grpo = verl().compute_grpo_outcome_advantage
        yield ours, grpo(case.token_scores(), case.mask, index)[0]
        yield doctor, grpo(case.token_scores(), case.mask, index, norm_adv_by_std_in_grpo=False)[0]
        grpo = verl().compute_grpo_vectorized_outcome_advantage
        yield ours, grpo(case.token_scores(), case.mask, case.prompts)[0]
    else:
        yield ours[case.keep], openrlhf_experience(case, "group_norm").advantages[case.keep]
        yield doctor[case.keep], openrlhf_experience(case, "dr_grpo").advantages[case.keep]


@compares("soft overlong penalty", "openrlhf")
def _(case):
    limit, buffer, factor = 7, 4, 0.6
    counts = case.lengths - case.prompt_lengths
    ours = case.scores + calculate_overlong_penalty(counts, limit, buffer, factor)
    experience = SimpleNamespace(rewards=case.scores.clone(), info={"response_length": counts})
    penalize = oracle("openrlhf.trainer.ppo_utils.length_penalty").apply_overlong_penalty
    penalize([experience], limit, buffer, factor)
    yield ours, experience.rewards
    assert ours.lt(case.scores).any() and ours.eq(case.scores).any()


@pytest.mark.parametrize("quantity,library", COMPARISONS.params())
def test_same_as(quantity, library):
    COMPARISONS.check(quantity, library)


def test_every_quantity_is_compared_with_two_libraries():
    assert COMPARISONS.with_one_library() == set(ONLY_ONE)
