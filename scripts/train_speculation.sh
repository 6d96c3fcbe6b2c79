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
        --cache-features --loss-vocab 4096 --batch-size 4 --weight-decay 0.05 --save-dtype bfloat16 --log-every 10 \
        --save-every 40 "$@"
}

bench() {
    python -m jaxinfer bench speculative --model smollm2-135m-instruct --quantization int8_w8a8 --max-model-len 512 \
        --max-num-batched-tokens 128 --data scripts/data/held_out_prompts.json --output-len 64 "$@"
}

for what in "$@"; do
    case $what in
    eagle)
        train eagle --eagle --from-model --classification-weight 0.5 --steps 170 --learning-rate 6e-4 \
            --warmup-steps 10 --eval-every 34
        ;;
    medusa)
        train medusa --medusa-heads 3 --steps 170 --learning-rate 1.5e-3 --warmup-steps 5 --eval-every 34
        ;;
    draft)
        train draft --student-layers 0,1,2,4,7,10,13,16,19,22,25,27,28,29 --steps 120 --learning-rate 8e-4 \
            --warmup-steps 8 --eval-every 30
        ;;
    bench)
        bench --method draft_model --draft "$output/draft" -k 5
        bench --method medusa --heads "$output/medusa" -k 8,20
        bench --method eagle --heads "$output/eagle" -k 20 --config eagle='{"eagle_topk": 4, "eagle_depth": 4}'
        ;;
    *)
        echo "$what: one of eagle, medusa, draft and bench is expected" >&2
        exit 2
        ;;
    esac
done
