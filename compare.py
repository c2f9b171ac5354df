"""Methods side by side: every arm from the same warm start of each seed, differences paired by seed, with intervals.

    python compare.py countdown --algos softmax grpo maxrl reinforce --tau 0.1 0.3 1.0 --seeds 5 --name methods
    python compare.py countdown --vary lr 1e-4 3e-4 1e-3 --select pass@1 --name learning-rate     at each method's best
    python compare.py countdown --algos softmax grpo --vary exact no yes --name exact             any setting of a run
    python compare.py countdown --algos softmax --target-ess 2 3 4 --name ess                     temperature per group

Every other flag is handed to the training script of the task (`--steps 100`, `--model DIR`, ...). There is no training loop
here: an arm is one command of that script, and it can be run by hand. Runs live in `runs/compare/` and are shared by all
tables that need them; started again after an interruption, the same command goes on where it was. With `--keep-checkpoints`
gradient_table.py can show afterwards where the gradient went.

Read it in this order: 1. arms, 2. running them, 3. statistics, 4. tables, 5. figures, 6. the command.
Written to `results/<name>/`: config.json, metrics.jsonl.gz and summary.json of every run, table.md, table.json, figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mpmath
import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm

import train_countdown
import train_gsm8k
import train_textgen
from launch import end_clearly, parse_config
from run import Config, is_interval, run_folder, write_json
from softmax_grpo import ADVANTAGES

SCRIPTS = {task: script for script in (train_countdown, train_gsm8k, train_textgen) for task in script.TASKS}

# --- 1. Arms: what is compared, as flags of the training script ---


@dataclasses.dataclass(frozen=True)
class Arm:
    """One column of the experiment: a method with its settings, run once per seed."""

    name: str
    method: str  # the name without the varied settings: --select chooses one arm of each method
    flags: tuple[str, ...]  # its own, beside those of all arms
    runs: tuple[Config, ...]  # one per seed

    def folder(self, seed: int) -> Path:
        return run_folder(self.runs[seed])


def make_arms(args: argparse.Namespace) -> list[Arm]:
    """Algorithms x temperatures x varied settings. Raises ValueError for settings that cannot work."""
    methods: list[tuple[str, list[str]]] = []
    for algo in args.algos:
        if algo != "softmax":
            methods.append((algo, ["--algo", algo]))
            continue
        methods += [(f"softmax tau {tau}", ["--algo", algo, "--tau", str(tau)]) for tau in args.tau]
        methods += [
            (f"softmax ESS {ess}", ["--algo", algo, "--target-ess", str(ess)]) for ess in args.target_ess
        ]
    arms = []
    for method, flags in methods:
        for values in itertools.product(*(values for _, *values in args.vary)):
            settings = [(setting[0], value) for setting, value in zip(args.vary, values)]
            name = ", ".join([method, *(f"{setting} {value}" for setting, value in settings)])
            varied = [
                text for setting, value in settings for text in (f"--{setting.replace('_', '-')}", value)
            ]
            arms.append(make_arm(args, name, method, [*flags, *varied]))
    folders = [run_folder(config) for arm in arms for config in arm.runs]
    if len(set(folders)) < len(folders) or len({arm.name for arm in arms}) < len(arms):
        raise ValueError(f"some of these arms are the same run: {'; '.join(arm.name for arm in arms)}")
    return arms


def make_arm(args: argparse.Namespace, name: str, method: str, flags: Sequence[str]) -> Arm:
    script = SCRIPTS[args.task]
    runs = [
        parse_config(list(script.TASKS), script.PRESETS, "", run_flags(args, flags, seed))
        for seed in range(args.seeds)
    ]
    return Arm(name, method, tuple(flags), tuple(runs))


def noise_arm(args: argparse.Namespace, arm: Arm) -> Arm:
    """The same arm with other random rollouts and another order of prompts: what it differs by is noise."""
    replicate = str(arm.runs[0].replicate + 1)
    return make_arm(args, f"{arm.name} (again)", "noise", [*arm.flags, "--replicate", replicate])


def run_flags(args: argparse.Namespace, flags: Sequence[str], seed: int) -> list[str]:
    """All flags of one run: for all arms, for this one, and the seed."""
    return ["--task", args.task, "--out", args.runs, *args.shared, *flags, "--seed", str(seed)]


# --- 2. Running them: two at a time, one thread each; finished runs are not run again ---


def run_all(args: argparse.Namespace, arms: list[Arm]) -> dict[str, str]:
    """All runs of all arms. Returns what went wrong, by the name of the arm: the command and the end of its output."""
    # Arm by arm, so that by the time the second arm starts, the first has made the warm start of every seed.
    jobs = [(arm, seed) for arm in arms for seed in range(args.seeds)]
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(args.jobs) as pool, tqdm(total=len(jobs), desc=args.name, unit="run") as bar:
        for (arm, _), failure in zip(jobs, pool.map(lambda job: run_one(args, *job), jobs)):
            if failure:
                failures[arm.name] = failure
            bar.update()
    return failures


def run_one(args: argparse.Namespace, arm: Arm, seed: int) -> str:
    """One run, as a process of its own; its files without the checkpoint go to results. Returns what went wrong, if anything."""
    folder, config = arm.folder(seed), arm.runs[seed]
    if not (folder / "summary.json").exists():
        log = folder.with_name(f"{folder.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            finished = subprocess.run(
                run_command(args, arm, seed),
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
                check=False,
            )
        if finished.returncode:
            return f"{shlex.join(run_command(args, arm, seed))}\n{log.read_text()[-500:]}"
    if config.keep_checkpoints and not list(folder.glob("checkpoint-*")):
        return f"{folder} was made without --keep-checkpoints: delete it, and it will be made again"
    record = args.folder / "runs" / folder.name
    record.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "summary.json"):
        shutil.copy(folder / name, record / name)
    # The metrics compressed, to a fifth; without a time stamp, so that the same run gives the same file in every table.
    metrics = gzip.compress((folder / "metrics.jsonl").read_bytes(), mtime=0)
    (record / "metrics.jsonl.gz").write_bytes(metrics)
    return ""


def run_command(args: argparse.Namespace, arm: Arm, seed: int) -> list[str]:
    return [sys.executable, SCRIPTS[args.task].__file__, *run_flags(args, arm.flags, seed), "--resume"]


# --- 3. Statistics: few seeds, so Student's t; several comparisons, so Holm ---


def t_interval(values: list[float]) -> list[float]:
    """[mean, low, high]: 95% interval of the mean of independent values by Student's t; NaN bounds for a single value."""
    mean, error = mean_and_error(values)
    half = error * t_quantile(0.975, len(values) - 1) if len(values) > 1 else math.nan
    return [mean, mean - half, mean + half]


