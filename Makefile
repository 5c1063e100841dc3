# Every target sets itself up: the first one run creates .venv and installs into it, later ones find it there.
#
#   PYTHON=python3.12 make test        another interpreter
#   make test PYTEST_ARGS="-k ring -x" arguments for pytest
#   make bench PYTEST_ARGS='--bench-rows "sum_n n=5"'   some rows, by their names in the tables
#   make bench PYTEST_ARGS=--benchmark-compare=old.json beside a copy of an earlier out/bench.json
#   make gpu GPU_ARGS="--minutes 9"    as much as fits; without network: PYTHONPATH=. python -m bench.gpu
#   make evidence EVIDENCE_ARGS="--minutes 100"   a piece of it; --bill, --check CELL and --report, too
#   make test-torch CONFORMANCE_ARGS="--only fsdp --ranks 2"   some of torch's tests
#   make demo PIP_ARGS="..."           arguments for pip, e.g. an index of CPU-only torch wheels
#
# Where PYTHON already has a torch that sees a GPU, .venv borrows it: its torch fits that machine's driver, and a second
# one would be gigabytes. Elsewhere torch comes first, by its exact pin. --system-site-packages shows the packages of the
# Python that a virtual environment was made with, not that environment's own: where PYTHON is one, a .pth adds them.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
MADE := $(VENV)/.made
READY := $(VENV)/.ready
DOCS := $(VENV)/.docs
RECIPES := $(VENV)/.recipes
DIST := $(VENV)/.dist
LIBRARY := kernels/cpu/libnative.so
# What packages that are not there yet are held to; /dev/null for the newest that go together.
PINS = $(VENV)/rest.txt
OUT := out
BENCH = $(PY) -m pytest bench/kernels --benchmark-only --benchmark-quiet --bench-results=bench/results
TORCH := $(shell grep -o '^torch==[^;]*' constraints.txt)
FIRST = -c $(VENV)/first.txt
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Compiling all that is installed takes a minute; what is imported of it is compiled then, and kept on disk: tests start
# hundreds of processes.
PIP = $(PY) -m pip install -qq --no-compile $(PIP_ARGS)
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help build demo evidence test test-slow test-both test-nightly test-kernels test-collectives test-emulated \
	test-timing test-recipes test-frameworks test-newest-frameworks test-torch test-newest nightly lint docs docs-links dist bench gpu \
	bench-compiled clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 20

# What a checkout runs, also one that is found by PYTHONPATH: nothing is done where it is up to date.
build: $(LIBRARY)  ## compile the C kernels in place; installing does so, too

demo: $(READY) build  ## three acts of some twenty seconds: one hash on 8, 4, 2 ranks; a lost rank; curves
	$(PY) -m adasum.demo --out $(OUT)

evidence: $(READY) build  ## run what is missing of docs/evidence/protocol.md: tables and plots; again to go on
	PYTHONPATH=examples $(PY) -m evidence $(EVIDENCE_ARGS)

# Several files at a time have more threads than there are cores: one that spins keeps the one it waits for from running.
test test-slow test-both test-nightly test-kernels test-collectives test-emulated: export OMP_WAIT_POLICY = passive
FILES = --dist loadfile --no-loadscope-reorder
TWO_FILES = -n 2 $(FILES)
# Of two, each waits for a third of its time or more.
THREE_FILES = -n 3 $(FILES)

test: $(READY) build  ## the tests to run before a commit: every package, three files at a time
	$(PY) -m pytest tests $(THREE_FILES) $(PYTEST_ARGS)

test-slow: $(READY) build  ## the long tests, which `make test` leaves out
	$(PY) -m pytest tests -m 'slow and not timing and not nightly' $(THREE_FILES) $(PYTEST_ARGS)

# Each run collects twelve thousand tests in each worker.
test-both: $(READY) build  ## the tests of both in one run, which spares a collection: for .ci/run
	$(PY) -m pytest tests -m 'not nightly and not timing and not recipe' $(THREE_FILES) $(PYTEST_ARGS)

test-nightly: $(READY) build  ## the longest tests, which .ci/run leaves out, too
	$(PY) -m pytest tests -m 'nightly and not timing' $(TWO_FILES) $(PYTEST_ARGS)

test-kernels: $(READY) build  ## the tests of kernels, and of the emulator that runs their compiled code
	$(PY) -m pytest tests/kernels tests/ptx_emulator $(TWO_FILES) $(PYTEST_ARGS)

test-collectives: $(READY) build  ## the tests of collectives in one process, without those that start ranks
	$(PY) -m pytest tests/collectives $(THREE_FILES) $(PYTEST_ARGS)

test-emulated: $(READY) build  ## collectives and adasum over the kernels' compiled code, emulated: 10 minutes
	$(PY) -m pytest tests/collectives tests/adasum/test_reducer.py tests/adasum/optimizer/test_distributed_optimizer.py \
		tests/adasum/horovod/test_reductions.py --emulated -n 2 --dist loadfile $(PYTEST_ARGS)

test-timing: $(READY) build  ## tests of measured times, for a machine with nothing else to do
	$(PY) -m pytest tests -m timing $(PYTEST_ARGS)

test-recipes: test-frameworks test-torch  ## the two of these

