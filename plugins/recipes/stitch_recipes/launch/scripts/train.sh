#!/usr/bin/env bash
# The trainer, on the head of its Ray cluster, started again when it fails: it claims the run, which fences the
# one before, resumes from its newest checkpoint and counts on. Nothing is trained on twice but what was not saved.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
enter
restarts=${STITCH_RESTARTS:-$restarts} # without an hour of progress between them
base=${STITCH_RESTART_SECONDS:-5}
child=
trap '[[ -z $child ]] || kill -TERM "$child" 2>/dev/null; wait; exit 143' TERM INT

failures=0
while true; do
  began=$SECONDS
  env "${trainer_environment[@]}" "RAY_ADDRESS=127.0.0.1:$ray_port" "${trainer[@]}" &
  child=$!
  code=0
  wait "$child" || code=$?
  child=
  ((code != 0)) || exit 0
  ((SECONDS - began < 3600)) || failures=0
  ((++failures <= restarts)) || die "the trainer failed $failures times (now with $code): read the log, then launch again"
  # 10 s, doubled up to 5 minutes, less a random part: what failed together does not come back together.
  most=$((base * 2 ** (failures < 6 ? failures : 6)))
  ((most <= 300)) || most=300
  pause=$((most / 2 + RANDOM % (most / 2 + 1)))
  say "the trainer ended with $code; start $((failures + 1)) in $pause s (run $run goes on)"
  sleep "$pause" &
  wait $!
done
