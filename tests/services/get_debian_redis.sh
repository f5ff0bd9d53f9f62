#!/usr/bin/env bash
# Unpacks Debian's redis-server into the folder given, without installing it: the tests then run on it too.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$folder"
chmod 755 .
apt-get download redis-tools libjemalloc2 liblzf1
for package in ./*.deb; do dpkg -x "$package" .; rm "$package"; done
# The program looks at the name that it is called by; its libraries lie beside it.
cat > redis-server <<SCRIPT
#!/bin/sh
export LD_LIBRARY_PATH="\$(echo "$folder"/usr/lib/*-linux-gnu)"
exec "$folder/usr/bin/redis-server" "\$@"
SCRIPT
chmod 755 redis-server
mkdir -p usr/bin
ln -sf redis-check-rdb usr/bin/redis-server
./redis-server --version
