#!/usr/bin/env bash
# Merges deltas, so that a replica that joins takes few pieces. May run on any host, and be stopped at any time.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
enter
exec nice "${compactor[@]}"
