"""`metadist predict`: a table and a CSV file of predictions for a folder of images."""

import csv
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import finished_run

from metadist import FewShotClassifier
from metadist.cli.command import exit_status
from metadist.cli.predict import main
from metadist.tasks import Glyphs

PIXELS = np.stack(
    Glyphs(train_classes=1, validation_classes=1, test_classes=3, examples=4).split_classes("test")
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "run"
    return finished_run(directory, "algorithm=prototypical", "trainer.iterations=1")


@pytest.fixture
def folders(tmp_path) -> list[str]:
    for name, images in zip(("cat", "ant", "bee"), PIXELS, strict=True):
        for folder, chosen in (("support", images[:1]), ("query/new", images[1:])):
            for number, image in enumerate(chosen):
                path = tmp_path / folder / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(path)
    return ["--support", str(tmp_path / "support"), "--query", str(tmp_path / "query")]


def predict(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["metadist predict", *arguments])
    return exit_status(main)


def test_the_table_and_the_file_have_what_the_classifier_predicts(
    run, folders, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert predict(monkeypatch, str(run), *folders) == 0
    header, *rows = csv.reader((tmp_path / "predictions.csv").open(encoding="utf-8"))
    assert header == ["image", "prediction", "ant", "bee", "cat"]
    classifier = FewShotClassifier.load(run).fit(PIXELS[:, 0], ["cat", "ant", "bee"])
    query = PIXELS[[1, 2, 0], 1:].reshape(-1, 28, 28)
    names = [f"new/{name}/{number}.png" for name in header[2:] for number in range(3)]
    assert [row[0] for row in rows] == names
    assert [row[1] for row in rows] == classifier.predict(query).tolist()
    found = np.array([row[2:] for row in rows], float)
    np.testing.assert_allclose(found, classifier.predict_proba(query), atol=1e-5)
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["image", "prediction", "probability"]
    shown = [[*row[:2], f"{max(map(float, row[2:])):.1%}"] for row in rows]
    assert [line.split() for line in lines] == shown
    assert last == "9 images: predictions.csv"


def test_a_checkpoint_and_a_single_image(run, folders, tmp_path, monkeypatch):
    (checkpoint,) = (run / "checkpoints").glob("iteration-*.pt")
    image, output = tmp_path / "query" / "new" / "bee" / "1.png", tmp_path / "a.csv"
    arguments = [*folders[:2], "--query", str(image), "--output", str(output)]
    assert predict(monkeypatch, str(checkpoint), *arguments) == 0
    lines = output.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 and lines[1].startswith("1.png,")


def test_a_name_that_is_no_text_is_kept(run, folders, tmp_path, monkeypatch, capsys):
    image = next((tmp_path / "query" / "new" / "bee").glob("*.png"))
    name = os.fsdecode(b"\xff.png")
    try:
        image.rename(image.with_name(name))
    except OSError:
        pytest.skip("the file system refuses such names")
    output = tmp_path / "a.csv"
    assert predict(monkeypatch, str(run), *folders, "--output", str(output)) == 0
    assert b"\xff.png," in output.read_bytes() and "?.png" in capsys.readouterr().out


def test_device_and_trust_are_those_of_the_command_line(run, folders, tmp_path, monkeypatch):
    given, load = [], FewShotClassifier.load

    def record(path, device, trust_code):
        given.append((device, trust_code))
        return load(path)

    monkeypatch.setattr(FewShotClassifier, "load", record)
    monkeypatch.chdir(tmp_path)
    assert predict(monkeypatch, str(run), *folders) == 0
    assert predict(monkeypatch, str(run), *folders, "--device", "cuda:1", "--trust-code") == 0
    assert given == [("cpu", False), ("cuda:1", True)]


@pytest.mark.parametrize("option", [0, 2])
def test_directories_without_images_are_refused(
    run, folders, option, tmp_path, monkeypatch, capsys
):
    (tmp_path / "empty").mkdir()
    folders[option + 1] = str(tmp_path / "empty")
    assert predict(monkeypatch, str(run), *folders) == 2
    location = ("in class folders", "", "in it")[option]
    assert f"empty has no images {location}: give" in capsys.readouterr().err
    folders[option + 1] = str(tmp_path / "missing")
    assert predict(monkeypatch, str(run), *folders) == 2
    assert "missing" in capsys.readouterr().err


def test_a_class_without_images_is_refused(run, folders, tmp_path, monkeypatch, capsys):
    (Path(folders[1]) / "cow").mkdir()
    (Path(folders[1]) / "cow" / "photo.heic").write_bytes(b"of another format")
    assert predict(monkeypatch, str(run), *folders) == 2
    assert "has no images of cow: add some (.jpg" in capsys.readouterr().err
