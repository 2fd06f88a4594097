#!/bin/bash
# Sees to the Debian packages that the system tests need, and that they run as root.
set -euo pipefail

declare -A package_of=([chromium]=chromium [mkfs.ext4]=e2fsprogs [mkfs.xfs]=xfsprogs [strace]=strace [mount]=mount
    [losetup]=mount [ip]=iproute2 [bpftrace]=bpftrace [fsfreeze]=util-linux [cc]=gcc [slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client)
wanted=()
for tool in "${!package_of[@]}"; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" > /dev/null || wanted+=("${package_of[$tool]}")
done
if ((${#wanted[@]})); then
    "$(dirname "$0")/../../.ci/install-packages" "${wanted[@]}"
fi
"$(dirname "$0")/../../benchmarks/install.sh"
if ((EUID != 0)); then
    echo "the system tests mount file systems and cut their power: run make test-system as root" >&2
    exit 1
fi
