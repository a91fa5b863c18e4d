#!/usr/bin/env bash
# The gateway, in the foreground. It finds replicas by their records in the store; GET /status says which.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
enter
exec "${gateway[@]}"