def t_test(differences: list[float]) -> float:
    """Two-sided p-value of Student's t test that the mean of paired differences is 0. NaN where there is no spread to judge by."""
    mean, error = mean_and_error(differences)
    if len(differences) < 2:
        return math.nan
    if error < 1e-9:  # all equal: evidence of ties on the grid of accuracies, not of certainty
        return 1.0 if abs(mean) < 1e-9 else math.nan
    freedom = len(differences) - 1
    # P(|T| > t) = I_x(freedom / 2, 1/2) at x = freedom / (freedom + t^2), the regularised incomplete beta function.
    x = freedom / (freedom + (mean / error) ** 2)
    return float(mpmath.betainc(freedom / 2, 0.5, 0, x, regularized=True))


@functools.cache
def t_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t stays below with this probability (above 1/2)."""

    def excess(t: mpmath.mpf) -> mpmath.mpf:
        tail = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True)
        return tail / 2 - (1 - probability)

    return float(mpmath.findroot(excess, (0.5, 100), solver="bisect", maxsteps=100))


def mean_and_error(values: list[float]) -> tuple[float, float]:
    numbers = torch.tensor(values, dtype=torch.float64)
    error = numbers.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return numbers.mean().item(), error


def holm(p_values: list[float]) -> list[float]:
    """Holm's adjusted p-values: below 0.05 where a claim holds although so many were tried. NaN stays NaN."""
    adjusted, running = [math.nan] * len(p_values), 0.0
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, i) in enumerate(order):
        running = max(running, min(1.0, p * (len(order) - rank)))
        adjusted[i] = running
    return adjusted


# --- 4. Tables ---

