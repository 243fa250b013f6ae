# fmt: off
# ruff: noqa
"""Document 000, "Distributed Autograd": its examples in order, on one model and one batch.

The single-process ones give what the distributed ones are compared with.
"""
import torch
import torch.distributed.autograd as dist_autograd
import torch.optim as optim
import metadist as todist

seen = {}
lr = 0.5
data = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))


def build_model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def compute_loss(model, data):
    return model(data).square().mean()


def remote_loss(model):
    return todist.remote_sync_call(
        compute_loss,
        args=(todist.module_clone(model, by='clone'), data),
        partitioner=todist.batch_partitioner,
        reducer=todist.mean_reducer,
    )


def single_process_grad():
    model = build_model()
    loss = compute_loss(model, data)

    params = tuple(model.parameters())
    grads = torch.autograd.grad(loss, params)

    print(grads)

    seen['expected gradients'] = grads


def single_process_backward():
    model = build_model()
    optimizer = optim.SGD(model.parameters(), lr=lr)

    loss = compute_loss(model, data)

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    seen['expected parameters'] = [p.detach() for p in model.parameters()]


def raw_context():
    model = build_model()
    with dist_autograd.context() as context_id:
        # Forward pass
        loss = remote_loss(model)  # e.g. remote calls

        # Backward pass
        dist_autograd.backward(context_id, [loss])

        # Retrieve the gradients from the context.
        grad_dict = dist_autograd.get_gradients(context_id)  # type: Dict[Tensor, Tensor]

        seen['raw gradients'] = [grad_dict[p] for p in model.parameters()]


def with_grads():
    model = build_model()

    with todist.autograd.context() as context_id:
        # Forward pass
        loss = remote_loss(model)  # e.g. remote calls

        # Backward pass
        grads = todist.autograd.grads(context_id, loss, model.parameters())

    seen['gradients'] = grads


def with_backward():
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    with todist.autograd.context() as context_id:
        # Forward pass
        loss = remote_loss(model)  # e.g. remote calls

        # Backward pass
        optimizer.zero_grad()
        todist.autograd.backward(context_id, loss)
        optimizer.step()

    seen['parameters'] = [p.detach() for p in model.parameters()]


@todist.auto_init_rpc()
@todist.rank_zero_only
def main():
    single_process_grad()
    single_process_backward()
    raw_context()
    with_grads()
    with_backward()
