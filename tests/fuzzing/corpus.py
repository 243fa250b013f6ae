"""The corpus: generate the cases, run them, count the results."""

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from fuzzing.case import SMALL, Case, Result, run_case


class Report(NamedTuple):
    """The results of a corpus.

    Attributes:
        errors: of the cases that must end with an error.
        recoveries: of the corruptions from which a run must recover.
        seconds: total duration.
    """

    errors: list[Result]
    recoveries: list[Result]
    seconds: float


def run_corpus(
    configurations: int,
    files: int,
    seed: int = 0,
    recoveries: int = 9,
    on_result: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Generate and run a corpus.

    Args:
        configurations: number of invalid configurations, sampled from all kinds.
        files: number of corrupted files, sampled from all kinds.
        seed: of all random choices.
        recoveries: number of corruptions from which a run recovers, at most nine.
        on_result: called with each result.
    """
    _import_everything()
    # Imported here, after the number of threads is set.
    from fuzzing.corrupted_datasets import corrupted_datasets
    from fuzzing.corrupted_runs import corrupted_checkpoints, corrupted_runs
    from fuzzing.corrupted_runs import recoveries as recovery_cases
    from fuzzing.invalid_configurations import invalid_configurations

    started, rng = time.monotonic(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="metadist-fuzzing-") as folder:
        scratch = Path(folder)
        intact = scratch / "intact-run"
        result = run_case(Case("", "", (*SMALL, f"hydra.run.dir={intact}")), scratch)
        if result.status != 0:
            raise RuntimeError(f"the intact run failed: {result.err}")
        invalid = _sample(invalid_configurations(scratch, rng), configurations, rng)
        corrupted = corrupted_checkpoints(intact, scratch, rng)
        corrupted += corrupted_runs(intact, scratch, rng) + corrupted_datasets(scratch, rng)
        recovering = recovery_cases(intact, scratch, rng)
        recovering += [case for case in corrupted if case.recovers]
        failing = [case for case in corrupted if not case.recovers]
        failing = invalid + _sample(failing, files, rng)
        recovering = _sample(recovering, recoveries, rng)

        def run_all(cases: Iterable[Case]) -> list[Result]:
            results = []
            for case in cases:
                results.append(run_case(case, scratch))
                on_result(results[-1])
            return results

        return Report(run_all(failing), run_all(recovering), time.monotonic() - started)


def _sample(cases: list[Case], number: int, rng: random.Random) -> list[Case]:
    if number > len(cases):
        raise ValueError(f"{number} cases requested, but there are only {len(cases)} of this kind")
    return rng.sample(cases, number)


def _import_everything() -> None:
    """Import the modules that the forked processes need."""
    import hydra.core.plugins
    import torch
    import torch._dynamo
    import torch.distributed.rpc

    import metadist.cli  # noqa: F401

    torch.set_num_threads(1)
    hydra.core.plugins.Plugins.instance()


def rows(seed: int = 0, configurations: int = 200, files: int = 200) -> list[tuple[str, str]]:
    """Rows of a table: the kind of case, and "N of M" passed."""
    report = run_corpus(configurations, files, seed)
    passed, total = Counter(), Counter()
    for result in report.errors:
        invalid = result.case.kind == "configuration"
        kind = "invalid configurations" if invalid else "corrupted files"
        total[kind] += 1
        passed[kind] += result.passed
    found = [(kind, f"{passed[kind]} of {total[kind]}") for kind in total]
    recovered = sum(result.passed for result in report.recoveries)
    return [*found, ("recovery from corruption", f"{recovered} of {len(report.recoveries)}")]


def main() -> int:
    """Run a corpus from the command line and print the counts.

    Returns:
        The exit status: 1 if any case failed.
    """
    parser = argparse.ArgumentParser(prog="python -m fuzzing")
    parser.add_argument("--configurations", type=int, default=200)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--recoveries", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print every result")
    options = parser.parse_args()

    def show(result: Result) -> None:
        if options.show or not result.passed:
            mark = "      " if result.passed else "FAILED"
            arguments = " ".join(each for each in result.case.arguments if each not in SMALL)
            output = (result.err or result.out)[-1500:].strip()
            print(f"{mark} {result.case.kind}, {result.case.name}: {arguments}")
            print(f"       status {result.status}, {result.seconds:.1f} s: {output}", flush=True)

    report = run_corpus(
        options.configurations, options.files, options.seed, options.recoveries, show
    )
    kinds = Counter(result.case.kind for result in report.errors)
    passed = Counter(result.case.kind for result in report.errors if result.passed)
    for kind, number in sorted(kinds.items()):
        print(f"{kind:<24} {passed[kind]:>4} of {number:>4} ended with one sentence and status 2")
    recovered = sum(result.passed for result in report.recoveries)
    print(f"{'recoveries':<24} {recovered:>4} of {len(report.recoveries):>4} resumed")
    number = sum(passed.values())
    print(f"{number} of {len(report.errors)} invalid inputs passed, {report.seconds:.0f} s")
    return 0 if number + recovered == len(report.errors) + len(report.recoveries) else 1
