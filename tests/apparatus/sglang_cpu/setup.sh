#!/usr/bin/env bash
# A virtual environment of its own in which the real SGLang server runs on a CPU, from pip packages (about 3 GB).
# usage: setup.sh VENV [where a CPU build of torch comes from: an index or a folder of wheels]
# It is the real server with attention in plain torch: it says nothing about GPU kernels, CUDA graphs or LoRA.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
from=()
if [ -n "${2:-}" ]; then
  if [ -d "$2" ]; then from=(--find-links "$2"); else from=(--extra-index-url "$2"); fi
fi
test -x "$venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$venv"
pip=("$venv/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" "${from[@]}" -c "$here/constraints.txt" -r "$here/requirements.txt"
# These two ask for the GPU build of torch; what they need of the rest is in the list above.
"${pip[@]}" --no-deps -c "$here/constraints.txt" sglang torchvision
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$packages/sgl_kernel"
cp "$here/sgl_kernel.py" "$packages/sgl_kernel/__init__.py"
"$venv/bin/python" "$here/mend_torchvision.py" "$packages"
