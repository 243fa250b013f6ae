#!/usr/bin/env bash
# Several nodes: torchrun runs once on each, and the agents find each other at one address.
# Here two agents on one machine play two nodes.
#
#   experiments/primitives/several_nodes.sh [script] [arguments…]
#
# On real nodes, run on each of them, with the first node's name in HEAD and RUN the same word:
#
#   torchrun --nnodes=2 --nproc_per_node=2 --rdzv-backend=c10d --rdzv-id="$RUN" \
#       --rdzv-endpoint="$HEAD:29500" script.py
#
# and name the network that the nodes share, for RPC and for Gloo (NCCL has NCCL_SOCKET_IFNAME):
#
#   export TP_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
#
# Whoever reaches the RPC port can run code: let it be a network of your own.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# -gt 0 ] || set -- "$here/nodes_meet.py"
python=${PYTHON:-python}
port=${PORT:-29500}
export OMP_NUM_THREADS=1 TP_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo

node() {
    "$python" -m torch.distributed.run --nnodes=2 --nproc_per_node="${NPROC_PER_NODE:-1}" \
        --rdzv-backend=c10d --rdzv-id="$1" --rdzv-endpoint="127.0.0.1:$port" \
        --local-addr=127.0.0.1 "${@:2}"
}

run=several-nodes-$$
node "$run" "$@" &
first=$!
node "$run" "$@" &
second=$!
status=0
wait "$first" || status=$?
wait "$second" || status=$?
exit "$status"
