# One command a need. `make` alone lists them.
SHELL := /bin/bash
PYTHON ?= python3
# Tests that run side by side: three for two processors, as most of them wait for others, but no more than 12.
TEST_PROCESSES ?= $(shell nproc | awk '{ n = int($$1 * 3 / 2); print n < 12 ? n : 12 }')
VENV := .venv
# The Python of the machine with a GPU, which `make wheel` packs for.
GPU_PYTHON ?= 3.12
# The same Python, here.
FRESH_PYTHON ?= python$(GPU_PYTHON)
# The oldest and the newest torch that is supported.
TORCH_VERSIONS ?= 2.10.0 2.15.0
BIN := $(VENV)/bin
S3_SERVER := target/tools/bin/s3s-fs
S3_SERVER_VERSION := 0.14.1
AZURE_SERVER := target/tools/node_modules/.bin/azurite-blob
AZURE_SERVER_VERSION := 3.35.0
STAMPS := $(VENV)/.stamps
SOURCES := $(shell find src kernels -type f) build.rs Cargo.toml Cargo.lock pyproject.toml
# Tests in Rust run no kernel, and to compile them all takes longer than the crate does.
WITHOUT_KERNELS = EVERMOE_CUDA=off
# Tests in Rust use the dependencies that `make setup` has compiled, and check own code as tests do.
AS_TESTS := --profile develop $(addprefix --config profile.develop.package.evermoe.,opt-level=1 debug-assertions=true overflow-checks=true)
# Clippy's own, so that the package is not built anew after each `make lint`; `develop` shares what setup has compiled.
CLIPPY_PROFILE ?= dev
# The library that Rust's tests load, once the package is installed.
WITH_UCX = EVERMOE_UCX=$(CURDIR)/$(firstword $(wildcard $(BIN)/../lib/python3*/site-packages/libucx/lib/libucp.so.0))
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
# Tests start thousands of processes: without kept bytecode each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-rust test-python test-long test-failures test-torch check lint fmt kernels bench test-gpu bench-gpu wheel check-wheel release coverage docs evidence clean

help: ## List the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMPS)/tools: requirements-dev.txt constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check uv -c constraints.txt
	$(BIN)/uv pip install --quiet -r requirements-dev.txt -c constraints.txt
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/package: $(STAMPS)/tools $(SOURCES)
	$(BIN)/maturin develop --profile develop --quiet
	@touch $@

setup: $(STAMPS)/package ## Install all tools into .venv and build evermoe, CUDA kernels included

demo: setup ## Train a small MoE on 4 workers, kill one, recover, let one join
	$(BIN)/evermoe demo --json out/demo.json --plot out/demo.png

test: test-rust test-python ## The tests that need no GPU, but for the long ones

test-rust: setup
	$(WITH_UCX) $(WITHOUT_KERNELS) cargo test --quiet $(AS_TESTS) --features object-store,ucx

# A real server of S3 for tests, which needs Rust 1.92. Tests take no longer with it than with an optimised one.
$(S3_SERVER):
	CARGO_PROFILE_RELEASE_OPT_LEVEL=0 cargo install --quiet --locked --features binary --root target/tools \
	  s3s-fs@$(S3_SERVER_VERSION)

$(AZURE_SERVER):
	npm install --silent --no-audit --no-fund --prefix target/tools azurite@$(AZURE_SERVER_VERSION)

test-python: setup $(S3_SERVER)
	$(BIN)/python -m pytest -q -m "not gpu and not long" -n $(TEST_PROCESSES) --dist worksteal

test-long: setup $(S3_SERVER) $(AZURE_SERVER) ## Every test that needs no GPU, random kills, and the oldest and the newest torch: an hour on 2 cores
	$(WITH_UCX) $(WITHOUT_KERNELS) cargo test --quiet --features object-store,ucx --profile long --lib --bins --tests -- --include-ignored --test-threads 1
	$(WITHOUT_KERNELS) cargo test --quiet $(AS_TESTS) --features object-store,ucx --doc
	$(BIN)/python -m pytest -q -m "not gpu" -n $(TEST_PROCESSES) --dist worksteal
	$(BIN)/python tests/python/support/soak.py --runs 20
	$(BIN)/python tests/python/support/schedules.py --runs 20 --first-seed 1000
	$(MAKE) test-torch

