"""The theory of SoftmaxGRPO: every statement derived, checked by two independent routes, and drawn.

    python theory.py                 every check, one line each, then the figures in figures/    (under a minute)
    python theory.py --no-figures    the checks alone

Read from top to bottom. Each section states something in words and as a formula, then computes it twice by routes
that share as little as possible: closed form, exact fractions, enumeration of every group, quadrature, automatic
differentiation, or sampling (which must agree within 4 standard errors). The program ends with an error if one pair
disagrees; test_softmax_grpo.py runs the same CHECKS. Equation numbers are the paper's (arXiv 2608.09271).

     1. what one update does on average: omega(p) grad p      Eq. 4
     2. the objective behind it: h' = omega                   Eqs. 15-16
     3. the limits, and how fast they are reached             Eqs. 3, 5
     4. the ends: bounded at p = 1, against GRPO              Eq. 17
     5. rewards that are not binary: log E[exp(R / tau)]      Eq. 7
     6. three reward levels: no objective at all              Eq. 8
     7. what tau means: a price, and a shield against noise   Eqs. 9, 24-25
     8. tau from the effective sample size                    Eq. 26
     9. where the gradient goes, and how noisy it is          Figure 1, Table 3, and beyond the paper
    10. a classifier, where maximum likelihood is known       Figure 2, trained in classifier.py
    11. run it all; theory_figures.py draws

Notation: p pass rate of a prompt, M rollouts in its group, K successes among them, A advantages, tau temperature,
c = exp(1 / tau).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from classifier import classifier_curves, classifier_table, distance_to_likelihood
from softmax_grpo import (
    ADVANTAGES,
    effective_sample_size,
    expected_abs_advantage,
    grpo_advantages,
    maxrl_advantages,
    mean_advantages,
    prompt_objective,
    prompt_weight,
    share_by_pass_rate,
    softmax_advantages,
    surrogate_loss,
    tau_for_ess,
)

Advantages = Callable[[Tensor], Tensor]  # rewards (..., M) -> advantages (..., M)


class Verdict(NamedTuple):
    """One statement: what is claimed, the two routes, how far apart they came out and how far they may."""

    claim: str
    routes: str
    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN


Verdicts = Iterator[Verdict]


def softmax(tau: float) -> Advantages:
    return partial(softmax_advantages, tau=tau)


def methods(tau: float) -> dict[str, Advantages]:
    return {**ADVANTAGES, "softmax": softmax(tau)}


def real(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def grid(low: float, high: float, points: int) -> Tensor:
    return torch.linspace(low, high, points, dtype=torch.float64)


def gap(a: Any, b: Any) -> float:
    """The largest difference between two results; infinite if one of them is not a number."""
    difference = (real(a) - real(b)).abs().max().item()
    return math.inf if math.isnan(difference) else difference


def in_errors(samples: Tensor, expected: Any) -> float:
    """How many standard errors the mean over the first dimension lies from what is expected, at most."""
    return gap((samples.mean(0) - expected) / (samples.std(0) / len(samples) ** 0.5), 0)


def rate(claim: str, routes: str, x: Any, error: Any, exponent: float, slack: float = 0.05) -> Verdict:
    """Is error ~ x^exponent? By the least-squares slope of log |error| against log x: 0 for an error that stays."""
    x, y = real(x).log(), real(error).abs().log()
    seen = (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()
    return Verdict(claim, f"{routes}: exponent {seen:.3f} for {exponent:g}", abs(seen - exponent), slack)


def simpson(values: Tensor, width: float) -> Tensor:
    """The integral over an interval of that width from an odd number of equally spaced values: (..., n) -> (...)."""
    n = values.shape[-1]
    return (values * real([1.0, *[4.0, 2.0] * ((n - 3) // 2), 4.0, 1.0])).sum(-1) * width / (n - 1) / 3


def binomial(n: int, p: Tensor) -> Tensor:
    """P(Binomial(n, p) = k), k = 0..n: (...) -> (..., n + 1)."""
    return torch.distributions.Binomial(n, p[..., None]).log_prob(torch.arange(n + 1.0, dtype=p.dtype)).exp()


def outcomes(group_size: int) -> Tensor:
    """Every kind of binary group, (M + 1, M): row K has its K successes first."""
    return torch.ones(group_size + 1, group_size, dtype=torch.float64).tril(-1)


# ---------------------------------------------------------------------------------------------------------------
# 1. What one update does on average (Eq. 4)
# ---------------------------------------------------------------------------------------------------------------
# Sample M rollouts of one prompt, reward 1 or 0, and step along (1/M) sum_i A_i grad log pi(y_i). Take one rollout and
# let S ~ Binomial(M-1, p) count the successes among the others. If it succeeds it earns A_success(S+1), if it fails
# A_failure(S). The mean score grad log pi of a success is grad p / p, of a failure -grad p / (1-p). So, for any policy,
#
#     E[update] = omega(p) grad p,     omega(p) = E_S[Delta_S],     Delta_S = A_success(S+1) - A_failure(S)
#
# a polynomial in Bernstein form with coefficients Delta_S. For softmax, with D_S = S c + M - S,
#
#     Delta_S = M (c-1) (S c + M-1-S) / (D_S D_{S+1}) > 0.


def gains(advantages: Advantages, group_size: int) -> Tensor:
    """Delta_S for S = 0..M-1 of any group advantage, read off the raw advantages, (M,)."""
    rows = advantages(outcomes(group_size))  # the first column holds successes, the last one failures
    return rows[1:, 0] - rows[:-1, -1]


def weight(advantages: Advantages, p: Tensor, group_size: int) -> Tensor:
    """omega(p) of any group advantage by this construction. float64, shape of p."""
    return (binomial(group_size - 1, p) * gains(advantages, group_size)).sum(-1)


def softmax_gain(s: int, group_size: int, c: Fraction) -> Fraction:
    """Delta_S by its closed form, in exact arithmetic."""
    d = s * c + group_size - s
    return group_size * (c - 1) * (s * c + group_size - 1 - s) / (d * (d + c - 1))


def enumerated_weight(p: Fraction, group_size: int, c: Fraction) -> Fraction:
    """E[update] / grad p for a policy with two answers, over all 2^M groups, in exact arithmetic."""
    total = Fraction(0)
    for rewards in product((0, 1), repeat=group_size):
        k = sum(rewards)
        advantages = [group_size * (c if r else 1) / (k * c + group_size - k) - 1 for r in rewards]
        scores = [1 / p if r else -1 / (1 - p) for r in rewards]
        chance = p**k * (1 - p) ** (group_size - k)
        total += chance * sum(a * score for a, score in zip(advantages, scores)) / group_size
    return total


def check_gain() -> Verdicts:
    cases = [(size, c) for size in (2, 3, 5, 7) for c in (Fraction(11, 10), Fraction(3), Fraction(1000))]
    closed = {(size, c): [softmax_gain(s, size, c) for s in range(size)] for size, c in cases}
    tau = {c: 1 / math.log(c) for _, c in cases}
    off = max(gap(gains(softmax(tau[c]), size), [float(d) for d in closed[size, c]]) for size, c in cases)
    yield Verdict("Eq. 4: Delta_S, what a success gains", "closed form | raw advantages", off, 1e-12)

    # Two polynomials of degree M-1 that agree in M points are one.
    wrong, off = 0, 0.0
    for size, c in cases:
        for p in (Fraction(i, size + 1) for i in range(1, size + 1)):
            exact = enumerated_weight(p, size, c)
            chances = [math.comb(size - 1, s) * p**s * (1 - p) ** (size - 1 - s) for s in range(size)]
            wrong += exact != sum(chance * d for chance, d in zip(chances, closed[size, c]))
            off = max(off, gap(prompt_weight(float(p), size, tau[c]), float(exact)))
        wrong += sum(d <= 0 for d in closed[size, c])
    yield Verdict("Eq. 4: omega, Bernstein with Delta_S > 0", "all 2^M groups in fractions; misses", wrong, 0)
    yield Verdict("Eq. 4: prompt_weight", "project | all 2^M groups in fractions", off, 1e-12)


# That was algebra. Now the code that trains: enumerate every group of a small policy, send each through the very loss
# of the training loop (unclipped, summed over tokens), let autograd differentiate, weight by the group's probability.
# The closed forms of the other methods' omega are explained in section 4.

unclipped_loss = partial(surrogate_loss, clip_low=None, clip_high=None, aggregation="sum")


def known_weight(name: str, p: Tensor, group_size: int, tau: float) -> Tensor:
    """omega(p) of the four methods in closed form."""
    if name == "softmax":
        return prompt_weight(p, group_size, tau)
    if name == "grpo":  # E_K[sqrt(K (M-K))] / (M p (1-p))
        k = torch.arange(group_size + 1.0, dtype=torch.float64)
        return (binomial(group_size, p) * (k * (group_size - k)).sqrt()).sum(-1) / (group_size * p * (1 - p))
    if name == "maxrl":
        return (1 - (1 - p) ** (group_size - 1)) / p
    return torch.full_like(p, (group_size - 1) / group_size)


def check_enumeration() -> Verdicts:
    """A policy with 2 x 2 two-token answers: its 4^4 groups of M = 4."""
    first = real([0.3, -0.4]).requires_grad_()
    second = real([[0.2, -0.7], [-0.1, 0.9]]).requires_grad_()  # the second token's logits, given the first
    a, b = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
    logprobs = torch.stack([first.log_softmax(-1)[a], second.log_softmax(-1)[a, b]], dim=1)  # (4, T = 2)
    rewards, size, tau = real([1.0, 0.0, 0.0, 1.0]), 4, 0.4
    p = (logprobs.sum(-1).exp() * rewards).sum()
    grad_p = torch.autograd.grad(p, (first, second), retain_graph=True)
    groups = torch.cartesian_prod(*[torch.arange(4)] * size)  # (256, M)
    chances = logprobs.sum(-1)[groups].sum(-1).exp().detach()  # (256,)
    for name, advantages in methods(tau).items():
        expected_loss = real(0.0)
        for group, chance in zip(groups, chances):
            rows = logprobs[group]  # (M, 2)
            loss, _ = unclipped_loss(rows, rows.detach(), advantages(rewards[group]), torch.ones(size, 2))
            expected_loss = expected_loss + chance * loss
        gradient = torch.autograd.grad(expected_loss, (first, second), retain_graph=True)
        omega = known_weight(name, p.detach(), size, tau)
        off = max(gap(-g, omega * slope) for g, slope in zip(gradient, grad_p))
        yield Verdict(f"Eq. 4: E[update] = omega grad p, {name}", "256 groups, real loss | omega", off, 1e-6)


# And the falsifier that the paper's reviewers asked for: a neural policy whose gradient is not trivial, groups sampled
# from it, the updates averaged. grad p is exact, because the policy has only 31 sequences.


class NeuralPolicy(NamedTuple):
    parameters: list[Tensor]
    logprobs: Tensor  # (31 sequences, 4 tokens), with its graph
    mask: Tensor  # (31, 4)
    rewards: Tensor  # (31,)
    probabilities: Tensor  # (31,), with its graph


def neural_policy() -> NeuralPolicy:
    """A recurrent network over tokens 0, 1 and 2 = end; at most four tokens. Reward: as many 0s as 1s."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = torch.nn.Embedding(4, 4), torch.nn.GRU(4, 8, batch_first=True), torch.nn.Linear(8, 3)
    embedding, recurrent, head = (layer.double() for layer in layers)
    tokens = torch.cartesian_prod(*[torch.arange(3)] * 4)  # (81, 4)
    tokens = torch.unique(
        tokens.where((tokens == 2).cumsum(-1) == 0, 2), dim=0
    )  # (31, 4): all 2 from the end on
    mask = (tokens == 2).cumsum(-1) <= 1  # up to and including the first end
    inputs = torch.cat([torch.full((31, 1), 3), tokens[:, :-1]], dim=1)  # token 3 starts every sequence
    logits = 3 * head(recurrent(embedding(inputs))[0])  # (31, 4, 3)
    logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    rewards = ((tokens == 0).sum(-1) == (tokens == 1).sum(-1)).double()
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return NeuralPolicy(parameters, logprobs, mask, rewards, (logprobs * mask).sum(-1).exp())


