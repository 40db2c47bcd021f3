# make demo | test | test-pure | test-pythons | test-hosts | lint | docs | coverage | soak | bench | fresh | release | clean. Each installs what it needs into .venv first, once.
PYTHON ?= python3
BIN := .venv/bin

# What makes an installation stale: Python files are live (editable install), these are not.
BUILD_INPUTS := pyproject.toml CMakeLists.txt constraints.txt $(wildcard flowchan/_core/*.cpp flowchan/_core/*.hpp) \
    .venv/modules

# The tested versions hold for the build's own requirements too; newer pips read the second variable for them.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

# Tests start thousands of processes: what they import is compiled once, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test test-pure test-pythons test-hosts lint docs coverage soak soak-graphs soak-hosts bench fresh release clean

help:
	@sed -n 1p Makefile

demo: .venv/installed
	$(BIN)/python examples/wordcount.py
	mkdir -p out
	$(BIN)/flowchan viz examples/wordcount.py -o out/wordcount.svg || $(BIN)/flowchan viz examples/wordcount.py -o out/wordcount.mmd

# Several processes share the test files, and those that load torch have processes of their own; a test that fails runs once more, alone (see tools/run_tests.py).
RUN_TESTS := $(BIN)/python tools/run_tests.py

# What tests/native runs, so that no test waits for a compiler.
NATIVE := $(MAKE) --no-print-directory --silent --jobs=$(shell nproc) --file=tests/native/Makefile

test: .venv/installed-test
	$(NATIVE)
	$(BIN)/python -c "from flowchan_torch import native; native.load(); native.load(native.COMMANDS)"
	$(RUN_TESTS)

# Without the native module, as on macOS: the contract suite on channels between threads, and graphs of threads.
test-pure: .venv/installed-test
	$(BIN)/python -m pytest tests/pure tests/fresh/test_other_systems.py

# On every Python that is here, or on those named: PYTHONS="python3.13 python3.14t" TESTS=tests/run. The rest needs torch.
test-pythons:
	sh tools/pythons.sh

# Agents on hosts for real: an sshd, a Slurm cluster and a Ray cluster on this machine, started and ended by the tests.
# It installs what is missing (Debian's packages as root); what can't be had is skipped, with the reason in the last lines.
test-hosts: .venv/installed-hosts
	sh tools/hosts.sh
	$(BIN)/python tools/run_tests.py --hosts --files tests/hosts_real

# pipelines/ and viz/ are parts of the package flowchan, so the types are checked in the installed layout.
# The benchmarks are checked too, so that they follow a rename; their peers need not be installed.
lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pydoclint --config pyproject.toml --quiet flowchan pipelines viz flowchan_torch
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.cpp' '*.hpp')
	rm -rf build/types && mkdir -p build/types && cp -a flowchan build/types/flowchan
	cp -a pipelines viz build/types/flowchan/
	cp -a flowchan_torch benchmarks examples build/types/
	cd build/types && ../../$(BIN)/mypy --strict --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p flowchan -p flowchan_torch -p benchmarks
	cd build/types && ../../$(BIN)/python ../../tools/typed.py
	$(BIN)/python tools/complexity.py
	$(BIN)/python tools/prose.py

# The site, in build/site. A warning is an error, a link that leads nowhere among them.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Which lines of the Python package its quicker tests run in this process; what worker processes run is not counted.
coverage: .venv/installed-test
	$(BIN)/python -m pytest --cov=flowchan --cov=viz --cov=pipelines --cov-report=term-missing:skip-covered \
	    tests/declare tests/check tests/viz tests/cli tests/run/test_operators.py tests/run/test_operators_per_item.py tests/run/test_failure.py \
	    tests/run/test_run_handle.py tests/run/test_decisions.py tests/run/test_decisions_at_random.py tests/run/test_async_stages.py tests/run/test_explain.py \
	    tests/deaths/test_exactly_once.py tests/pipelines tests/contract/test_values.py

# What takes too long for every change and `make test` has not run: models, crash walks, stress and combinations of
# parameters in full; then random graphs and random kills,
# for MINUTES from SEED, whose result is compared exactly. FRAMES: from a peer of each kind that may send anything.
# MODELS: nothing if no model has changed, because it finds what it found. On a slow machine one search takes minutes.
# NATIVES: nothing if the core and its native tests have not changed.
# SKIP: tests by a part of their names, as pytest's -k has them.
MINUTES ?= 10
SEED ?= 1
FRAMES ?= 3000000
MODELS ?= tests/model
NATIVES ?= tests/native
SKIP ?=
soak: .venv/installed-test
	$(if $(NATIVES),$(NATIVE) sanitized)
	$(RUN_TESTS) --long --only-long --timeout 1200 --durations 12 \
	    --frames $(FRAMES) $(if $(SKIP),-k "not ($(SKIP))") $(if $(MODELS),,--ignore=tests/model) \
	    $(if $(NATIVES),,--ignore=tests/native)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target soak-graphs soak-hosts

soak-graphs: .venv/installed-test
	$(BIN)/python -m tests.deaths.soak --minutes $(MINUTES) --seed $(SEED)

soak-hosts: .venv/installed-test
	$(BIN)/python -m tests.hosts.soak --minutes $(MINUTES) --seed $(SEED)

bench: .venv/installed-bench
	$(BIN)/python -m benchmarks

# From a bare Debian to the demo, as root and as a user; needs root, debootstrap and a mirror.
fresh:
	tests/fresh/fresh.sh

# The source distribution and the wheels, in dist; WHEELS="cp311-manylinux* *t-*" selects some. Each wheel is built twice.
# Testing the wheels needs root, debootstrap and a mirror.
WHEELS ?=
release: .venv/installed-release
	$(BIN)/python -m tools.release $(foreach pattern,$(WHEELS),'$(pattern)')

clean:
	rm -rf .venv build dist out .mypy_cache .ruff_cache .hypothesis

# What is missing is named with its Debian package. Nothing half-made is left, so the next try begins anew.
NEEDS = @sh tools/needs.sh

$(BIN)/python:
	$(NEEDS) "$(PYTHON)"
	"$(PYTHON)" -m venv .venv || { rm -rf .venv; exit 1; }

# The editable install lists its modules: one that was added or moved makes it stale, one that was changed does not.
.venv/modules: always | $(BIN)/python
	@find flowchan flowchan_torch pipelines viz -name '*.py' | sort > $@.now; cmp -s $@.now $@ && rm $@.now || mv $@.now $@

.PHONY: always
always:

.venv/installed: $(BUILD_INPUTS) | $(BIN)/python
	$(NEEDS) $(BIN)/python
	$(PIP_INSTALL) -e .
	touch $@

# Any of these brings the package itself up to date too, hence the second stamp.
.venv/installed-test: $(BUILD_INPUTS) | $(BIN)/python
	$(NEEDS) $(BIN)/python
	$(PIP_INSTALL) -e ".[test,lint]"
	touch $@ .venv/installed

.venv/installed-docs: $(BUILD_INPUTS) | $(BIN)/python
	$(NEEDS) $(BIN)/python
	$(PIP_INSTALL) -e ".[docs]"
	touch $@ .venv/installed

.venv/installed-release: $(BUILD_INPUTS) | $(BIN)/python
	$(NEEDS) $(BIN)/python
	$(PIP_INSTALL) -e ".[release]"
	touch $@ .venv/installed

.venv/installed-hosts: $(BUILD_INPUTS) | $(BIN)/python
	$(NEEDS) $(BIN)/python
	$(PIP_INSTALL) -e ".[test,ray]"
	touch $@ .venv/installed

# Everything that .ci/run needs. Each installation builds the core again, so one is quicker than three.
.venv/installed-ci: $(BUILD_INPUTS) | $(BIN)/python
	$(NEEDS) $(BIN)/python
	$(PIP_INSTALL) -e ".[test,lint,docs,ray]"
	touch $@ .venv/installed .venv/installed-test .venv/installed-docs .venv/installed-hosts

.venv/installed-bench: $(BUILD_INPUTS) | $(BIN)/python
	$(NEEDS) $(BIN)/python
	$(PIP_INSTALL) -e ".[bench]"
	touch $@ .venv/installed
