"""How fast, against the obvious way to do it, on this machine: the ratios that the README quotes.

    OMP_NUM_THREADS=1 python benchmark.py            all three, about four minutes; one thread gives the steadiest ratios
    python benchmark.py rollouts|step|memory         one of them

Both ways of a comparison run in turn in one process, several times; the median of the ratios is printed with its range.
That the results are equal is tested (test_softmax_grpo.py); here only time and memory are measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import softmax_grpo as core
import tiny_policy
import train_countdown
from run import Config

ROUNDS = 7


def compare(label: str, ours: Callable[[], float], theirs: Callable[[], float]) -> None:
    """Each returns a rate (higher is better); one round of both warms up, the others count."""
    pairs = [(ours(), theirs()) for _ in range(ROUNDS + 1)][1:]
    ratios = [a / b for a, b in pairs]
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    rates = " ".join(f"{statistics.median(rates):,.1f}" for rates in zip(*pairs))
    print(f"{label}: {middle:.2f}x [{low:.2f}, {high:.2f}] in {ROUNDS} rounds (rates {rates})", flush=True)


# --- Rollouts: our loop against model.generate, same model, prompts, batch, temperature ---


def rollouts(device: str) -> None:
    problems = train_countdown.generate_problems(600, seed=0)
    demonstrations = train_countdown.demonstrations(problems, 0.4, seed=0)
    model, tokenizer = tiny_policy.warm_start(demonstrations, 150, 64, seed=0)
    model.to(device)
    prompts = [train_countdown.plain_prompt(row) for row in problems.select(range(32))]
    encoded = [core.encode_prompt(tokenizer, prompt) for prompt in prompts for _ in range(8)]
    width = max(map(len, encoded))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded], device=device)
    generator = torch.Generator(device)

    for label, cap in (("rollouts, real lengths (cap 16)", 16), ("rollouts, no early ends, 48 tokens", 48)):
        ends = [] if cap == 48 else [tokenizer.eos_token_id]
        model.generation_config.eos_token_id = ends or None
        plain = tokenizer if ends else NoEnd(tokenizer)

        def ours(cap: int = cap, plain: object = plain) -> float:
            begin = time.perf_counter()
            out = core.generate(model, plain, prompts, 8, cap, 1.0, generator)
            return int(out.lengths.sum()) / (time.perf_counter() - begin)

        def theirs(cap: int = cap, ends: list[int] = ends) -> float:
            begin = time.perf_counter()
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": pad}
            out = model.generate(ids, attention_mask=mask, max_new_tokens=cap, **options)[:, width:]
            seconds = time.perf_counter() - begin
            end = ends[0] if ends else -1
            lengths = ((out == end).cumsum(-1) - (out == end).long() == 0).sum(
                -1
            )  # up to and including the first end
            return int(lengths.sum()) / seconds

        compare(label, ours, theirs)


class NoEnd:
    """A tokenizer that names no end token, so that no row ends early."""

    def __init__(self, tokenizer: object) -> None:
        self.tokenizer, self.eos_token_id = tokenizer, None

    def __getattr__(self, name: str) -> object:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str) -> object:
        return self.tokenizer(text)


# --- The training step: micro-batches by length, only rows with signal, sliced log-probs, against the naive step ---


def step(device: str) -> None:
    """128 completions, 16 groups of 8, of which half carry no signal (as an independent replication on GSM8K found); lengths
    are spread as a language model's are. A Llama of 20 million weights with a vocabulary of 49,152.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = (
        LlamaForCausalLM(LlamaConfig(vocab_size=49152, tie_word_embeddings=True, **sizes)).eval().to(device)
    )
    lengths = (8 + torch.distributions.Exponential(1 / 40.0).sample((128,))).long().clamp(max=160)
    prompt_lengths = torch.randint(20, 40, (16,)).repeat_interleave(8)
    width = int((lengths + prompt_lengths).max())
    sequences = torch.randint(0, 49152, (128, width))
    on_device = (x.to(device) for x in (sequences, prompt_lengths, lengths))
    sequences, prompt_lengths, lengths = on_device
    batch = core.Rollouts(
        sequences,
        prompt_lengths,
        lengths,
        torch.zeros(128, int(lengths.max()), device=device),
        lengths < 0,
        [],
    )
    rewards = (torch.rand(16, 8) < 0.5).float()
    rewards[::2] = 0.0
    advantages = core.softmax_advantages(rewards, 0.1)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.0
    )  # both ways only differ in how the gradient is made
    config = Config(microbatch_tokens=2048, max_grad_norm=1e9)

    def ours() -> float:
        begin = time.perf_counter()
        core.update_policy(model, model, optimizer, batch, advantages, config)
        return 1 / (time.perf_counter() - begin)

    def naive() -> float:
        begin = time.perf_counter()
        mask = batch.mask.to(device)
        total = mask.sum()
        rows_at_once = max(
            1, 2048 // width
        )  # the same memory for activations: all rows padded to the longest
        for rows in torch.arange(128).split(rows_at_once):
            attention = torch.arange(width, device=device) < (prompt_lengths + lengths)[rows, None]
            logits = model(input_ids=sequences[rows], attention_mask=attention.long()).logits.float()
            logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, sequences[rows, 1:, None])[..., 0]
            place = torch.arange(1, width, device=device)
            inside = (place >= prompt_lengths[rows, None]) & (place < (prompt_lengths + lengths)[rows, None])
            ratio = (logprobs - logprobs.detach()).exp()
            weighted = ratio * advantages.flatten().to(device)[rows, None] * inside
            (-weighted.sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1 / (time.perf_counter() - begin)

    global ROUNDS
    ROUNDS, kept = 3, ROUNDS
    compare("training step", ours, naive)
    ROUNDS = kept


# --- Memory of scoring with a vocabulary of 151,936, forward and backward ---


def memory(device: str) -> None:
    used = {}
    for way in ("ours", "full logits"):  # each in a process of its own: the peak of a process never falls
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            used[way] = pool.apply(peak_memory, (way, device))
    ratio = used["full logits"] / used["ours"]
    print(f"memory of token_logprobs, 1024 tokens, forward and backward: {used['ours']:.0f} MiB, "
          f"full logits {used['full logits']:.0f} MiB: 1/{ratio:.1f}")  # fmt: skip


def peak_memory(way: str, device: str) -> float:
    """MiB at the peak beyond the model and its gradient."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = (
        LlamaForCausalLM(LlamaConfig(vocab_size=151936, tie_word_embeddings=True, **sizes)).eval().to(device)
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(0, 151936, (16, 80), device=device)
    prompt_lengths = torch.full((16,), 16, device=device)

    model(input_ids=ids[:1, :4]).logits.sum().backward()  # whatever is allocated once
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts again from here
        before = memory_status("VmRSS")
    if way == "ours":
        core.token_logprobs(model, ids, torch.ones_like(ids), prompt_lengths).sum().backward()
    else:
        logits = model(input_ids=ids).logits.float()
        logits[:, 15:-1].log_softmax(-1).gather(-1, ids[:, 16:, None]).sum().backward()
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.startswith("cuda") else memory_status("VmHWM")
    return peak - before


def memory_status(name: str) -> float:
    """A figure of /proc/self/status in MiB: VmRSS, memory in use; VmHWM, its peak."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"rollouts": rollouts, "step": step, "memory": memory}
    parser.add_argument("part", nargs="*", choices=[*parts, []], help="what to measure (default: all)")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(f"{arguments.device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in arguments.part or parts:
        parts[name](arguments.device)
