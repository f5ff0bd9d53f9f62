#!/usr/bin/env bash
# with_cluster.sh DIRECTORY COMMAND: a cluster of one node in DIRECTORY, with the images of this project, while COMMAND runs; then all of
# it is stopped and taken away, whatever happened. What was built stays, so that the next call takes a minute, and a call that was cut
# short goes on where it was. DIRECTORY/stages says how long each part took. Its status is that of COMMAND. Needs root and Debian 12.
set -euo pipefail
here=$(realpath "$(dirname "$0")/../apparatus/k8s")
mkdir -p "$1"
directory=$(realpath "$1")

stage() {  # stage WHAT COMMAND...
  local what=$1 began=$SECONDS
  shift
  "$@"
  printf '%s\t%s s\t%s\n' "$what" $((SECONDS - began)) "$(cut -d ' ' -f 1 /proc/loadavg)" | tee --append "$directory/stages"
}

images() {
  "$here/docker.sh" "$directory" up
  "$here/docker.sh" "$directory" images
}

leave() {
  local status=$?
  set +e
  # A process group of its own, since the compiler's children do not hear of their parent's end.
  [ -z "${builder:-}" ] || kill -- "-$builder" 2> /dev/null
  "$here/cluster.sh" "$directory" down
  "$here/docker.sh" "$directory" down
  exit "$status"
}

trap leave EXIT
: > "$directory/stages"
# The one waits for the processor and the other for packages.
set -m
stage "Kubernetes is built" "$here/get_kubernetes.sh" "$directory" &
builder=$!
set +m
stage "the images are built" images
wait "$builder"
builder=
"$here/cluster.sh" "$directory" down  # of a run that was killed
stage "the node is ready and resolves names" "$here/cluster.sh" "$directory" up
export KUBECONFIG=$directory/run/kubeconfig
bash -c "$2"
