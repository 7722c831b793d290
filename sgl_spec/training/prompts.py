"""Where prompts come from: files, a grammar, texts at hand, and the model's own writing.

A draft is accepted on what its target says, so the prompts should be like those it will be asked:
chats, questions, sums, translations, summaries, and questions about passages. Nothing here knows a
benchmark; `Overlap` drops prompts that have too much in common with files the user names.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from sgl_spec.errors import ConfigError
from sgl_spec.training.grammar import Grammar

KINDS = ("chat", "math", "qa", "translation", "summarization", "rag", "writing")
_NGRAM = 12  # words in a row that two texts share only if one was taken from the other
_CHUNK_WORDS = 100  # of a retrieved passage
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"(?<![\w.,/])\d{1,3}(?![\w/]|[.,]\d)")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's turn. kind: one of `KINDS`."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Article:
    """A text to summarise or to retrieve passages from. title: what it is about."""

    title: str
    text: str


def read_prompts(path: Path | None) -> list[Prompt]:
    """Prompts of a .jsonl file with a `prompt` (text) in each row; None for the package's own."""
    if path is None:
        source = files("sgl_spec.training") / "data" / "train_prompts.jsonl"
        content = source.read_text(encoding="utf-8")
    else:
        content = _read(path)
    prompts = []
    for number, row in enumerate(_rows(content, path), 1):
        text = row.get("prompt")
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{path}, line {number}: no `prompt` text.", param="prompts")
        is_math = "grade-school-math" in str(row.get("source", ""))
        prompts.append(Prompt("math" if is_math else "chat", text))
    return prompts


class Overlap:
    """Finds texts that share their words with files to be kept out of training.

    A text overlaps if it is one of theirs but for case and punctuation, or if it shares 12 words in
    a row with them. A row of a file counts with every string in it.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._whole: set[str] = set()
        self._parts: set[int] = set()
        for path in paths:
            for row in _rows(_read(path), path):
                for text in _strings(row):
                    words = _words(text)
                    self._whole.add(" ".join(words))
                    self._parts.update(_ngrams(words))

    def __call__(self, text: str) -> bool:
        words = _words(text)
        if " ".join(words) in self._whole:
            return True
        return any(part in self._parts for part in _ngrams(words))


def renumbered(prompt: Prompt, rng: random.Random) -> Prompt:
    """The same sum with other whole numbers, of about the same size."""

    def other(match: re.Match[str]) -> str:
        value = int(match[0])
        return str(rng.randint(max(2, value // 2), 2 * value + 2)) if value > 1 else match[0]

    return Prompt(prompt.kind, _NUMBER.sub(other, prompt.text))


def from_grammar(kind: str, grammar: Grammar, rng: random.Random) -> Prompt:
    """A prompt of kind chat, math, qa or translation."""
    return Prompt(kind, grammar.expand(kind, rng, _bound(grammar, rng)))


def opening(kind: str, grammar: Grammar, rng: random.Random) -> str:
    """How a user's turn of `kind` may begin, for the model to go on."""
    return grammar.expand(f"{kind}_opening", rng, _bound(grammar, rng))


def article_request(grammar: Grammar, rng: random.Random) -> tuple[str, str]:
    """What a text is to be about, and the request to write it."""
    form = rng.choice(("news", "entry"))
    title = grammar.expand("news" if form == "news" else "entity", rng)
    return title, grammar.expand(f"{form}_request", rng, {"title": title})


def is_good_turn(kind: str, text: str) -> bool:
    """Whether a turn that the model wrote can pass for one of a user."""
    words = text.split()
    least, most = (4, 25) if kind == "qa" else (5, 120)
    if not least <= len(words) <= most or "<|" in text or "\n\n\n" in text:
        return False
    if len(set(words)) < 0.5 * len(words):
        return False
    if kind == "math":
        return any(letter.isdigit() for letter in text) and text.rstrip().endswith(("?", "."))
    if kind == "qa":
        return "\n" not in text.strip()
    if kind == "translation":
        return "\n" not in text.strip() and len(words) <= 60
    return True


def is_good_article(text: str) -> bool:
    """Whether a text that the model wrote is long enough and does not go round in circles."""
    words = text.split()
    if len(words) < 120:
        return False
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(trigrams)) > 0.7 * len(trigrams)


