"""From token ids to text, a few tokens at a time: incremental decoding and stop strings.

Both processes use these classes, so that the engine's stop decision and the client's text cannot
disagree. A token becomes bytes on its own, the bytes go through one incremental UTF-8 decoder, and
text is given out as soon as it can no longer change; the work per token does not depend on how long
the text is.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sgl_spec.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A character has at most four bytes, so that many non-empty pieces before the output settle how its
# first bytes decode.
_TAIL_PIECES = 4
# Prompt tokens that callers hand over: enough to hold that many pieces beside special tokens.
PROMPT_TAIL = 8


def _per_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


# `tokenizers` writes one U+FFFD per invalid byte where byte tokens are a fall-back, and one per
# invalid sequence (Python's "replace") where all tokens are bytes.
codecs.register_error("sgl_spec.per_byte", _per_byte)


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, inverted.

    Printable Latin-1 stands for itself; the other bytes, in order, for the characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


@dataclass(frozen=True)
class _Rules:
    """What a tokenizer's decoder does to one token, and to the start of the text.

    replaces: (old, new) applied to every token. mark: what a Metaspace decoder turns into a space,
    and, if `drop_first_marks`, drops in the first token. strip: up to so many of this character are
    removed from the start of the text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replaces: tuple[tuple[str, str], ...] = ()
    mark: str = ""
    drop_first_marks: bool = False
    strip: tuple[str, int] = ("", 0)


def _rules(tokenizer: Tokenizer) -> _Rules:
    if tokenizer.decoder is None:
        raise ConfigError("The tokenizer has no decoder; supported are " + _SUPPORTED)
    steps = list(_flat(json.loads(tokenizer.decoder.__getstate__())))
    rules: dict[str, Any] = {}
    for step in steps:
        _add_rule(rules, step)
    if "byte_level" in rules and len(rules) > 1:
        raise ConfigError(f"The tokenizer's decoder mixes ByteLevel with {sorted(rules)}.")
    return _Rules(**rules)


_SUPPORTED = "ByteLevel, Metaspace, ByteFallback, Replace of a string, Fuse, Strip at the start."


