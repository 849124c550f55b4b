# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One GPU, NCCL, bf16: the actor generates, scores, trains, moves its optimizer out and back,
saves and resumes.
"""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]


OPTIMIZERS = ["distributed_fused_adam", "adamw"]


def make_actor(tokenizer_dir, optimizer="distributed_fused_adam"):
    from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
    from tests.tiny_models import PPO, tiny_config

    sizes = {"hidden_size": 128, "ffn_hidden_size": 256, "micro_batch_size": 2}
    own = {"precision": "bf16", "ppo": PPO, "optim": {"name": optimizer}}
    cfg = tiny_config(tokenizer_dir, **sizes, **own)
    actor = MegatronGPTActorModel(cfg)
    actor.set_reference_policy()
    return actor, *actor.setup_megatron_optimization(max_steps=10)


def rollout_and_update(actor, optimizer, scheduler):
    from nemo_aligner.core.tensors import create_mask
    from nemo_aligner.training.optim import optimizer_step

    texts = "the film was", "a dull plot", "I loved the music", "bright"
    ids = [actor.tokenizer.text_to_ids(text) for text in texts]
    prompts = torch.full((4, 32), actor.tokenizer.eos_id)
    for padded, prompt in zip(prompts, ids, strict=True):
        padded[: len(prompt)] = torch.tensor(prompt)
    actor.prepare_for_inference()
    lengths = torch.tensor([len(prompt) for prompt in ids])
    rollout = actor.infer({"text": prompts, "length": lengths})
    tokens = rollout["response_tokens"]
    logprobs = actor.get_inference_log_probs(tokens)
    reference = actor.get_init_policy_logprobs(tokens)
    actor.finish_inference()

    mask = create_mask(logprobs, rollout["prompt_lengths"], rollout["response_lengths"])
    actor.prepare_for_training()
    actor.prepare_for_training_step()
    loss, metrics = actor.get_loss_and_metrics(
        {
            "response_tokens": tokens,
            "is_end": torch.ones_like(rollout["is_end"]),
            "mask": mask,
            "advantages": torch.linspace(-1, 1, 4, device=tokens.device)[:, None]
            .expand_as(mask)
            .contiguous(),
            "prev_logprobs": logprobs,
        }
    )
    actor.finish_training_step()
    grad_norm = optimizer_step(optimizer, scheduler, 1.0)
    actor.finish_training()
    return tokens, logprobs, reference, loss, metrics, grad_norm


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_actor_on_one_gpu(tiny_tokenizer_dir, tmp_path, name):
    from nemo_aligner.checkpoint.checkpointing import CheckpointCallback

    actor, optimizer, scheduler = make_actor(tiny_tokenizer_dir, name)
    tokens, logprobs, reference, loss, metrics, grad_norm = rollout_and_update(
        actor, optimizer, scheduler
    )
    assert tokens.is_cuda and torch.equal(
        logprobs, reference
    )  # step 0: policy and reference are the same bits
    assert metrics["ppo_ratio"] == pytest.approx(1.0, abs=1e-2) and 0 < grad_norm < float("inf")

    actor.prepare_for_training()
    callback = CheckpointCallback(tmp_path, actor, optimizer, scheduler, name="actor")
    callback.custom_save({"step": 1}, trainer_state={"step": 1})
    uninterrupted = rollout_and_update(actor, optimizer, scheduler)

    resumed, optimizer, scheduler = make_actor(tiny_tokenizer_dir, name)
    callback = CheckpointCallback(tmp_path, resumed, optimizer, scheduler, name="actor")
    assert callback.load_latest() == {"step": 1}
    again = rollout_and_update(resumed, optimizer, scheduler)
    assert torch.equal(uninterrupted[0], again[0])
    torch.testing.assert_close(uninterrupted[1], again[1])
    assert uninterrupted[3] == pytest.approx(again[3], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_from_before_the_first_step(tiny_tokenizer_dir, tmp_path, name):
    """Such as a critic server writes: the optimizer has made no step that made its states."""
    from nemo_aligner.checkpoint.checkpointing import CheckpointCallback

    actor, *training = make_actor(tiny_tokenizer_dir, name)
    CheckpointCallback(tmp_path, actor, *training, name="actor").custom_save(
        {"step": 0}, trainer_state={"step": 0}
    )
    rollout_and_update(actor, *training)
    resumed, *training = make_actor(tiny_tokenizer_dir, name)
    callback = CheckpointCallback(tmp_path, resumed, *training, name="actor")
    assert callback.load_latest() == {"step": 0}
    rollout_and_update(resumed, *training)
    pairs = zip(actor.model[0].parameters(), resumed.model[0].parameters(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("precision", [32, "bf16"])
def test_graphs_choose_the_same_bits(tiny_tokenizer_dir, architecture, precision, monkeypatch):
    """Also with an environment, and after the weights have changed; the memory comes back."""
    from nemo_aligner.generation import GenerationParams, MegatronGenerator
    from nemo_aligner.generation.decoding_model import StepGraphs
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
    from tests.scripted_environment import ScriptedEnvironment
    from tests.tiny_models import tiny_config

    own = {"init_method_std": 0.4, "precision": precision}
    config = tiny_config(tiny_tokenizer_dir, architecture, **own)
    model = MegatronGPTModel(config)
    lengths = torch.arange(24) % 9 + 1
    tokens = torch.randint(0, 290, (24, 9), generator=torch.Generator().manual_seed(3))
    prompts = tokens, lengths, torch.arange(24)
    captures, capture = [], StepGraphs._capture
    monkeypatch.setattr(
        StepGraphs, "_capture", lambda self, step: captures.append(0) or capture(self, step)
    )
    sampled = dict(temperature=1.5, top_k=50, top_p=0.9, repetition_penalty=1.2, min_length=2)
    ends = tuple("abcdefghijklmnopqrstuvwxyz .,")

    def outputs(cuda_graphs):
        generator = MegatronGenerator(model.model, model.tokenizer, 48, cuda_graphs=cuda_graphs)
        for options in (dict(use_greedy=True), sampled, {**sampled, "end_strings": ends}):
            params = GenerationParams(max_length=20, return_logprobs=True, **options)
            for slots in (5, 24):
                found = generator.generate(*prompts, params, slots=slots)
                yield from (found.response_tokens, found.is_end, found.logprobs)
        seen = []
        params = GenerationParams(max_length=7, end_strings=ends, return_logprobs=True)
        generator.generate(*prompts, params, on_tokens=lambda *step: seen.extend(step))
        yield from seen
        # All replies come at once: the order of samples must not depend on the clock.
        found = generator.generate(*prompts, params, environment=ScriptedEnvironment(), slots=8)
        yield from (found.response_tokens, found.logprobs, found.observed)

    reserved = []
    for _ in range(2):
        eager, graphs = list(outputs(False)), list(outputs(True))
        reserved.append(torch.cuda.memory_reserved())
        assert captures and len(eager) == len(graphs)
        for one, other in zip(eager, graphs, strict=True):
            assert torch.equal(one, other)
        captures.clear()
        for parameter in model.model[0].parameters():
            parameter.data.mul_(1.1)
    assert reserved[1] - reserved[0] < 32 << 20


def test_a_capture_that_fails_leaves_eager_steps(tiny_tokenizer_dir, monkeypatch):
    from nemo_aligner.generation import GenerationParams, MegatronGenerator
    from nemo_aligner.generation.batch import DecodingBatch
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
    from tests.tiny_models import tiny_config

    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, init_method_std=0.4))
    prompts = torch.randint(0, 290, (6, 5)), torch.full((6,), 5), torch.arange(6)
    params, choose = GenerationParams(max_length=12), DecodingBatch.choose

    def generated(cuda_graphs):
        generator = MegatronGenerator(model.model, model.tokenizer, 48, cuda_graphs=cuda_graphs)
        return generator.generate(*prompts, params).response_tokens

    expected = generated(False)
    turned = lambda self, logits: logits if int(self.drawn.max()) < 100 else -logits
    monkeypatch.setattr(DecodingBatch, "choose", lambda s, x: choose(s, turned(s, x)))
    with pytest.raises(RuntimeError, match="captur"):
        generated(True)
    assert torch.equal(generated("auto"), expected)
    monkeypatch.undo()
    assert torch.equal(generated(True), expected)
