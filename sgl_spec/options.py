"""How a dataclass field becomes a command-line option: declaration, conversion, help, table.

A field made by `option` says everything about one flag. `convert` is the only place where a value,
typed in a shell or passed from Python, is turned into the field's type and refused if it is out of
range, so that both ways in give the same sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sgl_spec.errors import ConfigError


@dataclass(frozen=True)
class Check:
    """A condition on a value and the words that say what is allowed."""

    allowed: str
    ok: Callable[[Any], bool]


def at_least(low: int) -> Check:
    """An integer with a lower bound."""
    return Check(f"an integer >= {low}", lambda value: bool(value >= low))


def between(low: int, high: int) -> Check:
    """An integer within both bounds."""
    return Check(f"an integer from {low} to {high}", lambda value: bool(low <= value <= high))


def all_at_least(low: int) -> Check:
    """One or more integers with a lower bound."""
    allowed = f"one or more integers >= {low} separated by spaces"
    return Check(allowed, lambda values: bool(values) and min(values) >= low)


def share() -> Check:
    """A number between 0 and 1, neither of them."""
    return Check("a number above 0 and below 1", lambda value: bool(0 < value < 1))


def fraction() -> Check:
    """A number from 0 to 1."""
    return Check("a number from 0 to 1", lambda value: bool(0 <= value <= 1))


NOT_EMPTY = Check("a non-empty string", bool)
_INTEGER = r"[+-]?\d+"


@dataclass(frozen=True)
class Option:
    """What the field's metadata holds, under the key "option"."""

    help: str
    group: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    spellings: dict[str, str] = dataclasses.field(default_factory=dict)
    normalize: Callable[[str], str | None] | None = None
    check: Check | None = None
    unset: str = ""
    metavar: str = ""


def option(
    default: Any = dataclasses.MISSING, *, secret: bool = False, help: str, group: str, **rest: Any
) -> Any:
    """A dataclass field that is a command-line option; no default makes it required.

    aliases: other flags with the same meaning. choices: the values allowed, in any case of
    letters. spellings: other words for a choice, in lower case. normalize: brings a string into
    its one form. check: the range. unset: what None means. secret: the value stays out of `repr`.
    """
    described = Option(help=help, group=group, **rest)
    return dataclasses.field(default=default, repr=not secret, metadata={"option": described})


@dataclass(frozen=True)
class Declared:
    """One option with what its field adds: name, flags, base type and default. kind is `tuple` for
    a list of integers, which follow the flag on the command line."""

    name: str
    kind: type
    optional: bool
    default: Any
    about: Option

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag and its aliases."""
        return (flag_of(self.name), *self.about.aliases)

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is dataclasses.MISSING

    @property
    def default_text(self) -> str:
        """The default in words."""
        if self.required:
            return "required"
        if self.default is None:
            return self.about.unset or "none"
        return "off" if self.default is False else str(self.default)

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.about.choices:
            return "one of " + ", ".join(self.about.choices)
        if self.about.check is not None:
            return self.about.check.allowed
        return {
            int: "an integer",
            float: "a number",
            str: "a string",
            bool: "true or false",
            tuple: "integers",
        }[self.kind]


def flag_of(name: str) -> str:
    """Field name to flag."""
    return "--" + name.replace("_", "-")


def is_given(made: Any, name: str) -> bool:
    """Whether an option of this object has another value than its default."""
    return bool(getattr(made, name) != made.__dataclass_fields__[name].default)


class Unsound(Exception):
    """A check has read an option that already stands refused."""


class SoundOptions:
    """The options of an object, some of which stand refused: reading one of these is `Unsound`.

    read: the options that were read since it was emptied.
    """

    def __init__(self, made: Any, unsound: Iterable[str]) -> None:
        self._made = made
        self._options = declared(type(made))
        self.unsound = set(unsound)
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in self.unsound:
            raise Unsound(name)
        if name in self._options:
            self.read.add(name)
        return getattr(self._made, name)

    def refuse_read(self) -> None:
        """What a refusal has read, as far as somebody gave it, stands refused."""
        options = [self._options[name] for name in self.read]
        given = [opt for opt in options if not opt.required and is_given(self._made, opt.name)]
        self.unsound |= {opt.name for opt in given}


def declared(owner: type) -> dict[str, Declared]:
    """All options of a dataclass by field name, in order."""
    hints = typing.get_type_hints(owner)
    found = {}
    for item in dataclasses.fields(owner):
        if "option" in item.metadata:
            kind, optional = _base_type(hints[item.name])
            about = item.metadata["option"]
            found[item.name] = Declared(item.name, kind, optional, item.default, about)
    return found


def _base_type(hint: Any) -> tuple[type, bool]:
    if isinstance(hint, types.UnionType):
        (base,) = [part for part in typing.get_args(hint) if part is not types.NoneType]
        return typing.get_origin(base) or base, True
    return hint, False


def convert(opt: Declared, value: object) -> Any:
    """`value` in the option's type and one spelling; raises `ConfigError` if it is not allowed."""
    if value is None and opt.optional:
        return None
    typed = _typed(opt, value)
    if isinstance(typed, str):
        words = {choice.lower(): choice for choice in opt.about.choices} | opt.about.spellings
        typed = words.get(typed.lower(), typed)
        if opt.about.normalize is not None:
            typed = opt.about.normalize(typed)
    if typed is None:
        return None
    if opt.about.choices and typed not in opt.about.choices:
        refuse(opt, typed, near(str(typed), opt.about.choices))
    if opt.about.check is not None and not opt.about.check.ok(typed):
        refuse(opt, typed)
    return typed


