#!/usr/bin/env bash
# Installs the system tools that tests use and pip can't bring, where that is possible (root, with apt-get): spin, for tests/model,
# and Chromium and Prometheus, for the live page, the traces and the metrics in tests/insight.
# Never fails: without a tool its tests are skipped, with the reason.
set -uo pipefail
packages=()
command -v spin >/dev/null || packages+=(spin)
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || packages+=(chromium)
command -v prometheus >/dev/null || packages+=(prometheus)
[ ${#packages[@]} = 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tools: not installed, and can't be installed here: ${packages[*]}; their tests will be skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null
for package in "${packages[@]}"; do
    apt-get install -y -qq --no-install-recommends "$package" >/dev/null ||
        echo "tools: $package could not be installed; its tests will be skipped" >&2
done
exit 0
