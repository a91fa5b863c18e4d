#!/usr/bin/env bash
# One more node of the trainer's Ray cluster, in the foreground: ray-worker.sh HEAD
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
enter
exec env "${trainer_environment[@]}" ray start --address "$1:$ray_port" --num-gpus "$trainer_gpus" \
  --disable-usage-stats --block
