"""GSM8K and DeepMath: worked answers to mathematical questions, checked by their final value.

    python train_gsm8k.py                          no GPU, no downloads: the tiny policy learns word problems in minutes
    python train_gsm8k.py --task deepmath          short exact-answer mathematics in LaTeX, likewise
    python train_gsm8k.py --model DIR_OR_HUB_ID --train-file train.jsonl --test-file test.jsonl     a language model, your rows
    python train_gsm8k.py --reward sim             train on the overlap with the reference solution; accuracy is still shown
    python train_gsm8k.py --help                   every setting

Read softmax_grpo.py first: this file holds only what is these tasks' own. 1. reward of GSM8K, 2. reward of DeepMath,
3. data and demonstrations of GSM8K, 4. of DeepMath, 5. prompts, 6. the tasks and their defaults.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import math
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction

import datasets

from launch import distinct_rows, imitable, launch, load_rows, read_file
from run import Config
from softmax_grpo import Task
from train_textgen import overlap_reward

# --- 1. Reward of GSM8K: 1 for a last marked answer (#### or \boxed) of exactly the right value, else 0 ---

LONGEST_ANSWER = 1000  # characters; no honest answer comes near
FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|([0-9])\s*([0-9]))")
DECORATION = re.compile(r"\\(?:text\w*|math\w*|left|right|quad|[\\,;:()\[\]$% ])|[*_`$€£¥₹~{}]")
NUMBER = re.compile(
    r"[\s(=:]*(?P<sign>[-+]?)\s*(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?P<decimals>\.[0-9]+)?(?:\s*/\s*(?P<below>[0-9]+))?"
    # What follows may be a unit or a full stop, but not the rest of a longer number, list, range or formula.
    r"(?![.,]?[0-9]|\s+[0-9]|\s*[-+/×x·^=:,]\s*[.0-9(]|[eE][-+]?[0-9]|\s*\\)"
)


def extract_answer(text: str) -> Fraction | None:
    """The exact value of the last marked answer, `#### 18` or `\\boxed{18}`, whichever comes later; None if it is no number.

    Thousands commas, currencies, a percent sign, bold type, units after the number, decimals and fractions are read;
    lists, ranges and formulas are not. Never raises; linear time.
    """
    begin = text.rfind("####")
    boxes = find_boxes(text)
    if boxes and boxes[-1][0] > begin:
        answer = text[slice(*boxes[-1])]
    elif begin >= 0:
        answer = text[begin + len("####") :].split("\n", 1)[0]
    else:
        return None
    return read_number(answer[: LONGEST_ANSWER + 1])


def read_number(answer: str) -> Fraction | None:
    answer = answer.replace("−", "-").replace("{,}", ",").replace("\\!", "")
    if "\\" in answer:
        answer = FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]} ", answer)
        answer = answer.replace("\\times", "x").replace("\\cdot", "x")
    match = NUMBER.match(DECORATION.sub(" ", answer))
    if not match or not (match["whole"] or match["decimals"]) or match.end() > LONGEST_ANSWER:
        return None
    below = int(match["below"] or 1)
    if below == 0:
        return None
    whole = (match["whole"] or "0").replace(",", "")
    value = Fraction(whole + match["decimals"]) if match["decimals"] else Fraction(int(whole))
    return (-value if match["sign"] == "-" else value) / below


def find_boxes(text: str) -> list[tuple[int, int]]:
    """Where the contents of all closed `\\boxed{...}` begin and end, by their begin. One pass, whatever the nesting."""
    if "\\boxed" not in text:
        return []
    found, open_braces = [], []
    for match in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if match[0] == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None:
                found.append((begin, match.start()))
        elif match[0].endswith("{") and match[0] != "\\{":
            open_braces.append(match.end() if match[0] != "{" else None)
    return sorted(found)


def gsm8k_reward(text: str, answer: str) -> float:
    """1.0 if the last marked answer of `text` equals that of `answer` (a row's `... #### 18`, or a bare `18`), else 0.0."""
    gold = gold_value(answer)
    return float(gold is not None and extract_answer(text) == gold)


@functools.lru_cache(maxsize=100_000)
def gold_value(answer: str) -> Fraction | None:
    return extract_answer(answer if "####" in answer or "\\boxed" in answer else f"#### {answer}")


# --- 2. Reward of DeepMath: math-verify decides whether two answers are the same mathematics ---

SECONDS_PER_CHECK = 1.0
EXACT_NUMBER = r"-?(?:[0-9]{1,18}(?:/[0-9]{1,18})?|\\frac\{-?[0-9]{1,18}\}\{[0-9]{1,18}\})"
EXACT_ANSWER = re.compile(rf"(\\\{{|[(\[])?({EXACT_NUMBER}(?:,{EXACT_NUMBER}){{0,20}})(\\\}}|[)\]])?")


def deepmath_reward(text: str, answer: str) -> float:
    """1.0 if the answer in `text` is mathematically equal to the gold `answer`, else 0.0.

    Only the last boxed answer counts where there is one (boxes side by side, `\\boxed{1}, \\boxed{2}`, are one answer);
    otherwise math-verify searches the end of the text. Never raises; about a second at most, on any thread.
    """
    gold = answer.strip().strip("$")
    boxes = find_boxes(text)
    given = ""
    for (begin, end), following in zip(reversed(boxes), [None, *reversed(boxes)]):
        between = text[end + 1 : following[0]] if following else ""
        if following and not re.fullmatch(r"[\s$.,;]{0,9}(?:and|or)?[\s$]{0,9}\\boxed\s?\{", between[:40]):
            break
        given = f"{text[begin:end]}, {given}" if following else text[begin:end]
        if len(given) > LONGEST_ANSWER:
            break
    if not boxes:
        given = text[-LONGEST_ANSWER:].strip()
    if not gold or not given or max(len(gold), len(given)) > LONGEST_ANSWER:
        return 0.0
    # Most answers are the same string or plain numbers: a microsecond instead of math-verify's hundredths of a second.
    plain_gold, plain_given = plain_answer(gold), plain_answer(given)
    if plain_gold == plain_given:
        return 1.0
    values = exact_value(plain_gold), exact_value(plain_given)
    if None not in values and type(values[0]) is type(values[1]):
        return float(values[0] == values[1])
    return float(math_equal(gold, given, bool(boxes)))


def plain_answer(answer: str) -> str:
    """The answer without what is only typography."""
    answer = re.sub(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:!]|\$", "", answer.replace("−", "-"))
    answer = re.sub(r"\\text\{([^{}]*)\}", r"\1", re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", answer))
    return re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", answer).removesuffix(".")


def exact_value(answer: str) -> Fraction | frozenset | tuple | str | None:
    """A number, a set `\\{1,2\\}`, an interval `(1,2]` or yes/no as a Python value; None for all else."""
    if answer.lower() in ("yes", "no", "true", "false"):
        return answer.lower()
    match = EXACT_ANSWER.fullmatch(answer)
    if not match:
        return None
    numbers = [
        re.sub(r"\\frac\{(-?)([0-9]+)\}\{([0-9]+)\}", r"\1\2/\3", number).replace("--", "")
        for number in match[2].split(",")
    ]
    if any(re.search(r"/0*$", number) for number in numbers):  # division by zero
        return None
    values = [Fraction(number) for number in numbers]
    if (match[1], match[3]) == ("\\{", "\\}"):
        return frozenset(values)
    if match[1] in ("(", "[") and match[3] in (")", "]") and len(values) == 2:
        return (match[1], *values, match[3])
    return values[0] if not match[1] and not match[3] and len(values) == 1 else None


def serve_checks(seconds: float) -> None:
    """The program of the checking process: lines of JSON in, `1` or `0` out. Each check runs in a fork of its own, which the
    kernel's alarm ends even inside a computation in C; so a hostile answer costs its second and harms nobody else.
    """
    import gc
    import json
    import logging
    import os
    import resource
    import signal
    import sys

    from math_verify import LatexExtractionConfig, parse, verify

    def equal(gold: str, given: str, boxed: bool) -> bool:
        kinds = {"extraction_config": [LatexExtractionConfig(boxed_match_priority=0)]} if boxed else {}
        target = parse(f"\\boxed{{{given}}}" if boxed else given, parsing_timeout=None, **kinds)
        return verify(parse(f"\\boxed{{{gold}}}", parsing_timeout=None), target, timeout_seconds=None)

    logging.disable(logging.CRITICAL)  # it warns that its own time-outs, by signals in our process, are off
    for gold, given in (("12x^3", "11x^3"), ("(1,\\pi)", "[1,3]"), ("\\frac{1}{2}", "0.5")):
        equal(gold, given, True)  # the first checks load tables; every fork then finds them loaded
    try:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # bytes
    except (ValueError, OSError):  # some systems cannot limit memory
        pass
    gc.freeze()
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # nobody handles this signal, so it ends the fork
            verdict = False
            try:
                verdict = equal(*json.loads(line))
            finally:
                os._exit(0 if verdict else 1)
        print(int(os.waitpid(child, 0)[1] == 0), flush=True)


@functools.cache
def checking_process() -> subprocess.Popen:
    # Only the source of that one function, so that the process does without torch. A session of its own: Ctrl-C is not for it.
    program = f"{inspect.getsource(serve_checks)}\nserve_checks({SECONDS_PER_CHECK})"
    process = subprocess.Popen(
        [sys.executable, "-c", "from __future__ import annotations\n" + program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    atexit.register(end_process, process)
    return process


def end_process(process: subprocess.Popen) -> None:
    with contextlib.suppress(OSError):
        process.stdin.close()  # its loop ends
    process.stdout.close()
    process.wait()


CHECKING = threading.Lock()  # one question at a time


@functools.lru_cache(maxsize=100_000)
def math_equal(gold: str, given: str, boxed: bool) -> bool:
    """math-verify's verdict. A process that has died, or that an interruption left with an open question, is replaced."""
    for _ in range(2):
        with CHECKING:
            process, reply = checking_process(), ""
            try:
                process.stdin.write(json.dumps([gold, given, boxed]) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except OSError:
                pass
            finally:
                if not reply:
                    checking_process.cache_clear()
                    end_process(process)
            if reply:
                return reply == "1\n"
    return False


# --- 3. Data of GSM8K: the hub's schema (question, answer), or a generator of problems that the tiny policy can learn ---

PEOPLE = {"Mia": "She", "Ben": "He", "Ada": "She", "Sam": "He", "Eva": "She", "Tom": "He"}
THINGS = ("apples", "pens", "books", "cards", "coins", "shells", "stamps", "marbles")
SENTENCES = {
    "+": ("{who} buys {n}.", "{who} finds {n}.", "{friend} brings {n}."),
    "-": ("{who} loses {n}.", "{who} sells {n}.", "{friend} takes {n}."),
    "*": ("{who} trades each for {n}.", "{who} {times} them."),
    "/": ("{who} keeps one in {n}.", "{who} splits them {n} ways."),
}
DISTRACTORS = ("{who} also has {n} {others}.", "{who} is {n} years old.", "It takes {n} minutes.")
EQUATION = re.compile(r"([0-9]+)([-+*/])([0-9]+)=([0-9]+)")
OPERATIONS: dict[str, Callable[[int, int], int | Fraction]] = {
    "+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": Fraction,
}  # fmt: skip


def word_problem(chooser: random.Random) -> dict[str, str]:
    """One problem of two to four steps over whole numbers up to 20, in GSM8K's schema; one in five has a number too many."""
    person, friend = chooser.sample(sorted(PEOPLE), 2)
    thing, others = chooser.sample(THINGS, 2)
    steps = chooser.choices((2, 3, 4), (16, 3, 1))[0]
    names = {"who": PEOPLE[person], "friend": friend, "others": others}
    working: list[str] = []
    if chooser.random() < 0.3:
        bags, each = chooser.randint(2, 4), chooser.randint(2, 5)
        story, value = [f"{person} buys {bags} bags of {each} {thing}."], bags * each
        working.append(f"{bags}*{each}={value}")
    else:
        value = chooser.randint(2, 12)
        story = [f"{person} has {value} {thing}."]
    while len(working) < steps:
        sign = chooser.choice("++--*/")
        n = chooser.randint(1, 9) if sign in "+-" else chooser.randint(2, 3)
        result = OPERATIONS[sign](value, n)
        if result == int(result) and 1 <= result <= 20:
            times = "doubles" if n == 2 else "triples"
            story.append(chooser.choice(SENTENCES[sign]).format(n=n, times=times, **names))
            working.append(f"{value}{sign}{n}={int(result)}")
            value = int(result)
    if steps == 2 and chooser.random() < 0.25:
        distractor = chooser.choice(DISTRACTORS).format(n=chooser.randint(1, 9), **names)
        story.insert(chooser.randint(1, len(story)), distractor)
    question = f"{' '.join(story)} How many {thing} now?"
    return {"question": question, "answer": "\n".join([*working, f"#### {value}"])}


def plain_working(answer: str) -> str:
    """A worked answer without the calculator annotations `<<48/2=24>>` of the original data."""
    return re.sub(r"<<[^<>]*>>", "", answer)


def corrupted_working(answer: str, chooser: random.Random) -> str:
    """The worked answer with the wrong operation in one step. What follows is computed from the wrong result, so that the
    working stays well formed, but its final value differs. (Where no step can be changed so, only the final value is.)
    """
    working, _, final = plain_working(answer).rpartition("####")
    equations = list(EQUATION.finditer(working))
    choices = [(step, sign) for step in range(len(equations)) for sign in OPERATIONS]
    for wrong_step, wrong_sign in chooser.sample(choices, len(choices)):
        results: dict[str, str] = {}  # of the right working -> of the wrong one
        parts, place = [], 0
        for step, equation in enumerate(equations):
            left, sign, right, result = equation.groups()
            if left in results:
                left = results[left]
            else:
                right = results.get(right, right)
            sign = wrong_sign if step == wrong_step else sign
            value = None if (sign, right) == ("/", "0") else OPERATIONS[sign](int(left), int(right))
            if value is None or value != int(value) or not 1 <= value <= 50:
                break
            results[result] = str(int(value))
            parts += [working[place : equation.start()], f"{left}{sign}{right}={int(value)}"]
            place = equation.end()
        else:
            wrong = results.get(final.strip(), final.strip())
            if wrong != final.strip():
                return f"{''.join(parts)}{working[place:]}#### {wrong}"
    value = extract_answer(answer)
    return f"{working}#### {0 if value is None else value + 1}"


# --- 4. Data of DeepMath: the hub's schemas (question, final_answer) and (prompt, solution), or short exact-answer questions ---


def question_text(row: dict) -> str:
    if "question" in row:
        return row["question"]
    prompt = row["prompt"]  # a string, or chat messages of which the last is the user's
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def final_answer(row: dict) -> str:
    answer = row["final_answer"] if "final_answer" in row else row["solution"]
    return "" if answer is None else str(answer).strip().strip("$").strip()


def latex_fraction(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


PROPER_FRACTIONS = sorted({Fraction(a, b) for b in range(2, 6) for a in range(1, b)})
# kind: (values of each parameter, parameters -> question and solutions: the right one, then ones with a typical slip)
QUESTIONS: dict[str, tuple[tuple[Sequence, ...], Callable[..., list]]] = {
    "fractions": (
        (PROPER_FRACTIONS, PROPER_FRACTIONS, "+-"),
        lambda p, q, sign: [f"Compute {p}{sign}{q}.", add_fractions(p, q, sign), add_fractions(p, q, "-" if sign == "+" else "+")],
    ),
    "linear equations": (
        (range(2, 5), range(1, 10), range(1, 10)),
        lambda a, x, b: [
            f"Solve {a}x+{b}={a * x + b}.",
            (f"{a}x={a * x}", f"{x}"),
            (f"{a}x={a * x}", f"{a * x}"),
            (f"{a}x={a * x + b}", latex_fraction(Fraction(a * x + b, a))),
        ],
    ),
    "quadratic equations": (
        (range(1, 7), range(6)),
        lambda r, gap: [
            f"Solve x^2-{2 * r + gap}x+{r * (r + gap)}=0.",
            (f"(x-{r})(x-{r + gap})=0", f"\\{{{r},{r + gap}\\}}" if gap else f"\\{{{r}\\}}"),
            (f"(x+{r})(x+{r + gap})=0", f"\\{{{-r},{-r - gap}\\}}" if gap else f"\\{{{-r}\\}}"),
        ],
    ),
    "derivatives": (
        (range(2, 5), range(1, 10), range(1, 5)),
        lambda a, b, x: [
            f"Let f(x)={a}x^2+{b}x. Find f'({x}).",
            (f"{2 * a}*{x}+{b}={2 * a * x}+{b}", f"{2 * a * x + b}"),
            (f"{a}*{x}+{b}={a * x}+{b}", f"{a * x + b}"),
            (f"{2 * a}*{x}={2 * a * x}", f"{2 * a * x}"),
        ],
    ),
    "powers": (
        (range(2, 5), range(2, 4), range(1, 10)),
        lambda a, n, b: [
            f"Compute {a}^{n}+{b}.",
            (f"{a**n}+{b}", f"{a**n + b}"),
            (f"{a * n}+{b}", f"{a * n + b}"),
            (f"{a ** (n + 1)}+{b}", f"{a ** (n + 1) + b}"),
        ],
    ),
    "modular arithmetic": (
        (range(1, 11), range(1, 11), range(3, 7)),
        lambda a, b, m: [
            f"Find ({a}+{b}) mod {m}.",
            (f"{a + b}={(a + b) // m}*{m}+{(a + b) % m}", f"{(a + b) % m}"),
            (f"{a + b}={(a + b) // m}*{m}+{(a + b) % m}", f"{(a + b) // m}"),
            (f"{a + b}", f"{a + b}"),
        ],
    ),
    "yes or no": (
        (range(6, 41), range(2, 7)),
        lambda n, m: [
            f"Does {m} divide {n}?",
            (f"{n}={n // m}*{m}+{n % m}", "No" if n % m else "Yes"),
            (f"{n}={n // m}*{m}+{n % m}", "Yes" if n % m else "No"),
        ],
    ),
    "intervals": (
        (range(1, 11), range(1, 10), "<≤"),
        lambda a, b, sign: [
            f"Solve |x-{a}|{sign}{b}.",
            (f"{a}-{b}, {a}+{b}", f"({a - b},{a + b})" if sign == "<" else f"[{a - b},{a + b}]"),
            (f"{a}-{b}, {a}+{b}", f"[{a - b},{a + b}]" if sign == "<" else f"({a - b},{a + b})"),
            (f"{a}, {a}+{b}", f"({a},{a + b})" if sign == "<" else f"[{a},{a + b}]"),
        ],
    ),
}  # fmt: skip


def add_fractions(p: Fraction, q: Fraction, sign: str) -> tuple[str, str]:
    below = math.lcm(p.denominator, q.denominator)
    value = p + q if sign == "+" else p - q
    return f"{p * below}/{below}{sign}{q * below}/{below}", latex_fraction(value)


def exact_question(chooser: random.Random) -> dict[str, str]:
    """One question in DeepMath's schema, with a right solution and, for the warm start, one that has a typical slip."""
    kind = chooser.choice(sorted(QUESTIONS))
    parameters, write = QUESTIONS[kind]
    question, *solutions = write(*(chooser.choice(values) for values in parameters))
    answer = solutions[0][1]
    slips = [solution for solution in solutions if solution[1] != answer]
    right, slip = (
        f"{working}\n\\boxed{{{value}}}" for working, value in (solutions[0], chooser.choice(slips))
    )
    return {"question": question, "final_answer": answer, "topic": kind, "r1_solution_1": right, "slip": slip}


# --- 5. Prompts ---

SYSTEM = "You are a careful mathematician who shows the way to an answer before giving it."
ANSWER_FORMAT = {
    "gsm8k": "Reason step by step. Then finish with one more line: #### followed by the answer, a number and nothing else.",
    "deepmath": "Reason step by step. Then finish with the answer alone, in exact form, inside \\boxed{}.",
}


EXAMPLES = {
    "gsm8k": [
        (
            "Ana has 3 boxes with 4 pears each. She eats 2 pears. How many pears are left?",
            "There are 3 * 4 = 12 pears.\nAfter eating 2 there are 12 - 2 = 10 pears.\n#### 10",
        ),
        (
            "A ticket costs 8 dollars. Leo buys 5 tickets and pays with 50 dollars. How much change does he get?",
            "The tickets cost 5 * 8 = 40 dollars.\nThe change is 50 - 40 = 10 dollars.\n#### 10",
        ),
        (
            "Tom reads 12 pages a day. How many pages does he read in two weeks?",
            "Two weeks have 14 days.\nHe reads 12 * 14 = 168 pages.\n#### 168",
        ),
    ],
    "deepmath": [
        ("Solve 3x + 4 = 10.", "3x = 10 - 4 = 6, so x = 2.\n\\boxed{2}"),
        ("Compute 1/2 + 1/3.", "3/6 + 2/6 = 5/6.\n\\boxed{\\frac{5}{6}}"),
        ("For which x is |x - 1| < 2?", "-2 < x - 1 < 2, so -1 < x < 3.\n\\boxed{(-1, 3)}"),
    ],
}


def chat_prompt(question: str, task: str, examples: int = 0) -> list[dict[str, str]]:
    """System line, so many solved examples as earlier turns, and the question; without examples, the wanted format in words."""
    messages = [{"role": "system", "content": SYSTEM}]
    for example, solution in EXAMPLES[task][:examples]:
        messages += [{"role": "user", "content": example}, {"role": "assistant", "content": solution}]
    content = question if examples else f"{question}\n\n{ANSWER_FORMAT[task]}"
    return [*messages, {"role": "user", "content": content}]


def plain_prompt(question: str) -> str:
    """For the tiny policy: the question on a line of its own, to be answered by the working."""
    return question + "\n"


# --- 6. The tasks and their defaults ---

# Memory of the gpu presets, computed from sizes: float32 weights, gradients and two moments of AdamW, and the bfloat16
# reference, take 18 bytes a weight: 9 GB for Qwen2.5-0.5B, 28 GB for 1.5B. Activations add about 1.1 and 2.1 MB a token of
# a micro-batch, the cache 12 and 29 kB a token of all rollouts of a step. So 0.5B fits a 24 GB card as set here (16 GB
# with --prompts 24); 1.5B does not fit 24 GB at any batch: it takes 48 GB with --prompts 8, 80 GB as set here.
PRESETS = {
    "gsm8k": {
        "cpu": {
            "steps": 90, "prompts": 32, "lr": 4e-4, "warm_start_steps": 450, "warm_start_quality": 0.4, "eval_every": 45,
            "eval_prompts": 64,
        },
        # The paper's tau 0.1, M 8, clip, KL, learning rate and 64 prompts.
        "gpu": {
            "model": "Qwen/Qwen2.5-0.5B-Instruct", "steps": 1000, "prompts": 64, "lr": 1e-6, "lr_decay": False, "beta": 1e-3,
            "rollout_rows": 512, "microbatch_tokens": 4096, "eval_every": 100, "save_every": 100,
        },
    },
    "deepmath": {
        "cpu": {
            "steps": 80, "prompts": 32, "lr": 3e-4, "warm_start_steps": 700, "warm_start_quality": 0.4, "eval_every": 40,
            "eval_prompts": 64,
        },
        # The paper's, but for 32 prompts a step instead of 512.
        "gpu": {
            "model": "Qwen/Qwen2.5-1.5B-Instruct", "tau": 0.3, "group_size": 16, "steps": 1000, "prompts": 32, "lr": 1e-6,
            "lr_decay": False, "beta": 1e-3, "rollout_rows": 512, "microbatch_tokens": 4096, "eval_every": 100,
            "save_every": 50,
        },
    },
}  # fmt: skip
# Caps on completion tokens. Tiny policy: above the longest demonstration. Language models: a cap of 256 cuts about half of an
# instruct model's replies to GSM8K and 1024 hardly any; the run prints the share cut before training and warns above 5%.
CAPS = {"gsm8k": {"tiny": 40, "other": 1024}, "deepmath": {"tiny": 32, "other": 2048}}


def build_task(
    config: Config,
    rows: tuple[datasets.Dataset, datasets.Dataset, str],
    question: Callable[[dict], str],
    verify: Callable[[str, dict], float],
    reference: Callable[[dict], str],
    demonstrations: Callable[[datasets.Dataset], list[tuple[str, str]]] | None,
) -> Task:
    train, test, source = rows
    tiny = config.model == "tiny"
    if config.worked_examples > len(EXAMPLES[config.task]):
        raise ValueError(
            f"there are {len(EXAMPLES[config.task])} worked examples, not {config.worked_examples}"
        )
    return Task(
        name=config.task,
        train=train,
        test=test,
        prompt=(lambda row: plain_prompt(question(row)))
        if tiny
        else (lambda row: chat_prompt(question(row), config.task, config.worked_examples)),
        reward=verify if config.reward == "exact" else lambda text, row: overlap_reward(text, reference(row)),
        correct=lambda text, row: verify(text, row) == 1,
        max_new_tokens=config.max_new_tokens or CAPS[config.task]["tiny" if tiny else "other"],
        demonstrations=demonstrations(imitable(train, config)) if tiny and demonstrations else None,
        source=source,
    )


def build_gsm8k(config: Config) -> Task:
    rows = load_rows(
        config,
        columns=["question", "answer"],
        hub=("openai/gsm8k", "main"),
        key=lambda row: row["question"],
        keep=lambda row: bool(row["question"]) and extract_answer(row["answer"] or "") is not None,
        offline=lambda: distinct_rows(word_problem, question_text, 6000, config.seed),
    )

    def demonstrations(train: datasets.Dataset) -> list[tuple[str, str]]:
        """A share `warm_start_quality` of worked answers; the rest with one corrupted step. Every question comes twice."""
        chooser = random.Random(config.seed)
        return [
            (
                plain_prompt(row["question"]),
                plain_working(row["answer"])
                if chooser.random() < config.warm_start_quality
                else corrupted_working(row["answer"], chooser),
            )
            for row in [*train] * 2
        ]

    return build_task(
        config,
        rows,
        question=lambda row: row["question"],
        verify=lambda text, row: gsm8k_reward(text, row["answer"]),
        reference=lambda row: plain_working(row["answer"]),
        demonstrations=demonstrations,
    )


def build_deepmath(config: Config) -> Task:
    if deepmath_reward("\\boxed{1+x^2}", "x^2+1") != 1:
        raise ValueError(
            "math-verify, which checks the answers, does not run here: pip install -r requirements.txt"
        )
    columns = ["question", "final_answer"]
    if (
        config.train_file
        and "final_answer" not in (names := read_file(config.train_file).column_names)
        and "solution" in names
    ):
        columns = ["prompt", "solution"]
    rows = load_rows(
        config,
        columns=columns,
        hub=("zwhe99/DeepMath-103K", None),
        key=question_text,
        keep=lambda row: bool(question_text(row)) and bool(final_answer(row)),
        offline=lambda: distinct_rows(exact_question, question_text, 1250, config.seed),
    )

    def demonstrations(train: datasets.Dataset) -> list[tuple[str, str]]:
        """A share `warm_start_quality` of right solutions; the rest with a slip. Every question comes eight times."""
        chooser = random.Random(config.seed)
        return [
            (
                plain_prompt(row["question"]),
                row["r1_solution_1" if chooser.random() < config.warm_start_quality else "slip"],
            )
            for row in [*train] * 8
        ]

    return build_task(
        config,
        rows,
        question=question_text,
        verify=lambda text, row: deepmath_reward(text, final_answer(row)),
        reference=lambda row: row.get("r1_solution_1") or f"\\boxed{{{final_answer(row)}}}",
        demonstrations=demonstrations if "slip" in rows[0].column_names else None,
    )


TASKS = {"gsm8k": build_gsm8k, "deepmath": build_deepmath}

if __name__ == "__main__":
    launch(TASKS, PRESETS, __doc__)
