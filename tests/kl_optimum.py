# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny problems whose KL-regularised optimum is known in closed form, and PPO, GRPO, RLOO and
REINFORCE++ on them with the project's own data path and losses. `python -m tests.kl_optimum`
prints the table of docs/ppo.md.

The objective of a policy pi over the responses y to one prompt (Ziegler et al. 2019,
arXiv:1909.08593, eq. 2) and its maximum are

    J(pi)  = sum over y of pi(y) (r(y) - beta log(pi(y) / ref(y)))
    pi*(y) = ref(y) exp(r(y) / beta) / Z,    J(pi*) = beta log Z,
    Z      = sum over y of ref(y) exp(r(y) / beta)

There are so few responses that every sum runs over all of them. The policy is a table of logits:
one row per state, where a state is the tokens of the response so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.algorithms.ppo_data import DataSettings, make_ppo_data
from nemo_aligner.config.defaults import complete
from nemo_aligner.core.losses import loss_weights, ppo_actor_loss, ppo_critic_loss

ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus")
PROMPT = 0  # its only token; no number depends on it
STEPS, SAMPLES, UPDATES, GROUP, RATE = 80, 128, 2, 8, 0.1


@dataclass
class Problem:
    """One prompt with responses of one or two tokens out of V.

    Attributes:
        reference: [states, V] log-probs of the reference policy: one state for responses of one
            token; for two, state 0, and state 1 + a after the first token a.
        rewards: [n] of all responses, in the order of `responses`.
        beta: weight of the KL.
        responses: [n, tokens], all there are.
        states: [n, tokens], in which each token is drawn.
    """

    reference: Tensor
    rewards: Tensor
    beta: float = 1.0

    def __post_init__(self) -> None:
        states, tokens = self.reference.shape
        length = 1 if states == 1 else 2
        self.responses = torch.cartesian_prod(*[torch.arange(tokens)] * length).view(-1, length)
        before = torch.stack([torch.zeros_like(self.responses[:, 0]), 1 + self.responses[:, 0]], 1)
        self.states = before[:, :length]

    def logprobs(self, logits: Tensor) -> Tensor:
        """[n, tokens] of all responses under the policy `logits` [states, V]."""
        return logits.log_softmax(-1)[self.states, self.responses]

    def kl(self, logits: Tensor) -> float:
        """KL of the policy to the reference, over whole responses."""
        policy, reference = (self.logprobs(x).sum(-1) for x in (logits, self.reference))
        return (policy.exp() * (policy - reference)).sum().item()

    def objective(self, logits: Tensor) -> float:
        """J of the policy."""
        reward = (self.logprobs(logits).sum(-1).exp() * self.rewards).sum().item()
        return reward - self.beta * self.kl(logits)

    def _tilted(self) -> Tensor:
        """[n] of the responses: log(ref(y) exp(r(y) / beta))."""
        return self.logprobs(self.reference).sum(-1) + self.rewards / self.beta

    def optimum(self) -> Tensor:
        """[n] probabilities of the responses under pi*."""
        return self._tilted().softmax(0)

    def best(self) -> float:
        """J of pi*."""
        return self.beta * self._tilted().logsumexp(0).item()

    def gap_closed(self, logits: Tensor) -> float:
        """Share of the way in J from the reference policy (0) to the optimum (1)."""
        start = self.objective(self.reference)
        return (self.objective(logits) - start) / (self.best() - start)


def one_token() -> Problem:
    """Four tokens, of which the rarest is the good one. J: start 0.328, optimum 0.7186 at KL
    0.458; the rarest token alone 2 + log 0.16 = 0.167 at KL -log 0.16 = 1.833.
    """
    reference = torch.tensor([[0.40, 0.24, 0.20, 0.16]], dtype=torch.float64).log()
    return Problem(reference, torch.tensor([0.1, 0.2, -0.4, 2.0], dtype=torch.float64))


def two_tokens() -> Problem:
    """Random reference and rewards; the reward is that of the whole response."""
    random = {"generator": torch.Generator().manual_seed(3), "dtype": torch.float64}
    reference = torch.randn(5, 4, **random).log_softmax(-1)
    return Problem(reference, 1.5 * torch.randn(16, **random))


def settings(**changes: object) -> DataSettings:
    """The defaults of `conf/gpt_ppo_actor.yaml`, changed as given."""
    return DataSettings(complete(changes, "gpt_ppo_actor", "trainer.ppo"))


