#!/bin/bash
# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
#
# GRPO on GSM8K with a reward in Python. On one GPU:
#
#   MODEL=Qwen2.5-0.5B-Instruct GSM8K=grade_school_math/data bash examples/recipes/gsm8k/run.sh
#
# On 8 nodes of 8 GPUs, inside an allocation of SLURM:
#
#   NODES=8 DEVICES=8 LAUNCH=srun MODEL=... GSM8K=... bash examples/recipes/gsm8k/run.sh
#
# The same command again resumes. Arguments are overrides of the actor's configuration.
set -euo pipefail
EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

MODEL=${MODEL:?set MODEL to the Hugging Face folder of the policy}
GSM8K=${GSM8K:?set GSM8K to the folder with train.jsonl and test.jsonl}
OUT=${OUT:-results/gsm8k}
DEVICES=${DEVICES:-1} NODES=${NODES:-1}
LAUNCH=${LAUNCH:-}            # srun on a cluster
PYTHON=${PYTHON:-python}
ACCELERATOR=${ACCELERATOR:-gpu}

$PYTHON "$EXAMPLES/recipes/gsm8k/prepare.py" "$MODEL" "$GSM8K" "$OUT/data"

# A step: 64 questions, 8 responses each, 4 updates.
$LAUNCH $PYTHON "$EXAMPLES/nlp/gpt/train_gpt_ppo_actor.py" \
    trainer.devices="$DEVICES" trainer.num_nodes="$NODES" trainer.accelerator="$ACCELERATOR" \
    pretrained_checkpoint.restore_from_path="$MODEL" model.save_hf=True \
    "model.data.data_prefix={train: [$OUT/data/train.jsonl], \
validation: [$OUT/data/test.jsonl], test: [$OUT/data/test.jsonl]}" \
    model.encoder_seq_length=1024 \
    trainer.ppo.advantage_estimator=grpo model.ppo.num_rollouts_per_prompt=8 \
    trainer.ppo.initial_policy_kl_penalty=0 model.ppo.kl_loss_coef=0.001 \
    model.ppo.loss_reduction=sequence \
    trainer.ppo.max_epochs=4 trainer.ppo.max_steps=400 trainer.ppo.val_check_interval=20 \
    trainer.ppo.save_interval=20 trainer.ppo.run_init_validation=True \
    model.ppo.num_rollout_samples=64 model.ppo.rollout_micro_batch_size=64 \
    model.ppo.num_val_samples=256 model.ppo.val_rollout_micro_batch_size=64 \
    model.ppo.length_params.max_length=512 model.ppo.sampling_params.temperature=1.0 \
    model.global_batch_size=128 model.micro_batch_size=4 model.ppo.forward_micro_batch_size=8 \
    model.optim.lr=1e-6 model.optim.sched.warmup_steps=10 \
    trainer.ppo.reward_fn="$EXAMPLES/recipes/gsm8k/reward.py:right_number" \
    exp_manager.explicit_log_dir="$OUT/actor" "$@"

$PYTHON -m nemo_aligner.report "$OUT"
