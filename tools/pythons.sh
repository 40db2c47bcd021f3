# usage: [PYTHONS="python3.12 python3.14t"] [TESTS=tests/run] pythons.sh [PYTEST OPTIONS]. Runs the tests that do not need
# torch with each of these Pythons (default: every known version that is installed). Each Python has a virtual
# environment in build/pythons. On free-threaded Pythons, the GIL stays off even if a test imports an old extension.
# The tests in these folders need torch.
without_torch='--ignore=tests/docs --ignore=tests/examples --ignore=tests/typed'
wheels='hypothesis cryptography pillow polars pyarrow'  # installed if a wheel exists; otherwise their tests are skipped
done='' failed=''
for python in ${PYTHONS:-python3.11 python3.12 python3.13 python3.13t python3.14 python3.14t}; do
    # The PATH may contain pyenv's launcher for a Python that is not active; the launcher only prints an error.
    version=$("$python" -VV 2>/dev/null) || { [ -z "$PYTHONS" ] || failed="$failed $python"; continue; }
    path=$(command -v "$python")
    tag=$("$path" -c 'import sys; print("%d.%d" % sys.version_info[:2] + sys.abiflags)')
    venv=build/pythons/$tag
    echo "==" $version
    install="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
    { [ -x "$venv/bin/python" ] || "$path" -m venv "$venv"; } &&
        $install -c constraints.txt -e '.[test-anywhere]' && for package in $wheels; do
            env -u PIP_CONSTRAINT $install --only-binary :all: "$package" 2>/dev/null || echo "$package has no wheel for this Python"
        done &&
        PYTHON_GIL=$([ "$tag" = "${tag%t}" ] || echo 0) "$venv/bin/python" tools/run_tests.py --large without "$@" ${TESTS:+--files} ${TESTS:-$without_torch} &&
        done="$done $python" || failed="$failed $python"
done
echo "passed:${done:- none}${failed:+; failed or not installed:$failed}"
[ -n "$done" ] && [ -z "$failed" ]
