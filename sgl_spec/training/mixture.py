"""How much of each kind of prompt, and from which source."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_spec.training.grammar import Grammar
from sgl_spec.training.prompts import (
    Article,
    Prompt,
    from_grammar,
    library_articles,
    question_about,
    rag_prompt,
    renumbered,
    retrieved,
    summary_prompt,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Share:
    """A kind's share of all tokens, and about how many a prompt and its answer have (what SmolLM2
    says when nothing cuts it short before 256 tokens)."""

    tokens: float
    prompt: int
    answer: int


SHARES = {
    "chat": Share(0.24, 85, 200),
    "math": Share(0.12, 85, 150),
    "qa": Share(0.07, 42, 70),
    "translation": Share(0.09, 75, 60),
    "summarization": Share(0.20, 700, 120),
    "rag": Share(0.20, 600, 130),
    "writing": Share(0.08, 70, 450),
}
SURPLUS = 1.15  # prompts beyond the estimate, so that tokens and not prompts decide the end
_FILE_ANSWERS = 3  # most answers to one prompt of a file
_FROM_LIBRARY = 0.12  # of the texts to summarise and to search


def counts(tokens: int, max_new: int) -> dict[str, int]:
    """Sequences of each kind for `tokens` in all and answers of at most `max_new`, but at least
    one."""
    return {
        kind: max(1, round(SURPLUS * tokens * share.tokens / _length(kind, share, max_new)))
        for kind, share in SHARES.items()
    }


def _length(kind: str, share: Share, max_new: int) -> int:
    """Tokens of a sequence; a text is as long as it is whatever `max_new` says of answers."""
    return share.prompt + (share.answer if kind == "writing" else min(share.answer, max_new))


@dataclass(frozen=True, slots=True)
class Sources:
    """What prompts are made of. prompts: of a file; written: turns that the model wrote, by kind;
    articles: texts that it wrote; questions: its own, with the passages they are about."""

    prompts: Sequence[Prompt]
    written: dict[str, list[str]]
    articles: Sequence[Article]
    questions: Sequence[tuple[str, str]]


def compose(
    wanted: dict[str, int],
    sources: Sources,
    grammar: Grammar,
    rng: random.Random,
    dropped: Callable[[str], bool],
) -> list[Prompt]:
    """Prompts of every kind but writing, in random order. dropped: texts that must not be used."""
    found: list[Prompt] = []
    for kind in ("chat", "math", "qa", "translation"):
        prompts = _short_prompts(kind, wanted[kind], sources, grammar, rng)
        found += [prompt for prompt in prompts if not dropped(prompt.text)]
    library = library_articles(grammar.alternatives["module"])
    articles = _with_library(sources.articles, library, rng)
    for _ in range(wanted["summarization"]):
        found.append(summary_prompt(articles, grammar, rng))
    questions = list(sources.questions)[: wanted["rag"] // 2]
    found += [rag_prompt(passages, question, grammar, rng) for passages, question in questions]
    for _ in range(wanted["rag"] - len(questions)):
        about, passages = retrieved(articles, rng)
        question = question_about(about, passages, grammar, rng)
        found.append(rag_prompt(passages, question, grammar, rng))
    rng.shuffle(found)
    return found


def _short_prompts(
    kind: str, count: int, sources: Sources, grammar: Grammar, rng: random.Random
) -> list[Prompt]:
    """At most 40 % from the file, at most 40 % of the model's own, the rest from the grammar."""
    filed = [prompt for prompt in sources.prompts if prompt.kind == kind]
    most = min(int(0.4 * count), _FILE_ANSWERS * len(filed))
    chosen: list[Prompt] = []
    while len(chosen) < most:
        chosen += rng.sample(filed, min(len(filed), most - len(chosen)))
    if kind == "math":
        varied = [renumbered(rng.choice(filed), rng) for _ in range(int(0.3 * count)) if filed]
        chosen = chosen[: len(filed)] + varied
    own = sources.written.get(kind, [])
    own = rng.sample(own, min(len(own), int(0.4 * count)))
    chosen += [Prompt(kind, text) for text in own]
    rest = [from_grammar(kind, grammar, rng) for _ in range(count - len(chosen))]
    logger.info(
        "%s: %d prompts, %d of them the model's own, %d from the grammar",
        kind,
        len(chosen) + len(rest),
        len(own),
        len(rest),
    )
    return chosen + rest


def _with_library(
    written: Sequence[Article], library: Sequence[Article], rng: random.Random
) -> list[Article]:
    """The model's texts with a few of the library's, or the library's alone when it wrote none."""
    count = round(_FROM_LIBRARY / (1 - _FROM_LIBRARY) * len(written))
    return [*written, *rng.sample(library, min(len(library), max(count, 3)))]
