#!/usr/bin/env bash
# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
#
# Runs a server and its actor on this machine, and starts again whichever of them is lost:
#
#   scripts/launch_local.sh SERVER_SCRIPT KEY=VALUE ... -- ACTOR_SCRIPT KEY=VALUE ...
#
# for example
#
#   scripts/launch_local.sh examples/nlp/gpt/serve_ppo_critic.py trainer.devices=2 ... \
#     -- examples/nlp/gpt/train_gpt_ppo_actor.py trainer.devices=2 ...
#
# A job that was killed, has lost its peer or failed (any exit code but 0, 2, 75 and 76; see
# docs/troubleshooting.md) starts again with the same command, and resumes from the last
# checkpoint of both. When the actor has finished, or ends for another reason, the server is asked to end. The
# exit code is that of the actor, or 2 if the server ended with that. SIGTERM, SIGUSR1 and Ctrl-C
# ask the actor to save and end.
#
#   PYTHON         interpreter (python)
#   MAX_RESTARTS   of each of the two jobs (10)
set -u

python=${PYTHON:-python}
max_restarts=${MAX_RESTARTS:-10}
server=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do server+=("$1"); shift; done
if [ $# -lt 2 ] || [ ${#server[@]} -eq 0 ]; then
  sed -n '5,22s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
shift
actor=("$@")

say() { echo "launch_local.sh: $*" >&2; }

# The exit code of a child, also when a signal to this script has interrupted the wait for it.
code_of() {
  while kill -0 "$1" 2>/dev/null; do wait "$1"; done
  wait "$1"
}

# Run the job NAME with its command until it ends for good; SIGTERM goes to the job.
keep_running() {
  local name=$1 restarts=0 code asked= job=
  shift
  trap 'asked=1; [ -z "$job" ] || kill -TERM "$job" 2>/dev/null' TERM
  while :; do
    "$python" "$@" &
    job=$!
    [ -z "$asked" ] || kill -TERM "$job"
    code_of "$job"
    code=$?
    job=
    case $code in 0 | 2 | 75 | 76) exit "$code" ;; esac
    [ -z "$asked" ] || exit "$code"
    if [ "$restarts" -ge "$max_restarts" ]; then
      say "the $name ended with exit code $code, after $restarts restarts (MAX_RESTARTS)"
      exit "$code"
    fi
    restarts=$((restarts + 1))
    say "the $name ended with exit code $code; restart $restarts of $max_restarts"
  done
}

asked= actor_pid=
trap 'asked=1; [ -z "$actor_pid" ] || kill -TERM "$actor_pid" 2>/dev/null' TERM USR1 INT
keep_running server "${server[@]}" &
server_pid=$!
keep_running actor "${actor[@]}" &
actor_pid=$!
[ -z "$asked" ] || kill -TERM "$actor_pid" 2>/dev/null

# Without its server the actor would wait for a long time.
while kill -0 "$actor_pid" 2>/dev/null; do
  if ! kill -0 "$server_pid" 2>/dev/null; then
    kill -TERM "$actor_pid" 2>/dev/null
    break
  fi
  sleep 0.5
done
code_of "$actor_pid"
code=$?
kill -TERM "$server_pid" 2>/dev/null
code_of "$server_pid"
server_code=$?
[ "$server_code" -ne 2 ] || code=2
exit "$code"
