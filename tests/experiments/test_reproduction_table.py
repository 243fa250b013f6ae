"""The table of the reproduction: reading run directories and aggregating over seeds."""

import csv
import json

import pytest
from reproduction.cells import Cell, load_cells
from reproduction.rows import aggregate, find_runs
from reproduction.table import csv_text, markdown, summary
from reproduction_folders import PROTOCOL, create_failed_run, create_run


@pytest.fixture
def rows(tmp_path):
    cells = load_cells()
    create_run(tmp_path / "a", "maml_omniglot_5w1s", 0, test_accuracy=0.99, protocol=PROTOCOL)
    create_run(tmp_path / "b", "maml_omniglot_5w1s", 1, test_accuracy=0.98, protocol=PROTOCOL)
    create_failed_run(tmp_path / "c", "maml_omniglot_5w1s", 2, "the disk is full.")
    other = {**PROTOCOL, "eval_inner_steps": 50, "queries": 3, "test_rotations": False}
    create_run(tmp_path / "d", "reptile_omniglot_5w1s", 0, test_accuracy=0.95, protocol=other)
    steps = [{"steps": k, "mean": 2.0 / (1 + k), "ci95": 0.1} for k in range(11)]
    sinusoid = {"ways": 1, "shots": 10, "dataset": "sinusoid"}
    by_steps = {"test_mse": 0.2, "test_mse_by_steps": steps, "protocol": sinusoid}
    create_run(tmp_path / "e", "maml_sinusoid_5_points", 0, **by_steps)
    create_run(tmp_path / "f", "anil_omniglot_5w1s", 0, test_accuracy=0.9, protocol=PROTOCOL)
    create_run(tmp_path / "g", "no_such_preset", 0, test_accuracy=0.9, protocol=PROTOCOL)
    lengths = dict.fromkeys(cells, 60_000) | dict.fromkeys(list(cells)[-4:], 600)
    lengths["reptile_omniglot_5w1s"] = 1000
    return aggregate(find_runs([tmp_path], cells), lengths)


def test_rows_have_means_over_seeds_and_are_compared_with_the_published_interval(rows):
    by_name = {row.name: row for row in rows}
    maml = by_name["maml_omniglot_5w1s"]
    assert maml.measured == pytest.approx(0.985) and (maml.lowest, maml.highest) == (0.98, 0.99)
    assert maml.seeds == (0, 1) and maml.failures == {2: "the disk is full."}
    assert maml.outcome == "reached; 1 of the seeds FAILED"  # 98.5 with 98.7 ± 0.4
    reptile = by_name["reptile_omniglot_5w1s"]
    assert reptile.fraction == 0.6
    assert reptile.outcome == "2.68 points below; queries 3, in the paper 1"
    assert by_name["anil_omniglot_5w1s"].outcome == "no published result"
    sinusoid = [by_name[f"maml_sinusoid_5_points, {k}"] for k in ("1 step", "5 steps", "10 steps")]
    assert [row.measured for row in sinusoid] == [1.0, 2 / 6, 2 / 11]
    differences = "; shots 10, in the paper 5"
    outcomes = ["0.330 above", "reached", "reached"]
    assert [row.outcome for row in sinusoid] == [each + differences for each in outcomes]
    assert sinusoid[0].differences == {"shots": (5, 10)} and len(rows) == 6


def test_short_runs_are_not_compared_and_differences_inside_the_intervals_are_named(tmp_path):
    cells = {
        "short": Cell("short", "omniglot", "accuracy", {None: 0.987}, 0.004),
        "near": Cell("near", "omniglot", "accuracy", {None: 0.987}, 0.004),
        "far": Cell("far", "omniglot", "accuracy", {None: 0.987}, 0.004),
        "good": Cell("good", "omniglot", "accuracy", {None: 0.987}, 0.004),
    }
    for name, value in {"short": 0.6, "near": 0.97, "far": 0.95, "good": 0.984}.items():
        create_run(tmp_path / name, name, 0, test_accuracy=value, protocol=PROTOCOL)
    lengths = {"short": 60_000, "near": 1200, "far": 1200, "good": 60_000}
    rows = {row.name: row for row in aggregate(find_runs([tmp_path], cells), lengths)}
    assert rows["short"].outcome == "not compared: 1% of the iterations"
    assert rows["near"].outcome == "1.70 points below, inside the intervals"  # ± 2.0 and ± 0.4
    assert rows["far"].outcome == "3.70 points below"
    assert rows["good"].outcome == "reached"


