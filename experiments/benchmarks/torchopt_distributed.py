"""The rival TorchOpt: MAML as the documentation of torchopt.distributed has it.

torchrun --standalone --nproc_per_node=2 experiments/benchmarks/torchopt_distributed.py --tasks 8

Rank zero draws the tasks and sends each to a worker; the graph spans the workers, and distributed
autograd brings the gradient home. With many tasks it may hang, as its threads wait for each other.
"""

import torch
import torch.nn.functional as F
import torchopt
import torchopt.distributed as todist
from problem import INNER_LR, OUTER_LR, conv4, few_shot, measure, words
from torch import Tensor, nn

from metadist.tasks import stack_episodes, task_keys

ASKED = words()


@todist.parallelize(
    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
    reducer=todist.mean_reducer,
)
def query_loss(
    model: nn.Module, inputs: Tensor, targets: Tensor, queries: Tensor, answers: Tensor
) -> Tensor:
    """What a worker does with one task."""
    model = torchopt.module_clone(model, by="reference", detach_buffers=True)
    inner = torchopt.MetaSGD(model, lr=INNER_LR)
    for _ in range(ASKED.inner_steps):
        inner.step(F.cross_entropy(model(inputs), targets))
    return F.cross_entropy(model(queries), answers)


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    """Rank zero trains; the others serve."""
    train()
    todist.barrier()


@todist.rank_zero_only
def train() -> None:
    """Train for the number of steps that is asked for."""
    torch.manual_seed(0)
    tasks = few_shot(ASKED)
    model = conv4(ASKED.pooling)
    optimizer = torch.optim.Adam(model.parameters(), OUTER_LR)

    def step(iteration: int) -> float:
        keys = task_keys(0, "train", iteration, range(ASKED.tasks))
        (inputs, targets), (queries, answers) = stack_episodes([tasks.sample(key) for key in keys])
        with todist.autograd.context() as context_id:
            clone = torchopt.module_clone(model, by="clone")
            loss = query_loss(clone, inputs, targets, queries, answers)
            optimizer.zero_grad()
            todist.autograd.backward(context_id, loss)
        optimizer.step()
        return loss.item()

    print(measure(ASKED, step), flush=True)


if __name__ == "__main__":
    main()
