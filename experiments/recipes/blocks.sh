#!/bin/sh
# Models of block diffusion, and tiny-llada of full attention: `sh experiments/recipes/blocks.sh tiny-sdar`, or another name below.
# Those of word problems begin with tiny-causal (START names another), those of a chain language with random weights.
# A run that was stopped goes on when the same command is given again. Further arguments go to `paradec train`.
set -eu
run=$1 folder=runs/$1
shift
seed=0 objective=blocks model=${START:-tiny-causal} weights="0.28 0.44 0.17 0.11 0 0 0" steps=3000 # more rows than these updates read
rates="--learning-rate 5e-3 --adam-learning-rate 2e-3 --weight-decay 0.05 --batch-tokens 2048 --warmup 0.033"
held_out="--updates 0 10 --split tune --weights 0 1 0 0 0 0 0"

case $run in
tiny-sdar) options="--alignment own --look-back" ;;
without-look-back) options="--alignment own" ;;
tiny-sdar-next) options="--alignment next" ;;
tiny-llada) options="--sft --products BF16_BF16_F32" objective=masked steps=1500 ;;
packed) options="--alignment next --packed --length 512" ;;
block-noise) options="--alignment next --noise block" ;;
count-noise) options="--alignment next --noise count" ;;
lengths) options="--alignment next --blocks 8 4 16" ;;
scratch)
  options="" steps=5000 model=runs/$run/start
  rates="--learning-rate 8e-3 --adam-learning-rate 3e-3 --weight-decay 0.05 --batch-tokens 2048 --warmup 0.02"
  weights="0.25 0.4 0.15 0.1 0.05 0.05 0"
  [ -d "$model" ] || python -m experiments.tasks.start tiny-sdar "$model"
  ;;
chains | chains-next | chains-block-noise | chains-count-noise | chains-lengths)
  steps=800 weights="" model=runs/$run/start alignment=own
  rates="--learning-rate 5e-3 --adam-learning-rate 2e-3 --weight-decay 0.01 --batch-tokens 4096 --warmup 0.0625"
  case $run in
  chains) options="" ;;
  chains-next) options="" alignment=next ;;
  chains-lengths) options="--blocks 8 4 16" ;;
  *) options=${run#chains-} options="--noise ${options%-noise}" ;;
  esac
  [ -d "$model" ] || python -m experiments.tasks.start tiny-sdar "$model" --chains --width 64 --layers 3 \
    --feed-forward 128 --alignment $alignment
  ;;
*)
  echo "there is no recipe $run" >&2
  exit 1
  ;;
esac

mkdir -p "$folder"
if [ -n "$weights" ]; then
  [ -f "$folder/data.jsonl" ] || {
    python -m experiments.tasks.curriculum words "$folder/part" --updates 0 $steps --weights $weights
    python -m experiments.tasks.curriculum words "$folder/held-out.jsonl" $held_out
    mv "$folder/part" "$folder/data.jsonl"
  }
else
  [ -f "$folder/data.jsonl" ] || {
    python -m experiments.tasks chains "$folder/part" --count $((steps * 128))
    python -m experiments.tasks chains "$folder/held-out.jsonl" --count 256 --seed 1000000
    mv "$folder/part" "$folder/data.jsonl"
  }
fi
paradec train "$objective" --model "$model" --data "$folder/data.jsonl" --held-out "$folder/held-out.jsonl" \
  --out "$folder" --updates $steps --optimizer muon $rates --cooldown 0.5 --ema 0.998 --seed $seed $options "$@"
