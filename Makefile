# Each target makes .venv and installs what it needs from requirements/all.txt (plain venv and pip).
PYTHON ?= python3.11
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint typecheck format protos docs manifests lock bench soak chaos verdict deploy-test screenshots clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

$(INSTALLED): requirements/all.txt requirements/openenv.txt requirements/checkov.txt requirements/trackers.txt requirements/trl.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -qq --no-deps $(PIP_ARGS) -r requirements/all.txt
	$(BIN)/pip install --disable-pip-version-check -qq --no-deps --no-build-isolation -e .
	rm -rf $(VENV)/openenv $(VENV)/checkov $(VENV)/trackers $(VENV)/trl
	for name in openenv checkov trackers trl; do \
		$(BIN)/pip install --disable-pip-version-check -qq --no-deps $(PIP_ARGS) \
			--target $(VENV)/$$name -r requirements/$$name.txt || exit 1; \
	done
	touch $@

demo: $(INSTALLED)  ## train a tiny model on one-digit sums, everything on this machine
	$(BIN)/headrace run recipes/arithmetic.toml --set run=demo --fresh

# Files, not tests, are spread over the workers: what a file has started is started once. Tests mostly wait for processes.
test: $(INSTALLED)  ## all tests (real vLLM, queue servers and gRPC included)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED)  ## ruff, buf, and that generated files are current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/buf lint protos
	$(BIN)/python protos/generate.py --check
	$(BIN)/python docs/generate.py --check
	$(BIN)/python deploy/k8s/render.py --check

typecheck: $(INSTALLED)  ## mypy --strict on services/ and tests/
	$(BIN)/mypy

format: $(INSTALLED)  ## rewrite the sources in our format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(INSTALLED)  ## regenerate protos/python from protos/headrace
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python protos/generate.py

docs: $(INSTALLED)  ## regenerate docs/recipe.md and docs/logged-metrics.md from the code
	$(BIN)/python docs/generate.py

manifests: $(INSTALLED)  ## rewrite deploy/k8s/install.yaml from the overlay for CPUs
	$(BIN)/python deploy/k8s/render.py

lock: $(INSTALLED)  ## resolve pyproject.toml anew and write requirements/*.txt
	$(BIN)/python requirements/lock.py

bench: $(INSTALLED)  ## measurements, about three hours, or those in NAMES: tables, results, docs/benchmarks.md
	$(BIN)/python benchmarks/suite.py $(NAMES)

soak: $(INSTALLED)  ## 20,000 groups with restarts, about an hour: flat memory and streams; soak.json (ARGS="--minutes 5")
	$(BIN)/python benchmarks/soak.py $(ARGS)

chaos: $(INSTALLED)  ## 220 faults into 20 pipelines of real processes, about 20 minutes; a table, and chaos.json
	$(BIN)/python -m tests.chaos

verdict: $(INSTALLED)  ## slow one stage after another on purpose, about 25 minutes; a table, and verdict.json
	$(BIN)/python -m tests.verdict

deploy-test: $(INSTALLED)  ## images and the cpu overlay as containers (root, Debian packages); deploy.json
	$(BIN)/python -m tests.deploy.containers

screenshots: $(INSTALLED)  ## each page, light and dark, into docs/pictures (needs Chromium)
	$(BIN)/python -m tests.browser.screenshots

clean:  ## remove what the targets made, runs excepted
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache build *.egg-info
