#!/usr/bin/env bash
# What only a GPU can tell: train and score EAGLE-3 on SmolLM2 in bf16 with T = 7 and the whole embedded set.
#
#   TARGET=DIR OUT=eval/results bash scripts/gpu_check.sh bench|train|score
#
# TARGET is the target's directory in transformers format (weights brought along by hand serve; without it the converted
# package is used). Needs no network. Each part stays under 9 minutes, and train goes on where it was cut off, so
# the parts can run one by one, or the same one again. JSON with its setting goes to OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
PART=${1:-}
OUT=${OUT:-eval/results}
RUN=${RUN:-runs/gpu-eagle3-smollm2}
EPOCHS=${EPOCHS:-30} # ten times the CPU budget and more: all conversations, T = 7
PYTHON=${PYTHON:-python3}
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
mkdir -p "$OUT"

target=(target=smollm2)
[ -n "${TARGET:-}" ] && target=(target=smollm2 "target.path=$TARGET")

train() {
  timeout 530 "$PYTHON" -m spectrain train recipe=eagle3 "${target[@]}" run="$RUN" eval=none \
    trainer.epochs="$EPOCHS" trainer.save_every=200 trainer.resume=auto || [ $? -eq 124 ]
}

score() {
  for name in eagle2 chain; do
    timeout 260 "$PYTHON" -m spectrain eval run="$RUN" tree="$name" eval.name="$name" eval.limit=30 eval.max_new_tokens=64
    cp "$RUN/eval/$name/summary.json" "$OUT/gpu-eagle3-smollm2-$name.json"
  done
  cp "$RUN/metrics.jsonl" "$OUT/gpu-eagle3-smollm2-metrics.jsonl"
}

bench() {
  timeout 200 "$PYTHON" -m spectrain bench decode "${target[@]}" | tee "$OUT/gpu-bench-decode.txt"
  timeout 200 "$PYTHON" -m spectrain bench train recipe=eagle3 "${target[@]}" | tee "$OUT/gpu-bench-train.txt"
}

case "$PART" in
  train) train ;;
  score) score ;;
  bench) bench ;;
  *) echo "gpu_check.sh: $PART is no part; use bench, train or score" >&2; exit 2 ;;
esac
