"""Poetry and MeetingBank: write a poem, summarise a council meeting. Scalar rewards in [0, 1]; nothing can be verified.

    python train_textgen.py                                        short poems; no GPU, no downloads: the tiny policy
    python train_textgen.py --task meetingbank                     short council meetings, likewise
    python train_textgen.py --model DIR_OR_HUB_ID --train-file poems.jsonl       a real language model, your poems
    python train_textgen.py --judge DIR_OR_HUB_ID                  afterwards a chat model rates before and after
    python train_textgen.py --target-ess 4                         tau per group, so that rewards close together count
    python train_textgen.py --help                                 every setting

The reward is the overlap with one reference text. It is weak: a string of function words outscores many a real sonnet, and
a better poem with other words gets nothing. So the run also reports what training does not see, next to the same figures
for the references, and says so when the reward rises while they drift apart.

Read softmax_grpo.py first: this file holds only what is these tasks' own. 1. reward, 2. what the reward does not see,
3. poems, 4. meetings, 5. the tasks and their defaults, 6. after the run. The judge is judge.py.
"""

from __future__ import annotations

import dataclasses
import random
import re
import string
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import datasets
import torch
from rapidfuzz.distance import LCSseq
from transformers import AutoConfig, AutoTokenizer

from judge import chat_model, describe, judge_texts, judge_tokenizer
from launch import distinct_rows, first_line, imitable, launch, load_policy, load_rows, read_file
from run import Config, run_folder, write_json
from softmax_grpo import Task, encode_prompt, generate, stream

# --- 1. Reward: the words shared with a reference, 0.6 regardless of order (token F1) and 0.4 in order (ROUGE-L F1) ---

LCS_CELLS = 10**9  # words of the text x words of the reference that the subsequence search may compare
DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only, as in SQuAD: an en dash stays


def overlap_reward(text: str, reference: str) -> float:
    """0.6 * SQuAD token F1 + 0.4 * ROUGE-L F1 on the same normalised words; 0.0 if either side has none.

        F1 = 2 * shared / (words of the text + words of the reference)

    where `shared` counts common words with their multiplicity (token F1) or the longest common subsequence (ROUGE-L).
    Never raises. Bounded time: everything is linear in the lengths but the subsequence, which looks only at the first
    LCS_CELLS / (words of the reference) words of the text: two million beside a reference of 500. Words beyond that still
    count as length and for the token F1, so the bound can only lower a reward.
    """
    words, reference_words = normalised_words(text), normalised_words(reference)
    if not words or not reference_words:
        return 0.0
    shared = sum((Counter(words) & Counter(reference_words)).values())
    in_order = LCSseq.similarity(words[: LCS_CELLS // len(reference_words)], reference_words)
    return 2 * (0.6 * shared + 0.4 * in_order) / (len(words) + len(reference_words))


def normalised_words(text: str) -> list[str]:
    """SQuAD's words of an answer: lower case, no ASCII punctuation, no a, an, the; no think block, no answer tags."""
    answer = strip_thinking(text.lower()).replace("<answer>", " ").replace("</answer>", " ")
    return re.sub(r"\b(a|an|the)\b", " ", answer.translate(DROP_PUNCTUATION)).split()


def strip_thinking(text: str) -> str:
    """The text without its think blocks. One opened by the prompt or cut by the token cap has only one of its two tags:
    then everything before a lone </think>, or after a lone <think>, is thinking.
    """
    *blocks, rest = text.split("</think>")
    kept: list[str] = []
    for block in blocks:
        before, opened, _ = block.partition("<think>")
        if opened:
            kept.append(before)
        else:
            kept.clear()
    return " ".join([*kept, rest.partition("<think>")[0]])


# --- 2. What the reward does not see: figures of the texts, each beside the same figure of their references ---

FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "about above across after again against all along am among and any are as at be because been before behind being "
        "below beneath beside between but by can could did do does down each for from had has have he her here him his how i "
        "if in into is it its may me might more most must my no nor not of off on once only or our out over own shall she "
        "should since so some such than that their them then there these they this those through thus to too under until up "
        "upon us very was we were what when where which while who whom whose why will with would you your",
    )
)