# Of the figures on test prompts after the last step; those that a task does not have are left out.
METRICS = ["pass@1", "pass@8", "pass@32", "greedy", "reward", "best_of_8", "different_samples"]
# Means over all steps of what a step logs.
DIAGNOSTICS = {
    "mean_abs_advantage": "mean abs(A)",
    "ess": "ESS",
    "frac_reward_zero_std": "no signal",
    "grad_norm": "gradient norm",
    "clip_ratio/low_mean": "clipped low",
    "clip_ratio/high_mean": "clipped high",
    "ratio_max": "largest ratio of a step",
    "kl_old": "KL of a batch",
    "entropy": "entropy",
}


def read_runs(args: argparse.Namespace, arm: Arm) -> list[dict[str, Any]]:
    """summary.json and metrics.jsonl of an arm's runs, by seed."""
    runs = []
    for seed in range(args.seeds):
        folder = arm.folder(seed)
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        summary, config = (
            json.loads((folder / name).read_text()) for name in ("summary.json", "config.json")
        )
        runs.append({**summary, "config": config, "metrics": metrics})
    return runs


def figure_of(result: dict[str, Any], metric: str) -> float | None:
    """One figure of an evaluation; None where the task does not have it."""
    value = result.get(metric, result["report"].get(metric))
    return value[0] if is_interval(value) else value


def compare(args: argparse.Namespace, arms: list[Arm], noise: Arm | None, baseline: Arm) -> dict[str, Any]:
    """Everything that the tables and figures show."""
    runs = {arm.name: read_runs(args, arm) for arm in [*arms, *([noise] if noise else [])]}
    everything = [run for arm_runs in runs.values() for run in arm_runs]
    for seed in range(args.seeds):
        if len({arm_runs[seed]["config"]["data"] for name, arm_runs in runs.items()}) > 1:
            raise ValueError(
                f"the runs of seed {seed} were made from different data: delete the old ones in {args.runs}"
            )
    metrics = []
    for metric in METRICS:
        ends = [figure_of(run["end"], metric) for run in everything]
        right_or_wrong = metric == "reward" and all(
            math.isclose(value, figure_of(run["end"], "pass@1"), abs_tol=1e-6)
            for value, run in zip(ends, everything)
            if value is not None
        )
        # Left out: what some arm does not have, what never differs (but for pass@1), and a reward that says the same as pass@1.
        if None not in ends and (metric == "pass@1" or len(set(ends)) > 1) and not right_or_wrong:
            metrics.append(metric)

    def figures(name: str, metric: str, when: str = "end") -> list[float]:
        return [figure_of(run[when], metric) for run in runs[name]]

    def difference(name: str, other: str, metric: str) -> dict[str, Any]:
        values = [a - b for a, b in zip(figures(name, metric), figures(other, metric))]
        theirs = validation_by_step(runs[other], metric)
        return {
            "interval": t_interval(values),
            "p": t_test(values),
            "seeds_up": sum(value > 0 for value in values),
            "seeds_down": sum(value < 0 for value in values),
            "values": values,
            "lasting_from": lasting_from(
                {
                    step: [a - b for a, b in zip(ours, theirs[step])]
                    for step, ours in validation_by_step(runs[name], metric).items()
                    if step in theirs
                }
            ),
        }

    table: dict[str, Any] = {"metrics": metrics, "seeds": args.seeds, "baseline": baseline.name, "arms": {}}
    starts = [[figure_of(run["start"], "pass@1") for run in runs[arm.name]] for arm in arms]
    table["same_start"] = all(start == starts[0] for start in starts)
    table["commits"] = sorted({run["config"]["versions"]["commit"] for run in everything})
    table["start"] = {metric: t_interval(figures(arms[0].name, metric, "start")) for metric in metrics}
    for name, arm_runs in runs.items():
        steps = [[line for line in run["metrics"] if line["step"] > 0] for run in arm_runs]
        diagnostics = {
            label: t_interval([sum(line[key] for line in run) / len(run) for run in steps])[0]
            for key, label in DIAGNOSTICS.items()
        }
        for key in ("length", "truncated", "kl"):
            diagnostics[f"{key} at the end"] = sum(run["end"][key] for run in arm_runs) / len(arm_runs)
        table["arms"][name] = {
            "end": {metric: t_interval(figures(name, metric)) for metric in metrics},
            "values": {metric: figures(name, metric) for metric in metrics},
            "diagnostics": diagnostics,
            "seconds": sum(run["seconds"]["total"] for run in arm_runs),
        }
    if noise:
        original = next(arm for arm in arms if noise.name == f"{arm.name} (again)")
        table["noise"] = {metric: difference(noise.name, original.name, metric) for metric in metrics}
    opponents = {arm.name: opponent(args, arm, arms, baseline).name for arm in arms if arm is not baseline}
    table["opponents"] = opponents
    table["differences"] = {
        name: {metric: difference(name, other, metric) for metric in metrics}
        for name, other in opponents.items()
    }
    cells = [row[metric] for row in table["differences"].values() for metric in metrics]
    for cell, p in zip(cells, holm([cell["p"] for cell in cells])):
        cell["p_holm"] = p
        # A claim: enough seeds, it survives the number of comparisons, and no seed disagrees.
        cell["claim"] = (
            args.seeds >= 4 and p < 0.05 and max(cell["seeds_up"], cell["seeds_down"]) == args.seeds
        )
    return table


