#!/bin/bash
# VNN-COMP: run_instance.sh VERSION CATEGORY ONNX VNNLIB RESULTS_FILE TIMEOUT.
# The results file holds the answer (sat, unsat, unknown, timeout or error) and, after sat, the
# counterexample.
set -uo pipefail

if [ "${1:-}" != "v1" ]; then
    echo "run_instance.sh: expected version 'v1', got '${1:-}'" >&2
    exit 1
fi
model=$3
property=$4
results=$5
timeout=$6
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# An earlier answer must not be taken for this one.
rm -f "$results"
"$root/.venv/bin/stagecert" verify "$model" "$property" --timeout "$timeout" --result "$results" \
    --quiet
[ -s "$results" ] || echo error > "$results"
exit 0
