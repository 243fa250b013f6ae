"""Training on a GPU; run by `test_on_gpu.py`."""

import numpy as np
import pytest
import torch
from tiny import build, finished_run, records, without_times
from torch.profiler import profile
from worlds import run_world

from metadist.algorithms import MAML
from metadist.config import load_experiment
from metadist.errors import UserError
from metadist.inference import FewShotClassifier, evaluate_run
from metadist.kernels.matmul import matmul
from metadist.models import Conv4
from metadist.tasks import Episode, Examples
from metadist.training import Trainer, compile_step
from metadist.training.batching import to_device
from metadist.training.cuda_graph import capture
from metadist.training.export import export_weights
from metadist.training.outer_step import StepArguments, outer_step
from metadist.training.replay import parse_key, replay


def trained(directory: str, *overrides: str) -> bool | None:
    """Train on the GPU; whether the step was captured."""
    x = build(directory, "device=cuda", *overrides)
    compile_step(x)
    Trainer(x).run()
    return x.train_mapper.compiled is not None


def test_a_captured_run_has_the_bits_of_an_eager_one(tmp_path):
    names = ("auto", "true", "false")
    for name in names:
        compiled = trained(str(tmp_path / name), "strategy=local", f"trainer.compile={name}")
        assert compiled == (name != "false")
    auto, true, eager = (without_times(records(tmp_path / name)) for name in names)
    assert auto == true == eager


@pytest.mark.parametrize(
    "options",
    [
        ("model.pooling=max",),
        ("model=resnet12", "model.widths=[8,8,8,8]"),  # convolutions of cuDNN
    ],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, options):
    def run(name: str, *more: str) -> None:
        omit = ("model.filters",) if "model=resnet12" in options else ()
        common = ("device=cuda", "strategy=local", *options)
        x = build(tmp_path / name, *common, *more, omit=omit)
        compile_step(x)
        Trainer(x).run()

    run("whole")
    run("parts", "trainer.iterations=2")
    run("parts", "resume=auto")
    whole, parts = (without_times(records(tmp_path / name))[-3:] for name in ("whole", "parts"))
    assert whole == parts


@pytest.mark.parametrize("strategy", ["allreduce", "rpc"])
def test_two_workers_on_a_gpu_agree_with_one_up_to_rounding(tmp_path, strategy):
    trained(str(tmp_path / "one"), "strategy=local")
    run_world(trained, 2, str(tmp_path / "two"), f"strategy={strategy}")
    one, two = (without_times(records(tmp_path / name)) for name in ("one", "two"))
    for mine, other in zip(one, two, strict=True):
        assert mine == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("pooling", ["max", "stride"])
def test_a_step_with_kernels_agrees_with_one_of_pytorch(pooling):
    gradients = []
    for native in (True, False):
        torch.manual_seed(0)
        model = Conv4((1, 21, 17), 3, 16, pooling, native=native).double()
        learner = MAML(model, inner_steps=2).cuda().train()
        inputs = torch.randn(2, 4, 9, 1, 21, 17, dtype=torch.float64, device="cuda")
        targets = (torch.arange(9, device="cuda") % 3).expand(4, 9)
        episodes = Episode(Examples(inputs[0], targets), Examples(inputs[1], targets))
        parameters = dict(learner.named_parameters())
        weights = torch.ones(4, dtype=torch.float64, device="cuda")
        with profile() as profiler:
            arguments = StepArguments(learner, parameters, episodes, weights)
            step_sum = outer_step(arguments)
        kernels = {event.key for event in profiler.key_averages()}
        assert ("_weight_grad" in kernels) == native
        gradients.append([step_sum.result.loss, *step_sum.gradients])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("algorithm", ["maml", "maml_plus_plus", "prototypical"])
def test_what_follows_a_run_on_a_gpu_agrees_with_the_cpu(tmp_path, algorithm):
    options = ("device=cuda", f"algorithm={algorithm}", "callbacks=ema", "trainer.report=true")
    run = finished_run(tmp_path / "run", *options)
    assert (run / "report.html").exists() and (run / "test_tasks.png").exists()
    replayed = replay(load_experiment(run), parse_key("0,train,4,0"))
    assert replayed.plot is not None and np.isfinite(replayed.loss)
    weights = export_weights(run, tmp_path / "weights.safetensors")
    images = np.random.default_rng(0).integers(256, size=(10, 28, 28)).astype(np.uint8)
    found = []
    for device in ("cuda", "cpu"):
        results = evaluate_run(run, f"device={device}", checkpoint=[run, weights])
        classifier = FewShotClassifier.load(weights, device=device).fit(images[:6], [0, 1, 2] * 2)
        found.append((results["test_loss"], classifier.predict_proba(images)))
    (loss, probabilities), (cpu_loss, cpu_probabilities) = found
    assert loss == pytest.approx(cpu_loss, rel=1e-2)
    np.testing.assert_allclose(probabilities, cpu_probabilities, atol=1e-2)


def test_tasks_that_diverge_on_a_gpu_are_found(tmp_path):
    options = ("strategy=local", "algorithm.inner_lr=1e30", "algorithm.inner_steps=3")
    with pytest.raises(UserError, match="first the one with key 0,train,1,"):
        trained(str(tmp_path), *options)


def test_expanded_tensors_are_copied_to_a_gpu():
    """Such as grey images as color images, and one label for all examples."""
    images = torch.rand(4, 1, 5, 5).expand(-1, 3, -1, -1)
    examples = Examples(images, torch.ones((), dtype=torch.int64).expand(4))
    for part in to_device(Episode(examples, examples), torch.device("cuda")):
        assert part.inputs.is_cuda and part.targets.is_cuda
        assert torch.equal(part.inputs.cpu(), images) and part.targets.tolist() == [1] * 4


def test_a_function_that_reads_a_value_is_not_captured():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        capture(lambda x: [x * x.sum().item()], [x])
    double = capture(lambda x: [2 * x], [x])  # and the GPU works as before
    assert double(torch.full((3,), 4.0, device="cuda"))[0].tolist() == [8.0] * 3


def test_products_in_blocks_of_rows_and_their_derivatives_are_those_of_whole_products():
    torch.manual_seed(0)
    shapes = (2, 5 * 8191, 4), (2, 4, 3), (2, 3)
    a, b, bias = (
        torch.randn(shape, dtype=torch.float64, device="cuda", requires_grad=True)
        for shape in shapes
    )
    results = []
    for product in (matmul(a, b, bias), a @ b + bias.unsqueeze(1)):
        first = torch.autograd.grad(product.sin().sum(), (a, b, bias), create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), (a, b, bias))
        results.append([product, *first, *second])
    torch.testing.assert_close(*results)
