"""SoftmaxGRPO, complete: advantages, theory helpers, loss, log-probs, rollouts, evaluation, training loop.

The paper (arXiv 2608.09271) replaces GRPO's z-score by a softmax over the group's rewards. For one prompt with
M rollouts y_1..y_M and rewards R_1..R_M the whole method is one line:

    A_i = M * softmax(R / tau)_i - 1        and the update is  (1/M) sum_i A_i grad log pi(y_i)

Read from top to bottom; data flows the same way:

    1. advantages     rewards (P, M) -> advantages (P, M)                       P prompts, M rollouts each
    2. omega          what those advantages optimise, in closed form
    3. surrogate      advantages -> loss: clipped, KL-regularised, pasteable
    4. log-probs      sequences (N, L) -> log-probs (N, T)                      N = P * M rows, T completion tokens
    5. rollouts       prompts -> completions, with one shared prefill per group
    6. evaluation     greedy and sampled accuracy, pass@k, where the gradient goes
    7. the loop       one step: sample, reward, advantage, loss, update

Sections 1-3 are pure functions of tensors and need nothing but torch: paste them into your own trainer.
To run the whole: `python train_countdown.py` (no GPU and no downloads needed).
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jinja2 import TemplateError  # chat templates are jinja2, which transformers uses to render them
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint as recompute_in_backward
from tqdm.auto import tqdm

if TYPE_CHECKING:
    from run import Config  # the settings of a run, one field and one line of explanation each

# ---------------------------------------------------------------------------------------------------------------
# 1. Advantages: rewards (..., M) -> advantages (..., M), the group always last
# ---------------------------------------------------------------------------------------------------------------
# All of them are computed in float64 and sum to zero over the group. A group whose rewards are all equal carries no
# signal and gets exact zeros (not the 1e-8 that rounding would leave), so that the loop can skip its rows.


def softmax_advantages(rewards: Tensor, tau: float | Tensor) -> Tensor:
    """A_i = M * softmax(R / tau)_i - 1: SoftmaxGRPO (Eq. 2 of the paper).

    rewards: (..., M). tau: a temperature in units of reward, one number, or one per group with shape (...) or
    anything that broadcasts to (..., 1). Returns (..., M) in (-1, M - 1]: float32, or float64 for float64 rewards.
    Raises ValueError for fewer than two rollouts, rewards that are not finite, tau not finite and positive.
    """
    rewards = _check_rewards(rewards)
    tilt = _tilt(rewards, tau)
    # M * e / sum(e), in this order: equal rewards give M * 1 / M - 1 = 0 exactly.
    return _as_input(rewards.shape[-1] * tilt / tilt.sum(-1, keepdim=True) - 1, rewards)


def grpo_advantages(rewards: Tensor) -> Tensor:
    """A_i = (R_i - mean) / std: GRPO's z-score. (..., M) -> (..., M).

    std is the population one (divides by M; torch.std divides by M - 1, which makes z-scores smaller by
    sqrt((M-1)/M)). No epsilon: equal rewards give 0, everything else the exact z-score.
    """
    rewards = _check_rewards(rewards)
    centred = _centred(rewards)
    std = centred.square().mean(-1, keepdim=True).sqrt()
    return _as_input(centred / torch.where(std > 0, std, 1.0), rewards)


def maxrl_advantages(rewards: Tensor) -> Tensor:
    """A_i = R_i / mean - 1: MaxRL, the limit of softmax for binary rewards as tau -> 0 (Eq. 5). 0 when the mean is 0.

    (..., M) -> (..., M). Meant for rewards >= 0.
    """
    rewards = _check_rewards(rewards)
    mean = rewards.double().mean(-1, keepdim=True)
    return _as_input(_centred(rewards) / torch.where(mean != 0, mean, math.inf), rewards)


def mean_advantages(rewards: Tensor) -> Tensor:
    """A_i = R_i - mean: REINFORCE with the group mean as baseline (Dr. GRPO). (..., M) -> (..., M)."""
    rewards = _check_rewards(rewards)
    return _as_input(_centred(rewards), rewards)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax_advantages,  # takes tau as well
    "grpo": grpo_advantages,
    "maxrl": maxrl_advantages,
    "reinforce": mean_advantages,
}


def effective_sample_size(rewards: Tensor, tau: float | Tensor) -> Tensor:
    """ESS = 1 / sum_i w_i^2 of the softmax weights w: how many rollouts carry the update. (..., M) -> (...).

    Falls from M (tau -> inf: all count alike) to the number of rollouts tied at the best reward (tau -> 0).
    """
    rewards = _check_rewards(rewards)
    tilt = _tilt(rewards, tau)
    return _as_input(tilt.sum(-1).square() / tilt.square().sum(-1), rewards)


def tau_for_ess(rewards: Tensor, target: float) -> Tensor:
    """The temperature of each group at which its effective sample size is `target` (Appendix A.3, Eq. 26).

    rewards: (..., M); target in [1, M). Returns one tau per group, shape (...).
    Two reward levels: in closed form; otherwise by bisection on log tau, in which ESS is monotone. Where no such tau
    exists the nearest allowed one is returned, between 0.001 and 1000 times the group's reward spread: the lowest when
    more than `target` rollouts tie at the best. Equal rewards give tau = 1: their advantage is 0 at any temperature.
    A tau that depends on the group's rewards is a different objective from a fixed one: omega changes (theory.py).
    """
    rewards = _check_rewards(rewards)
    size = rewards.shape[-1]
    if not 1 <= target < size:
        raise ValueError(f"target ESS must be at least 1 and below the group size {size}, got {target}")
    r = rewards.double()
    best, worst = r.amax(-1), r.amin(-1)
    spread = torch.where(best > worst, best - worst, 1.0)
    is_best, is_worst = r == best[..., None], r == worst[..., None]
    k = is_best.sum(-1).double()
    # Eq. 26 with c = exp(spread / tau); only meaningful for k < target < M.
    root = (k * (size - k) * target * (size - target)).sqrt()
    c = (k * (size - k) + root) / (k * (target - k)).clamp(min=1e-300)
    closed_form = 1 / c.log().clamp(min=1e-300)  # in units of the spread, like low and high
    low, high = torch.full_like(k, math.log(1e-3)), torch.full_like(k, math.log(1e3))
    for _ in range(60):
        middle = (low + high) / 2
        too_flat = effective_sample_size(r, spread * middle.exp()) > target
        low, high = torch.where(too_flat, low, middle), torch.where(too_flat, middle, high)
    tau = torch.where((is_best | is_worst).all(-1), closed_form, high.exp())
    tau = torch.where(target > k, tau, 1e-3).clamp(1e-3, 1e3) * spread
    return _as_input(torch.where(best > worst, tau, 1.0), rewards)


def _check_rewards(rewards: Tensor) -> Tensor:
    rewards = torch.as_tensor(rewards)
    if rewards.ndim == 0 or rewards.shape[-1] < 2:
        raise ValueError(
            f"a group needs at least two rollouts in the last dimension, got shape {tuple(rewards.shape)}"
        )
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards[~torch.isfinite(rewards)][0].item()}")
    return rewards


def _check_tau(tau: float | Tensor, rewards: Tensor) -> Tensor:
    tau = torch.as_tensor(tau, dtype=torch.float64, device=rewards.device)
    groups = rewards.shape[:-1]
    if tau.shape == groups:
        tau = tau[..., None]
    if not (torch.isfinite(tau) & (tau > 0)).all():
        raise ValueError(f"tau must be finite and positive, got {tau.flatten().tolist()[:4]}")
    # Refuse what would broadcast along the group: a tau for each rollout is not a softmax over the group.
    if tau.ndim > rewards.ndim or any(t not in (1, r) for t, r in zip(tau.shape[::-1], (1, *groups[::-1]))):
        raise ValueError(
            f"tau of shape {tuple(tau.shape)} does not fit rewards of shape {tuple(rewards.shape)}"
        )
    return tau


def _tilt(rewards: Tensor, tau: float | Tensor) -> Tensor:
    """exp((R - max R) / tau), float64: the softmax weights before normalising. The shift keeps tau = 0.001 finite."""
    r = rewards.double()
    return ((r - r.amax(-1, keepdim=True)) / _check_tau(tau, rewards)).exp()


def _centred(rewards: Tensor) -> Tensor:
    """R - mean in float64, with exact zeros for groups of equal rewards (0.1 + 0.1 + 0.1 != 3 * 0.1 in binary)."""
    r = rewards.double()
    equal = r.amax(-1, keepdim=True) == r.amin(-1, keepdim=True)
    return torch.where(equal, 0.0, r - r.mean(-1, keepdim=True))


def _as_input(result: Tensor, rewards: Tensor) -> Tensor:
    return result if rewards.dtype == torch.float64 else result.float()


# ---------------------------------------------------------------------------------------------------------------
# 2. Omega: what the advantages optimise when rewards are binary
# ---------------------------------------------------------------------------------------------------------------
# With reward 1 or 0 and pass rate p, the expected update of a prompt is exactly omega_{M,tau}(p) * grad p (Eq. 4):
# a success beside S other successes earns Delta_S more than a failure would, and omega averages that over
# S ~ Binomial(M-1, p). theory.py derives, checks and draws all of this; the loop below needs none of it.


def prompt_weight(p: float | Tensor, group_size: int, tau: float) -> Tensor:
    """omega_{M,tau}(p) = E_S[Delta_S], S ~ Binomial(M - 1, p): the weight of a prompt with pass rate p (Eq. 4).

    p: any shape, in [0, 1]. Returns float64 of that shape. Bounded: at p = 1 it is 1 - M / (1 + (M-1) c) < 1 (Eq. 17).
    """
    p = _check_probability(p)
    return (_binomial(p, group_size - 1) * _success_gaps(group_size, tau)).sum(-1)


def prompt_objective(p: float | Tensor, group_size: int, tau: float) -> Tensor:
    """h_{M,tau}(p), the objective whose derivative is omega, with h(0) = 0 (Eqs. 15-16). float64, shape of p.

    h(p) = (1/M) sum_{j=1..M} P(Binomial(M, p) = j) sum_{k<j} Delta_k
    """
    p = _check_probability(p)
    partial_sums = _success_gaps(group_size, tau).cumsum(0)  # (M,), entry j-1 is sum_{k<j} Delta_k
    return (_binomial(p, group_size)[..., 1:] * partial_sums).sum(-1) / group_size


def expected_abs_advantage(
    p: float | Tensor, group_size: int, advantages: Callable[[Tensor], Tensor]
) -> Tensor:
    """E_K[(1/M) sum_i |A_i|], K ~ Binomial(M, p): the gradient budget that a prompt of pass rate p receives.

    `advantages` is any function of section 1 with tau filled in. float64, shape of p. theory.py, section 9:
    together with a histogram of pass rates it predicts the paper's Table 3.
    """
    p = _check_probability(p)
    # (M + 1, M): row K has K successes.
    outcomes = torch.ones(group_size + 1, group_size, dtype=torch.float64).tril(-1)
    return (_binomial(p, group_size) * advantages(outcomes).abs().mean(-1)).sum(-1)


PASS_RATE_BINS = (0.0, 0.2, 0.5, 0.7, 0.9, 1.0)  # the paper's: [0,.2) [.2,.5) [.5,.7) [.7,.9) [.9,1]


def share_by_pass_rate(pass_rates: Tensor, amounts: Tensor) -> Tensor:
    """The share of `amounts` that falls in each bin of pass rate: (n,), (n,) -> (5,), sums to 1 (zeros if no amount)."""
    inner_edges = torch.tensor(PASS_RATE_BINS[1:-1], dtype=torch.float64)
    bins = torch.bucketize(pass_rates.double() + 1e-7, inner_edges, right=True)  # 0.9 in float32 is below 0.9
    totals = torch.zeros(len(PASS_RATE_BINS) - 1, dtype=torch.float64).index_add(0, bins, amounts.double())
    return totals / totals.sum().clamp(min=1e-300)


def _success_gaps(group_size: int, tau: float) -> Tensor:
    """Delta_S for S = 0..M-1, float64 (M,).

    Delta_S = M (c-1) (S c + M-1-S) / (D_S D_{S+1}), D_S = S c + M - S, c = exp(1/tau) (Eq. 4). c overflows below
    tau = 0.0015, so divide through by c^2 and use z = 1/c, and -expm1 for 1 - z, which keeps tau = 1000 accurate.
    """
    if int(group_size) != group_size or group_size < 2:
        raise ValueError(f"group_size must be a whole number of at least 2, got {group_size}")
    if not (math.isfinite(tau) and tau > 0):
        raise ValueError(f"tau must be finite and positive, got {tau}")
    z, one_minus_z = math.exp(-1 / tau), -math.expm1(-1 / tau)
    s = torch.arange(group_size, dtype=torch.float64)
    others = group_size - 1 - s
    ratio = (s + others * z) / (s + (others + 1) * z)  # (S c + M-1-S) / D_S
    ratio[0] = (group_size - 1) / group_size  # S = 0: z cancels, also where it has underflowed to 0
    return group_size * one_minus_z * ratio / (s + 1 + others * z)


def _binomial(p: Tensor, n: int) -> Tensor:
    """P(Binomial(n, p) = k) for k = 0..n: (...) -> (..., n + 1), float64; exact zeros and ones at p = 0 and 1."""
    k = torch.arange(n + 1, dtype=torch.float64)
    log_choose = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    p = p[..., None]
    return (log_choose + torch.xlogy(k, p) + torch.special.xlog1py(n - k, -p)).exp()


def _check_probability(p: float | Tensor) -> Tensor:
    p = torch.as_tensor(p, dtype=torch.float64)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"pass rates lie between 0 and 1, got {p.min().item()} to {p.max().item()}")
    return p


# ---------------------------------------------------------------------------------------------------------------
# 3. The surrogate: advantages (N,) and log-probs (N, T) -> a loss to minimise
# ---------------------------------------------------------------------------------------------------------------


def surrogate_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None,
    clip_high: float | None,
    beta: float = 0.0,
    ref_logprobs: Tensor | None = None,
    aggregation: str = "token",
    normalizer: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped, KL-regularised policy loss (Eqs. 10-11) and its diagnostics.

    logprobs, old_logprobs, ref_logprobs: (N, T) log-probs of the sampled tokens under the policy being trained, the
    one that sampled, and the frozen reference. advantages: (N,). mask: (N, T), true on completion tokens; whatever
    stands elsewhere is ignored, NaN included. clip_low and clip_high: the ratio is held in [1 - clip_low,
    1 + clip_high]; None for no bound on that side (both None: the objective of the theorems).

    aggregation, always divided by `normalizer` when one is given:
        "token"     sum over all tokens / number of tokens
        "sequence"  sum over completions of their mean over tokens / number of completions
        "sum"       sum over all tokens / number of completions (the one for which E[update] = omega grad p is exact)
    When a batch is split, give every part the whole batch's count: then the gradients of the parts add up exactly.

    Returns the scalar loss and a dict of detached sums with their counts: add those of several micro-batches
    (`*_max` by maximum), then divide. Raises ValueError for shapes that do not fit.
    """
    if not logprobs.shape == old_logprobs.shape == mask.shape or logprobs.ndim != 2:
        shapes = [tuple(t.shape) for t in (logprobs, old_logprobs, mask)]
        raise ValueError(f"logprobs, old_logprobs and mask must share one shape (N, T), got {shapes}")
    if advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"advantages must have shape ({len(logprobs)},), got {tuple(advantages.shape)}")
    if beta < 0 or (beta > 0 and (ref_logprobs is None or ref_logprobs.shape != logprobs.shape)):
        raise ValueError(
            f"beta is {beta}: it must be >= 0 and, when positive, needs ref_logprobs of shape (N, T)"
        )
    if aggregation not in ("token", "sequence", "sum"):
        raise ValueError(f"aggregation must be 'token', 'sequence' or 'sum', got {aggregation!r}")

    # Mask first, exponentiate after: a padded position with a huge log-ratio would turn 0 * inf into NaN.
    mask = mask.bool()
    logprobs = logprobs.masked_fill(~mask, 0.0)
    log_ratio = logprobs - old_logprobs.masked_fill(~mask, 0.0)  # (N, T)
    # A ratio of 5e8 is lost already, but inf * 0 would lose the whole batch.
    log_ratio = log_ratio.clamp(-20, 20)
    ratio = log_ratio.exp()
    advantages = advantages[:, None]  # (N, 1): every token of a completion shares its advantage

    # L_t = -min(rho_t A, clip(rho_t, 1 - eps_low, 1 + eps_high) A)                                        (Eq. 10)
    low = -math.inf if clip_low is None else 1 - clip_low
    high = math.inf if clip_high is None else 1 + clip_high
    token_loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)

    # + beta KL(pi || ref), per token by the k3 estimator exp(d) - d - 1 >= 0, d = ref - logp                (Eq. 11)
    kl_ref = torch.zeros_like(token_loss)
    if beta > 0:
        difference = ref_logprobs.masked_fill(~mask, 0.0) - logprobs
        kl_ref = difference.exp() - difference - 1
        token_loss = token_loss + beta * kl_ref

    weights = mask.to(token_loss.dtype)  # (N, T)
    tokens_per_row = weights.sum(-1)  # (N,)
    if aggregation == "sequence":
        weights = weights / tokens_per_row.clamp(min=1)[:, None]
    if normalizer is None:
        normalizer = (tokens_per_row.sum() if aggregation == "token" else (tokens_per_row > 0).sum()).clamp(
            min=1
        )
    loss = (token_loss * weights).sum() / normalizer

    with torch.no_grad():  # padded positions have log_ratio 0, ratio 1, KL 0: they add nothing to these sums
        stats = {
            "tokens": tokens_per_row.sum(),
            # Tokens whose gradient the clip removes: the ratio has left the interval on the side A pushes it to.
            "clipped_low": ((ratio < low) & (advantages < 0)).sum(),
            "clipped_high": ((ratio > high) & (advantages > 0)).sum(),
            # k3 estimate of KL(old || pi): how far this batch's updates have moved the policy.
            "kl_old": (ratio - 1 - log_ratio).sum(),
            "kl_ref": kl_ref.sum(),
            "ratio_max": ratio.masked_fill(~mask, 0.0).max() if mask.any() else ratio.new_ones(()),
        }
    return loss, stats


