# Two commands: `make serve` runs the endpoint, `make test` runs the whole suite.
#
#   make serve PORT=9000 MODEL=/path/to/checkpoint CONFIG=my.yaml ARGS="--num-speculative-tokens 4"
#   make serve TORCH_INDEX=<an index that has CPU or ROCm wheels of torch>
#
# Everything is installed in .venv; nothing outside this folder is touched except the model cache.

PYTHON ?= python3
PORT ?=
MODEL ?=
CONFIG ?=
TORCH_INDEX ?=
ARGS ?=
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# The default model has a draft head here; whoever chooses anything else chooses that too.
HEAD := heads/smollm2-135m-eagle3
CHOICES := $(MODEL)$(CONFIG)$(SPECTRUE_MODEL)$(SPECTRUE_SPECULATIVE_DRAFTER)$(SPECTRUE_SPECULATIVE_DRAFT_MODEL)
CHOICES += $(filter --model% --config% --draft%,$(ARGS))
DRAFT = $(if $(strip $(CHOICES)),,$(if $(wildcard $(HEAD)/config.json),--drafter eagle3 --draft-model $(HEAD)))

# Ray turns token authentication on for clusters that it starts; tests start theirs on loopback.
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0
# Threads of the suite's many small tensors shall not spin for each other on shared cores.
TEST_ENV := OMP_WAIT_POLICY=passive
TOOLS := curl

.PHONY: help serve install install-test tools test test-slow ladder ladder-full test-gpu check format clean

help:
	@sed -n '1,7p' Makefile; echo; echo "targets: serve install tools test test-slow ladder ladder-full test-gpu check format clean"

serve: install
	@env -u RAY_AUTH_MODE $(BIN)/spectrue serve $(if $(CONFIG),--config "$(CONFIG)") \
	  $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model "$(MODEL)") $(DRAFT) $(ARGS)

install: .venv/.installed
install-test: .venv/.installed-test

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: Python 3.10 or newer is needed; pass PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "error: no venv; on Debian: apt-get install python3-venv"; exit 1; }
	@touch $@

# torch comes first and alone: which build it is decides how much is downloaded.
.venv/.torch: .venv/.created constraints.txt
	@if ! ls /dev/nvidia0 /dev/kfd >/dev/null 2>&1 && \
	  $(PIP) install --dry-run --quiet --report - $(INDEX) -c constraints.txt torch 2>/dev/null \
	    | grep -q '"name": "nvidia-'; then \
	  echo "note: this machine has no GPU, but pip finds only a CUDA build of torch (gigabytes)."; \
	  echo "      To take another: make $(or $(MAKECMDGOALS),serve) TORCH_INDEX=<index with CPU wheels of torch>"; \
	fi
	@echo "Installing torch ..."
	@$(PIP) install --quiet --progress-bar on $(INDEX) -c constraints.txt torch
	@touch $@

.venv/.installed: .venv/.torch pyproject.toml
	@echo "Installing Spectrue and what it needs ..."
	@$(PIP) install --quiet --progress-bar on $(INDEX) -c constraints.txt -e .
	@touch $@

.venv/.installed-test: .venv/.torch pyproject.toml
	@echo "Installing Spectrue with its test tools ..."
	@$(PIP) install --quiet --progress-bar on $(INDEX) -c constraints.txt -e '.[test]'
	@touch $@ .venv/.installed

tools:
	@tests/fetch_tools.sh .cache/tools $(TOOLS)

# Triton's change of default: kernels are built and tested with fused multiply-adds.
export TRITON_DEFAULT_FP_FUSION ?= 1
KERNEL_TESTS = $(TEST_ENV) $(BIN)/python -m pytest tests/kernels -p no:cacheprovider -q

IN_PARALLEL = -n $(TEST_PROCESSES)

# Tests that start a Ray come alone: two at once, beside others, take longer to start than they wait.
test: install-test tools
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow" $(IN_PARALLEL) --ignore tests/integration $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,$(TEST_ENV) $(BIN)/python -m pytest -m "not slow" tests/integration)
	$(MAKE) ladder

# The kernels where there is no GPU: in Triton's interpreter, and as AMD code executed on the CPU.
# (Their builds for every architecture, and the tests of what executes them, are in `make test`.)
# Each backend in a process of its own, two at a time.
ladder: install-test
	@set -e; \
	( SPECTRUE_TEST_BACKEND=gfx942 $(KERNEL_TESTS) -m core ) & first=$$!; \
	( TRITON_INTERPRET=1 SPECTRUE_TEST_BACKEND=interpret $(KERNEL_TESTS) -m core -W ignore \
	  && SPECTRUE_TEST_BACKEND=gfx950 $(KERNEL_TESTS) -m core \
	  && SPECTRUE_TEST_BACKEND=gfx90a $(KERNEL_TESTS) -m core ) & second=$$!; \
	failed=0; wait $$first || failed=1; wait $$second || failed=1; exit $$failed

# Everything that the ladder leaves out: hours.
ladder-full: install-test
	$(TEST_ENV) $(BIN)/python -m pytest tests/amdgcn tests/kernels -q $(IN_PARALLEL)
	TRITON_INTERPRET=1 SPECTRUE_TEST_BACKEND=interpret $(KERNEL_TESTS) -W ignore
	for arch in gfx942 gfx950 gfx90a; do SPECTRUE_TEST_BACKEND=$$arch $(KERNEL_TESTS) || exit 1; done

# On a machine with a GPU: kernels and engine there.
test-gpu: install-test
	SPECTRUE_TEST_BACKEND=cuda $(KERNEL_TESTS) --ignore tests/kernels/test_builds.py -m "not slow"
	SPECTRUE_TEST_DEVICE=cuda $(TEST_ENV) $(BIN)/python -m pytest tests/workers -q -m "not slow"

test-slow: install-test tools
	$(TEST_ENV) $(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

check: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=.typing $(BIN)/mypy tests
	$(MAKE) test

format: install-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
