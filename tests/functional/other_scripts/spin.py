# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""SPIN with the calls of NeMo-Aligner's script in their order, from the modules that it imports
them from; for test_sft_rm_scripts.py. Users' scripts look like this one.
"""

from functools import partial

import torch.multiprocessing
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from omegaconf.omegaconf import OmegaConf, open_dict

from nemo_aligner.algorithms.spin import SPINTrainer, spin_custom_collate
from nemo_aligner.data.nlp import builders
from nemo_aligner.models.nlp.gpt.megatron_gpt_spin_model import MegatronGPTSPINModel
from nemo_aligner.utils import distributed, train_script_utils, utils

torch.multiprocessing.set_start_method("spawn", force=True)


@hydra_runner(config_path="../../../conf", config_name="gpt_spin")
def main(cfg) -> None:
    policy_file = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = utils.load_and_override_model_config(policy_file, cfg.model)
    lightning = train_script_utils.resolve_and_create_trainer(cfg, "spin")
    exp_manager(lightning, cfg.exp_manager)
    logger = train_script_utils.CustomLoggerWrapper(lightning.loggers)

    policy = utils.load_from_nemo(
        MegatronGPTSPINModel, cfg.model, lightning, strict=True, restore_path=policy_file
    )
    with open_dict(cfg):
        cfg.model.encoder_seq_length = policy.cfg.encoder_seq_length
    if policy.ref_policy_state_dict is None:
        policy.ref_policy_state_dict = utils.retrieve_model_state_dict_in_cpu(
            policy, megatron_amp_O2=cfg.model.get("megatron_amp_O2", False)
        )
    state, consumed = None, 0
    if lightning.ckpt_path is not None:
        state = train_script_utils.retrieve_custom_trainer_state_dict(lightning)
        consumed = state["consumed_samples"]
    train_script_utils.init_distributed(lightning, policy, False)

    data = cfg.model.data
    settings = {"answer_only_loss": True, "is_chat": data.chat}
    settings["special_tokens"] = data.chat_prompt_tokens
    make = partial(builders.build_sft_dataset, **settings)
    datasets = [
        make(section, policy.tokenizer, None) for section in (data.train_ds, data.validation_ds)
    ]
    names = "reset_position_ids", "reset_attention_mask", "eod_mask_loss"
    kept = {name: data.get(name, False) for name in names}
    own_collate = partial(spin_custom_collate, eos_id=policy.tokenizer.eos_id, **kept)
    loader = partial(
        builders.build_dataloader, cfg=cfg, pad_samples_to_global_batch_size=False, load_gbs=True
    )
    own = {"mbs": cfg.model.micro_batch_size, "gbs": cfg.model.global_batch_size}
    own |= {"collate_fn": own_collate, "drop_last": data.train_ds.drop_last}
    train = loader(dataset=datasets[0], consumed_samples=consumed, **own)
    section, dataset = data.validation_ds, datasets[1]
    own = {"mbs": section.micro_batch_size, "gbs": section.global_batch_size}
    own |= {"collate_fn": dataset.collate_fn, "drop_last": section.drop_last}
    validation = loader(dataset=dataset, consumed_samples=0, use_random_sampler=False, **own)
    train_script_utils.init_using_ptl(lightning, policy, train, datasets[0])
    optimizer, scheduler = train_script_utils.extract_optimizer_scheduler_from_ptl_model(policy)
    saving = train_script_utils.add_custom_checkpoint_callback(lightning, policy)
    logger.log_hyperparams(OmegaConf.to_container(cfg))
    parts = {"cfg": cfg.trainer.spin, "model": policy, "optimizer": optimizer}
    parts |= {"scheduler": scheduler, "train_dataloader": train, "val_dataloader": validation}
    parts |= {"test_dataloader": None, "logger": logger, "ckpt_callback": saving}
    parts |= {"run_timer": distributed.Timer(cfg.exp_manager.get("max_time_per_run"))}
    spin_trainer = SPINTrainer(**parts)
    if state is not None:
        spin_trainer.load_state_dict(state)
    spin_trainer.fit()


if __name__ == "__main__":
    main()
