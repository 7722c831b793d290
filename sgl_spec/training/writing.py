"""What the model writes itself before it answers: user turns, texts, questions about them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from sgl_spec.errors import ConfigError
from sgl_spec.server.tokenizer import ServerTokenizer
from sgl_spec.training.generate import Continuation, IntArray
from sgl_spec.training.grammar import Grammar
from sgl_spec.training.prompts import (
    KINDS,
    Article,
    article_request,
    is_good_article,
    is_good_turn,
    opening,
    retrieved,
)

TURN_TOKENS = 96
ARTICLE_TOKENS = 704
QUESTION_TOKENS = 32
PASSAGE_TOKENS = 1024  # of a prompt that ends in the beginning of a question
_TURN_TEMPERATURE = 0.9
_QUESTION_TEMPERATURE = 0.8
_MARK = "\x00"
# Turns to ask for one that is kept, and the share of a kind's prompts that the model may write.
_TURNS = {"chat": (2.2, 0.4), "math": (2.6, 0.3), "qa": (1.6, 0.4), "translation": (3.5, 0.12)}


class ChatText:
    """A chat as the model's own template writes it, in ids."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = ServerTokenizer.from_dir(directory)
        if not self.tokenizer.has_chat_template:
            raise ConfigError(f"{directory} has no chat template; chats are what data is made of.")
        rendered = self.tokenizer.render_chat([{"role": "user", "content": _MARK}])
        self._before, _, self._after = rendered.partition(_MARK)

    def prompts(self, texts: Sequence[str]) -> list[IntArray]:
        """Ids of whole prompts, ready for an answer."""
        return self._encode([f"{self._before}{text.strip()}{self._after}" for text in texts])

    def openings(self, texts: Sequence[str]) -> list[IntArray]:
        """Ids up to and with the beginning of a user's turn."""
        return self._encode([self._before + text for text in texts])

    def decode(self, tokens: IntArray) -> str:
        """Text without special tokens."""
        return self.tokenizer.decode(tokens.tolist())

    def _encode(self, texts: list[str]) -> list[IntArray]:
        found = self.tokenizer.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array(item.ids, dtype=np.int64) for item in found]


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt to continue, and who takes the continuation."""

    prompt: IntArray
    max_new: int
    temperature: float
    take: Callable[[Continuation], None]


class Author:
    """Makes the tasks whose results become prompts, and collects these.

    turns: user turns by kind; articles: texts; questions: passages with a question about them.
    dropped: texts that must not be used.
    """

    def __init__(
        self,
        chat: ChatText,
        grammar: Grammar,
        rng: random.Random,
        dropped: Callable[[str], bool],
    ) -> None:
        self._chat, self._grammar, self._rng, self._dropped = chat, grammar, rng, dropped
        self.turns: dict[str, list[str]] = {kind: [] for kind in KINDS}
        self.articles: list[Article] = []
        self.questions: list[tuple[str, str]] = []

    def write_turns(self, wanted: dict[str, int]) -> Iterator[Task]:
        """Turns from openings. wanted: prompts of each kind."""
        for kind, (tries, share) in _TURNS.items():
            count = int(tries * share * wanted[kind])
            begun = [opening(kind, self._grammar, self._rng) for _ in range(count)]
            for text, prompt in zip(begun, self._chat.openings(begun), strict=True):
                take = partial(self._take_turn, kind, text)
                yield Task(prompt, TURN_TOKENS, _TURN_TEMPERATURE, take)

    def write_articles(self, count: int, keep: Callable[[Continuation], None]) -> Iterator[Task]:
        """Texts by request. keep: takes each of them, for it is an answer like any other."""
        requests = [article_request(self._grammar, self._rng) for _ in range(count)]
        prompts = self._chat.prompts([request for _, request in requests])
        for (title, _), prompt in zip(requests, prompts, strict=True):
            take = partial(self._take_article, title, keep)
            yield Task(prompt, ARTICLE_TOKENS, self._rng.uniform(0.6, 1.0), take)

    def write_questions(self, count: int) -> Iterator[Task]:
        """Questions about passages of the articles that are there, from their first words."""
        if not self.articles:
            return
        found = [retrieved(self.articles, self._rng)[1] for _ in range(count)]
        begun = [opening("rag", self._grammar, self._rng) for _ in found]
        pairs = zip(found, begun, strict=True)
        prompts = self._chat.openings([f"{passages}\n{start}" for passages, start in pairs])
        for passages, start, prompt in zip(found, begun, prompts, strict=True):
            if len(prompt) <= PASSAGE_TOKENS:
                take = partial(self._take_question, passages, start)
                yield Task(prompt, QUESTION_TOKENS, _QUESTION_TEMPERATURE, take)

    def _take_turn(self, kind: str, begun: str, found: Continuation) -> None:
        text = begun + self._chat.decode(found.tokens)
        if found.ended and is_good_turn(kind, text) and not self._dropped(text):
            self.turns[kind].append(text.strip())

    def _take_article(
        self, title: str, keep: Callable[[Continuation], None], found: Continuation
    ) -> None:
        keep(found)
        text = self._chat.decode(found.tokens)
        if is_good_article(text) and not self._dropped(text):
            self.articles.append(Article(title, text.strip()))

    def _take_question(self, passages: str, begun: str, found: Continuation) -> None:
        text = (begun + self._chat.decode(found.tokens)).strip().split("\n")[0]
        question, mark, _ = text.partition("?")
        if mark and is_good_turn("qa", question):
            self.questions.append((passages, question + mark))