def gradient(output: Tensor, policy: NeuralPolicy) -> Tensor:
    """All parameters' derivatives in one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(output, policy.parameters, retain_graph=True)])


def check_sampled_policy() -> Verdicts:
    """Compared along grad p and seven fixed random directions."""
    policy, size, tau, batches, groups = neural_policy(), 8, 0.3, 64, 2048
    p = (policy.probabilities * policy.rewards).sum()
    grad_p = gradient(p, policy)
    generator = torch.Generator().manual_seed(1)
    random_directions = torch.randn(7, len(grad_p), generator=generator, dtype=torch.float64)
    directions = torch.cat([grad_p[None] / grad_p.square().sum(), random_directions])
    updates: dict[str, list[Tensor]] = {name: [] for name in ADVANTAGES}
    for _ in range(batches):
        drawn = torch.multinomial(policy.probabilities.detach(), groups * size, True, generator=generator)
        rows, rewards = policy.logprobs[drawn], policy.rewards[drawn].view(groups, size)
        for name, advantages in methods(tau).items():
            loss, _ = unclipped_loss(rows, rows.detach(), advantages(rewards).flatten(), policy.mask[drawn])
            updates[name].append(directions @ -gradient(loss, policy))
    for name, update in updates.items():
        seen, omega = torch.stack(update), known_weight(name, p.detach(), size, tau)  # seen: (batches, 8)
        error = seen[:, 0].std() / batches**0.5
        text = f"{batches * groups} groups {seen[:, 0].mean():.4f} +- {error:.4f} | omega {omega:.4f}; s.e."
        off = in_errors(seen, omega * (directions @ grad_p))
        yield Verdict(f"Eq. 4: E[update] of a neural policy, {name}", text, off, 4.0)


# ---------------------------------------------------------------------------------------------------------------
# 2. The objective behind it (Eqs. 15-16)
# ---------------------------------------------------------------------------------------------------------------
# omega depends on p alone, so omega(p) grad p is the gradient of h(p) with h' = omega: SoftmaxGRPO ascends the sum of h
# over prompts. Integrating term by term gives regularised incomplete beta functions I,
#
#     h(p) = (1/M) sum_S Delta_S I_p(S+1, M-S),
#
# and I_p(S+1, M-S) = P(Binomial(M, p) > S) turns that into the project's partial sums. h rises (Delta_S > 0), and it is
# concave, so that an unsolved prompt never weighs less than a solved one, because Delta_S falls with S:
#
#     Delta_S - Delta_{S+1} = M (c-1)^2 (D_S - 2) / (D_S D_{S+1} D_{S+2}) >= 0        since D_S >= M >= 2.
#
# At M = 2 that is 0 for S = 0: h is a straight line, whatever tau.


def incomplete_beta(a: int, b: int, x: float) -> Tensor:
    """I_x(a, b) by quadrature of the beta density."""
    t = grid(0, x, 4001)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return simpson((torch.xlogy(real(a - 1), t) + torch.special.xlog1py(real(b - 1), -t) - log_beta).exp(), x)


def check_objective() -> Verdicts:
    off_slope, off_beta, off_curvature, wrong = 0.0, 0.0, 0.0, 0
    for size, tau in product((2, 3, 8, 32), (0.1, 0.5, 2.0)):
        p, c = grid(0.01, 0.99, 99).requires_grad_(), Fraction(math.exp(1 / tau))
        h = prompt_objective(p, size, tau)
        (slope,) = torch.autograd.grad(h.sum(), p, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), p)
        off_slope = max(off_slope, gap(slope.detach(), prompt_weight(p.detach(), size, tau)))

        deltas = [float(softmax_gain(s, size, c)) for s in range(size)]
        for x in (0.05, 0.5, 0.93):
            betas = [incomplete_beta(s + 1, size - s, x) for s in range(size)]
            off_beta = max(off_beta, gap(prompt_objective(x, size, tau), real(deltas) @ real(betas) / size))

        # h'' = omega'(p) = -(M-1) E_{S ~ Binomial(M-2, p)}[Delta_S - Delta_{S+1}]
        d = [s * c + size - s for s in range(size + 1)]
        falls = [size * (c - 1) ** 2 * (d[s] - 2) / (d[s] * d[s + 1] * d[s + 2]) for s in range(size - 1)]
        curvature = -(size - 1) * binomial(size - 2, p.detach()) @ real([float(x) for x in falls])
        off_curvature = max(off_curvature, gap(second, curvature))
        wrong += (h.diff() <= 0).sum().item() + (h.diff().diff() > 1e-12).sum().item()
    yield Verdict("h' = omega", "autograd of h | prompt_weight", off_slope, 1e-10)
    yield Verdict("Eqs. 15-16: h", "partial sums | quadrature of incomplete betas", off_beta, 1e-9)
    yield Verdict("h'', 0 at M = 2", "autograd, twice | closed form", off_curvature, 1e-9)
    yield Verdict("h rises and is concave", "places on 12 grids where not", wrong, 0)


# ---------------------------------------------------------------------------------------------------------------
# 3. The limits, and how fast they are reached (Eqs. 3, 5)
# ---------------------------------------------------------------------------------------------------------------
#     tau -> 0      omega -> (1 - (1-p)^(M-1)) / p    MaxRL with T = M-1; error ~ exp(-1/tau)
#     tau -> inf    tau omega -> (M-1)/M              REINFORCE, with an error of (M-1)(M-2)/(2 M^2) (1-2p) / tau, hence
#                                                     ~ 1/tau^2 at p = 1/2: softmax leans towards hard prompts first
#     M -> inf      omega -> (c-1) / (1-p + p c)      the derivative of log E[exp(R/tau)]; error ~ 1/M
#     both          omega -> 1/p                      maximum likelihood: the derivative of log p; along c = M^a ~ 1/M^a
#
# The advantages converge as well: A -> R/mean - 1 as tau -> 0, tau A -> R - mean as tau -> inf.


def check_limits() -> Verdicts:
    size, p, groups = 8, 0.2, outcomes(8)
    cold, hot = [1 / i for i in range(5, 16)], [2.0**i for i in range(5, 14)]
    z = [math.exp(-1 / tau) for tau in cold]  # an error ~ z falls exponentially with 1/tau
    error = [prompt_weight(p, size, tau) - known_weight("maxrl", real(p), size, tau) for tau in cold]
    yield rate("Eq. 5, tau -> 0: omega to MaxRL, T = M-1", "in exp(-1/tau)", z, error, 1)
    error = [gap(softmax_advantages(groups, tau), maxrl_advantages(groups)) for tau in cold]
    yield rate("Eq. 5, tau -> 0: A to R/mean - 1", "in exp(-1/tau)", z, error, 1)

    error = [tau * prompt_weight(p, size, tau) - (size - 1) / size for tau in hot]
    yield rate("tau -> inf: tau omega to (M-1)/M, p = 0.2", "in tau", hot, error, -1)
    coefficient = (size - 1) * (size - 2) / (2 * size**2) * (1 - 2 * p)
    off = gap(error[-1] * hot[-1], coefficient)
    yield Verdict("tau -> inf: the coefficient of 1/tau", "seen | derived", off, 1e-3)
    error = [tau * prompt_weight(0.5, size, tau) - (size - 1) / size for tau in hot]
    yield rate("tau -> inf: the same at p = 1/2", "in tau", hot, error, -2)
    error = [gap(tau * softmax_advantages(groups, tau), mean_advantages(groups)) for tau in hot]
    yield rate("tau -> inf: tau A to R - mean", "in tau", hot, error, -1)

    many, c = [2**i for i in range(6, 12)], math.exp(1 / 0.5)
    error = [prompt_weight(p, m, 0.5) - (c - 1) / (1 - p + p * c) for m in many]
    yield rate("Eq. 3, M -> inf: omega to (c-1)/(1-p+pc)", "in M", many, error, -1)
    for a in (1, 2):
        error = [prompt_weight(p, m, 1 / (a * math.log(m))) - 1 / p for m in many]
        yield rate(f"both: omega to 1/p along c = M^{a}", "in M", many, error, -a)


# ---------------------------------------------------------------------------------------------------------------
# 4. The ends, against GRPO (Eq. 17)
# ---------------------------------------------------------------------------------------------------------------
#     softmax:   omega(0) = (M-1)(c-1)/(M-1+c),    omega(1) = (M-1)(c-1)/((M-1)c+1) = 1 - M/(1+(M-1)c) < 1
#
# at every M and tau. The z-score's population weight is 1/sqrt(p(1-p)), from the objective 2 arcsin sqrt(p), and
# diverges at p = 1. But no group of M can: one failure among M gets -sqrt(M-1), and omega(0) = omega(1) = sqrt(M-1).
# The population formula holds (to 10%) only from M of about 2/(1-p) rollouts: M = 8 follows it for 0.3 < p < 0.7.
#
# All these weights also come from a second construction. A sums to 0, so with u(K) = cov(A, R) within the group,
#
#     omega(p) = E_K[u(K)] / (p (1-p)),   K ~ Binomial(M, p)
#     u = sqrt(K(M-K))/M (z-score), K(M-K)/M^2 (mean), K(M-K)/(M(M-1)) (leave-one-out), 1 - K/M for K >= 1 (MaxRL)


def covariance(advantages: Advantages, group_size: int) -> Tensor:
    """u(K) = (1/M) sum_i A_i R_i for K = 0..M, (M + 1,)."""
    return (advantages(outcomes(group_size)) * outcomes(group_size)).mean(-1)


def leave_one_out(rewards: Tensor) -> Tensor:
    return rewards - (rewards.sum(-1, keepdim=True) - rewards) / (rewards.shape[-1] - 1)


def enough_rollouts(p: float) -> int:
    """The smallest M (to 0.5%) at which the exact z-score weight reaches 90% of its population value."""
    size = 2
    while known_weight("grpo", real(p), size, 1.0) < 0.9 / math.sqrt(p * (1 - p)):
        size += max(1, size // 200)
    return size


def check_ends() -> Verdicts:
    off, ends = 0.0, real([0.0, 1.0])
    for size, tau in product((2, 8, 64, 1024), (0.001, 0.1, 1.0, 1000.0)):
        others, z = size - 1, math.exp(-1 / tau)
        formula = others * (1 - z) / real([others * z + 1, others + z])
        off = max(off, gap(prompt_weight(ends, size, tau) / formula, 1))
        off = max(off, prompt_weight(1.0, size, tau).item() - 1)  # 1 - 1e-435 is 1 here
    yield Verdict("Eq. 17: softmax omega(0), omega(1) < 1", "prompt_weight | closed form", off, 1e-12)
    off = max(gap(weight(grpo_advantages, ends, size), math.sqrt(size - 1)) for size in (2, 8, 64, 1024))
    yield Verdict("z-score omega(0) = omega(1) = sqrt(M-1)", "raw advantages | closed form", off, 1e-9)

    p, off, off_covariance = grid(0.02, 0.98, 49), 0.0, 0.0
    baselines = {**methods(0.3), "leave one out": leave_one_out}
    for size, (name, advantages) in product((2, 5, 16), baselines.items()):
        built = weight(advantages, p, size)
        known = known_weight(name, p, size, 0.3) if name in ADVANTAGES else torch.ones_like(p)
        by_covariance = (binomial(size, p) * covariance(advantages, size)).sum(-1) / (p * (1 - p))
        off, off_covariance = max(off, gap(built, known)), max(off_covariance, gap(built, by_covariance))
    yield Verdict("omega of all baselines", "raw advantages | closed forms", off, 1e-12)
    yield Verdict("omega = E[cov(A, R)] / (p(1-p)), all", "gains | covariances", off_covariance, 1e-12)

    p = real([0.2, 0.99, 0.999, 0.9999, 0.99999]).requires_grad_()
    (population,) = torch.autograd.grad((2 * p.sqrt().arcsin()).sum(), p)
    p, sizes = p.detach(), [2**i for i in range(6, 12)]
    error = [known_weight("grpo", p[0], size, 1.0) - population[0] for size in sizes]
    yield rate("z-score: omega to d/dp 2 arcsin sqrt(p)", "enumeration | autograd, in M", sizes, error, -1)
    yield rate("z-score: the population weight diverges", "autograd, in 1-p", 1 - p[1:], population[1:], -0.5)
    enough = {p: enough_rollouts(p) for p in (0.9, 0.97, 0.99, 0.997, 0.999)}
    text = ", ".join(f"{enough[p]} at p = {p}" for p in (0.9, 0.99, 0.999))
    x = [1 - p for p in enough]
    yield rate("z-score: M at which that formula holds", f"{text}; in 1-p", x, list(enough.values()), -1)


# ---------------------------------------------------------------------------------------------------------------
# 5. Rewards that are not binary (Eq. 7)
# ---------------------------------------------------------------------------------------------------------------
# In a large group the denominator sum_j exp(R_j/tau) is close to M Z, Z = E[exp(R/tau)], so the update approaches
#
#     grad log Z,   with an error of O(1/M).
#
# At finite M it has an exact form too: with e = exp(R/tau) and 1/D = int_0^inf exp(-s D) ds,
#
#     E[update] = M int_0^inf E[score e exp(-s e)] E[exp(-s e)]^(M-1) ds.
#
# Policy: y ~ N(mu, sigma^2), mu and log sigma trained; reward sigmoid(2 y), continuous and bounded. For R = y itself,
# log Z = mu/tau + sigma^2/(2 tau^2) and ESS/M -> E[e]^2/E[e^2] = exp(-sigma^2/tau^2): set tau by the rewards' spread.

MU, SIGMA = 0.3, 0.8
NOISE = grid(-10, 10, 801)  # y = MU + SIGMA * NOISE
DENSITY = (-NOISE.square() / 2).softmax(-1)  # trapezium rule, exact to rounding for smooth functions


def scores(noise: Tensor) -> Tensor:
    """grad log N(y; mu, sigma^2) with respect to (mu, log sigma): (..., 2)."""
    return torch.stack([noise / SIGMA, noise.square() - 1], dim=-1)


def continuous_update(group_size: int, tau: float) -> Tensor:
    """E[update], (2,), by the double integral, on a grid of log s."""
    e = (torch.sigmoid(2 * (MU + SIGMA * NOISE)) / tau).exp()
    s = grid(-25, 8, 1001).exp()[:, None] / group_size  # (1001, 1)
    kernel = (-s * e).exp() * DENSITY  # (1001, 801)
    others = kernel.sum(-1, keepdim=True) ** (group_size - 1)
    return simpson((group_size * (kernel @ (e[:, None] * scores(NOISE))) * others * s).T, 33.0)


def check_continuous() -> Verdicts:
    tau, size, generator = 0.3, 8, torch.Generator().manual_seed(0)
    noise = torch.randn(200_000, size, generator=generator, dtype=torch.float64)
    advantages = softmax_advantages(torch.sigmoid(2 * (MU + SIGMA * noise)), tau)
    off = in_errors((advantages[..., None] * scores(noise)).mean(1), continuous_update(size, tau))
    yield Verdict("Eq. 7: E[update], continuous R, M = 8", "200000 groups | double integral, s.e.", off, 4.0)

    parameters = real([MU, math.log(SIGMA)]).requires_grad_()
    y = parameters[0] + parameters[1].exp() * NOISE
    (limit,) = torch.autograd.grad((DENSITY * (torch.sigmoid(2 * y) / tau).exp()).sum().log(), parameters)
    sizes = [2**i for i in range(6, 12)]
    error = [(continuous_update(m, tau) - limit).norm() for m in sizes]
    yield rate("Eq. 7, M -> inf: E[update] to grad log Z", "integral | autograd, in M", sizes, error, -1)

    off, off_ess = 0.0, 0.0
    for tau in (0.8, 1.0, 2.0):
        log_z = (DENSITY * ((MU + SIGMA * NOISE) / tau).exp()).sum().log()
        off = max(off, gap(log_z, MU / tau + SIGMA**2 / (2 * tau**2)))
        rewards = SIGMA * torch.randn(32, 2**16, generator=generator, dtype=torch.float64)
        share = effective_sample_size(rewards, tau)[:, None] / 2**16
        off_ess = max(off_ess, in_errors(share, math.exp(-(SIGMA**2) / tau**2)))
    yield Verdict("Gaussian R: log Z", "quadrature | closed form", off, 1e-12)
    yield Verdict("Gaussian R: ESS/M to exp(-sigma^2/tau^2)", "32 x 65536 | formula, s.e.", off_ess, 4.0)


# ---------------------------------------------------------------------------------------------------------------
# 6. Three reward levels: no objective at all (Eq. 8)
# ---------------------------------------------------------------------------------------------------------------
# Levels r_a with probabilities p_a: E[update] = sum_a G_a(p) grad p_a with G_a = E[A_1 | R_1 = r_a]. Since
# p_0 = 1 - p_1 - p_2 this is a one-form F_1 dp_1 + F_2 dp_2, F_a = G_a - G_0. It is the gradient of an objective only
# if its curl dF_2/dp_1 - dF_1/dp_2 vanishes. At M = 2, with e_a = exp(r_a/tau),
#
#     G_a = sum_b p_b 2 e_a/(e_a + e_b) - 1,   curl = t_21 + t_10 + t_02,   t_ab = 2 tanh((r_a - r_b) / (2 tau)),
#
# rarely 0: take the policy round a closed loop, and the update has done net work. With two levels, shared by any number
# of outcomes, the curl is 0 at every M (section 2), and in large groups it dies away as 1/M (section 5).

RADIUS = 0.2  # of the loop, a circle about p_1 = p_2 = 1/3
THREE_LEVELS, TWO_LEVELS = real([0.0, 0.5, 1.0]), real([0.0, 1.0, 1.0])


def one_form(points: Tensor, levels: Tensor, group_size: int, tau: float) -> Tensor:
    """(F_1, F_2) at points (p_1, p_2), (N, 2) -> (N, 2): every composition n of the other M-1 rollouts, multinomial."""
    others = group_size - 1
    n = torch.tensor([(i, j, others - i - j) for i in range(others + 1) for j in range(others + 1 - i)])
    rows = torch.stack([levels.repeat_interleave(counts) for counts in n]).expand(3, -1, -1)  # (3, C, M-1)
    first = levels[:, None, None].expand(-1, len(n), 1)  # R_1 = r_a, (3, C, 1)
    log_ways = math.lgamma(others + 1) - torch.lgamma(n.double() + 1).sum(-1)
    p = torch.cat([1 - points.sum(-1, keepdim=True), points], dim=-1)  # (N, 3)
    chances = (log_ways + (n * p[:, None].log()).sum(-1)).exp()  # (N, C)
    g = chances @ softmax_advantages(torch.cat([first, rows], dim=-1), tau)[..., 0].T  # (N, 3)
    return g[:, 1:] - g[:, :1]


def curl(points: Tensor, levels: Tensor, group_size: int, tau: float) -> Tensor:
    points = points.clone().requires_grad_()
    form = one_form(points, levels, group_size, tau)
    of_1, of_2 = (torch.autograd.grad(form[:, a].sum(), points, retain_graph=True)[0] for a in (0, 1))
    return of_2[:, 0] - of_1[:, 1]


def circle(steps: int) -> tuple[Tensor, Tensor]:
    """Unit vectors from the centre to evenly spaced points of a circle, and along it, each (steps, 2)."""
    angle = torch.arange(steps, dtype=torch.float64) * 2 * math.pi / steps
    return torch.stack([angle.cos(), angle.sin()], dim=-1), torch.stack([-angle.sin(), angle.cos()], dim=-1)


def work_round_loop(levels: Tensor, group_size: int, tau: float, steps: int = 240) -> Tensor:
    """The work done on each piece of the loop, (steps,)."""
    outwards, along = circle(steps)
    form = one_form(1 / 3 + RADIUS * outwards, levels, group_size, tau)
    return (form * along).sum(-1) * RADIUS * 2 * math.pi / steps


def check_three_levels() -> Verdicts:
    # The paper's instance, exp(r/tau) = 1, 2, 4: dG_a/dp_b = m_ab = 2 e_a/(e_a + e_b).
    m = [[Fraction(2 * a, a + b) for b in (1, 2, 4)] for a in (1, 2, 4)]
    cross_12, cross_21 = (m[a][b] - m[a][0] - m[0][b] + m[0][0] for a, b in ((1, 2), (2, 1)))  # dF_a/dp_b
    wrong = (cross_12 != Fraction(-1, 15)) + (cross_21 != Fraction(1, 15))
    yield Verdict("Eq. 8: cross-partials -1/15 and +1/15", "fractions | the paper; misses", wrong, 0)
    centre = torch.full((1, 2), 1 / 3, dtype=torch.float64)
    off = gap(curl(centre, real([1.0, 2.0, 4.0]).log(), 2, 1.0), float(cross_21 - cross_12))
    yield Verdict("Eq. 8: its curl 2/15", "fractions | autograd over all groups", off, 1e-12)

    generator, off, off_two = torch.Generator().manual_seed(0), 0.0, 0.0
    points = uniform(generator, 6, 3)
    points = (points / points.sum(-1, keepdim=True))[:, 1:]
    for tau in (0.2, 0.5, 2.0):
        r = uniform(generator, 3)
        tanh = sum(2 * math.tanh((r[a] - r[b]) / (2 * tau)) for a, b in ((2, 1), (1, 0), (0, 2)))
        off = max(off, gap(curl(points, r, 2, tau), tanh))
        two = [real([0.0, 1.0, 1.0]), real([0.0, 0.0, 1.0]), real([1.0, 0.0, 1.0])]
        off_two = max(off_two, *(gap(curl(points, r, size, tau), 0) for r in two for size in (2, 3, 5, 12)))
    yield Verdict("curl = t_21 + t_10 + t_02 at M = 2", "autograd over all groups | tanh", off, 1e-12)
    yield Verdict("curl with two levels, M = 2, 3, 5, 12", "autograd over all groups | 0", off_two, 1e-12)

    # Stokes: the work round the circle is the integral of the curl over the disc.
    work, radius = work_round_loop(THREE_LEVELS, 4, 0.2).sum(), grid(0, RADIUS, 41)
    disc = 1 / 3 + radius[:, None, None] * circle(48)[0]  # (41, 48, 2)
    rings = curl(disc.reshape(-1, 2), THREE_LEVELS, 4, 0.2).view(41, 48).mean(-1) * 2 * math.pi * radius
    text = f"line {work:.4f} | area {simpson(rings, RADIUS):.4f}"
    yield Verdict("work round a loop, r = (0, 1/2, 1), M = 4", text, gap(work, simpson(rings, RADIUS)), 1e-9)
    none = gap(work_round_loop(TWO_LEVELS, 4, 0.2).sum(), 0)
    yield Verdict("work round the same loop, r = (0, 1, 1)", "line integral | 0", none, 1e-12)
    sizes = [16, 24, 32, 48, 64]
    curls = [curl(centre, THREE_LEVELS, size, 0.5) for size in sizes]
    yield rate("curl, M -> inf: to 0", "in M", sizes, curls, -1, slack=0.1)


# ---------------------------------------------------------------------------------------------------------------
# 7. What tau means: a price, and a shield against noise (Eqs. 9, 24-25)
# ---------------------------------------------------------------------------------------------------------------
# The weights w = (A + 1) / M solve   max_q sum_i q_i R_i - tau KL(q || uniform):   tau is the price of leaving the
# uniform distribution over the group. The optimum is worth tau log mean exp(R/tau).
#
# Rewards with noise: if |eps_i| <= delta, no weight moves by more than a factor exp(+-2 delta/tau). The worst noise
# lifts one rollout and lowers the others: w'/w = e^x / (w e^x + 1 - w), x = 2 delta/tau, near the bound for small w.
# Noise of mean zero moves the mean weight by (sigma^2/2) sum_j d^2 w_i / dR_j^2, that is by O(sigma^2/tau^2).


def check_temperature() -> Verdicts:
    size, tau, delta, generator = 8, 0.3, 0.1, torch.Generator().manual_seed(0)
    rewards = uniform(generator, size)

    def weights(rewards: Tensor) -> Tensor:
        return (softmax_advantages(rewards, tau) + 1) / size

    v = grid(0.5, 1.5, size).requires_grad_()  # q = v^2 / sum v^2
    optimiser = torch.optim.LBFGS([v], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def cost() -> Tensor:
        optimiser.zero_grad()
        q = v.square() / v.square().sum()
        value = tau * (q * (size * q).log()).sum() - (q * rewards).sum()
        value.backward()
        return value

    optimiser.step(cost)
    best = (v.square() / v.square().sum()).detach()
    off = gap(best, weights(rewards))
    yield Verdict("Eq. 9: w solves reward - tau KL", "numerical optimiser | softmax", off, 1e-5)
    off = gap(-cost().detach(), tau * (rewards / tau).exp().mean().log())
    yield Verdict("Eq. 9: worth tau log mean exp(R/tau)", "numerical optimiser | formula", off, 1e-9)

    rewards[0] = -3.0  # a rollout of next to no weight comes closest to the bound
    noise = delta * (2 * uniform(generator, 50_000, size) - 1)
    noise[:size] = delta * (2 * torch.eye(size, dtype=torch.float64) - 1)  # the worst, for each rollout
    w, x, moved = weights(rewards), 2 * delta / tau, (weights(rewards + noise) / weights(rewards)).log()
    excess = max(0.0, moved.abs().max().item() - x)
    text = f"50000 noises, at most {moved.abs().max() / x:.4f} of the bound"
    yield Verdict("Eq. 24: |log w'/w| <= 2 delta/tau", text, excess, 1e-12)
    off = gap(moved.amax(0), x - (w * math.exp(x) + 1 - w).log())
    yield Verdict("Eq. 24: the worst noise", "largest seen | closed form", off, 1e-12)

    signs = torch.cartesian_prod(*[real([-1.0, 1.0])] * size)  # (256, M): mean zero, averaged exactly
    spreads, top = [tau / 2**i for i in range(3, 8)], int(rewards.argmax())
    shift = [(weights(rewards + sigma * signs).mean(0) - w)[top] for sigma in spreads]
    yield rate("Eq. 25: mean shift by noise of mean zero", "all signs, in sigma/tau", spreads, shift, 2)
    hessian = torch.autograd.functional.hessian(lambda r: (r / tau).softmax(-1)[top], rewards)
    off = gap(shift[-1] / (spreads[-1] ** 2 / 2 * hessian.trace()), 1)
    yield Verdict("Eq. 25: its coefficient", "all signs | autograd Hessian, relative", off, 1e-3)


# ---------------------------------------------------------------------------------------------------------------
# 8. tau from the effective sample size (Eq. 26)
# ---------------------------------------------------------------------------------------------------------------
# ESS = 1 / sum_i w_i^2 says how many rollouts carry the update. With K successes ESS = (Kc+M-K)^2 / (Kc^2+M-K) falls
# from M to K as tau falls, so a target nu has a temperature only if K < nu < M:
#
#     c = [K(M-K) + sqrt(K(M-K) nu (M-nu))] / (K (nu-K)),   tau = 1 / log c
#
# What does a tau for every group do to omega? For any rewards mean(A^2) = M/ESS - 1: holding the ESS holds the size of
# the advantages, which is just what a z-score does. With binary rewards nothing else is left to choose:
#
#     K < nu:   A = sqrt(M/nu - 1) * z-score          K >= nu (lowest tau):   A = R/mean - 1, MaxRL
#
# So softmax at a fixed ESS is GRPO on hard prompts and MaxRL on easy ones: bounded, but a different objective.


def softmax_at_ess(rewards: Tensor, target: float) -> Tensor:
    return softmax_advantages(rewards, tau_for_ess(rewards, target))


def check_ess() -> Verdicts:
    size, p = 12, grid(0.02, 0.98, 25)
    groups, off, off_lowest, off_advantage, off_weight = outcomes(size), 0.0, 0.0, 0.0, 0.0
    for nu in (1.5, 4.0, 7.3, 11.5):
        mixed, k = groups[1:-1], torch.arange(1.0, size, dtype=torch.float64)
        tau, inside = tau_for_ess(mixed, nu), k < nu
        off = max(off, gap(effective_sample_size(mixed, tau)[inside], nu))
        off_lowest = max(off_lowest, (tau[~inside] - 1e-3).abs().sum().item())

        hard, scale = groups.sum(-1) < nu, math.sqrt(size / nu - 1)
        mixture = torch.where(hard[:, None], scale * grpo_advantages(groups), maxrl_advantages(groups))
        off_advantage = max(off_advantage, gap(softmax_at_ess(groups, nu), mixture))
        u = torch.where(hard, scale * covariance(grpo_advantages, size), covariance(maxrl_advantages, size))
        mixed_weight = (binomial(size, p) * u).sum(-1) / (p * (1 - p))
        off_weight = max(off_weight, gap(weight(partial(softmax_at_ess, target=nu), p, size), mixed_weight))
    yield Verdict("Eq. 26: tau = 1 / log c reaches nu in (K, M)", "target | ESS of raw weights", off, 1e-9)
    yield Verdict("Eq. 26: nu <= K has no tau, so the lowest", "tau_for_ess | 0.001", off_lowest, 1e-12)
    rewards = uniform(torch.Generator().manual_seed(0), 500, size)
    off = gap(effective_sample_size(rewards, tau_for_ess(rewards, 4.0)), 4.0)
    yield Verdict("the same for continuous R, nu = 4 of 12", "target | ESS of raw weights", off, 1e-9)
    square = softmax_advantages(rewards, 0.2).square().mean(-1)
    off = gap(square, size / effective_sample_size(rewards, 0.2) - 1)
    yield Verdict("mean(A^2) = M/ESS - 1", "advantages | ESS, 500 random groups", off, 1e-12)
    yield Verdict("fixed ESS: A is z-score, then MaxRL", "softmax_advantages | mixture", off_advantage, 1e-9)
    yield Verdict("fixed ESS: omega of that mixture", "gains | covariances", off_weight, 1e-9)


# ---------------------------------------------------------------------------------------------------------------
# 9. Where the gradient goes, and how noisy it is (Figure 1, Table 3, and beyond the paper)
# ---------------------------------------------------------------------------------------------------------------
# A prompt's share of the gradient budget is proportional to E|A| = E_K[(1/M) sum_i |A_i|]. Successes and failures carry
# the same amount, so E|A| = 2 E_K[u(K)] = 2 p(1-p) omega(p): the two halves of the paper's Figure 1 are one. So a
# histogram of pass rates predicts the share of every bin. At the paper's M = 8 and tau = 0.1, softmax's share over the
# z-score's falls from bin to bin, whatever the histogram. (In its Table 3 that ratio goes 1.3 1.5 0.84 0.82 0.53 on
# Countdown, nearly so, but 1.6 7.9 0.30 2.5 0.27 on GSM8K: those two rows cannot share one histogram.)
#
# Noise: with s and f the mean scores of the group's successes and failures, the update is u(K) (s - f). So
#
#     E[update] = E[u] g,   trace Var = Var[u] |g|^2 + E[u^2 (V_s/K + V_f/(M-K))],   g = grad p / (p(1-p)),
#
# where V_s and V_f say how the scores of single successes and failures scatter (trace of the covariance). If both are
# v |g|^2, signal-to-noise is E[u] / sqrt(Var[u] + v E[u^2 M/(K(M-K))]): the scale of A cancels, methods compare fairly.
#
# Last, the M below which tau makes no visible difference. The contrast omega(0)/omega(1) = ((M-1)c+1)/(M-1+c) runs from
# 1 (tau = inf) to M-1 (tau = 0), and is within 10% of the latter as long as 0.9 n^2 - 0.1 c n - 1 < 0, n = M-1.


def signal_to_noise(advantages: Advantages, p: Tensor, group_size: int, scatter: float) -> Tensor:
    """Of one group's update, at pass rates p and scatter v (both without unit). float64, shape of p."""
    u, chances = covariance(advantages, group_size), binomial(group_size, p)
    k = torch.arange(1.0, group_size, dtype=torch.float64)
    within = (chances[..., 1:-1] * u[1:-1].square() * group_size / (k * (group_size - k))).sum(-1)
    mean = (chances * u).sum(-1)
    return mean / ((chances * u.square()).sum(-1) - mean.square() + scatter * within).sqrt()


