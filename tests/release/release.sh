#!/usr/bin/env bash
# Builds into out/release what a release uploads, and checks it as users will get it. Run it by `make release`, with all committed.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=$PWD/out/release TOOLS=$PWD/target/aarch64 POLICY=manylinux_2_28
export PATH=$PWD/.venv/bin:$PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$OUT"

say() { printf '\n== %s\n' "$*"; }

# wheel TARGET: an abi3 wheel with the CUDA kernels, linked by zig against the glibc of $POLICY
wheel() {
  say "wheel for $1"
  EVERMOE_CUDA=require maturin build --release --quiet --zig --compatibility $POLICY --target "$1" --out "$OUT"
}

# A rustc that has the standard library for aarch64: this machine's, after `rustup target add`, else Debian's.
aarch64_rustc() {
  local rustc=${RUSTC:-rustc}
  if [ ! -d "$($rustc --print target-libdir --target aarch64-unknown-linux-gnu)" ]; then
    command -v apt-get > /dev/null || return 1
    tests/release/debian.sh "$TOOLS" "rustc libstd-rust-dev:arm64 python3:arm64 qemu-user" rustc
    rustc=$TOOLS/bin/rustc
  fi
  echo "$rustc"
}

# The extension module for aarch64 must import under qemu, and compute the same results as the one for x86-64.
check_aarch64() {
  local root=$TOOLS/root version
  if [ ! -d "$root" ]; then
    echo "not imported: this needs an emulator and a Python for aarch64, which come with Debian's rustc only"
    return
  fi
  version=$(qemu -c 'import platform; print(platform.python_version())')
  pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$version" \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 -d "$work" -c constraints.txt numpy
  for platform in x86_64 aarch64; do python -m zipfile -e "$OUT"/*_$platform.whl "$work/$platform"; done
  python -m zipfile -e "$work"/numpy-*.whl "$work/numpy"
  python tests/release/native_results.py "$work/x86_64" > "$work/expected"
  PYTHONPATH=$work/numpy qemu tests/release/native_results.py "$work/aarch64" > "$work/got"
  diff "$work/expected" "$work/got"
  echo "aarch64 under qemu: imports, and $(wc -l < "$work/got") results as on x86-64"
}

qemu() { "$TOOLS/root/usr/bin/qemu-aarch64" -L "$TOOLS/root" "$TOOLS/root/usr/bin/python3" "$@"; }

# What a new user does: an environment and a folder that know nothing of this tree.
try_as_user() {
  local python=$work/user/bin/python
  python3 -m venv "$work/user"
  mkdir "$work/empty" "$work/home"
  "$work/user/bin/pip" install --quiet --disable-pip-version-check "evermoe[cli,plot] @ file://$(ls "$OUT"/*_x86_64.whl)"
  user() { (cd "$work/empty" && env -i HOME="$work/home" PATH="$work/user/bin:/usr/bin:/bin" "$@"); }
  user "$python" -c "import evermoe, evermoe.ops as ops, sys; print('evermoe', evermoe.__version__, 'of', evermoe.__file__)
sys.exit(not (evermoe.__file__.startswith('$work/user/') and ops.has_cuda_kernels()))"
  user evermoe info
  user evermoe demo --plot demo.png
  test -s "$work/empty/demo.png"
}

say "crate"
cargo package --quiet
mkdir -p "$OUT"
cp "$(ls -t "${CARGO_TARGET_DIR:-target}"/package/evermoe-*.crate | head -n 1)" "$OUT"
say "sdist, and a wheel from it"
maturin sdist --out "$OUT"
EVERMOE_CUDA=off CARGO_TARGET_DIR=$PWD/target pip wheel --quiet --disable-pip-version-check --no-deps -w "$work" "$OUT"/*.tar.gz
wheel x86_64-unknown-linux-gnu
if rustc=$(aarch64_rustc); then
  RUSTC=$rustc wheel aarch64-unknown-linux-gnu
  check_aarch64
else
  echo "SKIPPED: no wheel for aarch64, for want of Rust's standard library for it: rustup target add aarch64-unknown-linux-gnu"
fi

say "checks"
twine check --strict "$OUT"/*.whl "$OUT"/*.tar.gz
for wheel in "$OUT"/*.whl; do
  auditwheel show "$wheel" | tee "$work/audit"
  tr '\n' ' ' < "$work/audit" | grep -q "consistent with the following platform tag: \"$POLICY"
done
say "in a fresh environment"
try_as_user
say "built and checked, in $OUT"
ls -l "$OUT"
