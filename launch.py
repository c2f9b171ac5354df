"""From a command line to a finished run: what the three training scripts share and a reader of the algorithm can skip.

    1. command line   preset + flags -> Config
    2. data           hub id, local file or offline generator -> rows with a stated source
    3. policy         hub id, folder or the tiny policy -> (model, tokenizer)
    4. the run        header, train, figures, summary table
    5. figures        metrics.jsonl -> curves.png

A script calls `launch(tasks, presets)`; bad input ends in one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

if os.name == "posix" and os.getloadavg()[0] > 0.4 * (os.cpu_count() or 1):
    # Threads that spin while they wait are 1.4 times as fast on an idle machine, but starve each other on a busy one. Torch
    # must find this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_policy
from run import Config, is_interval, run_folder, split_indices
from softmax_grpo import PASS_RATE_BINS, Policy, Task, train

datasets.disable_progress_bars()

# --- 1. Command line ---


def parse_config(
    tasks: list[str], presets: dict[str, dict[str, dict]], description: str, arguments: list[str]
) -> Config:
    """Flags over the preset of the task and device over the defaults of Config. presets[task][preset][field] = value."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups: dict[str, Any] = {}
    shown = next((task for task in tasks if task in arguments), tasks[0])  # whose defaults --help shows
    for f in dataclasses.fields(Config):
        group = groups.setdefault(f.metadata["group"], parser.add_argument_group(f.metadata["group"]))
        choices = tasks if f.name == "task" else f.metadata["choices"]
        values = {name: presets[shown][name].get(f.name, f.default) for name in ("cpu", "gpu")}
        values = {name: "none" if value in ("", None) else value for name, value in values.items()}
        same = values["cpu"] == values["gpu"]
        default = values["cpu"] if same else f"cpu: {values['cpu']}, gpu: {values['gpu']}"
        if f.name == "task":
            default = tasks[0]
        if f.name in ("preset", "device"):
            default = "by whether there is a CUDA device"
        kind = {"bool": parse_bool, "int": int, "float": float, "float | None": parse_bound}.get(f.type, str)
        extra = (
            {"nargs": "?", "const": True, "metavar": "yes/no"} if f.type == "bool" else {"choices": choices}
        )
        flag = "--" + f.name.replace("_", "-")
        help = f"{f.metadata['help']} (default: {default})".replace("%", "%%")
        group.add_argument(flag, type=kind, help=help, default=argparse.SUPPRESS, **extra)
    given = vars(parser.parse_args(arguments))
    task = given.setdefault("task", tasks[0])
    device = given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device) or (device != "cpu" and not torch.cuda.is_available()):
        raise ValueError(f"--device {device}: there is no such device here; use --device cpu")
    preset = given.setdefault("preset", "gpu" if device.startswith("cuda") else "cpu")
    settings = presets[task][preset]
    if preset == "cpu" and given.get("model", "tiny") != "tiny":
        # The tiny policy's learning rate, hundreds of times higher, would ruin a language model in a step.
        settings = {**settings, **{name: presets[task]["gpu"][name] for name in ("lr", "lr_decay", "beta")}}
    return Config(**{**settings, **given})


def parse_bool(text: str) -> bool:
    if text.lower() not in ("yes", "no", "true", "false"):
        raise argparse.ArgumentTypeError(f"expected yes or no, got {text!r}")
    return text.lower() in ("yes", "true")


