"""How figures are said to a person: the same words in the bar, in plain lines and at the end."""

from collections.abc import Callable, Mapping, Sequence

VALIDATION = "validation_"
_STEPS_SHOWN = 10


def is_validation(record: Mapping[str, object]) -> bool:
    """Whether the record is of a validation rather than of a training iteration."""
    return any(name.startswith(VALIDATION) for name in record)


def number(value: float) -> str:
    """A loss: four decimals as long as that is short."""
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.3e}"


def percent(share: float, decimals: int = 2) -> str:
    """A share of 1 as a percentage."""
    return f"{100 * share:.{decimals}f}%"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, with days before them if there are any."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}d ' if days else ''}{hour}:{minute:02}:{second:02}"


def speed(tasks_per_second: float) -> str:
    """Tasks a second."""
    digits = 0 if tasks_per_second >= 100 else 1 if tasks_per_second >= 1 else 3
    return f"{tasks_per_second:.{digits}f} tasks/s"


def training_figures(record: Mapping[str, object]) -> dict[str, str]:
    """What one training record says: `loss`, `accuracy` or `mse`, and `speed`, if they are there.

    The widths are steady, so that a line which is drawn over and over does not jump.
    """
    figures = {}
    if "train_loss" in record:
        figures["loss"] = f"loss {number(record['train_loss'])}"
    if "train_accuracy" in record:
        figures["accuracy"] = f"accuracy {percent(record['train_accuracy'], 1):>6}"
    elif "train_mse" in record:
        figures["mse"] = f"MSE {number(record['train_mse'])}"
    if "tasks_per_second" in record:
        figures["speed"] = speed(record["tasks_per_second"])
    return figures


def validation_figures(record: Mapping[str, object]) -> str:
    """What one validation record says."""
    figures = []
    spread = record.get("validation_ci95", record.get("ci95"))
    if "validation_accuracy" in record:
        figures.append("accuracy " + _with_spread(record["validation_accuracy"], spread, percent))
    if "validation_mse" in record:
        figures.append("MSE " + _with_spread(record["validation_mse"], spread, number))
    if "validation_loss" in record:
        figures.append(f"loss {number(record['validation_loss'])}")
    return "validation " + ", ".join(figures)


def summary(results: Mapping[str, object]) -> list[tuple[str, str]]:
    """What was learned, as label and text; what the results lack is left out."""
    rows = []
    over = f" over {results['test_tasks']} tasks" if "test_tasks" in results else ""
    for metric, label, say in (("accuracy", "accuracy", percent), ("mse", "MSE", number)):
        if f"test_{metric}" in results:
            told = _with_spread(results[f"test_{metric}"], results.get("ci95"), say)
            rows.append((f"test {label}", told + over))
            if f"test_{metric}_before" in results:
                rows.append(("before adaptation", say(results[f"test_{metric}_before"])))
            if by_steps := results.get(f"test_{metric}_by_steps"):
                rows.append(("after each step", _by_steps(by_steps, say)))
    if "train_loss" in results:
        after = f" after {results['iterations']} iterations" if "iterations" in results else ""
        rows.append(("training loss", number(results["train_loss"]) + after))
    if "wall_seconds" in results:
        rows.append(("time", duration(results["wall_seconds"])))
    if "tasks_per_second" in results:
        rows.append(("speed", speed(results["tasks_per_second"]) + _where(results)))
    return rows


def _with_spread(value: float, spread: float | None, say) -> str:
    return say(value) if spread is None else f"{say(value)} ± {say(spread)}"


def _by_steps(rows: Sequence[Mapping[str, float]], say: Callable[[float], str]) -> str:
    """The test after the first steps, and the last."""
    shown = [row for row in rows if row["steps"]]
    gap = [] if len(shown) <= _STEPS_SHOWN else ["…"]
    told = [say(row["mean"]) for row in shown]
    first = told[: _STEPS_SHOWN - 1] if gap else told
    return ", ".join([*first, *gap, *(told[-1:] if gap else [])])


def _where(results: Mapping[str, object]) -> str:
    if "strategy" not in results or "world_size" not in results:
        return ""
    size = results["world_size"]
    return f", {results['strategy']} on {size} worker{'' if size == 1 else 's'}"
