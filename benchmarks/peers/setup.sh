#!/usr/bin/env bash
# Makes one virtual environment for each peer framework under .cache/peers/ (1.5 GB, some minutes).
# The peers pin packages that disagree with each other, so they never share one, nor ours.
#
#   benchmarks/peers/setup.sh            both
#   benchmarks/peers/setup.sh trl        one of them
set -euo pipefail

cache="$(cd "$(dirname "$0")/../.." && pwd)/.cache/peers"

install() {  # install NAME PACKAGE...
    local name="$1"
    shift
    python3 -m venv --clear "$cache/$name"
    "$cache/$name/bin/pip" install --quiet "$@"
    echo "$name: ready in .cache/peers/$name"
}

[ $# -gt 0 ] || set -- trl verifiers
for peer in "$@"; do
    case "$peer" in
        trl) install trl "torch==2.13.0" "transformers==5.10.4" "tokenizers==0.22.2" "trl==1.16.0" jmespath ;;
        verifiers) install verifiers "verifiers==0.3.1" ;;
        *) echo "unknown peer '$peer'; there are trl and verifiers" >&2; exit 2 ;;
    esac
done
