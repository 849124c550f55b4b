# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The critic: values against plain torch, the swap with the reward model to the bit, its loss
against a loop over tokens.
"""

from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.config.defaults import complete_config
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.launch.model_loading import load_and_override_model_config, load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel, StateDictState
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import (
    MegatronGPTRegressionRewardModel,
    MegatronGPTRewardModel,
)
from nemo_aligner.training.optim import optimizer_step
from tests.tiny_models import assert_gradients_of, tiny_config

pytestmark = pytest.mark.slow

TOKENS = torch.randint(0, 290, (4, 8), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([8, 3, 6, 1])


@pytest.fixture(scope="module")
def reward_model_file(tiny_tokenizer_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("rm") / "rm.nemo"
    MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir, seed=3)).save_to(str(path))
    return path


@pytest.fixture
def make_critic(tiny_tokenizer_dir, reward_model_file):
    def make(path=reward_model_file, **overrides):
        cfg = tiny_config(tiny_tokenizer_dir, output_sequence=True, loss_clip_val=0.2, **overrides)
        return load_from_nemo(MegatronGPTCriticModel, cfg, None, restore_path=path)

    return make


def train_batch():
    generator = torch.Generator().manual_seed(9)
    mask = torch.zeros(4, 7)
    mask[0, 2:7], mask[1, 1:2], mask[2, 3:5] = 1, 1, 1  # the last sample does not count
    returns = torch.randn(4, 7, generator=generator)
    values = 0.3 * torch.randn(4, 7, generator=generator)
    return {"tokens": TOKENS, "returns": returns, "prev_values": values, "mask": mask}


def train_step(model, optimizer, scheduler):
    model.prepare_for_training()
    optimizer.zero_grad()
    model.prepare_for_training_step()
    loss, _ = model.get_loss_and_metrics(train_batch(), forward_only=False)
    model.finish_training_step()
    norm = optimizer_step(optimizer, scheduler, 1.0)
    model.finish_training()
    return loss, norm


def weights_of(model):
    parameters = model.unwrapped()[0].named_parameters()
    return {name: tensor.detach().clone() for name, tensor in parameters}


def assert_same_weights(model, expected):
    for name, tensor in model.unwrapped()[0].named_parameters():
        assert torch.equal(tensor, expected[name]), name


def test_a_value_is_the_reward_of_the_tokens_up_to_it(
    make_critic, tiny_tokenizer_dir, reward_model_file
):
    critic = make_critic(forward_micro_batch_size=3)
    values = critic.infer((TOKENS, LENGTHS))
    assert values.shape == (4, 8)
    given = tiny_config(tiny_tokenizer_dir), None
    reward_model = load_from_nemo(MegatronGPTRewardModel, *given, restore_path=reward_model_file)
    for t in range(8):
        rewards = reward_model.infer((TOKENS[:, : t + 1], torch.full((4,), t + 1)))
        expected = torch.where(t < LENGTHS, rewards[:, 0], 0.0)  # padding has no value
        torch.testing.assert_close(values[:, t], expected)


@pytest.mark.parametrize("precision", [32, "bf16"])
def test_swapping_changes_no_weight_and_no_step(make_critic, precision):
    critics = [make_critic(precision=precision) for _ in range(2)]
    swapping, undisturbed = critics
    swapping.set_reward_model()
    inputs = (TOKENS, LENGTHS)
    swapping.prepare_for_inference()
    rewards, values = swapping.infer_rm_critic(inputs)
    swapping.finish_inference()
    assert rewards.shape == (4,) and values.shape == (4, 8)
    torch.testing.assert_close(rewards, values[torch.arange(4), LENGTHS - 1], rtol=1e-5, atol=1e-6)

    jobs = [(critic, *critic.setup_megatron_optimization(10)) for critic in critics]
    copies = set()
    for _ in range(3):
        ours, theirs = (train_step(*job) for job in jobs)
        assert ours == theirs
        trained = weights_of(undisturbed)
        assert_same_weights(swapping, trained)
        moves = swapping.load_cpu_weights = mock.Mock(wraps=swapping.load_cpu_weights)
        for resident in (StateDictState.REWARD, StateDictState.CRITIC, StateDictState.REWARD):
            again, values = swapping.infer_rm_critic(inputs)
            assert swapping.loaded_state_dict is resident
            assert torch.equal(again, rewards)  # the reward model never changes
            assert torch.equal(values, undisturbed.infer(inputs))
        assert moves.call_count == 3  # one copy of weights per call
        copies.add(next(iter(swapping.critic_state_dict_cpu.values())).data_ptr())
    assert len(copies) == 1  # the host buffers persist
    swapping.prepare_for_training()
    assert_same_weights(swapping, trained)


def test_saving_while_the_reward_model_is_resident_saves_the_critic(make_critic, tmp_path):
    critic = make_critic()
    critic.set_reward_model()
    train_step(critic, *critic.setup_megatron_optimization(10))
    trained = weights_of(critic)
    critic.infer_rm_critic((TOKENS, LENGTHS))
    assert critic.loaded_state_dict is StateDictState.REWARD
    critic.save_to(str(tmp_path / "critic.nemo"))
    again = make_critic(tmp_path / "critic.nemo")
    assert_same_weights(again, trained)
    with pytest.raises(UserError, match="holds no reward head"):
        again.set_reward_model()  # its values are no rewards


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_loss_gradient_and_metrics_equal_a_loop_over_tokens(
    make_critic, reduction, micro_batch_size
):
    batch = train_batch()
    standard = {"enable": True, "mean": 0.1, "std": 2.0}
    overrides = dict(reward_standardization=standard, loss_reduction=reduction)
    plain = make_critic(**overrides).unwrapped()[0]
    sample_means, losses, cut, gaps = [], [], [], []
    for i in range(3):
        sample = []
        values = (plain(TOKENS[i : i + 1], torch.arange(8)[None], None)[0] - 0.1) / 2.0
        for t in batch["mask"][i].nonzero().flatten().tolist():
            previous, ret = batch["prev_values"][i, t], batch["returns"][i, t]
            clipped = max(min(values[t], previous + 0.2), previous - 0.2)
            sample.append(max((values[t] - ret) ** 2, (clipped - ret) ** 2) / 2)
            cut.append(float(abs(clipped - ret) > abs(values[t] - ret) + 1e-6))
            gaps.append([float(ret), float(ret - values[t])])
        losses += sample
        sample_means.append(sum(sample) / len(sample))
    expected = sum(losses) / len(losses) if reduction == "token" else sum(sample_means) / 3
    expected.backward()

    # Outside the mask a slot may hold anything.
    batch["returns"][3] = batch["prev_values"][0, 0] = float("nan")
    overrides["micro_batch_size"] = micro_batch_size
    critic = make_critic(**overrides)
    critic.setup_megatron_optimization(10)
    critic.prepare_for_training_step()
    loss, metrics = critic.get_loss_and_metrics(batch, forward_only=False)
    assert loss == metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    if reduction == "token":
        assert 0 < sum(cut) < len(cut)
        assert metrics["value_clip_fraction"] == pytest.approx(sum(cut) / len(cut), rel=1e-5)
        whole, unexplained = torch.tensor(gaps).var(0, correction=0).tolist()
        assert metrics["explained_variance"] == pytest.approx(1 - unexplained / whole, rel=1e-4)
    assert set(metrics) == {"loss", "value_clip_fraction", "explained_variance"}
    assert_gradients_of(plain, critic)


def test_a_critic_from_a_language_model_has_a_fresh_head_and_cannot_serve_rewards(
    make_critic, tiny_tokenizer_dir, tmp_path
):
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(str(tmp_path / "lm.nemo"))
    critic = make_critic(tmp_path / "lm.nemo")
    with pytest.raises(UserError, match="no reward head.*combine_rm_and_critic_server=False"):
        critic.set_reward_model()
    with pytest.raises(RuntimeError, match="set_reward_model"):
        critic.infer_rm_critic((TOKENS, LENGTHS))
    loss, norm = train_step(critic, *critic.setup_megatron_optimization(10))
    assert loss > 0 and norm > 0


def test_a_regression_reward_model_starts_a_critic_that_merges_its_attributes(
    tiny_tokenizer_dir, tmp_path
):
    """With the script's defaults, which give neither the number nor the weights of the
    attributes, nor where a reward stands.
    """
    weights = [2.0, -1.0, 0.5]
    regression = {"num_attributes": 3, "attribute_weights": weights}
    own = {"reward_model_type": "regression", "regression": regression, "use_avg_pool": True}
    cfg = tiny_config(tiny_tokenizer_dir, **own)
    reward_model = MegatronGPTRegressionRewardModel(cfg)
    reward_model.save_to(str(tmp_path / "rm.nemo"))
    yaml = complete_config({}, "gpt_ppo_critic")
    yaml.trainer.precision = 32
    yaml.model.encoder_seq_length = 48

    def critic(**overrides):
        path, written = tmp_path / "rm.nemo", OmegaConf.merge(yaml, {"model": overrides}).model
        model_cfg = load_and_override_model_config(path, written)
        return load_from_nemo(MegatronGPTCriticModel, model_cfg, None, restore_path=path)

    merging = critic()
    merging.set_reward_model()
    rewards, values = merging.infer_rm_critic((TOKENS, LENGTHS))
    expected = reward_model.infer((TOKENS, LENGTHS)) @ torch.tensor(weights)
    torch.testing.assert_close(rewards, expected)
    reward_model.unwrapped()[0].rm_head.use_avg_pool = False
    expected = reward_model.infer((TOKENS, LENGTHS)) @ torch.tensor(weights)
    first = values[torch.arange(4), LENGTHS - 1]  # before its first update
    torch.testing.assert_close(first, expected)
    with pytest.raises(ConfigError, match="gives 3 attributes.*merge_attributes=True"):
        critic(regression={"merge_attributes": False}).set_reward_model()
