# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
#
# What job.sbatch and pair.sbatch run, each part on a set of nodes of its own:
#
#   [SERVER KEY=VALUE ... --] ... JOB KEY=VALUE ...
#
# SERVER is critic, reward or teacher; of the last two each node runs one, and one that dies is left
# out. JOB is what `nemo-aligner train` takes, or logits. Nodes, devices, ports, the servers'
# addresses and the folders are set here; KEY=VALUE wins.
#
# Submit it again to resume from the last checkpoints. That happens by itself up to MAX_REQUEUES
# times: ten minutes before the time limit SLURM sends SIGUSR1, and at a pre-emption too if it is
# configured so (PreemptParameters=send_user_signal). The job then saves, with its critic, and
# leaves with an exit code that says so (docs/troubleshooting.md).

set -euo pipefail

# A checkout of this repository, on a file system that all nodes see.
REPO=${REPO:-$SLURM_SUBMIT_DIR}
# Inside a container: python.
PYTHON=${PYTHON:-$REPO/.venv/bin/python}
# For example: --container-image=... --container-mounts=...
CONTAINER_ARGS=${CONTAINER_ARGS:-}
# Of a node.
DEVICES=${DEVICES:-8}
# Of the first set of nodes; the others take the numbers that follow.
PORT=${PORT:-5556}
MASTER_PORT=${MASTER_PORT:-29500}
# How often the job starts again by itself.
MAX_REQUEUES=${MAX_REQUEUES:-10}

[[ $# -gt 0 && ${*: -1} != -- ]] || { echo "error: name a job, as roles.sh says" >&2; exit 2; }
job=$1
roles=" $job "
for word in "$@"; do
    [[ ${before:-} != -- ]] || { job=$word; roles+="$word "; }
    before=$word
done
# With rewards from servers of their own, the critic gives none.
[[ $job != ppo || $roles != *" reward "* ]] || alone=combine_rm_and_critic_server=False
RESULTS=${RESULTS:-$SLURM_SUBMIT_DIR/results/$job}

# Servers take requests from other machines, and only those that bring this token. It is not
# encrypted on its way: use a network that you trust.
new_token=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export NEMO_ALIGNER_TOKEN=${NEMO_ALIGNER_TOKEN:-$new_token}

group=0 hosts=() pids=() critic='' addresses=()

# start FOLDER HOST NODES TASKS COMMAND KEY=VALUE ...: a distributed job with its own rendezvous.
start() {
    local folder=$1 host=$2 nodes=$3 tasks=$4 command=$5 set=()
    shift 5
    mkdir -p "$folder"
    [[ ! -v SLURM_JOB_NODELIST_HET_GROUP_0 ]] || set=(--het-group="$group")
    [[ $nodes -gt 1 ]] || set+=(--nodelist="$host")
    MASTER_ADDR=$host MASTER_PORT=$((MASTER_PORT + group)) \
    srun "${set[@]}" --nodes="$nodes" --ntasks=$((nodes * tasks)) \
        --output="$folder/slurm_${host}_%t.log" $CONTAINER_ARGS \
        "$PYTHON" -u -m nemo_aligner $command \
        trainer.num_nodes="$nodes" trainer.devices="$tasks" "$@" &
    pids+=($!)
}

# serve KIND KEY=VALUE ...: on the nodes of the group; notes how the job reaches it.
serve() {
    local kind=$1 port=$((PORT + group)) tasks=$DEVICES host list
    shift
    list="[$(IFS=,; echo "${hosts[*]}")]"
    case $kind in
    critic)
        start "$RESULTS/critic" "${hosts[0]}" ${#hosts[@]} "$tasks" "serve critic" \
            trainer.ppo.host=0.0.0.0 trainer.ppo.port="$port" \
            ${alone:+trainer.ppo.$alone} exp_manager.explicit_log_dir="$RESULTS/critic" "$@"
        critic=${pids[-1]}
        addresses+=(remote_critic_rm.critic.ip="${hosts[0]}" remote_critic_rm.critic.port="$port")
        return ;;
    reward)
        [[ $job == ppo ]] && key=remote_critic_rm || key=remote_rm
        addresses+=("$key.reward_model.ip=$list" "$key.reward_model.port=$port")
        addresses+=(${alone:+remote_critic_rm.$alone}) ;;
    teacher)
        addresses+=("remote_teacher.host=$list" remote_teacher.port="$port") ;;
    *)
        echo "error: $kind is no server; use critic, reward or teacher" >&2; exit 2 ;;
    esac
    [[ " $*" != *" inference.reward_fn="* ]] || tasks=1  # a function is served by one process
    for host in "${hosts[@]}"; do
        start "$RESULTS/$kind" "$host" 1 "$tasks" "serve $kind" \
            inference.host=0.0.0.0 inference.port="$port" "$@"
    done
}

while :; do
    words=()
    while [[ $# -gt 0 && $1 != -- ]]; do words+=("$1"); shift; done
    nodes=SLURM_JOB_NODELIST_HET_GROUP_$group
    [[ $group -gt 0 || -v $nodes ]] || nodes=SLURM_JOB_NODELIST
    nodes=${!nodes:?there is no set of nodes for ${words[*]:0:1}}
    mapfile -t hosts < <(scontrol show hostnames "$nodes")
    [[ $# -gt 0 ]] || break
    shift
    serve "${words[@]}"
    group=$((group + 1))
done

# The job waits for its servers up to init_timeout_s of the section with their addresses.
if [[ $job == logits ]]; then
    start "$RESULTS" "${hosts[0]}" ${#hosts[@]} "$DEVICES" logits "${words[@]:1}"
else
    [[ $group == 0 ]] && folder=$RESULTS || folder=$RESULTS/actor
    start "$folder" "${hosts[0]}" ${#hosts[@]} "$DEVICES" "train $job" "${addresses[@]}" \
        exp_manager.explicit_log_dir="$folder" "${words[@]:1}"
fi

# A critic without an actor would hold its nodes until the time limit, and an actor waits for one.
wait -n "${pids[-1]}" $critic && status=0 || status=$?
kill -TERM "${pids[@]}" 2>/dev/null || true
wait || true
# The time was over, the job was pre-empted, or it lost a process that it needs; 137: a rank was
# killed, by the kernel for memory or because it hung.
if [[ $status =~ ^(75|76|77|137)$ && ${SLURM_RESTART_COUNT:-0} -lt $MAX_REQUEUES ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
