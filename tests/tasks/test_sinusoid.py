import numpy as np
import torch

from metadist.tasks import FewShotTasks, Sinusoid, TaskDataset, task_keys


def test_points_lie_on_one_wave_within_the_papers_bounds():
    tasks = FewShotTasks(Sinusoid(), ways=5, shots=10, queries=7)
    assert (tasks.input_shape, tasks.outputs, tasks.regression) == ((1,), 1, True)
    assert isinstance(Sinusoid(), TaskDataset)
    amplitudes, phases = [], []
    for key in task_keys(0, "train", 0, range(300)):
        support, query = tasks.sample(key)
        assert support.inputs.shape == support.targets.shape == (10, 1)
        assert query.inputs.shape == query.targets.shape == (7, 1)
        x = torch.cat([support.inputs, query.inputs])
        y = torch.cat([support.targets, query.targets])
        assert x.dtype == y.dtype == torch.float32
        assert x.abs().max() <= 5
        assert len(x.unique()) == 17
        # a sin(x - p) = (a cos p) sin x - (a sin p) cos x: linear in two numbers.
        basis = torch.cat([x.sin(), -x.cos()], dim=1).double().numpy()
        fit, *_ = np.linalg.lstsq(basis, y.double().numpy(), rcond=None)
        assert np.abs(basis @ fit - y.numpy()).max() < 1e-5
        amplitudes.append(np.hypot(*fit[:, 0]))
        phases.append(np.arctan2(fit[1, 0], fit[0, 0]))
    assert 0.1 <= min(amplitudes) < 0.3
    assert 4.8 < max(amplitudes) <= 5 + 1e-5
    assert -1e-5 <= min(phases) < 0.1
    assert np.pi - 0.1 < max(phases) <= np.pi + 1e-5


def test_equal_keys_give_equal_tasks():
    tasks = FewShotTasks(Sinusoid(), shots=5, queries=5)
    one, again, other = (
        tasks.sample(task_keys(3, "test", 0, range(4))[row]).query.targets for row in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_splits_have_other_tasks():
    tasks = FewShotTasks(Sinusoid(), shots=5, queries=5)
    sampled = [
        tasks.sample(task_keys(3, split, 0, range(1))[0]).query.targets
        for split in ("train", "validation", "test")
    ]
    assert len({targets.numpy().tobytes() for targets in sampled}) == 3


def test_protocol_names_no_ways():
    assert FewShotTasks(Sinusoid(), ways=9, shots=10, queries=10).protocol() == {
        "ways": 1,
        "shots": 10,
        "queries": 10,
        "dataset": "sinusoid",
    }
