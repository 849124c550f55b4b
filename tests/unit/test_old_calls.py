# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls in NeMo-Aligner's form give what they gave; where they cannot, the error says so."""

import functools
import importlib
import json
import math
import time

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.algorithms.critic_server_trainer import CriticServerTrainer
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp import builders
from nemo_aligner.data.nlp import datasets as old_datasets
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.gpt_reward_model import GPTRewardModel
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.models.nlp.gpt.megatron_layers import build_layer_spec
from nemo_aligner.models.nlp.gpt.reward_critic_clients import get_future_result
from nemo_aligner.training.schedule import ScopedTimer, SyncTimer, Timer
from nemo_aligner.utils import (
    batch_iterators,
    distributed,
    ppo_utils,
    train_utils,
    trainer_utils,
    utils,
)
from tests import ppo_fakes, rs_fakes
from tests.tiny_models import PPO, tiny_config


def test_entropies_without_a_mask_are_scalars():
    logits = torch.tensor([[[0.0, 0.0], [0.0, 100.0], [5.0, 1.0]]])
    mean = (math.log(2) + 0.0) / 2  # the last column predicts nothing
    assert distributed.calculate_distributed_entropy(logits).item() == pytest.approx(mean)
    mask = torch.tensor([[1.0, 0.0]])
    entropy = distributed.calculate_distributed_entropy(vocab_parallel_logits=logits, mask=mask)
    assert entropy.item() == pytest.approx(math.log(2))
    log_probs = logits[:, :2].log_softmax(-1)
    assert ppo_utils.calculate_entropy(log_probs).item() == pytest.approx(mean)


# ------------------------------------------------------------------------------------ reward model


@pytest.fixture(scope="module")
def reward_model(tiny_tokenizer_dir):
    model = MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir, output_sequence=False))
    model.set_eval()
    return model


@torch.no_grad()
def test_reward_model_takes_lengths_in_both_places(reward_model):
    (module,) = reward_model.unwrapped()
    tokens = torch.arange(20).reshape(2, 10)
    lengths, positions = torch.tensor([4, 10]), torch.arange(10).expand(2, -1)
    ours = module(tokens, positions, None, lengths=lengths)
    assert ours.shape == (2, 1) and ours[0] != ours[1]
    theirs = (
        module(tokens, lengths, positions, None),
        module(tokens, lengths, positions, None, None, None, None),
        module(tokens, lengths, position_ids=positions, attention_mask=None),
        module(input_ids=tokens, lengths=lengths, position_ids=positions, attention_mask=None),
    )
    assert all(torch.equal(output, ours) for output in theirs)
    other = module(tokens, torch.tensor([5, 10]), positions, None)
    assert not torch.equal(other[0], ours[0]) and torch.equal(other[1], ours[1])
    with pytest.raises(TypeError, match="each once"):
        module(tokens, lengths, positions, None, position_ids=positions)


def test_reward_module_is_built_by_position(reward_model):
    config = reward_model.transformer_config
    spec = build_layer_spec(config, None)
    # ..., rotary_percent, rotary_base, seq_len_interpolation_factor, output_sequence,
    # use_avg_pool, head_dtype, num_attributes, attribute_weights, merge_attributes
    shape = (config, spec, 320, 48, True, True, False, True, True, "rope", 0.5, 77)
    module = GPTRewardModel(*shape, 2.0, True, True, torch.bfloat16, 3, [1, 2, 3], True)
    head = module.rm_head
    assert (head.output_sequence, head.use_avg_pool, head.merge_attributes) == (True, True, True)
    assert head.weight.dtype == torch.bfloat16 and head.weight.shape == (3, 32)
    assert head.attributes_weights.tolist() == [1, 2, 3]
    assert not module.share_embeddings_and_output_weights
    frequencies = module.rotary_pos_emb.inv_freq
    assert len(frequencies) == 2  # half of the 8 columns of a head, in pairs
    assert frequencies[1].item() == pytest.approx(77**-0.5)
    assert module.rotary_pos_emb.seq_len_interpolation_factor == 2.0


