# fmt: off
# ruff: noqa
"""Document 000, the warning that parameters lose their graph: a parameter."""
import torch
import torch.distributed.rpc as rpc

import metadist as todist

seen = {}


def compute_loss(param):
    return param.mean()


@todist.auto_init_rpc()
@todist.rank_zero_only
def main():
    with todist.autograd.context() as context_id:
        param = torch.nn.Parameter(torch.randn(2, 2), requires_grad=True)

        # The RPC call will detach the parameter from the Autograd graph on worker1
        loss1 = rpc.rpc_sync('worker1', compute_loss, args=(param,))

        # The RPC call will keep connection to the parameter in the Autograd graph on worker1
        loss2 = rpc.rpc_sync('worker1', compute_loss, args=(param.clone(),))

        seen['values'] = loss1.item(), loss2.item()
        # One backward pass through both: what is detached adds nothing.
        seen['gradient'] = todist.autograd.grad(context_id, loss1 + loss2, [param])[0]
