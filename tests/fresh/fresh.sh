#!/bin/bash
# Get from a bare Debian to the demo, following only the messages and the README. This is done twice: as root,
# installing one package at a time as `make demo` names them, and as a user, with the README's line. The folders have
# spaces in their names. The script uses this machine's package mirror, pip settings and proxies. It needs root,
# debootstrap, about 4 GB and several minutes. The mounts below are visible only to this script and end with it.
[ "${1:-}" = alone ] || exec unshare --mount "$0" alone

work=$(mktemp -d)
trap 'umount "$work"/{root,guest}/proc 2>/dev/null || true; rm -rf --one-file-system "$work"' EXIT
export LC_ALL=C
mapfile -t proxies < <(env | grep -iE '^(https?|all|no)_proxy=' || true)

say() { echo "fresh: $*" >&2; }
fail() { say "FAILED: $*"; exit 1; }
inside() { # ROOT USER COMMAND...
    local root=$1 user=$2
    shift 2
    chroot --userspec="$user" "$root" /usr/bin/env -i HOME="$(home "$user")" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 "${proxies[@]}" "$@"
}
home() { [ "$1" = root ] && echo /root || echo "/home/$1"; }
add() { say "apt install $*"; inside "$root" root apt-get install -y --no-install-recommends "$@" >"$work/apt.log" 2>&1 || fail "$(tail -3 "$work/apt.log")"; }

bare() { # make a minimal Debian
    local mirror suite
    read -r mirror suite < <(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian')
    say "debootstrap --variant=minbase $suite"
    debootstrap --variant=minbase "$suite" "$work/bare" "$mirror" >"$work/debootstrap.log" 2>&1 || fail "$(tail -3 "$work/debootstrap.log")"
    cp -L /etc/resolv.conf /etc/hosts "$work/bare/etc/"
    apt-config dump | grep -iE '^Acquire::[a-z]+::(Proxy|CAInfo)' >"$work/bare/etc/apt/apt.conf.d/50host" || true
    local settings certificates
    settings=$(python3 -m pip config list | sed -En "s/^(global|:env:)\.(index-url|trusted-host|proxy|cert)='(.*)'$/\2 = \3/p" | sort -u)
    certificates=$(sed -n 's/^cert = //p' <<<"$settings")
    [ -z "$certificates" ] || cp "$certificates" "$work/bare/etc/certificates"
    printf '[global]\n%s\n' "${settings/"$certificates"//etc/certificates}" >"$work/bare/etc/pip.conf"
    chroot "$work/bare" useradd -m guest
}

begin() { # USER: make a separate bare Debian, with the project in a folder of that user
    user=$1 root="$work/$1" place="$(home "$1")/a place with spaces/flowchan"
    cp -a "$work/bare" "$root"
    mount -t proc proc "$root/proc"
    mkdir -p "$root$place"
    git ls-files -z --cached --others --exclude-standard | tar --null --ignore-failed-read -T - -cf - 2>/dev/null | tar -xf - -C "$root$place"
    chroot "$root" chown -R "$user:" "$(dirname "$place")"
}

demo() { # return whether `make demo` succeeds
    say "$user: make demo"
    inside "$root" "$user" sh -c 'cd "$1" && make demo' sh "$place" >"$work/said" 2>&1
}

drawn() { # check that the demo has written this file
    [ -s "$root$place/out/$1" ] || fail "$user: no out/$1: $(tail -5 "$work/said")"
    say "$user: out/$1 is there"
}

one_by_one() { # install the first package that each failure names, until the demo works
    local named round
    for round in 1 2 3 4 5 6 7 8; do
        demo && return
        if grep -q 'make: not found' "$work/said"; then named=make
        else named=$(sed -n 's/^On Debian and Ubuntu: apt install \([^ ]*\).*/\1/p' "$work/said"); fi
        [ -n "$named" ] || fail "$user: nothing named after round $round: $(tail -20 "$work/said")"
        add "$named"
    done
    fail "$user: still not, after $round rounds: $(tail -20 "$work/said")"
}

bare
begin root
one_by_one
drawn wordcount.svg

begin guest
read -r -a packages < <(sed -En 's/^apt install (.*)/\1/p' README.md)
add "${packages[@]}"
demo || fail "guest: $(tail -20 "$work/said")"
drawn wordcount.svg
say 'guest: without a renderer'
inside "$root" guest sh -c 'cd "$1" && rm -r out && .venv/bin/python -m pip uninstall -q -y graphviz-pure' sh "$place"
demo || fail "guest: without a renderer: $(tail -20 "$work/said")"
drawn wordcount.mmd
named=$(sed -En 's/.*to install what does: (.*) \(.*/\1/p' "$work/said")
[ -n "$named" ] || fail "guest: no line that installs a renderer: $(tail -20 "$work/said")"
say "guest: $named"
inside "$root" guest sh -c "$named" >"$work/said" 2>&1 || fail "guest: $(tail -5 "$work/said")"
demo || fail "guest: with a renderer again: $(tail -20 "$work/said")"
drawn wordcount.svg
say 'all is well'