test-frameworks: $(RECIPES) build  ## other frameworks and mpirun, which it installs: Ray alone is 100 MB
	$(PY) -m pytest tests/examples/test_frameworks.py tests/adasum/test_integrations.py \
		tests/packaging/test_other_packages.py tests/processes/test_mpirun.py -m 'not timing' $(PYTEST_ARGS)

test-newest-frameworks:  ## the same with their newest releases, in an environment made anew: for every night
	rm -rf $(VENV)-frameworks
	$(MAKE) test-frameworks VENV=$(VENV)-frameworks PINS=/dev/null

# Ranks that wait must leave the cores to those they wait for.
test-torch: export OMP_WAIT_POLICY = passive
test-torch: $(READY) build  ## torch's own tests of DDP, and its optimizers, over adasum: 6 minutes
	$(PY) -m tests.torch_conformance $(CONFORMANCE_ARGS)

nightly: test-slow test-nightly test-recipes test-newest test-newest-frameworks  ## all of what no commit waits for: for every night

# What torch does not promise to keep breaks here first. An index of nightly builds: PIP_ARGS="--extra-index-url ...".
test-newest:  ## the tests on the newest torch, pre-releases too, in an environment made anew: for every night
	rm -rf $(VENV)-newest
	$(MAKE) test-both VENV=$(VENV)-newest TORCH=torch FIRST= PIP_ARGS='--pre $(PIP_ARGS)'

lint: $(READY) build  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(DOCS) build  ## the guide and the reference in out/docs; a warning is an error
	$(PY) -m sphinx -b html -W --keep-going -n -E -q docs $(OUT)/docs

docs-links: $(DOCS) build  ## the same, following links to other sites
	$(PY) -m sphinx -b linkcheck -E -q docs $(OUT)/docs-links

# auditwheel finds the oldest glibc that the C kernels run with, and names the wheel by it.
dist: $(DIST) build  ## what a package index takes, in out/dist: an sdist and a manylinux wheel, checked
	rm -rf $(OUT)/dist $(OUT)/linux
	$(PY) -m build --no-isolation --sdist --outdir $(OUT)/dist
	$(PY) -m build --no-isolation --wheel --outdir $(OUT)/linux
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m auditwheel repair -w $(OUT)/dist $(OUT)/linux/*.whl
	$(PY) -m twine check --strict $(OUT)/dist/*
	$(PY) -m pip check

bench: $(READY) build  ## the kernels beside their peers, on the GPU where there is one; writes bench/results/
	@mkdir -p $(OUT)
	$(BENCH) --benchmark-json=$(OUT)/bench.json $(PYTEST_ARGS)

gpu: $(READY) build  ## all that a machine with a GPU is asked: tests, benches, a page of results; again to go on
	$(PY) -m bench.gpu $(GPU_ARGS)

bench-compiled: $(READY) build  ## what the compiler makes of each kernel, no GPU needed: a table in bench/results
	$(PY) -m bench.static_analysis

clean:  ## remove .venv, out/, what was compiled, and caches
	rm -rf $(VENV) $(VENV)-newest $(VENV)-frameworks $(OUT) $(LIBRARY) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE): pyproject.toml constraints.txt
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
		echo "set-up: borrowing the torch of $(PYTHON), which sees a GPU"; \
		$(PYTHON) -m venv --clear --system-site-packages $(VENV) && \
		$(PYTHON) -c 'import site; [print(f"import site; site.addsitedir({one!r})") for one in site.getsitepackages()]' \
			>"$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"; \
	else \
		echo "set-up: creating $(VENV) with $(TORCH) (about a minute)"; \
		$(PYTHON) -m venv --clear $(VENV) && grep -v '^triton==' constraints.txt >$(VENV)/first.txt && \
		$(PIP) $(FIRST) '$(TORCH)'; \
	fi
	@touch $(MADE)

# What the borrowed or pinned torch has brought is left as it is: constraints.txt speaks only for packages that are
# not there yet, since a wheel for GPUs demands the very triton it was built with.
$(READY): $(MADE)
	@$(PY) -m pip list --format=freeze >$(VENV)/present.txt
	@awk -F'[=;]' '{ name = tolower($$1); gsub("_", "-", name) } NR == FNR { there[name]; next } \
		!(name in there)' $(VENV)/present.txt constraints.txt >$(VENV)/rest.txt
	$(PIP) -c $(PINS) -e '.[dev]'
	@touch $(READY)

# Without a compiler it says so, makes no file, and torch's functions serve. Any .venv will do: several checkouts may share
# one, which is not made anew for this.
$(LIBRARY): $(wildcard kernels/cpu/*.[ch]) setup.py | $(PY)
	$(PY) setup.py -q build_ext --inplace -b $(OUT)/build -t $(OUT)/build

$(PY):
	$(MAKE) $(READY)

$(RECIPES): $(READY)
	$(PIP) -c $(PINS) -e '.[dev,recipes]'
	@touch $(RECIPES)

$(DIST): $(READY)
	$(PIP) -c $(PINS) -e '.[dist]'
	@touch $(DIST)

$(DOCS): $(READY)
	$(PIP) -c $(PINS) -e '.[docs]'
	@touch $(DOCS)
