# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Kahneman-Tversky optimization (KTO): a policy learns from single responses, each of them
desirable or not, without a reward model.

    python train_gpt_kto.py pretrained_checkpoint.restore_from_path=sft.nemo \
        "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl]}"

Lines are `{"prompt": ..., "response": ..., "preference": "chosen" or "rejected"}`, texts or
conversations (docs/kto.md). The checkpoint is also the reference policy: a copy of its weights in
host memory, or with `model.peft.peft_scheme=lora` the model without its adapters. One process per
device: with `trainer.devices=N` plain `python` starts them itself; torchrun and srun work as well.
The same command resumes from the last checkpoint in `exp_manager.explicit_log_dir`. Keys:
conf/gpt_kto.yaml, docs/config.md.
"""

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.checks import check_config
from nemo_aligner.config.defaults import complete_config, complete_model
from nemo_aligner.launch.command_line import hydra_runner
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.launch.start_up import long_imports, share_cores


@hydra_runner(config_path="conf", config_name="gpt_kto")
@user_errors_end_the_job
def main(cfg: DictConfig) -> None:
    cfg = complete_config(cfg, "gpt_kto")
    check_config(cfg, "gpt_kto")
    share_cores(cfg.trainer.devices)
    train(cfg)


def train(cfg: DictConfig) -> None:
    # Here, not at the top: they take seconds, and --help and a wrong key need none of them.
    with long_imports():
        from nemo_aligner.algorithms.kto import KTOTrainer
        from nemo_aligner.data.nlp.builders import (
            build_dataloader,
            build_train_valid_test_kto_datasets,
        )
        from nemo_aligner.launch.experiment import (
            build_checkpoint_callback,
            load_trainer_state,
            run_timer,
            start_job,
        )
        from nemo_aligner.launch.model_loading import (
            load_and_override_model_config,
            load_from_nemo,
        )
        from nemo_aligner.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel
        from nemo_aligner.training.schedule import supervised_max_steps

    base = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = complete_model(load_and_override_model_config(base, cfg.model), "gpt_kto")
    job = start_job(cfg, "kto")

    model = load_from_nemo(MegatronGPTKTOModel, cfg.model, job.trainer, restore_path=base)
    model.init_peft(cfg.model.peft)
    model.set_reference_policy()

    data = cfg.model.data
    datasets = build_train_valid_test_kto_datasets(
        cfg=cfg.model,
        data_prefix=data.data_prefix,
        data_impl=data.data_impl,
        splits_string=data.splits_string,
        train_valid_test_num_samples=[-1, -1, -1],
        seq_length=data.seq_length,
        seed=cfg.model.seed,
        tokenizer=model.tokenizer,
    )

    def dataloader(dataset, is_train: bool):
        drop_last = is_train or data.validation_drop_last
        return build_dataloader(
            cfg,
            dataset,
            consumed_samples=0,
            mbs=cfg.model.micro_batch_size,
            gbs=cfg.model.global_batch_size,
            drop_last=drop_last,
            pad_samples_to_global_batch_size=not drop_last,
            use_random_sampler=is_train,
        )

    train_dataloader = dataloader(datasets[0], is_train=True)
    validation = datasets[1] if isinstance(datasets[1], dict) else {"validation": datasets[1]}
    optimizer, scheduler = model.setup_megatron_optimization(
        max_steps=supervised_max_steps(cfg.trainer.kto, train_dataloader)
    )
    ckpt_callback = build_checkpoint_callback(cfg, job.log_dir, model, optimizer, scheduler)
    job.logger.log_hyperparams(OmegaConf.to_container(cfg))
    kto_trainer = KTOTrainer(
        cfg=cfg.trainer.kto,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_dataloader=train_dataloader,
        val_dataloader={
            name: dataloader(dataset, is_train=False)
            for name, dataset in validation.items()
            if dataset is not None
        },
        test_dataloader=None if datasets[2] is None else dataloader(datasets[2], is_train=False),
        logger=job.logger,
        ckpt_callback=ckpt_callback,
        run_timer=run_timer(cfg),
    )
    state = load_trainer_state(cfg, ckpt_callback)
    if state is not None:
        kto_trainer.load_state_dict(state)
    kto_trainer.fit()


if __name__ == "__main__":
    main()
