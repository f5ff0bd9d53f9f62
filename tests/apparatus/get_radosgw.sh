#!/usr/bin/env bash
# get_radosgw.sh DIRECTORY: unpacks Ceph's object gateway of Debian 13 there, with the libraries that it needs; nothing is installed.
# Debian 12 has an older one, which needs a cluster, so the sources of this machine are read as those of Debian 13.
set -euo pipefail
mkdir -p "$1/apt/lists/partial" "$1/apt/cache/archives/partial" "$1/debs"
cd "$1"
sed 's/bookworm/trixie/g' /etc/apt/sources.list.d/debian.sources > apt/debian.sources
apt=(-o "Dir::Etc::sourcelist=$PWD/apt/debian.sources" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$PWD/apt/lists" -o "Dir::Cache=$PWD/apt/cache")
apt-get "${apt[@]}" -qq update
mapfile -t packages < <(
  apt-cache "${apt[@]}" depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances radosgw |
    grep -E '^(lib|radosgw$|ceph-common$|media-types$)' | grep -vE 'perl|python|systemd|pam' | sort -u
)
(cd debs && apt-get "${apt[@]}" -qq download "${packages[@]}")
for package in debs/*.deb; do dpkg-deb --extract "$package" .; done
rm -r debs apt
for program in radosgw radosgw-admin; do
  cat > "$program" << SCRIPT
#!/bin/sh
lib="$PWD/usr/lib/$(uname -m)-linux-gnu"
exec "\$lib/ld-linux-x86-64.so.2" --library-path "\$lib:\$lib/ceph" "$PWD/usr/bin/$program" --plugin-dir="\$lib/ceph" --erasure-code-dir="\$lib/ceph/erasure-code" "\$@"
SCRIPT
  chmod 755 "$program"
done
./radosgw --version
