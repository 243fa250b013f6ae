#!/usr/bin/env bash
# torchrun starts any executable, not only Python: --no-python runs what it is given as it is.
#
#   torchrun --standalone --nproc_per_node=2 --no-python experiments/primitives/any_executable.sh
#   torchrun --standalone --nproc_per_node=2 --no-python hostname
set -euo pipefail
echo "rank ${RANK:-none} of ${WORLD_SIZE:-none}: bash, process $$, on $(uname -n)"
