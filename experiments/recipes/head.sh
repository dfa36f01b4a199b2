#!/bin/sh
# Residual heads beside a model of blocks: `sh experiments/recipes/head.sh mse-inherited`, or another name below.
# mse-inherited is the bundled one. chains-NAME is head NAME beside a model of chains (runs/chains/model). MODEL names
# another model. A run that was stopped goes on when the same command is given again. Further arguments go to
# `paradec train`.
set -eu
run=$1 folder=runs/$1
shift
case ${run#chains-} in
tiny-head | head) options="" ;;
init-released) options="--init normal_0.2" ;;
init-ordinary | init-inherited) options="--init ${run##*init-}" ;;
unroll-?) options="--unroll ${run##*-}" ;;
direct-?) options="--direct --unroll ${run##*-}" ;;
depth-?) options="--depth ${run##*-}" ;;
official | mean) options="--normaliser ${run#chains-}" ;;
infer-matched) options="--layout infer_matched" ;;
own-tokens) options="--tokens own" ;;
counts) options="--reveals 1 2 3 4" ;;
cross-entropy) options="--objective cross_entropy" ;;
mse) options="--objective mse" ;;
mse-inherited) options="--objective mse --init inherited" ;;
noise-block | noise-count) options="--kind ${run##*-}" ;;
muon) options="--optimizer muon --learning-rate 5e-3 --adam-learning-rate 2e-3 --weight-decay 0.05 --cooldown 0.5" ;;
*)
  echo "there is no recipe $run" >&2
  exit 1
  ;;
esac
mkdir -p "$folder"
case $run in
chains-*)
  model=${MODEL:-runs/chains/model} sizes="--updates 800 --batch-tokens 4096"
  [ -f "$folder/data.jsonl" ] || {
    python -m experiments.tasks chains "$folder/part" --count 102400
    python -m experiments.tasks chains "$folder/held-out.jsonl" --count 256 --seed 1000000
    mv "$folder/part" "$folder/data.jsonl"
  }
  ;;
*)
  model=${MODEL:-tiny-sdar} sizes="--updates 3000 --batch-tokens 2048"
  [ -f "$folder/data.jsonl" ] || {
    mixture="0.28 0.44 0.17 0.11 0 0 0" problems="0 1 0 0 0 0 0"
    python -m experiments.tasks.curriculum words "$folder/part" --updates 0 3000 --weights $mixture --seed 20
    python -m experiments.tasks.curriculum words "$folder/held-out.jsonl" --updates 0 10 --split tune --weights $problems
    mv "$folder/part" "$folder/data.jsonl"
  }
  ;;
esac
paradec train head --model "$model" --data "$folder/data.jsonl" --held-out "$folder/held-out.jsonl" --out "$folder" \
  $sizes --learning-rate 3e-3 --warmup 0.03 --cooldown 0.97 --ema 0.998 --seed 20 $options "$@"
