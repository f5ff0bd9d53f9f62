#!/bin/bash
# Probes of the images: `probe.sh http PORT PATH` and `probe.sh file FILE [--ready]`, with nothing but bash, which starts in
# milliseconds where an interpreter of Python takes seconds on a busy machine. The second is services/process/health.py.
set -euo pipefail
STALE_S=30

http() {
  local status
  exec 3<> "/dev/tcp/127.0.0.1/$1"
  printf 'GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' "$2" >&3
  read -r -t 4 _ status _ <&3
  [ "$status" = 200 ] || { echo "$2 answers $status" >&2; exit 1; }
}

# The field NAME of the flat JSON object $said.
field() { [[ $said =~ \"$1\":\ ?\"?([a-z0-9.]+) ]] && echo "${BASH_REMATCH[1]}"; }

file() {
  local at pid born ready stat now age
  read -r said < "$1" || [ -n "$said" ]
  at=$(field at) pid=$(field pid) born=$(field born) ready=$(field ready)
  # What follows the name of the program; the 20th is when it was started.
  read -r stat < "/proc/$pid/stat" || { echo "process $pid, which wrote $1, is gone" >&2; exit 1; }
  read -r -a stat <<< "${stat##*)}"
  [ "${stat[19]}" = "$born" ] || { echo "process $pid, which wrote $1, is gone" >&2; exit 1; }
  read -r now _ < /proc/uptime
  age=$((${now%.*} - ${at%.*}))
  ((age >= -1)) || { echo "$1 was written $((-age)) s ahead of this clock" >&2; exit 1; }
  ((age <= STALE_S)) || { echo "the event loop is stuck" >&2; exit 1; }
  [ "${2:-}" != --ready ] || [ "$ready" = true ] || { echo "not ready" >&2; exit 1; }
}

"$@"
