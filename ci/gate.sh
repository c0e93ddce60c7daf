#!/usr/bin/env bash
# Judges backends one by one and decides: ci/gate.sh OUT "BACKEND ..." [arguments of certify [-- arguments of gate]]. For
# runners without a workflow language. A folder ci/expectations of the repository it is called in takes part. Whoever has a
# selection judged says so to the gate: ci/gate.sh out EAGER --tier smoke -- --require-tier smoke
set -euo pipefail

out=$1
read -ra backends <<<"$2"
shift 2
certify=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    certify+=("$1")
    shift
done
[ $# -eq 0 ] || shift
reports=()
for backend in "${backends[@]}"; do
    report=$out/$backend/report.json
    # What an earlier call left must not stand for a run that ends before it begins.
    [ ! -e "$report" ] || mv "$report" "$report.earlier"
    # Failures are for the gate to judge, which knows the expectations; 2 is a mistake in this call.
    mla-conformance certify --backend "$backend" --out "$out/$backend" --fresh "${certify[@]}" || [ $? -ne 2 ]
    reports+=("$report")
done
expectations=()
[ ! -d ci/expectations ] || expectations=(--expectations ci/expectations)
mla-conformance gate "${reports[@]}" --require "${backends[@]}" "${expectations[@]}" "$@"
