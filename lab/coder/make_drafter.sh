#!/bin/bash
# Make the drafter of packages/coder again: the answers that this repository keeps, answers to other
# prompts, the states of both, a training, and an export in 8 bits. The same folder goes on after a stop.
#     bash lab/coder/make_drafter.sh build/coder
set -euo pipefail
out=${1:-build/coder}
bin=${BIN:-.venv/bin}
target=(target=qwen2.5-coder-1.5b target.quantization=gguf_int8)
training=(
    recipe=eagle3 "${target[@]}" data=mix
    "data.sources=[{data: tokens, path: lab/coder/answers}, {data: jsonl, path: $out/answers}]"
    data.max_length=2048 source=store "source.path=$out/features"
    drafter.vocab_size=8192 'drafter.architecture={intermediate_size: 6144}'
)

mkdir -p "$out"
"$bin/python" -m lab.coder.answers
test -f "$out/prompts.jsonl" || "$bin/python" -m lab.coder.make_prompts out="$out/prompts.jsonl" tasks=false
"$bin/spectrain" data regenerate "${target[@]}" data=jsonl data.path="$out/prompts.jsonl" data.limit=344 \
    sampling.max_new_tokens=256 sampling.temperature=0.5 regenerate.shard_size=64 out="$out/answers"
"$bin/spectrain" data store "${training[@]}" source.dtype=int8
"$bin/spectrain" train "${training[@]}" drafter.fit_tokens=131072 trainer.batch_tokens=768 \
    trainer.max_minutes=40 trainer.save_every=100 trainer.resume=auto eval=none run="$out/run"
"$bin/spectrain" export run="$out/run" format=vllm quantize=int8 quantize.head=true quantize.fc=true out="$out/drafter"
"$bin/python" -m lab.coder.ship_drafter run="$out/run" export="$out/drafter"
