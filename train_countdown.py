"""Countdown: combine the given numbers, each exactly once, with + - * / and parentheses, to reach the target.

    python train_countdown.py                      no GPU, no downloads: the tiny policy learns from nothing in minutes
    python train_countdown.py --algo grpo          the same with GRPO's z-score; also maxrl, reinforce
    python train_countdown.py --model DIR_OR_HUB_ID --train-file rows.jsonl      a real language model, your rows
    python train_countdown.py --help               every setting

Read softmax_grpo.py first: this file holds only what is Countdown's own. 1. reward, 2. data, 3. prompt, 4. defaults.
"""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from typing import Any

import datasets

from launch import distinct_rows, imitable, launch, load_rows
from run import Config
from softmax_grpo import Task
from train_textgen import overlap_reward

# --- 1. Reward: 1 for an expression that uses each number once and equals the target, else 0 ---

OPERATIONS = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}
PRECEDENCE = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2}
SIGNS = str.maketrans({"×": "*", "x": "*", "÷": "/", "−": "-"})
LONGEST_ANSWER = 1000  # characters; no honest answer comes near


def countdown_reward(text: str, numbers: list[int], target: int) -> float:
    """1.0 if the answer in `text` is an expression over exactly `numbers` with value `target`, else 0.0.

    The answer is the last <answer> block, or the whole text where there is none; `$...$`, `\\boxed{...}` and a final
    `= target` are allowed. Exact rational arithmetic, no unary sign. Never raises, never evaluates code.
    """
    answer = unwrap(last_answer(text))
    expression, equals, result = answer.partition("=")
    if equals and result.strip() != str(target):
        return 0.0
    if len(answer) > LONGEST_ANSWER or not re.fullmatch(r"[0-9+\-*/()\s]*", expression):
        return 0.0
    tokens = re.findall(r"[0-9]+|[-+*/()]", expression)
    used = sorted(int(token) for token in tokens if token.isdigit())
    return float(used == sorted(numbers) and evaluate_expression(tokens) == target)


