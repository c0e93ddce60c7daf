#!/usr/bin/env bash
# Judges backends one by one and decides: ci/gate.sh OUT "BACKEND ..." [arguments of certify]. For runners without a workflow
# language. A folder ci/expectations of the repository it is called in takes part.
set -euo pipefail

out=$1
read -ra backends <<<"$2"
shift 2
for backend in "${backends[@]}"; do
    # Failures are for the gate to judge, which knows the expectations; 2 is a mistake in this call.
    mla-conformance certify --backend "$backend" --out "$out/$backend" "$@" || [ $? -ne 2 ]
done
expectations=()
[ ! -d ci/expectations ] || expectations=(--expectations ci/expectations)
mla-conformance gate "$out"/*/report.json "${expectations[@]}"
