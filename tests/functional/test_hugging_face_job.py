# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face folder through SFT, a reward model and PPO to a Hugging Face folder, with
which transformers generates the same text as this package.
"""

import json

import pytest
import torch
import transformers
from omegaconf import OmegaConf

from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.servers.ports import find_free_port
from tests import hugging_face
from tests.functional.jobs import ScriptJob, assert_ended_well, must_succeed, read_metrics
from tests.functional.test_ppo_job import actor, critic
from tests.functional.test_sft_rm_scripts import data  # noqa: F401  (a fixture)

pytestmark = pytest.mark.timeout(900)


def common(folder) -> list[str]:
    return [
        "trainer.accelerator=cpu",
        "trainer.precision=32",
        f"exp_manager.explicit_log_dir={folder}",
        "model.encoder_seq_length=48",
        "model.optim.lr=1e-2",
        "model.optim.sched.warmup_steps=1",
        "model.save_hf=True",
    ]


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
    base = write_folder(
        hugging_face.randomized(
            hugging_face.causal_lm(
                "Qwen2",
                vocab_size=300,
                max_position_embeddings=64,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=True,
            )
        )
    )
    sft, rm, ppo = (tmp_path / name for name in ("sft", "rm", "ppo"))
    for folder in (sft, rm, ppo):
        folder.mkdir()
    must_succeed(
        ScriptJob(
            "train_gpt_sft.py",
            tmp_path / "sft.log",
            [
                *common(sft),
                *split,
                f"model.restore_from_path={base}",
                "exp_manager.create_checkpoint_callback=True",
                f"model.data.train_ds.file_path={data}/sft_train.jsonl",
                f"model.data.validation_ds.file_path={data}/sft_validation.jsonl",
                "model.data.train_ds.global_batch_size=4",
                "model.data.train_ds.micro_batch_size=2",
                "trainer.sft.max_steps=4",
                "trainer.sft.val_check_interval=4",
                "trainer.sft.save_interval=4",
            ],
            ranks,
        )
    )
    losses = read_metrics(sft, "train/loss")
    assert losses[-1] < losses[0]
    tuned = written(sft, "megatron_gpt_sft")

    pairs = data / "pairs"
    must_succeed(
        ScriptJob(
            "train_reward_model.py",
            tmp_path / "rm.log",
            [
                *common(rm),
                *split,
                f"pretrained_checkpoint.restore_from_path={tuned}",
                f"model.data.data_prefix={{train: [{pairs}_train.jsonl], "
                f"validation: [{pairs}_validation.jsonl]}}",
                "model.data.validation_drop_last=False",
                "model.global_batch_size=4",
                "model.micro_batch_size=1",
                "trainer.rm.max_steps=2",
                "trainer.rm.val_check_interval=2",
                "trainer.rm.save_interval=2",
            ],
            ranks,
        )
    )
    judge = written(rm, "megatron_gpt")
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(judge)
    assert scorer.config.num_labels == 1

    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"text": f"the film {i}"}) + "\n" for i in range(16))
    )
    port = find_free_port()
    policy = f"pretrained_checkpoint.restore_from_path={tuned}"
    with (
        critic(
            tmp_path,
            ppo,
            port,
            ranks,
            "python",
            f"pretrained_checkpoint.restore_from_path={judge}",
            "model.save_hf=every_checkpoint",
            f"server.frontend={front}",
            *split,
        ) as server,
        actor(tmp_path, ppo, port, ranks, "python", policy, "model.save_hf=True", *split) as job,
    ):
        assert_ended_well(job, job.wait())
        assert_ended_well(server, server.stop())
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
