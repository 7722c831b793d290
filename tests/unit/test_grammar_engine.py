"""llguidance behind our interface: what compiles and what is refused, masks and roll-back, and that
no grammar can hurt the process."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from fake_grammar import commit, listed
from grammars import EBNF, REGEXES, SCHEMAS
from tiny import END_OF_TEXT, IM_END, IM_START, make_tokenizer
from tokenizers import Tokenizer

from sgl_spec import LLM
from sgl_spec.engine.ebnf import to_lark
from sgl_spec.engine.grammar import (
    MAX_REASON_CHARS,
    Compile,
    GrammarError,
    make_compiler,
)
from sgl_spec.engine.grammar_jobs import GrammarJobs
from sgl_spec.errors import InvalidRequestError
from sgl_spec.request import MAX_GRAMMAR_CHARS, Grammar
from sgl_spec.speculative.grammar import Automaton, Constraint, Place, mask_tree, tree_masks
from sgl_spec.speculative.tree import TokenTree
from sgl_spec.text import token_bytes

VOCAB = 512
TOKENIZER = make_tokenizer(VOCAB)
ALL = [
    *(Grammar("json_schema", json.dumps(schema), name) for name, schema in SCHEMAS.items()),
    *(Grammar("regex", text, name) for name, text in REGEXES.items()),
    *(Grammar("ebnf", text, name) for name, text in EBNF.items()),
]
NAMES = [grammar.field for grammar in ALL]


@pytest.fixture(scope="module")
def compile() -> Compile:
    return make_compiler(TOKENIZER, VOCAB, [IM_END])


def constraint(compile: Compile, grammar: Grammar) -> Constraint:
    return Constraint(compile(grammar), [IM_END], VOCAB)


def walked(one: Constraint, rng: random.Random, most: int) -> list[int]:
    """Tokens of a random text in the grammar, up to where it ends."""
    ids: list[int] = []
    while len(ids) < most and one.place is Place.OPEN:
        token = rng.choice(listed(one.words, VOCAB))
        ids.append(token)
        if token == IM_END:
            break
        commit(one, token)
    return ids


def text_of(ids: list[int]) -> str:
    return b"".join(token_bytes(TOKENIZER, t) for t in ids if t != IM_END).decode()


def spell(text: str) -> list[int]:
    """Byte by byte, as a drafter or a strange model might."""
    bytes_of = {token_bytes(TOKENIZER, t): t for t in range(3, VOCAB)}
    return [bytes_of[bytes([b])] for b in text.encode()]


def test_tokens_have_the_bytes_of_our_own_decoder(compile: Compile) -> None:
    """Every token that may start any text, as the grammar engine reads it."""
    every = constraint(compile, Grammar("regex", "(.|\n)*", "regex"))
    starts = set(listed(every.words, VOCAB)) - {IM_END}
    for token in range(VOCAB):
        data = token_bytes(TOKENIZER, token)
        special = token in (END_OF_TEXT, IM_START, IM_END)
        try:
            data.decode()
            whole = True
        except UnicodeDecodeError:
            whole = False
        if special or not whole:
            assert (token in starts) <= (not special)
            continue
        escaped = "".join(f"\\x{{{ord(c):x}}}" for c in data.decode())
        exact = constraint(compile, Grammar("regex", f"{escaped}|{escaped}!", "regex"))
        assert token in listed(exact.words, VOCAB), data
        assert token in starts


@pytest.mark.parametrize("grammar", ALL, ids=NAMES)
def test_random_texts_end_and_match(compile: Compile, grammar: Grammar) -> None:
    """A walk by the masks alone, by a model without sense, gives what was asked for."""
    rng = random.Random(1)
    ended = 0
    for _ in range(12):
        one = constraint(compile, grammar)
        ids = walked(one, rng, 300)
        assert one.place is not Place.BROKEN, one.problem
        if one.place is Place.ENDED or ids[-1] == IM_END:
            ended += 1
            matches(grammar, text_of(ids))
    assert ended >= 6


def matches(grammar: Grammar, text: str) -> None:
    if grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text)
    elif grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


@pytest.mark.parametrize("grammar", ALL, ids=NAMES)
def test_masks_of_a_tree_are_those_of_stepping_from_the_beginning(
    compile: Compile, grammar: Grammar
) -> None:
    """For every node; and the walk leaves the matcher as it was."""
    rng = random.Random(2)
    for trial in range(6):
        one = constraint(compile, grammar)
        start = walked(one, rng, 2 * trial)
        if one.place is not Place.OPEN or start[-1:] == [IM_END]:
            continue
        tree = some_tree(one, compile(grammar), start, rng)
        before = one.words.copy()
        masked = mask_tree(tree, [one])
        assert np.array_equal(one.words, before)
        assert masked.allowed is not None
        kept = paths_of(masked)
        for node, path in enumerate(kept):
            row = int(masked.allowed.row_of[0, node])
            fresh = stepped(compile(grammar), [*start, *path])
            if row < 0:
                assert fresh is None or fresh.place is Place.ENDED
            else:
                assert fresh is not None
                assert np.array_equal(masked.allowed.words[row].numpy(), fresh.words)
        for path in paths_of(tree):
            legal = IM_END not in path[:-1] and in_grammar(compile(grammar), start, path)
            assert (path in kept) == legal
        after = walked(one, random.Random(7), 40)
        again = stepped(compile(grammar), start)
        assert again is not None
        assert walked(again, random.Random(7), 40) == after, "the walk changed the matcher"


def without_specials() -> Tokenizer:
    """The same ids; all of them are text."""
    told = json.loads(TOKENIZER.to_str())
    return Tokenizer.from_str(json.dumps(told | {"added_tokens": []}))


LETTERS = [spell("e")[0], spell("1")[0]]
ENDS: dict[str, tuple[Tokenizer, int, list[int]]] = {
    "special": (TOKENIZER, VOCAB, [IM_END, END_OF_TEXT]),
    "letters": (TOKENIZER, VOCAB, LETTERS),
    "both": (TOKENIZER, VOCAB, [IM_END, *LETTERS]),
    "none": (TOKENIZER, VOCAB, []),
    "no id that is no text": (without_specials(), VOCAB, LETTERS),
    "a free id": (without_specials(), VOCAB + 5, LETTERS),
}


@pytest.mark.parametrize("name", ENDS)
def test_masks_along_branches_are_those_of_single_steps(name: str) -> None:
    """In one call for four requests, whatever the ids that end a text also spell."""
    tokenizer, vocab, ends = ENDS[name]
    make, rng, seen = make_compiler(tokenizer, vocab, ends), random.Random(4), 0
    for grammar in (Grammar("regex", "[a-e1]{4,7}", ""), Grammar("regex", "[^~]*", ""), ALL[0]):
        starts: list[list[int]] = []
        for length in range(4):
            one = Constraint(make(grammar), ends, vocab)
            starts.append([])
            while len(starts[-1]) < length:
                starts[-1].append(rng.choice(legal_bytes(one)))
                one.take(starts[-1][-1:])
        batch = [single_steps(make(grammar), ends, vocab, start) for start in starts]
        ids, parents = np.zeros((4, 10), np.int64), np.full((4, 10), -1)
        paths: dict[tuple[int, int], list[int]] = {(i, 0): [] for i in range(4)}
        for i, node in itertools.product(range(4), range(1, 10)):
            parents[i, node] = rng.choice([0, max(0, node - 1), rng.randrange(node)])
            above = paths[i, int(parents[i, node])]
            fresh = single_steps(make(grammar), ends, vocab, [*starts[i], *above])
            given = listed(fresh.words, vocab) if fresh.place is Place.OPEN else []
            ids[i, node] = rng.choice(given if given and rng.random() < 0.8 else range(vocab))
            paths[i, node] = [*above, int(ids[i, node])]
        found = tree_masks(ids, parents, np.array([10, 1, 7, 10]), batch)
        for i, node in np.argwhere(found.row_of >= 0).tolist():
            fresh = single_steps(make(grammar), ends, vocab, [*starts[i], *paths[i, node]])
            assert np.array_equal(found.words[found.row_of[i, node]], fresh.words)
            assert max(listed(fresh.words, 32 * len(fresh.words))) < vocab
            seen += node > 0
    assert seen > 30


def legal_bytes(one: Constraint) -> list[int]:
    """Tokens of one byte that may follow and end nothing."""
    return [t for t in listed(one.words, VOCAB) if t > 2 and len(token_bytes(TOKENIZER, t)) == 1]


def single_steps(automaton: Automaton, ends: list[int], vocab: int, ids: list[int]) -> Constraint:
    one = Constraint(automaton, ends, vocab)
    for token in ids:
        one.take([token])
    return one


def some_tree(
    one: Constraint, automaton: Automaton, start: list[int], rng: random.Random
) -> TokenTree:
    tokens, parents, paths = [start[-1] if start else 0], [-1], [list[int]()]
    while len(tokens) < 12:
        parent = rng.randrange(len(tokens))
        fresh = stepped(automaton.restart(), [*start, *paths[parent]])
        legal = [] if fresh is None else listed(fresh.words, VOCAB)
        token = rng.choice(legal) if legal and rng.random() < 0.75 else rng.randrange(VOCAB)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
            paths.append([*paths[parent], token])
    return TokenTree(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([len(tokens)]))


def stepped(automaton: Automaton, ids: list[int]) -> Constraint | None:
    """A constraint that took `ids` one by one; None where they leave the grammar."""
    one = Constraint(automaton, [IM_END], VOCAB)
    for token in ids:
        if one.place is not Place.OPEN or commit(one, token) is Place.BROKEN:
            return None
    return one


def in_grammar(automaton: Automaton, start: list[int], path: list[int]) -> bool:
    *inner, last = path or [None]
    before = stepped(automaton, [*start, *inner])  # type: ignore[list-item]
    if last is None:
        return True
    return before is not None and last in listed(before.words, VOCAB) * (before.place is Place.OPEN)


def paths_of(tree: TokenTree) -> list[list[int]]:
    paths: list[list[int]] = []
    for node in range(int(tree.num_nodes[0])):
        parent = int(tree.parents[0, node])
        paths.append([*paths[parent], int(tree.tokens[0, node])] if node else [])
    return paths


def test_blanks_in_json_are_bounded(compile: Compile) -> None:
    """A model that wants to write blanks for ever cannot."""
    one = constraint(compile, Grammar("json_schema", '{"type": "array"}', "json_schema"))
    blanks = [t for t in range(3, VOCAB) if token_bytes(TOKENIZER, t).strip() == b""]
    for token in spell("["):
        commit(one, token)
    taken = 0
    while allowed := set(listed(one.words, VOCAB)) & set(blanks):
        taken += len(token_bytes(TOKENIZER, min(allowed)))
        commit(one, min(allowed))
    assert 1 <= taken <= 33


def test_undeclared_keys_are_allowed_behind_the_others_where_the_schema_or_the_flag_says_so(
    compile: Compile,
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    opened = make_compiler(TOKENIZER, VOCAB, [IM_END], closed=False)
    for how, more, kept in (
        (compile, {}, False),
        (compile, {"additionalProperties": True}, True),
        (opened, {}, True),
        (opened, {"additionalProperties": False}, False),
    ):
        grammar = Grammar("json_schema", json.dumps(schema | more), "json_schema")
        for text, allowed in (('{"a":1}', True), ('{"a":1,"b":2}', kept), ('{"b":2,"a":1}', False)):
            one = how(grammar)
            assert all(map(one.step, spell(text))) == allowed, text


A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
READINGS: list[tuple[Any, str, bool]] = [
    ({"properties": {"x": A}}, '{"x":{"a":1}}', True),
    ({"properties": {"x": A}}, '{"x":{"b":1}}', False),
    ({"items": A}, '[{"c":1}]', False),
    ({"anyOf": [A, B]}, '{"b":1}', True),
    ({"allOf": [A, B]}, '{"a":1,"b":2}', True),
    (
        {"$defs": {"a": A, "b": B}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        '{"a":1,"b":2}',
        True,
    ),
    ({**A, "required": ["z"]}, '{"a":1,"z":2}', True),
    ({**A, "patternProperties": {"^b$": {}}}, '{"a":1,"b":2}', True),
    ({"properties": {"properties": {"type": "integer"}}}, '{"properties":1}', True),
    ({"type": "string", "format": "postal"}, '"x"', True),
    ({"type": "integer", "format": "int32"}, "1", True),
    ({"type": "string", "format": "date"}, '"x"', False),
    ({"properties": {"format": {"const": 1}}}, '{"format":1}', True),
    ({"type": "array", "uniqueItems": False}, "[1,1]", True),
]


@pytest.mark.parametrize(("schema", "text", "allowed"), READINGS)
def test_how_schemas_are_read(compile: Compile, schema: Any, text: str, allowed: bool) -> None:
    schema = {"type": "object"} | schema if "properties" in schema else schema
    one = compile(Grammar("json_schema", json.dumps(schema), "json_schema"))
    assert all(map(one.step, spell(text))) == allowed


def test_what_ends_the_text_may_be_drawn_only_where_it_may_end(compile: Compile) -> None:
    one = constraint(compile, Grammar("regex", "[0-9]{2,3}", "regex"))
    for digit, may_end in (("1", False), ("2", True)):
        assert IM_END not in listed(one.words, VOCAB)
        assert commit(one, spell(digit)[0]) is Place.OPEN
        assert (IM_END in listed(one.words, VOCAB)) == may_end
        one.words[IM_END >> 5] &= ~np.int32(1 << IM_END)
    assert commit(one, spell("3")[0]) is Place.ENDED
    ignoring = Constraint(compile(Grammar("regex", "a{0,2}", "regex")), [], VOCAB)
    assert IM_END not in listed(ignoring.words, VOCAB), "with ignore_eos nothing ends it early"


def test_a_vocabulary_wider_than_the_tokenizer() -> None:
    """Ids without a token are never allowed; so it is with a width that is no multiple of 32."""
    wide = make_compiler(TOKENIZER, VOCAB + 77, [IM_END])
    one = Constraint(wide(Grammar("regex", "(.|\n)*", "regex")), [IM_END], VOCAB + 77)
    found = listed(one.words, 32 * len(one.words))
    assert max(found) < VOCAB
    assert len(found) > 400


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_by_name() -> None:
    narrow = make_compiler(TOKENIZER, VOCAB - 100, [IM_END])
    with pytest.raises(GrammarError, match="is not supported with this model's tokenizer"):
        narrow(Grammar("regex", "a", "regex"))


def test_from_python(tiny_model_dir: Path) -> None:
    """A schema may be the schema itself; what cannot be served is an error of the request."""
    llm = LLM(str(tiny_model_dir), max_total_tokens=2000)
    schema = SCHEMAS["enum"]
    as_object, as_text = llm.generate(
        ["a", "a"],
        [{"json_schema": schema, "seed": 1}, {"json_schema": json.dumps(schema), "seed": 1}],
    )
    assert as_object.text == as_text.text
    jsonschema.validate(json.loads(as_object.text), schema)
    with pytest.raises(InvalidRequestError, match="regex cannot be compiled: unclosed group"):
        llm.generate("a", {"regex": "("})
    with pytest.raises(InvalidRequestError, match="json_schema and ebnf cannot both be given"):
        llm.generate("a", {"json_schema": {}, "ebnf": "root ::= [a]"})
    bare = LLM(str(tiny_model_dir), max_total_tokens=2000, grammar_backend="none")
    with pytest.raises(
        InvalidRequestError, match=r"ebnf is not supported: .*--grammar-backend none"
    ):
        bare.generate("a", {"ebnf": 'root ::= "a"'})
    assert bare.generate("a", {"max_new_tokens": 2})[0].output_ids


REFUSED: list[tuple[str, Any, str]] = [
    ("json_schema", "{", "EOF"),
    ("json_schema", "[1]", "Expecting object"),
    ("json_schema", {"type": "strin"}, "Invalid type: strin"),
    (
        "json_schema",
        {"properties": {"tags": {"type": "array", "uniqueItems": True}}},
        "properties.tags.uniqueItems is not supported",
    ),
    (
        "json_schema",
        {"items": {"anyOf": [{"type": "string", "pattern": "^(?=a)b"}]}},
        "items.anyOf.0.pattern is not supported: it looks ahead or behind",
    ),
    ("json_schema", {"not": {"const": 3}}, "not"),
    ("json_schema", {"if": {}, "then": {}}, "if"),
    ("json_schema", {"type": "integer", "minimum": 9, "maximum": 3}, "minimum"),
    ("json_schema", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    ("json_schema", {"$ref": "#/$defs/none"}, "none"),
    ("json_schema", {"$ref": "http://127.0.0.1:9/x.json"}, "not"),
    ("json_schema", {"type": "string", "pattern": "("}, "unclosed"),
    ("json_schema", {"$ref": "#"}, "allows no text"),
    ("json_schema", "false", ""),
    ("regex", "(", "unclosed group"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", "(?=a)a", "look-around"),
    ("regex", "a\ud800", "surrogates"),
    ("regex", "()", "allows no text"),
    ("ebnf", 'root ::= ""', "allows no text"),
    ("ebnf", "root ::= missing", "line 1, column 10: there is no rule named missing"),
]


@pytest.mark.parametrize(("kind", "given", "reason"), REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line(
    compile: Compile, kind: Any, given: Any, reason: str
) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    try:
        automaton = compile(Grammar(kind, text, kind))
    except GrammarError as error:
        message = str(error)
        assert message.startswith("cannot be compiled: ")
        assert reason in message
        assert "\n" not in message
        assert len(message) < MAX_REASON_CHARS + 40
    else:  # a text without an end compiles; following it is cut off by the budget, or fails by name
        assert (kind, text) == ("ebnf", 'root ::= "a" root')
        one = Constraint(automaton, [IM_END], VOCAB)
        walked(one, random.Random(1), 200)
        assert one.place is Place.OPEN or one.problem


def chain(count: int, link: Any) -> str:
    """A schema whose definitions refer to each other `count` deep."""
    names = [f"a{i}" for i in range(count + 1)]
    rules = {a: link(b) for a, b in itertools.pairwise(names)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": rules | {names[-1]: {"type": "null"}}})


def wide_object(name: str) -> Schema:
    return {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{name}"}}, "required": ["x"]}


Schema = dict[str, Any]
HOSTILE: dict[str, Grammar] = {
    "deep references": Grammar("json_schema", chain(2500, wide_object), ""),
    "reference chain": Grammar("json_schema", chain(6000, lambda b: {"$ref": f"#/$defs/{b}"}), ""),
    "deep anyOf": Grammar(
        "json_schema",
        chain(3000, lambda b: {"anyOf": [{"$ref": f"#/$defs/{b}"}, {"const": b}]}),
        "",
    ),
    "doubling": Grammar(
        "json_schema", chain(40, lambda b: {"allOf": [{"$ref": f"#/$defs/{b}"}] * 2}), ""
    ),
    "product": Grammar(
        "json_schema",
        json.dumps(
            {"allOf": [{"anyOf": [{"pattern": f"{i}{j}"} for j in range(6)]} for i in "abcd"]}
        ),
        "",
    ),
    "nested schema": Grammar("json_schema", '{"items":' * 20000 + "{}" + "}" * 20000, ""),
    "large enum": Grammar(
        "json_schema", json.dumps({"enum": [f"{i:x}" for i in range(15000)]}), ""
    ),
    "endless object": Grammar(
        "json_schema", json.dumps(wide_object("").copy() | {"properties": {"x": {"$ref": "#"}}}), ""
    ),
    "counted regex": Grammar("regex", "((a{1,1000}){1,1000}){1,1000}", ""),
    "ambiguous regex": Grammar("regex", "(a?){300}a{300}", ""),
    "late difference": Grammar("regex", "(a|b)*a(a|b){20}", ""),
    "parentheses": Grammar("regex", "(" * 20000 + "a" + ")" * 20000, ""),
    "long regex": Grammar("regex", "a?b" * (MAX_GRAMMAR_CHARS // 3), ""),
    "rule chain": Grammar(
        "ebnf",
        "root ::= r0\n"
        + "".join(f'r{i} ::= "x" r{i + 1}\n' for i in range(9000))
        + 'r9000 ::= "y"',
        "",
    ),
    "recursive rule chain": Grammar(
        "ebnf",
        "root ::= r0\n"
        + "".join(f'r{i} ::= "x" r{i + 1}\n' for i in range(9000))
        + 'r9000 ::= "y" | r0',
        "",
    ),
    "many recursions": Grammar("ebnf", 'root ::= root root | "a" | ""', ""),
    "open groups": Grammar("ebnf", "root ::= " + "(" * 100000, ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_grammar_can_hurt_the_process(compile: Compile, name: str) -> None:
    """Compiled as the engine does it, in a thread with a deep stack, then followed and dropped."""
    assert len(HOSTILE[name].text) <= MAX_GRAMMAR_CHARS
    jobs = GrammarJobs(compile, VOCAB)
    job = jobs.submit(HOSTILE[name])
    while not job.done:
        jobs.poll()
        jobs.wait(0.05)
    if job.error is not None:
        assert "\n" not in job.error
        return
    one = jobs.constraint(job, [IM_END])
    walked(one, random.Random(1), 60)
    assert one.place is not Place.BROKEN or one.problem


EBNF_TEXTS: list[tuple[str, list[str], list[str]]] = [
    ('root ::= a b\na ::= "x"*\nb ::= "x"\n', ["x", "xx", "xxx"], ["", "y"]),
    ('root ::= "in" "!" | [a-z]+ "?"', ["in!", "in?", "i?", "inn?"], ["in", "in!?"]),
    (
        'root ::= l\nl ::= "(" l ")" | "in" "!" | w "?"\nw ::= [a-z] w | [a-z]\n',
        ["(in!)", "(in?)", "i?", "((a?))"],
        ["(in!", "in"],
    ),
    ('root ::= s\ns ::= "a" s "a" | "a"\n', ["a", "aaa", "aaaaa"], ["aa", ""]),
    ('root ::= "caf\\u00e9" | [\\u00e0-\\u00ff]+ "\\x21"', ["café", "éé!"], ["e!"]),
    ('root ::= .{2} "\\n"', ["ab\n", "\n\n\n", "é🚢\n"], ["a\n"]),
    ('root ::= "a"? "b"? ("c" | "")', ["a", "ab", "c", "abc"], ["ba"]),
    ('root ::= "" | "x" root', ["x", "xxx"], ["y"]),
    ('root ::= [^"\\\\]+ "\\"" [\\]\\-a-c^-]', ['a"]', 'b"-', 'xx"^'], ['"a', 'a"d', '\\"a']),
    ('root ::= ("ab" | "cd"){2,3} "e"{0,1} "f"{2}', ["ababff", "abcdabeff"], ["abff", "ababf"]),
    ('root ::= x{2,} # c\nx ::= # d\n  "a"\n  | "b"\n', ["ab", "abab"], ["a"]),
    (
        "root ::= e\ne ::= e [+*] t | t\nt ::= n | [(] e [)]\nn ::= [0-9]+ ([.] [0-9]+)?",
        ["1", "1+2", "(1.5*2)+3"],
        ["1+", "(1", "1."],
    ),
    ('root ::= (("a"*)*)* "b"', ["b", "aab"], ["a", ""]),
    ('root ::= ("(" | ")" | "|")+', ["()|"], ["a"]),
    ('root-rule ::= "b"\nroot ::= "a" root-rule', ["ab"], ["a"]),
]


@pytest.mark.parametrize(("grammar", "inside", "outside"), EBNF_TEXTS)
def test_ebnf_means_what_it_says(
    compile: Compile, grammar: str, inside: list[str], outside: list[str]
) -> None:
    """Also where lexemes that take all they can would not."""
    for text in [*inside, *outside]:
        # Where only one text can follow, only the tokenizer's own tokens for it are allowed.
        ways = [spell(text), TOKENIZER.encode(text).ids]
        found = [stepped(compile(Grammar("ebnf", grammar, "ebnf")), ids) for ids in ways]
        complete = any(
            one is not None and (one.place is Place.ENDED or IM_END in listed(one.words, VOCAB))
            for one in found
        )
        assert complete == (text in inside), text


BAD_EBNF: list[tuple[str, str]] = [
    ('root := "a"', "line 1, column 6: .* cannot be read"),
    ("root ::= (a", r"line 1, column 10: this \( is not closed"),
    ('root ::= "a"\n\nroot ::= "b"', "line 3, column 1: the rule root is defined twice"),
    ('foo ::= "a"', "there is no rule named root"),
    ("", "there is no rule named root"),
    ("root ::= [z-a]", "the range z-a is empty"),
    ('root ::= "\\q"', "unknown escape"),
    ('root ::= "\\ud800"', "unknown escape"),
    ('root ::= "a"{3,1}', "at least 3 and at most 1"),
    ('root ::= "a" ) "b"', "column 14: a rule"),
    ("root ::= *", "column 10: '\\*' does not belong here"),
    ('root ::= "abc', "cannot be read"),
    ('root ::= (="a")', "cannot be read"),
    ("root ::= " + "(" * 101 + '"a"' + ")" * 101, "more than 100 nested"),
]


@pytest.mark.parametrize(("text", "message"), BAD_EBNF)
def test_ebnf_that_cannot_be_read_says_where(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_lark(text)