def _flat(step: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return itertools.chain.from_iterable(_flat(inner) for inner in step["decoders"])


def _add_rule(rules: dict[str, Any], step: dict[str, Any]) -> None:
    match step:
        case {"type": "ByteLevel"}:
            rules["byte_level"] = True
        case {"type": "ByteFallback"}:
            rules["byte_fallback"] = True
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            rules["replaces"] = (*rules.get("replaces", ()), (old, new))
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            rules |= {"mark": mark, "drop_first_marks": scheme != "never"}
        case {"type": "Strip", "content": char, "start": count, "stop": 0}:
            rules["strip"] = (char, count)
        case {"type": "Fuse"}:
            pass
        case _:
            raise ConfigError(
                f"The tokenizer's decoder step {step} is not supported; supported are {_SUPPORTED}"
            )


class _Pieces:
    """The bytes of every token of one tokenizer, worked out when first needed."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.rules = _rules(tokenizer)
        self._tokenizer = tokenizer
        self._skipped = set()
        if skip_special_tokens:
            added = tokenizer.get_added_tokens_decoder().values()
            self._skipped = {token.content for token in added if token.special}
        self._known: dict[int, bytes | None] = {}

    def piece(self, token_id: int) -> bytes | None:
        """The token's bytes; None for a token that is skipped or does not exist."""
        try:
            return self._known[token_id]
        except KeyError:
            return self._known.setdefault(token_id, self._work_out(token_id, self.rules.mark))

    def first_piece(self, token_id: int) -> bytes | None:
        """`piece` for the first visible token of a text."""
        if not self.rules.drop_first_marks:
            return self.piece(token_id)
        return self._work_out(token_id, self.rules.mark, space="")

    def _work_out(self, token_id: int, mark: str, space: str = " ") -> bytes | None:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self._skipped:
            return None
        if self.rules.byte_level:
            table = _byte_of_char()
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
            return token.encode()
        for old, new in self.rules.replaces:
            token = token.replace(old, new)
        found = _BYTE_TOKEN.fullmatch(token) if self.rules.byte_fallback else None
        if found:
            return bytes([int(found[1], 16)])
        return (token.replace(mark, space) if mark else token).encode()


@functools.lru_cache(maxsize=8)
def _pieces(tokenizer: Tokenizer, skip_special_tokens: bool) -> _Pieces:
    return _Pieces(tokenizer, skip_special_tokens)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The directory's tokenizer.json, without the padding and truncation that it may ask for.

    `ConfigError` if it is missing, broken, or has a decoder that `check_tokenizer` refuses.
    """
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{directory} has no tokenizer.json; name a directory that has with --tokenizer-path."
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises the bare class
        raise ConfigError(f"{file} cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    check_tokenizer(tokenizer)
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` if text cannot be decoded incrementally with this tokenizer's decoder."""
    _rules(tokenizer)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of one token inside a text, special tokens included; none for an id that is no
    token."""
    return _pieces(tokenizer, False).piece(token_id) or b""


class IncrementalDecoder:
    """Turns tokens into text piecewise; all pieces and `flush` together are the whole text.

    The text is `tokenizer.decode(prompt + output)` without the prompt's part. One case differs:
    where a run of byte-fallback tokens is not valid UTF-8, `tokenizers` replaces the whole run, but
    here only the invalid bytes, because the characters before them have already been given out.

    prompt_tail: the end of the prompt, or all of it. It decides whether a leading space is the
    text's, and completes a character that the prompt leaves open; only its last visible tokens are
    looked at, and their own text is never returned.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt_tail: Sequence[int] = ()
    ) -> None:
        self._pieces = _pieces(tokenizer, skip_special_tokens)
        rules = self._pieces.rules
        errors = "sgl_spec.per_byte" if rules.byte_fallback else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._at_start = True
        self._strip_char, self._strip_left = rules.strip
        self._prompt_bytes_open = 0
        self._read_prompt(prompt_tail)

    def _read_prompt(self, prompt_tail: Sequence[int]) -> None:
        pieces = (self._pieces.piece(token_id) for token_id in reversed(prompt_tail))
        visible = [piece for piece in pieces if piece is not None]
        del visible[_TAIL_PIECES:]
        if visible:
            self._at_start = False
            self._strip_left = 0
            self._utf8.decode(b"".join(reversed(visible)))
            self._prompt_bytes_open = len(self._utf8.getstate()[0])

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` make certain."""
        data = b"".join(piece for token_id in ids if (piece := self._next_piece(token_id)))
        return self._settle(self._utf8.decode(data)) if data else ""

    def flush(self) -> str:
        """The held bytes of a character that will not be completed, as U+FFFD."""
        return self._settle(self._utf8.decode(b"", final=True))

    def _next_piece(self, token_id: int) -> bytes | None:
        if not self._at_start:
            return self._pieces.piece(token_id)
        piece = self._pieces.first_piece(token_id)
        self._at_start = piece is None
        return piece

    def _settle(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        if self._prompt_bytes_open and text:
            # Open bytes of the prompt that the output does not complete are the prompt's U+FFFD.
            if text[0] == "\ufffd":
                text = text.removeprefix("\ufffd" * self._owed())
            self._prompt_bytes_open = 0
        return text

    def _owed(self) -> int:
        return self._prompt_bytes_open if self._pieces.rules.byte_fallback else 1


class StopMatcher:
    """Finds the stop string that the output completes first, whatever the order of the list.

    Of several completed at the same character the longest is taken, since it starts first. Feed it
    every output token in order; only output text counts, as the client will see it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._decoder = IncrementalDecoder(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_tail=prompt_tail
        )
        self._stops = tuple(stops)
        self._keep = max(map(len, stops), default=1) - 1
        self._carry = ""

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes, or None."""
        new = self._decoder.push((token_id,))
        if not new:
            return None
        text = self._carry + new
        found = first_completed(text, self._stops, len(self._carry))
        self._carry = text[-self._keep :] if self._keep else ""
        return found[1] if found else None


def first_completed(text: str, stops: Iterable[str], seen: int) -> tuple[int, str] | None:
    """(end, stop) of the stop string ending first in `text`, after its first `seen` characters."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        at = text.find(stop, max(0, seen - len(stop) + 1))
        if at >= 0 and (best is None or (at + len(stop), -len(stop)) < best[:2]):
            best = (at + len(stop), -len(stop), stop)
    return (best[0], best[2]) if best else None


class StopTrimmer:
    """Keeps back the end of a text as long as it could become a stop string.

    It never decides that a request ends: it is told, by `finish`.
    """

    def __init__(self, stops: Sequence[str], *, no_stop_trim: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep_stop = no_stop_trim
        self._longest = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown and was not yet."""
        text = self._held + text
        cut = self._could_start(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self, text: str, matched: str | None) -> str:
        """The rest, given the last token's text, which completes `matched` if that is not None.

        Without a match, what was held back is shown; with one, what precedes the stop string (or
        what ends with it, under `no_stop_trim`).
        """
        whole, seen = self._held + text, len(self._held)
        self._held = ""
        if matched is None:
            return whole
        found = first_completed(whole, (matched,), seen)
        assert found is not None, f"the engine matched {matched!r}, the text has {whole!r}"
        return whole[: found[0] if self._keep_stop else found[0] - len(matched)]

    def _could_start(self, text: str) -> int:
        cut = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < cut and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            cut = min(cut, at) if at >= 0 else cut
        return cut


class OutputText:
    """The text of one output as the client gets it, streamed or whole: decoder and trimmer.

    Every chunk's ids go through `push`, the last chunk's through `finish`, whose result completes
    the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        no_stop_trim: bool = False,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._decoder = IncrementalDecoder(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_tail=prompt_tail
        )
        self._trimmer = StopTrimmer(stops, no_stop_trim=no_stop_trim)
        self._keep_stop = no_stop_trim

    def push(self, ids: Sequence[int]) -> str:
        """Text that `ids` add and that no stop string can take back."""
        return self._trimmer.push(self._decoder.push(ids))

    def finish(self, ids: Sequence[int], matched: int | str | None = None) -> str:
        """The last text. `matched` is the stop that ended the request: the string that the last of
        `ids` completes, or that last id itself, which is no text unless `no_stop_trim`."""
        if isinstance(matched, int) and not self._keep_stop:
            ids, matched = ids[:-1], None
        before = self._trimmer.push(self._decoder.push(ids[:-1]))
        last = self._decoder.push(ids[-1:])
        if not isinstance(matched, str):
            return before + self._trimmer.finish(last + self._decoder.flush(), None)
        return before + self._trimmer.finish(last, matched)
