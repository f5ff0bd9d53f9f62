#!/usr/bin/env bash
# get_compose.sh DIRECTORY: unpacks the compose plugin of Debian 13 there, whatever release this is; nothing is installed.
set -euo pipefail
mkdir -p "$1"/apt/{lists,cache/archives}/partial
cd "$1"
# shellcheck disable=SC2016  # apt's own variable
site=$(apt-get indextargets --format '$(SITE)' | head -n 1)
printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s trixie main\n' "$site" > apt/sources.list
apt=(apt-get -qq -o Dir::Etc::sourcelist="$PWD/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o Dir::State::lists="$PWD/apt/lists" -o Dir::Cache="$PWD/apt/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update
"${apt[@]}" download docker-compose/trixie
dpkg-deb --extract docker-compose_*.deb .
rm -r docker-compose_*.deb apt
