#!/bin/sh
# What an accelerator does with this library, in at most 8 minutes: a law of each family, the report, decoders; and in
# 40 seconds each what variants of calls cost.
#
#   PYTHON=python3 OUT=slot MINUTES=4 REAL=SmolLM2-135M.gguf sh experiments/systems/slot.sh
#   VARIANTS="plain graphs" MINUTES=1 sh experiments/systems/slot.sh
#   TOY=1 sh experiments/systems/slot.sh          # a dry run of toy size
#
# PYTHON   interpreter that has jax and the packages of this library (python3)
# OUT      folder of the results, to be committed (experiments/systems/slot)
# MINUTES  time of the report (4); laws and decoders take at most 3 together
# VARIANTS of the report's calls, none by default: `plain` products and attention in place of kernels, `graphs` of whole
#          loops, `loops` unrolled in them, `none` (no command buffers)
# REAL     GGUF file of SmolLM2-135M; weights are random without it
#
# Where one part fails the next ones run all the same, and the exit status is 1.
set -u
cd "$(dirname "$0")/../.." || exit 1
: "${PYTHON:=python3}" "${OUT:=experiments/systems/slot}" "${MINUTES:=4}" "${REAL:=}" "${TOY:=}" "${VARIANTS:=}"
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

# Flags of XLA, or of this library, for the variant NAME.
flags() {
  graphs="--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE"
  case $1 in
    plain) echo "PARADEC_ATTENTION=plain" ;;
    graphs) echo "XLA_FLAGS=$graphs" ;;
    loops) echo "XLA_FLAGS=$graphs --xla_gpu_command_buffer_unroll_loops=true" ;;
    none) echo "XLA_FLAGS=--xla_gpu_enable_command_buffer=" ;;
    *) echo "VARIANTS must be of plain, graphs, loops and none, not $1" >&2; exit 1 ;;
  esac
}

for name in $VARIANTS; do flags "$name" > /dev/null || exit 1; done
mkdir -p "$OUT"
if [ -n "$TOY" ]; then LAWS=8 SHORT="--minutes 0.1 --parts device"; set -- --minutes 0.2 --parts device
else LAWS=1 SHORT="--minutes 0.6 --parts device calls"; set -- --minutes "$MINUTES"; fi
part laws $((60 * LAWS + 10)) experiments.systems.slot laws --out "$OUT" --minutes $LAWS
part report 290 experiments.systems.report --out "$OUT/report" "$@"
for name in $VARIANTS; do
  (
    export "$(flags "$name")"
    part "calls-$name" 60 experiments.systems.report --out "$OUT/$name" $SHORT
    exit $failed
  ) || failed=1
done
part decoders 130 experiments.systems.slot decoders --out "$OUT" --minutes 1.75 ${REAL:+--real "$REAL"} ${TOY:+--toy}
exit $failed
