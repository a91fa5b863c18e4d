#!/usr/bin/env bash
# End everything that launch.sh started, on all hosts: the trainer first, replicas last, which drain.
# What was published and saved stays: ./launch.sh goes on from there.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
failed=0
for host in "${everywhere[@]}"; do
  "${ssh[@]}" "$host" "cd '$there' && ./local.sh stop" </dev/null || {
    say "$host: not stopped"
    failed=1
  }
done
exit "$failed"
