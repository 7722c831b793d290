"""Writes prompts for training a draft: .venv/bin/python examples/make_prompts.py prompts.jsonl

A draft is accepted on what its target says, so it should learn from prompts like those it will be
asked: chats, questions, sums, translations, summaries, and questions about passages. They come from
a random grammar, from the prompts that the package has, and from texts to summarise and to search:
the documentation of the installed Python and, with --written N, N texts that the model writes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from sgl_spec import LLM
from sgl_spec.server.tokenizer import ServerTokenizer
from sgl_spec.training.data import read_prompts

# Of the prompts; long ones are fewer, so that each kind is about equally many tokens.
SHARES = {
    **{"chat": 0.27, "math": 0.16, "qa": 0.20, "translation": 0.19},
    **{"summarization": 0.08, "rag": 0.10},
}
FILED = 0.4  # most of a kind's prompts that come from the package's file
DEPTH = 12
NGRAM = 12  # words in a row that two texts share only if one was taken from the other
CHUNK_WORDS = 100  # of a retrieved passage
ARTICLE_WORDS = (120, 700)
SLOT = re.compile(r"\{(?:(?P<low>\d+)\.\.(?P<high>\d+)|(?P<symbol>[a-z_0-9]+))\}")
NUMBER = re.compile(r"(?<![\w.,/])\d{1,3}(?![\w/]|[.,]\d)")


@dataclass(frozen=True)
class Article:
    """A text to summarise or to retrieve passages from. title: what it is about."""

    title: str
    text: str


class Grammar:
    """`prompt_grammar.json`: a symbol's alternatives, one drawn evenly. In an alternative, {symbol}
    is expanded in turn and {3..9} is a whole number of that range."""

    def __init__(self, rng: random.Random) -> None:
        text = Path(__file__).with_name("prompt_grammar.json").read_text(encoding="utf-8")
        self.alternatives: dict[str, list[str]] = json.loads(text)
        self.rng = rng

    def expand(self, symbol: str, depth: int = 0, **given: str) -> str:
        """One text of `symbol`; symbols in `given` are inserted as they are."""
        assert depth < DEPTH, f"{symbol} expands without end"
        if symbol in given:
            return given[symbol]

        def slot(match: re.Match[str]) -> str:
            if match["low"]:
                return str(self.rng.randint(int(match["low"]), int(match["high"])))
            return self.expand(match["symbol"], depth + 1, **given)

        return SLOT.sub(slot, self.rng.choice(self.alternatives[symbol]))

    def turn(self, kind: str) -> str:
        """A chat, sum, question or translation, with three people and a thing that it may name."""
        people = dict(zip("abc", self.rng.sample(self.alternatives["name"], 3), strict=True))
        return self.expand(kind, **people, x=self.expand("thing"))


class Overlap:
    """Whether a text is, but for case and punctuation, one of some files' strings, or shares 12
    words in a row with them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.whole: set[str] = set()
        self.parts: set[int] = set()
        for path in paths:
            lines = path.read_text(encoding="utf-8").split("\n")
            for line in filter(None, lines):
                for text in strings(json.loads(line)):
                    words = words_of(text)
                    self.whole.add(" ".join(words))
                    self.parts.update(ngrams(words))

    def __call__(self, text: str) -> bool:
        words = words_of(text)
        return " ".join(words) in self.whole or any(part in self.parts for part in ngrams(words))


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def ngrams(words: list[str]) -> Iterator[int]:
    return (hash(tuple(words[i : i + NGRAM])) for i in range(len(words) - NGRAM + 1))


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def renumbered(text: str, rng: random.Random) -> str:
    """The same sum with other whole numbers, of about the same size."""

    def other(match: re.Match[str]) -> str:
        value = int(match[0])
        return str(rng.randint(max(2, value // 2), 2 * value + 2)) if value > 1 else match[0]

    return NUMBER.sub(other, text)


def library(modules: Sequence[str]) -> list[Article]:
    """The documentation of the Python language, and the docstrings of standard modules."""
    found = [Article(f"{name.lower()} in Python", text) for name, text in topics.items()]
    for name in sorted(sys.stdlib_module_names.intersection(modules)):
        module = import_module(name)
        members = inspect.getmembers(module, lambda m: inspect.isclass(m) or inspect.isroutine(m))
        for label, member in [(name, module), *members]:
            if getattr(member, "__module__", name) == name and (text := inspect.getdoc(member)):
                found.append(Article(f"the Python module {name}: {label}", text))
    least, most = ARTICLE_WORDS
    cut = [Article(item.title, " ".join(item.text.split()[:most])) for item in found]
    return [item for item in cut if len(item.text.split()) >= least]


def written(llm: LLM, count: int, grammar: Grammar) -> list[Article]:
    """Texts of the model's own; those that are short or go round in circles are left out."""
    tokenizer = ServerTokenizer.from_dir(llm.engine.tokenizer_dir)
    titles, prompts = [], []
    for _ in range(count):
        form = grammar.rng.choice(("news", "entry"))
        titles.append(grammar.expand("news" if form == "news" else "entity"))
        request = grammar.expand(f"{form}_request", title=titles[-1])
        prompts.append(tokenizer.encode_chat([{"role": "user", "content": request}]))
    done = llm.generate(prompts, {"temperature": 0.8, "max_new_tokens": 704})
    found = [Article(title, one.text.strip()) for title, one in zip(titles, done, strict=True)]
    return [article for article in found if is_good(article.text)]


def is_good(text: str) -> bool:
    words = text.split()
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    return len(words) >= ARTICLE_WORDS[0] and len(set(trigrams)) > 0.7 * len(trigrams)


def summary(articles: Sequence[Article], grammar: Grammar) -> str:
    """A request to summarise one text, or two that are run together."""
    chosen = grammar.rng.sample(
        articles, min(len(articles), 2 if grammar.rng.random() < 0.25 else 1)
    )
    return grammar.expand("summary", text=" ".join(" ".join(one.text.split()) for one in chosen))


def question(articles: Sequence[Article], grammar: Grammar) -> str:
    """A question with passages that a search for it might bring, of its article and of others."""
    rng = grammar.rng
    about, *others = rng.sample(articles, min(len(articles), 3))
    chunks = passages(about, rng, rng.randint(2, 4))
    for other in others[: rng.randint(0, 2)]:
        chunks += passages(other, rng, 1)
    if rng.random() < 0.5:
        rng.shuffle(chunks)
    text = "\n".join(chunks)
    names = re.findall(r"(?<=[a-z,] )[A-Z][a-z]+(?: [A-Z][a-z]+)+", text)
    years = re.findall(r"\b(?:1[5-9]|20)\d\d\b", text)
    subjects = {"title": [about.title], "name": names, "year": years}
    form = rng.choice([form for form, found in subjects.items() if found])
    subject = rng.choice(subjects[form])
    asked = grammar.expand(f"rag_question_{form}", title=subject, subject=subject)
    return grammar.expand("rag", passages=text, question=asked)


def passages(article: Article, rng: random.Random, count: int) -> list[str]:
    """Stretches of about a hundred words, each headed by the title as search indices do."""
    words = article.text.split()
    starts = range(0, max(1, len(words) - CHUNK_WORDS // 2), CHUNK_WORDS)
    chosen = sorted(rng.sample(starts, min(count, len(starts))))
    return [f"{article.title} " + " ".join(words[at : at + CHUNK_WORDS]) for at in chosen]


def compose(count: int, articles: Sequence[Article], grammar: Grammar) -> Iterator[dict[str, str]]:
    """Prompts of every kind."""
    rng = grammar.rng
    filed: dict[str, list[str]] = {}
    for prompt in read_prompts(None):
        filed.setdefault(prompt.kind, []).append(prompt.text)
    for kind, share in SHARES.items():
        wanted, own = round(share * count), filed.get(kind, [])
        known = rng.sample(own, min(len(own), int(FILED * wanted)))
        texts = [renumbered(text, rng) if kind == "math" else text for text in known]
        make = {"summarization": summary, "rag": question}.get(kind)
        while len(texts) < wanted:
            texts.append(make(articles, grammar) if make else grammar.turn(kind))
        yield from ({"kind": kind, "prompt": text} for text in texts)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--written", type=int, default=0, help="texts that the model writes")
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--exclude", type=Path, nargs="*", default=[], help="benchmarks, .jsonl")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    grammar = Grammar(random.Random(options.seed))
    articles = library(grammar.alternatives["module"])
    if options.written:
        with LLM(options.model_path) as llm:
            articles = [*written(llm, options.written, grammar), *articles[:: len(articles) // 20]]
    dropped = Overlap(options.exclude)
    rows = [row for row in compose(options.count, articles, grammar) if not dropped(row["prompt"])]
    grammar.rng.shuffle(rows)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{options.out}: {len(rows)} prompts, from {len(articles)} texts and a grammar.")


if __name__ == "__main__":
    main(sys.argv[1:])