def test_other_training_tasks_than_in_the_paper_are_in_the_row(tmp_path):
    cells = load_cells()
    steps = [{"steps": 1, "mean": 0.5, "ci95": 0.1}]
    protocol = {"ways": 1, "shots": 5, "dataset": "sinusoid"}
    results = {"test_mse": 0.5, "test_mse_by_steps": steps, "protocol": protocol}
    create_run(tmp_path, "maml_sinusoid_5_points", 0, **results)
    rows = aggregate(find_runs([tmp_path], cells), {})
    row = next(line for line in markdown(rows, "c").splitlines() if ", 1 step |" in line)
    assert row.endswith("| reached; train shots 5, in the paper 10 |")


def test_a_seed_that_diverged_is_named(tmp_path):
    cells = {"sine": Cell("sine", "sinusoid", "mse", {1: 0.4})}
    protocol = {"ways": 1, "shots": 10, "dataset": "sinusoid"}
    for seed, mean in enumerate((0.3, "Infinity")):
        steps = [{"steps": 1, "mean": mean, "ci95": 0.1 if seed == 0 else "NaN"}]
        results = {"test_mse": mean, "test_mse_by_steps": steps, "protocol": protocol}
        create_run(tmp_path / str(seed), "sine", seed, **results)
    rows = aggregate(find_runs([tmp_path], cells), {})
    assert [row.outcome for row in rows] == ["diverged"]
    assert "| 0.400 | diverged (0.300 to inf) | 2 |" in markdown(rows, "c")
    assert "| `sine`, MSE after 1 inner steps | 0.400 | diverged | 2 | 600 |" in summary(rows)


def test_a_single_test_task_has_no_interval(tmp_path):
    cells = {"x": Cell("x", "omniglot", "accuracy", {None: 0.9})}
    create_run(tmp_path, "x", 0, test_accuracy=0.95, ci95="NaN", protocol=PROTOCOL)
    rows = aggregate(find_runs([tmp_path], cells), {})
    assert "| x | 90.00% | 95.00% | 1 |" in markdown(rows, "c")


def test_a_cell_states_where_its_protocol_is_another_one(rows):
    sections = markdown(rows, "c").split("### ")
    (section,) = [each for each in sections if each.startswith("omniglot 5-way 1-shot")]
    lines = section.splitlines()
    assert lines[2].startswith("Unless a preset states another: ") and "queries: 1;" in lines[2]
    (reptile,) = [line for line in lines if "`reptile_omniglot_5w1s`" in line]
    assert reptile.endswith("; queries: 3; eval inner steps: 50; test rotations: no.")
    (maml,) = [line for line in lines if "`maml_omniglot_5w1s`" in line]
    assert "queries" not in maml


def test_the_short_table_has_a_line_per_cell(rows):
    lines = summary(rows).splitlines()
    (sine,) = [line for line in lines if "sinusoid" in line]
    assert sine.startswith(
        "| `maml_sinusoid_5_points`, MSE after 1, 5, 10 inner steps | 0.670, 0.380, 0.350 "
        "| 1.000 ± 0.100, 0.333 ± 0.100, 0.182 ± 0.100 | 1 | 600"
    )
    assert "| `maml_omniglot_5w1s`, accuracy | 98.70 ± 0.40% | 98.50" in "\n".join(lines)
    assert not any("anil_omniglot_5w1s" in line for line in lines)  # there is no published result


def test_a_recipe_is_labelled_and_compared_with_the_plain_cell(tmp_path):
    cells = load_cells()
    recipe, plain = cells["anil_omniglot_20w1s_cosine"], cells["anil_omniglot_20w1s"]
    assert recipe.results == plain.results and recipe.interval == plain.interval == 0.005
    create_run(tmp_path, recipe.preset, 0, test_accuracy=0.96, protocol=PROTOCOL)
    (row,) = aggregate(find_runs([tmp_path], cells), {recipe.preset: 600})
    label = "| anil_omniglot_20w1s_cosine (recipe: 15,000 iterations, cosine schedule) | 96.20"
    assert label in markdown([row], "c")


def test_the_short_table_has_the_best_recipe(tmp_path):
    cells = load_cells()
    names = ("anil_omniglot_20w1s_cosine", "anil_omniglot_20w1s_from_prototypical")
    for name, accuracy in zip(names, (0.93, 0.96), strict=True):
        create_run(tmp_path / name, name, 0, test_accuracy=accuracy, protocol=PROTOCOL)
    rows = aggregate(find_runs([tmp_path], cells), dict.fromkeys(names, 600))
    assert len(rows) == 2
    (line,) = [line for line in summary(rows).splitlines() if "anil" in line]
    assert names[1] in line and "96.00" in line


def test_cells_without_a_run_are_listed(rows):
    text = markdown(rows, "c", ["imaml_omniglot_5w1s", "algorithm=supervised (no preset)"])
    assert text.endswith("imaml_omniglot_5w1s, algorithm=supervised (no preset).\n")


