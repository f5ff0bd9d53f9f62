"""``gspo launch slurm``: writes a batch script that runs the whole stack over an allocation of Slurm.

Rule: it only writes. The script needs a checkout of the project and one directory that all nodes share; everything that
must outlive the allocation is there, so that the same script, submitted again, goes on where it was ended: with the
same job, too, which it names by a key of its own.
"""

from __future__ import annotations

import shlex
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from gspo_core.cli import CommandError


@dataclass(frozen=True)
class Allocation:
    nodes: int = 1
    time: str = "24:00:00"
    partition: str | None = None
    gpus_per_node: int = 0
    rollout_workers: int = 1
    """On each node."""
    trainer_nodes: int = 1
    """The first ones."""
    trainer_ranks: int = 1
    """On each node of the trainer."""


def slurm_script(
    allocation: Allocation, *, project: str, data_dir: str, model: str, engine: str, job: str | None
) -> str:
    """``engine``: its command, with {model} and {port}; ``job``: a job file, whose end is that of everything."""
    directives = {
        "job-name": "gspo",
        "nodes": str(allocation.nodes),
        "ntasks-per-node": "1",
        "time": allocation.time,
        "partition": allocation.partition,
        "gpus-per-node": str(allocation.gpus_per_node) if allocation.gpus_per_node else None,
        # Three minutes before the end of the time, to leave in order; and again in the queue when a node is lost.
        "signal": f"B:TERM@{LEAVING_S}",
        "requeue": "",
    }
    head = [f"#SBATCH --{name}{'=' * bool(value)}{value}" for name, value in directives.items() if value is not None]
    command = engine.replace("{model}", shlex.quote(model)).replace("{port}", '"$ENGINE_PORT"')
    values = {
        "PROJECT": shlex.quote(project),
        "DATA": shlex.quote(data_dir),
        "WORKERS": str(allocation.rollout_workers),
        "TRAINER_NODES": str(allocation.trainer_nodes),
        "TRAINER_RANKS": str(allocation.trainer_ranks),
        "JOB": shlex.quote(job or ""),
        "KEY": f"slurm-{uuid.uuid4().hex}",
    }
    settings = "\n".join(f"{name}={value}" for name, value in values.items())
    return "\n".join(["#!/bin/bash", *head, settings, _BODY.replace("@ENGINE@", command)])


LEAVING_S = 180
"""More than all need that leave one after the other: workers 28 s, trainers 95, API 6, engines 35, Redis a few."""

