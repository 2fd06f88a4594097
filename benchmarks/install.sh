#!/bin/bash
# Installs the Debian packages of the server that the benchmarks read from; says what is missing where it cannot.
set -euo pipefail

PATH="$PATH:/usr/sbin:/sbin"
if command -v nginx > /dev/null && [[ -e /usr/lib/nginx/modules/ngx_http_echo_module.so ]]; then
    exit 0
fi
packages=(nginx libnginx-mod-http-echo)
echo "installing ${packages[*]}"
if ! command -v apt-get > /dev/null; then
    echo "no apt-get here: install ${packages[*]} by hand" >&2
    exit 1
fi
as_root=()
((EUID == 0)) || as_root=(sudo --non-interactive)
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update --quiet=2
"${as_root[@]}" apt-get install --quiet=2 --yes --no-install-recommends "${packages[@]}" > /dev/null
