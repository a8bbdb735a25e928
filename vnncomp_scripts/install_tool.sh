#!/bin/bash
# VNN-COMP: install_tool.sh VERSION. Installs stagecert into .venv beside this folder.
set -euo pipefail

if [ "${1:-}" != "v1" ]; then
    echo "install_tool.sh: expected version 'v1', got '${1:-}'" >&2
    exit 1
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"${PYTHON:-python3}" -m venv "$root/.venv"
"$root/.venv/bin/python" -m pip install --quiet --editable "$root"
"$root/.venv/bin/stagecert" verify --help > /dev/null
