# README's two commands are `make demo` and `make test`; both set up what they need and skip what is done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.millrace-installed
CPP := $(shell find kernels -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name 'CMakeLists.txt')

# Packages are compiled when first imported (`--no-compile` below), and that is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo up test test-slow test-gpu test-kind kind-on-path lint typecheck format proto setup clean

demo: setup ## a whole stack on this machine: one long and several short chats, then stop
	$(BIN)/millrace demo

up: setup ## a whole stack on this machine until Ctrl-C
	$(BIN)/millrace up

# Most tests share the cores. Whole stacks, and what watches the clock, get the machine to themselves.
SHARING := $(addprefix tests/,chart contract core decode engine kernels models operator papers parity profiles proxy \
	scheduler sim state telemetry transfer wire worker)

test: setup lint ## lint and the whole test suite
	$(BIN)/python -m pytest -m "not slow and not gpu" -n auto --dist worksteal $(SHARING)
	$(BIN)/python -m pytest -m "not slow and not gpu" $(SHARING:%=--ignore=%)

test-slow: setup ## stress that takes minutes
	$(BIN)/python -m pytest -m slow

test-gpu: setup ## what needs a CUDA device
	$(BIN)/python -m pytest -m gpu

KIND := $(abspath $(VENV)/kind.kubeconfig)
test-kind: kind-on-path setup ## operator and chart on a cluster of kind's, made and deleted here
	kind create cluster --name millrace-test --kubeconfig $(KIND) --wait 5m
	MILLRACE_TEST_KUBECONFIG=$(KIND) $(BIN)/python -m pytest tests/envtest; status=$$?; \
		kind delete cluster --name millrace-test --kubeconfig $(KIND); exit $$status

kind-on-path:
	@command -v kind >/dev/null || { echo "make test-kind needs kind, and Docker, on PATH"; exit 1; }

setup: $(STAMP)

$(STAMP): pyproject.toml $(CPP)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Millrace needs Python 3.11 to 3.13: make PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing pinned dependencies and building the C++ parts (a few minutes the first time)"
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -e '.[engine,operator,local,dev]'
	@touch $@

lint: setup ## formatting, lint, types, import contracts, committed stubs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup ## regenerate services/millrace/wire/pb from proto/
	$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV) build
