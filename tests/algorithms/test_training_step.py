"""Every algorithm takes a training step with every backbone."""

import pytest
import tiny
import torch

MODELS = {
    "resnet12": ["model=resnet12", "model.widths=[4,5,6,8]", "model.drop_rate=0.1"],
    "torchvision": ["model=torchvision", "model.name=resnet18"],
    "timm": ["model=timm", "model.name=resnet10t"],
}
ALGORITHMS = {
    "maml": [],
    "fomaml": [],
    "anil": [],
    "meta_sgd": [],
    "imaml": ["algorithm.inner_steps=2"],
    "maml_plus_plus": ["algorithm.inner_steps=2"],
    "prototypical": [],
    "reptile": ["algorithm.inner_steps=2", "algorithm.eval_inner_steps=2"],
}
PAIRS = [("resnet12", algorithm) for algorithm in ALGORITHMS]
SLOW = [("torchvision", name) for name in ("maml", "anil", "prototypical", "reptile")]
SLOW += [("timm", name) for name in ("maml", "prototypical")]
PAIRS += [pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW]


@pytest.mark.parametrize(("model", "algorithm"), PAIRS)
def test_a_training_step(tmp_path, model, algorithm):
    overrides = [*MODELS[model], f"algorithm={algorithm}", *ALGORITHMS[algorithm]]
    overrides += ["strategy=local", "trainer.meta_batch_size=2", "trainer.iterations=1"]
    overrides += ["trainer.eval_every=0", "trainer.eval_tasks=1"]
    experiment = tiny.build(tmp_path, *overrides, omit=("model.filters",))
    before = {n: p.detach().clone() for n, p in experiment.learner.named_parameters()}
    results = tiny.Trainer(experiment).run()
    changed = {n for n, p in experiment.learner.named_parameters() if not torch.equal(p, before[n])}
    assert torch.isfinite(torch.tensor(results["train_loss"]))
    # Distances of prototypes may be so large that the gradient of some parameters is zero.
    trained = {n for n, p in experiment.learner.named_parameters() if p.requires_grad}
    assert changed if algorithm == "prototypical" else changed >= trained
