#!/usr/bin/env bash
# An example that was NOT RUN here, because it needs verl, vLLM and GPUs. verl trains in stretches. After each one the policy
# answers the prompts anew, the drafter is continued on these answers and scored beside the one in use, and the better one drafts
# in the next stretch: vLLM takes it by rollout.engine_kwargs.vllm.speculative_config.
#
#   MODEL=ORG/NAME RUN=runs/eagle3-NAME PROMPTS=prompts.jsonl HELD_OUT=held-out.jsonl bash examples/reinforcement/verl.sh WORDS..
#
# WORDS are further settings of verl, as data.train_files=.. and the reward. PROMPTS holds the prompts that verl trains on, and
# HELD_OUT others of the same kind, one conversation per line as docs/data.md says.
set -euo pipefail
steps=${STEPS:-50}
work=${WORK:-verl-work}
drafter=$RUN
speculative=actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config

# Prints the lower (0) or upper (1) end of the interval of tokens per forward that a score has.
interval() {
  python -c 'import json, sys; print(json.load(open(sys.argv[1]))["acceptance_length"]["ci95"][int(sys.argv[2])])' \
    "$1/eval/$2/summary.json" "$3"
}

for ((stretch = 1; stretch <= ${STRETCHES:-10}; stretch++)); do
  total=$((stretch * steps))
  spectrain export run="$drafter" format=vllm out="$work/served-$stretch"
  python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.rollout.name=vllm \
    "+$speculative.method=eagle3" "+$speculative.model=$work/served-$stretch" "+$speculative.num_speculative_tokens=3" \
    trainer.default_local_dir="$work/policy" trainer.resume_mode=auto trainer.save_freq="$steps" \
    trainer.total_training_steps="$total" "$@"
  python -m verl.model_merger merge --backend fsdp \
    --local_dir "$work/policy/global_step_$total/actor" --target_dir "$work/target-$stretch"

  policy=(target=hf target.model="$work/target-$stretch")
  candidate="$work/drafter-$stretch"
  spectrain data regenerate "${policy[@]}" run="$drafter" data=jsonl data.path="$PROMPTS" out="$work/answers-$stretch"
  spectrain train recipe=eagle3 "${policy[@]}" data=jsonl data.path="$work/answers-$stretch" \
    drafter.init="$drafter" trainer.max_minutes="${MINUTES:-20}" eval=none run="$candidate"
  for scored in "$drafter" "$candidate"; do
    spectrain eval run="$scored" "${policy[@]}" tree=chain eval.prompts="$HELD_OUT" eval.name="stretch-$stretch"
  done
  if python -c 'import sys; sys.exit(float(sys.argv[1]) <= float(sys.argv[2]))' \
    "$(interval "$candidate" "stretch-$stretch" 0)" "$(interval "$drafter" "stretch-$stretch" 1)"; then
    drafter=$candidate
  fi
done
