#!/usr/bin/env bash
# Compare the small verdict lock of this checkout with that of the commit that it branched from, both written here. Where
# sources that decide a verdict differ, judge a real kernel on the whole list, too.
# usage: ci/lock.sh [CHECKOUT], whose history is asked; LOCK_BASE names another commit. Another suite is not compared.
set -euo pipefail

checkout=$(cd "${1:-.}" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git_of() { git -C "$checkout" "$@" 2>/dev/null; }

head=$(git_of rev-parse HEAD || true)
if [ -n "${LOCK_BASE:-}" ]; then
    base=$(git_of rev-parse --verify "$LOCK_BASE^{commit}") || { echo "LOCK_BASE: expected a commit, got $LOCK_BASE" >&2; exit 2; }
else
    base=$(git_of merge-base HEAD origin/main || true)
    [ -n "$base" ] && [ "$base" != "$head" ] || base=$(git_of rev-parse --verify 'HEAD^' || true)
fi
if [ -z "$base" ] || ! git_of cat-file -e "$base:ci/lock.py"; then
    echo "not compared: no earlier commit that holds ci/lock.py (base: ${base:-none})"
    exit 0
fi
suite() { sed -n 's/^__version__ = "\([0-9]*\.[0-9]*\)\..*/\1/p'; }
was=$(git_of show "$base:conformance/version.py" | suite) now=$(suite < "$here/conformance/version.py")
if [ "$was" != "$now" ]; then
    echo "not compared: suite $was at $base, suite $now here, whose verdicts may differ"
    exit 0
fi

# The digest of the list that a suite began with is its identity; it may still change while the suite has no records.
cases() { python -c "import json, sys; print(json.load(sys.stdin)['$now']['cases'])"; }
if [ "$(git_of show "$base:fixtures/suites.json" | cases)" != "$(cases < "$here/fixtures/suites.json")" ]; then
    records="$here/fixtures/records/$now.jsonl"
    if [ -e "$records" ] && ! python -m mla_conformance verify "$records" > /dev/null; then
        echo "the list of suite $now changed after records were made: begin another, or end added lines with +YEAR.N.PATCH" >&2
        exit 1
    fi
    echo "not compared: the list of suite $now, of which no record has another, was another at $base"
    exit 0
fi

mkdir -p "$work/base" "$work/site/mla_conformance"
git_of archive "$base" | tar --extract --directory "$work/base"

decides="backends reference fixtures/arrays.json ci/lock.py $(printf 'conformance/%s ' cases defects driving files judging problems roles trials vocabulary)"
same() { diff --recursive --brief --exclude tests --exclude __pycache__ "$work/base/$1" "$here/$1" > /dev/null 2>&1; }
differing=""
for part in $decides; do same "$part" || differing="$differing $part"; done
if [ -z "$differing" ]; then
    echo "not compared: nothing that decides a verdict on a CPU differs from $base"
    exit 0
fi
ln -s "$work/base"/conformance/* "$work/base"/{backends,reference,fixtures} "$work/site/mla_conformance/"
echo "base: $base; differing:$differing"
PYTHONPATH="$work/site" python "$work/base/ci/lock.py" write "$work/base.jsonl" --small
python "$here/ci/lock.py" write "$work/here.jsonl" --small
python "$here/ci/lock.py" compare "$work/base.jsonl" "$work/here.jsonl"
mla-conformance certify --backend TORCH_SDPA