# ---------------------------------------------------------------------------------------------------------------
# 4. Log-probs: sequences (N, L) -> log-probs of their completion tokens (N, T), without ever holding (N, L, V) logits
# ---------------------------------------------------------------------------------------------------------------

# Elements of the logits matrix held at a time, 48 and 256 MiB. (Blocks above 32 MiB go straight back to the system when they
# are freed; smaller ones leave holes in the heap of a CPU process, and its memory grows with the batch after all.)
LOGITS_AT_ONCE = {"cpu": 3 * 2**22, "cuda": 2**26}


def token_logprobs(
    model: torch.nn.Module,
    sequences: Tensor,
    attention_mask: Tensor,
    prompt_lengths: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Float32 log-probs of each completion token under the model at this temperature.

    sequences, attention_mask: (N, L); each row is padding, prompt, completion, padding with the real tokens
    contiguous, so left and right padding both do. prompt_lengths: (N,) real prompt tokens; at least 1.
    Returns (N, T), T the longest completion, zero beyond a row's end.

    A vocabulary of 150,000 makes logits the largest tensor of the training step by far. So: run the transformer,
    keep only the hidden states that predict a completion token, and turn those into log-probs a slice at a time; the
    backward pass recomputes each slice's logits instead of storing them. Temperature is part of the policy: score
    with the one that sampled, or the ratio starts away from 1.
    """
    attention_mask = attention_mask.long()
    first = attention_mask.argmax(-1)  # (N,) index of the first real token: 0 unless padded on the left
    completion_lengths = attention_mask.sum(-1) - prompt_lengths  # (N,)
    offsets = torch.arange(int(completion_lengths.max()), device=sequences.device)  # (T,)
    mask = offsets < completion_lengths[:, None]  # (N, T)
    index = (first + prompt_lengths)[:, None] + offsets  # (N, T) where completion token t stands in its row
    rows = torch.arange(len(sequences), device=sequences.device)[:, None].expand_as(index)
    rows, index = rows[mask], index[mask]  # (K,), (K,): the K real completion tokens of the batch

    # With padding on the right only, causal attention never sees it and positions are 0, 1, 2, ...: the model then needs
    # neither mask nor positions, and its attention takes the fast path.
    padding = {}
    if bool((first > 0).any()):
        padding = {
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        }
    hidden = model.base_model(input_ids=sequences, use_cache=False, **padding).last_hidden_state  # (N, L, H)
    hidden = hidden[rows, index - 1]  # (K, H): position i - 1 predicts token i
    targets = sequences[rows, index]  # (K,)

    def slice_logprobs(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = logits_from_hidden(model, hidden).float()  # (k, V); the softmax in float32, never bfloat16
        if temperature != 1:
            logits = logits / temperature
        return -cross_entropy(logits, targets, reduction="none")  # (k,)

    vocabulary = model.get_output_embeddings().weight.shape[0]
    slice_size = max(1, LOGITS_AT_ONCE[sequences.device.type] // vocabulary)
    slices = list(zip(hidden.split(slice_size), targets.split(slice_size)))
    if len(slices) > 1 and torch.is_grad_enabled():
        parts = [recompute_in_backward(slice_logprobs, h, t, use_reentrant=False) for h, t in slices]
    else:
        parts = [slice_logprobs(h, t) for h, t in slices]
    flat = torch.cat(parts)  # (K,)
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)  # (N, T)


def logits_from_hidden(model: torch.nn.Module, hidden: Tensor) -> Tensor:
    """The model's output head, (..., H) -> (..., V), with what some families do to logits after it."""
    logits = model.get_output_embeddings()(hidden)
    config = model.config.get_text_config()
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = cap * torch.tanh(logits / cap)
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scaling := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scaling
    return logits


@torch.no_grad()
def check_logprobs(model: torch.nn.Module) -> None:
    """Raise ValueError if this model family computes its logits in a way that section 4 does not know."""
    device = next(model.parameters()).device
    ids = torch.arange(1, 9, device=device)[None] % model.get_output_embeddings().weight.shape[0]
    plain = model(input_ids=ids).logits.float().log_softmax(-1)
    plain = plain[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    ours = token_logprobs(model, ids, torch.ones_like(ids), torch.ones(1, dtype=torch.long, device=device))
    if not torch.allclose(plain, ours, atol=1e-2):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output head: add it to logits_from_hidden"
        )


# ---------------------------------------------------------------------------------------------------------------
# 5. Rollouts: prompts -> group_size completions each, by plain sampling (no top-k, no top-p: the policy we score)
# ---------------------------------------------------------------------------------------------------------------


class Policy(NamedTuple):
    """Any Hugging Face causal LM with its tokenizer: from the hub, a folder, or tiny_policy.py."""

    model: Any
    tokenizer: Any


@dataclass
class Rollouts:
    """N = P * M completions, those of one prompt in consecutive rows."""

    sequences: Tensor  # (N, L) prompt + completion, padded on the right
    prompt_lengths: Tensor  # (N,)
    lengths: Tensor  # (N,) completion tokens; the end-of-sequence token, where there is one, is the last
    logprobs: Tensor  # (N, T) at sampling time, zero beyond a row's length (greedy: at temperature 1)
    truncated: Tensor  # (N,) true where the cap came before an end-of-sequence token
    texts: list[str]  # completions as text, special tokens removed

    @property
    def mask(self) -> Tensor:
        """(N, T) true on completion tokens. Made of lengths: where pad == EOS, `ids != pad` would drop the EOS."""
        return torch.arange(self.logprobs.shape[1], device=self.lengths.device) < self.lengths[:, None]


def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, str]]) -> list[int]:
    """Token ids of a prompt, which is a string or chat messages; through the chat template if there is one.

    The template writes its own special tokens, so they are not added a second time. Never truncates.
    """
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        template = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=True)
        try:
            return list(template(messages)["input_ids"])
        except TemplateError:  # Gemma's has no system role: say it as part of the first message
            system, user, *rest = messages
            joined = {"role": "user", "content": f"{system['content']}\n\n{user['content']}"}
            return list(template([joined, *rest])["input_ids"])
    if not isinstance(prompt, str):
        prompt = "".join(message["content"] + "\n\n" for message in prompt)
    ids = list(tokenizer(prompt)["input_ids"])
    # Some tokenizers end every text with EOS; a prompt that has ended cannot be continued.
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids


