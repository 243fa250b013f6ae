"""The example of Ray's PyTorchTrainer, as its documentation had it; only the import is changed."""

import argparse

import numpy as np
import ray
import torch
import torch.nn as nn

from metadist.launchers.ray.pytorch_trainer import PyTorchTrainer


class LinearDataset(torch.utils.data.Dataset):
    """y = a * x + b"""

    def __init__(self, a, b, size=1000):
        x = np.arange(0, 10, 10 / size, dtype=np.float32)
        self.x = torch.from_numpy(x)
        self.y = torch.from_numpy(a * x + b)

    def __getitem__(self, index):
        return self.x[index, None], self.y[index, None]

    def __len__(self):
        return len(self.x)


def model_creator(config):
    return nn.Linear(1, 1)


def optimizer_creator(model, config):
    """Returns criterion, optimizer"""
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-4))
    return criterion, optimizer


def data_creator(config):
    """Returns training set, validation set"""
    return LinearDataset(2, 5), LinearDataset(2, 5, size=400)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default=None)
    args = parser.parse_args()

    ray.init(args.address)
    trainer1 = PyTorchTrainer(
        model_creator,
        data_creator,
        optimizer_creator,
        num_replicas=2 * 1,
        use_gpu=False,
        batch_size=512,
        backend="gloo",
    )

    print(trainer1.train())
    trainer1.shutdown()
    print("success!")
