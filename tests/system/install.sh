#!/bin/bash
# Installs the Debian packages that the system tests need; says what is missing, and fails, where it cannot.
set -euo pipefail

declare -A package_of=([mkfs.ext4]=e2fsprogs [mkfs.xfs]=xfsprogs [strace]=strace [mount]=mount [losetup]=mount)
wanted=()
for tool in "${!package_of[@]}"; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" > /dev/null || wanted+=("${package_of[$tool]}")
done
if ((${#wanted[@]})); then
    echo "installing ${wanted[*]}"
    if ! command -v apt-get > /dev/null; then
        echo "no apt-get here: install ${wanted[*]} by hand, then run make test-system again" >&2
        exit 1
    fi
    as_root=()
    ((EUID == 0)) || as_root=(sudo --non-interactive)
    export DEBIAN_FRONTEND=noninteractive
    "${as_root[@]}" apt-get update --quiet=2
    "${as_root[@]}" apt-get install --quiet=2 --yes --no-install-recommends "${wanted[@]}" > /dev/null
fi
"$(dirname "$0")/../../benchmarks/install.sh"
if ((EUID != 0)); then
    echo "the system tests mount file systems and cut their power: run make test-system as root" >&2
    exit 1
fi