def opponent(args: argparse.Namespace, arm: Arm, arms: list[Arm], baseline: Arm) -> Arm:
    """The arm that `arm` is compared with: where settings are varied, the baseline's method at the same settings, so that like
    meets like; the baseline itself with --against, and for what has no such partner.
    """
    settings = arm.name.removeprefix(arm.method)
    alike = [
        other
        for other in arms
        if other.method == baseline.method and other.name == baseline.method + settings
    ]
    return baseline if args.against or not alike or alike[0] is arm else alike[0]


def validation_by_step(runs: list[dict[str, Any]], metric: str) -> dict[int, list[float]]:
    """step -> that figure on the validation prompts, one value a seed."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for line in run["metrics"]:
            if "validation" in line:
                found.setdefault(line["step"], []).append(figure_of(line["validation"], metric))
    return found


def lasting_from(differences: dict[int, list[float]]) -> int | None:
    """The first step from which on the 95% interval of the mean difference keeps to one side of 0, at every evaluation; None if
    it does not at the last. differences: step -> paired differences. Not corrected for several looks: it dates a difference
    that is claimed elsewhere.
    """
    first, side = None, 0
    for step in sorted(differences, reverse=True):
        _, low, high = t_interval(differences[step])
        now = (low > 0) - (high < 0)  # which side of 0 the interval keeps to, 0 if neither
        if now == 0 or now == -side:
            break
        first, side = step, now
    return first


def choose(args: argparse.Namespace, arms: list[Arm]) -> tuple[list[Arm], dict[str, dict[str, float]]]:
    """Of each method the arm with the best mean over seeds of `args.select` on the validation prompts after the last step,
    and those means of all arms. Test figures play no part.
    """
    scores: dict[str, dict[str, float]] = {}
    best: dict[str, tuple[float, Arm]] = {}
    for arm in arms:
        last = [run["metrics"][-1]["validation"] for run in read_runs(args, arm)]
        values = [figure_of(result, args.select) for result in last]
        if None in values:
            raise ValueError(f"--select {args.select}: this task has no such figure")
        score = sum(values) / len(values)
        scores.setdefault(arm.method, {})[arm.name] = score
        if arm.method not in best or score > best[arm.method][0]:
            best[arm.method] = (score, arm)
    return [arm for _, arm in best.values()], scores


def write_tables(args: argparse.Namespace, table: dict[str, Any], command: str) -> None:
    """table.json and table.md."""
    write_json(args.folder / "table.json", {"command": command, **table})
    metrics, seeds = table["metrics"], table["seeds"]
    lines = [f"# {args.name}: {args.task}", "", f"    {command}", ""]
    lines += [
        f"Test prompts after the last step; mean over {seeds} seeds [95% interval, Student's t over seeds].",
        "",
    ]
    rows = {"warm start": table["start"], **{name: arm["end"] for name, arm in table["arms"].items()}}
    lines += markdown(
        ["", *metrics], [[name, *(show(row[m]) for m in metrics)] for name, row in rows.items()]
    )
    if not table["same_start"]:
        lines += [
            "",
            "The arms do **not** share their start: the row of the warm start is that of the first arm only.",
        ]
    if len(table["commits"]) > 1:
        lines += ["", f"The runs were made by different versions of the code: {', '.join(table['commits'])}."]
    opponents = table["opponents"]
    one = set(opponents.values()) == {table["baseline"]}
    lines += [
        "",
        f"Difference from {table['baseline'] if one else 'the arm named'}, paired by seed [95% interval], p after Holm's correction over this table;",
    ]
    lines += [
        "**bold** where p < 0.05 and all of at least four seeds agree in sign. Everything else is not claimed.",
        "",
    ]
    body = []
    for name, row in table["differences"].items():
        cells = [f"{show(row[m]['interval'], '+')} p {row[m]['p_holm']:.2g}" for m in metrics]
        label = name if one else f"{name} − {opponents[name]}"
        body.append([label, *(f"**{cell}**" if row[m]["claim"] else cell for cell, m in zip(cells, metrics))])
    if "noise" in table:
        body.append(
            [
                "*noise floor: the same arm twice*",
                *(show(table["noise"][m]["interval"], "+") for m in metrics),
            ]
        )
    lines += markdown(["", *metrics], body)
    begins = []
    for name, row in table["differences"].items():
        steps = {m: row[m]["lasting_from"] for m in metrics}
        found = ", ".join(f"{m} from step {step}" for m, step in steps.items() if step is not None)
        begins += [f"- {name}: {found}"] if found else []
    if begins:
        lines += [
            "",
            "When a difference begins: the first validation from which on its interval (not corrected) stays on",
        ]
        lines += ["one side of 0 to the end.", "", *begins]
    if "validation" in table:
        lines += [
            "",
            f"Chosen by {args.select} on validation prompts, mean over the same seeds. (A chosen arm's luck in training is",
        ]
        lines += ["in its test figures, too: they are a little too high, for all methods alike.)", ""]
        for method, scores in table["validation"].items():
            lines.append(f"- {method}: {', '.join(f'{name} {score:.3f}' for name, score in scores.items())}")
        if table["failed"]:
            lines += ["", f"Broken down, and so not chosen: {', '.join(table['failed'])}."]
    lines += ["", "Means over all steps (and at the end on test prompts):", ""]
    names = list(next(iter(table["arms"].values()))["diagnostics"])
    lines += markdown(
        ["", *names],
        [[name, *(f"{arm['diagnostics'][n]:.3g}" for n in names)] for name, arm in table["arms"].items()],
    )
    minutes = sum(arm["seconds"] for arm in table["arms"].values()) / 60
    lines += [
        "",
        f"Training and evaluation of the arms shown: {minutes:.0f} minutes, {args.threads} thread(s) a run, without warm starts.",
    ]
    (args.folder / "table.md").write_text("\n".join(lines) + "\n")


def show(interval: list[float], sign: str = "") -> str:
    return "{:{s}.3f} [{:{s}.3f}, {:{s}.3f}]".format(*interval, s=sign)


def markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows]]


# --- 5. Figures ---

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#F0E442"]
LINES = ["-", "--", ":"]


def draw_curves(args: argparse.Namespace, arms: list[Arm], metrics: list[str]) -> None:
    """Validation figures, the warm start included, means over seeds: curves.png against steps, with 95% intervals; distance.png
    against KL(policy || start). The same step is not the same distance for every method (the advantages differ in size, and
    AdamW undoes a part of that), so the second figure compares what methods have reached after going equally far.
    """
    styles = dict(zip([arm.name for arm in arms], itertools.cycle(itertools.product(LINES, COLORS))))
    panels = [*metrics, "kl", "length"]
    found: dict[str, dict[int, dict[str, list[float]]]] = {}  # arm -> step -> metric -> interval
    for arm in arms:
        runs = read_runs(args, arm)
        found[arm.name] = {}
        for metric in panels:
            for step, values in validation_by_step(runs, metric).items():
                found[arm.name].setdefault(step, {})[metric] = t_interval(values)
    for file, shown in (("curves.png", panels), ("distance.png", metrics)):
        columns = math.ceil(len(shown) / 2)
        figure = Figure(figsize=(4.6 * columns, 7.5), layout="constrained")
        for axes, metric in zip(figure.subplots(2, columns, squeeze=False).flat, shown):
            for name, by_step in found.items():
                mean, low, high = zip(*(result[metric] for result in by_step.values()))
                x = (
                    list(by_step)
                    if file == "curves.png"
                    else [result["kl"][0] for result in by_step.values()]
                )
                line, color = styles[name]
                axes.plot(x, mean, line, color=color, label=name, marker="o", markersize=3)
                if file == "curves.png" and len(found) <= len(COLORS):  # more bands would hide each other
                    axes.fill_between(x, low, high, color=color, alpha=0.12)
            axes.set_title("KL(policy || start), nats per token" if metric == "kl" else metric)
            axes.set_xlabel("step" if file == "curves.png" else "KL(policy || start), nats per token")
            axes.grid(alpha=0.3)
        figure.axes[0].legend(fontsize="small")
        figure.suptitle(f"{args.task}: validation prompts, mean over {args.seeds} seeds")
        figure.savefig(args.folder / file, dpi=100)


def temperature_lines(arms: list[Arm]) -> dict[str, dict[float, str]]:
    """What a softmax arm is called without its temperature -> tau -> the arm's name."""
    lines: dict[str, dict[float, str]] = {}
    for arm in arms:
        config = arm.runs[0]
        if config.algo == "softmax" and not config.target_ess:
            lines.setdefault(arm.name.replace(f" tau {config.tau}", ""), {})[config.tau] = arm.name
    return lines


