#!/bin/bash
# Sees to the Debian packages of the server that the benchmarks read from.
set -euo pipefail

PATH="$PATH:/usr/sbin:/sbin"
if ! command -v nginx > /dev/null || [[ ! -e /usr/lib/nginx/modules/ngx_http_echo_module.so ]]; then
    "$(dirname "$0")/../.ci/install-packages" nginx libnginx-mod-http-echo
fi
