#!/usr/bin/env bash
# Installs the system tools that tests use and pip can't bring, where that is possible (root, with apt-get): spin, for tests/model.
# Never fails: without a tool its tests are skipped, with the reason.
set -uo pipefail
command -v spin >/dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tools: spin is not installed and can't be installed here; tests/model will be skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null && apt-get install -y -qq --no-install-recommends spin >/dev/null
command -v spin >/dev/null || echo "tools: spin could not be installed; tests/model will be skipped" >&2
exit 0