test-failures: setup ## 200 random schedules of failures over all presets, judged by what the workers record: an hour
	$(BIN)/python tests/python/support/schedules.py --runs 200

test-torch: setup ## This very build on the oldest and the newest supported torch, or TORCH_VERSIONS
	for version in $(TORCH_VERSIONS); do tests/on_torch.sh $$version || exit 1; done

check: setup lint test kernels ## Everything that must hold before a commit

lint: setup ## Formatting, clippy, ruff, types, dead code, unused dependencies
	cargo fmt --check
	$(WITHOUT_KERNELS) cargo clippy --quiet --profile $(CLIPPY_PROFILE) --all-targets --all-features -- -D warnings
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/vulture
	$(BIN)/cargo-shear

kernels: setup ## Whether the build has every CUDA kernel; it has none without nvcc
	$(BIN)/python -c "import evermoe.ops as o; assert o.has_cuda_kernels(), 'the build has no CUDA kernels'"

docs: $(STAMPS)/tools ## Build the documentation, strictly, into out/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -d out/docs

evidence: setup ## Write docs/evidence.md anew: the papers' numbers beside ours (minutes)
	$(BIN)/evermoe reproduce all --slow --markdown docs/evidence.md

fmt: setup ## Format all sources
	cargo fmt
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: setup ## Ratios to plain torch and memcpy; planners beside EPLB; how a recovery grows; a step with and without copies, by preset; snapshots beside compute; messages beside iperf3; recovery by phase; checkpoints on disk; the profiler; simulated training time
	$(BIN)/python benches/bench_ops.py
	$(BIN)/python benches/bench_planning.py
	$(BIN)/python benches/bench_growth.py
	$(BIN)/python benches/bench_optim.py
	$(BIN)/python benches/bench_replica.py
	$(BIN)/python benches/bench_session.py
	$(BIN)/python benches/bench_presets.py
	$(BIN)/python benches/bench_overlap.py
	$(BIN)/python benches/bench_transformers.py
	$(BIN)/python benches/bench_transport.py
	$(BIN)/python benches/bench_account.py
	$(BIN)/python benches/bench_recovery.py
	$(BIN)/python benches/bench_pipeline_recovery.py
	$(BIN)/python benches/bench_durable.py
	$(BIN)/python benches/bench_checkpoints.py
	$(BIN)/python benches/kernel_table.py
	$(BIN)/python benches/bench_profile.py
	$(BIN)/python benches/bench_ettr.py --models gpt-l-moe mixtral-8x7b

# Both run with the python on PATH where there is no .venv, and with the wheels of `make wheel` where there is no evermoe.
test-gpu: ## The tests that need a CUDA device, then some under compute-sanitizer; JSON in out/gpu
	$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) tests/python/support/on_gpu.py test

bench-gpu: ## The benches on a CUDA device; JSON in out/gpu
	$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) tests/python/support/on_gpu.py bench

wheel: setup ## Build the abi3 wheel into out/wheels, with all that a machine with torch lacks (GPU_PYTHON=3.12)
	rm -rf out/wheels
	$(BIN)/maturin build --release --quiet --out out/wheels
	$(BIN)/python tests/release/carried.py > out/wheels/requirements.txt
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
	  -d out/wheels -r out/wheels/requirements.txt

check-wheel: wheel ## The wheels of `make wheel` in a new environment with torch and numpy alone: ops, sessions, a kill (minutes)
	tests/release/fresh.sh $(FRESH_PYTHON)

release: setup ## Build what a release uploads into out/release, and check it as its users will get it
	tests/release/release.sh
	$(MAKE) check-wheel

coverage: setup ## What the tests execute, in Python and Rust; tables and HTML in out/coverage
	tests/release/coverage.sh

clean: ## Remove everything that was built or installed
	rm -rf $(VENV) target out python/evermoe/*.so
