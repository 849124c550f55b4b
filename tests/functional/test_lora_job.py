# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters from a Hugging Face folder and chat data through SFT, a reward model and PPO, killed
and resumed, to a PEFT folder, with which `peft` generates the same text as this package.
"""

import shutil

import pytest
import torch
import transformers
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import sources
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.servers.ports import find_free_port
from tests import hugging_face
from tests.functional.jobs import (
    ScriptJob,
    assert_ended_well,
    must_succeed,
    read_metrics,
    wait_for_log,
    write_lines,
)
from tests.functional.test_ppo_job import actor, critic
from tests.oracles import oracle

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LORA = [
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.target_modules=[all]",
    "model.peft.lora_tuning.adapter_dim=4",
    "model.peft.lora_tuning.variant=canonical",
    "model.data.chat_template=tokenizer",
    "model.encoder_seq_length=96",
]
QUESTION = {"role": "user", "content": "the film?"}


def turn(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def base(write_folder):
    """A Qwen2 folder whose tokenizer has a chat template and its special tokens."""
    from transformers import AutoTokenizer

    folder = write_folder(
        hugging_face.randomized(
            hugging_face.causal_lm(
                "Qwen2",
                vocab_size=302,  # ids of the tokenizer with its two special tokens
                max_position_embeddings=128,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    good, bad = turn("a joy"), turn("dull")
    write_lines(folder / "sft.jsonl", [{"messages": [QUESTION, *good]}] * 8)
    write_lines(
        folder / "pairs.jsonl", [{"prompt": [QUESTION], "chosen": good, "rejected": bad}] * 8
    )
    questions = [{"role": "user", "content": f"film {i}?"} for i in range(48)]
    write_lines(folder / "prompts.jsonl", [{"messages": [question]} for question in questions])
    return folder


def common(folder) -> list[str]:
    return [
        "trainer.accelerator=cpu",
        "trainer.precision=32",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=True",
        "exp_manager.create_checkpoint_callback=True",
        "model.optim.lr=1e-2",
        "model.optim.sched.warmup_steps=1",
        *LORA,
    ]


def adapters_of(nemo) -> dict[str, torch.Tensor]:
    with sources.open_source(nemo).own_tensors() as source:
        return {
            key: source.read(key, tuple(slice(0, size) for size in shape))
            for key, shape in source.shapes().items()
        }


def sft_and_reward_model(base, data, tmp_path):
    """`.nemo` files of the adapters of both; the reward model's base is the merged SFT model."""
    sft, rm = tmp_path / "sft", tmp_path / "rm"
    must_succeed(
        ScriptJob(
            "train_gpt_sft.py",
            tmp_path / "sft.log",
            [
                *common(sft),
                f"model.restore_from_path={base}",
                f"model.data.train_ds.file_path={data}/sft.jsonl",
                f"model.data.validation_ds.file_path={data}/sft.jsonl",
                "model.data.train_ds.global_batch_size=4",
                "model.data.train_ds.micro_batch_size=2",
                "trainer.sft.max_steps=4",
                "trainer.sft.max_epochs=4",
                "trainer.sft.val_check_interval=4",
                "trainer.sft.save_interval=4",
            ],
        )
    )
    losses = read_metrics(sft, "train/loss")
    assert losses[-1] < losses[0]
    tuned = sft / "checkpoints" / "megatron_gpt_sft.nemo"
    files = f"{{train: [{data}/pairs.jsonl], validation: [{data}/pairs.jsonl]}}"
    must_succeed(
        ScriptJob(
            "train_reward_model.py",
            tmp_path / "rm.log",
            [
                *common(rm),
                f"pretrained_checkpoint.restore_from_path={tuned}",
                f"model.data.data_prefix={files}",
                "model.data.validation_drop_last=False",
                "model.global_batch_size=4",
                "model.micro_batch_size=1",
                "trainer.rm.max_steps=2",
                "trainer.rm.val_check_interval=2",
                "trainer.rm.save_interval=2",
            ],
        )
    )
    judge = rm / "checkpoints" / "megatron_gpt.nemo"
    assert all(".lora." in key or "rm_head" in key for key in adapters_of(judge))
    return tuned, judge


def ppo(data, folder, tuned, judge, kill: bool = False) -> None:
    """Four steps of PPO in `folder`, from what is there; `kill`: the actor dies after the
    checkpoint of step 2.
    """
    port = find_free_port()
    more = [*LORA, "model.save_hf=True", "trainer.ppo.save_interval=2"]
    policy = f"pretrained_checkpoint.restore_from_path={tuned}"
    limits = ["trainer.ppo.max_steps=4", "trainer.ppo.val_check_interval=2"]
    with (
        critic(
            data,
            folder,
            port,
            f"pretrained_checkpoint.restore_from_path={judge}",
            *[key for key in LORA if "chat_template" not in key],
        ) as server,
        actor(data, folder, port, policy, *more, *limits) as job,
    ):
        if kill:
            wait_for_log(job, "saved checkpoint")
            job.process.kill()
            return
        assert_ended_well(job, job.wait(240))
        assert_ended_well(server, server.stop())


def test_adapters_from_folder_to_folder(base, data, tmp_path):
    tuned, judge = sft_and_reward_model(base, data, tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ppo(data, whole, tuned, judge)
    kl = read_metrics(whole / "actor", "train_rollouts/init_policy_kl")
    assert kl[0] == 0.0 and any(kl[1:])
    ppo(data, parts, tuned, judge, kill=True)
    ppo(data, parts, tuned, judge)
    name = "megatron_gpt_ppo_actor.nemo"
    ours, theirs = (
        adapters_of(folder / "actor" / "checkpoints" / name) for folder in (whole, parts)
    )
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[key], theirs[key]) for key in ours
    )
    assert_peft_generates_the_same(tuned, whole / "actor" / "checkpoints", tmp_path)


def assert_peft_generates_the_same(tuned, checkpoints, tmp_path) -> None:
    """`peft`, on the folder of the merged SFT model, continues a conversation as this package
    does.
    """
    from nemo_aligner.convert.__main__ import main

    merged = tmp_path / "merged"
    assert main(["nemo-to-hf", str(tuned), str(merged), "--merged", "--quiet"]) == 0
    written = checkpoints / "megatron_gpt_ppo_actor-hf"
    shutil.copytree(written, tmp_path / "adapters")
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    model = oracle("peft").PeftModel.from_pretrained(model, tmp_path / "adapters")
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    tokens = tokenizer.apply_chat_template(
        [QUESTION], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    theirs = model.generate(
        input_ids=tokens, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0]
    policy = load_from_nemo(
        MegatronGPTModel,
        OmegaConf.create({"micro_batch_size": 1, "precision": 32}),
        None,
        restore_path=checkpoints / "megatron_gpt_ppo_actor.nemo",
    )
    engine = MegatronGenerator(policy.model, policy.tokenizer, max_sequence_length=96)
    params = GenerationParams(max_length=16, min_length=16, use_greedy=True)
    ours = engine.generate(tokens, torch.tensor([tokens.size(1)]), torch.tensor([0]), params)
    length = int(ours.response_lengths[0])
    assert ours.response_tokens[0, :length].tolist() == theirs.tolist()[:length]