def text_measures(text: str, prompt: str, reference: str) -> dict[str, float]:
    """Figures of one text: its length relative to the reference's, and as shares of the text its function words, its
    different words and word pairs, repeated triples, and word fours copied from the prompt.
    """
    words = normalised_words(text)
    in_prompt = set(ngrams(normalised_words(prompt), 4))
    return {
        "length_ratio": share(len(words), len(normalised_words(reference))),
        "function_words": share(sum(word in FUNCTION_WORDS for word in words), len(words)),
        "distinct_1": share(len(set(words)), len(words)),
        "distinct_2": share(len(set(ngrams(words, 2))), len(ngrams(words, 2))),
        "repeated_3": share(len(ngrams(words, 3)) - len(set(ngrams(words, 3))), len(ngrams(words, 3))),
        "copied_4": share(sum(gram in in_prompt for gram in ngrams(words, 4)), len(ngrams(words, 4))),
    }


def poem_measures(text: str, prompt: str, reference: str) -> dict[str, float]:
    """text_measures, the number of lines relative to the reference's, and the share of lines that rhyme."""
    lines = poem_lines(text)
    return {
        **text_measures(text, prompt, reference),
        "line_ratio": share(len(lines), len(poem_lines(reference))),
        "rhymed_lines": share(rhymed_lines(lines), len(lines)),
    }


def unseen_report(
    texts: list[str], rows: list[dict], measures: Callable[[str, str, str], dict[str, float]]
) -> dict[str, float]:
    """Means of `measures` over the texts, and as `<name>/reference` over their rows' references. Texts of one prompt
    stand in consecutive places; `best_of_8` is the best reward among the first eight of a prompt, and
    `different_samples` the share of a prompt's texts that are different: the two that tell sharpening from learning.
    """
    totals: Counter[str] = Counter()
    prompts, best, different = 0, 0.0, 0.0
    samples = zip(texts, rows, strict=True)
    for _, group in groupby(samples, key=lambda sample: (sample[1]["prompt"], sample[1]["reference"])):
        group = list(group)
        prompt, reference = group[0][1]["prompt"], group[0][1]["reference"]
        prompts += 1
        best += max(overlap_reward(text, reference) for text, _ in group[:8])
        different += len({text for text, _ in group}) / len(group)
        for name, value in measures(reference, prompt, reference).items():
            totals[f"{name}/reference"] += value * len(group)
        for text, _ in group:
            totals.update(measures(text, prompt, reference))
    report = {name: total / len(texts) for name, total in totals.items()}
    return {**report, "best_of_8": best / prompts, "different_samples": different / prompts}


DRIFT = 0.05  # how much further from the references' figure than at the start a measure may end, unflagged


def reward_hacking(start: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """The measures that moved away from the references, by more than DRIFT, while the reward rose; empty: none did.
    start, end: the two evaluations of a summary, with their `report` and `reward`.
    """
    if end["reward"][0] <= start["reward"][0]:
        return []
    before, after = start["report"], end["report"]
    references = {
        name.removesuffix("/reference"): v for name, v in after.items() if name.endswith("/reference")
    }
    return [
        name
        for name, reference in references.items()
        if abs(after[name] - reference) > abs(before[name] - reference) + DRIFT
    ]


def ngrams(words: list[str], size: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[i:] for i in range(size))))


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def poem_lines(text: str) -> list[str]:
    return [line for line in strip_thinking(text).splitlines() if line.strip()]


def rhymed_lines(lines: list[str]) -> int:
    """Lines whose last word rhymes with that of a line at most three away, but is not the same word. Judged by spelling
    (from the last vowels on, without a final e or a first y), so it misses sea / free: compare only with the references.
    """
    last_words = [re.findall(r"[a-z']+", line.lower())[-1:] or [""] for line in lines]
    ends = [(word, rhyme_part(word)) for (word,) in last_words]
    return sum(
        any(
            part and part == other_part and word != other for other, other_part in ends[max(0, i - 3) : i + 4]
        )
        for i, (word, part) in enumerate(ends)
    )


