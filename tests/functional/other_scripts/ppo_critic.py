# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A critic server as NeMo-Aligner's script; for test_other_scripts.py."""

from functools import partial

import steps
from nemo.core.config import hydra_runner

from nemo_aligner.algorithms.critic_server_trainer import CriticServerTrainer
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.utils import text_generation_utils, utils


@hydra_runner(config_path="../../../conf", config_name="gpt_ppo_critic")
def main(cfg) -> None:
    lightning, logger, critic = steps.begin(cfg, "ppo", MegatronGPTCriticModel)
    utils.set_autocast_gpu_dtype(cfg.trainer.precision)
    if cfg.trainer.ppo.combine_rm_and_critic_server:
        critic.rm_state_dict_cpu = utils.copy_model_states_to_cpu(
            critic, cpu_dict=None, megatron_amp_O2=cfg.model.get("megatron_amp_O2"), sync=True
        )
    state = steps.saved_state(lightning, critic)
    server = CriticServerTrainer(
        cfg=cfg.trainer.ppo,
        tokenize_func=partial(
            text_generation_utils.tokenize_batch,
            tokenizer=critic.tokenizer,
            max_len=critic.cfg.encoder_seq_length,
            add_BOS=False,
            add_EOS=False,
        ),
        gbs=cfg.model.global_batch_size,
        model_forward_micro_batch_size=cfg.model.forward_micro_batch_size,
        **steps.prepare(cfg, lightning, logger, critic),
    )
    if state is not None:
        server.load_state_dict(state)
    server.run_server()


if __name__ == "__main__":
    main()
