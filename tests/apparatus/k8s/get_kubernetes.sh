#!/usr/bin/env bash
# get_kubernetes.sh DIRECTORY: Kubernetes 1.20.2 built from Debian 12's source package, and etcd 3.5 of Debian 13.
# Debian's later source packages hold kubectl alone, and no registry of binaries is asked. Needs root, Debian 12, 6 GB and about
# 40 minutes of a core; called again it goes on where it was ended (Go keeps what it has compiled).
set -euo pipefail
mkdir -p "$1"/{source-apt/lists/partial,source-apt/cache/archives/partial,debs,x,bin,gopath/src/k8s.io} && cd "$1"
directory=$PWD
source=$directory/gopath/src/k8s.io/kubernetes
programs=(kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet)

fetch() {
  # Not the folder of docker.sh, which asks for packages of its own at the same time.
  # shellcheck disable=SC2016  # apt's own variable
  site=$(apt-get indextargets --format '$(SITE)' | head -n 1)
  signed='[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]'
  printf '%s\n' "deb $signed $site bookworm main" "deb-src $signed $site bookworm main" "deb $signed $site trixie main" > source-apt/sources.list
  apt=(apt-get -qq -o Dir::Etc::sourcelist="$directory/source-apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::lists="$directory/source-apt/lists" -o Dir::Cache="$directory/source-apt/cache" -o APT::Sandbox::User=root)
  "${apt[@]}" update
  cd debs
  "${apt[@]}" download {golang-1.19-go,golang-1.19-src,golang-github-modern-go-reflect2-dev}/bookworm etcd-server/trixie
  for deb in *.deb; do dpkg-deb --extract "$deb" ../x; done
  "${apt[@]}" source --download-only kubernetes/bookworm
  rm -rf "$source"
  dpkg-source --no-check --extract kubernetes_*.dsc "$source" > /dev/null
  cd ..
}

mend() {
  # The reflect2 of 2020 crashes when it is built with Go 1.18 or later.
  rm -rf "$source/vendor/github.com/modern-go/reflect2"
  cp -r x/usr/share/gocode/src/github.com/modern-go/reflect2 "$source/vendor/github.com/modern-go/"
  # A container that lacks CAP_SYS_RESOURCE may not lower anybody's OOM score, so nobody's is lowered.
  sed -i 's/defaultSandboxOOMAdj int = -998/defaultSandboxOOMAdj int = 0/' "$source/pkg/kubelet/dockershim/docker_sandbox.go"
  sed -i -E 's/((Kubelet|KubeProxy|guaranteed)OOMScoreAdj +int = )-[0-9]+/\10/' "$source/pkg/kubelet/qos/policy.go"
  touch "$source/.mended"
}

# The types that the API server describes itself with are generated in every build of Kubernetes.
describe() {
  go build -o "$directory/bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  local packages
  packages=$(grep --recursive --files-with-matches --include='*.go' '+k8s:openapi-gen=' staging/src/k8s.io pkg cmd |
    grep --invert-match --extended-regexp '_test|testdata|/examples/|sample-|code-generator|zz_generated' |
    xargs -n 1 dirname | sort --unique |
    sed -e 's#^staging/src/#k8s.io/kubernetes/vendor/#;t' -e 's#^#k8s.io/kubernetes/#' | paste --serial --delimiters=,)
  # It complains about names and exits with 1; without its file the build below fails.
  "$directory/bin/openapi-gen" --input-dirs "$packages" --output-package k8s.io/kubernetes/pkg/generated/openapi \
    --output-file-base zz_generated.openapi --go-header-file hack/boilerplate/boilerplate.generatego.txt \
    --report-filename "$directory/violations" > "$directory/openapi-gen.log" 2>&1 || true
}

for program in "${programs[@]}"; do [ -x "bin/$program" ] || missing=yes; done
[ -n "${missing:-}" ] || exit 0
[ -e "$source/go.mod" ] && [ -x x/usr/bin/etcd ] || fetch
[ -e "$source/.mended" ] || mend
export GOROOT=$directory/x/usr/lib/go-1.19 GOPATH=$directory/gopath GOCACHE=$directory/gocache GO111MODULE=off CGO_ENABLED=0
export PATH=$GOROOT/bin:$PATH
cd "$source"
[ -e pkg/generated/openapi/zz_generated.openapi.go ] || describe
versions=k8s.io/kubernetes/vendor/k8s.io
go build -o "$directory/bin/" -ldflags "-s -w -X $versions/component-base/version.gitVersion=v1.20.2 \
-X $versions/component-base/version.gitMajor=1 -X $versions/component-base/version.gitMinor=20 \
-X $versions/client-go/pkg/version.gitVersion=v1.20.2" "${programs[@]/#/.\/cmd\/}"