def end_token_ids(model: torch.nn.Module, tokenizer: Any) -> list[int]:
    """All ids that end a completion: chat models often have two (<|im_end|>, <|endoftext|>)."""
    ids = model.generation_config.eos_token_id
    ids = {ids} if isinstance(ids, int) else set(ids or ())
    return sorted(ids | ({tokenizer.eos_token_id} - {None}))


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: list[str] | list[list[dict[str, str]]],
    group_size: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Rollouts:
    """Sample `group_size` completions of each prompt; temperature 0 is greedy decoding.

    Each prompt is run through the model once and its key-value cache repeated for the group. Rows that have ended
    leave the batch, so late tokens cost only the rows that still write. The generator lives on the model's device.
    """
    model.eval()  # dropout off
    device = next(model.parameters()).device
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    prompt_lengths = torch.tensor([len(ids) for ids in encoded])
    longest = int(prompt_lengths.max())
    ends = torch.tensor(end_token_ids(model, tokenizer), device=device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else int(ends[0]) if len(ends) else 0

    # Prefill once per prompt. Left-padded, so that every row's next token stands in the same column.
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in encoded], device=device)  # (P, S)
    attention = (torch.arange(longest) >= longest - prompt_lengths[:, None]).long().to(device)  # (P, S)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    padded = bool((prompt_lengths < longest).any())  # without padding no mask is needed at all
    mask = attention if padded else None
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache = out.cache
    try:
        cache.batch_repeat_interleave(group_size)
    except AttributeError as error:  # Mamba and its kind
        raise ValueError(
            f"the cache of {type(model).__name__} cannot be shared by a group: take an attention model"
        ) from error
    logits = out.logits[:, -1].repeat_interleave(group_size, 0)  # (N, V), N = P * M
    attention = attention.repeat_interleave(group_size, 0)
    position = prompt_lengths.to(device).repeat_interleave(group_size)  # (N,) of the next token

    total = len(prompts) * group_size
    tokens = torch.full((total, max_new_tokens), pad, device=device)
    logprobs = torch.zeros(total, max_new_tokens, device=device)
    lengths = torch.zeros(total, dtype=torch.long, device=device)
    ended = torch.zeros(total, dtype=torch.bool, device=device)
    rows = torch.arange(total, device=device)  # which rollout each row of the shrinking batch belongs to
    done = torch.zeros(total, dtype=torch.bool, device=device)  # the rows of the batch that have ended
    # Asking how many rows have ended makes a GPU wait for the CPU: there, ask every 16 tokens only.
    ask_every = 16 if device.type == "cuda" else 1
    for step in range(max_new_tokens):
        scaled = (logits.float() / (temperature or 1.0)).log_softmax(-1)  # (n, V)
        if temperature == 0:
            token = scaled.argmax(-1)
        else:
            token = torch.multinomial(scaled.exp(), 1, generator=generator).squeeze(-1)  # (n,)
        tokens[rows, step] = torch.where(done, pad, token)
        logprobs[rows, step] = torch.where(done, 0.0, scaled.gather(-1, token[:, None]).squeeze(-1))
        lengths[rows] += ~done
        done = done | torch.isin(token, ends)
        ended[rows] = done
        if step + 1 == max_new_tokens:
            break
        if step % ask_every == 0 and (num_done := int(done.sum())):
            if num_done == len(rows):
                break
            if 8 * num_done >= len(rows):  # dropping copies the cache: wait until it pays
                keep = (~done).nonzero().squeeze(-1)
                cache.batch_select_indices(keep)
                rows, token, position = rows[keep], token[keep], position[keep]
                attention, done = attention[keep], done[keep]
        if padded:
            attention = torch.cat([attention, attention.new_ones(len(rows), 1)], -1)
        mask = attention if padded else None
        out = model(
            input_ids=token[:, None],
            attention_mask=mask,
            position_ids=position[:, None],
            cache=cache,
            use_cache=True,
        )
        logits, position = out.logits[:, -1], position + 1

    # Put each completion right behind its prompt: padding on the right only, (N, S + T).
    width = int(lengths.max())
    tokens, logprobs = tokens[:, :width], logprobs[:, :width]
    ids = torch.tensor([row + [pad] * (longest + width - len(row)) for row in encoded], device=device)
    prompt_lengths = prompt_lengths.to(device).repeat_interleave(group_size)
    place = prompt_lengths[:, None] + torch.arange(width, device=device)
    sequences = ids.repeat_interleave(group_size, 0).scatter(1, place, tokens)
    completions = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist())]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return Rollouts(sequences, prompt_lengths, lengths, logprobs, ~ended, texts)


