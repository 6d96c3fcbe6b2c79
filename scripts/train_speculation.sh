#!/bin/sh
# Trains an EAGLE head, Medusa heads and a draft model for SmolLM2-135M-Instruct on its own answers to the prompts of
# scripts/data/chat_prompts.jsonl, and measures them on others (scripts/data/held_out_prompts.json).
# Run from the repository: sh scripts/train_speculation.sh OUTPUT [eagle|medusa|draft|bench ...]
# What is there already is not made again, and what was begun goes on.
set -e
output=$1
shift
[ $# -gt 0 ] || set -- eagle medusa draft bench

train() {
    name=$1
    shift
    [ -d "$output/$name" ] || python -m jaxinfer distill --teacher smollm2-135m-instruct --resume --output "$output/$name" \
        --data generate --prompts scripts/data/chat_prompts.jsonl --num-texts 512 --max-tokens 160 \
        --sampling-temperature 0 --answers-only --seq-len 256 --eval-fraction 0.03 --teacher-cache "$output/cache" \
        --cache-features --loss-vocab 4096 --batch-size 4 --save-dtype bfloat16 --log-every 10 --eval-every 40 \
        --save-every 40 "$@"
}

for what in "$@"; do
    case $what in
    eagle)
        train eagle --eagle --from-model --classification-weight 0.5 --steps 500 --learning-rate 1e-3 --warmup-steps 20
        ;;
    medusa)
        train medusa --medusa-heads 3 --steps 320 --learning-rate 2e-3 --warmup-steps 10
        ;;
    draft)
        train draft --student-layers 0,1,2,28,29 --steps 320 --learning-rate 1e-3 --warmup-steps 20
        ;;
    bench)
        python scripts/bench_trained.py --quantization int8_w8a8 "draft_model:$output/draft:5" \
            "medusa:$output/medusa:16" "eagle:$output/eagle:24"
        ;;
    *)
        echo "$what: one of eagle, medusa, draft and bench is expected" >&2
        exit 2
        ;;
    esac
done
