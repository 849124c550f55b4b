#!/bin/bash
# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
#
# SFT, a reward model and PPO on UltraFeedback. On one GPU of 80 GB, which actor and critic share:
#
#   MODEL=Llama-3.2-1B TRAIN=train_prefs.jsonl TEST=test_prefs.jsonl \
#       bash examples/recipes/ultrafeedback/run.sh
#
# On a cluster, STAGES="data sft rm" with NODES=8 DEVICES=8 LAUNCH=srun, then STAGES=ppo_slurm, which
# submits scripts/slurm/pair.sbatch. The same command again resumes. STAGES names what to run;
# SFT_ARGS, RM_ARGS, CRITIC_ARGS and ACTOR_ARGS are further overrides, separated by spaces.
set -euo pipefail
EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

MODEL=${MODEL:?set MODEL to the Hugging Face folder of the base model}
OUT=${OUT:-results/ultrafeedback}
STAGES=${STAGES:-data sft rm ppo}
DEVICES=${DEVICES:-1} NODES=${NODES:-1}
LAUNCH=${LAUNCH:-}            # srun on a cluster
PORT=${PORT:-5556}
PYTHON=${PYTHON:-python}
ACCELERATOR=${ACCELERATOR:-gpu}
SFT=$OUT/sft/checkpoints/megatron_gpt_sft-hf
RM=$OUT/rm/checkpoints/megatron_gpt-hf
COMMON="trainer.devices=$DEVICES trainer.num_nodes=$NODES trainer.accelerator=$ACCELERATOR \
    model.encoder_seq_length=2048"

# Of the last stage, on one machine and under SLURM.
CRITIC="model.encoder_seq_length=2048 model.global_batch_size=64 model.optim.lr=9e-6 \
    trainer.ppo.max_steps=2000"
ACTOR="model.encoder_seq_length=2048 model.global_batch_size=64 model.save_hf=True \
    trainer.ppo.initial_policy_kl_penalty=0.02 trainer.ppo.run_init_validation=True \
    trainer.ppo.max_epochs=1 trainer.ppo.max_steps=500 \
    trainer.ppo.val_check_interval=25 trainer.ppo.save_interval=25 \
    model.ppo.num_rollout_samples=256 model.ppo.num_val_samples=128 \
    model.ppo.length_params.max_length=512 model.optim.lr=1e-6 model.optim.sched.warmup_steps=10"

files() { echo "{train: [$OUT/data/$1_train.jsonl], validation: [$OUT/data/$1_validation.jsonl], \
test: [$OUT/data/$1_validation.jsonl]}"; }

for stage in $STAGES; do case $stage in
data)
    $PYTHON "$EXAMPLES/recipes/ultrafeedback/prepare.py" "$MODEL" \
        "${TRAIN:?set TRAIN to a jsonl file}" "${TEST:?set TEST to a jsonl file}" "$OUT/data" ;;
sft)
    $LAUNCH $PYTHON "$EXAMPLES/nlp/gpt/train_gpt_sft.py" $COMMON \
        model.restore_from_path="$MODEL" model.save_hf=True \
        model.data.train_ds.file_path="$OUT/data/sft_train.jsonl" \
        model.data.validation_ds.file_path="$OUT/data/sft_validation.jsonl" \
        model.data.train_ds.max_seq_length=2048 model.data.validation_ds.max_seq_length=2048 \
        "model.data.train_ds.prompt_template='{input}{output}'" \
        "model.data.validation_ds.prompt_template='{input}{output}'" \
        model.data.train_ds.truncation_method=left model.data.validation_ds.truncation_method=left \
        model.data.train_ds.global_batch_size=128 model.data.train_ds.micro_batch_size=4 \
        trainer.sft.max_epochs=1 trainer.sft.val_check_interval=100 \
        model.optim.lr=2e-5 model.optim.sched.warmup_steps=20 model.optim.sched.constant_steps=0 \
        exp_manager.explicit_log_dir="$OUT/sft" ${SFT_ARGS:-} ;;
rm)
    $LAUNCH $PYTHON "$EXAMPLES/nlp/gpt/train_reward_model.py" $COMMON \
        pretrained_checkpoint.restore_from_path="$SFT" model.save_hf=True \
        "model.data.data_prefix=$(files pairs)" model.data.append_eod=True \
        model.global_batch_size=64 model.micro_batch_size=2 \
        trainer.rm.max_epochs=1 trainer.rm.val_check_interval=100 trainer.rm.save_interval=100 \
        model.optim.lr=1e-5 model.optim.sched.warmup_steps=20 model.optim.sched.constant_steps=0 \
        exp_manager.explicit_log_dir="$OUT/rm" ${RM_ARGS:-} ;;
ppo)
    mkdir -p "$OUT"
    $PYTHON "$EXAMPLES/nlp/gpt/serve_ppo_critic.py" $COMMON \
        pretrained_checkpoint.restore_from_path="$RM" \
        trainer.ppo.host=127.0.0.1 trainer.ppo.port="$PORT" $CRITIC \
        trainer.ppo.inference_micro_batch_size=16 model.micro_batch_size=4 \
        exp_manager.explicit_log_dir="$OUT/critic" ${CRITIC_ARGS:-} > "$OUT/critic.log" 2>&1 &
    critic=$!
    trap 'kill $critic 2>/dev/null; wait $critic 2>/dev/null || true' EXIT
    $PYTHON "$EXAMPLES/nlp/gpt/train_gpt_ppo_actor.py" $COMMON \
        pretrained_checkpoint.restore_from_path="$SFT" \
        "model.data.data_prefix=$(files prompts)" $ACTOR \
        model.ppo.rollout_micro_batch_size=32 model.ppo.val_rollout_micro_batch_size=32 \
        model.micro_batch_size=4 model.ppo.forward_micro_batch_size=8 \
        remote_critic_rm.critic.ip=127.0.0.1 remote_critic_rm.critic.port="$PORT" \
        exp_manager.explicit_log_dir="$OUT/actor" ${ACTOR_ARGS:-}
    $PYTHON -m nemo_aligner.report "$OUT" ;;
ppo_slurm)
    # Each of the 16 ranks of the actor validates 8 samples.
    export RESULTS=$OUT REPO=${REPO:-$EXAMPLES/..}  # a checkout
    sbatch "$REPO/scripts/slurm/pair.sbatch" \
        critic pretrained_checkpoint.restore_from_path="$RM" $CRITIC \
        trainer.ppo.inference_micro_batch_size=4 model.micro_batch_size=1 ${CRITIC_ARGS:-} \
        -- ppo pretrained_checkpoint.restore_from_path="$SFT" \
        "model.data.data_prefix=$(files prompts)" $ACTOR model.micro_batch_size=1 \
        model.ppo.rollout_micro_batch_size=8 model.ppo.val_rollout_micro_batch_size=8 \
        ${ACTOR_ARGS:-} ;;
*)
    echo "error: STAGES names $stage; use data, sft, rm, ppo, ppo_slurm" >&2; exit 1 ;;
esac; done
