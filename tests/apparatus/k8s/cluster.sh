#!/usr/bin/env bash
# cluster.sh DIRECTORY up|down: a cluster of one node on this machine, of what get_kubernetes.sh and docker.sh made in DIRECTORY.
# The node's network is Docker's bridge; what is no part of Kubernetes stands beside this file: names are resolved by dns.py in a
# pod, network policies are turned into rules of iptables by policies.py, volumes are folders. Needs root. `up` prints how to reach it.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
cd "$1"
directory=$PWD
run=$directory/run
bin=$directory/bin
export DOCKER_HOST=unix://$directory/docker.sock DOCKER_CONFIG=$directory/config PATH=$directory/root/usr/bin:$PATH KUBECONFIG=$run/kubeconfig
sysctls=(vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops net.ipv4.conf.all.route_localnet
  net.ipv4.ip_forward net.bridge.bridge-nf-call-iptables)

start() {  # start NAME COMMAND...: until it is stopped by its number
  local name=$1
  shift
  setsid "$@" > "$run/$name.log" 2>&1 < /dev/null &
  echo $! > "$run/$name.pid"
}

stop() {
  [ -e "$run/$1.pid" ] || return 0
  local number
  number=$(cat "$run/$1.pid")
  # After a crash of this host the number may be somebody else's.
  grep --quiet --fixed-strings --text --regexp="$directory" --regexp="$here" "/proc/$number/cmdline" 2> /dev/null || return 0
  kill "$number" 2> /dev/null || true
  for _ in $(seq 100); do
    kill -0 "$number" 2> /dev/null || return 0
    sleep 0.1
  done
  kill -KILL "$number" 2> /dev/null || true
}

until_so() {  # until_so WHAT COMMAND...
  local what=$1
  shift
  for _ in $(seq 180); do
    if "$@" > /dev/null 2>&1; then return 0; fi
    sleep 1
  done
  echo "waited three minutes for $what: see $run" >&2
  exit 1
}

