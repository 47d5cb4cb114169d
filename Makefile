# README's two commands are `make demo` and `make test`; both set up what they need and skip what is done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.millrace-installed
CPP := $(shell find kernels -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name 'CMakeLists.txt')

# A compiler that is there must succeed; without one Millrace is installed without its C++ modules.
COMPILER := $(shell command -v $(CXX))

# Packages are compiled when first imported (`--no-compile` below), and that is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo up test test-unit test-busy test-late test-late-faults test-slow test-gpu test-clients test-kind kind-on-path lint typecheck format proto setup clean

demo: setup ## a whole stack on this machine: one long and several short chats, then stop
	$(BIN)/millrace demo

up: setup ## a whole stack on this machine until Ctrl-C
	$(BIN)/millrace up

test: setup ## lint and the whole test suite, all of it whatever fails; failures are repeated at the end
	@$(BIN)/python tests/suite.py

test-unit: setup ## what one edits against, in under two minutes
	@$(BIN)/python tests/suite.py --unit

test-busy: setup ## the same beside a busy core, a busy disk and stalls of single processes: what a shared machine does
	@$(BIN)/python tests/busy.py $(BIN)/python tests/suite.py

test-late: setup ## the same tests on event loops that stall and hear late of their sockets; another seed each time
	$(BIN)/python -m pytest -m "not slow and not gpu" --late --seed=random -n auto --dist loadfile

test-late-faults: setup ## every fault in every phase of a request, on services with such loops: 35 minutes
	PYTHONPATH=tests/support/late_services:tests $(BIN)/python -m pytest -m slow tests/faults/test_matrix.py

SIMULATED := tests/faults/test_simulation.py
test-slow: setup ## stress that takes minutes, with another seed each time; simulated fleets first, on all cores
	@status=0; \
	$(BIN)/python -m pytest -m slow --seed=random -n auto $(SIMULATED) || status=1; \
	$(BIN)/python -m pytest -m slow --seed=random --ignore=$(SIMULATED) || status=1; \
	exit $$status

# Exit status 1: a package has a known weakness. The database is on the internet.
AUDIT := build/audit
.PHONY: audit
audit: setup ## known weaknesses of the packages that an installation brings
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install -q pip-audit==2.10.1
	$(AUDIT)/bin/pip-audit --skip-editable --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

test-gpu: setup ## what needs a CUDA device
	$(BIN)/python -m pytest -m gpu

# A machine with a GPU has a Python with torch and Triton, and perhaps no network: `gpu-wheels` fetches the
# rest here, and `gpu-check` makes no .venv there. DEVICE=cpu runs the same checks in small sizes.
.PHONY: gpu-wheels gpu-check
GPU_WHEELS := build/gpu-wheels
DEVICE := cuda
gpu-wheels: setup ## what gpu-check needs beside torch, NumPy and Triton, at most 60 MiB; PYTHON_VERSION=3.12 for another Python
	$(BIN)/python -m millrace.bench.gpu.wheels $(GPU_WHEELS) $(PYTHON_VERSION)

gpu-check: ## checks and speed on the GPU, in under 10 minutes, by PYTHON's own torch and without network
	$(PYTHON) -P services/millrace/bench/gpu/bootstrap.py --device $(DEVICE) --wheels $(GPU_WHEELS) $(if $(PARTS),--parts $(PARTS)) $(if $(LIMIT_S),--limit-s $(LIMIT_S))

# Other people's clients get an environment of their own: their pins are not ours.
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed
test-clients: setup $(CLIENTS_STAMP) ## OpenAI's client, guidellm, aiperf, litellm, LangChain, LlamaIndex, agent SDKs, the Vercel AI SDK against a live stack
	$(BIN)/python -m pytest tests/clients

$(CLIENTS_STAMP): tests/clients/requirements.txt tests/clients/package.json
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --only-binary :all: -r tests/clients/requirements.txt
	@mkdir -p $(CLIENTS)/node && cp tests/clients/package.json $(CLIENTS)/node
	@if command -v npm >/dev/null; then cd $(CLIENTS)/node && npm install --no-audit --no-fund; \
		else echo "npm is not on PATH: the tests of the Vercel AI SDK will be skipped"; fi
	@touch $@

KIND := $(abspath $(VENV)/kind.kubeconfig)
test-kind: kind-on-path setup ## operator and chart on a cluster of kind's, made and deleted here
	kind create cluster --name millrace-test --kubeconfig "$(KIND)" --wait 5m
	MILLRACE_TEST_KUBECONFIG="$(KIND)" $(BIN)/python -m pytest tests/envtest; status=$$?; \
		kind delete cluster --name millrace-test --kubeconfig "$(KIND)"; exit $$status

kind-on-path:
	@command -v kind >/dev/null || { echo "make test-kind needs kind, and Docker, on PATH"; exit 1; }

setup: $(STAMP)

$(STAMP): pyproject.toml $(CPP)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Millrace needs Python 3.11 to 3.13: make PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing pinned dependencies and building the C++ parts (a few minutes the first time)"
	@test -n "$(COMPILER)" || echo "no C++ compiler: the slow portable paths compute (apt-get install g++ make, then make clean)"
	$(if $(COMPILER),MILLRACE_REQUIRE_CPP=1) $(BIN)/python -m pip install --disable-pip-version-check --no-compile -e '.[engine,operator,local,dev]'
	@touch $@

PROSE := services operator kernels proto charts docs tests .github README.md CONTRIBUTING.md SECURITY.md Makefile pyproject.toml
lint: setup ## formatting, lint, words, types, import contracts, committed stubs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell $(PROSE)
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

# ---- Documentation ---------------------------------------------------------------------------------
# The site's tools get an environment of their own: nothing else needs them.
.PHONY: docs docs-pages

DOCS := build/docs-venv
DOCS_STAMP := $(DOCS)/.installed
docs: docs-pages $(DOCS_STAMP) ## the generated pages of docs/reference, then the site in build/site; broken links fail
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

docs-pages: setup ## the generated pages of docs/reference
	PYTHONPATH=. $(BIN)/python docs/reference/generate.py

# The extra `docs` alone, without Millrace: pip reads the pin from pyproject.toml.
$(DOCS_STAMP): pyproject.toml
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --disable-pip-version-check \
		$$(sed -n 's/^docs = \["\(.*\)"\]$$/\1/p' pyproject.toml)
	@touch $@

# ---- Images, chart, shell --------------------------------------------------------------------------
# services/images.sh says which variables (BUILDER, REGISTRY, PYTHON_IMAGE, TORCH_INDEX, IMAGE_FLAGS, ...) count.
.PHONY: version images test-images chart shell

version: ## the version, which pyproject.toml alone holds
	@sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml

images: ## all images, by docker, podman or buildah; ROLES="proxy scheduler" for some
	services/images.sh $(ROLES)

test-images: setup ## a stack of the images that `make images` built; skips with the reason where none can be run
	MILLRACE_TEST_IMAGES=1 $(BIN)/python -m pytest -rsP tests/images

chart: ## the chart as a package in dist/
	@command -v helm >/dev/null || { echo "make chart needs helm on PATH"; exit 1; }
	helm package charts/millrace --destination dist

shell: setup ## a shell that finds `millrace`; the same as: source .venv/bin/activate
	@PATH="$(abspath $(BIN)):$$PATH" VIRTUAL_ENV="$(abspath $(VENV))" $${SHELL:-/bin/sh}
