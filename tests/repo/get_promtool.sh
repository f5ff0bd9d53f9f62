#!/usr/bin/env bash
# get_promtool.sh DIRECTORY: unpacks Debian's Prometheus there; nothing is installed.
set -euo pipefail
mkdir -p "$1"
cd "$1"
apt-get download prometheus
dpkg-deb --extract prometheus_*.deb .
rm prometheus_*.deb
