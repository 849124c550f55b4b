# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face folder through SFT, a reward model and PPO to a Hugging Face folder, with
which transformers generates the same text as this package.
"""

import functools

import pytest
import torch
import transformers
from omegaconf import OmegaConf

from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from tests import hugging_face
from tests.functional.jobs import must_succeed, read_metrics, write_lines
from tests.functional.test_ppo_job import run_pair
from tests.functional.test_sft_rm_scripts import (
    BATCHES,
    data,  # noqa: F401  (a fixture)
    prefix,
    steps,
    texts,
    training,
)

pytestmark = pytest.mark.timeout(900)


def written(folder, name: str):
    """The Hugging Face folder of a job."""
    found = folder / "checkpoints" / f"{name}-hf"
    assert (found / "config.json").is_file() and (found / "tokenizer.json").is_file()
    return found


@pytest.mark.parametrize(
    "ranks, front", [(1, "asgi"), pytest.param(2, "triton", marks=pytest.mark.full)]
)
def test_from_folder_to_folder(write_folder, data, tmp_path, ranks, front):  # noqa: F811
    split = ["++model.tensor_model_parallel_size=2"] if ranks == 2 else []
    sizes = {"vocab_size": 300, "max_position_embeddings": 64, "tie_word_embeddings": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    qwen = hugging_face.causal_lm("Qwen2", **sizes, **heads)
    base = write_folder(hugging_face.randomized(qwen))
    sft, rm, ppo = (tmp_path / name for name in ("sft", "rm", "ppo"))
    job = functools.partial(training, ranks=ranks)
    must_succeed(
        job(
            "train_gpt_sft.py",
            sft,
            *split,
            "model.save_hf=True",
            f"model.restore_from_path={base}",
            *texts(data / "sft_train.jsonl", data / "sft_validation.jsonl"),
            "model.data.train_ds.global_batch_size=4",
            "model.data.train_ds.micro_batch_size=2",
            *steps("sft"),
        )
    )
    losses = read_metrics(sft, "train/loss")
    assert losses[-1] < losses[0]
    tuned = written(sft, "megatron_gpt_sft")

    own = [f"pretrained_checkpoint.restore_from_path={tuned}", *BATCHES, *steps("rm", 2)]
    own += prefix(data / "pairs_train.jsonl", data / "pairs_validation.jsonl")
    must_succeed(job("train_reward_model.py", rm, *split, "model.save_hf=True", *own))
    judge = written(rm, "megatron_gpt")
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(judge)
    assert scorer.config.num_labels == 1

    write_lines(tmp_path / "prompts.jsonl", [{"text": f"the film {i}"} for i in range(16)])
    start = "pretrained_checkpoint.restore_from_path"
    of_critic = [f"{start}={judge}", "model.save_hf=every_checkpoint", f"server.frontend={front}"]
    of_actor = [f"{start}={tuned}", "model.save_hf=True"]
    run_pair(tmp_path, ppo, [*of_critic, *split], [*of_actor, *split], ranks=ranks)
    assert read_metrics(ppo / "actor", "train_rollouts/init_policy_kl")[0] == 0.0
    values = transformers.AutoModelForTokenClassification.from_pretrained(
        written(ppo / "critic", "megatron_gpt_critic")
    )
    assert type(values).__name__ == "Qwen2ForTokenClassification"

    final = written(ppo / "actor", "megatron_gpt_ppo_actor")
    assert_same_text(final, ppo / "actor" / "checkpoints" / "megatron_gpt_ppo_actor.nemo")


def assert_same_text(folder, nemo) -> None:
    """transformers with `folder` and this package with `nemo` continue prompts alike."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    one_rank = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
    job = OmegaConf.create({"micro_batch_size": 1, "precision": 32, **one_rank})
    model = load_from_nemo(MegatronGPTModel, job, None, restore_path=nemo)
    engine = MegatronGenerator(model.model, model.tokenizer, max_sequence_length=48)
    params = GenerationParams(max_length=16, use_greedy=True)
    for text in ("the film", "a dull plot and", "I loved"):
        tokens = tokenizer(text, return_tensors="pt").input_ids
        theirs = hf.generate(
            tokens, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )[0]
        ours = engine.generate(tokens, torch.tensor([tokens.size(1)]), torch.tensor([0]), params)
        length = int(ours.response_lengths[0])
        assert ours.response_tokens[0, :length].tolist() == theirs.tolist()[:length]
        assert tokenizer.decode(theirs) == tokenizer.decode(ours.response_tokens[0, :length])
