"""The presets of conf/experiment: complete, with published results, and each builds."""

import re

import numpy as np
import pytest
from omniglot_tree import character_names
from reproduction.cells import Cell, load_cells, select_cells
from tiny import CONF, compose

from metadist.config import build_experiment
from metadist.tasks import DecodedImages
from metadist.tasks.array_cache import CachedArray
from metadist.tasks.mini_imagenet import PUBLISHED

CELLS = load_cells()
PRESETS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))

# Shorten the sanity check; they change neither tasks nor steps.
FILTERS = {"omniglot": 2, "mini_imagenet": 1}


def test_every_preset_has_a_cell_and_every_cell_a_preset():
    assert sorted(CELLS) == PRESETS and len(PRESETS) > 20


@pytest.mark.parametrize("name", PRESETS)
def test_the_head_names_the_published_result_and_its_source(name):
    lines = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    head = " ".join(line for line in lines if line.startswith("#"))
    cell: Cell = CELLS[name]
    assert f"+experiment={name}" in head
    numbers = {float(number) for number in re.findall(r"\d+\.\d+", head)}
    scale = 100 if cell.metric == "accuracy" else 1
    assert {round(scale * value, 6) for value in cell.results.values() if value} <= numbers
    intervals = [float(number) for number in re.findall(r"± (\d+\.\d+)%", head)]
    assert intervals == ([] if cell.interval is None else [round(100 * cell.interval, 6)])
    assert cell.source.partition(",")[0] in head


@pytest.mark.parametrize(
    ("name", "paper"),
    [
        ("maml_mini_imagenet_5w1s", 0.01),
        ("maml_omniglot_20w1s", 0.1),
        ("maml_omniglot_5w1s", 0.4),
        ("maml_omniglot_5w1s_no_conv", 0.4),
    ],
)
def test_the_head_has_the_inner_rates_of_mamls_paper_and_of_its_code(name, paper):
    # The code differentiates the sum of the loss over the classes.
    ways = compose(f"+experiment={name}").task.ways
    lines = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    head = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))
    assert f"inner rate is {paper}" in head or f"inner rate {paper}" in head
    assert f"{paper} acts as {round(paper * ways, 6)} " in head and "cbfinn/maml" in head


@pytest.mark.parametrize(
    ("name", "paper"),
    [
        *((f"maml_mini_imagenet_{task}", 0.01) for task in ("5w1s", "5w5s")),
        ("fomaml_mini_imagenet_5w1s", 0.01),
        *((f"maml_omniglot_{task}", 0.1) for task in ("20w1s", "20w5s")),
        ("fomaml_omniglot_20w1s", 0.1),
    ],
)
def test_mamls_rates_are_those_of_its_code_for_a_mean_loss(name, paper):
    # The code differentiates the sum over all queries, divided by the number of shots.
    x = compose(f"+experiment={name}")
    assert x.algorithm.inner_lr == pytest.approx(paper * x.task.ways)
    if "mini_imagenet" in name:
        sums = x.task.ways * x.task.train_queries / x.task.shots
        assert x.trainer.clip_value == pytest.approx(10 / sums, rel=0.005)
    else:
        assert x.trainer.clip_value is None


def noise(names: list[str], examples: int, *shape: int) -> CachedArray:
    """Every class has the same images of noise."""
    images = np.random.default_rng(0).integers(256, size=(1, examples, *shape), dtype=np.uint8)
    return CachedArray(np.broadcast_to(images, (len(names), *images.shape[1:])), names)


@pytest.fixture(scope="module")
def held():
    """What the datasets would find in their files."""
    classes = [f"{part}/{name}" for part, names in PUBLISHED.items() for name in names]
    return {
        "mini_imagenet": noise(classes, 40, 3, 84, 84),
        "omniglot": noise(character_names(), 20, 28, 28),
    }


# Shortened recipes have the tasks and the learner of another preset.
SHORTENED = [name for name in PRESETS if name.endswith("_cosine") or "_from_" in name]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SHORTENED else n for n in PRESETS],
)
def test_each_preset_processes_its_tasks(name, tmp_path, held, monkeypatch):
    dataset = CELLS[name].dataset
    configuration = compose(f"+experiment={name}")
    if dataset != "sinusoid":
        monkeypatch.setattr(DecodedImages, "_load", lambda *_: held[dataset])
    weights = configuration.get("init_from")  # they fit the preset's own model
    if "no_conv" not in name and weights is None and dataset in FILTERS:
        configuration.model.filters = FILTERS[dataset]
    x = build_experiment(configuration, tmp_path, "maml")  # with a sanity check
    protocol = {**x.tasks.protocol(), **x.learner.protocol()}
    assert protocol["dataset"] == dataset and x.trainer_config.eval_tasks >= 600
    differs = {k for k, v in CELLS[name].protocol.items() if k in protocol and protocol[k] != v}
    stated = "in evaluation" in CELLS[name].recipe
    assert differs == ({"eval_inner_steps"} if stated else set())


def test_presets_are_chosen_by_name_dataset_or_all():
    assert [cell.preset for cell in select_cells(CELLS, ["maml_sinusoid"])] == ["maml_sinusoid"]
    assert {cell.dataset for cell in select_cells(CELLS, ["mini_imagenet"])} == {"mini_imagenet"}
    assert len(select_cells(CELLS, ["all", "maml_sinusoid"])) == len(CELLS)
