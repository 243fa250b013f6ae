"""Test a trained run under another protocol: metadist evaluate RUN task.ways=20 dataset=omniglot.

The learner is tested in one process, as at the end of its run, with the given options replaced:
the number of ways, shots or queries, the dataset, trainer.eval_tasks, options of the algorithm.
Prints the result and how its protocol differs from the run's own test, and writes both protocols
into a JSON file, with the predictions beside it, which `metadist compare` reads.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metadist.cli.command import add_trust_code, argument_parser
from metadist.files import REDIRECT_OUTPUT, prepare_output
from metadist.inference import evaluate_run
from metadist.loggers import flatten_values
from metadist.loggers.console import print_plain
from metadist.metrics import counted, format_estimate, metric_label, result_metric
from metadist.reports import (
    CHECKPOINT_DIRECTORY,
    format_differences,
    predictions_of_evaluation,
    protocol_differences,
    write_json,
)
from metadist.training.saved_state import split_differences

_DIRECTORY = "evaluations"
_MAX_NAME = 200  # characters of a file's name


def _checkpoint_name(run: Path, checkpoint: Path) -> str:
    """The name of pretrained weights or of one of the run's own checkpoints, else the path,
    relative to the run if in it.
    """
    if not checkpoint.exists():
        return str(checkpoint)
    checkpoint = checkpoint.resolve()
    if checkpoint.parent == run / CHECKPOINT_DIRECTORY and checkpoint.suffix == ".pt":
        return checkpoint.stem
    return str(checkpoint.relative_to(run) if checkpoint.is_relative_to(run) else checkpoint)


def _default_output(run: Path, overrides: tuple[str, ...], checkpoints: Sequence[Path]) -> Path:
    """The path of a file in the run's directory, named after the checkpoints and the overrides."""
    names = [_checkpoint_name(run, checkpoint) for checkpoint in checkpoints]
    parts = ",".join([*names, *overrides])
    name = re.sub(r"[^\w.,=+-]+", "_", parts, flags=re.ASCII) or "own_protocol"
    if len(name) > _MAX_NAME or (parts and name != parts):
        digest = hashlib.sha256(parts.encode()).hexdigest()[:8]
        name = f"{name[:_MAX_NAME]}-{digest}"
    return run / _DIRECTORY / f"{name}.json"


def summary(results: Mapping[str, Any]) -> list[str]:
    """The lines of the summary to print."""
    protocol, training = results["protocol"], results["trained_protocol"]
    metric = result_metric(results)
    value = format_estimate(results[f"test_{metric}"], results["ci95"], metric)
    note = " (95% interval over tasks)" if math.isfinite(results["ci95"]) else ""
    label = metric_label(metric, short=True)
    lines = [f"test {label} {value} over {counted(results['test_tasks'], 'task')}{note}"]
    tested = results["tested_iteration"]
    iterations = ", ".join(map(str, tested)) if isinstance(tested, list) else tested
    lines.append(f"  {results['checkpoint']}, iteration {iterations}")
    if training is None:
        return [*lines, "  the run itself has not been tested"]
    differences = protocol_differences({"its run": training, "here": protocol})
    notes = format_differences(differences) or ["the protocol is that of its run"]
    methods = {"its run": results.get("trained_method"), "here": results.get("method")}
    options = {  # an evaluation has no callbacks
        name: flatten_values({key: v for key, v in method.items() if key != "callbacks"})
        for name, method in methods.items()
        if method
    }
    changed = protocol_differences(options)
    notes += format_differences(
        {key: v for key, v in changed.items() if key.rpartition(".")[2] not in differences}
    )
    if results.get("trained_on_other_classes") or split_differences(training, protocol):
        notes.append("warning: classes of this test may have been among those of training")
    return [*lines, *(f"  {line}" for line in notes)]


def main() -> None:
    """Evaluate from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="options to replace")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        action="append",
        default=[],
        help="test this checkpoint; if repeated, the mean of the predictions of several",
    )
    parser.add_argument("--output", type=Path, help="default: a file in RUN/evaluations")
    add_trust_code(parser)
    options = parser.parse_intermixed_args()
    run, overrides = options.run.resolve(), tuple(options.overrides)
    output = options.output or _default_output(run, overrides, options.checkpoint)
    if options.output:
        prepare_output(output)
    results = evaluate_run(
        run,
        *overrides,
        checkpoint=options.checkpoint or None,
        trust_code=options.trust_code,
        predictions=predictions_of_evaluation(output),
    )
    write_json(output, results, REDIRECT_OUTPUT)
    print_plain("\n".join([*summary(results), f"  {output}"]))