_BODY = r"""
# Written by `gspo launch slurm`. Ports can be moved from outside: REDIS_PORT, API_PORT, ENGINE_PORT, RANKS_PORT.
set -euo pipefail
: "${REDIS_PORT:=16379}" "${API_PORT:=18000}" "${ENGINE_PORT:=30000}" "${RANKS_PORT:=29500}"
cd "$PROJECT"
PYTHON=$PROJECT/.venv/bin/python
export PYTHONPATH=$PROJECT GSPO_DATA_DIR=$DATA TOKENIZERS_PARALLELISM=false
umask 077
mkdir -p "$DATA/logs" "$DATA/redis"

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${NODES[0]}
"$PYTHON" -m services.first_secrets "$DATA/secrets" --redis "$HEAD:$REDIS_PORT"
GSPO_API_KEY=$(< "$DATA/secrets/api/gspo_api_keys")
URLS=()
for node in "${NODES[@]}"; do URLS+=("http://$node:$ENGINE_PORT"); done
GSPO_ENGINE_URLS=$(IFS=,; echo "${URLS[*]}")
export GSPO_ENGINE_URLS

PIDS=() NAMES=()
WATCHER=
# start NAME NODE COMMAND...: one process of the stack, with its output in the data directory
start() {
  local name=$1 node=$2
  shift 2
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --output="$DATA/logs/$name.log" --open-mode=append "$@" &
  PIDS+=("$!")
  NAMES+=("$name")
}

# In the reverse order of the start: each still reaches what it needs to leave well. Those of a kind leave together.
stop_all() {
  trap '' TERM INT
  local kind index
  [ -z "$WATCHER" ] || kill -TERM "$WATCHER" 2> /dev/null || true
  for kind in rollout trainer api engine redis; do
    for index in "${!PIDS[@]}"; do
      if [[ ${NAMES[index]} == "$kind"* ]]; then kill -TERM "${PIDS[index]}" 2> /dev/null || true; fi
    done
    for index in "${!PIDS[@]}"; do
      if [[ ${NAMES[index]} == "$kind"* ]]; then wait "${PIDS[index]}" 2> /dev/null || true; fi
    done
  done
}
trap 'stop_all' EXIT
trap 'echo "asked to leave"; exit 143' TERM INT

# wait_for URL: until it answers
wait_for() {
  "$PYTHON" - "$1" << 'EOF'
import sys, time, urllib.request
deadline = time.monotonic() + 2700
while True:
    try:
        urllib.request.urlopen(sys.argv[1], timeout=2)
        break
    except OSError as error:
        if time.monotonic() > deadline:
            sys.exit(f"{sys.argv[1]} does not answer: {error}")
    time.sleep(0.5)
EOF
}

SERVER=$("$PYTHON" -c 'from services.redis_server import find_binary; print(find_binary().path)')
start redis "$HEAD" "$SERVER" --port "$REDIS_PORT" --dir "$DATA/redis" --aclfile "$DATA/secrets/redis/users.acl" \
  --appendonly yes --appendfsync always --save '' --maxmemory-policy noeviction
for node in "${NODES[@]}"; do
  start "engine-$node" "$node" @ENGINE@
done
start api "$HEAD" env GSPO_SECRETS_DIR="$DATA/secrets/api" GSPO_API_HOST=0.0.0.0 GSPO_API_PORT="$API_PORT" \
  "$PYTHON" -m services.api
wait_for "http://$HEAD:$API_PORT/healthz"
for url in "${URLS[@]}"; do wait_for "$url/ready"; done
if ((TRAINER_NODES * TRAINER_RANKS == 1)); then
  start trainer "$HEAD" env GSPO_SECRETS_DIR="$DATA/secrets/trainer" "$PYTHON" -m services.trainer --grace-s 90
else
  # When a rank is lost, all are started again.
  for ((number = 0; number < TRAINER_NODES; number++)); do
    start "trainer-$number" "${NODES[number]}" env GSPO_SECRETS_DIR="$DATA/secrets/trainer" \
      "$PYTHON" -m torch.distributed.run --nnodes "$TRAINER_NODES" --node-rank "$number" \
      --nproc-per-node "$TRAINER_RANKS" --master-addr "$HEAD" --master-port "$RANKS_PORT" \
      --max-restarts 100 --shutdown-timeout 95 --module services.trainer --grace-s 90
  done
fi
for node in "${NODES[@]}"; do
  for ((number = 0; number < WORKERS; number++)); do
    start "rollout-$node-$number" "$node" env GSPO_SECRETS_DIR="$DATA/secrets/rollout" \
      "$PYTHON" -m services.rollout --drain-s 20
  done
done
echo "API: http://$HEAD:$API_PORT (key: $DATA/secrets/api/gspo_api_keys)"

# Whatever ends first decides: the job that was given, or a process of the stack, which is an error.
if [ -n "$JOB" ]; then
  export GSPO_API_KEY
  "$PROJECT/.venv/bin/gspo" submit "$JOB" --key "$KEY" --watch --url "http://$HEAD:$API_PORT" &
  WATCHER=$!
  wait -n "$WATCHER" "${PIDS[@]}" || { status=$?; echo "a process ended with $status; see $DATA/logs"; exit "$status"; }
  if kill -0 "$WATCHER" 2> /dev/null; then echo "a process of the stack ended; see $DATA/logs"; exit 1; fi
else
  wait -n "${PIDS[@]}" || true
  echo "a process of the stack ended; see $DATA/logs"
  exit 1
fi
"""

EMBEDDED = '"$PYTHON" -m services.engine --model {model} --host 0.0.0.0 --port {port}'


def write(script: str, output: str | None) -> int:
    """To a file, or to the terminal."""
    if output is None:
        sys.stdout.write(script)
        return 0
    path = Path(output)
    try:
        path.write_text(script)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
    print(f"submit it with: sbatch {path}", file=sys.stderr)
    return 0