def test_connector_leaves_the_head_out(reward_model, tmp_path):
    reward_model.save_to(str(tmp_path / "rm.nemo"))
    cls = type(reward_model)
    connector = utils.CustomSaveRestoreConnector(load_base_model_only=True)
    whole = cls.restore_from(tmp_path / "rm.nemo")
    seeded = OmegaConf.merge(whole.cfg, {"seed": 99})
    base = connector.restore_from(cls, tmp_path / "rm.nemo", override_config_path=seeded)
    weights = [dict(model._named_weights()) for model in (reward_model, whole, base)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert {
        name for name in weights[0] if not torch.equal(weights[0][name], weights[2][name])
    } == {"0.rm_head.weight"}


def test_step_helpers_may_be_called_by_methods_of_their_name(reward_model):
    class Mine(type(reward_model)):
        def prepare_for_validation_step(self):
            train_utils.prepare_for_validation_step(self)

        def finish_validation_step(self):
            train_utils.finish_validation_step(self)

    model = Mine(reward_model.cfg)
    to_eval = model.prepare_for_validation_step, lambda: train_utils.set_eval(model)
    to_train = model.finish_validation_step, lambda: train_utils.set_train(model)
    for evaluate, train in zip(to_eval, to_train):
        evaluate()
        assert not model.model[0].training
        train()
        assert model.model[0].training
    model.setup_megatron_optimization(max_steps=1)
    train_utils.clip_gradients(model, 0.25)
    assert model._optimizer.config.clip_grad == 0.25
    assert model.cuda() is model


# ---------------------------------------------------------------------------------- actor, trainer


def test_actor_without_a_reference_says_what_to_call(tiny_tokenizer_dir):
    model = MegatronGPTActorModel(tiny_config(tiny_tokenizer_dir, ppo=PPO))
    of_tokens = lambda: model.get_init_policy_logprobs(torch.zeros(1, 4, dtype=torch.int64))
    for call in (model.check_reference_policy, of_tokens):
        with pytest.raises(UserError, match=r"call model.set_reference_policy\(\) before"):
            call()
    model.init_policy_state_dict = utils.retrieve_model_state_dict_in_cpu(model)
    tokens = torch.arange(8).reshape(2, 4)
    own = model.get_inference_log_probs(tokens)
    assert torch.equal(model.get_init_policy_logprobs(tokens), own)
    masks, loss_mask, positions = model.get_ltor_masks_and_position_ids(tokens)
    assert masks.shape == (2, 1, 4, 4) and masks[1, 0, 1].tolist() == [False, False, True, True]
    assert loss_mask.tolist() == [[1.0] * 4] * 2 and positions[1].tolist() == [0, 1, 2, 3]


def test_metrics_of_a_rollout_with_rewards():
    trainer = ppo_fakes.make_trainer()
    metrics = trainer.compute_rollout_metrics(
        {
            "response_tokens": torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]),
            "response_lengths": torch.tensor([4, 2]),
            "prompt_lengths": torch.tensor([1, 1]),
            "is_end": torch.tensor([True, False]),
            "rewards": torch.tensor([3.0, 1.0]),
        }
    )
    assert metrics["rewards"] == 2.0 and metrics["generation_length"] == 2.0
    assert metrics["table"]["reward"] == 3.0


# -------------------------------------------------------------------------------------------- data


def model_cfg(**more):
    return OmegaConf.create({"data": {"data_impl": "jsonl"}, **more})


def old_call(tokenizer, cls, records, **cfg):
    arguments = dict(
        cfg=model_cfg(**cfg), tokenizer=tokenizer, name="train", data_prefix="nowhere.jsonl"
    )
    arguments |= dict(documents=np.arange(len(records)), data=records, seq_length=24, seed=1)
    by_name = cls(**arguments, drop_last=True)
    by_place = cls(*arguments.values())
    assert len(by_name) == len(by_place)
    return by_name


