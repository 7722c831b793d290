"""Every option of the server, declared once (in `serving_options` and `speculation_options`);
command line, checks, help and docs/flags.md follow.

`ServerArgs` is what the user said; `resolve()` returns a new object in which everything that is
decided before the model is seen is decided, or raises `ConfigError` with a sentence for each
contradiction.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sgl_spec import __version__
from sgl_spec.contradictions import contradictions
from sgl_spec.draft_shape import (
    DRAFT_TOKENS,
    EMBEDDED_DRAFTS,
    EMBEDDED_MODEL,
    MODEL_DRAFTERS,
    SampledShape,
    automatic_shape,
    grown_shape,
    is_open,
    round_slots,
    sampled_shape,
    tree_nodes,
)
from sgl_spec.errors import ConfigError
from sgl_spec.options import (
    HELP_FLAGS,
    Declared,
    build_parser,
    convert,
    declared,
    gather,
    group_words,
    raise_all,
    read_own,
)
from sgl_spec.serving_options import (
    CHUNK_TOKENS,
    CHUNK_TOKENS_CUDA,
    RUNNING_REQUESTS,
    RUNNING_REQUESTS_WITH_SPECULATION,
)
from sgl_spec.sglang_flags import (
    UnknownOption,
    foreign_tables,
    read_foreign,
    read_keywords,
    split_foreign,
    unknown_keyword,
)
from sgl_spec.speculation_options import SpeculationOptions
from sgl_spec.without_effect import overruled, unused

logger = logging.getLogger(__name__)

_ABOUT = "Serve a language model with exact tree speculation."


@dataclass(frozen=True, kw_only=True)
class ServerArgs(SpeculationOptions):
    """What the user asked for. Each field is checked when the object is made; see `resolve`."""

    if not TYPE_CHECKING:

        def __new__(cls, **given: Any) -> ServerArgs:
            """Refuse unknown keywords with a suggestion, before the generated `__init__` would."""
            raise_all(_unknown(given, cls.__dataclass_fields__))
            return super().__new__(cls)

    without_effect: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)
    """Sentences about accepted flags that change nothing; `resolve` logs them."""
    logged: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)
    """What `resolve` has logged; an object made of this one, here or in another process, says none
    of it again."""

    def __post_init__(self) -> None:
        refused: list[ConfigError] = []
        for name, opt in declared(type(self)).items():
            with gather(refused):
                object.__setattr__(self, name, convert(opt, getattr(self, name)))
        raise_all(refused)

    @classmethod
    def from_cli(cls, argv: Sequence[str]) -> ServerArgs:
        """Parse `argv` (without the program name); `ConfigError` has a line for each flag that is
        unknown, not supported or has a value that is not allowed, and for what cannot work among
        the others.

        --help and --version print and exit as argparse does.
        """
        options = declared(cls)
        for token in argv:
            if token in HELP_FLAGS:
                build_parser(options, "sgl-spec", _ABOUT, __version__).parse_args([token])
        refused: list[ConfigError] = []
        given, others = read_own(group_words(argv), options, refused)
        notes = read_foreign(others, options, refused)
        if "model_path" not in {*given, *_unsound(refused)}:
            message = "--model-path is required: smollm2, a directory or a hub id."
            refused.append(ConfigError(message, param="model_path"))
        return cls._made(given, notes, refused)

    @classmethod
    def from_keywords(cls, **given: Any) -> ServerArgs:
        """The options by field name, among which SGLang's other flags may stand as on the command
        line; `ConfigError` as in `from_cli`."""
        options = declared(cls)
        refused: list[ConfigError] = []
        own, foreign = split_foreign(given, options)
        notes = read_keywords(foreign, options, refused)
        refused += _unknown(own, options)
        return cls._made({k: v for k, v in own.items() if k in options}, notes, refused)

    @classmethod
    def _made(
        cls, given: Mapping[str, Any], notes: Sequence[str], refused: list[ConfigError]
    ) -> ServerArgs:
        """An object of these options, or all that is `refused`: before, of their values, and of
        what they say beside each other."""
        options, typed = declared(cls), {}
        for name, value in given.items():
            with gather(refused):
                typed[name] = convert(options[name], value)
        made = cls(**({"model_path": EMBEDDED_MODEL} | typed), without_effect=tuple(notes))
        if refused:
            refused += map(ConfigError, contradictions(made, _unsound(refused)))
            raise_all(refused)
        return made

    def resolve(self) -> ResolvedArgs:
        """A new object with what was left open filled in; `ConfigError` on a contradiction.

        Open until the device is known: `device` "auto" and then `chunked_prefill_size` (see
        `for_device`). Open until the model is seen: `context_length`, `max_total_tokens`, `dtype`
        "auto", and the shape of EAGLE's trees where no flag gives it (see `for_target`). None stays
        None where it means "none", as in `api_key`, `max_queued_requests` and
        `speculative_algorithm`.
        Resolving a resolved object changes nothing.
        """
        raise_all([ConfigError(sentence) for sentence in contradictions(self)])
        notes = (*self.without_effect, *unused(self), *overruled(self))
        fresh = [note for note in notes if note not in self.logged]
        for note in fresh:
            logger.warning("%s", note)
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        filled = {name: value for name, value in _decide(self).items() if values[name] is None}
        done = values | filled | _shape(self)
        done |= {"without_effect": (), "logged": (*self.logged, *fresh)}
        return ResolvedArgs(**done)

    def public(self) -> dict[str, Any]:
        """All options by field name, without the API key."""
        names = [name for name in declared(type(self)) if name != "api_key"]
        return {name: getattr(self, name) for name in names}

    def drafter_options(self) -> dict[str, object]:
        """The `speculative_*` options without that prefix, for a drafter to pick its own from."""
        taken = ("speculative_algorithm", "speculative_drafter_module")
        names = [n for n in declared(type(self)) if n.startswith("speculative_") and n not in taken]
        return {name.removeprefix("speculative_"): getattr(self, name) for name in names}


class ResolvedArgs(ServerArgs):
    """`ServerArgs` after `resolve`: these fields are no longer None."""

    if TYPE_CHECKING:
        tokenizer_path: str
        served_model_name: str
        max_running_requests: int
        random_seed: int

    def for_device(self, device: str) -> ResolvedArgs:
        """The same options for this device, cpu or cuda, which "auto" stands for."""
        return dataclasses.replace(self, device=device).resolve()

    def for_target(self, architecture: str) -> ResolvedArgs:
        """The same options for a target of this architecture, which decides the shape of EAGLE's
        trees where no flag gives it. `ConfigError` as in `resolve`."""
        if not is_open(self):
            return self
        shape = automatic_shape(str(self.speculative_algorithm), architecture)
        return dataclasses.replace(
            self,
            speculative_num_steps=shape.steps,
            speculative_eagle_topk=shape.topk,
            speculative_num_draft_tokens=shape.nodes,
        ).resolve()

    @property
    def tree_nodes(self) -> int:
        """Most nodes that one request verifies in a round: 1 (the root) without speculation."""
        assert not is_open(self), "for_target comes first"
        return tree_nodes(self)

    @property
    def round_slots(self) -> int:
        """Most KV slots that one request's round may write behind its text: the larger of the
        tree's nodes and the rows of a draft model's steps."""
        assert not is_open(self), "for_target comes first"
        return round_slots(self)

    @property
    def sampled_shape(self) -> SampledShape | None:
        """The shape of trees whose tokens are sampled; None where the drafter chooses its trees."""
        return sampled_shape(self)


def _unknown(given: Iterable[str], known: Collection[str]) -> list[ConfigError]:
    """The errors for keywords that are none of these."""
    options = declared(ServerArgs)
    return [unknown_keyword(name, options) for name in given if name not in known]


def _unsound(refused: Iterable[ConfigError]) -> list[str]:
    """The fields of which these errors speak, also as what was meant."""
    named = [(e.param, e.meant if isinstance(e, UnknownOption) else None) for e in refused]
    return [name for pair in named for name in pair if name is not None]


def _decide(args: ServerArgs) -> dict[str, Any]:
    drafting = args.speculative_algorithm is not None
    if drafting and args.max_running_requests is None:
        logger.info(
            "--max-running-requests is not set; with speculation it is %d.",
            RUNNING_REQUESTS_WITH_SPECULATION,
        )
    return {
        "tokenizer_path": args.model_path,
        "served_model_name": args.model_path,
        "max_running_requests": RUNNING_REQUESTS_WITH_SPECULATION if drafting else RUNNING_REQUESTS,
        "chunked_prefill_size": _CHUNKS.get(args.device),
        "random_seed": secrets.randbits(31),
        "speculative_draft_model_path": _draft_model(args),
        "speculative_draft_load_format": _draft_load_format(args),
    }


_CHUNKS = {"cpu": CHUNK_TOKENS, "cuda": CHUNK_TOKENS_CUDA}


def _draft_model(args: ServerArgs) -> str | None:
    embedded = args.model_path == EMBEDDED_MODEL
    return EMBEDDED_DRAFTS.get(args.speculative_algorithm or "") if embedded else None


def _draft_load_format(args: ServerArgs) -> str | None:
    return args.load_format if args.speculative_algorithm in MODEL_DRAFTERS else None


def _shape(args: ServerArgs) -> dict[str, int]:
    """The tree's shape as far as it is known; a chain's nodes follow from its steps, whatever was
    given."""
    shape = grown_shape(args) or sampled_shape(args)
    if shape is not None:
        return {
            "speculative_num_steps": shape.steps,
            "speculative_eagle_topk": shape.topk,
            "speculative_num_draft_tokens": shape.nodes,
        }
    name = args.speculative_algorithm
    if name is None or name in MODEL_DRAFTERS:
        return {}
    return {"speculative_num_draft_tokens": args.speculative_num_draft_tokens or DRAFT_TOKENS}


def flags_page() -> str:
    """The text of docs/flags.md."""
    return _PAGE_HEAD + _flag_table(declared(ServerArgs)) + foreign_tables()


def _flag_table(options: Mapping[str, Declared]) -> str:
    """The options as a Markdown table per group."""
    lines: list[str] = []
    group = ""
    for opt in options.values():
        if opt.about.group != group:
            group = opt.about.group
            lines += ["", f"## {group.capitalize()}", ""]
            lines += ["| flag | value | default | meaning |", "|---|---|---|---|"]
        flags = ", ".join(f"`{flag}`" for flag in opt.flags)
        value = "switch" if opt.kind is bool else opt.allowed
        lines.append(f"| {flags} | {value} | {opt.default_text} | {opt.about.help} |")
    return "\n".join(lines).lstrip("\n") + "\n"


_PAGE_HEAD = """\
# Flags

Every option of the server, with its default and what it takes; then SGLang's other flags, and what
becomes of them here. On a command line they follow `launch_server.py` or `sgl-spec`; from Python
they are keywords of `sgl_spec.LLM` ([From Python](python.md)), with `_` for `-`:
`--page-size 16` is `page_size=16`, a switch is `True`.

<!-- Made by `python -m sgl_spec.args > docs/flags.md`; `tests/unit/test_args.py` compares. -->

"""

if __name__ == "__main__":
    sys.stdout.write(flags_page())
