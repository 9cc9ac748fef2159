#!/usr/bin/env bash
# Installs what is missing and runs all tests; arguments go to pytest (tests/run.sh -k router).
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup_venv.sh
.venv/bin/ruff check .
# One thread per process: ranks of parallel tests share few cores.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} .venv/bin/python -m pytest "$@"
