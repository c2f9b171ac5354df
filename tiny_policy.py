"""The embedded policy: a Llama of under a million weights with its own tokenizer, for machines with no GPU and no hub.

It is an ordinary LlamaForCausalLM with an ordinary PreTrainedTokenizerFast, so the core cannot tell it from a model off
the hub. It starts from nothing, and RL needs something to choose from: so it is first warm-started by supervised
learning on demonstrations *of mixed quality*. A share of them is right, the others are well formed but wrong (the task's
script makes them). The policy learns the format and imitates the mixture; RL then has wrong answers to remove. Part of
what RL adds is therefore sharpening, which is why the summary shows greedy accuracy and pass@8 of the warm start too.

    tokenizer = make_tokenizer(texts)              every word, number and sign that occurs in the texts
    policy    = warm_start(demonstrations, ...)    a trained Policy, ready for `train`
"""

from __future__ import annotations

import random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from softmax_grpo import Policy, encode_prompt

# A token is a word with the space before it, a whole number, a line break, a space, or any other single character.
# Glued together again, tokens give back the text exactly.
PIECES = Regex(r" ?[A-Za-z]+|\d+|\n|.")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A word-level tokenizer that knows every piece of the texts; anything else becomes <unk>."""
    splitter = pre_tokenizers.Split(PIECES, behavior="isolated")
    pieces = {piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)}
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "<eos>", "<unk>", *sorted(pieces)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(tokenizer: PreTrainedTokenizerFast, context: int, seed: int) -> LlamaForCausalLM:
    """A fresh Llama: width 128, 3 layers, 4 heads, about 0.6 million weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def warm_start(
    demonstrations: list[tuple[str, str]],
    steps: int,
    max_new_tokens: int,
    seed: int,
    batch_size: int = 64,
    lr: float = 2e-3,
) -> Policy:
    """Train a fresh tiny policy on (prompt, completion) pairs: AdamW, the loss on completion tokens, the learning rate
    falling to 0 over the second half. Deterministic for a given seed.
    """
    if not demonstrations:
        raise ValueError(
            "the tiny policy needs demonstrations for its warm start; for this data, give --model"
        )
    tokenizer = make_tokenizer([text for pair in demonstrations for text in pair])
    prompts = [encode_prompt(tokenizer, prompt) for prompt, _ in demonstrations]
    completions = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for _, text in demonstrations]
    # Rows for RL may be longer than the longest demonstration. Llama's rotary positions need no weights: room is free.
    context = 2 * (max(map(len, prompts)) + max(max_new_tokens, *map(len, completions)))
    model = make_model(tokenizer, context, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    chooser = random.Random(seed)
    for step in tqdm(range(steps), desc="warm start", unit="step"):
        batch = [chooser.randrange(len(prompts)) for _ in range(batch_size)]
        width = max(len(prompts[i]) + len(completions[i]) for i in batch)
        ids = torch.full((batch_size, width), tokenizer.pad_token_id)
        labels = torch.full((batch_size, width), -100)  # what the loss ignores: prompts and padding
        for row, i in enumerate(batch):
            start, end = len(prompts[i]), len(prompts[i]) + len(completions[i])
            ids[row, :end] = torch.tensor(prompts[i] + completions[i])
            labels[row, start:end] = ids[row, start:end]
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, 2 * (1 - step / steps))
        loss = model(
            input_ids=ids, labels=labels
        ).loss  # padding stands on the right: causal attention never sees it
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return Policy(model.eval(), tokenizer)
