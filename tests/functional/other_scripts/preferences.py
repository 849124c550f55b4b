# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""DPO, KTO or SPIN as NeMo-Aligner's scripts; for test_sft_rm_scripts.py."""

import sys
from functools import partial

import steps
from nemo.core.config import hydra_runner
from omegaconf.omegaconf import open_dict

from nemo_aligner.algorithms.dpo import DPOTrainer, dpo_custom_collate
from nemo_aligner.algorithms.kto import KTOTrainer, kto_custom_collate
from nemo_aligner.algorithms.spin import SPINTrainer, spin_custom_collate
from nemo_aligner.data.nlp import builders
from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTDPOModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_spin_model import MegatronGPTSPINModel
from nemo_aligner.utils import distributed, train_script_utils

# What differs between the scripts of NeMo-Aligner; the overrides say which it is.
KINDS = {
    "dpo": (MegatronGPTDPOModel, DPOTrainer, dpo_custom_collate),
    "kto": (MegatronGPTKTOModel, KTOTrainer, kto_custom_collate),
    "spin": (MegatronGPTSPINModel, SPINTrainer, spin_custom_collate),
}
(KIND,) = (kind for kind in KINDS if any(w.startswith(f"trainer.{kind}.") for w in sys.argv))
MODEL, TRAINER, COLLATE = KINDS[KIND]


def of_pairs(cfg, policy, collate, loader, consumed):
    """The data set, and loaders of DPO and KTO."""
    data = cfg.model.data
    datasets = getattr(builders, f"build_train_valid_test_{KIND}_datasets")(
        cfg=cfg.model,
        data_prefix=data.data_prefix,
        data_impl=data.data_impl,
        splits_string=data.splits_string,
        train_valid_test_num_samples=[-1 * cfg.model.global_batch_size] * 3,
        seq_length=data.seq_length,
        seed=cfg.model.seed,
        tokenizer=policy.tokenizer,
    )
    sizes = {"mbs": cfg.model.micro_batch_size, "gbs": cfg.model.global_batch_size}
    own = {**sizes, "collate_fn": collate if KIND == "kto" else builders.identity_collate}
    train = loader(dataset=datasets[0], consumed_samples=consumed, **own)
    order = {"consumed_samples": 0, "use_random_sampler": False}
    return datasets[0], train, loader(dataset=datasets[1], **order, **own)


def of_texts(cfg, policy, collate, loader, consumed):
    """The data set, and loaders of SPIN."""
    data = cfg.model.data
    settings = {"answer_only_loss": True, "is_chat": data.chat}
    settings["special_tokens"] = data.chat_prompt_tokens
    make = partial(builders.build_sft_dataset, **settings)
    datasets = [
        make(section, policy.tokenizer, None) for section in (data.train_ds, data.validation_ds)
    ]
    own = {"mbs": cfg.model.micro_batch_size, "gbs": cfg.model.global_batch_size}
    own |= {"collate_fn": collate, "drop_last": data.train_ds.drop_last}
    train = loader(dataset=datasets[0], consumed_samples=consumed, **own)
    section, dataset = data.validation_ds, datasets[1]
    own = {"mbs": section.micro_batch_size, "gbs": section.global_batch_size}
    own |= {"collate_fn": dataset.collate_fn, "drop_last": section.drop_last}
    order = {"consumed_samples": 0, "use_random_sampler": False}
    return datasets[0], train, loader(dataset=dataset, **order, **own)


@hydra_runner(config_path="../../../conf", config_name=f"gpt_{KIND}")
def main(cfg) -> None:
    lightning, logger, policy = steps.begin(cfg, KIND, MODEL)
    if KIND == "spin":
        with open_dict(cfg):
            cfg.model.encoder_seq_length = policy.cfg.encoder_seq_length
        needs_reference = policy.ref_policy_state_dict is None
    else:
        train_script_utils.init_peft(policy, cfg.model)
        needs_reference = cfg.model.peft.peft_scheme == "none"
    if needs_reference:
        policy.ref_policy_state_dict = steps.weights_of(policy, cfg)
    state = steps.saved_state(lightning, policy)
    consumed = 0 if state is None else state["consumed_samples"]

    data, names = cfg.model.data, ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    kept = {name: data.get(name, False) for name in names}
    collate = partial(COLLATE, eos_id=policy.tokenizer.eos_id, **kept)
    options = {"pad_samples_to_global_batch_size": False, "load_gbs": True}
    loader = partial(builders.build_dataloader, cfg=cfg, **options)
    loaders = of_texts if KIND == "spin" else of_pairs
    dataset, train, validation = loaders(cfg, policy, collate, loader, consumed)
    parts = steps.prepare(cfg, lightning, logger, policy, train, dataset)
    if KIND == "dpo":
        multiple = data.get("pad_length_to_multiple_of", None)
        parts["collate_fn"] = partial(collate, pad_length_to_multiple_of=multiple)
    trainer = TRAINER(
        cfg=cfg.trainer[KIND],
        train_dataloader=train,
        val_dataloader=validation,
        test_dataloader=None,
        run_timer=distributed.Timer(cfg.exp_manager.get("max_time_per_run")),
        **parts,
    )
    if state is not None:
        trainer.load_state_dict(state)
    trainer.fit()


if __name__ == "__main__":
    main()
