"""Weights as safetensors: written from a run, read without it, refused when damaged."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import build, train

from metadist import FewShotClassifier
from metadist.cli import command
from metadist.errors import UserError
from metadist.inference import pretrained_weights
from metadist.reports import read_results
from metadist.training import export_weights
from metadist.training.checkpoints import Checkpoints, read_checkpoint

IMAGES = np.random.default_rng(0).integers(0, 256, (9, 28, 28), dtype=np.uint8)
LABELS = ["ant", "bee", "cat"]


def predictions(classifier: FewShotClassifier) -> np.ndarray:
    return classifier.fit(IMAGES[:3], LABELS).predict_proba(IMAGES[3:])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    normalize = ("dataset.normalize.mean=[0.2]", "trainer.test_checkpoint=best")
    train(str(directory), "strategy=local", "callbacks=ema", *normalize)
    return directory


@pytest.fixture(scope="module")
def weights(run):
    return export_weights(run, run.parent / "tiny_maml.safetensors")


def test_the_file_alone_is_enough(run, weights, tmp_path):
    expected = predictions(FewShotClassifier.load(run))
    alone = shutil.copy(weights, tmp_path / "elsewhere.safetensors")
    assert np.array_equal(predictions(FewShotClassifier.load(alone)), expected)
    assert not np.array_equal(expected[0], expected[1])


def test_the_metadata_say_what_the_weights_are(run, weights):
    results = read_results(run)
    with safe_open(weights, framework="pt") as file:
        metadata = file.metadata()
        names = set(file.keys())
    assert json.loads(metadata["protocol"]) == results["protocol"]
    assert json.loads(metadata["method"]) == results["method"]
    names_of_results = ("test_accuracy", "ci95", "test_tasks", "iterations", "seed")
    exported = json.loads(metadata["results"])
    assert exported == {n: results[n] for n in (*names_of_results, "tested_iteration")}
    best = read_checkpoint(Checkpoints(run).best_path(results["tested_iteration"]))
    assert names == best["learner"].keys()
    assert str(run).encode() not in weights.read_bytes()


@pytest.mark.parametrize(
    "options", [("algorithm=maml_plus_plus",), ("model.running_statistics=true",)]
)
def test_buffers_are_exported(tmp_path, options):
    train(str(tmp_path / "run"), "strategy=local", *options)
    path = export_weights(str(tmp_path / "run"), f"{tmp_path}/a.safetensors")
    expected = predictions(FewShotClassifier.load(tmp_path / "run"))
    assert np.array_equal(predictions(FewShotClassifier.load(path)), expected)


def test_weights_initialize_a_run(run, weights, tmp_path):
    x = build(tmp_path, "strategy=local", f"init_from={weights}")
    saved = FewShotClassifier.load(run).learner.state_dict()
    assert all(torch.equal(saved[name], each) for name, each in x.learner.state_dict().items())


def test_pretrained_weights_are_found_by_name(run, weights, tmp_path, monkeypatch):
    for name in ("tiny_maml", "tiny_anil"):
        shutil.copy(weights, tmp_path / f"{name}.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.setenv("METADIST_PRETRAINED", f"~/{tmp_path.name}")
    installed = next(iter(pretrained_weights()))
    shutil.copy(weights, tmp_path / f"{installed}.safetensors")  # precedes the installed one
    assert pretrained_weights()[installed].parent == tmp_path
    assert pretrained_weights()["tiny_maml"] == tmp_path / "tiny_maml.safetensors"
    expected = predictions(FewShotClassifier.load(run))
    assert np.array_equal(predictions(FewShotClassifier.load("tiny_maml")), expected)
    with pytest.raises(UserError, match=r"did you mean tiny_maml\?.* names are .*tiny_anil, tiny_"):
        FewShotClassifier.load("tiny_mamml")
    monkeypatch.chdir(run.parent)  # an existing path takes precedence
    (tmp_path / "run.safetensors").write_bytes(b"")
    assert np.array_equal(predictions(FewShotClassifier.load("run")), expected)


def test_damaged_and_foreign_files_are_refused(weights, tmp_path):
    whole, path = weights.read_bytes(), tmp_path / "a.safetensors"
    for content in (b"", whole[:100], whole[:-10], b"\xff" * 200):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"weights file .*a\.safetensors cannot be read"):
            FewShotClassifier.load(path)
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(UserError, match="was not written by this version of metadist"):
        FewShotClassifier.load(path)
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"]["task"] = "{"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    with pytest.raises(UserError, match="has damaged metadata"):
        FewShotClassifier.load(path)
    header["__metadata__"]["task"] = '{"input_shape": [1, 28, 28], "outputs": 4, "regression": 0}'
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    with pytest.raises(UserError, match="does not fit the configuration that it holds"):
        FewShotClassifier.load(path)
    header["__metadata__"]["model"] = '{"_target_": "os.system", "command": "true"}'
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    with pytest.raises(UserError, match="is not a class that metadist knows"):
        FewShotClassifier.load(path)


def test_the_command(run, tmp_path, monkeypatch, capsys):
    def call(*arguments: str) -> int | None:
        monkeypatch.setattr("sys.argv", ["metadist", "export", *arguments])
        return command.main()

    assert call(str(run), "--output", str(tmp_path / "mine.safetensors")) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'mine.safetensors'} (")
    assert call(str(run)) == 0
    size = (run / "weights.safetensors").stat().st_size
    assert capsys.readouterr().out == f"{run / 'weights.safetensors'} ({size / 1000:.0f} kB)\n"
    assert call(str(run), "--output", str(tmp_path / "mine.pt")) == 2
    assert "does not end in .safetensors" in capsys.readouterr().err
    assert call(str(tmp_path)) == 2
    assert "holds no results.json" in capsys.readouterr().err


def test_a_checkpoint_in_place_of_the_run_is_refused(weights):
    with pytest.raises(UserError, match="is a file: give the directory of a finished run"):
        export_weights(weights, weights.with_name("other.safetensors"))


def test_paths_are_left_out_and_another_state_is_refused(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    overrides = "- +dataset.root=/home/me\n- seed=0\n- resume=/home/me/run\n"
    (copy / ".hydra").mkdir()
    (copy / ".hydra" / "overrides.yaml").write_text(overrides)
    with safe_open(export_weights(copy, tmp_path / "a.safetensors"), framework="pt") as file:
        assert json.loads(file.metadata()["overrides"]) == ["seed=0"]
    results = read_results(run)
    changed = {**results, "tested_iteration": results["tested_iteration"] + 1, "iterations": 1}
    (copy / "results.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match=r"is not the state that .* tested"):
        export_weights(copy, tmp_path / "b.safetensors")
