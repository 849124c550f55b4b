# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts gives the same on one rank and on two, with the experts on both or spread
over them.

One launch of two ranks serves all splits. Checkpoints are in the matrix.
"""

import pytest
import torch

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.data.nlp.samplers import StoreBatchIterator
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.parallel import parallel_state
from tests.distributed import matrix
from tests.distributed.launcher import at_each, run_ranks

pytestmark = pytest.mark.timeout(300)

EP2 = {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
BALANCED = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}
# name -> (split, other keys). One rank computes each with the same other keys. At other splits the
# matrix compares.
CASES = {"EP2": (EP2, {}), "EP2, unsharded optimizer": (EP2, {"optim": matrix.ADAMW})}
CASES |= {"EP2, recomputation": (EP2 | matrix.FULL, {}), "EP2, auxiliary losses": (EP2, BALANCED)}
CASES |= {"TP2, sequence parallel, auxiliary losses": (TP2, BALANCED)}
ROLES = ("sft", "reward model", "critic")


def unequal():
    """Samples of this rank where the ranks have unequal work: 2 and 6 of 8."""
    if parallel_state.get_data_parallel_world_size() == 1:
        return slice(None)
    return slice(0, 2) if parallel_state.get_data_parallel_rank() == 0 else slice(2, None)


def of_actor(tokenizer_dir, folder, **keys):
    """Three updates, and the log-probs after them of unequal shares; those of the reference stay
    what they were.
    """
    training = matrix.build(tokenizer_dir, folder, "moe", "actor", keys)
    actor = training[0]
    actor.set_reference_policy()
    # An even width: what sequence parallelism pads would count in the balance losses.
    whole = matrix.global_batch("actor", float("nan")).items()
    batch = {name: x[:, :-1] if x.dim() > 1 else x for name, x in whole}
    tokens = batch["response_tokens"][unequal()]
    actor.set_eval()
    before = actor.get_inference_log_probs(tokens)
    found = matrix.updates(training, batch, 3, "token")
    actor.set_eval()
    assert torch.equal(actor.get_init_policy_logprobs(tokens), before)
    return found, unequal(), actor.get_inference_log_probs(tokens)


def of_role(tokenizer_dir, folder, role, keys):
    """Two updates of another role, and what it infers afterwards."""
    training = matrix.build(tokenizer_dir, folder, "moe", role, keys)
    batch, reduction = matrix.global_batch(role, float("nan")), matrix.ROLES[role].reductions[0]
    found = matrix.updates(training, batch, 2, reduction)
    return found | matrix.inferred(training[0], role)


def fresh(tokenizer_dir, keys):
    """Initial weights of a model that is not loaded from a file."""
    return matrix.gathered(MegatronGPTModel(matrix.model_config(tokenizer_dir, "moe", **keys)))


def responses(tokenizer_dir, folder, keys):
    """Responses to ragged prompts, of which the ranks have an unequal number, by the name of the
    parameters.
    """
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 290, (8, 6), generator=generator)
    lengths = torch.tensor([1, 6, 2, 3, 6, 5, 1, 4])
    inputs = [x[unequal()] for x in (prompts, lengths, torch.arange(8) + 50)]
    model, *_ = matrix.build(tokenizer_dir, folder, "moe", "actor", keys)
    generate = model.generator.generate
    results = {n: matrix.samples_of(generate(*inputs, p)) for n, p in matrix.GENERATION.items()}
    if parallel_state.get_world_size() > 1:  # one rank's logits are not finite: both hear of it
        first = parallel_state.get_rank() == 0
        if first:
            with torch.no_grad():
                model.unwrapped()[0].output_layer.weight.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="not finite" if first else "another expert"):
            model.generator.generate(*inputs, matrix.GENERATION["greedy"])
    return unequal(), results


def on_two_ranks(tokenizer_dir, folder):
    cases = {name: split | other for name, (split, other) in CASES.items()}
    results = at_each(cases, of_actor, tokenizer_dir, folder)
    results["fresh"] = fresh(tokenizer_dir, EP2)
    results["responses"] = responses(tokenizer_dir, folder, EP2)
    results |= {role: of_role(tokenizer_dir, folder, role, EP2) for role in ROLES}
    with pytest.raises(ConfigError, match="use_flask"):
        StoreBatchIterator([], 0, None, None)
    return results


@pytest.fixture(scope="module")
def folder(tiny_tokenizer_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    cfg = matrix.model_config(tiny_tokenizer_dir, "moe")
    MegatronGPTModel(cfg).save_to(f"{folder}/moe-lm.nemo")
    MegatronGPTRewardModel(cfg).save_to(f"{folder}/moe-rm.nemo")
    return folder


@pytest.fixture(scope="module")
def one_rank(tiny_tokenizer_dir, folder):
    """Of the actor: without auxiliary losses, and with them."""
    return [of_actor(tiny_tokenizer_dir, folder, **keys) for keys in ({}, BALANCED)]


@pytest.fixture(scope="module")
def two_ranks(tiny_tokenizer_dir, folder):
    return run_ranks(on_two_ranks, 2, 200, tiny_tokenizer_dir, folder)


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_those_of_one_rank(one_rank, two_ranks, name):
    expected, _, wanted = one_rank[CASES[name][1] == BALANCED]
    matrix.assert_same(two_ranks[0][name][0], expected)
    for ours in two_ranks:
        found, share, logprobs = ours[name]
        assert found["numbers"] == two_ranks[0][name][0]["numbers"]
        torch.testing.assert_close(logprobs, wanted[share], rtol=1e-5, atol=2e-5)


def test_initial_weights_do_not_depend_on_the_split(tiny_tokenizer_dir, two_ranks):
    expected, found = fresh(tiny_tokenizer_dir, {}), two_ranks[0]["fresh"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_responses_equal_those_of_one_rank(tiny_tokenizer_dir, folder, two_ranks):
    _, expected = responses(tiny_tokenizer_dir, folder, {})
    for ours in two_ranks:
        share, found = ours["responses"]
        for name, samples in found.items():
            assert matrix.apart(samples, expected[name][share]) < 1e-4, name


@pytest.mark.parametrize("role", ROLES)
def test_other_roles_equal_one_rank(tiny_tokenizer_dir, folder, two_ranks, role):
    matrix.assert_same(two_ranks[0][role], of_role(tiny_tokenizer_dir, folder, role, {}))