def test_the_lower_end_is_reached_and_train_keys_default_to_the_test_keys(tmp_path):
    cells = {
        "edge": Cell("edge", "omniglot", "accuracy", {None: 0.987}, 0.004),
        "train": Cell("train", "omniglot", "accuracy", {None: 0.9}, protocol={"train_ways": 60}),
    }
    create_run(tmp_path / "a", "edge", 0, test_accuracy=0.983, protocol=PROTOCOL)
    create_run(tmp_path / "b", "train", 0, test_accuracy=0.9, protocol=PROTOCOL)
    edge, train = aggregate(find_runs([tmp_path], cells), {})
    assert edge.outcome == "reached"
    assert train.differences == {"train_ways": (60, 5)}
    assert train.outcome == "reached; train ways 5, in the paper 60"


def test_different_configurations_of_the_seeds_are_shown(tmp_path):
    cells = {"x": Cell("x", "omniglot", "accuracy", {None: 0.9})}
    for seed, rate in enumerate((0.4, 0.4, 0.1)):
        create_run(tmp_path / str(seed), "x", seed, test_accuracy=0.9, protocol=PROTOCOL)
        config = {"seed": seed, "algorithm": {"inner_lr": rate}, "threads": seed}
        config["trainer"] = {"iterations": 600}
        (tmp_path / str(seed) / ".hydra" / "config.yaml").write_text(json.dumps(config))
    (row,) = aggregate(find_runs([tmp_path], cells), {})
    rates = {"seed 0": "0.4", "seed 1": "0.4", "seed 2": "0.1"}
    assert row.seed_differences == {"algorithm.inner_lr": rates}


def test_results_stay_when_a_later_job_failed_in_their_directory(tmp_path):
    cells = {"x": Cell("x", "omniglot", "accuracy", {None: 0.9})}
    create_run(tmp_path / "0", "x", 0, test_accuracy=0.95, protocol=PROTOCOL)
    create_failed_run(tmp_path / "0", "x", 0, "an earlier run is here")
    (row,) = aggregate(find_runs([tmp_path], cells), {})
    assert (row.outcome, row.seeds, row.failures) == ("reached", (0,), {})


def test_a_result_that_is_missing_does_not_count(tmp_path):
    cells = {"y": Cell("y", "sinusoid", "mse", {10: 0.3})}
    create_run(tmp_path / "1", "y", 0, test_mse=0.2, test_mse_by_steps=[], protocol={"shots": 5})
    (row,) = aggregate(find_runs([tmp_path], cells), {})
    assert (row.outcome, row.seeds) == ("not evaluated at this number of steps", ())


def test_the_table_shows_different_protocols_and_failures(rows):
    text = markdown(rows, "python experiments/reproduce.py all")
    lines = text.splitlines()
    assert (
        "| maml_omniglot_5w1s | 98.70 ± 0.40% | 98.50 ± 2.00% (98.00 to 99.00) | 2 | "
        "600 of 60,000 | 0.03 core-hours, rpc on 2 | reached; 1 of the seeds FAILED |"
    ) in lines
    assert "The interval excludes the variance over seeds." in text
    assert "  - Different protocol: shots is 5 in the paper, 10 here." in lines
    assert "  - Different protocol: queries is 1 in the paper, 3 here." in lines
    assert "- maml_omniglot_5w1s, seed 2, 600 iterations: the disk is full." in lines
    table = list(csv.DictReader(csv_text(rows).splitlines()))
    assert [row["cell"] for row in table] == [row.cell.preset for row in rows]
    assert json.loads(table[0]["protocol"]) == PROTOCOL and table[0]["failed"] == "2"
    assert table[0]["published"] == "0.987"


def test_different_protocols_of_the_seeds_are_shown(tmp_path):
    cells = {"x": Cell("x", "omniglot", "accuracy")}
    create_run(tmp_path / "a", "x", 0, test_accuracy=0.9, protocol=PROTOCOL)
    create_run(tmp_path / "b", "x", 1, test_accuracy=0.9, protocol={**PROTOCOL, "queries": 15})
    rows = aggregate(find_runs([tmp_path], cells), {})
    sentence = "The seeds differ: queries differs: 1 (seed 0), 15 (seed 1)."
    assert sentence in markdown(rows, "c") and rows[0].published_iterations is None


def test_a_seed_counts_once(tmp_path):
    cells = {"x": Cell("x", "omniglot", "accuracy")}
    for folder, results in (("a", {"test_accuracy": 0.9, "protocol": PROTOCOL}), ("b", {})):
        create_run(tmp_path / folder, "x", 0, **results)
    create_run(tmp_path / "c", "x", 0, test_accuracy=0.9, protocol=PROTOCOL)
    (row,) = aggregate(find_runs([tmp_path], cells), {})
    assert row.seeds == (0,) and not row.failures and not row.unfinished
