#!/usr/bin/env bash
# Compare the small verdict lock of this checkout with that of the commit that it branched from, both written here.
# usage: ci/lock.sh [CHECKOUT], whose history is asked; LOCK_BASE names another commit.
set -euo pipefail

checkout=$(cd "${1:-.}" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git_of() { git -C "$checkout" "$@" 2>/dev/null; }

head=$(git_of rev-parse HEAD || true)
base=$(git_of rev-parse --verify "${LOCK_BASE:-}^{commit}" || git_of merge-base HEAD origin/main || true)
[ -n "$base" ] && [ "$base" != "$head" ] || base=$(git_of rev-parse --verify 'HEAD^' || true)
if [ -z "$base" ] || ! git_of cat-file -e "$base:ci/lock.py"; then
    echo "not compared: no earlier commit that holds ci/lock.py (base: ${base:-none})"
    exit 0
fi

mkdir -p "$work/base" "$work/site/mla_conformance"
git_of archive "$base" | tar --extract --directory "$work/base"
ln -s "$work/base"/conformance/* "$work/base"/{backends,reference,fixtures} "$work/site/mla_conformance/"
echo "base: $base"
PYTHONPATH="$work/site" python "$work/base/ci/lock.py" write "$work/base.jsonl" --small
python "$here/ci/lock.py" write "$work/here.jsonl" --small
python "$here/ci/lock.py" compare "$work/base.jsonl" "$work/here.jsonl"
