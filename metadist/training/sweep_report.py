"""What a folder of runs comes to: a table, a picture, and which setting was best."""

from dataclasses import dataclass
from pathlib import Path

from metadist.loggers.writing import writing
from metadist.plots import SweepPoint, sweep_picture
from metadist.training.protocol import differences_in_words, protocol_differences
from metadist.training.sweep_table import Setting, SweepTable, as_csv, as_markdown, tabulate, told
from metadist.training.swept_runs import read_runs


@dataclass(frozen=True)
class SweepReport:
    """The report on a folder of runs.

    Attributes:
        table: the settings.
        files: what was written.
        warnings: protocols that differ in what was not swept.
        failed: names of the runs that failed.
        unfinished: names of those that have neither finished nor failed.
    """

    table: SweepTable
    files: tuple[Path, ...]
    warnings: tuple[str, ...]
    failed: tuple[str, ...]
    unfinished: tuple[str, ...]

    def lines(self) -> list[str]:
        """What to tell a person."""
        table, number = self.table, len(self.table.runs)
        counts = f"{number} run{'' if number == 1 else 's'} finished"
        if self.failed:
            counts += f", {len(self.failed)} failed"
        if self.unfinished:
            counts += f", {len(self.unfinished)} unfinished"
        lines = ["", counts]
        if table.best is not None:
            best = table.settings[table.best]
            what = setting_text(table.keys, best.values) or "the only setting"
            metric = "accuracy" if table.metric == "accuracy" else "MSE"
            by = ""
            if best.validation is not None:
                by = f"validation {metric} {told(best.validation, table.metric)}, "
            over = f" ({best.interval})" if best.test and best.test.ci95 is not None else ""
            lines.append(f"best: {what}")
            lines.append(f"  {by}test {metric} {told(best.test, table.metric)}{over}")
            same = [
                setting_text(table.keys, each.values)
                for place, each in enumerate(table.settings)
                if place != table.best and _same(each, best, table.chosen_by)
            ]
            if same:
                lines.append(f"  just as good by {table.chosen_by}: {'; '.join(same)}")
            if table.chosen_by == "test":
                lines.append("  chosen by the test itself, for there is no validation: too rosy")
        lines += [f"warning: not comparable, {warning}" for warning in self.warnings]
        return [*lines, *(f"  {path}" for path in self.files)]


def _same(one: Setting, other: Setting, chosen_by: str) -> bool:
    figures = [one.test, other.test]
    if chosen_by == "validation":
        figures = [one.validation, other.validation]
    return None not in figures and abs(figures[0].mean - figures[1].mean) < 1e-9


def setting_text(keys: tuple[str, ...], values: tuple[str, ...]) -> str:
    """A setting as one would type it."""
    return " ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))


def report_on(folder: Path) -> SweepReport:
    """Write `sweep.csv`, `sweep.md` and `sweep.png` into a folder of runs. One process.

    Raises:
        UserError: there are no runs, one cannot be read, they cannot stand in one table, or the
            folder cannot be written.
    """
    runs = read_runs(folder)
    table = tabulate(runs)
    warnings = _warnings(table)
    markdown = as_markdown(table)
    if warnings:
        markdown += "\n" + "".join(f"**Not comparable:** {warning}\n" for warning in warnings)
    files = [folder / "sweep.csv", folder / "sweep.md"]
    for path, text in zip(files, (as_csv(table), markdown), strict=True):
        with writing(path):
            path.write_text(text, encoding="utf-8")
    points = [
        SweepPoint(each.values, each.test.mean, each.test.ci95, place == table.best)
        for place, each in enumerate(table.settings)
        if each.test is not None
    ]
    if points:
        path, caption = folder / "sweep.png", _caption(table)
        sweep_picture(points, table.keys, table.metric, path, caption, table.chosen_by)
        files.append(path)
    return SweepReport(
        table,
        tuple(files),
        tuple(warnings),
        tuple(run.name for run in runs if run.failed),
        tuple(run.name for run in runs if run.unfinished),
    )


def _warnings(table: SweepTable) -> list[str]:
    """Where protocols differ in something that nobody varied."""
    protocols = {run.name: (run.results or {}).get("protocol") or {} for run in table.runs}
    varied = {key.rpartition(".")[2] for key in table.keys}
    groups = [place for place, key in enumerate(table.keys) if "." not in key]
    # What a swept group brings with it (dataset=…, algorithm=…) was varied too.
    names = {name for protocol in protocols.values() for name in protocol}
    for name in names if groups else ():
        seen: dict[tuple[str, ...], set[str]] = {}
        for setting in table.settings:
            chosen = tuple(setting.values[place] for place in groups)
            for run in setting.runs:
                seen.setdefault(chosen, set()).add(str(protocols[run.name].get(name)))
        if all(len(values) == 1 for values in seen.values()):
            varied.add(name)
    return differences_in_words(protocol_differences(protocols, varied))


def _caption(table: SweepTable) -> str:
    seeds = sorted({len(each.runs) for each in table.settings if each.runs})
    if seeds == [1]:
        return "one seed; 95% intervals over the test's tasks"
    many = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"mean of {many} seeds; 95% intervals over seeds"
