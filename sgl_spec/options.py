"""What an option is, and how it is read, checked and shown.

A dataclass field made by `option` says everything about one flag. argparse reads the command line;
`convert` is the only place where a value, typed in a shell or passed from Python, gets the field's
type or is refused, so that both ways in give the same sentence.
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


SHARE = Check("a number above 0 and below 1", lambda value: bool(0 < value < 1))
FRACTION = Check("a number from 0 to 1", lambda value: bool(0 <= value <= 1))
_ALLOWED = {
    int: "an integer",
    float: "a number",
    str: "a non-empty string",
    bool: "true or false",
    tuple: "integers",
}


@dataclass(frozen=True)
class Option:
    """One option. The field's metadata holds it under the key "option"; `declared` adds `name`,
    `kind`, `optional` and `default` from the field.

    aliases: other flags with the same meaning. choices: the values allowed, in any case of letters.
    spellings: other words for a value, in lower case. other_names: SGLang's names for
    implementations that are not here, separated by blanks; such a value is accepted with a warning,
    and the default stands. normalize: brings a string into its one form. check: the range.
    unset: what None means. kind: `tuple` is a list of integers, which follow the flag on the
    command line.
    """

    help: str
    group: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    spellings: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    other_names: str = ""
    normalize: Callable[[str], str] = str
    check: Check | None = None
    unset: str = ""
    metavar: str = ""
    name: str = ""
    kind: type = str
    optional: bool = False
    default: Any = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag and its aliases."""
        return (flag_of(self.name), *self.aliases)

    @property
    def default_text(self) -> str:
        """The default in words."""
        if self.default is dataclasses.MISSING:
            return "required"
        if self.default is None:
            return self.unset or "none"
        return "off" if self.default is False else str(self.default)

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return _ALLOWED[self.kind] if self.check is None else self.check.allowed


def option(default: Any, help: str, *, group: str, secret: bool = False, **described: Any) -> Any:
    """A dataclass field that is a command-line option; see `Option` for what may describe it.
    default `dataclasses.MISSING`: it is required. secret: the value stays out of `repr`."""
    metadata = {"option": Option(help=help, group=group, **described)}
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


def declared(owner: type) -> dict[str, Option]:
    """All options of a dataclass by field name, in order."""
    hints = typing.get_type_hints(owner)
    found = {}
    for item in dataclasses.fields(owner):
        if "option" in item.metadata:
            kind, optional = _base_type(hints[item.name])
            facts = {"kind": kind, "optional": optional, "default": item.default}
            found[item.name] = dataclasses.replace(item.metadata["option"], name=item.name, **facts)
    return found


def _base_type(hint: Any) -> tuple[type, bool]:
    if isinstance(hint, types.UnionType):
        (base,) = [part for part in typing.get_args(hint) if part is not types.NoneType]
        return typing.get_origin(base) or base, True
    return hint, False


def flag_of(name: str) -> str:
    """Field name to flag."""
    return "--" + name.replace("_", "-")


def is_given(made: Any, name: str) -> bool:
    """Whether an option of this object has another value than its default."""
    return bool(getattr(made, name) != made.__dataclass_fields__[name].default)


# --- values --------------------------------------------------------------------------------------


def convert(opt: Option, value: object) -> Any:
    """`value` in the option's type and one spelling; raises `ConfigError` if it is not allowed."""
    if value is None and opt.optional:
        return None
    typed = _typed(opt, value)
    if isinstance(typed, str):
        words = {choice.lower(): choice for choice in opt.choices} | dict(opt.spellings)
        typed = words.get(typed.lower(), opt.normalize(typed))
    if typed is None:
        return None
    if opt.choices and typed not in opt.choices:
        refuse(opt, typed, near(str(typed), opt.choices))
    if typed == "" or (opt.check is not None and not opt.check.ok(typed)):
        refuse(opt, typed)
    return typed


def _typed(opt: Option, value: object) -> object:
    if opt.kind is str and isinstance(value, (str, os.PathLike)):
        return _text(opt, os.fspath(value))
    if opt.kind is tuple and isinstance(value, (list, tuple)):
        return tuple(_integer(opt, one, value) for one in value)
    if opt.kind is int and isinstance(value, str):
        return _integer(opt, value, value)
    if opt.kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    if type(value) is opt.kind:
        return value
    refuse(opt, value)


def _integer(opt: Option, one: object, seen: object) -> int:
    if isinstance(one, str) and re.fullmatch(r"[+-]?\d+", one.strip()):
        return int(one)
    if type(one) is int:
        return one
    refuse(opt, seen)


def _text(opt: Option, value: str) -> str:
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


def refuse(opt: Option, value: object, hint: str = "") -> NoReturn:
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


# --- the command line ----------------------------------------------------------------------------


class FlagParser(argparse.ArgumentParser):
    """argparse that raises `ConfigError` instead of printing its usage and leaving.

    Values are kept as they were typed. A prefix of a flag is not that flag: one that works today is
    ambiguous when an option is added.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **how)

    def error(self, message: str) -> NoReturn:
        """What argparse cannot read at all: a flag without its value, a switch with one."""
        if "expected one argument" in message:
            message += " (one that begins with a dash is written --flag=VALUE)"
        raise ConfigError(f"{message[:1].upper()}{message[1:]}; see --help.")

    def add_options(self, options: Iterable[Option]) -> None:
        """Take these flags, each group under its heading in --help."""
        groups: dict[str, Any] = {}
        for opt in options:
            if opt.group not in groups:
                groups[opt.group] = self.add_argument_group(opt.group)
            text = f"{opt.help} ({_help_facts(opt)})".replace("%", "%%")
            shown = {"metavar": opt.metavar or opt.kind.__name__.upper()}
            if opt.kind in (bool, tuple):
                shown = {} if opt.kind is bool else {"metavar": "INT"}
            how = takes(switch=opt.kind is bool, several=opt.kind is tuple) | shown
            if opt.kind is bool and opt.optional:  # with --no- before it, it is off
                how = {"action": argparse.BooleanOptionalAction}
            action = groups[opt.group].add_argument(*opt.flags, dest=opt.name, help=text, **how)
            if opt.choices:
                action.completer = lambda choices=opt.choices, **_: choices  # argcomplete's hook


def takes(*, switch: bool, several: bool) -> dict[str, Any]:
    """How argparse reads a flag."""
    if switch:
        return {"action": "store_const", "const": True}
    return {"nargs": "+"} if several else {}


def _help_facts(opt: Option) -> str:
    limited = opt.choices or opt.check is not None
    return (f"{opt.allowed}; " if limited else "") + f"default: {opt.default_text}"


def flag_table(options: Iterable[Option]) -> str:
    """The options as a Markdown table per group."""
    lines: list[str] = []
    group = ""
    for opt in options:
        if opt.group != group:
            group = opt.group
            lines += ["", f"## {group.capitalize()}", ""]
            lines += ["| flag | value | default | meaning |", "|---|---|---|---|"]
        both = opt.kind is bool and opt.optional
        names = (opt.flags[0], f"--no-{opt.flags[0][2:]}", *opt.flags[1:]) if both else opt.flags
        flags = ", ".join(f"`{flag}`" for flag in names)
        value = "switch" if opt.kind is bool else opt.allowed
        if opt.other_names:
            value += f"; the default stands for {', '.join(opt.other_names.split())}"
        lines.append(f"| {flags} | {value} | {opt.default_text} | {opt.help} |")
    return "\n".join(lines).lstrip("\n") + "\n"
