# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Train a reward model on pairs of texts: neighbouring lines `{"text": ...}`, the better one first.

    python train_reward_model.py pretrained_checkpoint.restore_from_path=sft.nemo \
        "model.data.data_prefix={train: [pairs.jsonl], validation: [val.jsonl], test: [test.jsonl]}"

The model starts from a language model with a new head; without `pretrained_checkpoint.restore_from_path` from random
weights, and then the architecture must be given. One process per device: with `trainer.devices=N` plain `python`
starts them itself; torchrun and srun work as well. The same command resumes from the last checkpoint in
`exp_manager.explicit_log_dir`. Keys: conf/training_rm.yaml, docs/config.md.
"""

from nemo.core.config import hydra_runner
from nemo.utils import logging
from omegaconf import OmegaConf

from nemo_aligner.algorithms.supervised import SupervisedTrainer
from nemo_aligner.data.nlp.builders import build_dataloader, build_train_valid_test_rm_datasets
from nemo_aligner.models.nlp.gpt.reward_model_classes import reward_model_class
from nemo_aligner.utils.config_utils import check_config, check_values, drop_unset
from nemo_aligner.utils.timers import Timer
from nemo_aligner.utils.train_script_utils import (
    build_checkpoint_callback,
    build_logger,
    load_and_override_model_config,
    load_from_nemo,
    load_trainer_state,
    resolve_and_create_trainer,
    setup_experiment,
    supervised_max_steps,
    user_errors_end_the_job,
)


@hydra_runner(config_path="conf", config_name="training_rm")
@user_errors_end_the_job
def main(cfg) -> None:
    check_config(cfg, "training_rm")
    model_class = reward_model_class(cfg.model.reward_model_type)
    base = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = drop_unset(cfg.model) if base is None else load_and_override_model_config(base, cfg.model)
    check_values(cfg, "training_rm", complete=True)
    trainer = resolve_and_create_trainer(cfg, "rm")
    logging.info(f"\n\n*** configuration ***\n{OmegaConf.to_yaml(cfg)}")
    log_dir = setup_experiment(trainer, cfg)
    logger = build_logger(trainer, log_dir)

    if base is None:
        model = model_class(cfg.model, trainer)
    else:
        # A new head, unless the checkpoint's own is asked for.
        keep_head = (cfg.model.get("regression") or {}).get("load_rm_head_weights", False)
        model = load_from_nemo(model_class, cfg.model, trainer, restore_path=base, load_base_model_only=not keep_head)

    train_ds, validation_ds, test_ds = build_train_valid_test_rm_datasets(
        cfg=cfg.model,
        data_prefix=cfg.model.data.data_prefix,
        data_impl=cfg.model.data.data_impl,
        splits_string=cfg.model.data.splits_string,
        train_valid_test_num_samples=[-1, -1, -1],
        seq_length=cfg.model.data.seq_length,
        seed=cfg.model.seed,
        tokenizer=model.tokenizer,
    )

    def dataloader(dataset, random: bool, drop_last: bool):
        return build_dataloader(
            cfg,
            dataset,
            consumed_samples=0,
            mbs=cfg.model.micro_batch_size,
            gbs=cfg.model.global_batch_size,
            drop_last=drop_last,
            pad_samples_to_global_batch_size=not drop_last,
            use_random_sampler=random,
        )

    train_dataloader = dataloader(train_ds, cfg.trainer.rm.train_random_sampler, drop_last=True)
    drop_last = cfg.model.data.get("validation_drop_last", True)
    validation_sets = validation_ds if isinstance(validation_ds, dict) else {"validation": validation_ds}
    val_dataloaders = {
        name: dataloader(dataset, cfg.trainer.rm.val_random_sampler, drop_last)
        for name, dataset in validation_sets.items()
        if dataset is not None
    }
    test_dataloader = None if test_ds is None else dataloader(test_ds, False, drop_last)

    optimizer, scheduler = model.setup_megatron_optimization(
        max_steps=supervised_max_steps(cfg.trainer.rm, train_dataloader)
    )
    ckpt_callback = build_checkpoint_callback(cfg, log_dir, model, optimizer, scheduler)
    logger.log_hyperparams(OmegaConf.to_container(cfg))
    rm_trainer = SupervisedTrainer(
        cfg=cfg.trainer.rm,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_dataloader=train_dataloader,
        val_dataloader=val_dataloaders,
        test_dataloader=test_dataloader,
        logger=logger,
        ckpt_callback=ckpt_callback,
        run_timer=Timer(cfg.exp_manager.get("max_time_per_run")),
    )
    state = load_trainer_state(cfg, ckpt_callback)
    if state is not None:
        rm_trainer.load_state_dict(state)
    rm_trainer.fit()


if __name__ == "__main__":
    main()
