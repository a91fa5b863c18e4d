#!/usr/bin/env bash
# One replica, in the foreground: replica.sh SLOT ADDRESS. Slot 0 takes the first GPUs of the host, 1 the next.
# It follows the run by itself, from any version; GET /ready says whether it serves, and if not, why.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
slot=${1:-0}
port=$((replica_port + slot))
enter
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, $((slot * replica_gpus)) $((slot * replica_gpus + replica_gpus - 1)))}
for ((i = 0; i < ${#replica[@]}; i++)); do
  [[ ${replica[i]} != --port ]] || replica[i + 1]=$port
done
exec env "${replica_environment[@]}" "STITCH_HOST_DIR=$replica_host_dir/$slot" \
  "STITCH_ADDRESS=http://${2:-127.0.0.1}:$port" "${replica[@]}"
