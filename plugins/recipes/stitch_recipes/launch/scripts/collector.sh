#!/usr/bin/env bash
# Deletes what nobody can need any more, once a day. It may fail and be started at any time.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
enter
trap 'exit 0' TERM
while true; do
  nice "${collector[@]}" || say "the collector failed; it runs again tomorrow, or by hand: ${collector[*]}"
  sleep 86400 &
  wait $!
done
