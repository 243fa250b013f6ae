"""The model: shapes, and a gradient for each parameter."""

import torch
from my_project.model import MyModel


def test_it_maps_inputs_to_outputs():
    model = MyModel(input_shape=(1, 8, 8), outputs=5, width=16)
    inputs = torch.zeros(3, 1, 8, 8)
    assert model.features(inputs).shape == (3, 16)
    assert model(inputs).shape == (3, 5)


def test_every_parameter_gets_a_gradient():
    model = MyModel(input_shape=(1, 8, 8), outputs=5)
    model(torch.ones(3, 1, 8, 8)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