def contrast(group_size: int, tau: float) -> float:
    """How much more an unsolved prompt weighs than a solved one: omega(0) / omega(1)."""
    unsolved, solved = prompt_weight(real([0.0, 1.0]), group_size, tau).tolist()
    return unsolved / solved


def visible_from(tau: float) -> float:
    """The M at which the contrast leaves the 10% below its limit for tau -> 0: about c/9 + 1."""
    c = math.exp(1 / tau)
    return 1 + (0.1 * c + math.sqrt(0.01 * c * c + 3.6)) / 1.8


def check_budget() -> Verdicts:
    p, generator = grid(0.01, 0.99, 99), torch.Generator().manual_seed(0)
    cases = list(product((2, 8, 32), methods(0.3).items()))
    formula = {(size, name): 2 * p * (1 - p) * known_weight(name, p, size, 0.3) for size, (name, _) in cases}
    off = max(gap(expected_abs_advantage(p, size, a), formula[size, name]) for size, (name, a) in cases)
    yield Verdict("E|A| = 2 p(1-p) omega(p), all methods", "raw advantages | closed forms", off, 1e-12)

    histogram = uniform(generator, 3000).sqrt()  # pass rates of 3000 prompts
    off, pair = 0.0, (softmax(0.1), grpo_advantages)
    for advantages in pair:
        predicted = share_by_pass_rate(histogram, expected_abs_advantage(histogram, 8, advantages))
        rewards = (torch.rand(100, 3000, 8, generator=generator) < histogram[:, None]).double()
        measured = [share_by_pass_rate(histogram, amount) for amount in advantages(rewards).abs().mean(-1)]
        off = max(off, in_errors(torch.stack(measured), predicted))
    yield Verdict("predicted share of every pass-rate bin", "300000 groups | formula, s.e.", off, 4.0)

    budgets = [expected_abs_advantage(p, 8, advantages) for advantages in pair]
    rises = ((budgets[0] / budgets[1]).diff() > 0).sum().item()
    for _ in range(200):
        prompts = uniform(generator, 99) ** 4
        ours, theirs = (share_by_pass_rate(p, prompts * budget) for budget in budgets)
        rises += ((ours / theirs).diff() > 0).sum().item()
    yield Verdict("softmax : z-score share falls bin by bin", "grid, 200 random histograms; rises", rises, 0)


