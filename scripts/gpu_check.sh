#!/usr/bin/env bash
# What only a GPU can tell: whether the kernels are right and how near their floors they come, what the engine reaches at 135M,
# 1.5B and 8B size, and EAGLE-3 on SmolLM2, trained and scored in bf16 with T = 7 and the whole embedded set.
#
#   OUT=lab/results bash scripts/gpu_check.sh first [toy]
#   OUT=lab/results bash scripts/gpu_check.sh kernels [ceilings|correctness|table|tuning|divergence] [toy]
#   OUT=lab/results MODEL=1.5b bash scripts/gpu_check.sh engine counts|identity|single|batched|training [toy]
#   OUT=lab/results bash scripts/gpu_check.sh online [toy]
#   RUNS="DIR ..." OUT=lab/results bash scripts/gpu_check.sh families
#   TARGET=DIR OUT=lab/results bash scripts/gpu_check.sh bench|train|score
#   TARGET=DIR OUT=lab/results bash scripts/gpu_check.sh scale [toy]
#
# first compiles kernels, by 12 processes at once, and runs, one after another, what only a card can tell: every kernel against
# float64, captured rounds against the loop, the table of tree attention, rounds of one text at 135M, 1.5B and 8B, a training
# step, the fused losses, rounds of several texts, and the search for better tiles. It ends after 530 seconds, and the same call
# again goes on where it ended. It needs torch, triton, rich, transformers and peft alone; a test refuses every other package.
# kernels, without a name all five, measures what $OUT/kernels.json has not yet, for 7 minutes at most, and says how much
# is left; the same call again goes on. So does engine, with $OUT/engine.json (engine-1.5b.json for MODEL=1.5b), 6 minutes and
# what the last row takes. Each row is written as soon as it is measured. With toy they take seconds, on any machine, to see
# that every line of them runs. kernels needs torch, triton and rich, engine transformers and peft too; the others need what
# spectrain needs, whose wheels `python -m scripts.travelling_wheels` names.
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
MODEL=${MODEL:-8b}
END=$((SECONDS + ${LIMIT:-530})) # of kernels, engine and first
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
unset TRITON_INTERPRET SPECTRAIN_KERNELS
# Nothing is installed on that machine: the packages that online reads are where they are.
for package in packages/*/; do PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/${package%/}"; done
export PYTHONPATH
mkdir -p "$OUT"

# One command in up to three processes, until END: what ends one of them is noted in its file, and the next goes on.
tries() {
  local code=0
  for _ in 1 2 3; do
    code=0
    timeout $((END - SECONDS)) "$@" || code=$?
    case $code in 0 | 124) return 0 ;; 2) return 2 ;; esac
    [ $((END - SECONDS)) -gt 60 ] || break
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
  local name=engine toy=false
  [ $# -gt 0 ] || { echo "gpu_check.sh engine: say which, counts, identity, single, batched or training" >&2; exit 2; }
  [ "$MODEL" = 8b ] || name="engine-$MODEL"
  if [ "${2:-}" = toy ]; then name="$name-toy" toy=true; fi
  try_and_report "$PYTHON" -m lab.benchmarks.engine part="$1" out="$OUT/$name.json" toy="$toy" seconds=360 \
    model="$MODEL" target="${TARGET:-null}"
}

# A part that fails leaves its rows, and the next one runs.
first() {
  local code=0
  next_part compile "$@" || code=$?
  next_part kernels correctness "$@" || code=$?
  next_part engine identity "$@" || code=$?
  next_part kernels table "$@" || code=$?
  MODEL=135m next_part engine single "$@" || code=$?
  MODEL=1.5b next_part engine single "$@" || code=$?
  next_part engine single "$@" || code=$?
  next_part engine training "$@" || code=$?
  next_part kernels divergence "$@" || code=$?
  next_part engine batched "$@" || code=$?
  next_part engine counts "$@" || code=$?
  next_part kernels tuning "$@" || code=$?
  return "$code"
}

# The kernels of the correctness cases, by many processes at once, before the first of them is measured.
compile() {
  local out="$OUT/kernels.json" small=()
  if [ "${1:-}" = toy ]; then out="$OUT/kernels-toy.json" small=(processes=2 toy=true); fi
  [ -e "$out" ] || "$PYTHON" -m lab.benchmarks.compile_cases "${small[@]}"
}

# A part, if there is time to begin it.
next_part() {
  [ $((END - SECONDS)) -gt 30 ] || { echo "gpu_check.sh first: no time is left for $*; run it again"; return 0; }
  "$@"
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
  first) first "${@:2}" ;;
  kernels) kernels "${@:2}" ;;
  engine) engine "${@:2}" ;;
  online) online "${@:2}" ;;
  families) families ;;
  train) train ;;
  score) score ;;
  bench) bench ;;
  scale) scale "${@:2}" ;;
  *) echo "gpu_check.sh: $PART is no part; use first, kernels, engine, online, families, bench, train, score or scale" >&2; exit 2 ;;
esac
