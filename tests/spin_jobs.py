# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Small jobs of SPIN: two iterations of six steps over twelve examples."""

import json
from types import SimpleNamespace

from omegaconf import OmegaConf

from nemo_aligner.algorithms.spin import SPINTrainer, spin_custom_collate
from nemo_aligner.data.nlp.builders import build_dataloader, build_sft_dataset
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.launch.script_steps import FakeCheckpointCallback
from nemo_aligner.models.nlp.gpt.megatron_gpt_spin_model import MegatronGPTSPINModel
from tests.tiny_models import tiny_config

PAIRS, STEPS_PER_EPOCH, EPOCHS, ITERATIONS = 4, 3, 2, 2
STEPS = STEPS_PER_EPOCH * EPOCHS * ITERATIONS
LENGTH, LONGEST_RESPONSE = 40, 7
BETAS = [0.3, 0.6]
RESPONSES = ["was a joy", "is dull, and far too long", "bad", "made well, but played; warm"]
LORA = {
    "peft_scheme": "lora",
    "lora_tuning": {"target_modules": ["all"], "adapter_dim": 4, "row_init_method": "normal"},
}


def write(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def records():
    """Examples of ragged lengths; the prompt of one leaves no room for its response."""
    for i in range(PAIRS * STEPS_PER_EPOCH):
        prompt = "the film" + " so" * (i % 5) + f" {i}" + " on and on" * 9 * (i == 5)
        yield {"input": prompt, "output": RESPONSES[i % 4]}


def sft_data(tokenizer, path, **options):
    section = {"file_path": path, "max_seq_length": LENGTH, "truncation_field": "", **options}
    chat = {key: section.pop(key, None) for key in ("chat_template", "allow_empty_prompt")}
    return build_sft_dataset(OmegaConf.create(section), tokenizer, is_chat=False, **chat)


def job(**spin):
    cfg = tiny_config("unused")
    model = {"micro_batch_size": 2, "global_batch_size": PAIRS, "precision": 32, "seed": 1}
    optim = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0, "betas": cfg.optim.betas}
    optim |= {"eps": 1e-6, "sched": {"name": "constant"}}
    settings = {
        "ref_policy_kl_penalty": BETAS,
        "rollout_micro_batch_size": 7,  # two steps of 4 pairs
        "length_params": {"max_length": LONGEST_RESPONSE},
        "sampling_params": {"end_strings": []},
        **spin,
    }
    return OmegaConf.create(
        {**model, "optim": optim, "spin": settings, "data": {"num_workers": 0}}
    )


class Log(list):
    def __init__(self):
        self.samples = []

    def log_metrics(self, metrics, step=None, prefix=""):
        if prefix == "train/":
            self.append(metrics)

    def log_samples(self, name, rows, step=None):
        assert name == "train_samples"
        self.samples += [{"step": step, **row} for row in rows]

    def log_hyperparams(self, *_):
        pass

    def finalize(self):
        pass


def trainer_of(model, data, tokenizer, saving=None, **overrides):
    """A `SPINTrainer` over `data` in random order, its log, and the indices it has drawn."""
    drawn = []

    def collate(items):
        drawn.append([item["idx"] for item in items])
        return spin_custom_collate(items, eos_id=tokenizer.eos_id)

    sizes = dict(mbs=2, gbs=PAIRS, use_random_sampler=True, collate_fn=collate)
    loader = build_dataloader(OmegaConf.create({"model": model.cfg}), data, 0, **sizes)
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=STEPS)
    log, timer = Log(), SimpleNamespace(start_time=lambda: None, is_finished=lambda: False)
    saving = saving and saving(model, optimizer, scheduler)
    saving = saving or FakeCheckpointCallback()
    cfg = {"val_check_interval": -1, "save_interval": -1, "gradient_clip_val": 1.0}
    cfg |= {"max_iterations": ITERATIONS, "max_epochs": EPOCHS, **overrides}
    loops = (optimizer, scheduler, loader, None, None)
    trainer = SPINTrainer(OmegaConf.create(cfg), model, *loops, log, saving, timer)
    return trainer, log, drawn


def tiny_model(tokenizer_dir, peft=None, hidden_dropout=0.1, more=None, base=None, **spin):
    cfg = OmegaConf.merge(tiny_config(tokenizer_dir), job(**spin), more or {})
    cfg.hidden_dropout = hidden_dropout
    if base is None:
        model = MegatronGPTSPINModel(cfg)
    else:
        model = load_from_nemo(MegatronGPTSPINModel, cfg, None, restore_path=base)
    model.init_peft(peft)
    return model