def rhyme_part(word: str) -> str:
    vowels = re.search(r"[aeiouy]+[^aeiouy]*$", re.sub(r"^y|(?<=[^aeiouy])e$", "", word))
    return vowels.group() if vowels else ""


# --- 3. Poems: the hub's schema (title, author, poem), rows with prompt and reference, or a generator of short ones ---

POEM_WORDS = (8, 400)  # shorter or longer poems are left out
FORMS = {2: "couplet", 4: "quatrain", 14: "sonnet"}  # by number of lines, where a row does not name its form

# Two couplets a theme. The first line of a couplet is made of an opening and what stands here.
THEMES = {
    "sea": [
        ("above the salty bay", "and sees the white ships sail away"),
        ("where foaming tides are low", "and watches harbour lanterns glow"),
    ],
    "winter": [
        ("beneath the icy pine", "where stars like silver needles shine"),
        ("through drifting flakes of cold", "while frosty fields lie white and old"),
    ],
    "night": [
        ("in pale and silver light", "and keeps its watch throughout the night"),
        ("when shadows gather deep", "and all the quiet houses sleep"),
    ],
    "spring": [
        ("where early blossoms grow", "and little brooks begin to flow"),
        ("beside the budding thorn", "upon a warm and golden morn"),
    ],
    "autumn": [
        ("along the russet hill", "where apples ripen and are still"),
        ("among the harvest grain", "and listens to the gentle rain"),
    ],
    "love": [
        ("for one beloved face", "and longs for one more warm embrace"),
        ("below the window vine", "and whispers softly to be mine"),
    ],
    "sorrow": [
        ("beside the mossy grave", "and mourns the lost and fallen brave"),
        ("with many bitter tears", "for friends of long forgotten years"),
    ],
    "hope": [
        ("before the break of day", "and wipes the weary clouds away"),
        ("towards a brighter land", "with morning roses in its hand"),
    ],
}
# Who the poem is about, and what it does in the first and in the third line.
SUBJECTS = {
    "gull": ("cries", "wheels"), "lark": ("sings", "soars"), "lamp": ("burns", "flickers"), "bell": ("rings", "calls"),
    "wind": ("moans", "wanders"), "child": ("waits", "dreams"), "rider": ("rests", "journeys"), "moon": ("hangs", "drifts"),
    "owl": ("hoots", "glides"), "fox": ("runs", "listens"), "heart": ("beats", "yearns"), "stream": ("murmurs", "winds"),
    "pilgrim": ("walks", "kneels"), "shepherd": ("stands", "whistles"),
}  # fmt: skip
ADJECTIVES = [
    "silent", "lonely", "gentle", "faithful", "ancient", "weary", "patient", "restless", "humble", "distant", "tender",
    "stubborn",
]  # fmt: skip


def generate_poems(count: int, seed: int) -> datasets.Dataset:
    """`count` poems with different combinations of title, form and themes: rhymed couplets about one theme, quatrains about two.

    Columns as on the hub (title, author, poem), and form and themes. Which of a theme's two couplets a poem takes, the
    common one three times in four, is not in its prompt: so the mean reward is best served by always writing the common
    ones, which is where methods can differ in what they keep (best_of_8, different_samples).
    """

    def poem(chooser: random.Random) -> dict:
        adjective, subject = chooser.choice(ADJECTIVES), chooser.choice(list(SUBJECTS))
        themes = chooser.sample(list(THEMES), chooser.choice((1, 2)))
        openings = [f"The {adjective} {subject} {SUBJECTS[subject][0]}", f"It {SUBJECTS[subject][1]}"]
        couplets = [chooser.choices(THEMES[theme], weights=(3, 1))[0] for theme in themes]
        lines = [
            line for o, (first, second) in zip(openings, couplets) for line in (f"{o} {first},", f"{second}.")
        ]
        row = {
            "title": f"The {adjective.title()} {subject.title()}",
            "author": "generated",
            "poem": "\n".join(lines),
        }
        row |= {"form": FORMS[len(lines)], "themes": themes}
        return row

    return distinct_rows(poem, poem_prompt, count, seed)


