# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses and rewards of the commands generate and evaluate on two ranks, at each basic split,
against one rank.
"""

import pytest

from nemo_aligner.config.checks import check_config
from nemo_aligner.evaluate.rewards import model_rewards, reward_model_settings
from nemo_aligner.generate.batch import respond
from nemo_aligner.generate.policy import ChatForm, load_policy
from nemo_aligner.generate.responses import Response
from nemo_aligner.generate.settings import compose_settings
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from tests.distributed.launcher import at_each, run_ranks
from tests.tiny_models import tiny_config

PROMPTS = ["the film", "a dull plot and a", "I loved the", "Review: the film was bad.", "a"]
SPLITS = {"DP2": {}, "TP2": {"tensor_model_parallel_size": 2}}
SPLITS |= {"PP2": {"pipeline_model_parallel_size": 2}, "CP2": {"context_parallel_size": 2}}


def evaluate(
    folder: str, ranks: int, policy_name: str = "policy", **split: int
) -> tuple[list[Response], list[float]]:
    """The responses to `PROMPTS`, in five micro-batches, and their rewards; all ranks call it."""
    settings = ["trainer.accelerator=cpu", f"trainer.devices={ranks}", "micro_batch_size=3"]
    settings += ["responses_per_prompt=3", "length_params.max_length=7"]
    settings += ["reward_model.forward_micro_batch_size=2"]
    settings += [f"model.{key}={value}" for key, value in split.items()]
    cfg = compose_settings("evaluate", settings)
    cfg.pretrained_checkpoint.restore_from_path = f"{folder}/{policy_name}.nemo"
    check_config(cfg, "evaluate", env={"WORLD_SIZE": str(ranks)})
    policy = load_policy(cfg, None)
    responses = respond(policy, [{"text": text} for text in PROMPTS], ChatForm(False), "prompts")
    if policy_name == "experts":
        return responses, []
    rm_cfg = reward_model_settings(f"{folder}/rm.nemo", cfg)
    (rewards,) = model_rewards(rm_cfg, None, [responses])
    return responses, rewards


@pytest.fixture(scope="module")
def folder(tiny_tokenizer_dir, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("generate")
    cfg = tiny_config(tiny_tokenizer_dir, "llama", init_method_std=0.3)
    MegatronGPTModel(cfg).save_to(str(folder / "policy.nemo"))
    cfg = tiny_config(tiny_tokenizer_dir, "llama", num_moe_experts=4, moe_ffn_hidden_size=24)
    MegatronGPTModel(cfg).save_to(str(folder / "experts.nemo"))
    cfg = tiny_config(tiny_tokenizer_dir, "llama", seed=3)
    MegatronGPTRewardModel(cfg).save_to(str(folder / "rm.nemo"))
    return str(folder)


@pytest.fixture(scope="module")
def one_rank(folder):
    return evaluate(folder, 1)


@pytest.fixture(scope="module")
def two_ranks(folder):
    return run_ranks(at_each, 2, 120, SPLITS, evaluate, folder, 2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_give_what_one_does(one_rank, two_ranks, split):
    wanted, wanted_rewards = one_rank
    for rank, results in enumerate(two_ranks):
        responses, rewards = results[split]  # on every rank
        assert len(responses) == len(wanted) == 15
        for response, other in zip(responses, wanted, strict=True):
            assert response.response_tokens == other.response_tokens
            assert (response.prompt, response.response) == (other.prompt, other.response)
            assert (response.length, response.is_end) == (other.length, other.is_end)
            assert response.logprob_sum == pytest.approx(other.logprob_sum, abs=1e-4)
        if rank == 0:
            assert rewards == pytest.approx(wanted_rewards, abs=1e-5)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_ranks_that_hold_each_others_experts_generate_equally_often(folder):
    """Of the five micro-batches one rank gets three and the other two, and one that fills up."""
    wanted, _ = evaluate(folder, 1, "experts")
    split = {"EP2": {"expert_model_parallel_size": 2}}
    for results in run_ranks(at_each, 2, 120, split, evaluate, folder, 2, "experts"):
        responses, _ = results["EP2"]
        assert [x.response_tokens for x in responses] == [x.response_tokens for x in wanted]