def rollout(problem: Problem, logits: Tensor, drawn: Tensor, group: int, values: Tensor) -> dict:
    """A scored rollout, as the trainer has it before `make_ppo_data`.

    Args:
        drawn: int64 [N], which responses.
        group: responses to a prompt, as the group-relative estimators see it.
        values: [states], of the critic.
    """
    count, tokens = len(drawn), problem.responses.shape[1]
    prompts = torch.full((count, 1), PROMPT)
    return {
        "response_tokens": torch.cat([prompts, problem.responses[drawn]], 1),
        "idx": torch.arange(count) // group,
        "prompt_lengths": torch.ones(count, dtype=torch.long),
        "response_lengths": torch.full((count,), 1 + tokens),
        "is_end": torch.ones(count, dtype=torch.bool),
        "rewards": problem.rewards[drawn],
        "logprobs": problem.logprobs(logits)[drawn],
        "init_logprobs": problem.logprobs(problem.reference)[drawn],
        "values": values[problem.states[drawn]],
    }


def policy_loss(logprobs: Tensor, data: dict, weights: Tensor, coef: float, kl: str) -> Tensor:
    """The project's; with `coef` times the KL as `kl` estimates it."""
    inputs = {"prev_logprobs": data["prev_logprobs"], "advantages": data["advantages"]}
    inputs |= {"ref_logprobs": data["init_logprobs"], "weights": weights, "ratio_eps": 0.2}
    own = {"kl_loss_coef": coef, "kl_loss_estimator": kl}
    return ppo_actor_loss(logprobs=logprobs, **inputs, **own)[0]


def train(
    problem: Problem,
    estimator: str,
    *,
    kl_penalty: float | None = None,
    kl_loss_coef: float = 0.0,
    kl_loss_estimator: str = "k3",
    **changes: object,
) -> Tensor:
    """Train a policy from the reference; returns its logits [states, V].

    Args:
        estimator: of the advantages; "gae" trains a critic, one value per state.
        kl_penalty: weight of the KL in the reward; None: beta of the problem.
        kl_loss_coef, kl_loss_estimator: of the KL in the loss.
        changes: of `trainer.ppo`.
    """
    generator = torch.Generator().manual_seed(0)
    data_settings = settings(advantage_estimator=estimator, **changes)
    penalty = problem.beta if kl_penalty is None else kl_penalty
    logits = problem.reference.clone().requires_grad_()
    values = torch.zeros(len(logits), dtype=torch.float64, requires_grad=True)
    optimizers = [torch.optim.Adam([weights], lr=RATE) for weights in (logits, values)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(x, 1.0, 0.0, STEPS) for x in optimizers]

    def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(STEPS):
        with torch.no_grad():
            probabilities = problem.logprobs(logits).sum(-1).exp()
            drawn = torch.multinomial(probabilities, SAMPLES, True, generator=generator)
            scored = rollout(problem, logits, drawn, GROUP, values)
            data, _ = make_ppo_data(scored, data_settings, penalty)
        for part in torch.arange(SAMPLES).chunk(UPDATES):
            batch = {key: tensor[part] for key, tensor in data.items()}
            weights, of_kl = loss_weights(batch["mask"]), (kl_loss_coef, kl_loss_estimator)
            given = problem.logprobs(logits)[drawn[part]], batch, weights
            update(optimizers[0], policy_loss(*given, *of_kl))
            if data_settings.estimator.needs_critic:
                old = {"prev_values": batch["values"], "returns": batch["returns"]}
                own = values[problem.states[drawn[part]]]
                loss, _ = ppo_critic_loss(values=own, **old, weights=weights, loss_clip_val=None)
                update(optimizers[1], loss)
        for scheduler in schedulers:
            scheduler.step()
    return logits.detach()


def main() -> None:
    """Print what each way to take the KL gives."""
    for name, problem in (("one token", one_token()), ("two tokens", two_tokens())):
        optimum = problem.optimum()
        kl = (optimum.log() - problem.logprobs(problem.reference).sum(-1)) @ optimum
        print(
            f"{name}: J {problem.objective(problem.reference):.3f} at the start, "
            f"{problem.best():.3f} at the optimum, where the KL is {kl:.2f}"
        )
        for kl_estimator in ("k1", "abs", "k2", "k3"):
            for where in ("reward", "loss"):
                cells = []
                for estimator in ESTIMATORS:
                    of_loss = {"kl_penalty": 0.0, "kl_loss_coef": problem.beta}
                    of_loss["kl_loss_estimator"] = kl_estimator
                    own = {"kl_estimator": kl_estimator} if where == "reward" else of_loss
                    logits = train(problem, estimator, **own)
                    gap = 100 * problem.gap_closed(logits)
                    cells.append(f"{estimator} {gap:6.1f} % (KL {problem.kl(logits):.2f})")
                print(f"  {kl_estimator:3} in the {where:6}  " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