def _typed(opt: Declared, value: object) -> object:
    if opt.kind is str and isinstance(value, (str, os.PathLike)):
        return _text(opt, os.fspath(value))
    if opt.kind is tuple and isinstance(value, (list, tuple)):
        return tuple(_integer(opt, one, value) for one in value)
    if opt.kind is int and isinstance(value, str) and re.fullmatch(_INTEGER, value.strip()):
        return int(value)
    if opt.kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    if type(value) is opt.kind:
        return value
    refuse(opt, value)


def _integer(opt: Declared, one: object, values: object) -> int:
    if isinstance(one, str) and re.fullmatch(_INTEGER, one.strip()):
        return int(one)
    if type(one) is int:
        return one
    refuse(opt, values)


def _text(opt: Declared, value: str) -> str:
    """A shell's bytes that are no UTF-8 arrive as lone surrogates, which nothing can write."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        seen = f"byte 0x{code & 0xFF:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"
        raise ConfigError(
            f"{opt.flags[0]} must be text in UTF-8, got {seen} at position {error.start}.",
            param=opt.name,
        ) from None
    return value


def refuse(opt: Declared, value: object, hint: str = "") -> NoReturn:
    """Raise the one sentence for a value that is not allowed."""
    raise ConfigError(f"{opt.flags[0]} must be {opt.allowed}, got {value!r}{hint}.", param=opt.name)


@contextlib.contextmanager
def gather(refused: list[ConfigError]) -> Iterator[None]:
    """Put a `ConfigError` into `refused`, and go on behind the block."""
    try:
        yield
    except ConfigError as error:
        refused.append(error)


def raise_all(refused: Sequence[ConfigError]) -> None:
    """Raise what was refused, if anything: several sentences are the lines of one error, each told
    once."""
    sentences = dict.fromkeys(error.message for error in refused)
    if len(sentences) == 1:
        raise refused[0]
    if sentences:
        raise ConfigError("\n".join(sentences))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is close, if one is."""
    pool = list(known)
    longer = [entry for entry in pool if entry.startswith(word)]
    return next(iter(difflib.get_close_matches(word, pool, n=1, cutoff=0.7) or longer), None)


def suggestion(word: str | None) -> str:
    """` (did you mean X?)`, or nothing for None."""
    return "" if word is None else f" (did you mean {word}?)"


def near(word: str, known: Iterable[str]) -> str:
    """The suggestion of what is `nearest`."""
    return suggestion(nearest(word, known))


HELP_FLAGS = ("-h", "--help", "--version")
Words = tuple[str, tuple[str, ...]]
"""A flag of a command line and the words behind it, the first of which may follow a "="."""


