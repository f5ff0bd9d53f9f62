"""``gspo launch slurm``: writes a batch script that runs the stack on a Slurm allocation.

Rule: it only writes. The script needs a checkout of the project and a directory that all nodes share. It keeps there
everything that must outlive the allocation, so resubmitting the script resumes where it ended. It submits its job
under its own idempotency key, so the job resumes too.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import uuid
from dataclasses import dataclass

from gspo_core.cli.command import CommandError
from services.launch import topology
from services.launch.launch import write
from services.launch.topology import Process, Site

HELP = "write a batch script that runs the stack over an allocation"
# Extra shutdown time for the shell and srun.
SLACK_S = 10
PYTHON = '"$PYTHON"'


@dataclass(frozen=True)
class Allocation:
    nodes: int = 1
    time: str = "24:00:00"
    partition: str | None = None
    gpus_per_node: int = 0
    rollout_workers: int = 1
    """Workers per node."""
    trainer_nodes: int = 1
    """The trainer runs on the first this many nodes."""
    trainer_ranks: int = 1
    """Ranks per trainer node."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--project", default=".", help="checkout of the project, with its .venv (default: here)")
    parser.add_argument("--data-dir", required=True, help="directory that all nodes share")
    parser.add_argument("--model", required=True, help="model that the engines start with, on every node")
    parser.add_argument("--engine", help="engine command, with {model} and {port} (default: the embedded engine)")
    parser.add_argument("--job", metavar="FILE", help="submit this job; the allocation ends with it")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--time", default="24:00:00")
    parser.add_argument("--partition")
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--rollout-workers", type=int, default=1, help="rollout workers per node (default: 1)")
    parser.add_argument("--trainer-nodes", type=int, default=1, help="nodes that train together (default: one)")
    parser.add_argument("--trainer-ranks", type=int, default=1, help="trainer ranks per trainer node (default: 1)")
    parser.add_argument("--output", metavar="FILE", help="where to write the script (default: the terminal)")


def run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.trainer_nodes <= arguments.nodes or arguments.trainer_ranks < 1:
        raise CommandError(
            f"a trainer needs at least one rank on at least one of the {arguments.nodes} nodes of the allocation; "
            f"not --trainer-nodes {arguments.trainer_nodes} --trainer-ranks {arguments.trainer_ranks}"
        )
    allocation = Allocation(
        nodes=arguments.nodes,
        time=arguments.time,
        partition=arguments.partition,
        gpus_per_node=arguments.gpus_per_node,
        rollout_workers=arguments.rollout_workers,
        trainer_nodes=arguments.trainer_nodes,
        trainer_ranks=arguments.trainer_ranks,
    )
    script = slurm_script(
        allocation,
        project=os.path.abspath(arguments.project),
        data_dir=os.path.abspath(arguments.data_dir),
        model=arguments.model,
        engine=arguments.engine,
        job=os.path.abspath(arguments.job) if arguments.job else None,
    )
    if write(script, arguments.output):
        print(f"submit it with: sbatch {arguments.output}", file=sys.stderr)
    return 0


def slurm_script(
    allocation: Allocation, *, project: str, data_dir: str, model: str, engine: str | None, job: str | None
) -> str:
    """``engine``: its command, with {model} and {port}; ``job``: a job file; when the job ends, the stack stops."""
    values = {
        "PROJECT": shlex.quote(project),
        "DATA": shlex.quote(data_dir),
        "WORKERS": str(allocation.rollout_workers),
        "TRAINER_NODES": str(allocation.trainer_nodes),
        "TRAINER_RANKS": str(allocation.trainer_ranks),
        "JOB": shlex.quote(job or ""),
        "KEY": f"slurm-{uuid.uuid4().hex}",
    }
    processes = topology.processes(Site.BATCH)
    resident = [one for one in processes if one.health is not None]
    return "\n".join(
        [
            "#!/bin/bash",
            *_directives(allocation),
            *(f"{name}={value}" for name, value in values.items()),
            _HEAD.replace("@SECRETS@", _secrets()),
            _FUNCTIONS.replace("@LEAVE@", " ".join(one.name for one in reversed(resident))),
            *(_START[one.name](one, model, engine) for one in resident),
            _TAIL,
        ]
    )


def _directives(allocation: Allocation) -> list[str]:
    directives = {
        "job-name": "gspo",
        "nodes": str(allocation.nodes),
        "ntasks-per-node": "1",
        "time": allocation.time,
        "partition": allocation.partition,
        "gpus-per-node": str(allocation.gpus_per_node) if allocation.gpus_per_node else None,
        # Signal before the time limit for a clean shutdown; requeue when a node is lost.
        "signal": f"B:TERM@{topology.leaving_s(Site.BATCH) + SLACK_S}",
        "requeue": "",
    }
    return [f"#SBATCH --{name}{'=' * bool(value)}{value}" for name, value in directives.items() if value is not None]


def _command(process: Process, **values: str) -> str:
    """Build a shell command; ``values`` and the Python path are shell fragments, left unquoted."""
    words = process.command(PYTHON, Site.BATCH, values)
    raw = {PYTHON, *values.values()}
    return " ".join(word if word in raw else shlex.quote(word) for word in words)


