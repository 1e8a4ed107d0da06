# `make` lists the commands.
SHELL := /bin/bash
PYTHON ?= python3
# Tests that run concurrently: three for two processors, as most of them wait for other processes, but at most 12.
TEST_PROCESSES ?= $(shell nproc | awk '{ n = int($$1 * 3 / 2); print n < 12 ? n : 12 }')
VENV := .venv
# The Python version of the machine with a GPU, for which `make wheel` collects wheels.
GPU_PYTHON ?= 3.12
# The same Python version on this machine.
FRESH_PYTHON ?= python$(GPU_PYTHON)
# The oldest and the newest supported torch.
TORCH_VERSIONS ?= 2.10.0 2.15.0
BIN := $(VENV)/bin
MUTANTS := target/tools/bin/cargo-mutants
MUTANTS_VERSION := 27.1.0
S3_SERVER := target/tools/bin/s3s-fs
S3_SERVER_VERSION := 0.14.1
AZURE_SERVER := target/tools/node_modules/.bin/azurite-blob
AZURE_SERVER_VERSION := 3.35.0
STAMPS := $(VENV)/.stamps
SOURCES := $(shell find src kernels -type f) build.rs Cargo.toml Cargo.lock pyproject.toml
# Rust tests run no kernels, and compiling all kernels takes longer than compiling the crate.
WITHOUT_KERNELS = EVERMOE_CUDA=off
# Rust tests reuse the dependencies that `make setup` has compiled, and build the crate with the checks of tests.
AS_TESTS := --profile develop $(addprefix --config profile.develop.package.evermoe.,opt-level=1 debug-assertions=true overflow-checks=true)
RUST_TEST_OPTIONS = --quiet $(AS_TESTS) --features object-store,ucx
RUST_TEST_SOURCES := $(shell find tests -name '*.rs' -not -path 'tests/python/*')
# Exploring the models of the protocol takes minutes. So do simulated jobs, tests/simulate/ of the program `all`.
SLOW_RUST_TESTS := protocol_model
RUST_TESTS := --lib $(addprefix --test ,$(filter-out $(SLOW_RUST_TESTS),$(shell sed -n '/^\[\[test\]\]/{n;s/name = "\(.*\)"/\1/p}' Cargo.toml)))
# `make test` runs the kernels' tests only if the branch has changed the kernels or their emulator.
KERNELS_CHANGED = $(shell git diff --quiet $$(git merge-base HEAD origin/main 2>/dev/null || echo HEAD) -- kernels src/cuda tests/emulator || echo yes)
PYTEST = $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal
# A profile for Clippy alone, so that `make lint` does not cause a rebuild of the package; `develop` would share artifacts with setup.
CLIPPY_PROFILE ?= dev
# The UCX library that Rust tests load, if its package is installed.
WITH_UCX = EVERMOE_UCX=$(CURDIR)/$(firstword $(wildcard $(BIN)/../lib/python3*/site-packages/libucx/lib/libucp.so.0))
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
# Tests start thousands of processes: without cached bytecode each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup package demo test test-rust test-python test-all test-rust-rest test-python-rest test-long test-failures campaign test-torch check lint fmt kernels bench test-gpu bench-gpu gpu-contact gpu-node wheel check-wheel release coverage docs evidence clean

help: ## List the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMPS)/tools: requirements-dev.txt constraints.txt overrides.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check uv -c constraints.txt
	$(BIN)/uv pip install --quiet -r requirements-dev.txt -c constraints.txt --overrides overrides.txt
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/package: $(STAMPS)/tools $(SOURCES)
	$(BIN)/maturin develop --profile develop --quiet
	@touch $@

$(STAMPS)/rust-tests: $(STAMPS)/tools $(SOURCES) $(RUST_TEST_SOURCES)
	$(WITHOUT_KERNELS) cargo test --no-run $(RUST_TEST_OPTIONS) $(RUST_TESTS)
	@touch $@

package: $(STAMPS)/package

setup: package $(STAMPS)/rust-tests ## Install all tools into .venv, and build evermoe with its CUDA kernels and the Rust tests

demo: package ## Train a small MoE on four workers, kill one, recover, then admit a new one
	$(BIN)/evermoe demo --json out/demo.json --plot out/demo.png

test: test-rust test-python ## Run the tests for daily work: at most five minutes on two cores

test-rust: $(STAMPS)/rust-tests
	$(WITH_UCX) $(WITHOUT_KERNELS) cargo test $(RUST_TEST_OPTIONS) $(RUST_TESTS) -- --skip simulate::

test-python: package
	$(PYTEST) -m "not gpu and not long and $(if $(KERNELS_CHANGED),(kernels or not full),not full)"

test-all: test test-rust-rest test-python-rest ## All tests that need no GPU, except the long ones; CI runs these

test-rust-rest: package
	$(WITH_UCX) $(WITHOUT_KERNELS) cargo test $(RUST_TEST_OPTIONS) $(addprefix --test ,$(SLOW_RUST_TESTS))
	$(WITHOUT_KERNELS) cargo test $(RUST_TEST_OPTIONS) --test all simulate::
	$(WITHOUT_KERNELS) cargo test $(RUST_TEST_OPTIONS) --doc

test-python-rest: package $(S3_SERVER)
	$(PYTEST) -m "not gpu and not long and full$(if $(KERNELS_CHANGED), and not kernels)"

# A real S3 server for tests, which needs Rust 1.92. An unoptimized build does not slow the tests.
$(S3_SERVER):
	CARGO_PROFILE_RELEASE_OPT_LEVEL=0 cargo install --quiet --locked --features binary --root target/tools \
	  s3s-fs@$(S3_SERVER_VERSION)

$(AZURE_SERVER):
	npm install --silent --no-audit --no-fund --prefix target/tools azurite@$(AZURE_SERVER_VERSION)

