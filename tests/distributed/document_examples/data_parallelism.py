# fmt: off
# ruff: noqa
"""Documents 000 and 001, "Predefined partitioners and reducers": data parallelism."""
import argparse

import torch

import metadist as todist

seen = {'losses': [], 'expected': []}


def loss_fn(model, batch):
    return model(batch).square().mean()

@todist.rank_zero_only
def train(args):

    for epoch in range(args.epochs):
        model = torch.nn.Linear(2, 1)
        dataloader = torch.randn(3, 7, 2)

        for batch in dataloader:
            # Partition the data on the batch (first) dimension and distribute them to the remote workers
            # Aggregate the results from the remote workers and return the mean loss
            loss = todist.remote_sync_call(
                loss_fn,
                args=(model, batch),
                partitioner=todist.batch_partitioner,
                reducer=todist.mean_reducer,
            )

            seen['losses'].append(loss)
            seen['expected'].append(loss_fn(model, batch).detach())


@todist.auto_init_rpc()
def main():
    train(argparse.Namespace(epochs=2))
