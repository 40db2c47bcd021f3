# usage: hosts.sh. Installs what `make test-hosts` needs of the system, where that is possible: root, with apt-get.
# Never fails: what is missing is named, and its tests are skipped with the reason.
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
    echo "NOT EVERYTHING CAN BE TESTED: on Debian and Ubuntu: apt install$packages" >&2
    exit 0
fi
# The packages bring servers, and none of them shall be started: the tests start their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null
apt-get install -y -qq --no-install-recommends $packages >/dev/null ||
    echo "NOT EVERYTHING CAN BE TESTED: these could not be installed:$packages" >&2
exit 0
