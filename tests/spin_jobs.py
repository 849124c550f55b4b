# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Small jobs of SPIN: two iterations of six steps over twelve examples."""

from omegaconf import OmegaConf

from nemo_aligner.algorithms.spin import SPINTrainer, spin_custom_collate
from nemo_aligner.data.nlp.builders import build_sft_dataset
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTSPINModel
from tests import preference_jobs
from tests.tiny_models import tiny_config

PAIRS, STEPS_PER_EPOCH, EPOCHS, ITERATIONS = preference_jobs.BATCH, 3, 2, 2
STEPS = STEPS_PER_EPOCH * EPOCHS * ITERATIONS
LENGTH, LONGEST_RESPONSE = 40, 7
BETAS = [0.3, 0.6]
RESPONSES = ["was a joy", "is dull, and far too long", "bad", "made well, but played; warm"]
TUNING = {"target_modules": ["all"], "adapter_dim": 4, "row_init_method": "normal"}
LORA = {"peft_scheme": "lora", "lora_tuning": TUNING}


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
    settings = {
        "ref_policy_kl_penalty": BETAS,
        "rollout_micro_batch_size": 7,  # two steps of 4 pairs
        "length_params": {"max_length": LONGEST_RESPONSE},
        "sampling_params": {"end_strings": []},
    }
    return preference_jobs.job_of("spin", **settings | spin)


def trainer_of(model, data, tokenizer, saving=None, **settings):
    """A `SPINTrainer` over `data` in random order, its log, and the indices it has drawn."""
    drawn = []

    def collate(items):
        drawn.append([item["idx"] for item in items])
        return spin_custom_collate(items, eos_id=tokenizer.eos_id)

    settings = {"max_iterations": ITERATIONS, "max_epochs": EPOCHS} | settings
    parts = (SPINTrainer, model, data, STEPS, saving, collate)
    return *preference_jobs.trainer_of(*parts, **settings), drawn


def tiny_model(tokenizer_dir, peft=None, hidden_dropout=0.1, more=None, base=None, **spin):
    cfg = OmegaConf.merge(tiny_config(tokenizer_dir), job(**spin), more or {})
    cfg.hidden_dropout = hidden_dropout
    if base is None:
        model = MegatronGPTSPINModel(cfg)
    else:
        model = load_from_nemo(MegatronGPTSPINModel, cfg, None, restore_path=base)
    model.init_peft(peft)
    return model
