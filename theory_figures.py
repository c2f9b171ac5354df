"""The figures of theory.py, drawn from its functions into figures/: `python theory.py` calls draw_all().

One idea each, 800 pixels wide, one colour for a method everywhere (Okabe and Ito's colour-blind safe palette).
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image  # comes with matplotlib

from classifier import EVALUATE_EVERY, classifier_curves
from softmax_grpo import (
    PASS_RATE_BINS,
    expected_abs_advantage,
    grpo_advantages,
    maxrl_advantages,
    mean_advantages,
    prompt_weight,
)
from theory import (
    RADIUS,
    THREE_LEVELS,
    TWO_LEVELS,
    circle,
    continuous_update,
    contrast,
    grid,
    one_form,
    real,
    signal_to_noise,
    softmax,
    softmax_at_ess,
    visible_from,
    weight,
    work_round_loop,
)

FOLDER = Path(__file__).parent / "figures"
METHOD_COLORS = {
    "softmax": "#0072B2",
    "grpo": "#D55E00",
    "maxrl": "#009E73",
    "reinforce": "#7F7F7F",
    "likelihood": "black",
}

SHADES = {0.1: "#0072B2", 0.2: "#2F8CC4", 0.3: "#56A5D3", 0.5: "#7ABADF", 1.0: "#9CCCE8"}  # by tau
GRPO = {"color": METHOD_COLORS["grpo"], "linestyle": "--"}
MAXRL = {"color": METHOD_COLORS["maxrl"], "linestyle": (0, (0.8, 2.5)), "linewidth": 4}
REINFORCE = {"color": METHOD_COLORS["reinforce"], "linestyle": "-."}
METHODS = [
    ("softmax, tau = 0.1", softmax(0.1), {"color": SHADES[0.1]}),
    ("softmax, tau = 0.3", softmax(0.3), {"color": SHADES[0.3]}),
    ("softmax, tau = 1", softmax(1.0), {"color": SHADES[1.0]}),
    ("MaxRL", maxrl_advantages, MAXRL),
    ("GRPO (z-score)", grpo_advantages, GRPO),
    ("REINFORCE (mean)", mean_advantages, REINFORCE),
]
SIZE = 8  # rollouts in a group, where a figure needs one number


def canvas(title: str, rows: int = 1, columns: int = 1, height: float = 4.8) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8, height), layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axis in axes:
        axis.grid(alpha=0.25)
    return figure, axes


def save(figure: Figure, name: str) -> Path:
    path = FOLDER / f"{name}.png"
    figure.savefig(path, dpi=100)
    Image.open(path).convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE).save(
        path, optimize=True
    )  # a third of the size
    return path


def draw_objective() -> Path:
    """h(p) of every method, rescaled to end at 1: a factor in h is a factor in the learning rate."""
    figure, (axis,) = canvas("What is maximised: the objective h(p) of one prompt, scaled to h(1) = 1")
    p = grid(0, 1, 401)
    for label, advantages, style in METHODS:
        steps = weight(advantages, (p[1:] + p[:-1]) / 2, SIZE)  # midpoint rule
        h = torch.cat([torch.zeros(1), steps.cumsum(0)])
        axis.plot(p, h / h[-1], label=label, **style)
    axis.set(xlabel="pass rate p of the prompt", ylabel=f"h(p) / h(1), group size M = {SIZE}")
    axis.legend()
    return save(figure, "objective")


def draw_weight() -> Path:
    figure, (axis,) = canvas("How much a prompt counts: E[update] = omega(p) grad p")
    p = grid(0.002, 0.998, 499)
    for label, advantages, style in METHODS:
        axis.plot(p, weight(advantages, p, SIZE), label=label, **style)
    population = (p * (1 - p)).rsqrt()
    axis.plot(p, population, color=METHOD_COLORS["grpo"], linewidth=0.9, label="GRPO, M = infinity")
    axis.plot(p, 1 / p, color=METHOD_COLORS["likelihood"], linewidth=0.9, label="maximum likelihood, 1/p")
    axis.set(xlabel="pass rate p of the prompt", ylabel=f"omega(p), group size M = {SIZE}", ylim=(0, 8))
    axis.legend(loc="upper center")
    return save(figure, "weight")


def draw_limits() -> Path:
    figure, axes = canvas("How fast the limits are reached (dotted: the predicted rate)", 2, 2, 6.4)
    p, c, many = 0.2, math.exp(2.0), [2**i for i in range(2, 12)]

    def panel(axis: Axes, title: str, label: str, x: list, error: list, rate: list[float]) -> None:
        axis.plot(x, [abs(float(e)) for e in error], "o-", color=METHOD_COLORS["softmax"], markersize=4)
        axis.plot(x, [abs(float(error[-1])) * r / rate[-1] for r in rate], ":", color="black")
        axis.set(title=title, xlabel=label, ylabel="error of omega(0.2)", yscale="log")
        axis.set_xscale("log" if x[-1] > 100 else "linear")

    inverse = list(range(2, 16))
    maxrl = float(weight(maxrl_advantages, real(p), SIZE))
    error = [maxrl - prompt_weight(p, SIZE, 1 / x) for x in inverse]
    panel(axes[0], "tau to 0: MaxRL, exp(-1/tau)", "1 / tau", inverse, error, [math.exp(-x) for x in inverse])
    hot = [2.0**i for i in range(1, 12)]
    error = [tau * prompt_weight(p, SIZE, tau) - 1 + 1 / SIZE for tau in hot]
    panel(axes[1], "tau to infinity: REINFORCE, 1/tau", "tau", hot, error, [1 / tau for tau in hot])
    error = [prompt_weight(p, m, 0.5) - (c - 1) / (1 - p + p * c) for m in many]
    panel(axes[2], "M to infinity, tau = 0.5: 1/M", "M", many, error, [1 / m for m in many])
    limit = continuous_update(2**16, 0.3)
    error = [(continuous_update(m, 0.3) - limit).norm() for m in many]
    panel(axes[3], "continuous reward, to grad log Z: 1/M", "M", many, error, [1 / m for m in many])
    axes[3].set_ylabel("error of the mean update")
    return save(figure, "limits")


def draw_zscore() -> Path:
    figure, (axis,) = canvas("GRPO's weight grows with the group; softmax's stays below 1 at solved prompts")
    failing = 10 ** grid(-4, -0.31, 200)
    for size, shade in ((4, "#F5C6A5"), (16, "#EB9A63"), (64, "#D55E00"), (256, "#8A3D00")):
        axis.plot(failing, weight(grpo_advantages, 1 - failing, size), color=shade, label=f"GRPO, M = {size}")
    population = (failing * (1 - failing)).rsqrt()
    axis.plot(failing, population, "--", color=METHOD_COLORS["grpo"], linewidth=1, label="GRPO, M = infinity")
    for size, style in ((4, ":"), (256, "-")):
        omega = prompt_weight(1 - failing, size, 0.1)
        axis.plot(failing, omega, style, color=SHADES[0.1], label=f"softmax, tau = 0.1, M = {size}")
    axis.set(xscale="log", yscale="log", ylim=(0.5, 120), ylabel="weight omega(p)")
    axis.set_xlabel("failure rate 1 - p (solved prompts on the left)")
    axis.legend()
    return save(figure, "zscore")


def draw_loop() -> Path:
    title = "Three reward levels: a round trip that does work (M = 4, tau = 0.2)"
    figure, (plane, work) = canvas(title, 1, 2, 4.4)
    outwards, _ = circle(240)
    points = torch.cat([1 / 3 + RADIUS * outwards, (1 / 3 + RADIUS * outwards)[:1]])
    lattice = real([(i / 14, j / 14) for i in range(1, 13) for j in range(1, 14 - i)])
    form = one_form(lattice, THREE_LEVELS, 4, 0.2)
    plane.quiver(*lattice.T, *form.T, color="#B0B0B0", angles="xy", width=0.004)
    plane.plot([0, 1, 0, 0], [0, 0, 1, 0], color="black", linewidth=0.8)
    plane.plot(*points.T, color=METHOD_COLORS["softmax"], linewidth=2)
    plane.annotate("", points[32], points[28], arrowprops={"arrowstyle": "-|>", "color": SHADES[0.1]})
    plane.plot(*points[0], "o", color=METHOD_COLORS["softmax"])
    plane.annotate("start", points[0], xytext=(-32, -4), textcoords="offset points")
    plane.set(xlabel="p_1: chance of reward 1/2", ylabel="p_2: chance of reward 1", aspect="equal")
    plane.set_title("rewards 0, 1/2, 1: mean update (arrows)", fontsize=10)
    turn = grid(0, 1, 241)
    three, two = (THREE_LEVELS, "rewards 0, 1/2, 1", "-"), (TWO_LEVELS, "rewards 0, 1, 1", ":")
    for levels, label, style in (three, two):
        total = torch.cat([torch.zeros(1), work_round_loop(levels, 4, 0.2).cumsum(0)])
        work.plot(turn, total, style, color=METHOD_COLORS["softmax"], linewidth=2, label=label)
        work.annotate(f"{abs(total[-1]):.3f}", (1.02, total[-1]), va="bottom")
    work.axhline(0, color="black", linewidth=0.8)
    work.set(xlabel="turns round the loop", ylabel="work done by the mean update so far", xlim=(-0.05, 1.22))
    work.legend(loc="lower left")
    return save(figure, "loop")


def draw_fixed_ess() -> Path:
    figure, (axis,) = canvas("Temperature by fixed ESS: GRPO on hard prompts, MaxRL on easy ones")
    p = grid(0.002, 0.998, 499)
    scale = math.sqrt(SIZE / 4 - 1)  # 1 at M = 8
    axis.plot(p, weight(maxrl_advantages, p, SIZE), label="MaxRL", **MAXRL)
    axis.plot(p, scale * weight(grpo_advantages, p, SIZE), label="GRPO x sqrt(M/4 - 1)", **GRPO)
    at_ess = weight(partial(softmax_at_ess, target=4.0), p, SIZE)
    axis.plot(p, at_ess, color="#CC79A7", linewidth=2.2, label="softmax, ESS = 4 in every group")
    axis.plot(p, prompt_weight(p, SIZE, 0.3), color=SHADES[0.3], label="softmax, tau = 0.3 in every group")
    axis.set(xlabel="pass rate p of the prompt", ylabel=f"omega(p), group size M = {SIZE}", ylim=(0, 7.5))
    axis.legend()
    return save(figure, "fixed_ess")


def draw_budget() -> Path:
    figure, (axis,) = canvas("Where the gradient goes: mean |A| of a prompt's rollouts = 2 p (1-p) omega(p)")
    p = grid(0, 1, 401)
    for label, advantages, style in METHODS:
        axis.plot(p, expected_abs_advantage(p, SIZE, advantages), label=label, **style)
    for edge in PASS_RATE_BINS[1:-1]:
        axis.axvline(edge, color="black", linewidth=0.6, linestyle=":")
    axis.set(xlabel="pass rate p of the prompt (dotted: bins of the paper's Table 3)", ylim=(0, None))
    axis.set_ylabel(f"E|A|, group size M = {SIZE}")
    axis.legend()
    return save(figure, "budget")


def draw_noise() -> Path:
    figure, axes = canvas("How reliable one group's update is: signal-to-noise for M = 8", 1, 2, 4.6)
    p = grid(0.005, 0.995, 199)
    titles = ((0.0, "noise along grad p only"), (100.0, "answers scatter 10 times the signal (v = 100)"))
    for axis, (scatter, title) in zip(axes, titles):
        for label, advantages, style in METHODS:
            axis.plot(p, signal_to_noise(advantages, p, SIZE, scatter), label=label, **style)
        axis.set_title(title, fontsize=10)
        axis.set(xlabel="pass rate p of the prompt", ylim=(0, None))
        axis.set_ylabel("mean / standard deviation of the update")
    axes[1].legend(fontsize=9, loc="lower center")
    return save(figure, "noise")


def draw_temperature() -> Path:
    figure, (axis,) = canvas("Temperature needs large groups to make a difference")
    sizes = sorted({round(2 ** (i / 8)) for i in range(8, 97)})
    axis.plot(sizes, [m - 1 for m in sizes], label="MaxRL: M - 1", **MAXRL)
    for tau, shade in SHADES.items():
        axis.plot(sizes, [contrast(m, tau) for m in sizes], color=shade, label=f"softmax, tau = {tau:g}")
        start = math.ceil(visible_from(tau))
        axis.plot([start], [contrast(start, tau)], "o", color=shade)
    axis.axhline(1, label="REINFORCE: 1", **REINFORCE)
    axis.set(xscale="log", yscale="log", xlabel="group size M (dots: 10% below MaxRL from here on)")
    axis.set_ylabel("omega(0) / omega(1), unsolved over solved")
    axis.legend()
    return save(figure, "temperature")


def draw_classifier() -> Path:
    figure, axes = canvas("A classifier trained on sampled labels, against maximum likelihood", 1, 2, 4.6)
    shown = {
        "likelihood": ("cross-entropy (exact)", {"color": METHOD_COLORS["likelihood"], "linewidth": 4}),
        "softmax tau=0.2, M=1024": ("softmax, M = 1024", {"color": SHADES[0.2]}),
        "softmax tau=0.2, M=16": ("softmax, M = 16", {"color": SHADES[0.2], "linestyle": ":"}),
        "softmax tau=0.2, M=4": ("softmax, M = 4", {"color": SHADES[0.2], "linestyle": (0, (1, 3))}),
        "z-score, M=1024": ("GRPO, M = 1024", {"color": METHOD_COLORS["grpo"]}),
        "z-score, M=16": ("GRPO, M = 16", {"color": METHOD_COLORS["grpo"], "linestyle": ":"}),
        "REINFORCE, M=1024": ("REINFORCE, M = 1024", {"color": METHOD_COLORS["reinforce"]}),
    }
    for axis, optimiser in zip(axes, ("sgd", "adam")):
        for name, (label, style) in shown.items():
            if (name, optimiser) in classifier_curves():
                curve = classifier_curves()[name, optimiser]
                mean, half = curve.accuracy.mean(-1), curve.half_interval
                steps = [EVALUATE_EVERY * i for i in range(len(mean))]
                axis.plot(steps, mean, label=label, **style)
                axis.fill_between(steps, mean - half, mean + half, color=style["color"], alpha=0.12, lw=0)
        axis.set_title({"sgd": "plain gradient descent", "adam": "Adam"}[optimiser], fontsize=10)
        axis.set(xlabel="training steps", ylabel="test accuracy (95% band, 5 seeds)", ylim=(0, 1))
        axis.legend(fontsize=8, loc="lower right")
    return save(figure, "classifier")


FIGURES = [
    draw_objective,
    draw_weight,
    draw_limits,
    draw_zscore,
    draw_loop,
    draw_fixed_ess,
    draw_budget,
    draw_noise,
    draw_temperature,
    draw_classifier,
]


def draw_all() -> list[Path]:
    """Writes every figure, creating the folder where needed, and returns their paths."""
    FOLDER.mkdir(exist_ok=True)
    with matplotlib.rc_context({"font.size": 10, "lines.linewidth": 1.8, "axes.spines.top": False}):
        return [draw() for draw in FIGURES]
