# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The project's scripts as jobs, and the Hydra overrides that several of them share."""

import sys
from pathlib import Path

from jobs import Job

LORA_DIM, LORA_RATE = 32, 2
SCRIPTS = Path(__file__).resolve().parents[1] / "nlp" / "gpt"


def script_job(name: str, script: str, folder: Path, overrides: dict, threads: int = 1) -> Job:
    """One of the project's scripts with Hydra overrides.

    Args:
        threads: CPU threads; actor and critic run at the same time, so one for each is enough.
    """
    command = [
        sys.executable,
        str(SCRIPTS / script),
        *(f"{key}={hydra_value(value)}" for key, value in overrides.items()),
    ]
    return Job(name, command, folder, env={"OMP_NUM_THREADS": str(threads)})


def hydra_value(value) -> str:
    """`value` in Hydra's override grammar; strings are quoted, so that any path is safe."""
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    return "'" + str(value).replace("'", "\\'") + "'"


def on_cpu() -> dict:
    """One process on the CPU; the models here are too small for anything more."""
    return {"trainer.devices": 1, "trainer.accelerator": "cpu", "trainer.precision": 32}


def training(folder: Path, seed: int, seq_length: int) -> dict:
    """Overrides of every script that trains; it writes to `folder`."""
    return {
        **on_cpu(),
        "exp_manager.explicit_log_dir": folder,
        "exp_manager.name": folder.name,
        "exp_manager.checkpoint_callback_params.save_top_k": 1,
        "model.encoder_seq_length": seq_length,
        "model.seed": seed + 1,
    }


def optimizer(lr: float, warmup: int = 10) -> dict:
    """A cosine from `lr` down to a tenth of it over the whole job."""
    return {
        "model.optim.lr": lr,
        "model.optim.weight_decay": 0.01,
        "model.optim.sched.warmup_steps": warmup,
        "model.optim.sched.constant_steps": 0,
        "model.optim.sched.min_lr": lr / 10,
    }


def with_lora(overrides: dict) -> dict:
    """`overrides` with adapters in place of all weights; they learn at higher rates."""
    return {
        **overrides,
        "model.peft.peft_scheme": "lora",
        "model.peft.lora_tuning.target_modules": ["all"],
        "model.peft.lora_tuning.adapter_dim": LORA_DIM,
        "model.optim.lr": LORA_RATE * overrides["model.optim.lr"],
        "model.optim.sched.min_lr": LORA_RATE * overrides["model.optim.sched.min_lr"],
    }


def from_scratch(data: Path, architecture: dict, batch_size: int, steps: int) -> dict:
    """SFT from random weights on the files in `data`."""
    return {
        **{f"model.{key}": value for key, value in architecture.items()},
        "model.restore_from_path": None,
        "model.tokenizer.library": "huggingface",
        "model.tokenizer.type": data / "tokenizer",
        "model.data.train_ds.file_path": data / "sft_train.jsonl",
        "model.data.train_ds.global_batch_size": batch_size,
        "model.data.train_ds.micro_batch_size": batch_size,
        "model.data.validation_ds.file_path": data / "sft_validation.jsonl",
        **schedule("trainer.sft", steps, steps),
    }


def schedule(section: str, steps: int, val_check_interval: int) -> dict:
    """Run for `steps` steps, however many epochs that makes; save at the end only."""
    return {
        f"{section}.max_steps": steps,
        f"{section}.max_epochs": steps,  # a step takes less than an epoch
        f"{section}.val_check_interval": val_check_interval,
        f"{section}.save_interval": steps,
    }


def policy_training(section: str, steps: int) -> dict:
    """`schedule` of PPO or RS, with validations before the first step, in between and at the
    end.
    """
    return {**schedule(section, steps, max(steps // 5, 1)), f"{section}.run_init_validation": True}


def data_prefix(data: Path, kind: str) -> dict:
    """`model.data.data_prefix` for the files of one kind in `data`."""
    train, validation = (str(data / f"{kind}_{split}.jsonl") for split in ("train", "validation"))
    return {"train": [train], "validation": [validation], "test": [validation]}


def nemo_file(run_dir: Path, job: str) -> Path:
    """The model that a training job wrote."""
    return run_dir / job / "checkpoints" / f"{job}.nemo"
