#!/usr/bin/env bash
# Several nodes: one torchrun agent per node, with a common rendezvous endpoint.
# This script starts two agents on one machine.
#
#   experiments/primitives/multi_node.sh [script] [arguments…]
#
# On real nodes, run on each of them, with the first node's name in HEAD and the same RUN:
#
#   torchrun --nnodes=2 --nproc_per_node=2 --rdzv-backend=c10d --rdzv-id="$RUN" \
#       --rdzv-endpoint="$HEAD:29500" script.py
#
# and name the network interface that the nodes share (NCCL_SOCKET_IFNAME for NCCL):
#
#   export TP_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
#
# RPC executes what it receives, without authentication: use a private network.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# -gt 0 ] || set -- "$here/multi_node.py"
python=${PYTHON:-python}
port=${PORT:-29500}
export OMP_NUM_THREADS=1 TP_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo

node() {
    "$python" -m torch.distributed.run --nnodes=2 --nproc_per_node="${NPROC_PER_NODE:-1}" \
        --rdzv-backend=c10d --rdzv-id="$1" --rdzv-endpoint="127.0.0.1:$port" \
        --local-addr=127.0.0.1 "${@:2}"
}

run=multi-node-$$
node "$run" "$@" &
first=$!
node "$run" "$@" &
second=$!
status=0
wait "$first" || status=$?
wait "$second" || status=$?
exit "$status"
