# fmt: off
# ruff: noqa
"""Documents 000 and 001, "Function parallelization wrappers"."""
import argparse

import torch

import metadist as todist
import metadist as torchopt
from document_examples.inner_loop import expected_outer_loss, inner_loss_fn

seen = {'losses': [], 'expected': []}


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def distributed_data_parallelism(model, batch, args):
    # Compute local loss of the given batch
    loss = model(batch).square().mean() * args.scale
    return loss

@todist.parallelize(
    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
    reducer=todist.mean_reducer,
)
def inner_loop(model, batch, args):  # distributed MAML inner loop
    # batch: shape = (B, *)
    inner_model = torchopt.module_clone(model, by='reference', detach_buffers=True)

    # Inner optimization
    task_batch = batch
    parameters = inner_model._parameters
    for inner_step in range(args.inner_steps):
        inner_loss = inner_loss_fn(inner_model, task_batch)
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
            outer_loss = inner_loop(model, batch, args)

            seen['losses'].append(outer_loss)
            seen['expected'].append(expected_outer_loss(model, batch))
            whole = batch.flatten(0, 1)[:, :2]
            seen['losses'].append(distributed_data_parallelism(model, whole, args))
            seen['expected'].append(model(whole).square().mean().detach() * args.scale)


@todist.auto_init_rpc()
def main():
    train(argparse.Namespace(epochs=2, inner_steps=2, scale=3.0))