def parse_bound(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


# --- 2. Data ---


def load_rows(
    config: Config,
    columns: list[str],
    hub: tuple[str, str | None],
    key: Callable[[dict], str],
    offline: Callable[[], datasets.Dataset] | None,
    keep: Callable[[dict], bool] = lambda row: True,
) -> tuple[datasets.Dataset, datasets.Dataset, str]:
    """Training and test rows, no two of them with the same key, and where they came from.

    From `--train-file` (and `--test-file`), else the hub (preset gpu), else the offline generator. Where there is no
    test split, one row in ten is held out by a hash of its key: independent of row order.
    Raises ValueError naming a missing file or column, or when nothing usable is left.
    """
    if config.test_file and not config.train_file:
        raise ValueError("--test-file needs a --train-file beside it")
    if config.train_file:
        splits = {
            name: getattr(config, f"{name}_file")
            for name in ("train", "test")
            if getattr(config, f"{name}_file")
        }
        data = {name: read_file(path) for name, path in splits.items()}
        source = ", ".join(f"{path} (sha256 {file_digest(path)})" for path in splits.values())
    elif config.preset == "gpu" or offline is None:
        try:
            data = dict(datasets.load_dataset(*hub))
        except (OSError, ValueError) as error:  # datasets raises either when the hub cannot be reached
            raise ValueError(
                f"the data set {hub[0]} cannot be loaded from the hub ({first_line(error)}): use --train-file FILE, or --preset cpu"
            ) from error
        source = f"{hub[0]} from the hub (fingerprint {data['train']._fingerprint})"
    else:
        data = {"train": offline()}
        source = "offline generator"
    kept, counts = {}, []
    for name in ("train", "test"):
        if name not in data:
            continue
        missing = [column for column in columns if column not in data[name].column_names]
        if missing:
            raise ValueError(
                f"the {name} rows have no column {', '.join(missing)}: expected {', '.join(columns)}, "
                f"got {', '.join(data[name].column_names)}"
            )
        usable = data[name].filter(keep)
        first_places: dict[str, int] = {}
        for place, row in enumerate(usable):
            first_places.setdefault(key(row), place)
        kept[name] = usable.select(first_places.values())
        counts.append(f"{len(usable)} of {len(data[name])} {name} rows usable")
        if repeated := len(usable) - len(kept[name]):
            counts.append(f"{repeated} repeated ones dropped")
    if "test" in kept:
        tested = {key(row) for row in kept["test"]}
        train_rows, test_rows = kept["train"].filter(lambda row: key(row) not in tested), kept["test"]
        if overlap := len(kept["train"]) - len(train_rows):
            counts.append(f"{overlap} training rows dropped because they are test rows too")
    else:
        held_out = lambda row: int(hashlib.sha256(key(row).encode()).hexdigest(), 16) % 10 == 0
        test_rows = kept["train"].filter(held_out)
        train_rows = kept["train"].filter(lambda row: not held_out(row))
        counts.append("one in ten held out by hash")
    if not len(train_rows) or not len(test_rows):
        raise ValueError(f"no usable rows are left in {source} ({'; '.join(counts)})")
    return (
        train_rows,
        test_rows,
        f"{source}: {'; '.join(counts)}; {len(train_rows)} train, {len(test_rows)} test",
    )


def imitable(train_rows: datasets.Dataset, config: Config) -> datasets.Dataset:
    """The rows that demonstrations may come from: those that `train` will not hold back for validation."""
    return train_rows.select(split_indices(len(train_rows), config)[0])


def distinct_rows(
    make: Callable[[random.Random], dict | None], key: Callable[[dict], Any], count: int, seed: int
) -> datasets.Dataset:
    """An offline generator: `count` rows of different keys from `make`, which may return None for a draw that will not do.
    Raises ValueError when there seem not to be that many.
    """
    chooser, rows = random.Random(seed), {}
    for _ in range(50 * count):
        if row := make(chooser):
            rows.setdefault(key(row), row)
        if len(rows) == count:
            return datasets.Dataset.from_list(list(rows.values()))
    raise ValueError(f"the generator found only {len(rows)} different rows, not {count}")


def read_file(path: str) -> datasets.Dataset:
    kind = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}.get(
        Path(path).suffix.lower()
    )
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    if not Path(path).read_bytes().strip():
        raise ValueError(f"{path} is empty")
    if kind is None:
        raise ValueError(f"{path}: expected a .jsonl, .json, .csv or .parquet file")
    try:
        return datasets.load_dataset(kind, data_files=str(path), split="train")
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as {kind} ({first_line(error)})") from error


