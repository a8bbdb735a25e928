#!/bin/bash
# VNN-COMP: prepare_instance.sh VERSION CATEGORY ONNX VNNLIB. Checks that both files can be read.
set -euo pipefail

if [ "${1:-}" != "v1" ]; then
    echo "prepare_instance.sh: expected version 'v1', got '${1:-}'" >&2
    exit 1
fi
model=$3
property=$4
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -r "$model" ] || { echo "prepare_instance.sh: $model cannot be read" >&2; exit 1; }
[ -r "$property" ] || { echo "prepare_instance.sh: $property cannot be read" >&2; exit 1; }
# A status other than zero skips the instance: models with unsupported operators are skipped.
"$root/.venv/bin/stagecert" inspect "$model" > /dev/null
