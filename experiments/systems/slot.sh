#!/bin/sh
# What an accelerator does with this library, in at most 8 minutes: a law of each family, the report, decoders.
#
#   PYTHON=python3 OUT=slot MINUTES=4 REAL=SmolLM2-135M.gguf sh experiments/systems/slot.sh
#   TOY=1 sh experiments/systems/slot.sh          # a dry run of toy size
#
# PYTHON   interpreter that has jax and the packages of this library (python3)
# OUT      folder of the results, to be committed (experiments/systems/slot)
# MINUTES  time of the report (4); laws and decoders take at most 3 together
# REAL     GGUF file of SmolLM2-135M; weights are random without it
#
# Where one part fails the next ones run all the same, and the exit status is 1.
set -u
cd "$(dirname "$0")/../.." || exit 1
: "${PYTHON:=python3}" "${OUT:=experiments/systems/slot}" "${MINUTES:=4}" "${REAL:=}" "${TOY:=}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}"
failed=0

part() { # NAME SECONDS ARGUMENTS...: a module within so many seconds, what it prints kept beside the results
  name=$1 seconds=$2
  shift 2
  echo "== $name"
  timeout "$seconds" "$PYTHON" -m "$@" > "$OUT/$name.log" 2>&1 || { failed=1; echo "$name failed"; }
  tail -n 30 "$OUT/$name.log"
}

mkdir -p "$OUT"
if [ -n "$TOY" ]; then LAWS=8; set -- --minutes 0.2 --parts device; else LAWS=1; set -- --minutes "$MINUTES"; fi
part laws $((60 * LAWS + 10)) experiments.systems.slot laws --out "$OUT" --minutes $LAWS
part report 290 experiments.systems.report --out "$OUT/report" "$@"
part decoders 130 experiments.systems.slot decoders --out "$OUT" --minutes 1.75 ${REAL:+--real "$REAL"} ${TOY:+--toy}
exit $failed
