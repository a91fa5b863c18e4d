# `make` lists the targets. Needs only Python 3.11 or newer with pip; everything else is installed, pinned, into a
# virtual environment outside the clone (scripts/venv.py), which clones with the same requirements share.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)

# Where pip would fetch a CUDA build of torch: the address of the index that has the CPU build.
TORCH_INDEX ?=
export TORCH_INDEX

# The clone's own code, not an installed copy. A new plugin adds one line.
PYTHONPATH := $(CURDIR)
PYTHONPATH := $(PYTHONPATH):$(CURDIR)/plugins/gateway
PYTHONPATH := $(PYTHONPATH):$(CURDIR)/plugins/embedded
PYTHONPATH := $(PYTHONPATH):$(CURDIR)/plugins/sglang
PYTHONPATH := $(PYTHONPATH):$(CURDIR)/plugins/slime
PYTHONPATH := $(PYTHONPATH):$(CURDIR)/plugins/miles
PYTHONPATH := $(PYTHONPATH):$(CURDIR)/plugins/s3
PYTHONPATH := $(PYTHONPATH):$(CURDIR)/plugins/modal
PYTHONPATH := $(PYTHONPATH):$(CURDIR)/plugins/recipes
export PYTHONPATH

# Tests start hundreds of processes: each would compile all of Stitch anew.
unexport PYTHONDONTWRITEBYTECODE

# Evaluated at first use, so that `make help` starts no Python.
VENV = $(eval VENV := $$(shell $$(PYTHON) scripts/venv.py path))$(VENV)
PY = $(VENV)/bin/python

# Stock SGLang has an environment of its own, of 3 GB; only what starts it needs that one.
VENV_SGLANG = $(eval VENV_SGLANG := $$(shell $$(PYTHON) scripts/venv.py path sglang))$(VENV_SGLANG)
PY_SGLANG = $(VENV_SGLANG)/bin/python

# The demo's replicas: the small engine of the clone, or stock SGLang servers.
ENGINE ?= embedded
DEMO_embedded = recipes.local.demo
DEMO_sglang = recipes.local.sglang_demo --python $(PY_SGLANG)

# And so has the trainer of miles-rl, which brings Ray, Megatron and a copy of SGLang.
VENV_MILES = $(eval VENV_MILES := $$(shell $$(PYTHON) scripts/venv.py path miles))$(VENV_MILES)
PY_MILES = $(VENV_MILES)/bin/python

# A skip for want of a module is a failure here: this environment has them all.
PYTEST = STITCH_NO_SKIP=1 $(PY) -m pytest
# Three for two cores: each waits now and then, for a process, a pause or a deadline.
WORKERS = -n 3 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv venv-sglang venv-miles venv-path demo demo-miles check test test-slow test-real test-sglang test-miles test-long promtool lint format bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: ## make the virtual environment, if it is not there yet
	@$(PYTHON) scripts/venv.py build

venv-sglang: ## make the virtual environment of stock SGLang, if it is not there yet
	@$(PYTHON) scripts/venv.py build sglang

venv-miles: ## make the virtual environment of the trainer miles-rl, if it is not there yet
	@$(PYTHON) scripts/venv.py build miles

venv-path: ## print where the virtual environment is
	@$(PYTHON) scripts/venv.py path

demo: venv $(if $(filter sglang,$(ENGINE)),venv-sglang) ## train a small policy while replicas follow, and prove what they say (ENGINE=sglang, SEED=, OUT=, DEMO_ARGS=)
	@$(PY) -m $(DEMO_$(ENGINE)) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out $(OUT)) $(DEMO_ARGS)

demo-miles: venv-miles $(if $(filter sglang,$(ENGINE)),venv-sglang) ## the stock trainer miles-rl, killed and resumed, every sample proven (ENGINE=sglang, OUT=, DEMO_ARGS=--async)
	@$(PY_MILES) -W ignore -m recipes.miles.demo --engine $(ENGINE) $(if $(filter sglang,$(ENGINE)),--python $(PY_SGLANG)) \
		$(if $(OUT),--out $(OUT)) $(DEMO_ARGS)

check: lint ## lint, types and the fast tests; under 2 minutes
	$(PYTEST) $(WORKERS)

test: export STITCH_HYPOTHESIS = full
# Real servers wait for each other more than they compute: two tiers at once take little longer than one.
test: promtool check venv-sglang venv-miles test-slow ## check, then the slow tests and those that start real servers; under 20 minutes
	@$(PY) scripts/tiers.py 2 test-sglang test-real test-miles

promtool: venv
	@$(PY) scripts/promtool.py

test-slow: venv ## the slow tests that start no servers; part of `make test`
	$(PYTEST) $(WORKERS) -m "slow and not real and not long"

test-real: venv ## the tests that start real servers of Stitch; part of `make test`
	$(PYTEST) -m "real and not long" -o faulthandler_timeout=900

test-sglang: venv-sglang ## the tests that start stock SGLang servers; part of `make test`
	PYTHONPATH=$(CURDIR)/tests/real/sglang_cpu:$(PYTHONPATH) STITCH_NO_SKIP=1 $(PY_SGLANG) -m pytest -W ignore \
		-m "real and not long" -o faulthandler_timeout=900 tests/real/sglang

test-miles: venv-miles ## the tests that run the trainer of miles-rl; part of `make test`
	STITCH_NO_SKIP=1 $(PY_MILES) -m pytest -W ignore \
		-m "real and not long" -o faulthandler_timeout=900 tests/real/miles

test-long: venv ## the tests that take hours
	STITCH_HYPOTHESIS=long $(PYTEST) -m long -o faulthandler_timeout=0

lint: venv ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: venv ## let ruff rewrite what it can
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

bench: venv venv-sglang ## every benchmark of the core and of SGLang, in its quick form (publish.py needs a trainer: see its --help)
	@for name in delta join store gateway fleet; do echo "# $$name"; $(PY) -m benchmarks.$$name --json --quick || exit 1; done
	@echo "# activation"; PYTHONPATH=$(CURDIR)/tests/real/sglang_cpu:$(PYTHONPATH) $(PY_SGLANG) -m benchmarks.activation --json --quick
	@echo "# recipes"; $(PY) -m benchmarks.recipes --json --quick

clean: ## remove caches, build products and out/, where demos leave their runs (virtual environments stay)
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
