# fmt: off
# ruff: noqa
"""Document 000, the full example.

Its `worker_init_fn` reads a global `args`, and its imports leave out argparse and setproctitle:
both are given here, beside the filled-in `...`.
"""
import argparse
import types

import torch
import torch.nn as nn
import metadist as todist

seen = {'losses': [], 'titles': []}
setproctitle = types.SimpleNamespace(setproctitle=seen['titles'].append)
args = argparse.Namespace(seed=5)
data = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1))


def parse_arguments():
    parser = argparse.ArgumentParser(description='TorchOpt Distributed Training')
    parser.add_argument('--lr', type=float, default=0.1)
    parser.add_argument('--epochs', type=int, default=4)

    args = parser.parse_args()
    return args

def worker_init_fn():
    # set process title, seeding, etc.
    setproctitle.setproctitle(f'Worker{todist.get_rank()}')
    torch.manual_seed(args.seed + todist.get_rank())

@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def compute_loss(model, batch):
    device = torch.device(f'cuda:{todist.get_local_rank()}')
    model = model.to(device)
    batch = batch.to(device)

    # Compute local loss of the given batch
    loss = model(batch).square().mean()
    return loss.cpu()

def build_model():
    return nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)
    )

@todist.rank_zero_only
def train(args):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    train_loader = data

    for epoch in range(args.epochs):
        for batch in train_loader:
            with todist.autograd.context() as context_id:
                # Forward pass
                cloned_model = todist.module_clone(model, by='clone')
                loss = compute_loss(cloned_model, batch)

                # Backward pass
                optimizer.zero_grad()
                todist.autograd.backward(context_id, loss)

                # Update parameters
                optimizer.step()

                seen['losses'].append(loss.item())

@todist.auto_init_rpc(worker_init_fn)
def main():
    args = parse_arguments()
    train(args)

if __name__ == '__main__':
    main()
    if todist.get_rank() == 0:
        print(seen['losses'])
