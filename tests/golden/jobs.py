# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The jobs whose numbers are stored: commands, splits and inputs.

Nothing here is made by the package: models are Hugging Face folders that numpy has drawn, jobs are
commands. So the numbers judge whatever is inside.
"""

import json
import shutil
import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SPLITS = {"one": "", "dp2": "", "cp2": "++model.context_parallel_size=2"}
KINDS = {"tp2": "tensor", "pp2": "pipeline", "ep2": "expert"}
SPLITS |= {name: f"++model.{kind}_model_parallel_size=2" for name, kind in KINDS.items()}
USUAL = ("one", "tp2", "pp2", "dp2")
# Where an exact gradient is zero, Adam makes a step of its rounding error: an eps well above that
# keeps it out of the weights.
COMMON = """
    trainer.accelerator=cpu trainer.precision=32 model.encoder_seq_length=96
    model.optim.lr=1e-2 model.optim.sched.warmup_steps=1 ++model.optim.eps=1e-3
    exp_manager.checkpoint_callback_params.save_top_k=0
"""


@dataclass(frozen=True)
class Job:
    """Three steps, or four of SPIN, in the folder of `write_inputs`.

    Attributes:
        command: what stands behind `nemo-aligner`.
        overrides: beside those of `COMMON`, in one text.
        splits: names of `SPLITS`.
    """

    command: str
    overrides: str
    splits: tuple[str, ...] = USUAL

    def arguments(self, split: str, folder: str) -> list[str]:
        overrides = f"{COMMON} {SPLITS[split]} {self.overrides}".split()
        return [f"exp_manager.explicit_log_dir={folder}", *overrides]


def _steps(section: str, count: int = 3) -> str:
    keys = ("max_steps", "val_check_interval")
    return " ".join(f"trainer.{section}.{key}={count}" for key in keys)


def _files(kind: str) -> str:
    parts = ",".join(f"{part}:[{kind}_{part}.jsonl]" for part in ("train", "validation", "test"))
    return f"model.data.data_prefix={{{parts}}}"


def _texts(kind: str, base: str = "policy") -> str:
    """Of SFT and SteerLM 2.0."""
    return f"""
        {_steps("sft")} model.restore_from_path={base}
        model.data.train_ds.file_path={kind}_train.jsonl
        model.data.validation_ds.file_path={kind}_validation.jsonl
        model.data.train_ds.global_batch_size=4 model.data.train_ds.micro_batch_size=1
    """


BASE = "pretrained_checkpoint.restore_from_path=policy model.global_batch_size=4"
SUPERVISED = f"{BASE} model.micro_batch_size=1"
# Random weights rarely end a response; letters end one often enough.
SAMPLED = f"sampling_params.end_strings=[{','.join(string.ascii_lowercase)}]"


def _actor(section: str) -> str:
    keys = f"""
        num_rollout_samples=4 rollout_micro_batch_size=2 num_val_samples=4
        length_params.max_length=12 {SAMPLED}
    """
    own = " ".join(f"model.{section}.{key}" for key in keys.split())
    return f"""
        {BASE} {_steps(section)} {_files("prompts")} {own}
        model.micro_batch_size=2 model.optim.lr=3e-3
    """


def _rewarded(section: str) -> str:
    function = "reward_fn=reward.py:reward", "reward_fn_workers=1"
    function = " ".join(f"trainer.{section}.{setting}" for setting in function)
    return f"{_actor(section)} {function}"


RM = f"{SUPERVISED} {_steps('rm')} model.force_head_dtype=float32"
REGRESSION = "model.reward_model_type=regression model.regression.num_attributes=2"
DPO = f"{SUPERVISED} {_steps('dpo')} {_files('pairs')}"
LORA = "model.peft.peft_scheme=lora model.peft.lora_tuning.target_modules=[all]"
SPIN = f"""
    {SUPERVISED} {_steps("spin", 4)} trainer.spin.limit_train_batches=2
    trainer.spin.max_iterations=2 model.spin.length_params.max_length=12 model.spin.{SAMPLED}
    model.data.chat=False model.data.train_ds.file_path=sft_train.jsonl
    model.data.validation_ds.file_path=sft_validation.jsonl
"""
REINFORCE = """
    trainer.reinforce.num_rollouts_per_prompt=2 trainer.reinforce.initial_policy_kl_penalty=0.1
"""
GRPO = """
    trainer.ppo.advantage_estimator=grpo model.ppo.num_rollouts_per_prompt=2
    model.ppo.kl_loss_coef=0.1 model.ppo.train_on_truncated=True
"""
PPO = "model.ppo.num_rollout_samples=8 trainer.ppo.initial_policy_kl_penalty=0.05"
JOBS = {
    "sft": Job("train sft", _texts("sft"), (*USUAL, "cp2")),
    "sft-experts": Job("train sft", _texts("sft", "experts"), ("one", "ep2")),
    "steerlm2": Job("train steerlm2", f"{_texts('steerlm2')} model.data.chat=True"),
    "rm": Job("train rm", f"{RM} {_files('pairs')}"),
    "rm-regression": Job("train rm", f"{RM} {_files('labels')} {REGRESSION}"),
    "dpo": Job("train dpo", DPO),
    "dpo-lora": Job("train dpo", f"{DPO} {LORA}", ("one", "tp2")),
    "kto": Job("train kto", f"{SUPERVISED} {_steps('kto')} {_files('kto')}"),
    "distill": Job(
        "train distill", f"{SUPERVISED} {_steps('knowledge_distillation')} {_files('logits')}"
    ),
    "spin": Job("train spin", SPIN),
    "rs": Job(
        "train rs",
        f"{_rewarded('rs')} model.rs.num_rollouts_per_prompt=3 model.rs.top_n_rollouts=1",
    ),
    "reinforce": Job("train reinforce", f"{_rewarded('reinforce')} {REINFORCE}"),
    "grpo": Job("train ppo", f"{_rewarded('ppo')} {GRPO}", (*USUAL, "cp2")),
    "ppo": Job("train ppo", f"{_actor('ppo')} {PPO}"),
}
# Of the job "ppo", on one rank.
CRITIC = Job(
    "serve critic",
    """
    pretrained_checkpoint.restore_from_path=reward_model trainer.ppo.max_steps=6
    model.global_batch_size=4 model.micro_batch_size=2 server.frontend=asgi
    exp_manager.checkpoint_callback_params.always_save_nemo=True
    """,
)


# --- inputs

REWARD = """
def reward(prompts, responses, lengths):
    return [sum(map(ord, text)) % 101 / 50 + n / 8 for text, n in zip(responses, lengths)]