# ---------------------------------------------------------------------------------------------------------------
# 6. Evaluation: how often is it right, how broad is it, and where would the gradient go
# ---------------------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """A task is data, a prompt and a reward."""

    name: str
    train: Any  # datasets.Dataset, or a list of rows; rows keep every field that the reward needs
    test: Any
    prompt: Callable[[dict], Any]  # row -> string or chat messages
    reward: Callable[[str, dict], float]  # completion, row -> [0, 1]; pure, never raises, bounded time
    max_new_tokens: int
    demonstrations: list[tuple[str, str]] | None = None  # (prompt, completion): the tiny policy's warm start
    correct: Callable[[str, dict], bool] | None = None  # what pass@k counts; None: a reward of 1
    source: str = ""  # where the data came from: printed and stored
    report: Callable[[list[str], list[dict]], dict[str, float]] | None = None  # what training does not see


def pass_at_k(num_samples: Tensor, num_correct: Tensor, k: int) -> Tensor:
    """Unbiased pass@k, elementwise, float64: 1 - C(n-c, k) / C(n, k), the chance that k of the n samples contain a
    correct one. (1 - (1 - c/n)^k is biased low.) Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    n, c = (torch.as_tensor(x, dtype=torch.float64) for x in (num_samples, num_correct))
    if k < 1 or (n < k).any() or (c < 0).any() or (c > n).any():
        raise ValueError(f"pass@{k} needs 1 <= k <= num_samples and 0 <= num_correct <= num_samples")
    log_none = torch.lgamma(n - c + 1) - torch.lgamma((n - c - k).clamp(min=0) + 1)
    log_none = log_none + torch.lgamma(n - k + 1) - torch.lgamma(n + 1)
    return torch.where(c == 0, 0.0, torch.where(n - c < k, 1.0, -torch.expm1(log_none)))


def mean_interval(values: Tensor) -> list[float]:
    """[mean, low, high] with a 95% interval over prompts. Wilson's for 0/1 values, which does not collapse to a point
    at 0 of n or n of n; otherwise mean +- 1.96 standard errors, within [0, 1] if the values are.
    """
    n, mean, z = len(values), values.double().mean().item(), 1.96
    if ((values == 0) | (values == 1)).all():
        centre, scale = mean + z * z / (2 * n), 1 + z * z / n
        half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    else:
        centre, scale = mean, 1.0
        half = z * values.double().std().item() / math.sqrt(n) if n > 1 else math.inf
    low, high = (centre - half) / scale, (centre + half) / scale
    if ((values >= 0) & (values <= 1)).all():
        low, high = max(0.0, low), min(1.0, high)
    return [mean, low, high]


def score_texts(task: Task, texts: list[str], rows: list[dict], group_size: int) -> tuple[Tensor, Tensor]:
    """Rewards and correctness of the completions of P rows: (P, M), (P, M). ValueError names the prompt of a bad reward."""
    rewards, correct = torch.zeros(2, len(rows), group_size)
    for i, text in enumerate(texts):
        prompt, member = divmod(i, group_size)
        row = rows[prompt]
        reward = task.reward(text, row)
        try:
            value = (
                math.nan if isinstance(reward, str) else float(reward)
            )  # numpy's and torch's numbers are fine
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not abs(value) < 1e30:  # true for NaN as well; larger ones do not fit float32
            raise ValueError(
                f"{task.name}: the reward must be a finite number, got {reward} for {task.prompt(row)!r}"
            )
        rewards[prompt, member] = value
        correct[prompt, member] = float(
            value >= 1 - 1e-6 if task.correct is None else task.correct(text, row)
        )
    return rewards, correct


@torch.no_grad()
def evaluate(
    policy: Policy, task: Task, rows: list[dict], config: Config, reference: Any, generator: torch.Generator
) -> dict[str, Any]:
    """Figures on `rows`: greedy accuracy, and from `config.eval_samples` sampled completions a prompt pass@k and reward,
    each [value, low, high] over prompts; truncated share, mean length, KL(policy || reference) per token (0 without a
    reference), and the gradient budget.
    """
    samples, parts, texts = config.eval_samples, defaultdict(list), []
    at_once = max(1, config.rollout_rows // samples)
    for i in tqdm(range(0, len(rows), at_once), desc="evaluation", unit="batch", leave=False, disable=None):
        some = rows[i : i + at_once]
        prompts = [task.prompt(row) for row in some]
        best = generate(*policy, prompts, 1, task.max_new_tokens, temperature=0)
        parts["greedy"].append(score_texts(task, best.texts, some, 1)[1][:, 0])
        rollouts = generate(*policy, prompts, samples, task.max_new_tokens, config.temperature, generator)
        texts += rollouts.texts
        rewards, correct = score_texts(task, rollouts.texts, some, samples)
        parts["rewards"].append(rewards)
        parts["correct"].append(correct)
        parts["lengths"].append(rollouts.lengths.view(-1, samples).float().cpu())
        parts["truncated"].append(rollouts.truncated.float().cpu())
        everything = torch.arange(0 if reference is None else len(rollouts.lengths))
        for batch in microbatches(everything, rollouts, config.microbatch_tokens):
            log_ratio = score_rollouts(reference, rollouts, batch, config.temperature)
            log_ratio = (
                log_ratio - rollouts.logprobs[batch, : log_ratio.shape[1]]
            )  # 0 on padding, and so is k3
            parts["kl"].append((log_ratio.exp() - log_ratio - 1).sum().cpu())
    whole = {name: torch.cat(part) for name, part in parts.items() if name != "kl"}
    rewards, correct, lengths = whole["rewards"], whole["correct"], whole["lengths"]  # (n, samples) each
    num_samples = torch.full((len(rows),), samples)
    pass_at = {f"pass@{k}": pass_at_k(num_samples, correct.sum(-1), k) for k in (1, 8, 32) if k <= samples}
    report = task.report(texts, [row for row in rows for _ in range(samples)]) if task.report else {}
    means = {"greedy": whole["greedy"], **pass_at, "reward": rewards.mean(-1)}
    return {
        **{name: mean_interval(values) for name, values in means.items()},
        "truncated": whole["truncated"].mean().item(),
        "length": lengths.mean().item(),
        "kl": max(0.0, float(sum(parts["kl"]) / lengths.sum())),  # >= 0 but for rounding
        "budget": gradient_budget(rewards, correct, lengths, config),
        "report": {name: float(value) for name, value in report.items()},
    }


def gradient_budget(
    rewards: Tensor, correct: Tensor, lengths: Tensor, config: Config
) -> dict[str, list[float]]:
    """Where the gradient would go, by pass rate (PASS_RATE_BINS): the protocol behind the paper's Table 3.

    All inputs (n, samples). Each prompt's samples are cut into groups of M; every group in turn makes the advantages,
    and the *other* samples estimate the pass rate, so that luck does not count on both sides. `measured` is the share of
    sum |A| over tokens, `predicted` what expected_abs_advantage makes of the same pass rates, `prompts` their histogram.
    Empty lists when there are fewer than two groups of samples.
    """
    size = config.group_size
    rates, measured, predicted = [], [], []
    for begin in range(0, rewards.shape[1] // size * size if rewards.shape[1] >= 2 * size else 0, size):
        group = slice(begin, begin + size)
        others, successes = correct.shape[1] - size, correct.sum(-1) - correct[:, group].sum(-1)  # (n,)
        rates.append(successes / others)
        measured.append((group_advantages(rewards[:, group], config).abs() * lengths[:, group]).sum(-1))
        # Never failing in 24 tries does not mean never failing: half a success and half a failure more.
        rate = (successes + 0.5) / (others + 1)
        predicted.append(expected_abs_advantage(rate, size, lambda r: group_advantages(r, config)))
    if not rates:
        return {"prompts": [], "measured": [], "predicted": []}
    rate = torch.cat(rates)
    amounts = {"prompts": torch.ones_like(rate), "measured": torch.cat(measured)}
    amounts["predicted"] = torch.cat(predicted)
    return {name: share_by_pass_rate(rate, amount).tolist() for name, amount in amounts.items()}


# ---------------------------------------------------------------------------------------------------------------
# 7. The loop: prompts -> rollouts -> rewards -> advantages -> loss -> step
# ---------------------------------------------------------------------------------------------------------------


def group_advantages(rewards: Tensor, config: Config) -> Tensor:
    """(P, M) -> (P, M) by the algorithm of the settings."""
    if config.algo != "softmax":
        return ADVANTAGES[config.algo](rewards)
    return softmax_advantages(rewards, group_tau(rewards, config))


def group_tau(rewards: Tensor, config: Config) -> float | Tensor:
    """The temperature of the settings: one for all groups, or one per group, (P,), by its effective sample size."""
    return tau_for_ess(rewards, config.target_ess) if config.target_ess else config.tau


def train(policy: Policy, task: Task, config: Config) -> dict[str, Any]:
    """Train the policy in place; returns the figures on the test rows before ("start") and after ("end").

    Config, the run folder, checkpoints and the progress bar live in run.py. Nothing random is kept between steps: a
    step's randomness is a function of (seed, purpose, step) and its prompts of (seed, position), so that resuming needs
    only the weights, the optimiser and the step. Raises ValueError for what cannot work, before any work is done.
    """
    # The plumbing of a run: rows, files, progress. Everything else in this file does without it.
    from run import ProgressBar, RunFolder, check_lengths, check_memory, split_rows, step_metrics

    device = torch.device(config.device)
    if device.type == "cuda":
        check_memory(policy.model.num_parameters(), torch.cuda.get_device_properties(device).total_memory)
    # float32 master weights (an AdamW step of 1e-6 vanishes in bfloat16); eval: no dropout, so that the ratio is 1.
    model = policy.model.float().to(device).eval()
    check_logprobs(model)
    train_rows, validation, test = split_rows(task, config)
    order = epoch_order(len(train_rows), config, 0)
    needed = [
        task.train[train_rows[i]] for i in order[: config.steps * config.prompts]
    ]  # what this run will see
    check_lengths(policy, task, validation + test + needed)

    run = RunFolder(task, config)  # refuses to overwrite; finds the state to resume from
    reference = copy.deepcopy(model).requires_grad_(False)  # the starting policy, for KL
    autocast = nullcontext
    if device.type == "cuda":
        reference.bfloat16()
        autocast = partial(torch.autocast, "cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, weight_decay=0.0, fused=device.type == "cuda"
    )
    run.restore(model, optimizer)
    if run.summary:
        return run.finished()

    def measure(rows: list[dict], name: str, step: int, seconds: dict) -> dict[str, Any]:
        with clock(seconds, "evaluation", device), autocast():
            start = reference if step else None  # before the first step the policy is the reference
            result = evaluate(policy, task, rows, config, start, stream(config, name, step, device))
        return run.show(f"{name} after {step} steps", result)

    if run.step == 0:
        run.start = measure(test, "test", 0, run.seconds)
        run.log({"step": 0, "validation": measure(validation, "validation", 0, run.seconds)})

    with ProgressBar(task, config, run.step) as bar:
        for step in range(run.step, config.steps):
            seconds: dict[str, float] = defaultdict(float)
            rows = [task.train[train_rows[i]] for i in prompt_indices(len(train_rows), config, step)]
            prompts = [task.prompt(row) for row in rows]  # P

            with clock(seconds, "rollout", device), autocast():
                generator = stream(config, "rollout", step, device)
                size, cap = config.group_size, task.max_new_tokens
                rollouts = generate(*policy, prompts, size, cap, config.temperature, generator)
            with clock(seconds, "reward", device):
                rewards, correct = score_texts(task, rollouts.texts, rows, config.group_size)  # (P, M)
            signal = rewards
            if config.random_reward:  # the control: what does training on a coin do?
                signal = torch.randint(0, 2, rewards.shape, generator=stream(config, "coin", step)).float()
            advantages = group_advantages(signal, config)  # (P, M)
            for group in optimizer.param_groups:
                group["lr"] = config.lr * (1 - step / config.steps if config.lr_decay else 1)
            updated = update_policy(
                model, reference, optimizer, rollouts, advantages, config, autocast, seconds
            )

            metrics = {
                "step": step + 1,
                "epoch": (step + 1) * config.prompts / len(train_rows),
                **step_metrics(rollouts, rewards, correct, signal, advantages, config),
                **updated,
                "learning_rate": optimizer.param_groups[0]["lr"],
            }
            last = step + 1 == config.steps
            if last or (step + 1) % config.eval_every == 0:
                metrics["validation"] = measure(validation, "validation", step + 1, seconds)
                run.log_samples(step + 1, prompts, rollouts.texts, rewards, advantages)
            end = measure(test, "test", step + 1, seconds) if last else None
            run.log({**metrics, "seconds": seconds})
            bar.advance(metrics, seconds)
            if last:
                run.finish(policy, optimizer, end)
            elif bar.stop_requested or (step + 1) % config.save_every == 0:
                run.save(policy, optimizer, step + 1)
                bar.stop_if_requested()
    return run.finished()


def update_policy(
    model: Any,
    reference: Any,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    advantages: Tensor,
    config: Config,
    autocast: Callable = nullcontext,
    seconds: dict[str, float] | None = None,
) -> dict[str, float]:
    """`config.updates` optimiser steps on one batch of rollouts, advantages (P, M). Returns metrics over all its tokens."""
    seconds = defaultdict(float) if seconds is None else seconds
    device = rollouts.sequences.device
    advantages = advantages.flatten().to(device)  # (N,)
    mask = rollouts.mask
    # One denominator for the whole batch, so that cutting it into micro-batches changes no gradient.
    normalizer = mask.sum() if config.aggregation == "token" else len(advantages)
    # A row with advantage 0 adds nothing to the gradient (without a KL penalty): leave it out of both passes.
    rows = torch.arange(len(advantages)) if config.beta > 0 else advantages.nonzero().squeeze(-1).cpu()
    batches = microbatches(rows, rollouts, config.microbatch_tokens)
    old, ref = [None] * len(batches), [None] * len(batches)
    with clock(seconds, "score", device), torch.no_grad(), autocast():
        if config.updates > 1:  # with one update the policy still is the one that sampled: the ratio is 1
            old = [score_rollouts(model, rollouts, batch, config.temperature) for batch in batches]
        if config.beta > 0:
            ref = [score_rollouts(reference, rollouts, batch, config.temperature) for batch in batches]

    totals: dict[str, float] = defaultdict(float)
    for _ in range(config.updates if batches else 0):  # no group with signal: no step
        with clock(seconds, "backward", device):
            for batch, old_logprobs, ref_logprobs in zip(batches, old, ref):
                with autocast():
                    logprobs = score_rollouts(model, rollouts, batch, config.temperature)  # (n, T)
                loss, stats = surrogate_loss(
                    logprobs,
                    logprobs.detach() if old_logprobs is None else old_logprobs,
                    advantages[batch],
                    mask[batch, : logprobs.shape[1]],
                    clip_low=config.clip_low,
                    clip_high=config.clip_high,
                    beta=config.beta,
                    ref_logprobs=ref_logprobs,
                    aggregation=config.aggregation,
                    normalizer=normalizer,
                )
                loss.backward()
                for name, value in {"loss": loss.detach(), **stats}.items():
                    totals[name] = max(totals[name], value) if name.endswith("_max") else totals[name] + value
        with clock(seconds, "optimiser", device):
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            if not torch.isfinite(grad_norm):
                raise FloatingPointError("the gradient is not finite: lower --lr and start again")
            totals["grad_norm"] += grad_norm
            optimizer.step()
            optimizer.zero_grad()
    totals = {name: float(value) for name, value in totals.items()}
    count, all_tokens = config.updates, config.updates * float(mask.sum())
    tokens = totals.get("tokens", 0.0) or 1.0
    return {
        "loss": totals.get("loss", 0.0) / count,
        "grad_norm": totals.get("grad_norm", 0.0) / count,  # before clipping
        "kl": totals.get("kl_ref", 0.0) / tokens,
        "kl_old": totals.get("kl_old", 0.0) / tokens,
        "clip_ratio/low_mean": totals.get("clipped_low", 0.0) / all_tokens,
        "clip_ratio/high_mean": totals.get("clipped_high", 0.0) / all_tokens,
        "ratio_max": totals.get("ratio_max", 1.0),
        "trained_tokens": totals.get("tokens", 0.0) / count,
    }


def score_rollouts(model: Any, rollouts: Rollouts, rows: Tensor, temperature: float) -> Tensor:
    """Log-probs (n, T) of some rows of the rollouts, T the longest of them."""
    prompt_lengths, lengths = rollouts.prompt_lengths[rows], rollouts.lengths[rows]
    width = int((prompt_lengths + lengths).max())
    attention_mask = torch.arange(width, device=lengths.device) < (prompt_lengths + lengths)[:, None]
    return token_logprobs(
        model, rollouts.sequences[rows, :width], attention_mask, prompt_lengths, temperature
    )


def microbatches(rows: Tensor, rollouts: Rollouts, max_tokens: int) -> list[Tensor]:
    """Parts of similar length, each of at most `max_tokens` tokens with their padding (and at least one row)."""
    widths = (rollouts.prompt_lengths + rollouts.lengths).cpu()[rows]
    batches: list[list[int]] = []
    for width, row in sorted(zip(widths.tolist(), rows.tolist())):  # ascending: the newest row is the widest
        if not batches or (len(batches[-1]) + 1) * width > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return [torch.tensor(batch) for batch in batches]


def stream(
    config: Config, purpose: str, step: int = 0, device: torch.device | str = "cpu"
) -> torch.Generator:
    """The random stream for one purpose at one step of a run. A replicate differs from its run in all but the split."""
    seed = f"{config.seed}.{config.replicate}" if config.replicate and purpose != "split" else config.seed
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def epoch_order(num_rows: int, config: Config, epoch: int) -> list[int]:
    """The order of the rows in one epoch."""
    return torch.randperm(num_rows, generator=stream(config, "epoch", epoch)).tolist()


def prompt_indices(num_rows: int, config: Config, step: int) -> list[int]:
    """The rows of one step: P consecutive places in the endless sequence of epochs."""
    places = range(step * config.prompts, (step + 1) * config.prompts)
    shuffles = {e: epoch_order(num_rows, config, e) for e in {place // num_rows for place in places}}
    return [shuffles[place // num_rows][place % num_rows] for place in places]


@contextmanager
def clock(seconds: dict[str, float], phase: str, device: torch.device) -> Iterator[None]:
    """Add the seconds spent inside to seconds[phase]. A GPU works behind the program's back: wait for it."""
    began = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began
