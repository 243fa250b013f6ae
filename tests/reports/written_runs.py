"""Run directories with files as a run writes them."""

import json
from pathlib import Path

import yaml

IMAGE = "data:image/png;base64,iVBORw0KGgo="


def write_run(
    directory: Path, overrides=(), results=None, iterations=30, metric="accuracy"
) -> Path:
    (directory / ".hydra").mkdir(parents=True)
    configuration = {
        "seed": 3,
        "task": {"ways": 2, "shots": 1},
        "trainer": {"iterations": 50, "eval_seed": 7},
        "algorithm": {
            "_target_": "metadist.algorithms.MAML",
            "inner_steps": 1,
            "eval_inner_steps": 3,
        },
    }
    (directory / ".hydra" / "config.yaml").write_text(yaml.safe_dump(configuration))
    (directory / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    lines = []
    for i in range(1, iterations + 1):
        training = {"train_loss": 1 / i, f"train_{metric}": i / 100, "gradient_norm": 2.0 / i}
        times = {"learning_rate": 0.1, "tasks_per_second": 5.0, "seconds": 0.5 * i}
        lines.append({"iteration": i, **training, **times})
        if i % 10 == 0:
            validation = {f"validation_{metric}": i / 50, "validation_loss": 1.5 / i}
            lines.append({"iteration": i, **validation, "validation_ci95": 0.01})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    if results is not None:
        (directory / "results.json").write_text(json.dumps(results))
    return directory


def finished(directory: Path, overrides=(), **options) -> Path:
    results = {
        "test_accuracy": 0.75,
        "ci95": 0.02,
        "test_tasks": 4,
        "wall_seconds": 20.0,
        "evaluation_seconds": 2.0,
        "world_size": 2,
        "strategy": "rpc",
        "seed": 3,
        "test_accuracy_by_steps": [
            {"steps": 0, "mean": 0.5, "ci95": 0.03},
            {"steps": 1, "mean": 0.75, "ci95": 0.02},
        ],
        "protocol": {"ways": 2, "shots": 1, "dataset": "<b>glyphs</b>", "eval_seed": 7},
        "method": {"algorithm": "MAML"},
        "environment": {"torch": "2.15.0", "commit": "abc"},
        "warnings": ["a <warning>"],
    }
    write_run(directory, overrides, results | options.pop("results", {}), **options)
    predictions = [
        {"task": 0, "labels": [0, 1], "predictions": [0, 1], "accuracy": 1.0, "loss": 0.1},
        {"task": 1, "labels": [0, 1], "predictions": [1, 0], "accuracy": 0.0, "loss": 3.0},
        {"task": 2, "labels": [0, 1], "predictions": [0, 0], "accuracy": 0.5, "loss": 0.5},
        {"task": 3, "labels": [0, 1], "predictions": [1, 0], "accuracy": 0.0, "loss": 5.0},
    ]
    for task in predictions:
        task.update(classes=["cat", "<i>dog</i>"], query_images=[4, 5])
    text = "".join(json.dumps(line) + "\n" for line in predictions)
    (directory / "test_predictions.jsonl").write_text(text)
    shown = {
        "task": 3,
        "support": {"labels": [0, 1], "images": [IMAGE, IMAGE]},
        "query": {"indices": [1], "images": [IMAGE]},
    }
    typical = {**shown, "task": 2, "query": {"indices": [0, 1], "images": [IMAGE, IMAGE]}}
    content = {"hardest": [shown], "typical": [typical]}
    (directory / "test_tasks.json").write_text(json.dumps(content))
    return directory