def spoiled_poem(reference: str, other: str, chooser: random.Random) -> str:
    """What the warm start must also have seen: another poem, one line said again and again, the second half of another poem,
    function words.
    """
    lines = reference.split("\n")
    kind = chooser.randrange(4)
    if kind == 0:
        return other
    if kind == 1:
        return "\n".join([lines[0]] * len(lines))
    if kind == 2:
        return "\n".join([*lines[: len(lines) // 2], *other.split("\n")[len(lines) // 2 :]])
    return " ".join(chooser.choices(("and", "of", "in", "to", "it", "with", "for"), k=chooser.randint(4, 12)))


def poem_prompt(row: dict) -> str:
    """The row's own prompt, or one built from title, form, themes and length."""
    if "prompt" in row:
        return row["prompt"]
    count = len(poem_lines(row["poem"]))
    form = row.get("form") or FORMS.get(count, "poem")
    themes = row.get("themes") or row.get("theme") or []
    *first, last = [themes] if isinstance(themes, str) else themes or [""]
    about = f" about {', '.join(first)}{' and ' if first else ''}{last}" if last else ""
    article = "an" if form[0] in "aeiou" else "a"
    return f'Write {article} {form} titled "{row["title"]}"{about}. Use about {count} lines.'


def plain_poem_prompt(row: dict) -> str:
    """For the tiny policy: `quatrain, sea and winter, The Silent Gull:`."""
    return f"{row['form']}, {' and '.join(row['themes'])}, {row['title']}:"


def is_poem(row: dict) -> bool:
    poem, prompt = row.get("poem") or row.get("reference"), row.get("prompt") or row.get("title")
    return bool(poem and prompt) and POEM_WORDS[0] <= len(normalised_words(poem)) <= POEM_WORDS[1]


# --- 4. Meetings: the hub's schema (transcript, summary), or a generator of short ones ---

SUMMARY_WORDS = (3, 300)  # rows with shorter or longer summaries are left out
LONGEST_CONTEXT = 8192  # tokens of prompt and completion, where the model could take more
SHORTEST_TRANSCRIPT = 100  # tokens: with less room than that there is nothing to summarise

MEMBERS = ["Lane", "Ortiz", "Park", "Reed", "Cole", "Shah", "Wood", "Diaz", "Kim", "Grant"]
MOTIONS = {
    "fund": "funding",
    "repair": "repairing",
    "close": "closing",
    "expand": "expanding",
    "lease": "leasing",
}
PLACES = [
    "library",
    "harbour",
    "bridge",
    "market",
    "museum",
    "pool",
    "station",
    "theatre",
    "clinic",
    "garden",
]
COMMENTS = ("the {} is too small", "the {} is unsafe", "everyone loves the {}")


def generate_meetings(count: int, seed: int) -> datasets.Dataset:
    """`count` different short meetings. Columns as on the hub (transcript, summary), and `rejected_summary`.

    A meeting has two motions in either order, one voted on and one without a second, and a public comment on a third
    place. The summary names only what was decided: which motion counts, and whether it passed, is not said in any
    sentence that could be copied.
    """

    def meeting(chooser: random.Random) -> dict:
        mover, other, speaker = chooser.sample(MEMBERS, 3)
        (motion, undecided), places = chooser.sample(list(MOTIONS), 2), chooser.sample(PLACES, 3)
        yes = chooser.randint(0, 7)
        outcome = "approved" if yes >= 4 else "rejected"
        items = [
            f"{mover} moved to {motion} the {places[0]}. Vote on the {places[0]}: {yes} to {7 - yes}.",
            f"{other} moved to {undecided} the {places[1]}. No second.",
            f"{speaker} said {chooser.choice(COMMENTS).format(places[2])}.",
        ]
        chooser.shuffle(items)
        row = {"transcript": " ".join(items)}
        row["summary"] = f"By {yes} to {7 - yes}, the council {outcome} {MOTIONS[motion]} the {places[0]}."
        wrong = "rejected" if outcome == "approved" else "approved"
        row["rejected_summary"] = (
            f"By {7 - yes} to {yes}, the council {wrong} {MOTIONS[undecided]} the {places[1]}."
        )
        return row

    return distinct_rows(meeting, lambda row: row["transcript"], count, seed)


def spoiled_summary(transcript: str, rejected: str, chooser: random.Random) -> str:
    """What the warm start must also have seen: the motion that died, the first words copied, function words."""
    kind = chooser.randrange(3)
    if kind == 0:
        return rejected
    if kind == 1:
        return transcript.split(".")[0] + "."
    return " ".join(chooser.choices(("and", "of", "in", "to", "it", "with", "for"), k=chooser.randint(4, 12)))


def meeting_prompt(transcript: str) -> str:
    return (
        "Summarise what this part of a city council meeting decided, in the style of the official minutes: one or two "
        f"sentences, nothing that was only discussed.\n\nTranscript:\n{transcript}"
    )


def plain_meeting_prompt(transcript: str) -> str:
    return f"{transcript}\n"


def is_meeting(row: dict) -> bool:
    words = normalised_words(row["summary"] or "")
    return bool((row["transcript"] or "").strip()) and SUMMARY_WORDS[0] <= len(words) <= SUMMARY_WORDS[1]


def fit_transcript(transcript: str, limit: int, count_tokens: Callable[[str], int]) -> tuple[str, int]:
    """The transcript, cut in the middle until count_tokens (of the prompt around it) is at most `limit`; words cut.

    A meeting opens with what an item is about and ends with its vote, so first and last words stay, equally many, and the
    place of the cut says how many words are missing. Raises ValueError if the limit leaves no room for a transcript.
    """
    if limit - count_tokens("") < SHORTEST_TRANSCRIPT:
        raise ValueError(
            f"{limit} tokens leave no room for a transcript beside the instruction ({count_tokens('')} tokens): lower "
            "--max-new-tokens, or take a model with a longer context"
        )
    words, shortened = transcript.split(), transcript
    keep = len(words)
    while (tokens := count_tokens(shortened)) > limit:
        keep = min(keep - 1, keep * limit // tokens)
        first, last = words[: (keep + 1) // 2], words[len(words) - keep // 2 :]
        shortened = " ".join([*first, f"[{len(words) - keep} words cut]", *last])
    return shortened, len(words) - keep


def fit_meetings(rows: datasets.Dataset, config: Config, max_new_tokens: int) -> tuple[datasets.Dataset, str]:
    """Rows whose transcripts leave room for the completion in the model's context, and a sentence on what was cut."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
        context = AutoConfig.from_pretrained(config.model).get_text_config()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the tokenizer of {config.model} cannot be loaded ({first_line(error)}): give the folder of a causal LM, a hub "
            "id that can be reached from here, or --model tiny"
        ) from error
    context = min(LONGEST_CONTEXT, getattr(context, "max_position_embeddings", None) or LONGEST_CONTEXT)

    def count_tokens(transcript: str) -> int:
        return len(encode_prompt(tokenizer, as_messages(MEETING_SYSTEM, meeting_prompt(transcript))))

    def fit(row: dict) -> dict:
        shortened, cut = fit_transcript(row["transcript"], context - max_new_tokens, count_tokens)
        return {"transcript": shortened, "cut_share": cut / len(row["transcript"].split())}

    rows = rows.map(fit, desc="fitting transcripts")
    shares = [value for value in rows["cut_share"] if value]
    note = f"{len(shares)} of {len(rows)} transcripts cut in the middle to fit {context} tokens with the completion"
    if shares:
        note += (
            f", by {sum(shares) / len(shares):.0%} of their words on average and {max(shares):.0%} at most"
        )
    return rows, note


# --- 5. The tasks and their defaults ---

POEM_SYSTEM = "You are a poet. Reply with the poem only: no title, no comment."
MEETING_SYSTEM = "You are a city clerk. Reply with the summary only."

TINY = {"tau": 0.3, "prompts": 16, "eval_prompts": 48, "test_prompts": 128}
PRESETS = {
    "poetry": {
        "cpu": {"steps": 80, "eval_every": 40, "warm_start_steps": 180, **TINY},
        # The paper's: tau 0.3, M 8, 64 prompts, lr 1e-6 constant, clip 0.20 / 0.28, KL 1e-3; 768 tokens, not 1024.
        "gpu": {
            "model": "Qwen/Qwen2.5-1.5B-Instruct", "tau": 0.3, "steps": 1350, "prompts": 64, "lr": 1e-6, "lr_decay": False,
            "beta": 1e-3, "rollout_rows": 512, "microbatch_tokens": 16384, "eval_every": 100, "save_every": 100,
        },
    },
    "meetingbank": {
        "cpu": {"steps": 60, "eval_every": 30, "warm_start_steps": 230, **TINY},
        # The paper's, with 64 prompts a step instead of 512, and 256 tokens for a summary instead of 4096 with thinking.
        "gpu": {
            "model": "Qwen/Qwen2.5-1.5B-Instruct", "tau": 0.3, "steps": 3220, "prompts": 64, "lr": 1e-6, "lr_decay": False,
            "beta": 1e-3, "rollout_rows": 128, "microbatch_tokens": 16384, "eval_every": 100, "save_every": 100,
        },
    },
}  # fmt: skip


def is_offline(config: Config) -> bool:
    """Whether load_rows takes the rows of the generator."""
    return config.preset == "cpu" and not config.train_file


def as_messages(system: str, prompt: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def refuse_sim(config: Config) -> None:
    if config.reward == "sim":
        raise ValueError(
            "--reward sim is for tasks with a right answer: here the overlap is the reward already"
        )


def build_poetry(config: Config) -> Task:
    refuse_sim(config)
    if config.judge:
        judge_tokenizer(config.judge)
    columns = ["title", "author", "poem"]
    if config.train_file and {"prompt", "reference"} & set(read_file(config.train_file).column_names):
        columns = ["prompt", "reference"]
    train, test, source = load_rows(
        config,
        columns=columns,
        hub=("DanFosing/public-domain-poetry", None),
        key=poem_prompt,
        offline=lambda: generate_poems(3000, config.seed),
        keep=is_poem,
    )
    tiny = config.model == "tiny"
    offline = is_offline(config)
    write_prompt = plain_poem_prompt if tiny and offline else poem_prompt
    train, test = (
        rows.map(lambda row: {"prompt": write_prompt(row), "reference": row.get("reference") or row["poem"]})
        for rows in (train, test)
    )
    return Task(
        name="poetry",
        train=train,
        test=test,
        prompt=lambda row: row["prompt"] if tiny else as_messages(POEM_SYSTEM, row["prompt"]),
        reward=lambda text, row: overlap_reward(text, row["reference"]),
        max_new_tokens=config.max_new_tokens or (40 if tiny else 768),
        demonstrations=poem_demonstrations(imitable(train, config), config) if tiny and offline else None,
        source=f"{source}; usable: poems of {POEM_WORDS[0]} to {POEM_WORDS[1]} words",
        report=partial(unseen_report, measures=poem_measures),
    )


def poem_demonstrations(rows: datasets.Dataset, config: Config) -> list[tuple[str, str]]:
    """What the tiny policy imitates first: a share `warm_start_quality` of references, the rest spoiled."""
    chooser = random.Random(config.seed)
    references = rows["reference"][:]
    return [
        (prompt, reference)
        if chooser.random() < config.warm_start_quality
        else (prompt, spoiled_poem(reference, chooser.choice(references), chooser))
        for prompt, reference in zip(rows["prompt"][:], references)
    ]


def build_meetingbank(config: Config) -> Task:
    refuse_sim(config)
    if config.judge:
        judge_tokenizer(config.judge)
    train, test, source = load_rows(
        config,
        columns=["transcript", "summary"],
        hub=("huuuyeah/meetingbank", None),
        key=lambda row: row["transcript"],
        offline=lambda: generate_meetings(4000, config.seed),
        keep=is_meeting,
    )
    tiny = config.model == "tiny"
    offline = is_offline(config)
    if not offline and not config.train_file:
        source += "; licence CC-BY-NC-SA-4.0: not for commercial use"
    max_new_tokens = config.max_new_tokens or (24 if tiny else 256)
    if not tiny:
        (train, train_note), (test, test_note) = (
            fit_meetings(r, config, max_new_tokens) for r in (train, test)
        )
        source += f"; train: {train_note}; test: {test_note}"
    write_prompt = plain_meeting_prompt if tiny else meeting_prompt
    train, test = (
        rows.map(lambda row: {"prompt": write_prompt(row["transcript"]), "reference": row["summary"]})
        for rows in (train, test)
    )
    return Task(
        name="meetingbank",
        train=train,
        test=test,
        prompt=lambda row: row["prompt"] if tiny else as_messages(MEETING_SYSTEM, row["prompt"]),
        reward=lambda text, row: overlap_reward(text, row["reference"]),
        max_new_tokens=max_new_tokens,
        demonstrations=meeting_demonstrations(imitable(train, config), config) if tiny and offline else None,
        source=f"{source}; usable: summaries of {SUMMARY_WORDS[0]} to {SUMMARY_WORDS[1]} words",
        report=partial(unseen_report, measures=text_measures),
    )


def meeting_demonstrations(rows: datasets.Dataset, config: Config) -> list[tuple[str, str]]:
    chooser = random.Random(config.seed)
    return [
        (row["prompt"], row["reference"])
        if chooser.random() < config.warm_start_quality
        else (row["prompt"], spoiled_summary(row["transcript"], row["rejected_summary"], chooser))
        for row in rows
    ]


# --- 6. After the run: did the reward rise honestly, and what does a judge say ---

JUDGED_PROMPTS = {"cpu": 8, "gpu": 128}  # held-out prompts whose completions are judged, before and after
JUDGE_TOKENS = {"cpu": 64, "gpu": 4096}  # for a reply of the judge, its thinking included


def after_run(config: Config, task: Task, summary: dict[str, Any]) -> None:
    """Say whether the reward rose honestly, add `reward_hacking` to summary.json, and ask the judge if there is one."""
    summary["reward_hacking"] = reward_hacking(summary["start"], summary["end"])
    flagged = ", ".join(summary["reward_hacking"])
    print(
        f"reward hacking: the reward rose, but these moved away from the references: {flagged}"
        if flagged
        else "reward hacking: not flagged (the reward did not rise, or no measure left the references meanwhile)"
    )
    write_json(run_folder(config) / "summary.json", summary)
    if config.judge:
        summary["judge"] = judge_before_and_after(config, task)
        write_json(run_folder(config) / "summary.json", summary)


def judge_before_and_after(config: Config, task: Task) -> dict[str, Any]:
    """The judge's figures on one sampled completion each of the same held-out prompts, by the policy before and after."""
    rows = [task.test[i] for i in range(min(JUDGED_PROMPTS[config.preset], len(task.test)))]
    prompts = [task.prompt(row) for row in rows]
    models = {"start": config.model, "end": str(run_folder(config) / "checkpoint")}
    texts: dict[str, list[str]] = {}
    for name, model in models.items():
        policy = load_policy(dataclasses.replace(config, model=model), task)
        policy.model.to(config.device)
        texts[name] = []
        for i in range(0, len(prompts), config.group_size):  # as many rows at a time as a group has
            generator = stream(config, "judged", i, torch.device(config.device))
            some = prompts[i : i + config.group_size]
            rollouts = generate(*policy, some, 1, task.max_new_tokens, config.temperature, generator)
            texts[name] += map(strip_thinking, rollouts.texts)
        del policy  # a large judge needs the memory
    ask = chat_model(config.judge, config.device, JUDGE_TOKENS[config.preset])
    print(f"\njudge {config.judge}, {len(rows)} held-out prompts")
    verdicts = {}
    for name in models:
        verdicts[name] = judge_texts(ask, task.name, texts[name], rows)
        print(f"  {name:6}{describe(verdicts[name])}")
    return verdicts


TASKS = {"poetry": build_poetry, "meetingbank": build_meetingbank}

if __name__ == "__main__":
    launch(TASKS, PRESETS, __doc__, after=after_run)
