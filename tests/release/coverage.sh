#!/usr/bin/env bash
# Measures what the tests execute: Python by coverage.py in every process, Rust by the compiler's counters, in cargo's tests
# and in the extension module under Python's. Tables, HTML in out/coverage.   coverage.sh [pytest arguments]
# RUST_TESTS narrows cargo's: RUST_TESTS="--test all"
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=$PWD/out/coverage TARGET=${CARGO_TARGET_DIR:-$PWD/target}/coverage MODULE=python/evermoe/_native.abi3.so
export PATH=$PWD/.venv/bin:$PATH LLVM_PROFILE_FILE="$OUT/profiles/%p-%m%c.profraw"
rm -rf "$OUT"
mkdir -p "$OUT/profiles"

# The compiler's own readers of counters (`rustup component add llvm-tools`), else Debian's of the same LLVM.
HOST=$(rustc -vV | sed -n 's/^host: //p')
llvm=$(rustc -vV | sed -n 's/^LLVM version: \([0-9]*\).*/\1/p')
reader=$(rustc --print sysroot)/lib/rustlib/$HOST/bin suffix=
if [ ! -x "$reader/llvm-cov" ]; then
  suffix=-$llvm reader=$TARGET/llvm/bin
  tests/release/debian.sh "$TARGET/llvm" "llvm-$llvm" "llvm-cov-$llvm llvm-profdata-$llvm"
fi

# The counters live in a mapped file (%c), so what a process did before it was killed is measured, too.
# A target that is named keeps them out of build scripts and of macros, which the compiler itself loads.
FLAGS="-C instrument-coverage -C llvm-args=-runtime-counter-relocation"
build() { RUSTFLAGS=$FLAGS CARGO_TARGET_DIR=$TARGET CARGO_BUILD_TARGET=$HOST CARGO_PROFILE_RELEASE_STRIP=none cargo "$@"; }
build test ${RUST_TESTS:-} --no-run --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' > "$OUT/binaries"
build test ${RUST_TESTS:-} --quiet > "$OUT/cargo-test.log" || { tail -n 40 "$OUT/cargo-test.log"; exit 1; }
build build --release --quiet --features python
cp "$MODULE" "$OUT/plain.so"
trap 'mv "$OUT/plain.so" "$MODULE"' EXIT
install "$TARGET/$HOST/release/libevermoe.so" "$MODULE"
realpath "$TARGET/$HOST/release/libevermoe.so" >> "$OUT/binaries"
python -m pytest -q -m "not gpu" --timeout 600 --cov --cov-report= "$@" || failed=1

find "$OUT/profiles" -name '*.profraw' > "$OUT/profiles/list"
"$reader/llvm-profdata$suffix" merge --sparse --failure-mode=all --input-files "$OUT/profiles/list" -o "$OUT/rust.data"
mapfile -t binaries < <(sed 's/^/--object=/' "$OUT/binaries")
cov() {
  "$reader/llvm-cov$suffix" "$1" "${binaries[@]}" --instr-profile="$OUT/rust.data" \
    --ignore-filename-regex='/(\.cargo|rustc|tests|target)/' "${@:2}" 2> "$OUT/llvm-cov.log"
}
cov report > "$OUT/rust.txt"
cov show --format=html --output-dir="$OUT/rust" > /dev/null
python -m coverage html --quiet
python -m coverage report > "$OUT/python.txt"
rm -rf "$OUT/profiles"
sed -n 's/^TOTAL/Python (statements, missed, branches, partly, covered):/p' "$OUT/python.txt"
sed -n '1p; $p' "$OUT/rust.txt"
exit "${failed:-0}"
