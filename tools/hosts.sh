# usage: hosts.sh. Installs the system packages that `make test-hosts` needs, if it runs as root and apt-get exists.
# The script never fails. If a package is not installed, the script names it, and the tests that need it are
# skipped.
PATH=$PATH:/usr/sbin:/sbin
packages=''
need() { command -v "$1" >/dev/null || packages="$packages $2"; }
need sshd openssh-server
need ssh openssh-client
need slurmctld slurm-wlm
need munged munge
need ip iproute2
[ -z "$packages" ] && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "SOME TESTS WILL BE SKIPPED; on Debian and Ubuntu: apt install$packages" >&2
    exit 0
fi
# The packages contain servers that must not be started, because the tests start their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null
apt-get install -y -qq --no-install-recommends $packages >/dev/null ||
    echo "SOME TESTS WILL BE SKIPPED: could not install$packages" >&2
exit 0