def summary_prompt(articles: Sequence[Article], grammar: Grammar, rng: random.Random) -> Prompt:
    """A request to summarise one text, or two that are run together."""
    chosen = rng.sample(articles, min(len(articles), 2 if rng.random() < 0.25 else 1))
    text = " ".join(_one_line(article.text) for article in chosen)
    return Prompt("summarization", grammar.expand("summary", rng, {"text": text}))


def retrieved(articles: Sequence[Article], rng: random.Random) -> tuple[Article, str]:
    """An article and passages, of it and of others, that a search for it might bring."""
    about, *others = rng.sample(articles, min(len(articles), 3))
    chunks = [*_chunks(about, rng, rng.randint(2, 4))]
    for other in others[: rng.randint(0, 2)]:
        chunks += _chunks(other, rng, 1)
    if rng.random() < 0.5:
        rng.shuffle(chunks)
    return about, "\n".join(chunks)


def rag_prompt(passages: str, question: str, grammar: Grammar, rng: random.Random) -> Prompt:
    """A question with the passages that were found for it."""
    bound = {"passages": passages, "question": question}
    return Prompt("rag", grammar.expand("rag", rng, bound))


def question_about(about: Article, passages: str, grammar: Grammar, rng: random.Random) -> str:
    """A question that the passages of `about` may answer, from its title, a name or a year."""
    names = re.findall(r"(?<=[a-z,] )[A-Z][a-z]+(?: [A-Z][a-z]+)+", passages)
    years = re.findall(r"\b(?:1[5-9]|20)\d\d\b", passages)
    choices = [("title", about.title), *([("name", rng.choice(names))] if names else [])]
    choices += [("year", rng.choice(years))] if years else []
    form, subject = rng.choice(choices)
    bound = {"title": subject, "subject": subject}
    return grammar.expand(f"rag_question_{form}", rng, bound)


def library_articles(
    modules: Sequence[str], least_words: int = 120, most_words: int = 700
) -> list[Article]:
    """The documentation of the Python language, and the docstrings of standard modules."""
    from pydoc_data.topics import topics

    found = [Article(f"{name.lower()} in Python", text) for name, text in topics.items()]
    for name in sorted(sys.stdlib_module_names.intersection(modules)):
        module = import_module(name)
        for label, member in [(name, module), *inspect.getmembers(module, _is_documented)]:
            if getattr(member, "__module__", name) == name and (text := inspect.getdoc(member)):
                found.append(Article(f"the Python module {name}: {label}", text))
    cut = [Article(item.title, piece) for item in found for piece in _pieces(item, most_words)]
    return [item for item in cut if len(item.text.split()) >= least_words]


def _is_documented(value: object) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value)


def _bound(grammar: Grammar, rng: random.Random) -> dict[str, str]:
    """Three people and one kind of thing that a text may name more than once."""
    people = rng.sample(grammar.alternatives["name"], 3)
    return dict(zip("abc", people, strict=True)) | {"x": grammar.expand("thing", rng)}


def _chunks(article: Article, rng: random.Random, count: int) -> Iterator[str]:
    """Passages of about a hundred words, each headed by the title as search indices do."""
    words = article.text.split()
    starts = range(0, max(1, len(words) - _CHUNK_WORDS // 2), _CHUNK_WORDS)
    for start in sorted(rng.sample(starts, min(count, len(starts)))):
        yield f"{article.title} " + " ".join(words[start : start + _CHUNK_WORDS])


def _pieces(article: Article, most_words: int) -> Iterator[str]:
    """The text by paragraphs, joined up to `most_words`."""
    piece: list[str] = []
    size = 0
    for paragraph in article.text.split("\n\n"):
        length = len(paragraph.split())
        if piece and size + length > most_words:
            if size <= most_words:
                yield "\n\n".join(piece)
            piece, size = [], 0
        piece.append(paragraph)
        size += length
    if piece and size <= most_words:
        yield "\n\n".join(piece)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _ngrams(words: list[str]) -> Iterator[int]:
    for start in range(len(words) - _NGRAM + 1):
        yield hash(tuple(words[start : start + _NGRAM]))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}.") from error


def _rows(content: str, path: Path | None) -> Iterator[dict[str, object]]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}.") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number} is no JSON object.")
        yield row
