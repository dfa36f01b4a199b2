#!/bin/sh
# Students of tiny-mdlm: `sh experiments/recipes/sdtt.sh TEXT halves`, or another name below; halves are the bundled ones.
# TEXT is the plain text that it was trained on; its last tenth is held out. MODEL names another model. A run that was
# stopped goes on when the same command is given again. Further arguments go to `paradec train`.
set -eu
text=$1 run=$2 folder=runs/$2
shift 2
options="--rounds 5 --updates 400"
case $run in
halves) ;;
forward-kl) options="$options --divergence forward_kl" ;;
chi-square) options="$options --divergence chi_square" ;;
tvd | mse) options="$options --divergence $run" ;;
tvd-released) options="$options --divergence tvd --released" ;;
grid-released) options="$options --grid released" ;;
fourths) options="--jump 4 --rounds 3 --updates 667" ;;
eighths) options="--jump 8 --rounds 2 --updates 1000" ;;
short-rounds) options="--rounds 5 --updates 100" ;;
half-rounds) options="--rounds 5 --updates 200" ;;
ema-teacher) options="$options --weights ema --reset-ema" ;;
ema-teacher-reset) options="$options --weights ema --reset-ema --reset-optimizer" ;;
optimizer-reset) options="$options --reset-optimizer" ;;
*)
  echo "there is no recipe $run" >&2
  exit 1
  ;;
esac
[ -f "$folder/data.jsonl" ] || {
  python -m experiments.tasks.curriculum text "$folder/held-out.jsonl" --source "$text" --held-out
  python -m experiments.tasks.curriculum text "$folder/part" --source "$text"
  mv "$folder/part" "$folder/data.jsonl"
}
paradec train sdtt --model "${MODEL:-tiny-mdlm}" --data "$folder/data.jsonl" --held-out "$folder/held-out.jsonl" \
  --out "$folder" --first-steps 64 --batch-tokens 4096 --learning-rate 3e-4 --warmup 0.05 --cooldown 0 --ema 0.99 \
  --seed 10 $options "$@"