def draw_temperatures(args: argparse.Namespace, arms: list[Arm], table: dict[str, Any]) -> None:
    """temperature.png, where softmax ran at three temperatures or more: test figures after the last step against tau, with 95%
    intervals over seeds; the other methods as horizontal lines.
    """
    lines = temperature_lines(arms)
    if max(map(len, lines.values()), default=0) < 3:
        return
    drawn = {name for line in lines.values() for name in line.values()}
    others = [arm.name for arm in arms if arm.name not in drawn]
    metrics = table["metrics"]
    figure = Figure(figsize=(4.4 * len(metrics), 4), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics):
        for (label, line), color in zip(lines.items(), itertools.cycle(COLORS)):
            taus = sorted(line)
            mean, low, high = zip(*(table["arms"][line[tau]]["end"][metric] for tau in taus))
            axes.plot(taus, mean, color=color, marker="o", markersize=3, label=label)
            axes.fill_between(taus, low, high, color=color, alpha=0.12)
        for name, color in zip(others, itertools.cycle(COLORS[len(lines) :])):
            axes.axhline(table["arms"][name]["end"][metric][0], color=color, linestyle="--", label=name)
        axes.set_xscale("log")
        axes.set_xlabel("tau")
        axes.set_title(metric)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.suptitle(f"{args.task}: test prompts after the last step, mean over {args.seeds} seeds")
    figure.savefig(args.folder / "temperature.png", dpi=100)