def group_words(argv: Sequence[str]) -> list[Words]:
    """The flags of a line in order, with their words; a word before any flag stands for one."""
    groups: list[Words] = []
    for token in argv:
        flag, words = groups[-1] if groups else ("", ())
        if _begins_flag(token, behind_flag=flag.startswith("-") and not words):
            name, stuck, value = token.partition("=")
            groups.append((name, (value,) if stuck else ()))
        elif flag.startswith("-"):
            groups[-1] = (flag, (*words, token))
        else:
            groups.append((token, ()))
    return groups


def _begins_flag(token: str, *, behind_flag: bool) -> bool:
    """A word with a single dash right behind a flag is its value: a key or a name may begin so."""
    if token in HELP_FLAGS:
        return True
    if " " in token.partition("=")[0]:
        return False
    return token.startswith("--") or (not behind_flag and bool(re.match("-[A-Za-z]", token)))


def read_own(
    groups: Iterable[Words], options: Mapping[str, Declared], refused: list[ConfigError]
) -> tuple[dict[str, Any], list[Words]]:
    """The values of `options` by field name, as they were typed, and the groups of other flags.
    What no flag takes and flags that lack their value are `refused`.

    Prefixes of flags are not accepted: one that works today is ambiguous when an option is added.
    """
    by_flag = {flag: opt for opt in options.values() for flag in opt.flags}
    values: dict[str, Any] = {}
    others: list[Words] = []
    for flag, words in groups:
        opt = by_flag.get(flag)
        if opt is not None:
            with gather(refused):
                values[opt.name] = _read(opt, words)
            if opt.kind not in (bool, tuple):
                refused += map(stray, words[1:])
        elif flag in HELP_FLAGS:
            refused.append(no_value(flag, words))
        else:
            others.append((flag, words))
    return values, others


def _read(opt: Declared, words: tuple[str, ...]) -> object:
    if opt.kind is bool:
        if words:
            raise no_value(opt.flags[0], words, opt.name)
        return True
    if not words:
        raise lacks_value(opt.flags[0], opt.name)
    return list(words) if opt.kind is tuple else words[0]


def no_value(flag: str, words: Sequence[str], param: str | None = None) -> ConfigError:
    """The error for a switch that was given `words`."""
    message = f"{flag} is a switch and takes no value, got {' '.join(words)!r}."
    return ConfigError(message, param=param)


def lacks_value(flag: str, param: str | None = None) -> ConfigError:
    """The error for a flag that stands alone and may not."""
    return ConfigError(f"{flag} needs a value and none was given.", param=param)


def stray(word: str) -> ConfigError:
    """The error for a word that no flag takes."""
    return ConfigError(f"{word!r} belongs to no flag; see --help.")


def build_parser(
    options: Mapping[str, Declared], prog: str, about: str, version: str = ""
) -> argparse.ArgumentParser:
    """The parser that prints the help of `options`; `read_own` reads them. version: what --version
    prints."""
    parser = argparse.ArgumentParser(prog=prog, description=about, allow_abbrev=False)
    if version:
        parser.add_argument("--version", action="version", version=f"{prog} {version}")
    groups: dict[str, Any] = {}
    for opt in options.values():
        if opt.about.group not in groups:
            groups[opt.about.group] = parser.add_argument_group(opt.about.group)
        text = f"{opt.about.help} ({_help_facts(opt)})".replace("%", "%%")
        how: dict[str, Any] = {"dest": opt.name, "help": text, "default": argparse.SUPPRESS}
        if opt.kind is bool:
            how |= {"action": "store_const", "const": True}
        elif opt.kind is tuple:
            how |= {"nargs": "+", "metavar": "INT"}
        else:
            how["metavar"] = opt.about.metavar or opt.kind.__name__.upper()
        groups[opt.about.group].add_argument(*opt.flags, **how)
    return parser


def _help_facts(opt: Declared) -> str:
    limited = opt.about.choices or opt.about.check not in (None, NOT_EMPTY)
    return (f"{opt.allowed}; " if limited else "") + f"default: {opt.default_text}"
