"""A classifier as a policy: the one setting in which maximum likelihood is known exactly (the paper's Figure 2, small).

`python theory.py` runs, checks and draws this; it takes about half a minute. The policy is a classifier, its M rollouts
are labels sampled from it, and the reward is 1 for the right label. Then p is the probability of the right label, and
maximum likelihood, the weight 1/p, is ordinary cross-entropy. Does softmax come near its learning curve as M grows?

Data: 30 overlapping Gaussian classes in 16 dimensions (the best possible accuracy is about 0.89), 4000 points to train
on, 1000 to validate, 1000 to test. Network: one hidden layer, 200 steps of 32 points. Every method tries the same
learning rates, is given the one with the best mean validation accuracy over the whole run, and is reported on the test
split. Five seeds; data, initial weights and batches of a seed are the same for every method.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from softmax_grpo import grpo_advantages, maxrl_advantages, mean_advantages, prompt_weight, softmax_advantages

CLASSES, DIMENSIONS, HIDDEN, BATCH, STEPS, SEEDS = 30, 16, 48, 32, 200, 5
EVALUATE_EVERY = 10
LEARNING_RATES = {"sgd": (0.1, 0.3, 1.0, 3.0, 10.0), "adam": (0.001, 0.003, 0.01, 0.03, 0.1)}
STUDENT_T = 2.776  # 4 degrees of freedom: half a 95% interval, in standard errors

# What a method pushes up: from label probabilities and one-hot right labels (B, N, C) to a coefficient per log-prob.
Credit = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def likelihood(probabilities: Tensor, right: Tensor, generator: torch.Generator) -> Tensor:
    """Cross-entropy: one unit of log-prob of the right label, no sampling."""
    return right


def sampled(advantages: Callable[[Tensor], Tensor], group_size: int) -> Credit:
    """(1/M) sum_i A_i on M sampled labels: what group-based training does.

    How often each label is drawn is multinomial: class by class, binomial given what is left, so that 1024 rollouts
    cost no more than 16. The advantages depend on the number of successes only, so they come from a table.
    """
    rows = advantages(
        torch.ones(group_size + 1, group_size).tril(-1)
    )  # (M + 1, M): row K has K successes first
    success, failure = rows[:, 0], rows[:, -1]

    def credit(probabilities: Tensor, right: Tensor, generator: torch.Generator) -> Tensor:
        rollouts = torch.full(right.shape[:-1], float(group_size))
        mass, counts = torch.ones_like(rollouts), []
        for chance in probabilities.unbind(-1)[:-1]:
            counts.append(torch.binomial(rollouts, (chance / mass).clamp(0, 1), generator=generator))
            rollouts, mass = rollouts - counts[-1], (mass - chance).clamp(min=1e-9)
        drawn = torch.stack([*counts, rollouts], dim=-1)  # (B, N, C)
        successes = (drawn * right).sum(-1, keepdim=True).long()
        return drawn / group_size * torch.where(right > 0, success[successes], failure[successes])

    return credit


def expected(group_size: int, tau: float) -> Credit:
    """The mean softmax update without sampling: omega(p) grad p = omega(p) p grad log p (Eq. 4)."""

    def credit(probabilities: Tensor, right: Tensor, generator: torch.Generator) -> Tensor:
        p = (probabilities * right).sum(-1, keepdim=True).clamp(max=1.0)
        return right * p * prompt_weight(p, group_size, tau).float()

    return credit


class Curve(NamedTuple):
    learning_rate: float  # chosen on the validation split
    accuracy: Tensor  # (evaluations, seeds), on the test split at that learning rate
    validation: list[float]  # mean validation accuracy over the run, for every learning rate tried

    @property
    def half_interval(self) -> Tensor:
        return STUDENT_T * self.accuracy.std(-1) / SEEDS**0.5


def train_classifiers(credit: Credit, optimiser: str) -> Curve:
    """Trains B = learning rates x seeds networks at once, by plain gradient descent ("sgd") or "adam"."""
    rates = LEARNING_RATES[optimiser]
    data, first, second, order = [], [], [], []
    for seed in range(SEEDS):
        g = torch.Generator().manual_seed(seed)
        means, labels = (
            torch.randn(CLASSES, DIMENSIONS, generator=g),
            torch.randint(CLASSES, (6000,), generator=g),
        )
        data.append((means[labels] + torch.randn(6000, DIMENSIONS, generator=g), labels))
        first.append(torch.randn(DIMENSIONS, HIDDEN, generator=g) / DIMENSIONS**0.5)
        second.append(0.1 * torch.randn(HIDDEN, CLASSES, generator=g) / HIDDEN**0.5)
        order.append(torch.randint(4000, (STEPS, BATCH), generator=g))
    x, y = (
        torch.stack(part).repeat(len(rates), *[1] * part[0].ndim) for part in zip(*data)
    )  # (B, 6000, ...)
    weights = [torch.stack(w).repeat(len(rates), 1, 1).requires_grad_() for w in (first, second)]
    batches = torch.stack(order, dim=1).repeat(1, len(rates), 1)  # (STEPS, B, N)
    learning_rate = torch.tensor(rates).repeat_interleave(SEEDS)[:, None, None]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    generator, history = torch.Generator().manual_seed(SEEDS), []

    for step in range(STEPS + 1):
        if step % EVALUATE_EVERY == 0:
            with torch.no_grad():
                guesses = ((x[:, 4000:] @ weights[0]).relu() @ weights[1]).argmax(-1)
            hits = (guesses == y[:, 4000:]).float().view(len(rates), SEEDS, 2, 1000)  # validation, then test
            history.append(hits.mean(-1))
        if step == STEPS:
            break
        rows = torch.arange(len(y))[:, None], batches[step]
        logprobs = ((x[rows] @ weights[0]).relu() @ weights[1]).log_softmax(-1)  # (B, N, C)
        right = torch.nn.functional.one_hot(y[rows], CLASSES).float()
        coefficients = credit(logprobs.detach().exp(), right, generator)
        gradients = torch.autograd.grad(-(coefficients * logprobs).sum() / BATCH, weights)
        with torch.no_grad():
            for w, gradient, (mean, square) in zip(weights, gradients, moments):
                if optimiser == "adam":  # by hand, since every network has a learning rate of its own
                    mean.lerp_(gradient, 1 - 0.9)
                    square.lerp_(gradient.square(), 1 - 0.99)
                    corrected = (square / (1 - 0.99 ** (step + 1))).sqrt() + 1e-8
                    gradient = mean / (1 - 0.9 ** (step + 1)) / corrected
                w -= learning_rate * gradient

    accuracy = torch.stack(history)  # (evaluations, learning rates, seeds, 2)
    validation = accuracy[..., 0].mean((0, 2)).tolist()
    chosen = validation.index(max(validation))
    return Curve(rates[chosen], accuracy[:, chosen, :, 1], validation)


@cache
def classifier_curves() -> dict[tuple[str, str], Curve]:
    """Every method under plain gradient descent, the main ones under Adam too: (method, optimiser) -> Curve."""
    softmax = {tau: partial(softmax_advantages, tau=tau) for tau in (0.2, 1.0)}
    methods = {
        "likelihood": likelihood,
        "REINFORCE, M=1024": sampled(mean_advantages, 1024),
        "z-score, M=16": sampled(grpo_advantages, 16),
        "z-score, M=1024": sampled(grpo_advantages, 1024),
        "MaxRL, M=1024": sampled(maxrl_advantages, 1024),
        "softmax tau=1, M=1024": sampled(softmax[1.0], 1024),
        **{f"softmax tau=0.2, M={size}": sampled(softmax[0.2], size) for size in (4, 16, 128, 1024)},
        "softmax tau=0.2, M=16, expected": expected(16, 0.2),
        "softmax tau=0.2, M=1024, expected": expected(1024, 0.2),
    }
    with_adam = ("likelihood", "REINFORCE, M=1024", "z-score, M=1024", "softmax tau=0.2, M=1024")
    runs = [(name, "sgd") for name in methods] + [(name, "adam") for name in with_adam]
    return {run: train_classifiers(methods[run[0]], run[1]) for run in runs}


def distance_to_likelihood(curve: Curve, optimiser: str) -> Tensor:
    """Mean difference in test accuracy from cross-entropy's curve, over the run: one number per seed, (seeds,)."""
    return (curve.accuracy - classifier_curves()["likelihood", optimiser].accuracy).abs().mean(0)


def classifier_table() -> str:
    lines = [f"Classifier: test accuracy after {STEPS} steps with its 95% interval over {SEEDS} seeds"]
    for optimiser, rates in LEARNING_RATES.items():
        lines.append(f"{optimiser}, learning rates tried for every method: {', '.join(map(str, rates))}")
        for (name, by), curve in classifier_curves().items():
            if by == optimiser:
                accuracy = f"{curve.accuracy[-1].mean():.3f} +- {curve.half_interval[-1]:.3f}"
                distance = f"{distance_to_likelihood(curve, by).mean():.3f} from likelihood's curve"
                lines.append(f"  {name:<34} chosen {curve.learning_rate:<6g} {accuracy}, {distance}")
    return "\n".join(lines)
