#!/usr/bin/env bash
# The head of the trainer's Ray cluster, in the foreground. Its processes inherit the trainer's environment.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
enter
exec env "${trainer_environment[@]}" ray start --head --port "$ray_port" --num-gpus "$trainer_gpus" \
  --include-dashboard=false --disable-usage-stats --block
