# Each target sets up what it needs, in .venv, and asks nothing.
# PYTHON=python3.12 chooses the interpreter; `make test-gpu` uses a PYTHON as it is, installing nothing.
VENV   := .venv
BASE   := $(or $(PYTHON),python3)
MINOR  := $(shell $(BASE) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt
PROTOS := $(wildcard protos/preamble/v1/*.proto protos/foreign/*.proto)
# Two at a time, file by file: what waits for a server leaves the processor to what computes.
PYTEST := $(VENV)/bin/python -m pytest -n 2 --dist loadfile
# The environment in steps: an interpreter, what running needs, what developing needs; then the stubs.
INTERPRETER := $(VENV)/bin/python$(MINOR)
RUNTIME     := $(VENV)/.runtime
DEVELOPMENT := $(VENV)/.development
STUBS       := protos/preamble/v1/generation_pb2.py
LEARNED     := build/demo/learned
# What is written in C, for CPUs; without it the same is done in torch. gpt/cpu/build.py says how.
KERNELS     := gpt/cpu/libkernels.so

.DEFAULT_GOAL := help
.PHONY: setup demo serve-demo test test-slow test-gpu soak bench bench-gpu bench-peers peers check tools protos wheel kernels clean help

setup: $(DEVELOPMENT) $(STUBS) $(KERNELS)  ## installs everything that developing needs
demo: $(LEARNED)  ## p-tunes the small model that comes along, serves it, and talks to it
	@$(VENV)/bin/python -m examples.demo
serve-demo: $(LEARNED)  ## serves that model until Ctrl-C
	$(VENV)/bin/preamble serve examples/demo/checkpoint --adapters build/demo/adapters
test: setup  ## runs the tests (five minutes at most on two cores)
	$(PYTEST)
test-slow: setup tools  ## runs the long drills; prints the minutes of each
	$(PYTEST) -m slow
test-gpu: $(if $(PYTHON),,setup)  ## runs the tests that need a CUDA device
	$(or $(PYTHON),$(VENV)/bin/python) -m pytest -m gpu -W default
soak: setup  ## runs what is longer than any suite
	$(VENV)/bin/python -m pytest -m soak
bench: setup  ## measures every promise on speed and size, beside what others do
	$(VENV)/bin/python -m bench
bench-gpu: $(if $(PYTHON),,setup)  ## those of a CUDA device
	$(or $(PYTHON),$(VENV)/bin/python) -m bench --device cuda
check: setup  ## lint, format, types, protos, house rules
	$(VENV)/bin/ruff check && $(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/buf lint protos
	$(VENV)/bin/buf breaking protos --against tests/golden/preamble_v1.binpb  # As they were released.
	$(VENV)/bin/python -m pytest -q tests/repository/test_tidy.py
peers:  ## installs the engines that `make bench-peers` compares with, under build/peers
	bench/peers_install.sh
bench-peers: setup  ## times generating beside those engines
	$(VENV)/bin/python -m bench --only peers
tools: setup  ## installs what only the slow drills need
	@$(PIP) --no-deps megatron-core triton==3.6.0
	@test -d build/tgis || $(PIP) --no-deps --target build/tgis vllm-tgis-adapter==0.10.0
	@test -d build/lm_eval || { $(BASE) -m venv build/lm_eval && build/lm_eval/bin/pip install -q 'lm_eval[api]==0.4.13' transformers; }
	@deploy/prometheus/install.sh
	@tests/install_chromium.sh
	@test -d build/node || timeout 100 npm install --silent --no-fund --prefix build/node @grpc/grpc-js@1.14 @grpc/proto-loader@0.8 || echo 'without npm and its registry, the test of a client in Node is skipped'
protos: setup  ## compiles the protos into Python stubs
kernels: $(KERNELS)  ## compiles what is written in C, where there is a compiler
wheel: setup  ## builds dist/preamble-*.whl
	rm -rf build/lib build/bdist.* && $(VENV)/bin/python -m pip wheel -q --no-deps -w dist .
clean:  ## removes what was built, but leaves .venv
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis protos/preamble/v1/*_pb2* protos/foreign/*.binpb $(KERNELS)
help:  ## lists the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INTERPRETER):
	@$(BASE) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("preamble needs Python 3.11 to 3.13, and $(BASE) is $(MINOR); try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@$(BASE) -m venv --clear $(VENV) || { rm -f $@; exit 1; }
$(RUNTIME): pyproject.toml constraints.txt | $(INTERPRETER)
	@echo 'installing what $(VENV) lacks: torch (a download of 0.2 GB, or 3 GB where its CUDA build comes) and 0.1 GB of other packages'
	@$(PIP) -e . grpcio-tools && touch $@
$(DEVELOPMENT): $(RUNTIME)
	@echo 'installing what $(VENV) lacks: 0.1 GB of packages for tests and checks'
	@$(PIP) -e '.[dev]' && touch $@
$(STUBS): $(PROTOS) protos/build.py | $(RUNTIME)
	@$(VENV)/bin/python protos/build.py && touch $@
$(KERNELS): $(wildcard gpt/cpu/src/*) gpt/cpu/build.py
	@$(BASE) gpt/cpu/build.py || :
$(LEARNED): examples/demo/tune.yaml $(wildcard examples/demo/checkpoint/*/*/*) | $(RUNTIME) $(STUBS)
	@rm -rf build/demo && mkdir -p build/demo/adapters
	$(VENV)/bin/python -m examples.demo.tasks --task mood --count 400 > build/demo/mood.jsonl
	$(VENV)/bin/python -m examples.demo.tasks --task mood --count 200 --split held-out > build/demo/mood-held-out.jsonl
	$(VENV)/bin/preamble tune examples/demo/tune.yaml && touch $@
