#!/bin/sh
# What an accelerator does with this library, in at most 10 minutes of it.
#
#   PYTHON=python3 OUT=slot sh experiments/systems/slot.sh
#   PARTS="b c" REAL=SmolLM2-135M.gguf WHEELS=wheels sh experiments/systems/slot.sh
#   TOY=1 OUT=runs/dry/out RUNS=runs/dry sh experiments/systems/slot.sh     # a dry run of toy size
#
# PARTS    laws  a law of each family
#          a     calls under several flags, in turns, then `paradec demo` under the quickest flags; what the one table of
#                all families would write with these calls, a projection
#          b     a model made fast: trained, then masks beside it and a distilled one, on its own answers
#          c     tokens a call and a second, right answers and likelihood of these, against one by one
# PYTHON   interpreter that has jax (python3)
# OUT      folder of the results, to be committed (experiments/systems/slot); OUT.tgz has it as one file
# RUNS     folder of the trainings (runs/slot)
# REAL     checkpoint, such as a GGUF file of SmolLM2-135M, in the place of the model that b trains
# WHEELS   folder of wheels of packages that PYTHON lacks: pip download --no-deps -d WHEELS grain tyro gguf ...
#
# Each part has its time. One that was stopped goes on when the same command is given again, and one that has its .log in
# OUT is done. Where one fails the next ones run all the same, and the exit status is 1.
set -u
cd "$(dirname "$0")/../.." || exit 1
: "${PYTHON:=python3}" "${OUT:=experiments/systems/slot}" "${RUNS:=runs/slot}" "${PARTS:=laws a b c}"
: "${REAL:=}" "${WHEELS:=}" "${TOY:=}"
export PYTHONPATH="$PWD:$RUNS/site${PYTHONPATH:+:$PYTHONPATH}"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export XLA_PYTHON_CLIENT_PREALLOCATE=false # several processes share the memory
mkdir -p "$OUT" "$RUNS"
failed=0 factor=${TOY:+8} # a processor is slower
[ -z "$TOY" ] || export XLA_FLAGS="--xla_backend_optimization_level=0 ${XLA_FLAGS:-}" # and compiles sooner so

part() { # NAME SECONDS: a part of slot.py, ended where it takes 15 seconds more
  [ ! -e "$OUT/$1.log" ] || return
  echo "== $1"
  seconds=$(($2 * ${factor:-1}))
  timeout --foreground $((seconds + 15)) "$PYTHON" -m experiments.systems.slot "$1" --out "$OUT" --runs "$RUNS" --seconds $seconds \
    ${REAL:+--real "$REAL"} ${TOY:+--toy} > "$OUT/$1.txt" 2>&1 && mv "$OUT/$1.txt" "$OUT/$1.log" || failed=1
  tail -n 40 "$OUT/$1".[tl]*
  tar -czf "$OUT.tgz" -C "$OUT" .
}

write() { # NAME MODULE ARGUMENTS...: NAME in RUNS, once, by a module of experiments.tasks that writes NAME.part
  [ -e "$RUNS/$1" ] || (
    name=$RUNS/$1 module=experiments.$2
    shift 2
    JAX_PLATFORMS=cpu "$PYTHON" -m "$module" "$@" && mv "$name.part" "$name"
  )
}

begin() { # what b begins with: problems, a model of random weights, and rows of its training, as text and as tokens
  updates=2000 count=4096 shape="--width 512 --layers 10 --heads 8 --feed-forward 1408"
  [ -z "$TOY" ] || updates=4 count=64 shape="--width 32 --layers 1 --heads 2 --feed-forward 48"
  write problems.jsonl tasks words "$RUNS/problems.jsonl.part" --count $count --split train
  [ -z "$REAL" ] || return
  write start tasks.start tiny-causal "$RUNS/start.part" $shape
  write rows.jsonl tasks.curriculum words "$RUNS/rows.jsonl.part" --updates 0 $updates
  JAX_PLATFORMS=cpu "$PYTHON" -c 'import sys
from paradec_jax import load
from paradec_jax.data.jsonl import read_examples
folder = sys.argv[1]
read_examples(f"{folder}/rows.jsonl", load(f"{folder}/start"), folder=f"{folder}/words/data", length=512)' "$RUNS"
}

case $PARTS in *b*) begin > "$RUNS/begin.txt" 2>&1 & ;; esac # beside the laws, which are not timed
for which in $PARTS; do
  case $which in
  laws) part laws 50 ;;
  a)
    wait && part variants 120 && part demo 45
    JAX_PLATFORMS=cpu "$PYTHON" -m experiments.families.projection "$OUT/variants.json" > "$OUT/projection.txt" 2>&1 || failed=1
    ;;
  b) wait && part fast 265 ;;
  c) part gain 105 ;;
  *) echo "PARTS must be of laws, a, b and c, not $which" >&2 && exit 1 ;;
  esac
done
exit $failed