test-long: package $(S3_SERVER) $(AZURE_SERVER) ## All tests that need no GPU, random kills, and the oldest and the newest torch: an hour on two cores
	$(WITH_UCX) $(WITHOUT_KERNELS) cargo test --quiet --features object-store,ucx --profile long --lib --bins --tests -- --include-ignored --test-threads 1
	$(WITHOUT_KERNELS) cargo test $(RUST_TEST_OPTIONS) --doc
	$(PYTEST) -m "not gpu"
	$(BIN)/python tests/python/support/soak.py --runs 20
	$(BIN)/python tests/python/support/schedules.py --runs 20 --first-seed 1000
	$(MAKE) test-torch

test-failures: package ## Check 200 random failure schedules over all presets by the records of the workers: an hour
	$(BIN)/python tests/python/support/schedules.py --runs 200

campaign: package ## Inject faults of each kind in real jobs under each preset, and count what is found, named and lost: half an hour
	$(BIN)/python tests/python/support/campaign.py --markdown out/campaign.md

$(MUTANTS):
	cargo install --quiet --locked --root target/tools cargo-mutants@$(MUTANTS_VERSION)

test-mutants: $(MUTANTS) ## Plant mistakes in the engine and the planners, one at a time; FOLDERS=engine for those of src/engine
	$(BIN)/python tests/mutants.py $(FOLDERS)

test-torch: package ## Test this build on the oldest and the newest supported torch, or on TORCH_VERSIONS
	for version in $(TORCH_VERSIONS); do tests/on_torch.sh $$version || exit 1; done

check: lint test kernels ## Lint, test and check the kernels: run before a commit

lint: package ## Check formatting, clippy, ruff, types, dead code, unused dependencies and words that are gone
	cargo fmt --check
	$(WITHOUT_KERNELS) cargo clippy --quiet --profile $(CLIPPY_PROFILE) --all-targets --all-features -- -D warnings
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/vulture
	$(BIN)/cargo-shear
	$(BIN)/python tests/prose.py

kernels: package ## Check that the build has the CUDA kernels; without nvcc it has none
	$(BIN)/python -c "from evermoe.ops.cache import has_cuda_kernels; assert has_cuda_kernels(), 'the build has no CUDA kernels'"

docs: $(STAMPS)/tools ## Build the documentation, strictly, into out/docs, and that of the crate
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -d out/docs
	RUSTDOCFLAGS="-D warnings" $(WITHOUT_KERNELS) cargo doc --quiet --no-deps --profile develop --features object-store,ucx

evidence: package ## Regenerate docs/evidence.md, which compares the papers' numbers with ours (minutes)
	$(BIN)/python -m benches.papers all --slow --markdown docs/evidence.md

fmt: $(STAMPS)/tools ## Format all sources
	cargo fmt
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: package ## Run the benches on this CPU: ops, planners, optimizers, sessions, presets, snapshots, messages, recovery, checkpoints, profiler, simulation
	$(BIN)/python benches/bench_ops.py
	$(BIN)/python benches/bench_planning.py
	$(BIN)/python benches/bench_growth.py
	$(BIN)/python benches/bench_optim.py
	$(BIN)/python benches/bench_replica.py
	$(BIN)/python benches/bench_session.py
	$(BIN)/python benches/bench_norm.py
	$(BIN)/python benches/bench_step.py
	$(BIN)/python benches/bench_presets.py
	$(BIN)/python benches/bench_overlap.py
	$(BIN)/python benches/bench_transformers.py
	$(BIN)/python benches/bench_transport.py
	$(BIN)/python benches/bench_collectives.py
	$(BIN)/python benches/bench_account.py
	$(BIN)/python benches/bench_recovery.py
	$(BIN)/python benches/bench_pipeline_recovery.py
	$(BIN)/python benches/bench_durable.py
	$(BIN)/python benches/bench_checkpoints.py
	$(BIN)/python benches/kernel_table.py
	$(BIN)/python benches/bench_profile.py
	$(BIN)/python benches/bench_ettr.py --models gpt-l-moe mixtral-8x7b

# Both use the python on PATH if there is no .venv, and the wheels of `make wheel` if evermoe is not installed.
test-gpu: ## Run the tests that need a CUDA device, then some under compute-sanitizer; JSON in out/gpu
	$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) tests/python/support/on_gpu.py test

bench-gpu: ## Run the benches on a CUDA device; JSON in out/gpu
	$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) tests/python/support/on_gpu.py bench

gpu-contact: ## First run on one GPU: the tests, then kernels, copies and real NCCL, in 10 minutes; JSON in out/gpu
	$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) tests/python/support/on_gpu.py contact

gpu-node: ## First run on a node of several GPUs, in 10 minutes; JSON in out/gpu
	$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) tests/python/support/on_gpu.py node

wheel: package ## Build the abi3 wheel into out/wheels, with the wheels that a machine with torch lacks (GPU_PYTHON=3.12)
	rm -rf out/wheels
	$(BIN)/maturin build --release --quiet --out out/wheels
	$(BIN)/python tests/release/carried.py > out/wheels/requirements.txt
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
	  -d out/wheels -r out/wheels/requirements.txt

check-wheel: wheel ## Test the wheels of `make wheel` in a new environment with only torch and numpy: ops, sessions, a kill (minutes)
	tests/release/fresh.sh $(FRESH_PYTHON)

release: package ## Build the files of a release into out/release, and check them as users install them
	tests/release/release.sh
	$(MAKE) check-wheel

coverage: package ## Measure the coverage of the tests in Python and Rust; tables and HTML in out/coverage
	tests/release/coverage.sh

clean: ## Remove everything that was built or installed
	rm -rf $(VENV) target out python/evermoe/*.so
