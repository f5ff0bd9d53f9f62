#!/usr/bin/env bash
# with_compose.sh PROJECT URL COMMAND: builds and starts the stack of PROJECT, waits for URL, runs COMMAND there, and
# removes everything again. Its status is that of COMMAND.
set -euo pipefail
cd "$1"
trap 'docker compose down --volumes --timeout 10' EXIT
docker compose build
docker compose up --detach --wait --wait-timeout 600
python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10)' "$2"
bash -c "$3"
