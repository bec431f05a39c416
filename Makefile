PYTHON ?= python3
ARGS ?=
TOOL ?= memcheck
JOBS ?= 2
QUARTER ?=

PY := .venv/bin/python
# Most of 23,000 files are never imported; those that are, are compiled then.
PIP_INSTALL := $(PY) -m pip install --no-compile -c constraints.txt
CSRC := $(wildcard csrc/*.h csrc/*/* csrc/*/*/*)

# Some images set it: each of some hundred processes that tests start would compile thousands of files anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve reproduce wheel test test-numeric test-slow test-peers check-cuda compile-cuda test-gpu sanitize lint format docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

serve: .venv/.installed ## Serve a small model with 65,536 tokens of context on port 8000 (more flags: make serve ARGS="--help")
	$(PY) -m shadowkv.serve --model smollm2-135m-64k-chat --batch 48 $(ARGS)

# In folders of its own: what an earlier build left in build/lib would go into the wheel.
wheel: .venv/.installed .venv/.installed-nvcc ## Make a wheel with the C++ and the CUDA ops, in dist: it installs where no compiler is
	rm -rf build/lib* build/bdist*
	$(PY) csrc/build_cuda.py
	SHADOWKV_CUDA_OPS=yes $(PY) -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

reproduce: .venv/.installed-eval ## Measure README's RULER table again, on a GPU: at most 10 minutes of an H200
	$(PY) -m benchmarks.reproduce --out results/reproduce $(ARGS)

# One thread each: tensors of tests are small. A worker takes up to 5 GB of memory. Files are begun in the order of
# tests/conftest.py, not those with the most tests first.
RUN_TESTS := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Kernels that PyTorch, oneDNN, MKL and our C++ have for CPUs of an instruction set.
AS_BASELINE := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE SHADOWKV_CPU_ISA=baseline
AS_AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 SHADOWKV_CPU_ISA=avx2

# Products, attention and models on CPUs, which each instruction set and number of threads computes in an order of its
# own.
NUMERIC := $(addprefix tests/ops/test_,attention_ops.py causal_convolution.py cpu_attend_selected.py \
  cpu_sketch_queries.py decode_layers.py dense_attention.py fp8_ops.py gated_delta_rule.py prefill_blocks.py quantized_blocks.py quantized_groups.py ssd.py) \
  $(addprefix tests/models/test_,experts.py families.py fp8.py packed_experts_models.py)

test: .venv/.installed-test ## Run all tests but slow ones, JOBS at a time (some: make test ARGS="tests/test_x.py -k name")
	$(RUN_TESTS) -m "not slow and not peers" $(ARGS)

# Once with two threads, on two cores.
test-numeric: .venv/.installed-test ## Run the tests of numbers once more, as CPUs without AVX and CPUs with AVX2 compute
	$(AS_BASELINE) OMP_NUM_THREADS=2 $(PY) -m pytest -m "not slow" $(NUMERIC) $(ARGS)
	$(AS_AVX2) $(RUN_TESTS) -m "not slow" $(NUMERIC) $(ARGS)

# Ray is installed for these alone: without it its tests would be skipped.
test-slow: export SHADOWKV_CLIENTS := $(CURDIR)/build/clients/bin/python
test-slow: .venv/.installed-test-slow build/clients/.installed ## Run the slow tests: nvcc, clusters of Ray, loads and kills of servers, long answers (a QUARTER of them: 0 to 3)
	$(RUN_TESTS) -m slow $(QUARTER:%=--quarter %) $(ARGS)

test-peers: .venv/.installed-test-slow ## Run vLLM's, SGLang's and llama.cpp's own tests of their servers against ours, from PyPI
	OMP_NUM_THREADS=1 $(PY) -m pytest -m peers tests/peers $(ARGS)

# What has changed since the last commit that landed; whole libraries, with every optimisation, are for make test-slow.
check-cuda: ## Compile the CUDA sources that differ from main's, or from those of the last commit, without a GPU
	@changed=$$($(PY) scripts/changed_kernels.py) && { test -z "$$changed" || $(MAKE) compile-cuda OPS="$$changed"; }

compile-cuda: .venv/.installed-nvcc
	$(PY) csrc/build_cuda.py --check $(OPS)

test-gpu: ## Build the CUDA ops and run the tests that need a GPU, with this machine's own torch
	$(PYTHON) csrc/build_cuda.py
	$(PYTHON) csrc/build_cuda.py --to build/tests tests/ops/own_codecs/attend_codecs.cu
	$(PYTHON) scripts/gpu_tests.py $(ARGS)

# Without PyTorch's cache of memory every tensor is an allocation of its own, whose bounds are then checked.
sanitize: ## Run a small case of every CUDA op under compute-sanitizer (another of its tools: make sanitize TOOL=synccheck)
	$(PYTHON) csrc/build_cuda.py
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(TOOL) --kernel-name kns=shadowkv --error-exitcode 3 \
	  $(PYTHON) -m pytest -p no:cacheprovider @tests/ops/sanitized.txt

lint: .venv/.installed-lint ## Check style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-cache
	$(PY) scripts/structure.py --check
	$(PY) -m benchmarks.figures --check
	$(PY) scripts/line_limits.py

format: .venv/.installed-lint ## Format the code and fix what ruff can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: .venv/.installed-docs ## Build the documentation's pages, in build/site
	$(PY) -m mkdocs build --strict

clean: ## Remove builds and caches (not .venv)
	rm -rf build dist shadowkv/_cuda shadowkv/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find shadowkv tests scripts training benchmarks robustness -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first: a pinned build, in place before anything that depends on it is resolved; without NumPy it warns.
# setup.py is built with the setuptools installed here: an isolated build would fetch its own.
# The ops before, where their progress is seen: pip shows nothing of a build, and finds them up to date.
.venv/.installed: pyproject.toml setup.py constraints.txt $(CSRC)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) torch numpy setuptools
	$(PY) scripts/check_cpu_install.py
	$(PY) scripts/set_up_cuda.py --no-compile -c constraints.txt
	$(PY) setup.py -q build_ext --inplace
	$(PIP_INSTALL) --no-build-isolation -e ".[$$($(PY) scripts/set_up_cuda.py --extras)]"
	touch $@

# What the installed package asks for: with -e the C++ ops would be built once more.
# In an environment of their own: some need older versions of the openai package than others.
build/clients/.installed: scripts/clients.txt
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --no-compile -r scripts/clients.txt
	touch $@

.venv/.installed-%: .venv/.installed
	$(PIP_INSTALL) 'shadowkv-engine[$*]'
	$(PY) scripts/check_cpu_install.py
	touch $@