def check_noise() -> Verdicts:
    policy, size, groups = neural_policy(), 8, 20_000
    scores = torch.stack([gradient(row, policy) for row in (policy.logprobs * policy.mask).sum(-1)])
    chances, rewards = policy.probabilities.detach(), policy.rewards
    p = (chances * rewards).sum()
    g = gradient((policy.probabilities * rewards).sum(), policy) / (p * (1 - p))

    def scatter(kind: Tensor) -> Tensor:
        inside = chances * kind / (chances * kind).sum()
        return inside @ (scores - inside @ scores).square().sum(-1)

    k, weights = torch.arange(size + 1.0, dtype=torch.float64), binomial(size, p)
    within = (scatter(rewards) / k + scatter(1 - rewards) / (size - k))[1:-1]  # for K = 1..M-1
    drawn = torch.multinomial(chances, groups * size, True, generator=torch.Generator().manual_seed(2))
    drawn = drawn.view(groups, size)
    for name, advantages in methods(0.3).items():
        u = covariance(advantages, size)
        mean, square = (weights * u).sum(), weights * u.square()
        variance = (square.sum() - mean**2) * g.square().sum() + (square[1:-1] * within).sum()
        pushes = torch.zeros(groups, len(chances), dtype=torch.float64)  # on each of the 31 sequences
        pushes = pushes.scatter_add(1, drawn, advantages(rewards[drawn]) / size)
        squares = (pushes @ scores - mean * g).square().sum(-1, keepdim=True)
        text = f"20000 groups {squares.mean():.3f} | formula {variance:.3f}, s.e."
        yield Verdict(f"variance of the update, {name}", text, in_errors(squares, variance), 4.0)

    generator, off = torch.Generator().manual_seed(3), 0.0
    rewards = (torch.rand(50, 4000, size, generator=generator) < 0.3).double()
    scores = rewards + math.sqrt(2) * torch.randn(50, 4000, size, generator=generator)  # |g| = 1, v = 2
    for advantages in methods(0.3).values():
        updates = (advantages(rewards) * scores).mean(-1)  # (50, 4000)
        ratio = (updates.mean(-1) / updates.std(-1))[:, None]
        off = max(off, in_errors(ratio, signal_to_noise(advantages, real(0.3), size, 2.0)))
    yield Verdict("signal-to-noise at p = 0.3, v = 2, all methods", "200000 groups | formula, s.e.", off, 4.0)

    taus = (0.1, 0.2, 0.3, 0.5)
    first = [next(m for m in range(3, 9999) if contrast(m, tau) < 0.9 * (m - 1)) for tau in taus]
    wrong = sum(m != math.ceil(visible_from(tau)) for tau, m in zip(taus, first))
    text = ", ".join(f"{m} at tau {tau}" for tau, m in zip(taus, first)) + "; misses"
    yield Verdict("M from which tau is visible (10%)", text, wrong, 0)
    off = max(gap(prompt_weight(grid(0, 1, 11), 2, tau), math.tanh(0.5 / tau)) for tau in (0.1, 1.0, 5.0))
    yield Verdict("M = 2: omega = tanh(1/(2 tau)) at every p", "prompt_weight | closed form", off, 1e-12)