def last_answer(text: str) -> str:
    """What stands in the last complete <answer> block, or all of the text if there is none."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end] if begin >= 0 else text


def unwrap(answer: str) -> str:
    answer = answer.strip().strip("$").strip()
    if answer.startswith("\\boxed{") and answer.endswith("}"):
        answer = answer[len("\\boxed{") : -1]
    return answer.translate(SIGNS)


def evaluate_expression(tokens: list[str]) -> Fraction | None:
    """The exact value of an infix expression, None if it is not one. Two stacks, so nesting cannot exhaust recursion."""
    values: list[Fraction] = []
    operators: list[str] = []

    def apply_while(precedence: int) -> None:
        while operators and PRECEDENCE[operators[-1]] >= precedence:
            right, left = values.pop(), values.pop()
            values.append(OPERATIONS[operators.pop()](left, right))

    want_number = True
    try:
        for token in tokens:
            if want_number != (token.isdigit() or token == "("):
                return (
                    None  # two values in a row, an operator or ")" where a value should stand, a unary sign
                )
            if token.isdigit():
                values.append(Fraction(int(token)))
                want_number = False
            elif token == "(":
                operators.append(token)
            elif token == ")":
                apply_while(1)
                if not operators:
                    return None
                operators.pop()
            else:
                apply_while(PRECEDENCE[token])
                operators.append(token)
                want_number = True
        if want_number or "(" in operators:
            return None
        apply_while(1)
    except ZeroDivisionError:
        return None
    return values[0]


# --- 2. Data: the hub's schema (nums, target), or a generator of problems that the tiny policy can learn ---


def random_expression(numbers: list[int], signs: str, chooser: random.Random) -> str:
    """A random expression over the numbers: `9+4`, `(9-4)*3`, `9-(4+3)`, ... Larger numbers come first, so that the many
    ways to write the same sum do not compete for the tiny policy's attention.
    """
    parts = [str(number) for number in sorted(numbers, reverse=True)]
    while len(parts) > 1:
        i = chooser.randrange(len(parts) - 1)
        left, sign, right = parts[i], chooser.choice(signs), parts[i + 1]
        if sign in "*/":
            left, right = (part if part.isdigit() else f"({part})" for part in (left, right))
        elif sign == "-" and not right.isdigit():
            right = f"({right})"
        parts[i : i + 2] = [left + sign + right]
    return parts[0]


def generate_problems(count: int, seed: int) -> datasets.Dataset:
    """`count` different solvable problems: two or three numbers up to 20, + and -. Columns nums, target, solution."""

    def problem(chooser: random.Random) -> dict | None:
        numbers = [chooser.randint(1, 20) for _ in range(chooser.choice((2, 3, 3)))]
        solution = random_expression(numbers, "+-", chooser)
        target = evaluate_expression(re.findall(r"[0-9]+|[-+*/()]", solution))
        return {"nums": numbers, "target": int(target), "solution": solution} if 1 <= target <= 60 else None

    return distinct_rows(problem, lambda row: problem_key(row["nums"], row["target"]), count, seed)


def problem_key(numbers: list[int], target: Any) -> tuple:
    return (*sorted(numbers), int(target))


def read_problem(row: dict) -> tuple[list[int], int] | None:
    """Numbers and target of a row as whole numbers, None if they are not. A CSV holds its list as text: `[1, 2, 3]`."""
    try:
        numbers = json.loads(row["nums"]) if isinstance(row["nums"], str) else row["nums"]
        values = [Fraction(value) for value in (*numbers, row["target"])]
    except (TypeError, ValueError, OverflowError):
        return None
    if len(values) < 2 or any(value.denominator != 1 for value in values):
        return None
    *numbers, target = map(int, values)
    return numbers, target


def demonstrations(rows: datasets.Dataset, quality: float, seed: int) -> list[tuple[str, str]]:
    """What the tiny policy imitates first: a share `quality` of solutions, the rest random expressions of the same numbers.

    Every problem comes four times, its numbers in a fresh order each time.
    """
    chooser = random.Random(seed)
    pairs = []
    for row in [*rows] * 4:
        shown = {**row, "nums": chooser.sample(row["nums"], len(row["nums"]))}
        right = chooser.random() < quality
        pairs.append(
            (plain_prompt(shown), row["solution"] if right else random_expression(row["nums"], "+-", chooser))
        )
    return pairs


# --- 3. Prompt ---


def plain_prompt(row: dict) -> str:
    """For the tiny policy: `3,7,9=19:`, to be answered by the bare expression."""
    return f"{','.join(map(str, row['nums']))}={row['target']}:"


def chat_prompt(row: dict) -> list[dict[str, str]]:
    question = (
        f"Numbers: {', '.join(map(str, row['nums']))}. Target: {row['target']}.\n"
        "Write one arithmetic expression with the value of the target. Use every number exactly once, and nothing but "
        "+, -, *, / and parentheses. Think inside <think> </think> tags, then give only the expression inside "
        "<answer> </answer> tags, for example <answer>(1 + 2) * 3</answer>."
    )
    return [
        {
            "role": "system",
            "content": "You are a helpful assistant. You think a problem through before you answer it.",
        },
        {"role": "user", "content": question},
    ]


# --- 4. The task and its defaults ---

PRESETS = {
    "countdown": {
        "cpu": {"steps": 250, "prompts": 32, "lr": 3e-4, "warm_start_steps": 600, "warm_start_quality": 0.4,
                "eval_prompts": 96, "eval_samples": 32},
        # The paper's: Qwen2.5-1.5B, lr 1e-6 constant, clip 0.20 / 0.28, KL 1e-3, token mean, tau 0.1, M 8, 64 prompts.
        "gpu": {
            "model": "Qwen/Qwen2.5-1.5B-Instruct", "steps": 2000, "prompts": 64, "lr": 1e-6, "lr_decay": False, "beta": 1e-3,
            "rollout_rows": 512, "microbatch_tokens": 8192, "eval_every": 100, "save_every": 100,
        },
    }
}  # fmt: skip


def build_task(config: Config) -> Task:
    sim = config.reward == "sim"
    train, test, source = load_rows(
        config,
        columns=["nums", "target", *(["solution"] if sim else [])],
        hub=("Jiayi-Pan/Countdown-Tasks-3to4", None),
        key=lambda row: str(problem_key(*read_problem(row))),
        offline=lambda: generate_problems(4000, config.seed),
        keep=lambda row: read_problem(row) is not None,
    )
    others = [name for name in train.column_names if name not in ("nums", "target")]
    train, test = (
        datasets.Dataset.from_list(
            [
                dict(zip(("nums", "target"), read_problem(row))) | {name: row[name] for name in others}
                for row in rows
            ]
        )
        for rows in (train, test)
    )
    tiny = config.model == "tiny"
    can_demonstrate = tiny and "solution" in train.column_names

    def verify(text: str, row: dict) -> float:
        return countdown_reward(text, row["nums"], row["target"])

    def similarity(text: str, row: dict) -> float:
        return overlap_reward(text, row["solution"])

    return Task(
        name="countdown",
        train=train,
        test=test,
        prompt=plain_prompt if tiny else chat_prompt,
        reward=similarity if sim else verify,
        correct=lambda text, row: verify(text, row) == 1,
        max_new_tokens=config.max_new_tokens or (16 if tiny else 256),
        demonstrations=demonstrations(imitable(train, config), config.warm_start_quality, config.seed)
        if can_demonstrate
        else None,
        source=source,
    )


TASKS = {"countdown": build_task}

if __name__ == "__main__":
    launch(TASKS, PRESETS, __doc__)