"""
ENDINGS = [" was a joy", " is dull", " is bad", " was a sad and very long evening"]


def _pair(n: int, **endings: int) -> dict:
    return {"prompt": f"the film {n}"} | {key: ENDINGS[k] for key, k in endings.items()}


def _steerlm2(n: int) -> dict:
    scores = {"log(P(a|x,y))": -0.5, "log(P(y|x))": -1.0, "log(Q(y|a,x))": -0.7}
    responses = [
        {"from": "Assistant", "value": text} | {key: x * k for key, x in scores.items()}
        for k, text in enumerate(ENDINGS[: 2 + n % 2])
    ]
    turns = [{"from": "User", "value": f"the film {n}"}]
    return {"prompt_turns": turns, "label": "quality:4", "responses": responses}


def _logits(n: int) -> dict:
    """The four largest logits of each token."""
    rng, size = np.random.default_rng(n), 8 + n % 4
    tokens = rng.integers(0, 299, size + 1).tolist()
    return {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "loss_mask": [0, 0, 0, *[1] * (size - 3)],
        "topk_logits": (-np.sort(rng.integers(0, 3000, (size, 4)) / 1000)).tolist(),
        "topk_token_ids": [rng.choice(299, 4, replace=False).tolist() for _ in range(size)],
        "log_sum_exp_logits": [0.5] * size,
    }


RECORDS = {
    "sft": lambda n: {"input": f"the film {n}", "output": ENDINGS[n % 4]},
    "pairs": lambda n: _pair(n, chosen=0, rejected=1 + n % 3),
    "kto": lambda n: (
        _pair(n // 2, response=n % 2 * (1 + n % 3)) | {"preference": ["chosen", "rejected"][n % 2]}
    ),
    "labels": lambda n: {"text": f"the film {n}{ENDINGS[n % 4]}", "label": [n % 5, n % 3]},
    "prompts": lambda n: {"text": f"{['the film', 'a dull plot and', 'I loved'][n % 3]} {n}"},
    "steerlm2": _steerlm2,
    "logits": _logits,
}
# A class of Hugging Face, and its settings beside `SIZES`.
MODELS: dict[str, tuple[str, dict]] = {
    "policy": ("LlamaForCausalLM", {}),
    "experts": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "reward_model": ("LlamaForSequenceClassification", {"num_labels": 1, "pad_token_id": 0}),
}
VOCAB, WIDTH, FFN, LAYERS = 320, 32, 48, 2
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": FFN, "eos_token_id": 299}
SIZES |= {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "torch_dtype": "float32"}
SIZES |= {"max_position_embeddings": 96, "tie_word_embeddings": False}


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Of the weights of a model."""
    layer = {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
    layer |= {f"self_attn.{part}_proj": (WIDTH, WIDTH) for part in "qo"}
    layer |= {f"self_attn.{part}_proj": (WIDTH // 2, WIDTH) for part in "kv"}
    mlp = {"gate_proj": (FFN, WIDTH), "up_proj": (FFN, WIDTH), "down_proj": (WIDTH, FFN)}
    if name == "experts":
        layer["block_sparse_moe.gate"] = (4, WIDTH)
        names = [
            f"block_sparse_moe.experts.{n}.{part}" for n in range(4) for part in ("w1", "w3", "w2")
        ]
        layer |= zip(names, [*mlp.values()] * 4)
    else:
        layer |= {f"mlp.{part}": shape for part, shape in mlp.items()}
    head = {"score": (1, WIDTH)} if name == "reward_model" else {"lm_head": (VOCAB, WIDTH)}
    layers = {f"model.layers.{n}.{key}": layer[key] for n in range(LAYERS) for key in layer}
    return {"model.embed_tokens": (VOCAB, WIDTH), "model.norm": (WIDTH,)} | head | layers


def write_inputs(folder: Path, tokenizer: Path) -> None:
    """What all jobs read."""
    for name, (model_class, settings) in MODELS.items():
        shutil.copytree(tokenizer, folder / name)
        kind = {"architectures": [model_class], "model_type": model_class.split("For")[0].lower()}
        (folder / name / "config.json").write_text(json.dumps(kind | SIZES | settings))
        rng = np.random.default_rng(len(name))
        weights = {  # exact in float32, so the same on each machine
            f"{key}.weight": (rng.integers(-512, 512, shape) / 2048 + ("norm" in key)).astype("f4")
            for key, shape in _shapes(name).items()
        }
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
    for kind, record in RECORDS.items():
        for part, count in {"train": 24, "validation": 4, "test": 4}.items():
            lines = [json.dumps(record(n)) + "\n" for n in range(count)]
            (folder / f"{kind}_{part}.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(REWARD)