# ---------------------------------------------------------------------------------------------------------------
# 10. A classifier, where maximum likelihood is known (Figure 2)
# ---------------------------------------------------------------------------------------------------------------
# classifier.py trains a small classifier on sampled labels (its docstring has the protocol). At tau = 0.2 the weight
# at M = inf, (c-1)/(1-p+pc), is 1/p for all p well above 1/c = 0.007: softmax should near cross-entropy as M grows.


def check_classifier() -> Verdicts:
    curves = classifier_curves()
    size_curves = [curves[f"softmax tau=0.2, M={size}", "sgd"] for size in (4, 16, 128, 1024)]
    exact = curves["softmax tau=0.2, M=1024, expected", "sgd"].accuracy
    off = (size_curves[-1].accuracy.mean(-1) - exact.mean(-1)).abs().max().item()
    yield Verdict("classifier: sampled labels, M = 1024", "sampled | omega(p) grad p", off, 0.01)

    distances = [distance_to_likelihood(curve, "sgd") for curve in size_curves]  # of (5 seeds,) each
    wrong = sum((after >= before).sum().item() for before, after in pairwise(distances[:3]))
    text = " ".join(f"{d.mean():.3f}" for d in distances)
    yield Verdict("classifier: nears likelihood as M grows", f"M 4 16 128 1024: {text}; misses", wrong, 0)
    names = "REINFORCE, M=1024", "z-score, M=1024", "softmax tau=0.2, M=1024"
    distances = [distance_to_likelihood(curves[name, "sgd"], "sgd") for name in names]
    wrong = sum((after >= before).sum().item() for before, after in pairwise(distances))
    text = " > ".join(f"{d.mean():.3f}" for d in distances)
    yield Verdict("classifier: REINFORCE, z-score, softmax", f"{text}; misses", wrong, 0)


