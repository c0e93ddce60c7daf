#!/usr/bin/env bash
# Judges a backend on a Slurm cluster, a shard of the list on each GPU, and decides by all of them: ci/slurm.sh BACKEND,
# in a folder that every node sees, and in an environment with mla-conformance and the backend's library. Waits for the
# gate and ends with its status. Edit the lines marked EDIT. docs/gate-your-repository.md explains it.
set -euo pipefail

shards=8                                   # EDIT: how many GPUs judge at once
gpu=(--gpus=1 --cpus-per-task=4 --time=60) # EDIT: what sbatch asks for, for each of them; the time is in minutes
backend=$1

judge() { # a task of the array
    local shard=$SLURM_ARRAY_TASK_ID
    # Failures are for the gate to judge, which knows the expectations; 2 is a mistake in this line.
    mla-conformance certify --backend "$backend" --device cuda --deadline 50m --shard "$shard/$shards" --fresh --out "$out/$shard" || [ $? -ne 2 ]
}

gate() { # a shard that died has no report, which merge refuses
    local reports=() expectations=()
    for ((shard = 1; shard <= shards; shard++)); do reports+=("$out/$shard/report.json"); done
    # 3 is a shard that was ended in time: its other cases are not run, which the gate sees.
    mla-conformance report merge "${reports[@]}" --out "$out/report.json" || [ $? -eq 3 ]
    [ ! -d ci/expectations ] || expectations=(--expectations ci/expectations)
    mla-conformance gate "$out/report.json" --require "$backend" "${expectations[@]}" --must-pass
}

submit() {
    local array status=0
    mkdir -p reports
    out=$(mktemp --directory "$PWD/reports/XXXXXXXX") # no run finds a report of another one
    array=$(sbatch --parsable --array="1-$shards" "${gpu[@]}" --output="$out/%a.log" "$0" "$backend" judge "$out")
    sbatch --wait --dependency="afterany:${array%%;*}" --output="$out/gate.log" "$0" "$backend" gate "$out" || status=$?
    cat "$out/gate.log"
    return "$status"
}

out=${3:-}
"${2:-submit}"
