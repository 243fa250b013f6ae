#!/usr/bin/env bash
# torchrun can start any executable: with --no-python it runs the program as it is.
#
#   torchrun --standalone --nproc_per_node=2 --no-python experiments/primitives/any_executable.sh
#   torchrun --standalone --nproc_per_node=2 --no-python hostname
set -euo pipefail
echo "rank ${RANK:-none} of ${WORLD_SIZE:-none}: bash, process $$, on $(uname -n)"