def draw_differences(args: argparse.Namespace, table: dict[str, Any]) -> None:
    """differences.png: paired differences from the baseline on test prompts, and the noise floor."""
    metrics = table["metrics"]
    opponents = table["opponents"]
    one = set(opponents.values()) == {table["baseline"]}
    rows = {
        name if one else f"{name}  −  {opponents[name]}": row for name, row in table["differences"].items()
    }
    if "noise" in table:
        rows["noise floor"] = table["noise"]
    figure = Figure(figsize=(3.4 * len(metrics), 1.5 + 0.4 * len(rows)), layout="constrained")
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics):
        for place, (name, row) in enumerate(rows.items()):
            mean, low, high = row[metric]["interval"]
            color = "#999999" if name == "noise floor" else COLORS[1 if row[metric]["claim"] else 0]
            axes.plot([low, high], [place, place], color=color, linewidth=2)
            axes.plot(mean, place, "o", color=color)
            axes.plot(row[metric]["values"], [place - 0.2] * table["seeds"], "|", color=color, markersize=6)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_title(metric)
        axes.grid(alpha=0.3, axis="x")
    panels[0].set_yticks(range(len(rows)), list(rows))
    panels[0].invert_yaxis()
    figure.suptitle(
        f"{args.task}: difference from {table['baseline'] if one else 'the arm named'} on test prompts (ticks: seeds; orange: a claim)"
    )
    figure.savefig(args.folder / "differences.png", dpi=100)


# --- 6. The command ---

