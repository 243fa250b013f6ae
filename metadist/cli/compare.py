"""Compare two runs on their test tasks: metadist compare RUN RUN.

Prints the difference of the second run's test metric from the first one's, with its 95% interval,
and the options in which the runs differ. Both runs must have been tested on the same tasks: the
difference is taken task by task.
"""

from pathlib import Path

from metadist.cli.command import argument_parser
from metadist.loggers.console import print_plain
from metadist.metrics import format_metric, metric_label
from metadist.reports import (
    PairedDifference,
    compare_runs,
    flatten_config,
    format_differences,
    protocol_differences,
    read_config,
)


def summary(found: PairedDifference, first: Path, second: Path) -> list[str]:
    """The lines of the summary to print."""
    metric = found.metric
    width = max(len(str(path)) for path in (first, second))
    lines = [f"test {metric_label(metric, short=True)} over the same {found.tasks} tasks"]
    for path, mean in zip((first, second), found.means, strict=True):
        lines.append(f"  {path!s:<{width}}  {format_metric(mean, metric)}")
    line = f"difference {format_metric(found.difference, metric, sign='+')}"
    if found.ci95 is None:
        return [*lines, f"{line} (no interval: the values are not finite, or of a single task)"]
    side = "contains" if abs(found.difference) <= found.ci95 else "does not contain"
    interval = format_metric(found.ci95, metric)
    return [*lines, f"{line} ± {interval} (second minus first, 95% interval, {side} 0)"]


def main() -> None:
    """Compare from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "first",
        metavar="RUN",
        type=Path,
        help="a run's directory, or a JSON file of metadist evaluate",
    )
    parser.add_argument("second", metavar="RUN", type=Path, help="another one")
    parser.add_argument(
        "--ignore",
        metavar="KEY",
        action="append",
        default=[],
        help="a key of the protocol that may differ, such as backbone; may be repeated",
    )
    options = parser.parse_args()
    difference = compare_runs(options.first, options.second, options.ignore)
    print_plain("\n".join(summary(difference, options.first, options.second)))
    runs = {"first": options.first, "second": options.second}
    configs = {
        name: flatten_config(read_config(path)) for name, path in runs.items() if path.is_dir()
    }
    for line in format_differences(protocol_differences(configs)):
        print_plain(line)
