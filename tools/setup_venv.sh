#!/usr/bin/env bash
# Makes .venv at the top of the checkout, or brings an old one up to date; does nothing when nothing has changed.
# Takes python3 if it is 3.10 to 3.12, or else python3.12, 3.11, 3.10; PYTHON=/path/to/python chooses another.
set -euo pipefail
cd "$(dirname "$0")/.."

pick_python() {
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.10 to 3.12 with the venv module found (on Debian: apt install python3-venv). Set PYTHON." >&2
    exit 1
}

wanted=$(cat constraints.txt pyproject.toml tools/setup_venv.sh | sha256sum)
if [ "$(cat .venv/installed 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi
python=$(pick_python)
echo "Installing into .venv with $("$python" --version); the first time takes some minutes."
# An environment that was interrupted while it was made has no pip.
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
# torch first and by its exact release: whatever depends on it then finds it there.
install() {
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt "$@" |
        sed -nE '/^(Collecting|Downloading|Successfully)/p'
}
install torch
install -e '.[test]'
.venv/bin/python -c 'import torch, deepspeed, megatron_xmod' >/dev/null
echo "$wanted" > .venv/installed
