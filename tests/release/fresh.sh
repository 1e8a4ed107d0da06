#!/usr/bin/env bash
# Checks that a machine with torch and numpy needs only out/wheels of `make wheel`: creates a new environment with only these
# two, installs the wheels without an index, and uses them.     fresh.sh [PYTHON]
# TORCH is the requirement for torch, TORCH_INDEX an index that has it, such as one of builds without CUDA.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${1:-python3.12} ROOT=$PWD WHEELS=$PWD/out/wheels
pinned() { grep -m1 "^$1==" constraints.txt; }
TORCH=${TORCH:-$(pinned torch)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/empty" "$work/home"
say() { printf '\n== %s\n' "$*"; }

# Runs a command that sees neither this tree, nor this user's environment, nor a cache.
user() { (cd "$work/empty" && env -i HOME="$work/home" PATH="$work/env/bin:/usr/bin:/bin" "$@"); }

say "$("$PYTHON" --version) with $TORCH and $(pinned numpy) alone"
"$PYTHON" -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" "$(pinned numpy)"
user pip freeze > "$work/before"

say "evermoe and what it needs, from $WHEELS alone"
user pip --isolated install --quiet --no-index --find-links "$WHEELS" "evermoe[cli,test]"
user pip check
user pip freeze > "$work/after"
if ! diff <(grep -Fx -f "$work/before" "$work/after") "$work/before"; then
  echo "expected no change of the packages that were installed before" >&2
  exit 1
fi
user python - "$work/env" <<'IMPORT'
import sys
import evermoe
from evermoe import ops
from evermoe.session.session import Session
assert evermoe.__file__.startswith(sys.argv[1]), evermoe.__file__
assert ops.has_cuda_kernels() or "+cpu" in __import__("torch").__version__, "the wheel has no CUDA kernels"
print("evermoe", evermoe.__version__, "of", evermoe.__file__)
IMPORT
user evermoe info

tests() { user python -m pytest -q -p no:cacheprovider -c "$ROOT/pyproject.toml" --rootdir "$ROOT" "$@"; }

say "the documented examples of the ops"
tests -m "not gpu" "$ROOT/tests/python/ops" -k example
for example in "$ROOT"/examples/0[12]_*.py; do user python "$example"; done

say "sessions of 3 workers, one of which is killed"
tests -m "not gpu" "$ROOT/tests/python/session/failures/test_session.py" -k "killed_at and forward"

say "all that make test-gpu runs can be imported"
mapfile -t paths < <(cd tests/python && python3 -c "from support.on_gpu import TESTS; print(*TESTS, sep='\n')")
tests -m gpu --collect-only "${paths[@]/#/$ROOT/tests/python/}" | tail -n 1
