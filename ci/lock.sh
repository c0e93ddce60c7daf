#!/usr/bin/env bash
# Compare the small verdict lock of this checkout with that of the commit that it branched from, both written here.
# usage: ci/lock.sh [CHECKOUT], whose history is asked; LOCK_BASE names another commit than the one before origin/main's.
set -euo pipefail

checkout=$(cd "${1:-.}" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
history() { git -C "$checkout" "$@" 2>/dev/null; }

head=$(history rev-parse HEAD || true)
base=$(history rev-parse --verify "${LOCK_BASE:-}^{commit}" || history merge-base HEAD origin/main || true)
[ "$base" != "$head" ] || base=$(history rev-parse --verify 'HEAD^' || true)
if [ -z "$base" ] || ! history cat-file -e "$base:ci/lock.py"; then
    echo "not compared: no earlier commit that holds ci/lock.py (base: ${base:-none})"
    exit 0
fi

mkdir -p "$work/base" "$work/site/mla_conformance"
history archive "$base" | tar --extract --directory "$work/base"
ln -s "$work/base"/conformance/* "$work/base"/{backends,reference,fixtures} "$work/site/mla_conformance/"
echo "base: $base"
PYTHONPATH="$work/site" python "$work/base/ci/lock.py" write "$work/base.jsonl" --small
python "$here/ci/lock.py" write "$work/here.jsonl" --small
python "$here/ci/lock.py" compare "$work/base.jsonl" "$work/here.jsonl"
