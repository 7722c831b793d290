"""Incremental decoding and stop strings against whole decodes and brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from sgl_spec.errors import ConfigError
from sgl_spec.text import (
    IncrementalDecoder,
    OutputText,
    StopMatcher,
    StopTrimmer,
    check_tokenizer,
    first_completed,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps.  Twice!",
    "naïve café, déjà vu; größer als 42 °C",
    "你好、世界。今天天气很好。",
    "สวัสดีชาวโลก ภาษาไทย",
    "👩\u200d👩\u200d👧 👍🏽 🇩🇪 done",
]
ALPHABET = "ab c\n.é\ufffd你好ไทสวั👩👧👍🏽\u200d🇩▁Ā<>"
TEXT = st.text(st.one_of(st.sampled_from(ALPHABET), st.characters(codec="utf-8")), max_size=40)


def byte_level() -> Tokenizer:
    """A byte-level BPE of all 256 bytes, some merges, two special and one ordinary added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("two words ü", normalized=False)])
    return tokenizer


def sentencepiece(decoder: decoders.Decoder, *, byte_fallback: bool = True) -> Tokenizer:
    """A BPE over text with ▁ for spaces, byte tokens for everything else, and specials."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    if byte_fallback:
        vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for char in "▁abcdefghijklmnopqrstuvwxyzTé.,!":
        vocab[char] = len(vocab)
    merges = [("▁", "a"), ("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁▁", "▁▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


LLAMA_STEPS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
TOKENIZERS = {
    "byte_level": byte_level(),
    "llama": sentencepiece(decoders.Sequence([*LLAMA_STEPS, decoders.Strip(" ", 1, 0)])),
    "no_strip": sentencepiece(decoders.Sequence(LLAMA_STEPS)),
    "metaspace": sentencepiece(decoders.Metaspace(), byte_fallback=False),
    "metaspace_never": sentencepiece(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    ),
}
NAMES = st.sampled_from(sorted(TOKENIZERS))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def chunked(data: st.DataObject, ids: Sequence[int]) -> list[list[int]]:
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8).map(sorted))
    edges = [0, *cuts, len(ids)]
    return [list(ids[a:b]) for a, b in itertools.pairwise(edges)]


def stream(decoder: IncrementalDecoder, chunks: Sequence[Sequence[int]]) -> list[str]:
    return [*(decoder.push(chunk) for chunk in chunks), decoder.flush()]


@given(NAMES, TEXT, st.booleans(), st.data())
def test_real_text_in_any_chunks_is_the_whole_decode(
    name: str, text: str, skip: bool, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = encode(tokenizer, text)
    specials = st.sampled_from(
        [
            tokenizer.token_to_id(t)
            for t in ("<s>", "<|im_end|>")
            if tokenizer.token_to_id(t) is not None
        ]
    )
    if name in ("byte_level", "metaspace"):  # elsewhere a special token would end a byte run
        for at in data.draw(st.lists(st.integers(0, len(ids)), max_size=3)):
            ids.insert(at, data.draw(specials))
    parts = stream(IncrementalDecoder(tokenizer, skip_special_tokens=skip), chunked(data, ids))
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)
    if skip and "\ufffd" not in text:
        assert "\ufffd" not in "".join(parts)


@given(st.data(), st.booleans())
def test_random_byte_level_ids_are_the_whole_decode(data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=60))
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(decoder, chunked(data, ids))) == expected


@given(st.binary(max_size=40), st.data())
def test_random_bytes_decode_as_the_library_decodes_them(raw: bytes, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    table = {byte: char for byte, char in zip(*_alphabet(), strict=True)}
    ids = [tokenizer.token_to_id(table[byte]) for byte in raw]
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    assert "".join(stream(decoder, chunked(data, ids))) == tokenizer.decode(ids)


def _alphabet() -> tuple[list[int], list[str]]:
    # Learned from the library, not from our own table: each byte of a character, encoded alone.
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pairs: dict[int, str] = {}
    for code in [*range(0x800), *range(0x1000, 0xD800, 0x1000), *range(0x10000, 0x110000, 0x10000)]:
        encoded = pre.pre_tokenize_str(chr(code))[0][0]
        pairs |= dict(zip(chr(code).encode(), encoded, strict=True))
    for byte in set(range(256)) - set(pairs):
        rest = set(pre_tokenizers.ByteLevel.alphabet()) - set(pairs.values())
        pairs[byte] = min(rest)
    return list(pairs), list(pairs.values())


@given(st.sampled_from(["llama", "no_strip"]), st.data())
def test_random_byte_fallback_ids_replace_invalid_bytes_only(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=60))
    text = "".join(
        stream(IncrementalDecoder(tokenizer, skip_special_tokens=True), chunked(data, ids))
    )
    assert text == fallback_reference(tokenizer, ids, strip=name == "llama")


def fallback_reference(tokenizer: Tokenizer, ids: Sequence[int], *, strip: bool) -> str:
    """All bytes at once; every byte of an invalid sequence becomes one U+FFFD."""
    raw = b""
    for token_id in ids:
        token = tokenizer.id_to_token(token_id) or ""
        if token in ("<unk>", "<s>", "</s>"):
            continue
        is_byte = token.startswith("<0x")
        raw += bytes([int(token[3:5], 16)]) if is_byte else token.replace("▁", " ").encode()
    text, at = "", 0
    while at < len(raw):
        width = next((n for n in (1, 2, 3, 4) if valid(raw[at : at + n])), 0)
        text += raw[at : at + width].decode() if width else "\ufffd"
        at += width or 1
    return text[1:] if strip and text.startswith(" ") else text


def valid(raw: bytes) -> bool:
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False


@given(NAMES, TEXT, TEXT, st.booleans())
def test_the_prompt_gives_context_but_no_text(
    name: str, prompt: str, text: str, whole_prompt: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = encode(tokenizer, prompt + "a" + text)
    cut = len(encode(tokenizer, prompt + "a"))
    if tokenizer.decode(ids[:cut]) == "" or not 0 < cut < len(ids):
        return
    tail = ids[:cut] if whole_prompt else ids[max(0, cut - 4) : cut]
    before = tokenizer.decode(ids[:cut])
    whole = tokenizer.decode(ids)
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True, prompt_tail=tail)
    got = decoder.push(ids[cut:]) + decoder.flush()
    if before.endswith("\ufffd"):  # the cut went through a character: it belongs to the output
        before = before.rstrip("\ufffd")
        got = whole[len(before) : len(whole) - len(got)] + got
    assert whole == before + got


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_at_the_start() -> None:
    for name in ("llama", "metaspace"):
        tokenizer = TOKENIZERS[name]
        the = [tokenizer.token_to_id("▁the")]
        for tail, expected in (([], "the"), ([1], "the"), (encode(tokenizer, "a."), " the")):
            decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True, prompt_tail=tail)
            assert decoder.push(the) == expected


def test_a_character_is_given_out_with_its_last_byte_and_not_before() -> None:
    for name in ("byte_level", "llama"):
        tokenizer = TOKENIZERS[name]
        ids = encode(tokenizer, "a🎲")
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
        parts = [decoder.push([token_id]) for token_id in ids]
        assert parts[-1] == "🎲"
        assert "".join(parts[:-1]) == "a"
        assert len(parts) >= 4


def test_a_character_begun_by_the_prompt_is_completed_by_the_output() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = encode(tokenizer, "🎲")
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True, prompt_tail=ids[:2])
    assert decoder.push(ids[2:]) + decoder.flush() == "🎲"
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True, prompt_tail=ids[:2])
    assert decoder.push(encode(tokenizer, "x")) + decoder.flush() == "x"


def test_skipped_tokens_inside_a_character_do_not_break_it() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = encode(tokenizer, "🎲")
    ids.insert(2, tokenizer.token_to_id("<|im_end|>"))
    ids.insert(1, 10**6)
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    assert "".join(stream(decoder, [[i] for i in ids])) == "🎲" == tokenizer.decode(ids)


def test_endless_invalid_bytes_are_given_out_and_hold_a_bounded_tail() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    lead = encode(tokenizer, "🎲")[0]
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    given_out = [len(decoder.push([lead])) for _ in range(10_000)]
    assert sum(given_out) == 9_999
    assert max(given_out) == 1
    assert len(decoder._utf8.getstate()[0]) <= 3


def test_decoders_that_cannot_be_split_are_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    with pytest.raises(ConfigError, match="has no decoder"):
        check_tokenizer(tokenizer)
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"WordPiece.*not supported; supported are ByteLevel"):
        check_tokenizer(tokenizer)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.ByteFallback()])
    with pytest.raises(ConfigError, match="mixes ByteLevel"):
        check_tokenizer(tokenizer)


def test_fuse_and_replace_of_a_pattern() -> None:
    tokenizer = sentencepiece(decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]))
    with pytest.raises(ConfigError, match="Strip"):
        check_tokenizer(tokenizer)


# --- stop strings -----------------------------------------------------------------------------

SMALL = st.text("ab你🎲 ", max_size=25)
STOPS = st.lists(st.text("ab你🎲 ", min_size=1, max_size=5), min_size=1, max_size=4)


def brute_force_stop(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]
) -> tuple[int, int, str] | None:
    """(number of tokens, end in the text, stop): looks at every prefix of the certain text."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[:count])).rstrip("\ufffd")
        for end in range(1, len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found:
                return count, end, max(found, key=len)
    return None


@given(st.sampled_from(["byte_level", "llama", "no_strip"]), SMALL, STOPS)
@settings(max_examples=200)
def test_the_matcher_equals_brute_force_in_any_order(
    name: str, text: str, stops: list[str]
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = encode(tokenizer, text)
    expected = brute_force_stop(tokenizer, ids, stops)
    for order in (stops, stops[::-1]):
        matcher = StopMatcher(tokenizer, order)
        hits = [(at, hit) for at, i in enumerate(ids, 1) if (hit := matcher.push(i)) is not None]
        assert hits[:1] == ([] if expected is None else [(expected[0], expected[2])])


@given(st.sampled_from(["byte_level", "llama", "no_strip"]), SMALL, STOPS, st.booleans(), st.data())
@settings(max_examples=200)
def test_streams_never_show_a_stop_and_equal_the_whole_text(
    name: str, text: str, stops: list[str], keep: bool, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = encode(tokenizer, text)
    expected = brute_force_stop(tokenizer, ids, stops)
    whole = tokenizer.decode(ids)
    matched = None
    if expected is not None:
        count, end, matched = expected
        ids, whole = ids[:count], whole[: end if keep else end - len(matched)]
    *chunks, last = chunked(data, ids)
    if matched is not None and not last:
        chunks, last = [], ids
    output = OutputText(tokenizer, stops, no_stop_trim=keep)
    parts = [output.push(chunk) for chunk in chunks]
    for shown in ("".join(parts[:n]) for n in range(len(parts) + 1)):
        assert whole.startswith(shown)
    assert "".join(parts) + output.finish(last, matched) == whole


@given(SMALL, STOPS)
def test_what_is_held_back_is_the_longest_possible_start_of_a_stop(
    text: str, stops: list[str]
) -> None:
    shown = StopTrimmer(stops).push(text)
    lengths = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    assert shown == text[: len(text) - max(lengths)]


def test_a_stop_completed_by_the_last_byte_of_a_character_is_found_there() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = encode(tokenizer, "ok 🎲")
    matcher = StopMatcher(tokenizer, ["k 🎲"])
    assert [matcher.push(i) for i in ids] == [None] * (len(ids) - 1) + ["k 🎲"]


def test_the_prompt_is_not_searched() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    matcher = StopMatcher(tokenizer, ["abc"], prompt_tail=encode(tokenizer, "ab"))
    assert [matcher.push(i) for i in encode(tokenizer, "c")] == [None]


def test_special_tokens_are_searched_only_if_the_client_sees_them() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    end = tokenizer.token_to_id("<|im_end|>")
    assert StopMatcher(tokenizer, ["_end|>"], skip_special_tokens=False).push(end) == "_end|>"
    assert StopMatcher(tokenizer, ["_end|>"]).push(end) is None


def test_the_earlier_of_two_stops_in_one_token_wins() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    added = tokenizer.token_to_id("two words ü")
    for stops in (["words", "two"], ["two", "words"]):
        assert StopMatcher(tokenizer, stops).push(added) == "two"
        assert OutputText(tokenizer, stops).finish([added], "two") == ""
        assert OutputText(tokenizer, stops, no_stop_trim=True).finish([added], "two") == "two"


def test_of_two_stops_with_one_end_the_longer_is_cut() -> None:
    assert first_completed("xabc", ["c", "abc", "bc"], 0) == (4, "abc")


def test_a_stop_that_the_engine_let_pass_is_not_cut_but_the_later_one_is() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = encode(tokenizer, "a!b!c")
    for stops in (["!"], ["!", "a longer one"]):
        matcher = StopMatcher(tokenizer, stops)
        assert [matcher.push(i) for i in ids] == [None, "!", None, "!", None]
        assert OutputText(tokenizer, stops).finish(ids[:4], "!") == "a!b"


def test_a_stop_token_is_no_text_unless_it_is_asked_for() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = encode(tokenizer, "ab")
    assert OutputText(tokenizer).finish(ids, ids[-1]) == tokenizer.decode(ids[:-1])
    assert OutputText(tokenizer, no_stop_trim=True).finish(ids, ids[-1]) == "ab"


def test_held_text_comes_out_when_the_request_ends_otherwise() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    output = OutputText(tokenizer, ["stop it"])
    assert output.push(encode(tokenizer, "please sto")) == "please "
    assert output.finish([], None) == "sto"


def test_an_output_that_ends_inside_a_character_ends_with_one_replacement() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = encode(tokenizer, "x🎲")[:-1]
    output = OutputText(tokenizer)
    assert output.push(ids) == "x"
    assert output.finish([], None) == "\ufffd"