def equal(ours, theirs):
    assert len(ours) == len(theirs)
    for number in range(len(ours)):
        left, right = ours[number], theirs[number]
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_datasets_take_the_old_call(tiny_tokenizer, tmp_path):
    records = [{"text": f"the film {i}", "label": [float(i), -100.0]} for i in range(4)]
    pairs = [{"text": record["text"]} for record in records]
    paths = tmp_path / "data.jsonl", tmp_path / "pairs.jsonl"
    for path, lines in zip(paths, (records, pairs)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    labelled, plain = ([str(path)] for path in paths)
    old = functools.partial(old_call, tiny_tokenizer)
    prompts, labels = old_datasets.RLHFDataset, old_datasets.RegressionRewardModelDataset
    half = old(prompts, records)
    assert half.max_prompt_length == 12
    equal(half, prompts(labelled, tiny_tokenizer, 12))
    assert old(prompts, records, length_params={"max_length": 4}).max_prompt_length == 20
    two = old_datasets.RewardModelDataset
    equal(old(two, pairs), two(plain, tiny_tokenizer, 24))
    regression = {"num_attributes": 2, "loss_mask_val": -100.0}
    ours = labels(labelled, tiny_tokenizer, 24, num_attributes=2)
    equal(old(labels, records, regression=regression), ours)
    with pytest.raises(ConfigError, match="record 0 is a list"):
        old(prompts, [[1, 2]])


class OwnDataset(torch.utils.data.Dataset):
    def __init__(
        self, cfg, tokenizer, name, data_prefix, documents, data, seq_length, seed, drop_last=True
    ):
        self.rest = (name, list(documents), seq_length, seed, drop_last, data_prefix)
        self.data = data

    def __len__(self):
        return len(self.data)


def test_own_dataset_classes_are_built_as_before(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n{"x": 2}\n')
    arguments = dict(cfg=model_cfg(), data_impl="jsonl", splits_string=None, tokenizer=None)
    arguments |= dict(train_valid_test_num_samples=[-1, -1, -1], seq_length=8, seed=5)
    files = {"train": [str(path)], "validation": [str(path)], "test": [str(path)]}
    train, validation, test = builders.build_train_valid_test_datasets(
        OwnDataset, data_prefix=files, **arguments
    )
    assert train.data == [{"x": 1}, {"x": 2}] and len(validation) == len(test) == 2
    assert train.rest == ("train", [0, 1], 8, 5, True, str(path))
    with pytest.raises(ConfigError, match="cannot divide a OwnDataset"):
        builders.build_train_valid_test_datasets(
            OwnDataset, data_prefix=[str(path)], **{**arguments, "splits_string": "1,1,0"}
        )


# ----------------------------------------------------------------------------------------- helpers


def test_small_helpers():
    tokens = torch.tensor([[5, 6, 9, 9], [5, 9, 9, 9]])
    assert utils.calculate_response_lengths(tokens, 9).tolist() == [2, 1]
    log_probs = torch.arange(12.0).reshape(1, 4, 3)
    chosen, rest = utils.select_log_probs(log_probs, torch.tensor([[0, 2, 1, 0]]))
    assert chosen.tolist() == [[2.0, 4.0, 6.0]] and torch.equal(rest, log_probs[:, :3])
    padded = utils.batch_pad_to_fixed_len([torch.tensor([1, 2]), torch.tensor([3])], 3, 7)
    assert padded.tolist() == [[1, 2, 7], [3, 7, 7]]
    with pytest.raises(UserError, match="does not fit"):
        utils.batch_pad_to_fixed_len([torch.tensor([1, 2])], 1, 7)
    halves = utils.get_iterator_k_split_list(["a", "b", "c", "d"], 2)
    assert list(halves) == [["a", "b"], ["c", "d"]]
    with pytest.raises(UserError, match="equal parts"):
        utils.get_iterator_k_split_list(["a", "b", "c"], 2)
    assert utils.get_global_set({1, 2}) == {1, 2}
    divides = trainer_utils.safe_is_divisible
    assert [divides(4, 2), divides(4, 3), divides(4, 0)] == [1, 0, 0]
    moved = utils.cpu_dict({"a": tokens, "b": "text"})
    assert moved["b"] == "text" and torch.equal(moved["a"], tokens)
    assert utils.extract_value_from_ckpt("step", "gpt-step=12-epoch=1.0-last") == 12
    assert utils.extract_value_from_ckpt("loss", "gpt-step=12") == 0


def test_shared_set_gives_each_index_once():
    shared = batch_iterators.SharedSet()
    shared.set_idx({1, 2, 3})
    assert sorted(shared.get_idx(2) + shared.get_idx(2)) == [1, 2, 3]
    assert shared.get_idx(1) == []


def test_older_timer():
    timer = SyncTimer(reduction="mean", sync_cuda=True, buffer_size=2)
    for pause in (0.0, 0.0, 0.01):
        timer.start("phase")
        time.sleep(pause)
        timer.stop(name="phase")
    assert timer.get("phase") >= 0.005  # the mean of the last two
    timer.store("phase")
    wanted = pytest.approx([timer.get_synced("phase")])
    assert list(timer.sync_and_consume_over_stored_time("phase")) == wanted
    assert list(timer.sync_and_consume_over_stored_time("phase")) == []
    with pytest.raises(ValueError, match="not started"):
        timer.stop("other")
    assert isinstance(timer, ScopedTimer)
    limit = Timer("00:00:01:00")
    limit.start_time()
    assert limit.get_time_elapsed() + limit.get_time_remaining() == pytest.approx(60, abs=0.1)


def test_warnings_of_decorators():
    @utils.deprecated_in_version("1.0", "Use other().")
    def old(x):
        return x + 1

    with pytest.warns(DeprecationWarning, match=r"old is deprecated; version 1.0 .* Use other"):
        assert old(1) == 2


def test_future_of_one_key_is_its_tensor():
    class Reply:
        def result(self, timeout=None):
            return {"rewards": np.ones((2, 1), np.float32), "values": np.zeros(2, np.float32)}

    assert get_future_result(Reply(), "rewards").tolist() == [[1.0], [1.0]]
    rewards, values = get_future_result(Reply(), "rewards", "values")
    assert rewards.shape == (2, 1) and values.shape == (2,)


def test_sft_model_generates(tiny_tokenizer_dir):
    model = GPTSFTModel(tiny_config(tiny_tokenizer_dir))
    texts = ["the film", "a dull plot and"]
    lengths = {"max_length": 5}
    outputs = model.generate(texts, lengths)
    assert outputs["sentences"] == [
        text + prediction for text, prediction in zip(texts, outputs["predictions"], strict=True)
    ]
    # The likeliest next token, by the model's own logits.
    prompt = model.tokenizer.text_to_ids(texts[0])
    assert outputs["token_ids"][0][: len(prompt)] == prompt
    (module,) = model.unwrapped()
    with torch.no_grad():
        tokens = torch.tensor([prompt])
        logits = module(tokens, torch.arange(len(prompt))[None], None)
    vocabulary = model.tokenizer.vocab_size
    assert outputs["token_ids"][0][len(prompt)] == logits[0, -1, :vocabulary].argmax()
    model.set_inference_params(length_params={"max_length": 1})
    batch = {"text": tokens, "length": torch.tensor([len(prompt)])}
    assert model.infer(batch)["token_ids"] == [outputs["token_ids"][0][: len(prompt) + 1]]
    assert model.model[0].training
    with pytest.raises(UserError, match="strategies are gone"):
        model.set_inference_params(strategy=object())
    with pytest.raises(UserError, match="compute_logprob"):
        model.generate(texts, lengths, {"compute_logprob": True})


def test_metrics_of_responses():
    handler_of = importlib.import_module("nemo_aligner.metrics.common").InferenceMetricsHandler
    none = handler_of(None)
    assert not none.has_metrics() and none.compute() == {}
    letters = {"_target_": "tests.unit.test_old_calls.CountLetters", "start": 2}
    handler = handler_of({"letters": letters})
    handler.update({"unused": 0}, {"predictions": ["abc", "d"]})
    assert handler.has_metrics() and handler.compute() == {"letters": 6}
    handler.reset()
    assert handler.compute() == {"letters": 2}


class CountLetters:
    def __init__(self, start):
        self.start = self.count = start

    def update(self, batch, generation_output):
        self.count += sum(map(len, generation_output["predictions"]))

    def compute(self):
        return self.count

    def reset(self):
        self.count = self.start


def test_rejection_sampling_takes_the_old_calls():
    ours, theirs = rs_fakes.make_rs_trainer(), rs_fakes.make_rs_trainer()
    data, metrics, _timings = ours.generate_rollouts()
    old_data, old_metrics = theirs.generate_rollouts(
        iter(theirs.train_batches), theirs.num_train_microbatches
    )
    assert data.keys() == old_data.keys()
    assert all(torch.equal(data[key], old_data[key]) for key in data)
    assert old_metrics["global_rewards"] == metrics["global_rewards"]

    batch = lambda tokens, length, reward: {
        "response_tokens": torch.tensor([tokens]),
        "response_lengths": torch.tensor([length]),
        "prompt_lengths": torch.tensor([1]),
        "rewards": torch.tensor([reward]),
    }
    batches = [batch([1, 2, 3, 0], 3, 4.0), batch([5, 6, 0, 0, 0], 2, 1.0)]
    joined, none = ours.generate_rs_data(batches)
    assert joined["response_tokens"].tolist() == [[1, 2, 3, 0, 0], [5, 6, 0, 0, 0]]
    assert joined["mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]] and none == {}
    metrics = ours.compute_global_rollout_metrics(batches)
    assert metrics.pop("table")["reward"] == 4.0
    lengths = {"global_response_lengths_mean": 1.5, "global_prompt_lengths": 1.0}
    assert metrics == {**lengths, "global_rewards": 2.5}


def critic_from(model, tokenizer_dir, folder, **keys):
    model.save_to(path := str(folder / "of.nemo"))
    cfg = tiny_config(tokenizer_dir, **keys)
    return load_from_nemo(MegatronGPTCriticModel, cfg, None, restore_path=path)


def test_a_critic_learns_from_each_form_of_arrays(reward_model, tiny_tokenizer_dir, tmp_path):
    keys = {"output_sequence": True, "loss_clip_val": 0.2}
    critic = critic_from(reward_model, tiny_tokenizer_dir, tmp_path, **keys)
    cfg = OmegaConf.create({"combine_rm_and_critic_server": True})
    optimizer = critic.setup_megatron_optimization(max_steps=10)
    parts = ppo_fakes.FakeLogger(), None, None, 2, 2
    server = CriticServerTrainer(cfg, critic, *optimizer, *parts)
    # NeMo-Aligner's script assigns a copy of the weights that it has loaded.
    critic.rm_state_dict_cpu = utils.copy_model_states_to_cpu(critic, cpu_dict=None, sync=True)
    numbers = np.ones((2, 4), np.float32)
    batch = {"tokens": np.arange(10).reshape(2, 5), "returns": numbers}
    batch |= {"prev_values": numbers / 4, "mask": numbers.copy()}
    start = critic.weights_to_cpu()
    losses = []
    for arguments, named in (((), batch), (tuple(batch.values()), {}), ((batch,), {})):
        critic.load_cpu_weights(start)
        losses.append(float(server.run_training(*arguments, **named)["loss_mean"][0]))
    assert losses[0] > 0 and losses == [losses[0]] * 3
    request = {"tokens": batch["tokens"], "sequence_lengths": np.array([[5], [5]])}
    outputs = server.run_inference(request)
    assert outputs.keys() == {"rewards", "values"}
    again = server.run_inference(inputs=request)
    by_name = server.run_inference(**request)
    assert all(np.array_equal(outputs[key], again[key]) for key in outputs)
    assert all(np.array_equal(outputs[key], by_name[key]) for key in outputs)


def test_critic_refuses_a_reward_model_without_a_head(tiny_tokenizer_dir, tmp_path):
    base = MegatronGPTModel(tiny_config(tiny_tokenizer_dir))
    critic = critic_from(base, tiny_tokenizer_dir, tmp_path)
    with pytest.raises(UserError, match="holds no reward head"):
        critic.rm_state_dict_cpu = utils.copy_model_states_to_cpu(critic)
    assert critic.rm_state_dict_cpu is None
