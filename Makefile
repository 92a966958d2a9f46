# Every target sets itself up: a Python >= 3.10 with its headers, pip, make and g++ are enough.
#   make demo   train a small Llama with eager, Inductor and mst, and draw the difference
#   make gallery   pictures of the plans of reference models
#   make test   the test suite, but for the lab's
#   make test-lab   the tests of the lab: benchmarks, fuzzer, demo, planner
#   make test-all   both with kernels in every test, and the tests marked `full`: hours
#   make coverage   the lines of mstpass that `make test` and `make test-lab` run
#   make test-versions   the tests on every torch and Python that mstpass supports; hours
#   make test-cuda   the tests for CUDA; without a GPU: the code for one, compiled and checked
#   make lint   ruff and mypy
#   make size   the code lines of mstpass, by folder
#   make docs   the documentation as a site that works offline: site/index.html
#   make bench  measured side by side; the tables of docs/results
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST_ARGS := pytest -n 2 --dist worksteal
MARKS  := not lab and not dry_run
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m $(PYTEST_ARGS)

.PHONY: demo gallery test test-lab test-all test-versions coverage test-cuda lint size docs format bench setup clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n 's/^#   //p' Makefile

demo: $(READY)
	$(BIN)/mstpass demo --out demo-out $(ARGS)
	@echo "make demo: the picture is $(CURDIR)/demo-out/demo.png"

# Drawn from plans alone: nothing is trained or measured. Needs Graphviz's dot. The demo's own picture
# is copied where there is one.
gallery: $(READY)
	$(BIN)/python viz/gallery.py $(ARGS)
	@if [ -f demo-out/demo.png ]; then cp demo-out/demo.png docs/img/; cp demo-out/demo.png viz/gallery/; fi
	$(BIN)/python viz/screenshot.py

# Two workers: half of a test is Python, which has one core. Threads that spin would take the other.
test: $(READY)
	$(PYTEST) -m "$(MARKS)" $(ARGS)

test-lab: $(READY)
	$(PYTEST) -m "lab and not dry_run" $(ARGS)

test-all: $(READY)
	$(PYTEST) --all -m "not dry_run" $(ARGS)

# Of all processes that tests start. ARGS: a part of the tests, such as ARGS=tests/test_budget.py.
coverage: $(READY)
	$(BIN)/coverage erase
	OMP_WAIT_POLICY=passive $(BIN)/coverage run -m $(PYTEST_ARGS) -m "not dry_run" $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Each torch and Python has an environment of its own: noxfile.py, docs/versions.md.
test-versions: $(READY)
	$(BIN)/python -m nox $(ARGS)

# A CPU build of torch comes without Triton, which compiles kernels for a GPU without having one.
test-cuda: $(READY)
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet triton
	$(PYTEST) -m "dry_run or cuda" $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

size: $(READY)
	@$(BIN)/python -m tests.size

# Broken links are errors (not with --quiet, which drops the warnings that --strict counts); nothing is loaded
# from the network, neither while the site is built nor when it is read.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "make docs: open $(CURDIR)/site/index.html"

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/mstpass bench loops $(ARGS)
	$(BIN)/mstpass bench peers $(ARGS)
	$(BIN)/mstpass bench losses $(ARGS)
	$(BIN)/mstpass bench compile $(ARGS)

setup: $(READY)

# torch comes first and pinned: the range in pyproject.toml then installs nothing more. Python compiles
# what is imported, which is little of what is installed. It keeps that, whatever the environment
# says: each of the many processes of a run would take seconds to compile torch again.
unexport PYTHONDONTWRITEBYTECODE

$(READY): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile -e ".[dev]"
	@touch $@

# Some distributions ship Python without ensurepip; pip itself can then fill the environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "mstpass needs Python 3.10 or newer; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@command -v "$${CXX:-g++}" >/dev/null || { \
	  echo "mstpass needs a C++ compiler (g++): torch.compile builds CPU kernels with it" >&2; exit 1; }
	@$(PYTHON) -c 'import sys, sysconfig, os; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || \
	  echo "warning: no Python.h next to $(PYTHON): torch.compile may fail to build kernels (Debian, Ubuntu: apt install python3-dev)" >&2
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	       && $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; } \
	  || { rm -rf $(VENV); \
	       echo "Cannot create $(VENV): install Python's venv module (Debian, Ubuntu: apt install python3-venv)," \
	            "or name another Python: make PYTHON=/path/to/python3" >&2; exit 1; }

clean:
	rm -rf $(VENV) .coverage* demo-out site .pytest_cache .mypy_cache .ruff_cache build *.egg-info
