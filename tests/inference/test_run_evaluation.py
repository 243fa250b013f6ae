"""Testing a trained run under another protocol."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import finished_run, run_results

from metadist.algorithms import MAML
from metadist.config import load_experiment
from metadist.errors import UserError
from metadist.inference import evaluate_run
from metadist.inference.run_evaluation import load_for_tasks
from metadist.training import export_weights, saved_state
from metadist.training.checkpoints import Checkpoints


class OwnMAML(MAML):
    """An algorithm with an option of its own."""

    def __init__(self, model, *, shift=0.0, **options):
        super().__init__(model, **options)
        self.shift = shift


@pytest.mark.parametrize("name", ["maml", pytest.param("prototypical", marks=pytest.mark.slow)])
def test_without_options_it_is_the_test_of_the_run(request, name):
    run = request.getfixturevalue(name)
    found, expected = evaluate_run(run), run_results(run)
    for key in ("test_accuracy", "ci95", "test_loss", "protocol", "tested_iteration"):
        assert found[key] == expected[key], key
    assert found["trained_protocol"] == expected["protocol"]


@pytest.mark.parametrize("ways", [2, 5])
def test_outputs_that_are_classes_refuse_another_number_of_ways(maml, ways):
    expected = f"cannot be tested with {ways} outputs: MAML was trained with 3 .* task.ways=3"
    with pytest.raises(UserError, match=expected):
        evaluate_run(maml, f"task.ways={ways}")


def test_more_shots_and_inner_steps(maml):
    found = evaluate_run(maml, "task.shots=3", "algorithm.eval_inner_steps=5")
    assert found["protocol"]["shots"] == 3 and found["protocol"]["eval_inner_steps"] == 5


def test_the_inner_steps_of_training_are_those_of_the_checkpoint(maml, tmp_path):
    trained = finished_run(tmp_path / "other", "algorithm.inner_steps=2")
    found = evaluate_run(maml, checkpoint=trained)["protocol"]
    assert (found["inner_steps"], found["eval_inner_steps"]) == (2, 3)
    assert evaluate_run(maml, checkpoint=[maml, trained])["protocol"]["inner_steps"] == "1, 2"


def test_options_of_a_class_of_ones_own_are_those_that_it_declares(tmp_path):
    target = f"algorithm._target_={__name__}.OwnMAML"
    run = finished_run(tmp_path / "own", target, "+algorithm.shift=0.0")
    assert evaluate_run(run, "algorithm.shift=1.0", trust_code=True)["method"]["options"]["shift"]
    with pytest.raises(UserError, match=r"algorithm\.first_order=true is an option of .* OwnMAML"):
        evaluate_run(run, "algorithm.first_order=true", trust_code=True)


def test_only_the_test_split_must_have_enough_classes(prototypical):
    small = ("dataset.train_classes=3", "dataset.validation_classes=3")
    found = evaluate_run(prototypical, "task.ways=5", *small)
    assert found["protocol"]["ways"] == 5 and len(found["trained_on_other_classes"]) == 1
    with pytest.raises(UserError, match=r"task\.ways is 7, but the test split of glyphs has"):
        evaluate_run(prototypical, "task.ways=7")


def write_class_folders(root: Path) -> Path:
    generator = np.random.default_rng(0)
    for index in range(10):
        folder = root / f"class{index}"
        folder.mkdir(parents=True)
        for number in range(4):
            pixels = generator.integers(256, size=(30, 40), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def test_another_algorithm_adapts_its_own_parameters(prototypical):
    experiment = load_experiment(prototypical, "algorithm=maml")
    load_for_tasks(experiment, *saved_state.tested_checkpoint(prototypical))
    # Prototypical networks freeze the head, which MAML adapts.
    assert {"head.weight", "head.bias"} <= experiment.learner.eval().initial().keys()


def test_another_dataset_has_the_options_of_its_own_file(prototypical, tmp_path):
    root = write_class_folders(tmp_path / "images")
    of_folder = ("dataset.size=28", f"dataset.root={root}", "dataset=folder", "dataset.channels=1")
    fractions = ("dataset.validation_fraction=0.3", "dataset.test_fraction=0.3")
    found = evaluate_run(prototypical, *of_folder, *fractions)
    assert found["protocol"]["dataset"] == "folder"
    assert found["protocol"]["classes"] == {"train": 4, "validation": 3, "test": 3}
    assert found["trained_protocol"]["dataset"] == "glyphs"


@pytest.mark.parametrize("override", ["dataset=faces", "task.ways"])
def test_options_that_do_not_exist_are_refused(prototypical, override):
    with pytest.raises(UserError):
        evaluate_run(prototypical, override)


def test_another_model_is_one_sentence(maml):
    with pytest.raises(UserError, match="of another model or algorithm"):
        evaluate_run(maml, "model.filters=5")


def test_a_dataset_with_other_channels_is_refused(prototypical, tmp_path):
    for index, name in enumerate("abcdefghijklmnopqrst"):
        (tmp_path / name).mkdir()
        for number in range(4):
            pixels = Image.new("RGB", (28, 28), (10 * index, number, 0))
            pixels.save(tmp_path / name / f"{number}.png")
    options = ("dataset=folder", f"dataset.root={tmp_path}", "dataset.size=28")
    with pytest.raises(UserError, match=r"trained on images of shape \(1, 28, 28\), and the"):
        evaluate_run(prototypical, *options)
    assert evaluate_run(prototypical, *options, "dataset.channels=1")["test_tasks"] == 7


def test_a_checkpoint_that_does_not_exist_is_refused(maml):
    with pytest.raises(UserError, match=r"no checkpoint best: .* such as one of iteration-0000000"):
        evaluate_run(maml, checkpoint=Path("best"))


def test_pretrained_weights_are_no_run():
    with pytest.raises(UserError, match="metadist evaluate tests a run"):
        evaluate_run(Path("maml_omniglot_5w1s_cosine"))
    message = r"neither .* nor the name .* mean maml_omniglot_5w1s_cosine\?\).* --checkpoint NAME"
    with pytest.raises(UserError, match=message):
        evaluate_run(Path("maml_omniglot_5w1s"))


def test_a_checkpoint_in_place_of_the_run_is_refused(maml):
    with pytest.raises(UserError, match=r"is a file, not a run directory: .* --checkpoint FILE"):
        evaluate_run(maml / "checkpoints" / "iteration-00000002.pt")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a run directory"):
        evaluate_run(tmp_path)


def test_exported_weights_have_the_result_of_their_run(maml, tmp_path):
    weights = export_weights(maml, tmp_path / "weights.safetensors")
    found, expected = evaluate_run(maml, checkpoint=weights), run_results(maml)
    for key in ("test_accuracy", "protocol", "tested_iteration"):
        assert found[key] == expected[key], key


def test_the_named_checkpoint_of_a_run_that_tests_its_best(tmp_path):
    run = finished_run(tmp_path / "best", "trainer.test_checkpoint=best", "algorithm=prototypical")
    own = evaluate_run(run)
    assert own["protocol"] == own["trained_protocol"] == run_results(run)["protocol"]
    other = 2 if run_results(run)["tested_iteration"] == 4 else 4
    checkpoint = run / "checkpoints" / f"iteration-{other:08}.pt"
    assert evaluate_run(run, checkpoint=checkpoint)["tested_iteration"] == other


def test_the_protocol_has_the_counts_that_the_checkpoints_were_trained_with(maml, tmp_path):
    shots = evaluate_run(maml, "task.shots=3")["protocol"]
    assert (shots["shots"], shots["train_shots"]) == (3, 1) and "train_ways" not in shots
    other = finished_run(tmp_path / "other", "task.shots=3", "task.train_shots=1")
    assert run_results(other)["protocol"] == shots
    assert "train_shots" not in evaluate_run(other, "task.shots=1")["protocol"]
    three = Checkpoints(finished_run(tmp_path / "three", "task.shots=3")).newest()
    both = [Checkpoints(maml).newest(), three]
    assert evaluate_run(maml, checkpoint=both)["protocol"]["train_shots"] == "1, 3"
