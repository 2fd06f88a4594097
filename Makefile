# Every target works in a fresh clone with Python >= 3.11, pip and make; all that it makes lies inside the clone.
# `make demo` trains and is killed; `make test` is the gate; `make test-system` needs root and Debian packages.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
JOBS ?= 2
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)

# What pip and matplotlib would leave in the home directory. Set them to share a cache between clones.
export PIP_CACHE_DIR ?= $(CURDIR)/$(VENV)/cache/pip
export MPLCONFIGDIR ?= $(CURDIR)/$(VENV)/cache/matplotlib

# Many images set it. Nothing is compiled at installation: without bytecode, each process compiles torch anew (3 s).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test mutants gpu-check test-lowest test-newest test-pythons test-frameworks test-soak test-watched test-system lint types pytest format bench bench-readers docs clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

# -- environments: one folder, a stamp for each set of extras, so that a second run starts at once --------------------

$(VENV)/made:
	@test -n "$(PYTHON)" || { echo "no python3.11 and no python3 on the PATH: install Python >= 3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}; 3.11 or newer is needed: set PYTHON=...") if sys.version_info < (3, 11) else None'
	@echo "making $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv --clear $(VENV) 2>/dev/null || { \
	    "$(PYTHON)" -m venv --clear --without-pip $(VENV); \
	    "$(PYTHON)" -m pip --python $(BIN)/python install --quiet --disable-pip-version-check pip; }
	@touch $@

$(VENV)/torch: $(VENV)/made $(CONSTRAINTS)
	@echo "installing torch, as pinned by $(CONSTRAINTS)"
	@$(INSTALL) "$$(grep '^torch==' $(CONSTRAINTS))"
	@touch $@

$(VENV)/demo: $(VENV)/torch pyproject.toml
	@echo "installing lakeckpt"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/dev: $(VENV)/torch pyproject.toml
	@echo "installing lakeckpt[dev]"
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/demo

# The frameworks, in exact versions, so that nothing is resolved; DeepSpeed is built, beside the torch that is installed.
$(VENV)/frameworks/made: requirements/frameworks.txt $(VENV)/made $(CONSTRAINTS) pyproject.toml
	@echo "installing the frameworks of $<"
	@"$(PYTHON)" -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) "$$(grep '^torch==' $(CONSTRAINTS))" setuptools
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --no-build-isolation -r $<
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS) -e '.[delta]' hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

# The lowest versions that pyproject.toml allows, exactly; and the newest that can be had on the day.
$(VENV)/lowest/made: requirements/lowest.txt $(VENV)/made $(CONSTRAINTS) pyproject.toml
	@echo "installing the lowest versions, of $<"
	@"$(PYTHON)" -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $<
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/newest/made: $(VENV)/made pyproject.toml
	@echo "installing the newest versions (torch may bring CUDA along)"
	@"$(PYTHON)" -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[test]'
	@touch $@

# Other Pythons, with the versions of constraints.txt. One that pyenv installed is found without being on the PATH.
$(VENV)/python%/made: $(VENV)/made $(CONSTRAINTS) pyproject.toml
	@found="$$(PYENV_VERSION="$$(pyenv versions --bare 2>/dev/null | grep -x '$*\.[0-9]*' | sort -V | tail -n 1 || true)" \
	    python$* -c 'import sys; print(sys.executable)')" || { echo "no python$* on the PATH or in pyenv: install it" >&2; exit 1; }; \
	echo "making $(@D) with $$found (torch brings CUDA along)"; \
	"$$found" -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS) -e '.[test]'
	@touch $@

# The benchmarks' peers, in environments of their own: their exact versions, so nothing is resolved (and what one of them
# forbids for no reason that matters here can be had). torch first, as everywhere.
$(VENV)/%/made: requirements/bench-%.txt $(VENV)/made $(CONSTRAINTS)
	@echo "installing the benchmarks' peers of $<"
	@"$(PYTHON)" -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) "$$(grep '^torch==' $(CONSTRAINTS))"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

# -- what people run ---------------------------------------------------------------------------------------------------

demo: $(VENV)/demo  ## train on a real lake, kill ranks, resume, prove that every token counted once
	$(BIN)/lakeckpt demo $(ARGS)

# While mypy runs, one process imports all tests: it writes the bytecode that six processes would write at once.
test: lint  ## the gate: ruff, mypy, pytest (ARGS goes to pytest)
	$(BIN)/python -m pytest --collect-only --quiet > /dev/null & types=0; $(BIN)/mypy || types=$$?; wait; exit $$types
	@$(MAKE) --no-print-directory pytest

pytest: $(VENV)/dev  # three times as many at a time: many tests wait for processes
	$(BIN)/python -m pytest -n $$((3 * $(JOBS))) --dist worksteal $(ARGS)

lint: $(VENV)/dev  ## ruff, rules and form
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev  ## mypy, strict
	$(BIN)/mypy

format: $(VENV)/dev  ## let ruff put files into form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-soak: $(VENV)/dev  ## real jobs on several topologies, killed at random moments; new examples of every property
	HYPOTHESIS_PROFILE="$${HYPOTHESIS_PROFILE:-soak}" $(BIN)/python -m pytest -n $$(($(JOBS) + 1)) --dist worksteal \
	    -m "(soak or hypothesis) and not system and not gpu" $(ARGS)

