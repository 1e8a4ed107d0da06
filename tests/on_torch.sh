#!/usr/bin/env bash
# Runs the ops, and a few failures, of the very build in this tree on another torch: tests/on_torch.sh 2.10.0
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1
venv=.venv-torch-$version
if [ ! -e "$venv/.ready" ]; then
  python3 -m venv "$venv"
  .venv/bin/uv pip install --quiet --python "$venv/bin/python" "torch==$version" torchft==0.2.0 safetensors numpy pytest pytest-timeout
  touch "$venv/.ready"
fi
export PYTHONPATH=python
"$venv/bin/python" -m pytest -q -m "not gpu" -p no:cacheprovider tests/python/ops/test_ops.py tests/python/ops/test_adamw.py tests/python/test_optim.py tests/python/test_readers.py tests/python/test_checkpointed_moe.py
"$venv/bin/python" -m pytest -q -p no:cacheprovider tests/python/session/failures/test_session.py -k "killed_at and vote or joiner"
"$venv/bin/python" -m pytest -q -p no:cacheprovider tests/python/pipeline/test_pipeline.py -k "while_torch_connects or while_gloo_connects"
"$venv/bin/python" -m pytest -q -p no:cacheprovider tests/python/pipeline/test_localised.py -k "compute_nothing_again and 1F1B"
"$venv/bin/python" -m pytest -q -p no:cacheprovider tests/python/pipeline/test_pipeline_schedules.py -k "ZBVZeroBubble and 2"
