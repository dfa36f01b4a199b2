#!/bin/sh
# Models of word problems: `sh experiments/recipes/words.sh tiny-recurrent`, tiny-recurrent-exponential or tiny-causal.
# A run that was stopped goes on when the same command is given again. Further arguments go to every `paradec train`.
set -eu
run=$1
shift

# phase FIRST LAST "WEIGHTS" OPTIONS: a training on the rows of these updates, which begins with the model of the last.
phase() {
  first=$1 last=$2 weights=$3 folder=runs/$run/$1
  shift 3
  [ -f "$folder.jsonl" ] || {
    python -m experiments.tasks.curriculum words "$folder.part" --updates "$first" "$last" --weights $weights --seed "$seed"
    mv "$folder.part" "$folder.jsonl"
  }
  paradec train "$objective" --model "$model" --data "$folder.jsonl" --out "$folder" --updates $((last - first)) \
    --batch-tokens 2048 --optimizer muon --weight-decay 0.05 --products BF16_BF16_F32 --seed "$seed" "$@"
  model=$folder/model
  [ -d "$model" ] || exit 0 # the minutes are over
}

start() { # SHAPE: random weights
  model=runs/$run/start
  [ -d "$model" ] || python -m experiments.tasks.start "$1" "$model"
}

practised="0.25 0.4 0.15 0.1 0.05 0.05 0"
case $run in
tiny-recurrent) # the recurrence grows with the step: M is 1.5 until update 1,500 and 3 from update 5,000
  seed=0 objective=recurrent
  start tiny-recurrent
  set -- --learning-rate 8e-3 --adam-learning-rate 3e-3 --remat iteration "$@"
  flat="--cooldown 0 --warmup 0"
  phase 0 1500 "1 0 0 0 0 0 0" --mean 1.5 --cooldown 0 --warmup 0.067 "$@"
  phase 1500 1800 "0.5 0.5 0 0 0 0 0" --first-mean 1.5 --mean 1.63 $flat "$@"
  phase 1800 5000 "0.15 0.2 0.1 0.05 0.2 0.3 0" --first-mean 1.63 --mean 3 $flat "$@"
  phase 5000 6500 "0.1 0.1 0.05 0.05 0 0.3 0.4" --mean 3 $flat "$@"
  phase 6500 7000 "0.15 0.25 0.1 0.05 0 0.3 0.15" --mean 3 $flat "$@"
  phase 7000 7500 "0.15 0.3 0.12 0.08 0.1 0.25 0" --mean 3 $flat "$@"
  phase 7500 10000 "$practised" --mean 3 --warmup 0 --cooldown 1 --ema 0.999 "$@"
  ;;
tiny-recurrent-exponential) # recurrences drawn as for the math model of arXiv 2510.14961
  seed=1 objective=recurrent model=${START:-tiny-recurrent}
  phase 0 600 "$practised" --draw exponential --mean 16 --learning-rate 1e-3 --adam-learning-rate 4e-4 \
    --warmup 0.167 --cooldown 0.667 --ema 0.99 --remat iteration "$@"
  ;;
tiny-causal) # look-ups are practised once the model makes some, and the last phase has a low rate
  seed=0 objective=sft
  start tiny-causal
  set -- --ema 0.999 "$@"
  fast="--learning-rate 8e-3 --adam-learning-rate 3e-3"
  phase 0 500 "1 0 0 0 0 0 0" $fast --warmup 0.2 --cooldown 0 "$@"
  phase 500 2700 "0.15 0.2 0.1 0.05 0.2 0.3 0" $fast --warmup 0 --cooldown 0 "$@"
  phase 2700 4400 "$practised" $fast --warmup 0 --cooldown 1 "$@"
  seed=1
  phase 4400 5350 "0.1 0.1 0.05 0.05 0 0.3 0.4" $fast --warmup 0.105 --cooldown 0 "$@"
  phase 5350 5700 "0.15 0.3 0.12 0.08 0.1 0.25 0" $fast --warmup 0 --cooldown 0 "$@"
  phase 5700 7000 "$practised" $fast --warmup 0 --cooldown 1 "$@"
  seed=2
  phase 7000 7800 "$practised" --learning-rate 2.5e-3 --adam-learning-rate 1e-3 --warmup 0.125 --cooldown 0.875 "$@"
  ;;
*)
  echo "the model must be tiny-recurrent, tiny-recurrent-exponential or tiny-causal, not $run" >&2
  exit 1
  ;;
esac
