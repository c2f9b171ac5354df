"""Where the gradient goes, by the prompts' pass rate: the paper's Table 3, with a stated protocol.

    python compare.py countdown --algos softmax grpo --keep-checkpoints --name methods
    python gradient_table.py runs/compare/countdown-grpo-*-???????? --prompts 128 --name methods

The protocol. For every checkpoint that a run has kept, and its start: `--prompts` test prompts; 64 rollouts of each estimate its
pass rate p; M others make the advantages, so that luck does not count on both sides. A prompt's amount is sum |A| over the tokens
of its rollouts, or the norm of its gradient, sum_i A_i grad log pi(y_i). The share of a bin of pass rate is its prompts' part of
the total. `predicted` is what expected_abs_advantage makes of the pass rates alone. All methods are applied to the same rollouts
of the same policy, so they differ in their advantages only. Intervals: 95%, bootstrap over prompts; where all seeds share their
test prompts, a prompt is drawn for all seeds at once. Only for right-or-wrong rewards: the others have no pass rate.

Read it in this order: 1. one checkpoint, 2. shares, 3. the figure, 4. the command. Writes gradient.md, gradient.json and
gradient.png to results/<name>/.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm.auto import tqdm

from compare import COLORS, SCRIPTS, markdown
from launch import end_clearly, load_policy
from run import Config, run_folder, split_rows, write_json
from softmax_grpo import (
    PASS_RATE_BINS,
    Rollouts,
    expected_abs_advantage,
    generate,
    group_advantages,
    score_rollouts,
    score_texts,
    share_by_pass_rate,
    stream,
    surrogate_loss,
)

# --- 1. One checkpoint: pass rates, and what each prompt gets from each method ---

RATE_ROLLOUTS = 64
METHODS = {
    "softmax tau 0.1": {"algo": "softmax", "tau": 0.1},
    "softmax tau 0.3": {"algo": "softmax", "tau": 0.3},
    "softmax tau 1": {"algo": "softmax", "tau": 1.0},
    "maxrl": {"algo": "maxrl"},
    "grpo": {"algo": "grpo"},
    "reinforce": {"algo": "reinforce"},
}


def measure(config: Config, step: int, num_prompts: int) -> dict[str, Any]:
    """Per prompt its pass rate and, for each method, predicted |A|, |A| over tokens and gradient norm, at the checkpoint of
    that step (0: the start). Kept in the run's folder, and read from there the next time.
    """
    path = run_folder(config) / f"gradient-{step}-{num_prompts}-{RATE_ROLLOUTS}.json"
    if path.exists():
        return json.loads(path.read_text())
    torch.set_num_threads(1)
    task = SCRIPTS[config.task].TASKS[config.task](config)
    policy = load_policy(config, task)
    model = policy.model.float()
    if step:
        saved = type(model).from_pretrained(run_folder(config) / f"checkpoint-{step}", dtype=torch.float32)
        model.load_state_dict(saved.state_dict())
    model.to(config.device).eval()
    rows = split_rows(task, dataclasses.replace(config, test_prompts=num_prompts))[2]
    methods = {
        name: dataclasses.replace(config, target_ess=0.0, **change) for name, change in METHODS.items()
    }
    digest = hashlib.sha256(json.dumps([task.prompt(row) for row in rows]).encode()).hexdigest()
    found: dict[str, Any] = {
        "prompts": digest,
        "rate": [],
        **{name: {"predicted": [], "tokens": [], "norm": []} for name in methods},
    }
    generator = stream(config, "gradient table", step, torch.device(config.device))
    size, cap = config.group_size, task.max_new_tokens
    at_once = max(1, config.rollout_rows // RATE_ROLLOUTS)
    for begin in range(0, len(rows), at_once):
        some = rows[begin : begin + at_once]
        prompts = [task.prompt(row) for row in some]
        others = generate(*policy, prompts, RATE_ROLLOUTS, cap, config.temperature, generator)
        rates = score_texts(task, others.texts, some, RATE_ROLLOUTS)[1].mean(-1)  # (P,)
        rollouts = generate(*policy, prompts, size, cap, config.temperature, generator)
        rewards, correct = score_texts(task, rollouts.texts, some, size)  # (P, M)
        if not torch.equal(rewards, correct):
            raise ValueError(
                "only right-or-wrong rewards have a pass rate: not those of --reward sim or train_textgen.py"
            )
        lengths = rollouts.lengths.view(-1, size).cpu()  # (P, M)
        products = [
            gradient_products(model, rollouts, prompt, config)
            if rewards[prompt].std() > 0
            else torch.zeros(size, size)
            for prompt in range(len(some))
        ]
        found["rate"] += rates.tolist()
        # Never failing in 64 tries does not mean never failing: half a success and half a failure more.
        careful_rates = (rates * RATE_ROLLOUTS + 0.5) / (RATE_ROLLOUTS + 1)
        for name, settings in methods.items():
            advantages = group_advantages(rewards, settings).double()  # (P, M)
            predicted = expected_abs_advantage(
                careful_rates, size, lambda r, s=settings: group_advantages(r, s)
            )
            found[name]["predicted"] += predicted.tolist()
            found[name]["tokens"] += (advantages.abs() * lengths).sum(-1).tolist()
            found[name]["norm"] += [
                float((a @ p.double() @ a).clamp(min=0).sqrt()) for a, p in zip(advantages, products)
            ]
    write_json(path, found)
    return found


def gradient_products(model: Any, rollouts: Rollouts, prompt: int, config: Config) -> Tensor:
    """(M, M) inner products of the gradients of log pi(y_i) over one prompt's rollouts. With a group's advantages A the norm of
    its gradient sum_i A_i grad log pi(y_i) is sqrt(A^T products A): one pass serves every method.
    """
    gradients = []
    for row in range(prompt * config.group_size, (prompt + 1) * config.group_size):
        rows = torch.tensor([row])
        logprobs = score_rollouts(model, rollouts, rows, config.temperature)  # (1, T)
        one, mask = torch.ones(1, device=logprobs.device), rollouts.mask[rows, : logprobs.shape[1]]
        no_clip = {"clip_low": None, "clip_high": None, "aggregation": "sum"}
        loss, _ = surrogate_loss(logprobs, logprobs.detach(), one, mask, **no_clip)
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))
    # Weight by weight, so that the M gradients are held once only.
    stacked = (torch.stack(parts).flatten(1) for parts in zip(*gradients))  # (M, entries) of each weight
    return sum(part @ part.T for part in stacked).cpu()


# --- 2. Shares of the bins, with intervals ---


def shares_with_intervals(found: list[dict[str, Any]], resamples: int = 1000) -> dict[str, list[list[float]]]:
    """label -> [share, low, high] of each bin; the prompts themselves, and of each method abs(A) over tokens, what was predicted
    for it, and the gradient norm. found: one `measure` per seed.
    """
    generator = torch.Generator().manual_seed(0)
    rates = [torch.tensor(run["rate"]) for run in found]
    shared = len({run["prompts"] for run in found}) == 1
    picks: list[Tensor] = []  # (resamples + 1, n) of each seed; the first row takes every prompt once
    for rate in rates:
        drawn = torch.randint(len(rate), (resamples, len(rate)), generator=generator)
        picks.append(picks[0] if shared and picks else torch.cat([torch.arange(len(rate))[None], drawn]))
    amounts = {"prompts": [torch.ones_like(rate) for rate in rates]}
    for name in METHODS:
        for key, label in {
            "tokens": "abs(A) over tokens",
            "predicted": "predicted",
            "norm": "gradient norm",
        }.items():
            amounts[f"{name}, {label}"] = [torch.tensor(run[name][key]) for run in found]
    rate = torch.cat(
        [rate[pick] for rate, pick in zip(rates, picks)], -1
    )  # (resamples + 1, prompts of all seeds)
    table = {}
    for label, amount in amounts.items():
        drawn = torch.cat([a[pick] for a, pick in zip(amount, picks)], -1)
        shares = torch.stack([share_by_pass_rate(r, a) for r, a in zip(rate, drawn)])  # (resamples + 1, 5)
        some = shares[1:][shares[1:].sum(-1) > 0]  # a draw without any gradient has no shares
        bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
        low, high = torch.quantile(some, bounds, dim=0) if len(some) else torch.zeros(2, shares.shape[1])
        table[label] = [list(cell) for cell in zip(shares[0].tolist(), low.tolist(), high.tolist())]
    return table


# --- 3. The figure ---


def draw_shares(tables: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    """One panel per policy: of every method the share of abs(A) over tokens per bin, with its interval; a cross where the pass
    rates alone predict it, grey steps where the prompts are.
    """
    columns = min(3, len(tables))
    rows = math.ceil(len(tables) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
    names = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(PASS_RATE_BINS)]
    places = torch.arange(len(names)).double()
    width = 0.8 / len(METHODS)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[len(tables) :]:
        axes.set_visible(False)
    for axes, (title, table) in zip(panels, tables.items()):
        prompts = [share for share, *_ in table["prompts"]]
        axes.bar(places, prompts, 0.9, color="#DDDDDD", label="prompts")
        for place, (method, color) in enumerate(zip(METHODS, COLORS)):
            x = places + width * (place - (len(METHODS) - 1) / 2)
            share, low, high = torch.tensor(table[f"{method}, abs(A) over tokens"]).double().T
            # A bootstrap interval need not hold its own point: no negative bars.
            error = torch.stack([share - low, high - share]).clamp(min=0)
            axes.bar(x, share, width, yerr=error, color=color, label=method, error_kw={"linewidth": 0.7})
            axes.plot(x, [cell[0] for cell in table[f"{method}, predicted"]], "kx", markersize=3)
        axes.set_xticks(places, names)
        axes.set_title(title)
        axes.set_xlabel("pass rate of the prompt")
        axes.set_ylabel("share")
    figure.axes[0].legend(fontsize="x-small")
    figure.suptitle(
        "Where the gradient goes: share of abs(A) over tokens (cross: predicted from pass rates alone)"
    )
    figure.savefig(path, dpi=100)


# --- 4. The command ---


def read_config(folder: Path) -> Config:
    """The settings of a finished run. ValueError if the folder holds none."""
    if not (folder / "summary.json").exists():
        raise ValueError(f"{folder} holds no finished run")
    stored = json.loads((folder / "config.json").read_text())
    names = {field.name for field in dataclasses.fields(Config)}
    config = Config(
        **{name: value for name, value in stored.items() if name in names}, out=str(folder.parent)
    )
    if config.random_reward:
        raise ValueError(f"{folder} was trained on a coin: its rewards have no pass rate")
    if run_folder(config) != folder:
        raise ValueError(
            f"{folder} does not have the name that its settings give it: it was renamed, or made by another version"
        )
    return config


def kept_steps(configs: list[Config]) -> list[int]:
    """The steps whose checkpoints all seeds of an arm have kept."""
    kept = [
        {int(path.name.split("-")[1]) for path in run_folder(config).glob("checkpoint-*")}
        for config in configs
    ]
    if not (steps := sorted(set.intersection(*kept))):
        raise ValueError(
            f"{run_folder(configs[0])} and its like have kept no checkpoints: run them with --keep-checkpoints"
        )
    return steps


def group_runs(folders: list[Path]) -> dict[str, list[Config]]:
    """Runs that differ in their seed only are an arm; arms are named by the settings in which they differ.
    ValueError for runs that do not belong into one table.
    """
    arms: dict[str, list[Config]] = {}
    for config in map(read_config, folders):
        settings = {name: value for name, value in config.result_settings().items() if name != "seed"}
        arms.setdefault(json.dumps(settings, sort_keys=True), []).append(config)
    groups = list(arms.values())
    seeds = sorted(config.seed for config in groups[0])
    if len(set(seeds)) < len(seeds) or any(sorted(c.seed for c in group) != seeds for group in groups):
        raise ValueError(
            "every arm needs the same seeds, each once: give the folders of all its runs, and none twice"
        )
    first = groups[0][0]
    for name in (
        "task",
        "model",
        "train_file",
        "test_file",
        "warm_start_steps",
        "warm_start_quality",
        "eval_prompts",
    ):
        if len({getattr(group[0], name) for group in groups}) > 1:
            raise ValueError(
                f"these runs have different {name}: they do not start from the same policy and prompts"
            )
    fields = [
        name for name in first.result_settings() if len({getattr(group[0], name) for group in groups}) > 1
    ]
    fields = [name for name in fields if name not in ("algo", "tau")]
    named = {}
    for group in groups:
        config = group[0]
        name = (
            f"softmax tau {config.tau:g}"
            if config.algo == "softmax" and not config.target_ess
            else config.algo
        )
        named[", ".join([name, *(f"{field} {getattr(config, field)}" for field in fields)])] = group
    return named


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, help="run folders with kept checkpoints, seeds of one arm or of several"
    )
    parser.add_argument("--prompts", type=int, default=128, help="test prompts of each run (default: 128)")
    parser.add_argument("--jobs", type=int, default=2, help="checkpoints measured at a time (default: 2)")
    parser.add_argument("--results", default="results", help="folder of the results (default: results)")
    parser.add_argument("--name", required=True, help="of the comparison that the runs belong to")
    args = parser.parse_args()
    arms = group_runs(args.runs)
    steps = {name: kept_steps(configs) for name, configs in arms.items()}
    # All arms of a seed start from the same policy: measure it once.
    wanted = {("warm start", 0): next(iter(arms.values()))}
    wanted |= {(name, step): configs for name, configs in arms.items() for step in steps[name]}
    tables: dict[str, Any] = {}
    counts: dict[str, str] = {}
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        pending = {
            (name, step): [pool.submit(measure, config, step, args.prompts) for config in configs]
            for (name, step), configs in wanted.items()
        }
        for (name, step), jobs in tqdm(pending.items(), desc="gradients", unit="checkpoint"):
            title = f"{name}, step {step}" if step else name
            results = [job.result() for job in jobs]
            tables[title] = shares_with_intervals(results)
            counts[title] = (
                f"{' + '.join(str(len(result['rate'])) for result in results)} test prompts of {len(results)} seeds"
            )
    bins = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(PASS_RATE_BINS)]
    command = shlex.join(["python", "gradient_table.py", *sys.argv[1:]])
    lines = [f"# {args.name}: shares of the gradient by pass rate, in %", "", f"    {command}", ""]
    lines += ["95% intervals; the protocol stands in gradient_table.py.", ""]
    for title, table in tables.items():
        body = [
            [label, *(f"{100 * share:.1f} [{100 * low:.1f}, {100 * high:.1f}]" for share, low, high in row)]
            for label, row in table.items()
        ]
        lines += [f"## Policy: {title}", "", counts[title], "", *markdown(["pass rate", *bins], body), ""]
    folder = Path(args.results) / args.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gradient.md").write_text("\n".join(lines))
    write_json(folder / "gradient.json", {"command": command, "tables": tables})
    draw_shares(tables, folder / "gradient.png")
    print("\n".join(lines))


if __name__ == "__main__":
    end_clearly(main, "stopped; what has been measured is kept, and the same command goes on")
