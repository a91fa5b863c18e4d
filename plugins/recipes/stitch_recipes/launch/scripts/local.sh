#!/usr/bin/env bash
# On one host: local.sh start NAME SCRIPT ARGUMENT... | stop | status | ready COUNT SECONDS | claim
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Those that were started here. A trainer goes first, so that nothing fails under it, and replicas last.
names() {
  local name file
  for name in train ray-worker ray-head collector compactor gateway; do
    [[ ! -e $state/$name.pid ]] || echo "$name"
  done
  for file in "$state"/replica-*.pid; do
    [[ ! -e $file ]] || basename "$file" .pid
  done
}

case ${1:-} in
start)
  name=$2 script=$3
  shift 3
  start "$name" "$here/$script" "$@"
  ;;
stop)
  for name in $(names); do
    # Replicas of one host drain side by side.
    if [[ $name == replica-* ]]; then stop "$name" "$drain_seconds" & else stop "$name" 90; fi
  done
  wait
  ;;
status)
  for name in $(names); do
    if id=$(process "$name"); then echo "$name: process $id"; else echo "$name: ended, see $state/$name.log"; fi
  done
  ;;
ready)
  enter
  exec python3 -m stitch_recipes.launch.ready "http://127.0.0.1:$gateway_port" --replicas "$2" --seconds "$3"
  ;;
claim)
  enter
  # A claim fences the trainer that runs, so that it is for a run that is not there yet.
  if "${versions[@]}" >/dev/null 2>&1; then
    say "run $run is there: it goes on"
  else
    exec "${claim[@]}"
  fi
  ;;
*) die "local.sh start NAME SCRIPT ARGUMENT... | stop | status | ready COUNT SECONDS | claim" ;;
esac
