# The map of the project: `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3.11
BIN := .venv/bin
PACKAGES := core transfer agent controller gateway protos plugin
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help
help: ## Show this map
	@awk 'BEGIN {FS = ":.*## "} /^[a-zA-Z0-9_-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup setup-control setup-engine setup-redis
setup: ## Set up both environments and the demo's model (heavy parts are cached outside the checkout)
	@$(PYTHON) scripts/setup_environments.py control engine model redis
setup-control: ## Set up the control plane's environment alone
	@$(PYTHON) scripts/setup_environments.py control
setup-redis: ## Set up the Redis server of the store's tests alone (1.4 MB)
	@$(PYTHON) scripts/setup_environments.py redis
setup-engine: ## Set up the engine environment alone
	@$(PYTHON) scripts/setup_environments.py engine

.PHONY: demo
demo: setup ## The main job on this machine: a guardian becomes a proven replica; ends with one line of JSON
	@$(BIN)/python benchmarks/demo/main.py

.PHONY: setup-peers bench-transfer
setup-peers: ## Set up other transfer engines to compare with
	@$(PYTHON) scripts/setup_environments.py engine peers
bench-transfer: setup setup-peers ## Verified transfer against raw copies, sockets and other engines; ends with one line of JSON
	@$(BIN)/python benchmarks/transfer/main.py

.PHONY: bench-start
bench-start: setup ## Five starts by each mode against plain vLLM, cold and warm (25 minutes); ends with one line of JSON
	@PYTHONPATH=benchmarks/demo $(BIN)/python benchmarks/start/main.py

.PHONY: bench-switch
bench-switch: setup ## Two models taking turns on one device, against level 1 and restarts (15 minutes); ends with one line of JSON
	@PYTHONPATH=benchmarks/demo $(BIN)/python benchmarks/switch/main.py

.PHONY: bench-ring
bench-ring: setup-control ## The compile-cache ring under kills and joins, and many starts of one key; ends with one line of JSON
	@PYTHONPATH=src $(BIN)/python benchmarks/ring/main.py

.PHONY: bench-fanout bench-wake-model
bench-fanout: setup ## Many receivers over shaped links, beside a serving replica (root); ends with one line of JSON
	@$(BIN)/python benchmarks/links/fanout.py
bench-wake-model: setup-control ## A wake's transfer time as a set-up and a rate, over shaped links (root); ends with one line of JSON
	@$(BIN)/python benchmarks/links/wake_model.py

.PHONY: test test-fast test-engine
test: setup ## The tests of every change, with real vLLM (session-wide pair of engines)
	@$(BIN)/python tests/run.py
test-fast: setup-control setup-redis ## The tests that need no engine environment
	@$(BIN)/python -m pytest -m "not engine and not gpu and not kubernetes and not chart and not dashboards and not engines"
test-engine: setup ## The tests with real vLLM alone
	@$(BIN)/python -m pytest -m engine

.PHONY: setup-rdma test-rdma
setup-rdma: ## Set up the virtual machines of test-rdma (Debian's packages, unpacked and cached)
	@$(PYTHON) scripts/setup_environments.py rdma
test-rdma: setup-control setup-rdma ## RDMA for real, on soft-RoCE between two virtual machines; ends with one line of JSON
	@$(BIN)/python tests/rdma/run.py

.PHONY: setup-kubernetes test-kubernetes
setup-kubernetes: ## Build a Kubernetes control plane for tests (3 to 7 minutes, then cached)
	@$(PYTHON) scripts/setup_environments.py kubernetes
test-kubernetes: setup-control setup-kubernetes ## Against a real Kubernetes control plane; ends with one line of JSON
	@$(BIN)/python tests/kubernetes/run.py

.PHONY: setup-prometheus test-dashboards
setup-prometheus: ## Set up the Prometheus of test-dashboards (Debian's package, unpacked and cached)
	@$(PYTHON) scripts/setup_environments.py prometheus
test-dashboards: setup-control setup-prometheus ## Every panel and every alert, against a real Prometheus; ends with one line of JSON
	@$(BIN)/python tests/dashboards/run.py

.PHONY: setup-chart test-chart
setup-chart: ## Set up what the chart's tests read and run: Kubernetes' schemas, hadolint (35 MB)
	@$(PYTHON) scripts/setup_environments.py chart
test-chart: setup-control setup-redis setup-kubernetes setup-chart ## The Helm chart against schemas and a real control plane, and the images' Dockerfiles; ends with one line of JSON
	@$(BIN)/python tests/chart/run.py

.PHONY: setup-archives test-engines
setup-archives: ## Fetch the engines' own source, to be read by test-engines (140 MB once, 40 MB are kept)
	@$(PYTHON) scripts/setup_environments.py archives
test-engines: setup-control setup-engine setup-archives ## Adapters against the engines' own source, doubles of them and real vLLM; ends with one line of JSON
	@$(BIN)/python tests/engines/run.py

.PHONY: test-nixl test-gpu
test-nixl: setup-control setup-peers ## The nixl transport over the real library, between processes; ends with one line of JSON
	@$(BIN)/python tests/nixl/run.py
test-gpu: setup ## What this machine's GPUs allow (RELIGHT_GPU_PYTHON: PyTorch, vLLM); ends with one line of JSON
	@$(BIN)/python tests/gpu/run.py

.PHONY: lint type imports check-protos protos format licences
lint: setup-control ## Style, names, banned calls, unused dependencies
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/deptry . > /dev/null
type: setup-control ## Strict types
	@$(BIN)/mypy -p relight.core -p relight.transfer -p relight.protos.convert -p relight.protos.client -p relight.protos.settings -p relight.agent -p relight.controller -p relight.gateway -p relight.plugin
imports: setup-control ## Import directions of docs/architecture.md
	@PYTHONPATH=src $(BIN)/lint-imports
protos: setup-control ## Regenerate the code of the .proto files
	@$(BIN)/python scripts/gen_protos.py
check-protos: setup-control ## Fail when generated code differs from the .proto files
	@$(BIN)/python scripts/gen_protos.py --check
format: setup-control ## Rewrite to the house style
	@$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .
licences: setup-control ## Fail on a dependency whose licence is not on the list
	@$(BIN)/python scripts/check_licences.py

.PHONY: docs clean
docs: setup-control ## Regenerate what is taken from code (schema, OpenAPI, CLI help, metrics, dashboards, alert rules)
	@$(BIN)/python scripts/gen_docs.py
clean: ## Remove the checkout's own environments and caches
	@rm -rf .venv .venv-engine .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@rm -f transfer/_onepass*.so
