#!/bin/sh
# Models of a text's characters: `sh experiments/recipes/masked.sh TEXT tiny-mdlm`, tiny-rival or tiny-judge.
# TEXT is a file of plain text, such as Tiny Shakespeare; its last tenth is held out. A run that was stopped goes on when
# the same command is given again. Further arguments go to `paradec train`.
set -eu
text=$1 run=$2 folder=runs/$2
shift 2
case $run in
tiny-mdlm)
  objective=masked steps=5900 rows="" seed=0 shape="tiny-mdlm"
  options="--floor 0.02 --length 256 --cooldown 0.4 --warmup 0.017"
  ;;
tiny-rival) # about as many parameters as the denoiser
  objective=sft steps=2000 rows=32000 seed=1 shape="tiny-causal --layers 5"
  options="--cooldown 0.5 --warmup 0.05"
  ;;
tiny-judge)
  objective=sft steps=1500 rows=24000 seed=2 shape="tiny-causal --width 160 --layers 4 --feed-forward 400"
  options="--cooldown 0.5 --warmup 0.067"
  ;;
*)
  echo "the model must be tiny-mdlm, tiny-rival or tiny-judge, not $run" >&2
  exit 1
  ;;
esac
[ -f "$folder/data.jsonl" ] || {
  python -m experiments.tasks.start $shape "$folder/start" --text "$text" --seed $seed
  python -m experiments.tasks.curriculum text "$folder/held-out.jsonl" --source "$text" --held-out
  python -m experiments.tasks.curriculum text "$folder/part" --source "$text" --seed $seed ${rows:+--windows $rows}
  mv "$folder/part" "$folder/data.jsonl"
}
paradec train $objective --model "$folder/start" --data "$folder/data.jsonl" --held-out "$folder/held-out.jsonl" \
  --out "$folder" --updates $steps --batch-tokens 4096 --optimizer muon --learning-rate 8e-3 --adam-learning-rate 3e-3 \
  --weight-decay 0.05 --ema 0.998 --seed $seed $options "$@"
