#!/usr/bin/env bash
# Slurm and munge from Debian's packages, if they are not there yet. Needs root; starts nothing and configures nothing.
set -euo pipefail
if command -v slurmctld > /dev/null && command -v munged > /dev/null; then exit 0; fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurmd slurmctld slurm-client munge