OURS = ("--seed", "--task", "--out", "--resume", "--replicate")  # what compare.py sets for every run


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line, checked. What is not compare.py's own goes to args.shared: flags of the training script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    several = {"nargs": "+", "default": []}
    parser.add_argument("task", choices=list(SCRIPTS))
    parser.add_argument("--algos", nargs="+", choices=list(ADVANTAGES), default=list(ADVANTAGES))
    parser.add_argument("--tau", **several, type=float, help="temperatures of softmax (default: the task's)")
    parser.add_argument("--target-ess", **several, type=float, help="softmax with a temperature per group")
    parser.add_argument(
        "--vary", nargs="+", action="append", default=[], metavar=("SETTING", "VALUE"),
        help="a setting of the training script and its values; more than once: all combinations",
    )  # fmt: skip
    parser.add_argument(
        "--select", choices=METRICS, help="show each method only at its best on validation prompts by this"
    )
    parser.add_argument(
        "--against", help="the arm that the others are compared with (default: grpo, else the first)"
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on, at least 2 (default: 5)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; 1 on one GPU (default: 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run (default: 1)")
    parser.add_argument("--runs", default="runs/compare", help="where the runs live (default: runs/compare)")
    parser.add_argument("--results", default="results", help="folder of the results (default: results)")
    parser.add_argument("--name", help="of this comparison (default: compare-<task>)")
    args, args.shared = parser.parse_known_args(arguments)
    args.name = args.name or f"compare-{args.task}"
    args.folder = Path(args.results) / args.name
    if args.name in (".", "..") or "/" in args.name or "\\" in args.name:
        raise ValueError(f"--name {args.name}: expected the name of a folder, not a path")
    for name, bound in (("seeds", 2), ("jobs", 1), ("threads", 1)):
        if getattr(args, name) < bound:
            raise ValueError(f"--{name} must be at least {bound}, got {getattr(args, name)}")
    for setting, *values in args.vary:
        if not values:
            raise ValueError(f"--vary {setting} needs the values to try")
    given = {flag.split("=")[0] for flag in args.shared} | {f"--{setting}" for setting, *_ in args.vary}
    if given & set(OURS):
        raise ValueError(f"{', '.join(sorted(given & set(OURS)))}: compare.py sets this itself (--seeds N)")
    if not args.tau and not args.target_ess:
        script = SCRIPTS[args.task]
        preset = parse_config(list(script.TASKS), script.PRESETS, "", run_flags(args, [], 0))
        args.tau = [preset.tau]
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    arms = make_arms(args)
    names = [arm.name for arm in arms]
    if args.against and args.against not in names:
        raise ValueError(f"--against {args.against}: the arms are {', '.join(names)}")
    if args.select and args.select.startswith("pass@"):
        samples = min(config.eval_samples for arm in arms for config in arm.runs)
        if int(args.select.removeprefix("pass@")) > samples:
            raise ValueError(
                f"--select {args.select} needs --eval-samples of at least as many, got {samples}"
            )
    args.folder.mkdir(parents=True, exist_ok=True)
    failures = run_all(args, arms)
    table: dict[str, Any] = {}
    if args.select:
        # A setting at which a run breaks down is not the best one.
        table["failed"] = list(failures)
        arms, table["validation"] = choose(args, [arm for arm in arms if arm.name not in failures])
        if args.against and args.against not in [arm.name for arm in arms]:
            raise ValueError(
                f"--against {args.against}: not chosen; chosen are {', '.join(arm.name for arm in arms)}"
            )
    elif failures:
        raise ValueError("some runs failed:\n" + "\n".join(failures.values()))
    baseline = next(
        (arm for arm in arms if arm.name == args.against),
        next((arm for arm in arms if arm.method == "grpo"), arms[0]),
    )
    noise = noise_arm(args, next((arm for arm in arms if arm.method.startswith("softmax")), arms[0]))
    if failures := run_all(args, [noise]):
        raise ValueError("some runs failed:\n" + "\n".join(failures.values()))
    table |= compare(args, arms, noise, baseline)
    write_tables(args, table, shlex.join(["python", "compare.py", *sys.argv[1:]]))
    draw_curves(args, arms, table["metrics"])
    draw_temperatures(args, arms, table)
    draw_differences(args, table)
    print((args.folder / "table.md").read_text())


if __name__ == "__main__":
    end_clearly(main, "stopped; the same command goes on from here")
