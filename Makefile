# Two commands do all the set-up: `make study` and `make test`. `make help` lists the rest.
# Needs Python 3.11 or newer (PYTHON=python3.12 make study chooses one), make, and a package registry for pip. No root.

PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PINS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help study install test proofs check format docs peers clean

help:  ## list what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

study: $(VENV)/.stamp-study  ## install what is missing, run `largebatch study digits`, print where the report is
	@$(BIN)/largebatch study digits $(ARGS)

install: $(VENV)/.stamp-test  ## install what `make test`, `make check` and `make docs` need

test: $(VENV)/.stamp-test  ## install what is missing, run every test (the long proofs excepted)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

proofs: $(VENV)/.stamp-test  ## the long evidence: tests marked proofs, then every benchmark at full length
	@$(BIN)/python -m pytest -m proofs --timeout 0 $(ARGS)
	@status=0; for file in $$(ls benchmarks/[!_]*.py 2>/dev/null); do \
	    if [ $$file = benchmarks/gpu.py ] && ! command -v nvidia-smi >/dev/null; then echo "== $$file: no GPU here"; continue; fi; \
	    echo "== $$file"; $(BIN)/python $$file || status=1; done; exit $$status

check: $(VENV)/.stamp-test  ## ruff, pyright (strict on src), import-linter (the floors of docs/architecture.md)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.stamp-test  ## let ruff format and fix what it can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

docs: $(VENV)/.stamp-test  ## build the documentation into site/, any warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

peers: $(PEERS)/.stamp  ## the other libraries that benchmarks are held against, in an environment of their own

clean:  ## delete what was built (the environments stay)
	@rm -rf site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(f"Python {v} is too old: largebatch needs 3.11 or newer. Try: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-study: $(PINS) | $(BIN)/python
	@echo "installing largebatch and torch into $(VENV) (once; about 2 minutes and 6 GB)"
	@$(PIP) install --editable '.[study]' --constraint constraints.txt
	@touch $@

$(VENV)/.stamp-test: $(PINS) | $(BIN)/python
	@echo "installing largebatch, torch and the test tools into $(VENV) (once; about 3 minutes and 6 GB)"
	@$(PIP) install --editable '.[study,test,docs]' --constraint constraints.txt
	@touch $(VENV)/.stamp-study $@

# torch comes from $(VENV) through a .pth file, so that peers and largebatch run on the very same build.
$(PEERS)/.stamp: scripts/make_peers.sh $(PINS) | $(VENV)/.stamp-test
	@scripts/make_peers.sh $(VENV) $(PEERS)
	@touch $@
