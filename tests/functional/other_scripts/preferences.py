# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""DPO or KTO with the calls of NeMo-Aligner's scripts in their order, from the modules that they
import them from; for test_sft_rm_scripts.py. Users' scripts look like this one.
"""

import sys
from functools import partial

import torch.multiprocessing
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from omegaconf.omegaconf import OmegaConf

from nemo_aligner.algorithms.dpo import DPOTrainer, dpo_custom_collate
from nemo_aligner.algorithms.kto import KTOTrainer, kto_custom_collate
from nemo_aligner.data.nlp import builders
from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTDPOModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel
from nemo_aligner.utils import distributed, train_script_utils, utils

torch.multiprocessing.set_start_method("spawn", force=True)


# What differs between the two scripts of NeMo-Aligner; the overrides say which it is.
IS_KTO = any(word.startswith("trainer.kto.") for word in sys.argv)
KIND = "kto" if IS_KTO else "dpo"
MODEL = MegatronGPTKTOModel if IS_KTO else MegatronGPTDPOModel


@hydra_runner(config_path="../../../conf", config_name=f"gpt_{KIND}")
def main(cfg) -> None:
    policy_file = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = utils.load_and_override_model_config(policy_file, cfg.model)
    lightning = train_script_utils.resolve_and_create_trainer(cfg, KIND)
    exp_manager(lightning, cfg.exp_manager)
    logger = train_script_utils.CustomLoggerWrapper(lightning.loggers)

    own = {"strict": True, "restore_path": policy_file}
    policy = utils.load_from_nemo(MODEL, cfg.model, lightning, **own)
    train_script_utils.init_peft(policy, cfg.model)
    if cfg.model.peft.peft_scheme == "none":
        policy.ref_policy_state_dict = utils.retrieve_model_state_dict_in_cpu(
            policy, megatron_amp_O2=cfg.model.get("megatron_amp_O2", False)
        )
    state, consumed = None, 0
    if lightning.ckpt_path is not None:
        state = train_script_utils.retrieve_custom_trainer_state_dict(lightning)
        consumed = state["consumed_samples"]
    train_script_utils.init_distributed(lightning, policy, False)

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
    collate = partial(
        kto_custom_collate if IS_KTO else dpo_custom_collate,
        eos_id=policy.tokenizer.eos_id,
        reset_position_ids=data.get("reset_position_ids", False),
        reset_attention_mask=data.get("reset_attention_mask", False),
        eod_mask_loss=data.get("eod_mask_loss", False),
    )
    loader = partial(
        builders.build_dataloader,
        cfg=cfg,
        mbs=cfg.model.micro_batch_size,
        gbs=cfg.model.global_batch_size,
        load_gbs=True,
        pad_samples_to_global_batch_size=False,
        collate_fn=collate if IS_KTO else builders.identity_collate,
    )
    train = loader(dataset=datasets[0], consumed_samples=consumed)
    validation = loader(dataset=datasets[1], consumed_samples=0, use_random_sampler=False)
    train_script_utils.init_using_ptl(lightning, policy, train, datasets[0])
    optimizer, scheduler = train_script_utils.extract_optimizer_scheduler_from_ptl_model(policy)
    saving = train_script_utils.add_custom_checkpoint_callback(lightning, policy)
    logger.log_hyperparams(OmegaConf.to_container(cfg))
    trainer_class, given = KTOTrainer, {}
    if not IS_KTO:
        multiple = data.get("pad_length_to_multiple_of", None)
        given["collate_fn"] = partial(collate, pad_length_to_multiple_of=multiple)
        trainer_class = DPOTrainer
    parts = {"cfg": cfg.trainer[KIND], "model": policy, "optimizer": optimizer}
    parts |= {"scheduler": scheduler, "train_dataloader": train, "val_dataloader": validation}
    parts |= {"test_dataloader": None, **given, "logger": logger, "ckpt_callback": saving}
    parts |= {"run_timer": distributed.Timer(cfg.exp_manager.get("max_time_per_run"))}
    trainer = trainer_class(**parts)
    if state is not None:
        trainer.load_state_dict(state)
    trainer.fit()


if __name__ == "__main__":
    main()
