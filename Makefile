# Everything that a person or CI runs. `make help` lists it. A target makes the environment that it
# needs in .venv; what is there already costs nothing.

PYTHON ?= python3
ENGINE ?= vllm
PORT ?=
MODEL ?=
WORKERS ?= 1
GATEWAYS ?= 1
ONCE ?=
SECONDS ?= 600
SEED ?=
ARGS ?=

PY := .venv/bin/python
STAMPS := .venv/stamps
MODEL_READY := .headrace/models/SmolLM2-135M-Instruct/config.json

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test check lint clients faults chaos bench clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  demo takes  MODEL=<hugging face id or folder> ENGINE=simulated ONCE=1 PORT= WORKERS= GATEWAYS= ARGS="<arguments of vllm serve>"'
	@echo '  chaos takes  SECONDS=600 SEED=<number>'
	@echo '  test, check and faults take  ARGS="<arguments of pytest>"'

demo: $(if $(filter simulated,$(ENGINE)),,$(STAMPS)/engine) $(STAMPS)/demo ## A whole pool on this machine, and one streamed answer
	@exec $(PY) -m compose.local --with-parent --engine $(ENGINE) --model '$(MODEL)' \
		--port '$(PORT)' --workers $(WORKERS) --gateways $(GATEWAYS) $(if $(ONCE),--once) -- $(ARGS)

test: $(STAMPS)/engine $(STAMPS)/dev $(MODEL_READY) lint ## The whole suite, real Valkey and real vLLM included
	$(PY) -m pytest -p tests.durations $(ARGS)

check: lint ## The quick loop: linters, types, unit tests
	$(PY) -m pytest -q tests/unit tests/wire $(ARGS)

lint: $(STAMPS)/dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

clients: $(STAMPS)/engine $(STAMPS)/dev $(MODEL_READY) ## Clients that people use, and every endpoint beside vLLM's own server
	$(PY) -m tests.clients.environments
	$(PY) -m pytest -p tests.durations -m "slow or not slow" tests/clients tests/e2e/test_parity.py $(ARGS)

faults: $(STAMPS)/engine $(STAMPS)/dev $(MODEL_READY) ## Every fault, injected into real processes; writes docs/guarantees.md
	$(PY) -m pytest -p tests.durations -p tests.faults.report \
		tests/faults tests/e2e/test_vllm_failover_processes.py $(ARGS)

chaos: $(STAMPS)/dev ## Random faults under load
	$(PY) -m tests.faults.chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

bench: $(STAMPS)/engine $(STAMPS)/dev $(MODEL_READY) ## Latency, throughput and memory; see docs/benchmarks.md
	$(PY) -m benchmarks $(ARGS)

clean: ## Remove all that was made here, the environment included
	rm -rf .venv .headrace .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo 'Headrace needs Python 3.11 to 3.13; name one with make PYTHON=...'; exit 1; }
	@test -x .venv/bin/pip || { echo '==> .venv'; $(PYTHON) -m venv .venv; } || \
		{ rm -rf .venv; echo 'On Debian: apt-get install python3-venv'; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/engine $(STAMPS)/demo $(STAMPS)/dev: pyproject.toml compose/install.py $(STAMPS)/venv
	@$(PY) compose/install.py $@

$(MODEL_READY): | $(STAMPS)/engine
	@echo "==> the demo's model, made once"
	@$(PY) -m compose.model
