#!/usr/bin/env bash
# Train several recipes at once, each in a job of Slurm, by Hydra's launcher for it: pip install "spectrain[cluster]".
#
#   bash examples/cluster/sweep.sh recipe=eagle3,medusa1,mtp trainer.lr=1e-3,2e-3
#
# LAUNCHER=submitit_local runs the jobs on this machine instead, PARTITION names a partition. Every job has a run folder with its
# number in runs/sweep; the same command continues what has stopped. `spectrain compare runs/sweep-*` shows the finished runs.
set -euo pipefail
launcher=${LAUNCHER:-submitit_slurm}
resources=(hydra.launcher.timeout_min="${MINUTES:-720}" hydra.launcher.cpus_per_task="${CPUS:-8}")
[ "$launcher" = submitit_local ] || resources+=(hydra.launcher.gpus_per_node="${GPUS:-1}")
[ -z "${PARTITION:-}" ] || resources+=(hydra.launcher.partition="$PARTITION")
# Hydra fills in the number of the job.
# shellcheck disable=SC2016
spectrain train -m hydra/launcher="$launcher" "${resources[@]}" target=smollm2 'run=runs/sweep-${hydra:job.num}' \
  trainer.resume=auto "$@"