# Processes of other environments are left alone.
test-watched: $(VENV)/dev  ## the tests with watch="restart" as the default: fails if a watch acts (ARGS='-m soak': jobs)
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); acts=$$(mktemp); \
	    printf '%s\nimport watch_restarts\n' '$(CURDIR)/tests/watched' > $$site/watched.pth; \
	    trap "rm -f $$site/watched.pth $$acts" EXIT; status=0; \
	    LAKECKPT_TEST_WATCH=$$acts $(BIN)/python -m pytest -n $$((2 * $(JOBS))) --dist worksteal $(ARGS) || status=$$?; \
	    echo "acts of a watch: $$(wc -l < $$acts)"; cat $$acts; \
	    ! grep -v '^tests/[a-z_/]*stalls' $$acts || { echo "a watch acted where no test makes a rank hang" >&2; status=1; }; exit $$status

test-system: $(VENV)/dev  ## cuts of power, faults of system calls: needs root; installs Debian packages
	tests/system/install.sh
	$(BIN)/python -m pytest -m system -n $(JOBS) --dist worksteal $(ARGS)

test-frameworks: $(VENV)/frameworks/made  ## Lightning, transformers, accelerate, Ray and others: their jobs, killed and resumed
	$(VENV)/frameworks/bin/python -m pytest -m frameworks -n $(JOBS) --dist worksteal tests/frameworks $(ARGS)

# Of checkpoints, what depends on versions of safetensors, msgpack, numpy and the stores: formats, saving, restoring, converting.
LOWEST_CHECKPOINTS := test_one_rank.py test_tensor_file.py test_records.py test_trees.py test_kinds_of_objects.py test_with_loader.py \
    test_sharded.py test_load_objects.py test_golden_runs.py test_rows.py test_versions.py test_wholes.py test_flows.py \
    test_commit.py interop

# Without property-based tests, which run with the pinned versions in `make test` and `make test-soak`.
test-lowest: $(VENV)/lowest/made  ## the README's script and the tests below with the lowest versions that are declared
	$(VENV)/lowest/bin/python -m pytest -n $$((2 * $(JOBS))) --dist worksteal -m "not (hypothesis or soak or system or gpu)" \
	    'tests/docs/test_code_blocks.py::test_every_code_block_runs[README.md]' tests/test_versions.py tests/core tests/wire \
	    tests/reading tests/lake tests/data $(addprefix tests/checkpoint/,$(LOWEST_CHECKPOINTS)) $(ARGS)

test-newest: $(VENV)/newest/made  ## data, tracking and checkpoints with the newest versions (not in CI: it depends on the day)
	$(VENV)/newest/bin/python -m pytest -n $(JOBS) --dist worksteal tests/data tests/tracking tests/checkpoint $(ARGS)

# Whatever depends on Python: processes, signals, threads, typing, pickling by loader workers.
PYTHONS ?= 3.12 3.13
PYTHONS_SAMPLE := 'tests/docs/test_code_blocks.py::test_every_code_block_runs[README.md]' tests/test_all_attributes.py \
    tests/test_doctests.py tests/core tests/wire tests/tracking tests/reading \
    $(addprefix tests/lake/,test_table.py test_listing.py test_object_store.py test_storage_law.py formats/test_delta.py formats/test_iceberg.py) \
    $(addprefix tests/data/,test_law.py test_loader.py test_loader_workers.py test_worker_signals.py test_mixed_datasets.py test_packing.py test_tokenizing.py) \
    $(addprefix tests/checkpoint/,test_one_rank.py test_kinds_of_objects.py test_with_loader.py test_sharded.py agent capturing/test_kinds.py preemption/test_signals.py)

test-pythons: $(PYTHONS:%=$(VENV)/python%/made)  ## the README's script and a sample with Python 3.12 and 3.13 (not in CI: PyPI has no CPU torch for them)
	@for one in $(PYTHONS); do echo "Python $$one"; \
	    $(VENV)/python$$one/bin/python -m pytest -n $(JOBS) --dist worksteal $(PYTHONS_SAMPLE) $(ARGS); done

mutants: $(VENV)/dev  ## plant the faults of tests/mutants, one at a time, and count those that the tests find
	$(BIN)/python tests/mutants/run.py --jobs $(JOBS) --json bench-out/mutants.json $(ARGS)

gpu-check: $(VENV)/dev  ## jobs, captures, restoring and loading on a CUDA device, then what captures cost (needs a GPU)
	$(BIN)/python -m pytest -m gpu -n 0 tests/gpu $(ARGS)
	$(BIN)/python -m benchmarks.gpu_captures --json bench-out/gpu-captures.json

bench: $(VENV)/dev $(VENV)/peers/made $(VENV)/older/made  ## every benchmark; installs Debian's nginx, and peers in .venv/peers, .venv/older
	benchmarks/install.sh
	$(BIN)/python -m benchmarks $(ARGS)

bench-readers: $(VENV)/dev $(VENV)/peers/made $(VENV)/older/made  ## lakeckpt and its peers on the same rows (ARGS=--quick: minutes)
	$(BIN)/python -m benchmarks.readers $(ARGS)

clean:  ## remove everything that the targets made
	rm -rf $(VENV) .tox .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo-out bench-out src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
