#!/usr/bin/env bash
# What only a GPU can tell: whether the kernels are right and how near their floors they come, what the engine reaches at 8B
# size, and EAGLE-3 on SmolLM2, trained and scored in bf16 with T = 7 and the whole embedded set.
# Minutes: kernels 7; engine 15 (counts and identity 1, single 6, batched 6, training 2); families 3: 25 in all. More where
# there is time: train 9, score 5, bench 5.
#
#   OUT=lab/results bash scripts/gpu_check.sh kernels [ceilings|correctness|table|tuning|divergence] [toy]
#   OUT=lab/results bash scripts/gpu_check.sh engine counts|identity|single|batched|training [toy]
#   OUT=lab/results bash scripts/gpu_check.sh online [toy]
#   RUNS="DIR ..." OUT=lab/results bash scripts/gpu_check.sh families
#   TARGET=DIR OUT=lab/results bash scripts/gpu_check.sh bench|train|score
#   TARGET=DIR OUT=lab/results bash scripts/gpu_check.sh scale [toy]
#
# kernels, without a name all five, measures what $OUT/kernels.json has not yet, for 7 minutes at most, and says how much
# is left; the same call again goes on. So does engine, with $OUT/engine.json, 6 minutes and what the last row takes. With toy
# they take seconds, on any machine, to see that every line of them runs. kernels needs torch, triton and rich, engine
# transformers and peft too; the others need what spectrain needs.
# scale trains in every way to share parameters (DDP, FSDP2, ZeRO-2, ZeRO-3; with several GPUs a spread and a cut target too),
# started through accelerate, beside one plain process.
# online takes 3 minutes: peak memory of an EAGLE-3 step with its target at 8B size, planned beside measured, in $OUT/online.json.
# families scores drafters that were trained elsewhere, each in its run folder, through captured rounds.
# TARGET is the target's directory in transformers format (weights brought along by hand serve; without it the converted
# package is used). Needs no network. Each part stays under 9 minutes, and train, kernels and engine go on where they were
# cut off, so the parts can run one by one, or the same one again. JSON with its setting goes to OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
PART=${1:-}
OUT=${OUT:-lab/results}
RUN=${RUN:-runs/gpu-eagle3-smollm2}
EPOCHS=${EPOCHS:-30} # ten times the CPU budget and more: all conversations, T = 7
PYTHON=${PYTHON:-python3}
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
unset TRITON_INTERPRET SPECTRAIN_KERNELS
mkdir -p "$OUT"

# One command in up to three processes, 530 seconds together: what ends one of them is noted in its file, and the next goes on.
tries() {
  local code=0 end=$((SECONDS + 530))
  for _ in 1 2 3; do
    code=0
    timeout $((end - SECONDS)) "$@" || code=$?
    case $code in 0 | 124) return 0 ;; 2) return 2 ;; esac
    [ $((end - SECONDS)) -gt 60 ] || break
  done
  return "$code"
}

target=(target=smollm2)
[ -n "${TARGET:-}" ] && target=(target=smollm2 "target.path=$TARGET")

# The same, and what is measured by now in $OUT/report.md, whatever became of it.
try_and_report() {
  local code=0
  tries "$@" || code=$?
  "$PYTHON" -m lab.benchmarks.report results="$OUT" > "$OUT/report.md"
  return "$code"
}

# For kernels and the report, torch, triton and rich are enough.
kernels() {
  local out="$OUT/kernels.json" toy=false
  if [ "${2:-}" = toy ]; then out="$OUT/kernels-toy.json" toy=true; fi
  try_and_report "$PYTHON" -m lab.benchmarks.kernels part="${1:-all}" out="$out" toy="$toy" seconds=420
}

# The engine needs transformers and peft besides.
engine() {
  local out="$OUT/engine.json" toy=false
  [ $# -gt 0 ] || { echo "gpu_check.sh engine: say which, counts, identity, single, batched or training" >&2; exit 2; }
  if [ "${2:-}" = toy ]; then out="$OUT/engine-toy.json" toy=true; fi
  try_and_report "$PYTHON" -m lab.benchmarks.engine part="$1" out="$out" toy="$toy" seconds=360 target="${TARGET:-null}"
}

online() {
  local out="$OUT/online.json" toy=false
  if [ "${1:-}" = toy ]; then out="$OUT/online-toy.json" toy=true; fi
  timeout 530 "$PYTHON" -m lab.benchmarks.online out="$out" toy="$toy" || [ $? -eq 124 ]
}

families() {
  local target_path=()
  [ -n "${RUNS:-}" ] || { echo "gpu_check.sh families: name run folders in RUNS" >&2; exit 2; }
  [ -n "${TARGET:-}" ] && target_path=("target.path=$TARGET")
  for run in $RUNS; do
    timeout 120 "$PYTHON" -m spectrain eval run="$run" "${target_path[@]}" eval.engine=captured eval.name=captured \
      eval.limit=10 eval.max_new_tokens=64 || { echo "gpu_check.sh families: $run failed" >&2; continue; }
    cp "$run/eval/captured/summary.json" "$OUT/gpu-$(basename "$run")-captured.json"
  done
}

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

scale() {
  local out="$OUT/scale.json" toy=false
  if [ "${1:-}" = toy ]; then out="$OUT/scale-toy.json" toy=true; fi
  timeout 530 "$PYTHON" -m lab.benchmarks.scale out="$out" toy="$toy" steps=20 target="${TARGET:-null}"
}

bench() {
  timeout 200 "$PYTHON" -m spectrain bench decode "${target[@]}" | tee "$OUT/gpu-bench-decode.txt"
  timeout 200 "$PYTHON" -m spectrain bench train recipe=eagle3 "${target[@]}" | tee "$OUT/gpu-bench-train.txt"
}

case "$PART" in
  kernels) kernels "${@:2}" ;;
  engine) engine "${@:2}" ;;
  online) online "${@:2}" ;;
  families) families ;;
  train) train ;;
  score) score ;;
  bench) bench ;;
  scale) scale "${@:2}" ;;
  *) echo "gpu_check.sh: $PART is no part; use kernels, engine, online, families, bench, train, score or scale" >&2; exit 2 ;;
esac
