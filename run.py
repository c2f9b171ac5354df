"""The plumbing of a run: its settings, its folder, its checkpoints, its progress bar. No algorithm lives here.

A run is the folder `<out>/<task>-<algo>-seed<k>-<hash of the settings>/`:

    config.json      all settings, library versions, data source, git commit
    metrics.jsonl    one line per step; line 0 is the evaluation before the first step
    samples.jsonl    a few completions with rewards and advantages at each evaluation
    summary.json     figures on the test rows before and after, and seconds per phase
    checkpoint/      model and tokenizer in Hugging Face format, and trainer.pt to resume from
    curves.png       drawn by launch.py at the end

`train` in softmax_grpo.py is the only caller of RunFolder; launch.py makes the command line from Config.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import datasets
import torch
import transformers
from torch import Tensor
from tqdm.auto import tqdm

from softmax_grpo import (
    ADVANTAGES,
    Policy,
    Rollouts,
    Task,
    effective_sample_size,
    encode_prompt,
    group_tau,
    stream,
)

transformers.utils.logging.disable_progress_bar()  # one bar for the run, none for each file of a checkpoint

# --- 1. Settings ---


def option(default: Any, help: str, group: str = "algorithm", choices: tuple | None = None) -> Any:
    return field(default=default, metadata={"help": help, "group": group, "choices": choices})


@dataclass
class Config:
    """Every setting of a run. The presets of a script override these defaults; flags override the presets.

    Raises ValueError, one sentence, for values that cannot work.
    """

    task: str = option("countdown", "which task to train on", "run")
    preset: str = option(
        "cpu", "cpu: tiny policy, offline data; gpu: hub model and data", "run", ("cpu", "gpu")
    )
    model: str = option("tiny", "hub id or folder of a causal LM, or 'tiny': the embedded policy", "run")
    device: str = option("cpu", "cpu or cuda", "run")
    seed: int = option(0, "seed of everything random in the run", "run")
    replicate: int = option(
        0, "another number: the same run with other random rollouts and another order of prompts", "run"
    )
    out: str = option("runs", "folder that will hold the run's folder", "run")
    resume: bool = option(False, "continue an interrupted run of the same settings", "run")

    algo: str = option("softmax", "how rewards become advantages", choices=tuple(ADVANTAGES))
    tau: float = option(0.1, "softmax temperature, in units of reward")
    target_ess: float = option(
        0.0, "choose tau per group so that this many rollouts carry the update; 0: --tau"
    )
    group_size: int = option(8, "M, rollouts per prompt")
    prompts: int = option(32, "P, prompts per step")
    steps: int = option(100, "training steps; each samples P x M rollouts")
    updates: int = option(
        1, "optimiser updates per batch of rollouts; with 1 the ratio is 1 and no clip binds"
    )
    clip_low: float | None = option(0.2, "no reward for ratios below 1 - this; none: no bound")
    clip_high: float | None = option(0.28, "no reward for ratios above 1 + this; none: no bound")
    beta: float = option(0.0, "weight of the KL penalty towards the starting policy")
    aggregation: str = option("token", "how token losses are averaged", choices=("token", "sequence", "sum"))
    temperature: float = option(1.0, "sampling temperature, and that of the scored policy")
    exact: bool = option(False, "the theorems' objective: no clip, beta 0, one update, aggregation sum")
    random_reward: bool = option(False, "control: train on a coin instead of the reward")

    lr: float = option(3e-4, "learning rate of AdamW", "optimiser")
    lr_decay: bool = option(True, "let the learning rate fall linearly to 0 over the run", "optimiser")
    max_grad_norm: float = option(1.0, "the gradient is scaled down to this norm", "optimiser")
    microbatch_tokens: int = option(
        16384, "tokens, padding included, in one forward and backward", "optimiser"
    )

    train_file: str = option("", "local JSONL, JSON, CSV or Parquet file in the hub's schema", "data")
    test_file: str = option("", "the same, for the held-out rows", "data")
    reward: str = option(
        "exact",
        "exact: the task's own reward; sim: overlap with the reference text",
        "data",
        ("exact", "sim"),
    )
    worked_examples: int = option(
        0,
        "train_gsm8k.py: solved examples shown before the question, 0 to 3, for models that ignore the format",
        "data",
    )
    max_new_tokens: int = option(0, "cap on completion tokens; 0: the task's own", "data")
    warm_start_steps: int = option(600, "supervised steps of the tiny policy before RL", "data")
    warm_start_quality: float = option(0.4, "share of right answers among its demonstrations", "data")

    eval_every: int = option(50, "steps between evaluations on validation prompts", "evaluation")
    eval_prompts: int = option(128, "validation prompts, taken out of the training rows", "evaluation")
    test_prompts: int = option(
        256, "test prompts, read before the first and after the last step", "evaluation"
    )
    eval_samples: int = option(16, "sampled completions per evaluation prompt, at least 8", "evaluation")
    rollout_rows: int = option(1024, "completions generated at a time in evaluation", "evaluation")
    save_every: int = option(50, "steps between checkpoints", "evaluation")
    keep_checkpoints: bool = option(
        False, "keep the model of every checkpoint, in checkpoint-<step>/, not only the last", "evaluation"
    )
    judge: str = option("", "train_textgen.py: a chat model that rates texts before and after", "evaluation")

    def __post_init__(self) -> None:
        if self.exact:
            self.clip_low = self.clip_high = None
            self.beta, self.updates, self.aggregation = 0.0, 1, "sum"
        at_least = {
            "group_size": 2,
            "eval_samples": 8,
            "beta": 0,
            "target_ess": 0,
            "max_new_tokens": 0,
            "seed": 0,
            "replicate": 0,
            "worked_examples": 0,
        }
        counts = "warm_start_steps prompts steps updates microbatch_tokens eval_every eval_prompts test_prompts rollout_rows save_every"
        at_least |= dict.fromkeys(counts.split(), 1)
        for name, bound in at_least.items():
            if not bound <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        for name in ("lr", "temperature", "tau", "max_grad_norm", "clip_low", "clip_high"):
            value = getattr(self, name)
            if not (value is None and name.startswith("clip")) and not 0 < value < math.inf:
                raise ValueError(f"{name} must be finite and positive, got {value}")
        if self.target_ess and not 1 <= self.target_ess < self.group_size:
            raise ValueError(
                f"target_ess must lie in [1, group_size = {self.group_size}), got {self.target_ess}"
            )
        if self.target_ess and self.algo != "softmax":
            raise ValueError(
                f"target_ess sets the temperature of softmax, and algo is {self.algo}: use one or the other"
            )
        if not 0 <= self.warm_start_quality <= 1:
            raise ValueError(f"warm_start_quality is a share, between 0 and 1, got {self.warm_start_quality}")
        for f in dataclasses.fields(self):
            if f.metadata["choices"] and getattr(self, f.name) not in f.metadata["choices"]:
                known = ", ".join(f.metadata["choices"])
                raise ValueError(f"{f.name} must be one of {known}, got {getattr(self, f.name)!r}")

    def result_settings(self) -> dict[str, Any]:
        """The settings that shape the result: not where it is written, nor who looks at it afterwards."""
        others = ("out", "resume", "judge", "keep_checkpoints")
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in others}


# --- 2. The folder ---


def run_folder(config: Config) -> Path:
    digest = hashlib.sha256(json.dumps(config.result_settings(), sort_keys=True).encode()).hexdigest()[:8]
    return Path(config.out) / f"{config.task}-{config.algo}-seed{config.seed}-{digest}"


class RunFolder:
    """The files of one run, and where it stands: step, start (figures before training), summary (when finished)."""

    def __init__(self, task: Task, config: Config) -> None:
        """Make the folder, or find what to resume. FileExistsError rather than overwrite another run."""
        self.path, self.task, self.config = run_folder(config), task, config
        self.step, self.start, self.summary, self.state = 0, {}, None, None
        self.seconds: dict[str, float] = defaultdict(float)
        settings = {**config.result_settings(), "data": task.source}
        if (self.path / "config.json").exists():
            if not config.resume:
                raise FileExistsError(
                    f"{self.path} already holds a run of these settings: add --resume to continue it (or to see its result, "
                    "if it is finished), or choose another --out"
                )
            known = json.loads((self.path / "config.json").read_text())
            changed = [name for name, value in settings.items() if known.get(name) != value]
            if changed:
                raise FileExistsError(
                    f"{self.path} holds a run with other {', '.join(changed)}: choose another --out"
                )
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "config.json", {**settings, "versions": versions()})
        self.claim()
        # A kill between the two renames of `save` leaves the last checkpoint under its second name.
        checkpoint, second_name = self.path / "checkpoint", self.path / "checkpoint.old"
        if not checkpoint.exists() and second_name.exists():
            second_name.rename(checkpoint)
        if checkpoint.exists():
            self.state = torch.load(checkpoint / "trainer.pt", weights_only=True)
            self.step, self.start, self.summary = (self.state[name] for name in ("step", "start", "summary"))
            self.seconds.update(self.state["seconds"])
        self.began = time.time() - self.seconds.pop("total", 0.0)
        # Steps after the checkpoint will be run, and logged, again.
        for name in ("metrics.jsonl", "samples.jsonl"):
            if (path := self.path / name).exists():
                whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
                replace_file(
                    path, "".join(x for x in whole if self.state and json.loads(x)["step"] <= self.step)
                )

    def claim(self) -> None:
        """Two processes must not write one folder. The number of a process that is gone counts for nothing."""
        owner = self.path / "writer.pid"
        if os.name == "posix" and owner.exists() and (number := owner.read_text()).isdigit():
            try:
                os.kill(int(number), 0)  # signal 0 only asks whether the process is there
            except ProcessLookupError:
                number = str(os.getpid())
            except PermissionError:  # it is there, and somebody else's
                pass
            if number != str(os.getpid()):
                raise FileExistsError(
                    f"process {number} is writing to {self.path}: wait for it (or delete {owner}, if it is another program)"
                )
        replace_file(owner, str(os.getpid()))

    def restore(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Load the checkpoint, if there is one, into the model and the optimiser."""
        if self.state:
            saved = type(model).from_pretrained(self.path / "checkpoint", dtype=torch.float32)
            model.load_state_dict(saved.state_dict())
            optimizer.load_state_dict(self.state["optimizer"])
            self.state = None

    def save(self, policy: Policy, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Write a checkpoint: complete before it gets its name."""
        self.step = step
        new, current, old = (self.path / name for name in ("checkpoint.new", "checkpoint", "checkpoint.old"))
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        policy.model.save_pretrained(new)
        policy.tokenizer.save_pretrained(new)
        seconds = {"total": time.time() - self.began, **self.seconds}
        state = {"step": step, "start": self.start, "summary": self.summary, "seconds": seconds}
        torch.save({**state, "optimizer": optimizer.state_dict()}, new / "trainer.pt")
        if self.config.keep_checkpoints:  # first, so that no resumed run can lack one
            policy.model.save_pretrained(self.path / f"checkpoint-{step}")
        if current.exists():
            current.rename(old)
        new.rename(current)
        shutil.rmtree(old, ignore_errors=True)

    def finish(self, policy: Policy, optimizer: torch.optim.Optimizer, end: dict[str, Any]) -> None:
        seconds = {"total": time.time() - self.began, **self.seconds}
        self.summary = {"task": self.task.name, "algo": self.config.algo, "seed": self.config.seed}
        self.summary |= {"start": self.start, "end": end, "seconds": seconds}
        self.save(policy, optimizer, self.config.steps)

    def finished(self) -> dict[str, Any]:
        """The summary, also in summary.json (again, in case a kill came between the last checkpoint and that file)."""
        path = self.path / "summary.json"
        later = (
            json.loads(path.read_text()) if path.exists() else {}
        )  # what a script has added: a judge's verdict
        write_json(path, {**later, **self.summary})
        (self.path / "writer.pid").unlink(missing_ok=True)
        return self.summary

    def log(self, metrics: dict[str, Any]) -> None:
        for phase, value in metrics.get("seconds", {}).items():
            self.seconds[phase] += value
        append_line(self.path / "metrics.jsonl", metrics)

    def log_samples(
        self, step: int, prompts: list, texts: list[str], rewards: Tensor, advantages: Tensor, count: int = 3
    ) -> None:
        """The first `count` completions of the step's first prompt."""
        for i in range(min(count, rewards.shape[1])):
            line = {"step": step, "prompt": prompts[0], "completion": texts[i]}
            line |= {"reward": rewards[0, i].item(), "advantage": advantages[0, i].item()}
            append_line(self.path / "samples.jsonl", line)

    def show(self, label: str, result: dict[str, Any]) -> dict[str, Any]:
        """One line for an evaluation, and a warning when the cap cuts completions."""
        figures = [
            f"{name} {v[0]:.3f} [{v[1]:.3f}, {v[2]:.3f}]" for name, v in result.items() if is_interval(v)
        ]
        tail = f"length {result['length']:.1f}  truncated {result['truncated']:.1%}  kl {result['kl']:.3f}"
        tqdm.write(f"{label}:  {'  '.join(figures)}  {tail}")
        if result["truncated"] > 0.05:
            tqdm.write(
                f"warning: {result['truncated']:.0%} of the completions were cut at {self.task.max_new_tokens} tokens, so "
                "accuracy is confounded with length: raise --max-new-tokens"
            )
        return result


def is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3


def replace_file(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    replace_file(path, json.dumps(value, indent=2) + "\n")


def append_line(path: Path, value: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"threads": str(torch.get_num_threads())}
    found |= {"transformers": transformers.__version__, "datasets": datasets.__version__}
    command = ["git", "rev-parse", "HEAD"]
    git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found | {"commit": git.stdout.strip() or "unknown"}


# --- 3. Rows, and what is logged of a step ---


def split_rows(task: Task, config: Config) -> tuple[list[int], list[dict], list[dict]]:
    """Indices of the training rows, the validation rows (a seeded part of the training rows), and the test rows: a part
    that is the same for every seed, when there are more than --test-prompts.
    """
    training, validation = split_indices(len(task.train), config)
    if not len(task.test):
        raise ValueError("there are no test rows")
    tested = torch.randperm(len(task.test), generator=torch.Generator().manual_seed(0))[: config.test_prompts]
    return training, [task.train[i] for i in validation], [task.test[i] for i in sorted(tested.tolist())]


def split_indices(num_rows: int, config: Config) -> tuple[list[int], list[int]]:
    """Which of the training rows to train on, and which to hold back for validation; nobody may imitate those either."""
    if num_rows < config.eval_prompts + config.prompts:
        raise ValueError(
            f"{num_rows} training rows are too few for {config.eval_prompts} validation prompts (--eval-prompts) and "
            f"{config.prompts} prompts a step (--prompts)"
        )
    order = torch.randperm(num_rows, generator=stream(config, "split")).tolist()
    return order[config.eval_prompts :], order[: config.eval_prompts]


def check_lengths(policy: Policy, task: Task, rows: list[dict]) -> None:
    """ValueError if a prompt with its completion could outgrow the model's context: nothing is ever cut silently."""
    context = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    lengths = [len(encode_prompt(policy.tokenizer, task.prompt(row))) for row in rows]
    too_long = sum(length + task.max_new_tokens > context for length in lengths)
    if too_long or min(lengths) == 0:
        raise ValueError(
            f"{too_long} of {len(rows)} prompts do not fit the model's context of {context} tokens beside a completion of "
            f"{task.max_new_tokens} (prompts have {min(lengths)} to {max(lengths)} tokens; none may be empty): lower "
            "--max-new-tokens, or drop those rows from the data"
        )


BYTES_PER_WEIGHT = (
    18  # in training: float32 weight, gradient and AdamW's two moments, and the bfloat16 reference
)


def check_memory(num_weights: int, capacity: int) -> None:
    """ValueError if a GPU of `capacity` bytes cannot even hold the model in training, whatever the batch."""
    if BYTES_PER_WEIGHT * num_weights > capacity:
        raise ValueError(
            f"training {num_weights / 1e9:.2f} billion weights takes {BYTES_PER_WEIGHT * num_weights / 2**30:.0f} GiB before any "
            f"activations (18 bytes a weight), and the GPU has {capacity / 2**30:.0f}: take a smaller --model, such as "
            "Qwen/Qwen2.5-0.5B-Instruct"
        )


def step_metrics(
    rollouts: Rollouts, rewards: Tensor, correct: Tensor, signal: Tensor, advantages: Tensor, config: Config
) -> dict[str, float]:
    """What a step's rollouts show, over all of them; names as in TRL where the meaning is the same."""
    lengths = rollouts.lengths.float()
    return {
        "num_tokens": lengths.sum().item(),
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(-1).mean().item(),
        "pass@1": correct.mean().item(),
        "frac_reward_zero_std": (signal.amax(-1) == signal.amin(-1)).float().mean().item(),
        "mean_abs_advantage": advantages.abs().mean().item(),
        # Of the softmax weights at this tau, whatever the algorithm.
        "ess": effective_sample_size(signal, group_tau(signal, config)).mean().item(),
        # By Monte Carlo: the mean of -log pi(token) over the sampled tokens.
        "entropy": -rollouts.logprobs.sum().item() / lengths.sum().item(),
        "completions/mean_length": lengths.mean().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": rollouts.truncated.float().mean().item(),
    }


# --- 4. Progress ---


class ProgressBar:
    """A bar over the steps that also turns the first Ctrl-C into "finish this step, save, stop"."""

    def __init__(self, task: Task, config: Config, step: int) -> None:
        self.bar = tqdm(total=config.steps, initial=step, desc=f"{task.name} {config.algo}", unit="step")
        self.stop_requested = False

    def __enter__(self) -> Self:
        self.in_main_thread = threading.current_thread() is threading.main_thread()
        if self.in_main_thread:  # Python delivers signals to the main thread only
            self.previous = signal.signal(signal.SIGINT, self.handle)
        return self

    def handle(self, *_: Any) -> None:
        if self.stop_requested:
            raise KeyboardInterrupt("stopped at once; --resume goes back to the last checkpoint")
        self.stop_requested = True
        tqdm.write("finishing this step, then saving; press Ctrl-C again to stop at once")

    def __exit__(self, *_: object) -> None:
        if self.in_main_thread:
            signal.signal(signal.SIGINT, self.previous)
        self.bar.close()

    def advance(self, metrics: dict[str, Any], seconds: dict[str, float]) -> None:
        rate = metrics["num_tokens"] / seconds["rollout"]
        self.bar.set_postfix_str(
            f"reward {metrics['reward']:.3f}  pass@1 {metrics['pass@1']:.3f}  {rate:,.0f} tok/s"
        )
        self.bar.update()

    def stop_if_requested(self) -> None:
        if self.stop_requested:
            raise KeyboardInterrupt("stopped and saved: the same command with --resume continues from here")
