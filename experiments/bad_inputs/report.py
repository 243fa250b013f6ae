"""The pile: generated, answered, counted."""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from bad_inputs.cases import SMALL, Answer, Case, answer


class Report(NamedTuple):
    """What came of a pile.

    Attributes:
        answers: of the cases that end in an error, one each.
        recoveries: of the damaged files that a run recovers from.
        seconds: for all of it.
    """

    answers: list[Answer]
    recoveries: list[Answer]
    seconds: float


def run_pile(
    configurations: int,
    files: int,
    seed: int = 0,
    recoveries: int = 9,
    tell: Callable[[Answer], None] = lambda answer: None,
) -> Report:
    """Generate a pile and let the program answer.

    Args:
        configurations: how many wrong configurations, drawn from all kinds.
        files: how many damaged files, drawn from all kinds.
        seed: of everything random.
        recoveries: how many damaged files that a run recovers from, at most nine.
        tell: called with each answer.
    """
    _import_everything()
    # Late: these import torch and the like, which belong after the threads are set.
    from bad_inputs.checkpoint_files import damaged_checkpoints, damaged_runs
    from bad_inputs.checkpoint_files import recoveries as recovering
    from bad_inputs.configurations import wrong_configurations
    from bad_inputs.dataset_files import damaged_datasets

    started, draw = time.monotonic(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as folder:
        scratch = Path(folder)
        good = scratch / "good-run"
        made = answer(Case("", "", (*SMALL, f"hydra.run.dir={good}")), scratch)
        if made.status != 0:
            raise RuntimeError(f"the undamaged run failed: {made.err}")
        wrong = _some(wrong_configurations(scratch, draw), configurations, draw)
        damaged = damaged_checkpoints(good, scratch, draw)
        damaged += damaged_runs(good, scratch, draw) + damaged_datasets(scratch, draw)
        mended = recovering(good, scratch, draw) + [case for case in damaged if case.recovers]
        damaged = [case for case in damaged if not case.recovers]
        chosen = wrong + _some(damaged, files, draw)
        mended = _some(mended, recoveries, draw)

        def ask(cases: Iterable[Case]) -> list[Answer]:
            found = []
            for case in cases:
                found.append(answer(case, scratch))
                tell(found[-1])
            return found

        return Report(ask(chosen), ask(mended), time.monotonic() - started)


def _some(cases: list[Case], number: int, draw: random.Random) -> list[Case]:
    if number > len(cases):
        raise ValueError(f"there are {len(cases)} cases of this sort, {number} were asked for")
    return draw.sample(cases, number)


def _import_everything() -> None:
    """So that the processes that are forked need not."""
    import hydra.core.plugins
    import torch
    import torch._dynamo
    import torch.distributed.rpc

    import metadist.cli  # noqa: F401

    torch.set_num_threads(1)
    hydra.core.plugins.Plugins.instance()


def rows(seed: int = 0, configurations: int = 200, files: int = 200) -> list[tuple[str, str]]:
    """The lines of a table: what was tried, and how many of how many were answered properly."""
    report = run_pile(configurations, files, seed)
    right, all_of = Counter(), Counter()
    for each in report.answers:
        kind = "wrong configurations" if each.case.kind == "configuration" else "damaged files"
        all_of[kind] += 1
        right[kind] += each.proper
    found = [(f"bad input: {kind}", f"{right[kind]} of {all_of[kind]}") for kind in all_of]
    mended = sum(each.proper for each in report.recoveries)
    found.append(("damage that a run recovers from", f"{mended} of {len(report.recoveries)}"))
    return found


def main() -> int:
    """Read the command line, run a pile and print what came of it; the exit status."""
    about = sys.modules["bad_inputs"].__doc__ or ""
    parser = argparse.ArgumentParser(description=about.split("\n\n")[-1])
    parser.add_argument("--configurations", type=int, default=200)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--recoveries", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print every answer")
    options = parser.parse_args()

    def tell(each: Answer) -> None:
        if options.show or not each.proper:
            mark = "   " if each.proper else "BAD"
            told = (each.err or each.out)[-1500:].strip()
            words = " ".join(word for word in each.case.words if word not in SMALL)
            print(f"{mark} {each.case.kind}, {each.case.name}: {words}")
            print(f"      status {each.status}, {each.seconds:.1f} s: {told}", flush=True)

    report = run_pile(options.configurations, options.files, options.seed, options.recoveries, tell)
    right = Counter(each.case.kind for each in report.answers if each.proper)
    for kind, number in sorted(Counter(each.case.kind for each in report.answers).items()):
        print(f"{kind:<24} {right[kind]:>4} of {number:>4} answered by one sentence and status 2")
    mended = sum(each.proper for each in report.recoveries)
    print(f"{'recoveries':<24} {mended:>4} of {len(report.recoveries):>4} went on by themselves")
    proper = sum(right.values())
    print(f"{proper} of {len(report.answers)} bad inputs answered, {report.seconds:.0f} s")
    return 0 if proper + mended == len(report.answers) + len(report.recoveries) else 1