def _started(process: Process, name: str, node: str, command: str, **settings: str) -> str:
    """Build a shell line; ``settings`` maps fields of Settings to shell fragments."""
    if process.has_secrets:
        settings = {"secrets_dir": f'"$DATA/secrets/{process.name}"', **settings}
    given = [f"{name}={value}" for name, value in process.settings(settings).items()]
    return " ".join([f'start "{name}" "{node}"', *(["env", *given] if given else []), command])


def _secrets() -> str:
    return _command(topology.SECRETS, secrets_dir='"$DATA/secrets"')


def _redis(process: Process, model: str, engine: str | None) -> str:
    where = '--port "$REDIS_PORT" --dir "$DATA/redis" --aclfile "$DATA/secrets/redis/users.acl"'
    return (
        """SERVER=$("$PYTHON" -c 'from services.state.server import find_binary; print(find_binary().path)')\n"""
        + _started(process, process.name, "$HEAD", f'"$SERVER" {where} {_command(process)}')
    )


def _engines(process: Process, model: str, engine: str | None) -> str:
    if engine is None:
        port = '"$ENGINE_PORT"'
        command = _command(process, model=shlex.quote(model), host="0.0.0.0", port=port, threads="1")  # noqa: S104
    else:
        command = engine.replace("{model}", shlex.quote(model)).replace("{port}", '"$ENGINE_PORT"')
    return _on_every_node(_started(process, f"{process.name}-$node", "$node", command))


def _api(process: Process, model: str, engine: str | None) -> str:
    bound = {"api_host": "0.0.0.0", "api_port": '"$API_PORT"'}  # noqa: S104
    return "\n".join(
        [
            _started(process, process.name, "$HEAD", _command(process), **bound),
            f'wait_for "http://$HEAD:$API_PORT{topology.API_HEALTH.live}"',
            f'for url in "${{URLS[@]}}"; do wait_for "$url{topology.ENGINE_HEALTH.ready}"; done',
        ]
    )


def _trainer(process: Process, model: str, engine: str | None) -> str:
    assert process.module is not None
    arguments = " ".join(process.leaving.arguments(Site.BATCH))
    torchrun = (
        f'{PYTHON} -m torch.distributed.run --nnodes "$TRAINER_NODES" --node-rank "$number" '
        '--nproc-per-node "$TRAINER_RANKS" --master-addr "$HEAD" --master-port "$RANKS_PORT" '
        f"--max-restarts 100 --shutdown-timeout {process.leaving.most_s(Site.BATCH)} "
        f"--module {process.module} {arguments}"
    )
    return "\n".join(
        [
            "if ((TRAINER_NODES * TRAINER_RANKS == 1)); then",
            f"  {_started(process, process.name, '$HEAD', _command(process))}",
            "else",
            "  # When a rank is lost, all are started again.",
            "  for ((number = 0; number < TRAINER_NODES; number++)); do",
            f"    {_started(process, f'{process.name}-$number', '${NODES[number]}', torchrun)}",
            "  done",
            "fi",
        ]
    )


def _rollout(process: Process, model: str, engine: str | None) -> str:
    one = _started(process, f"{process.name}-$node-$number", "$node", _command(process))
    return _on_every_node(f"for ((number = 0; number < WORKERS; number++)); do\n    {one}\n  done")


def _gateway(process: Process, model: str, engine: str | None) -> str:
    bound = {"gateway_bind": '"0.0.0.0:$GATEWAY_PORT"', "gateway_url": '"http://$HEAD:$GATEWAY_PORT"'}
    return _started(process, process.name, "$HEAD", _command(process), **bound)


def _on_every_node(command: str) -> str:
    return f'for node in "${{NODES[@]}}"; do\n  {command}\ndone'


# Placement of each kind of process in an allocation.
_START = {
    "redis": _redis,
    "engine": _engines,
    "api": _api,
    "trainer": _trainer,
    "rollout": _rollout,
    "gateway": _gateway,
}

_HEAD = r"""
# Written by `gspo launch slurm`. Ports can be moved from outside: they are the five that follow.
set -euo pipefail
: "${REDIS_PORT:=16379}" "${API_PORT:=18000}" "${GATEWAY_PORT:=18020}" "${ENGINE_PORT:=30000}" "${RANKS_PORT:=29500}"
cd "$PROJECT"
PYTHON=$PROJECT/.venv/bin/python
export PYTHONPATH=$PROJECT GSPO_DATA_DIR=$DATA TOKENIZERS_PARALLELISM=false
umask 077
mkdir -p "$DATA/logs" "$DATA/redis"

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${NODES[0]}
@SECRETS@ --redis "$HEAD:$REDIS_PORT"
GSPO_API_KEY=$(< "$DATA/secrets/api/gspo_api_keys")
URLS=()
for node in "${NODES[@]}"; do URLS+=("http://$node:$ENGINE_PORT"); done
GSPO_ENGINE_URLS=$(IFS=,; echo "${URLS[*]}")
export GSPO_ENGINE_URLS
"""

_FUNCTIONS = r"""
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
  for kind in @LEAVE@; do
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
"""

_TAIL = r"""echo "API: http://$HEAD:$API_PORT (key: $DATA/secrets/api/gspo_api_keys)"

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