def file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# --- 3. Policy ---


def load_policy(config: Config, task: Task) -> Policy:
    """The tiny policy after its warm start, or any causal LM from a folder or the hub, in float32."""
    if config.model == "tiny":
        return load_tiny_policy(config, task)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
        model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the model {config.model} cannot be loaded ({first_line(error)}): give the folder of a causal LM, a hub id "
            "that can be reached from here, or --model tiny"
        ) from error
    return Policy(model, tokenizer)


def load_tiny_policy(config: Config, task: Task) -> Policy:
    """Warm-start the tiny policy, once: runs that differ only in their RL settings share it, so they can be paired."""
    settings = [config.seed, config.warm_start_steps, task.max_new_tokens, task.demonstrations]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    folder = Path(config.out) / f"warm-start-{config.task}-seed{config.seed}-{digest}"
    if not (folder / "config.json").exists():
        policy = tiny_policy.warm_start(
            task.demonstrations or [], config.warm_start_steps, task.max_new_tokens, config.seed
        )
        temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
        policy.model.save_pretrained(temporary)
        policy.tokenizer.save_pretrained(temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another run made it meanwhile, with the same result
            pass
    # Always through the file, so that a run with a fresh and one with a cached warm start are the same run.
    return Policy(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


# --- 4. The run ---


def launch(
    tasks: dict[str, Callable[[Config], Task]],
    presets: dict[str, dict[str, dict]],
    description: str,
    after: Callable[[Config, Task, dict], None] | None = None,
) -> None:
    """The main function of a training script: `tasks[name](config)` builds the task, `presets[name]` its defaults;
    `after(config, task, summary)` is called when the run is done.
    """

    def main() -> None:
        config = parse_config(list(tasks), presets, description, sys.argv[1:])
        task = tasks[config.task](config)
        summary = run_task(config, task)
        if after:
            after(config, task, summary)

    end_clearly(main, "stopped; the same command with --resume continues a run")


def end_clearly(main: Callable[[], None], stopped: str) -> None:
    """Calls `main`. Bad input ends in one sentence on stderr and exit code 2, Ctrl-C in `stopped` and 130: never in a traceback."""
    try:
        main()
    except torch.OutOfMemoryError:
        sys.exit(
            "error: out of GPU memory: lower --microbatch-tokens first, then --prompts, --max-new-tokens or --group-size"
        )
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or stopped, file=sys.stderr)
        sys.exit(130)


def run_task(config: Config, task: Task) -> dict[str, Any]:
    """One run from its header to its figures; returns the summary. compare.py calls this for every arm."""
    folder = run_folder(config)
    folder.parent.mkdir(parents=True, exist_ok=True)  # before the work, so that an impossible --out shows now
    method = config.algo
    if config.algo == "softmax":
        method += f" ESS {config.target_ess:g}" if config.target_ess else f" tau {config.tau:g}"
    print(
        f"device   {config.device} (preset {config.preset}, {torch.get_num_threads()} threads, torch {torch.__version__})"
    )
    print(f"model    {config.model}")
    print(f"data     {task.source}")
    print(
        f"method   {method}, M {config.group_size} x P {config.prompts}, {config.steps} steps, lr {config.lr:g}, beta {config.beta:g}"
    )
    print(f"writes   {folder}/", flush=True)
    policy = load_policy(config, task)
    summary = train(policy, task, config)
    draw_curves(folder)
    print_summary(folder, summary)
    return summary


def print_summary(folder: Path, summary: dict[str, Any]) -> None:
    start, end = summary["start"], summary["end"]
    print(f"\n{summary['task']}, {summary['algo']}, seed {summary['seed']}: test prompts, 95% intervals")
    print(f"{'':12}{'start':>24}{'end':>24}")
    for name in end:
        if is_interval(end[name]):
            cells = ["{:.3f} [{:.3f}, {:.3f}]".format(*result[name]) for result in (start, end)]
            print(f"{name:12}{cells[0]:>24}{cells[1]:>24}")
    for name in ("truncated", "length", "kl"):
        print(f"{name:12}{start[name]:>24.3f}{end[name]:>24.3f}")
    for name in (name for name in end["report"] if not name.endswith("/reference")):
        beside = end["report"].get(f"{name}/reference")
        beside = "" if beside is None else f"   references {beside:.3f}"
        print(f"{name:24}{start['report'][name]:>12.3f}{end['report'][name]:>24.3f}{beside}")
    print("\nthree completions of the last step")
    for line in (folder / "samples.jsonl").read_text().splitlines()[-3:]:
        sample = json.loads(line)
        print(
            f"  reward {sample['reward']:.2f}  advantage {sample['advantage']:+.2f}  {sample['completion'][-300:]!r}"
        )
    phases = "  ".join(f"{name} {value:.0f}" for name, value in summary["seconds"].items())
    print(f"\nseconds  {phases}\nfigures  {folder / 'curves.png'}")


# --- 5. Figures ---

START_COLOR, END_COLOR = "#E69F00", "#0072B2"  # Okabe-Ito: safe for colour-blind readers


def draw_curves(folder: Path) -> None:
    """curves.png: how the run went, from metrics.jsonl and summary.json. Bands are 95% intervals over prompts."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    evaluations = [(line["step"], line["validation"]) for line in lines if "validation" in line]
    figure = Figure(figsize=(14, 9), layout="constrained")
    panels: Iterator = iter(figure.subplots(3, 3).flat)

    def panel(title: str, label: str) -> Any:
        axes = next(panels)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        return axes

    def series(axes: Any, name: str, label: str | None = None) -> None:
        axes.plot([line["step"] for line in steps], [line[name] for line in steps], label=label, linewidth=1)

    def bands(axes: Any, names: list[str]) -> None:
        for name in (name for name in names if name in evaluations[0][1]):
            at = [step for step, _ in evaluations]
            value, low, high = zip(*(result[name] for _, result in evaluations))
            axes.plot(at, value, marker="o", markersize=3, label=name)
            axes.fill_between(at, low, high, alpha=0.2)
        axes.legend(fontsize="small")

    axes = panel("Reward (validation, sampled)", "reward per completion")
    series(axes, "reward", "training batch")
    bands(axes, ["reward"])
    bands(panel("Accuracy (validation)", "share of prompts"), ["greedy", "pass@1", "pass@8", "pass@32"])
    axes = panel("Length", "tokens per completion")
    series(axes, "completions/mean_length")
    axes.set_ylim(bottom=0)
    axes = panel("KL(policy || start), validation", "nats per token")
    axes.plot(
        [step for step, _ in evaluations],
        [result["kl"] for _, result in evaluations],
        marker="o",
        markersize=3,
    )
    axes = panel("Clipped tokens", "share of tokens")
    series(axes, "clip_ratio/low_mean", "ratio too low")
    series(axes, "clip_ratio/high_mean", "ratio too high")
    axes.legend(fontsize="small")
    series(panel("Entropy of the sampled tokens", "nats per token"), "entropy")
    series(panel("Groups without signal (equal rewards)", "share of groups"), "frac_reward_zero_std")
    series(panel("Gradient norm before clipping", "norm"), "grad_norm")
    axes = panel("Gradient budget by pass rate, last evaluation", "share of sum |A| over tokens")
    budget = evaluations[-1][1]["budget"]
    if budget["measured"]:
        names = [f"{low:g}-{high:g}" for low, high in pairwise(PASS_RATE_BINS)]
        for shift, (name, color) in enumerate(
            {"measured": END_COLOR, "predicted": START_COLOR, "prompts": "#999999"}.items()
        ):
            axes.bar(
                [i + 0.27 * (shift - 1) for i in range(len(names))],
                budget[name],
                0.27,
                label=name,
                color=color,
            )
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel("pass rate of the prompt")
        axes.legend(fontsize="small")
    figure.suptitle(folder.name)
    figure.savefig(folder / "curves.png", dpi=100)
