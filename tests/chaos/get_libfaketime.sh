#!/usr/bin/env bash
# Unpacks Debian's libfaketime into the folder given, without installing it, so that clocks can jump in a chaos run.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$folder"
chmod 755 .
apt-get -qq download libfaketime
for package in ./*.deb; do dpkg -x "$package" .; rm "$package"; done
