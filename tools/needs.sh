# usage: needs.sh PYTHON. Lists everything that this machine lacks for an installation, and the Debian packages to install.
python=$1
lacks='' packages=''
lack() { lacks="$lacks
  $1"; packages="$packages${2:+ $2}"; }
has() { "$python" -c "$1" >/dev/null 2>&1; }

if ! command -v "$python" >/dev/null; then
    lack "$python, 3.11 or later" 'python3 python3-dev python3-venv'
elif ! has 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    lack "Python 3.11 or later: $python is $("$python" -V 2>&1); Debian 12 and later have it; select another one with make PYTHON=…"
else
    name=$("$python" -c 'import os, sys
usual = os.path.realpath(sys._base_executable) == os.path.realpath("/usr/bin/python3")
print("python3" if usual else "python%d.%d" % sys.version_info[:2])')
    has 'import venv, ensurepip' || lack "Python's modules venv and ensurepip" "$name-venv"
    has 'import os, sysconfig as s; open(os.path.join(s.get_path("include"), "Python.h"))' ||
        lack "Python's headers (Python.h)" "$name-dev"
fi

for compiler in "${CXX:-c++}" g++ clang++; do
    printf '#include <concepts>\n#include <cstdio>\nint main() { return std::integral<int> ? 0 : 1; }\n' |
        $compiler -std=c++20 -x c++ -fsyntax-only - 2>/dev/null && found=yes && break
done
[ "$found" ] || lack 'a C++20 compiler' g++

[ -z "$lacks" ] && exit 0
echo "flowchan can't be installed on this machine yet, because it lacks:$lacks" >&2
[ -z "$packages" ] || echo "On Debian and Ubuntu: apt install$packages" >&2
exit 1
