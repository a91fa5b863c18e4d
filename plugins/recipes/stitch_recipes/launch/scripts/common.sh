#!/usr/bin/env bash
# What the other scripts share: settings, secrets, and processes that are started once and ended by name.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=settings.sh
source "$here/settings.sh"
# Logs and process ids of this host.
state=$here/state

say() { printf '%s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

# The environment that `activate` names.
activated() {
  set +u # activate scripts look at variables that are not set
  # shellcheck source=/dev/null
  [[ -z $activate ]] || source "$activate"
  set -u
}

# The environment in which programs run on this host: what `activate` names, then secrets.
enter() {
  local name file
  activated
  for name in "${secrets[@]}"; do
    file=$HOME/.config/stitch/$name.env
    [[ -r $file ]] || die "$file is not there: lines NAME=value, readable by you alone (secret $name of the site)"
    set -a
    # shellcheck source=/dev/null
    source "$file"
    set +a
  done
}

# When a process began, in ticks since the boot: with its id it names one process, which an id alone does not.
began() {
  local stat fields
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  read -ra fields <<<"${stat##*) }" # what is before may have blanks
  printf '%s' "${fields[19]}"
}

# The id of the process that was started as NAME, if it still runs.
process() {
  local id time now
  read -r id time 2>/dev/null <"$state/$1.pid" || return 1
  now=$(began "$id") || return 1
  [[ $now == "$time" ]] || return 1
  printf '%s' "$id"
}

# NAME PROGRAM ARGUMENT...: in the background and in a session of its own, unless it runs.
start() {
  local name=$1 id
  shift
  mkdir -p "$state"
  if id=$(process "$name"); then
    say "$name runs already, as process $id"
    return
  fi
  setsid nohup "$@" >>"$state/$name.log" 2>&1 </dev/null &
  id=$!
  printf '%s %s\n' "$id" "$(began "$id")" >"$state/$name.pid.new"
  mv "$state/$name.pid.new" "$state/$name.pid"
  say "$name started, as process $id; its log is $state/$name.log"
}

# NAME SECONDS: ask it to end, and after so long end it with whatever it started.
stop() {
  local name=$1 seconds=$2 id
  if id=$(process "$name"); then
    kill -TERM "$id" 2>/dev/null || true
    for ((tenths = 0; tenths < seconds * 10; tenths++)); do
      process "$name" >/dev/null || break
      sleep 0.1
    done
    kill -KILL -- "-$id" 2>/dev/null || true # its session: children that outlived it, too
    say "$name ended"
  fi
  rm -f "$state/$name.pid"
}
