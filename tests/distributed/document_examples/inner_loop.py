# fmt: off
# ruff: noqa
"""Documents 000 and 001, "Predefined partitioners and reducers": MAML's inner loop.

The document calls a function of three parameters with two arguments: a default stands in for the
third, so that the code can run as it is printed.
"""
import argparse

import torch

import metadist as todist
import metadist as torchopt

seen = {'losses': [], 'expected': []}


def inner_loss_fn(model, task_batch):
    return (model(task_batch[:, :2]) - task_batch[:, 2:]).square().mean()


def inner_loop(model, task_batch, args):
    # task_batch: shape = (B, *)
    inner_model = torchopt.module_clone(model, by='reference', detach_buffers=True)

    # Inner optimization
    for inner_step in range(args.inner_steps):
        inner_loss = inner_loss_fn(inner_model, task_batch)

        # Update the inner model
        parameters = inner_model._parameters
        gradients = torch.autograd.grad(inner_loss, list(parameters.values()), create_graph=True)
        for (name, parameter), gradient in zip(list(parameters.items()), gradients):
            parameters[name] = parameter - 0.1 * gradient

    # Compute the outer loss
    outer_loss = inner_loss_fn(inner_model, task_batch)
    return outer_loss

@todist.rank_zero_only
def train(args):

    for epoch in range(args.epochs):
        model = torch.nn.Linear(2, 1)
        dataloader = torch.randn(2, 5, 6, 3)

        for batch in dataloader:
            # batch: shape = (T, B, *)
            outer_loss = todist.remote_sync_call(
                inner_loop,
                args=(model, batch),
                partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
                reducer=todist.mean_reducer,
            )

            seen['losses'].append(outer_loss)
            seen['expected'].append(expected_outer_loss(model, batch))


inner_loop.__defaults__ = (argparse.Namespace(inner_steps=2),)


def expected_outer_loss(model, batch):
    """The derivative of the squared error by hand, for each task in turn."""
    losses = []
    for task in batch.detach():
        x, y = task[:, :2], task[:, 2:]
        weight, bias = model.weight.detach(), model.bias.detach()
        for _ in range(2):
            error = x @ weight.T + bias - y
            weight = weight - 0.1 * (2 * error * x).mean(0, keepdim=True)
            bias = bias - 0.1 * (2 * error).mean(0)
        losses.append((x @ weight.T + bias - y).square().mean())
    return torch.stack(losses).mean()


@todist.auto_init_rpc()
def main():
    train(argparse.Namespace(epochs=2))
