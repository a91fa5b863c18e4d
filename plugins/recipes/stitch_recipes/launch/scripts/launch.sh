#!/usr/bin/env bash
# Start the run on the hosts of the site, from any machine that reaches them without a password.
#
#   ./launch.sh install                  once: Stitch on every host, by install.sh, which says what it is made for
#   ./launch.sh                          everything else, in order
#   ./launch.sh prepare | serve | train  a part of it: prompts and checkpoints; replicas and gateway; the trainer
#   ./launch.sh status                   what runs where
#   ./stop.sh                            ends it all; what was published and saved stays
#
# Start it again at any time, as after a host was lost: what runs is left alone, what does not is started, and
# the trainer resumes run and checkpoint. For a new run render again with another `run` in site.toml.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ship() {
  local host
  for host in "${everywhere[@]}"; do
    # Of tar, 1 is that something changed meanwhile, such as the log of this that somebody keeps here.
    { tar -C "$here" --exclude ./state -cf - . || (($? == 1)); } |
      "${ssh[@]}" "$host" "mkdir -p '$there' && tar -C '$there' -xf -" ||
      die "$host cannot be reached: is it in the site as ssh knows it?"
  done
}

# HOST WORD...: one of the scripts, there.
on() {
  local host=$1
  shift
  "${ssh[@]}" "$host" "cd '$there' && $(printf '%q ' "$@")" </dev/null
}

install() {
  local host kind
  for host in "${everywhere[@]}"; do
    kind=gateway
    [[ " ${replica_hosts[*]} " != *" $host "* ]] || kind=replica
    [[ " ${hosts[*]} " != *" $host "* ]] || kind=trainer
    on "$host" ./install.sh "$kind"
  done
}

prepare() {
  everyone "${hosts[@]}" -- ./prepare.sh
  together
  everyone "${serving_hosts[@]}" -- ./prepare.sh served
}

# HOST... -- WORD...: one of the scripts on all of these hosts. The first one goes alone, so that what they share is
# there for the others; those go at once, since what they do not share can be terabytes for each.
everyone() {
  local host line i names=() jobs=() failed=0
  while [[ $1 != -- ]]; do
    names+=("$1")
    shift
  done
  shift
  ((${#names[@]} > 0)) || return 0
  on "${names[0]}" "$@"
  for host in "${names[@]:1}"; do
    { on "$host" "$@" 2>&1 | while IFS= read -r line; do say "$host: $line"; done; } &
    jobs+=($!)
  done
  for i in "${!jobs[@]}"; do
    wait "${jobs[i]}" || {
      say "${names[i + 1]}: $* failed"
      failed=1
    }
  done
  ((failed == 0)) || exit 1
}

# What one host has no room for: the trainer's hosts share the directory of models.
together() {
  local i jobs=()
  for ((i = 0; i < ${convert_nodes:-0}; i++)); do
    on "${hosts[i]}" ./prepare.sh together "$i" "${hosts[0]#*@}" &
    jobs+=($!)
  done
  for i in "${jobs[@]}"; do wait "$i"; done
}

serve() {
  local i
  on "${first}" ./local.sh claim
  for i in "${!replica_hosts[@]}"; do
    on "${replica_hosts[i]}" ./local.sh start "replica-${replica_slots[i]}" replica.sh "${replica_slots[i]}" "${replica_hosts[i]#*@}"
  done
  on "$gateway_host" ./local.sh start gateway gateway.sh
  ((${#compactor[@]} == 0)) || on "$gateway_host" ./local.sh start compactor compactor.sh
  on "$gateway_host" ./local.sh start collector collector.sh
}

train() {
  local host
  ((${#hosts[@]} > 0)) || return 0
  say "waiting for $want of ${#replica_hosts[@]} replicas: training stands still without them"
  on "$gateway_host" ./local.sh ready "$want" "${STITCH_READY_SECONDS:-$ready_seconds}"
  on "${hosts[0]}" ./local.sh start ray-head ray-head.sh
  for host in "${hosts[@]:1}"; do on "$host" ./local.sh start ray-worker ray-worker.sh "${hosts[0]#*@}"; done
  on "${hosts[0]}" ./local.sh start train train.sh
}

status() {
  local host
  for host in "${everywhere[@]}"; do
    echo "$host:"
    on "$host" ./local.sh status
  done
}

part=${1:-all}
case $part in
all | install | prepare | serve | train) ship ;;
status) ;;
*) die "launch.sh [install | prepare | serve | train | status]" ;;
esac
if [[ $part == all ]]; then
  prepare
  serve
  train
else
  "$part"
fi
[[ $part == install || $part == prepare || $part == status ]] || say "run $run: ask at http://${gateway_host#*@}:$gateway_port; logs are in $there/state; stop it with $here/stop.sh"
