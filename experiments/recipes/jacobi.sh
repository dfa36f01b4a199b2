#!/bin/sh
# Distillations of experiments/jacobi/RESULTS.md and, of a recurrent model, of experiments/recurrent_depth/RESULTS.md:
#
#     sh experiments/recipes/jacobi.sh tiny-jacobi            # first, since the others copy its trajectories
#     sh experiments/recipes/jacobi.sh mask-nc --minutes 10   # options after the name come last, and so overrule
#
# The model is runs/NAME/model. The same command goes on with a run that was stopped.
set -eu
name=$1
shift
data=runs/words.jsonl
mkdir -p runs
[ -e $data ] || python -m experiments.tasks words $data --count 20000 --split train
common="--data $data --out runs/$name --new-tokens 224 --optimizer muon --learning-rate 8e-3
  --adam-learning-rate 3.2e-3 --ema 0.99 --products BF16_BF16_F32 --checkpoint-every 200"
jacobi="paradec train jacobi $common --rows 64 --batch-tokens 5120"
long="--model tiny-causal --problems 6144 --updates 1500 --warmup 0.1 --cooldown 0.4"
short="--model tiny-causal --problems 6144 --updates 300 --warmup 0.1667 --cooldown 0.5"

distil() {
  case $name in
  tiny-jacobi) $jacobi $long --order linear "$@" ;;
  cllm) $jacobi $long --order uniform "$@" ;;
  second-round)
    $jacobi --model runs/tiny-jacobi/model --block 32 --problems 2048 --updates 600 --warmup 0.0833 --cooldown 0.6667 \
      --learning-rate 4e-3 --adam-learning-rate 1.6e-3 --order linear --window 2 "$@" ;;
  clean-uniform) $jacobi $short --order uniform "$@" ;;
  without-rehearsal) $jacobi $short --order linear --rehearse 0 --batch-tokens 4096 "$@" ;;
  mask-nc) $jacobi $short --order linear --context nc "$@" ;;
  mask-nc-ic) $jacobi $short --order linear --context nc_ic "$@" ;;
  mask-clean) $jacobi $short --order linear --context clean "$@" ;;
  noise-linear-4 | noise-random-4 | noise-reverse-4 | noise-linear-8 | noise-random-8 | noise-reverse-8)
    order=${name#noise-}
    $jacobi $short --order "${order%-*}" --window "${name##*-}" --context nc "$@" ;;
  tiny-drafts) # masks beside tiny-causal
    paradec train draft --model tiny-causal --data $data --out runs/$name --problems 2048 --rows 128 --masks 4 --new-tokens 224 \
      --updates 300 --learning-rate 2e-3 --warmup 0.1 --batch-tokens 4096 "$@" ;;
  tiny-recurrent-distilled)
    python -m experiments.recurrent_depth.distill_waves --model tiny-recurrent $common --problems 6144 \
      --batch-tokens 4096 --updates 1600 --warmup 0.0625 --cooldown 0.4 "$@" ;;
  *) echo "there is no recipe $name: read experiments/recipes/jacobi.sh" >&2 && exit 1 ;;
  esac
}

first=runs/tiny-jacobi/round-0
case $name in
second-round | tiny-drafts) ;; # which collect answers of their own
*)
  if [ -e $first/collected ] && [ ! -e "runs/$name/round-0/collected" ]; then
    distil "$@" --minutes 0 # the folder is this run's before anything is copied into it
    cp -r $first/trajectories "runs/$name/round-0"
    cp $first/collected "runs/$name/round-0"
  fi ;;
esac
distil "$@"