# ---------------------------------------------------------------------------------------------------------------
# 11. Run it all; theory_figures.py draws the figures from the functions above
# ---------------------------------------------------------------------------------------------------------------

CHECKS: list[Callable[[], Verdicts]] = [
    check_gain,
    check_enumeration,
    check_sampled_policy,
    check_objective,
    check_limits,
    check_ends,
    check_continuous,
    check_three_levels,
    check_temperature,
    check_ess,
    check_budget,
    check_noise,
    check_classifier,
]


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks and draws every statement of SoftmaxGRPO's theory.")
    parser.add_argument("--no-figures", action="store_true", help="only check, draw nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # small tensors: more threads only get in each other's way
    start, verdicts = time.perf_counter(), []
    for check in CHECKS:
        for v in check():
            verdicts.append(v)
            print("ok  " if v.ok else "FAIL", f"{v.claim:<47} {v.routes:<60}", end=" ")
            print(f"{v.difference:7.1e} <= {v.tolerance:g}", flush=True)
    print(classifier_table())
    if not arguments.no_figures:
        from theory_figures import draw_all  # here, so that the checks alone do not wait for matplotlib

        print("\nFigures in figures/:", ", ".join(path.name for path in draw_all()))
    failed = sum(not verdict.ok for verdict in verdicts)
    print(f"\n{len(verdicts)} statements, {failed} failed, {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
