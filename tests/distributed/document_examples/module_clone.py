# fmt: off
# ruff: noqa
"""Document 000, the warning that parameters lose their graph: a module."""
import torch
import torch.distributed.rpc as rpc
import torch.nn as nn
import metadist as torchopt

seen = {}
batch = torch.ones(5, 2)


def compute_loss(model, batch):
    loss = model(batch).mean()
    return loss


@torchopt.auto_init_rpc()
@torchopt.rank_zero_only
def main():
    with torchopt.autograd.context() as context_id:
        model = nn.Linear(2, 2)
        tuple(model.parameters())  # -> `nn.Parameter`s

        cloned_model = torchopt.module_clone(model, by='clone')
        tuple(cloned_model.parameters())  # -> `torch.Tensor`s with `CloneBackward` grad_fn

        # The RPC call will detach the parameter from the Autograd graph on worker1
        loss1 = rpc.rpc_sync('worker1', compute_loss, args=(model, batch))

        # The RPC call will keep connection to the parameter in the Autograd graph on worker1
        loss2 = rpc.rpc_sync('worker1', compute_loss, args=(cloned_model, batch))

        seen['types'] = [type(p).__name__ for m in (model, cloned_model) for p in m.parameters()]
        seen['graphs'] = [type(p.grad_fn).__name__ for p in cloned_model.parameters()]
        seen['values'] = loss1.item(), loss2.item()
        # One backward pass through both: what is detached adds nothing.
        seen['gradients'] = torchopt.autograd.grad(context_id, loss1 + loss2, model.parameters())
