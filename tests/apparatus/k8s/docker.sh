#!/usr/bin/env bash
# docker.sh DIRECTORY up|images|down: a Docker of its own below DIRECTORY, made of Debian's packages, and images without a registry.
# `images` makes what stands for python:3.11-slim and redis:7-alpine (Debian 12's Python 3.11 and Redis 7) and builds the project's
# images from it, with torch from TORCH_WHEELS. Needs root and Debian 12. Whatever is there already is not made again.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
mkdir -p "$1" && cd "$1"
directory=$PWD
export DOCKER_HOST=unix://$directory/docker.sock DOCKER_CONFIG=$directory/config
export PATH=$directory/root/usr/bin:$directory/root/usr/sbin:$PATH DEBIAN_FRONTEND=noninteractive

get() {
  if ! command -v mmdebstrap runc iptables > /dev/null; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends runc iptables mmdebstrap > apt.log 2>&1
  fi
  [ ! -x root/usr/sbin/dockerd ] || return 0
  # dockerd of Debian 13, unpacked: the one of Debian 12 builds no images with named contexts.
  mkdir -p apt/{lists,cache/archives}/partial docker-debs root
  # shellcheck disable=SC2016  # apt's own variable
  site=$(apt-get indextargets --format '$(SITE)' | head -n 1)
  printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s trixie main\n' "$site" > apt/sources.list
  apt=(apt-get -qq -o Dir::Etc::sourcelist="$directory/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::lists="$directory/apt/lists" -o Dir::Cache="$directory/apt/cache" -o APT::Sandbox::User=root)
  "${apt[@]}" update
  (cd docker-debs && "${apt[@]}" download {docker-compose,docker-buildx,docker.io,containerd,docker-cli}/trixie)
  for deb in docker-debs/*.deb; do dpkg-deb --extract "$deb" root; done
}

up() {
  get
  mkdir -p config/cli-plugins
  ln -sf "$directory"/root/usr/libexec/docker/cli-plugins/* config/cli-plugins/
  if docker info > /dev/null 2>&1; then return 0; fi
  [ -e network.before ] || (sysctl net.ipv4.ip_forward; iptables-save) > network.before
  setsid dockerd --data-root "$directory/data" --exec-root "$directory/exec" --pidfile "$directory/dockerd.pid" \
    --host "$DOCKER_HOST" --group root --mtu 1400 --storage-driver overlay2 > dockerd.log 2>&1 &
  for _ in $(seq 120); do
    if docker info > /dev/null 2>&1; then return 0; fi
    sleep 0.5
  done
  tail -20 dockerd.log >&2
  exit 1
}

# image NAME PACKAGES LINES...: an image of Debian 12 with these packages.
image() {
  local name=$1 packages=$2
  shift 2
  if docker image inspect "$name" > /dev/null 2>&1; then return 0; fi
  rm -rf base && mkdir base
  mmdebstrap --quiet --variant=minbase --include="$packages" bookworm base/rootfs.tar
  cp /etc/ssl/certs/ca-certificates.crt base/
  touch base/pip.conf
  [ ! -f /etc/pip.conf ] || cp /etc/pip.conf base/
  printf '%s\n' 'FROM scratch' 'ADD rootfs.tar /' 'COPY ca-certificates.crt /etc/ssl/certs/' 'COPY pip.conf /etc/' "$@" > base/Dockerfile
  docker build --quiet --tag "$name" base
  rm -r base
}

images() {
  image python:3.11-slim ca-certificates,netbase,tzdata,python3.11,python3.11-venv,python3-pip,libpython3.11-stdlib \
    'RUN ln -s /usr/bin/python3.11 /usr/local/bin/python && ln -s /usr/bin/python3.11 /usr/local/bin/python3' \
    'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8' 'CMD ["python3"]'
  image redis:7-alpine redis-server,ca-certificates 'ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' 'CMD ["redis-server"]'
  docker compose --project-directory "$here/../../.." build
}

runs() {
  [ -e dockerd.pid ] && grep --quiet --fixed-strings --text "$directory" "/proc/$(cat dockerd.pid)/cmdline" 2> /dev/null
}

down() {
  if runs; then kill "$(cat dockerd.pid)"; fi
  while runs; do sleep 0.5; done
  rm -f dockerd.pid
  mount | awk -v mine="$directory/" 'index($3, mine) == 1 {print $3}' | sort --reverse | xargs --no-run-if-empty --max-args=1 umount
  [ -e network.before ] || return 0
  # Rules and the bridge are left behind, also by Kubernetes. Where another Docker was there before, they are its own, too.
  if ! grep -q DOCKER network.before; then
    iptables-save | grep -vE 'KUBE-|DOCKER|docker0' | sed 's/^:FORWARD DROP/:FORWARD ACCEPT/' | iptables-restore
    ip link delete docker0 2> /dev/null || true
  fi
  sysctl -qw "$(grep -m 1 ip_forward network.before | tr -d ' ')"
  rm network.before
}

"$2"