certificates() {  # certificates ADDRESS
  openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -subj /CN=ca -days 30 -out ca.crt
  openssl req -newkey rsa:2048 -nodes -keyout api.key -subj /CN=kube-apiserver -out api.csr
  echo "subjectAltName=IP:$1,IP:10.96.0.1,DNS:kubernetes.default.svc" > names
  openssl x509 -req -in api.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile names -out api.crt
  openssl genrsa -out sa.key 2048
  openssl rsa -in sa.key -pubout -out sa.pub
  echo "$(openssl rand -hex 16),admin,1,system:masters" > tokens.csv
  chmod 600 ./*.key tokens.csv
}

configure() {  # configure ADDRESS
  cat > kubeconfig <<END
apiVersion: v1
kind: Config
clusters: [{name: here, cluster: {server: "https://$1:6443", certificate-authority: $run/ca.crt}}]
users: [{name: admin, user: {token: $(cut -d , -f 1 tokens.csv)}}]
contexts: [{name: here, context: {cluster: here, user: admin}}]
current-context: here
END
  chmod 600 kubeconfig
  cat > kubelet.yaml <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 127.0.0.1
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
enforceNodeAllocatable: []
failSwapOn: false
evictionHard: {memory.available: 100Mi, nodefs.available: 1%}
imageGCHighThresholdPercent: 100
syncFrequency: 5s
END
}

control_plane() {  # control_plane ADDRESS
  start etcd "$directory/x/usr/bin/etcd" --data-dir etcd --listen-client-urls http://127.0.0.1:2379 \
    --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
  start apiserver "$bin/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --bind-address="$1" --advertise-address="$1" \
    --secure-port=6443 --insecure-port=0 --tls-cert-file=api.crt --tls-private-key-file=api.key --client-ca-file=ca.crt \
    --token-auth-file=tokens.csv --authorization-mode=RBAC --service-cluster-ip-range=10.96.0.0/16 --allow-privileged=false \
    --service-account-issuer=https://kubernetes.default.svc --service-account-signing-key-file=sa.key \
    --service-account-key-file=sa.pub --kubelet-preferred-address-types=Hostname
  until_so "the API server" kubectl get --raw /readyz
  start controllers "$bin/kube-controller-manager" --kubeconfig=kubeconfig --service-account-private-key-file=sa.key \
    --root-ca-file=ca.crt --leader-elect=false --port=0
  start scheduler "$bin/kube-scheduler" --kubeconfig=kubeconfig --leader-elect=false --port=0
}

node() {  # node ADDRESS
  # No sandbox of a pod needs a moment to end: the signal that stops it is the last one.
  docker image inspect pause:3.2 > /dev/null 2>&1 ||
    printf '%s\n' 'FROM python:3.11-slim' 'STOPSIGNAL SIGKILL' 'CMD ["sleep", "infinity"]' | docker build --quiet --tag pause:3.2 - > /dev/null
  start kubelet "$bin/kubelet" --config=kubelet.yaml --kubeconfig=kubeconfig --root-dir="$run/kubelet" --cert-dir="$run/pki" \
    --hostname-override=localhost --node-ip="$1" --container-runtime=docker --docker-endpoint="$DOCKER_HOST" \
    --docker="$DOCKER_HOST" --pod-infra-container-image=pause:3.2
  start proxy "$bin/kube-proxy" --kubeconfig=kubeconfig --hostname-override=localhost --proxy-mode=iptables \
    --conntrack-max-per-core=0 --oom-score-adj=0
  until_so "the node" sh -c 'kubectl get node localhost | grep -q " Ready"'
  sysctl -qw net.bridge.bridge-nf-call-iptables=1
  kubectl label --overwrite namespace kube-system kubernetes.io/metadata.name=kube-system
  kubectl --namespace kube-system create configmap dns --from-file="$here/dns.py" --dry-run=client --output=yaml | kubectl apply --filename=-
  kubectl apply --filename="$here/dns.yaml"
  start policies python3 "$here/policies.py"
  mkdir -p volumes/{data,models,redis,backup,empty}
  # What the model loader is given to fetch, where the demo's model was made.
  mkdir -p volumes/models/given
  [ ! -d "$here/../../../deploy/models/calculator-tiny" ] || cp -r "$here/../../../deploy/models/calculator-tiny" volumes/models/given/
  chown -R 10001:10001 volumes/*
  sed "s#VOLUMES#$run/volumes#" "$here/volumes.yaml" | kubectl apply --filename=-
  kubectl --namespace kube-system rollout status deployment/dns --timeout=180s
}

up() {
  command -v conntrack socat > /dev/null ||
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends conntrack socat > apt.log 2>&1
  mkdir -p "$run" && cd "$run"
  [ -e sysctl.before ] || sysctl "${sysctls[@]}" > sysctl.before
  address=$(ip -4 -o address show docker0 | awk '{sub("/.*", "", $4); print $4}')
  certificates "$address" 2> openssl.log
  configure "$address"
  control_plane "$address"
  node "$address"
  kubectl get nodes --output=wide
  echo "export KUBECONFIG=$KUBECONFIG"
}

# Control groups of pods outlive the kubelet that made them.
forget_pods() {
  local parent
  for parent in /sys/fs/cgroup/kubepods /sys/fs/cgroup/*/kubepods; do
    [ ! -d "$parent" ] || find "$parent" -depth -type d -exec rmdir {} +
  done
}

down() {
  [ -d "$run" ] || return 0
  cd "$run"
  for name in policies proxy kubelet scheduler controllers apiserver etcd; do stop "$name"; done
  docker ps --all --quiet --filter name=k8s_ | xargs --no-run-if-empty docker rm --force > /dev/null
  python3 "$here/policies.py" --clean
  "$bin/kube-proxy" --cleanup > cleanup.log 2>&1 || true
  mount | awk -v mine="$run/kubelet" 'index($3, mine) == 1 {print $3}' | sort --reverse | xargs --no-run-if-empty --max-args=1 umount
  forget_pods
  while read -r name _ value; do sysctl -qw "$name=$value"; done < sysctl.before
  cd ..
  rm -rf "$run"
}

"$2"
