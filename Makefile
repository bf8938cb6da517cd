# `make demo` and `make test` need no preparation: each creates .venv if it is missing.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
DEVELOPING := .venv/developing
BROWSER := .venv/browser
# Modules are compiled once, also where the shell says otherwise: tests start hundreds of programs.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test check docs shape reproduce bench clean
help:  ## show this help
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/  -/'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "pipar needs Python 3.11 or newer; set PYTHON=python3.11 or the like."; exit 2; }
	$(PYTHON) -m venv .venv

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing pipar into .venv: a minute or two"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tensorboard]'
	@touch $(READY)

# In one step, not in addition to the demo's packages: those would be resolved and built twice.
$(DEVELOPING): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing pipar into .venv with the packages for tests, documentation and benchmarks: some minutes"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY) $(DEVELOPING)

demo: $(READY)  ## VGG-5 on digits over 4 device processes on an emulated 4G link, with fl, sfl and pipar (about a minute and a half, after installing)
	@$(BIN)/pipar compare examples/demo.toml --methods fl,sfl,pipar

# Pages are tested in the system's own browser.
$(BROWSER): $(DEVELOPING)
	@command -v chromium > /dev/null || { echo "Installing chromium for the tests of pages"; apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium > /dev/null; }
	@touch $(BROWSER)

# Three workers for two cores: tests with real processes wait for much of their time, and load cannot make one fail.
test: $(DEVELOPING) $(BROWSER)  ## everything: format, lint, types, all tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 3 --dist worksteal

check: $(DEVELOPING)  ## format, lint, types, package rules and the fast tests (under a minute on two free cores)
	$(BIN)/ruff format .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow'

docs: $(DEVELOPING)  ## the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "Open site/index.html."

shape: $(DEVELOPING)  ## sizes of modules and functions, imports between packages
	@$(BIN)/python -m docs.shape

reproduce: $(DEVELOPING)  ## the paper's evaluation on a virtual testbed, the quick set (minutes); tables and figures in runs/reproduction
	$(BIN)/python -m reproduction all --quick

bench: $(DEVELOPING)  ## measure the numbers that README quotes; results go to benchmarks/results
	$(BIN)/python -m benchmarks

clean:  ## remove everything that was built
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache site
