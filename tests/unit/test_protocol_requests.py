"""From checked bodies to engine requests: lengths, ranges, seeds, names."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tiny import make_tokenizer

from sgl_spec.errors import InvalidRequestError
from sgl_spec.messages import Submit, decode_to_engine, encode
from sgl_spec.server.model_info import ModelInfo
from sgl_spec.server.requests import (
    Asked,
    Made,
    RequestMaker,
    derive_seed,
    name_requests,
)
from sgl_spec.server.sampling import native_sampling
from sgl_spec.server.schema import MAX_REQUESTS_PER_CALL, Sampling
from sgl_spec.server.tokenizer import ServerTokenizer

CONTEXT = 64
INFO = ModelInfo(
    model_dir="",
    tokenizer_dir="",
    model_path="",
    vocab_size=512,
    context_length=CONTEXT,
    max_req_input_len=CONTEXT - 1,
    max_request_tokens=CONTEXT,
    max_total_tokens=1000,
    max_running_requests=4,
    eos_token_ids=[2],
    generation_defaults={},
    architectures=[],
    model_type="",
    dtype="",
    device="",
    device_name="",
    attention_backend="",
    strict=False,
    chunked_prefill_size=256,
    page_size=1,
    speculative_algorithm=None,
    draft_tokens=None,
    acceptance_rule="follow",
    memory={},
)


@pytest.fixture(scope="module")
def tokenizer() -> ServerTokenizer:
    return ServerTokenizer(make_tokenizer(512), None, {})


def make(
    tokenizer: ServerTokenizer, *asked: Asked, rid: Any = None, truncate: bool = False, **info: int
) -> Made:
    maker = RequestMaker(
        msgspec.structs.replace(INFO, **info), tokenizer, truncate=truncate, seed=7
    )
    return asyncio.run(maker.make(asked, rid, stream=False))


def asked(prompt: Any, **sampling: Any) -> Asked:
    fields = Sampling.read({"max_new_tokens": 4} | sampling)
    return Asked(prompt=prompt, where="text", n=fields.n, sampling=native_sampling(fields, ""))


class TestMake:
    @pytest.mark.parametrize(
        ("sampling", "message"),
        [
            ({"min_new_tokens": 5}, "min_new_tokens must be an integer from 0 to 4"),
            (
                {"logit_bias": {"512": 1}},
                "logit_bias must be a map from token ids, 0 to 511, got 512",
            ),
            ({"logit_bias": {"-1": 1}}, "logit_bias must be a map from token ids"),
            ({"logit_bias": {"5": 100.5}}, r"logit_bias must be a map to numbers in \[-100, 100\]"),
            ({"logit_bias": {"5": -101}}, "logit_bias must be a map to numbers"),
            ({"stop": ["a"] * 33}, "stop must be at most 32"),
            ({"stop": ""}, "stop must be"),
            ({"stop_token_ids": [-5]}, "stop_token_ids must be"),
            ({"stop_token_ids": [512]}, "stop_token_ids must be"),
            ({"max_new_tokens": CONTEXT}, "Requested token count exceeds"),
        ],
    )
    def test_ranges(
        self, tokenizer: ServerTokenizer, sampling: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            make(tokenizer, asked([1], **sampling))

    def test_messages_use_the_routes_own_names(self, tokenizer: ServerTokenizer) -> None:
        item = msgspec.structs.replace(
            asked("a", min_new_tokens=5), names={"min_new_tokens": "min_tokens"}
        )
        with pytest.raises(InvalidRequestError, match=r"^min_tokens must be") as caught:
            make(tokenizer, item)
        assert caught.value.param == "min_tokens"

    @pytest.mark.parametrize("ids", [[512], [-1], [3, 2**62]])
    def test_ids_outside_the_vocabulary(self, tokenizer: ServerTokenizer, ids: list[int]) -> None:
        with pytest.raises(InvalidRequestError, match=r"text\[\d\] must be a token id from 0 to"):
            make(tokenizer, asked(ids))

    def test_the_whole_context_can_be_used_and_no_more(self, tokenizer: ServerTokenizer) -> None:
        for prompt in (1, CONTEXT - 2, CONTEXT - 1):
            (request,) = make(
                tokenizer, asked([5] * prompt, max_new_tokens=CONTEXT - prompt)
            ).requests
            assert len(request.input_ids) + request.sampling.max_new_tokens == CONTEXT
            with pytest.raises(InvalidRequestError, match="Requested token count exceeds"):
                make(tokenizer, asked([5] * prompt, max_new_tokens=CONTEXT - prompt + 1))
        for prompt, problem in (
            (CONTEXT, "leaves no room for output in"),
            (CONTEXT + 1, "is longer than"),
            (10 * CONTEXT, "is longer than"),
        ):
            message = rf"The input \({prompt} tokens\) {problem} the model's context length \(64 "
            with pytest.raises(InvalidRequestError, match=message):
                make(tokenizer, asked([5] * prompt))

    def test_a_pool_smaller_than_the_context(self, tokenizer: ServerTokenizer) -> None:
        small = {"max_req_input_len": 9, "max_request_tokens": 10}
        with pytest.raises(InvalidRequestError, match=r"Input length \(10 tokens\) exceeds"):
            make(tokenizer, asked([5] * 10), **small)
        item = msgspec.structs.replace(
            asked([5] * 4, max_new_tokens=7), names={"max_new_tokens": "max_tokens"}
        )
        with pytest.raises(InvalidRequestError, match=r"4 in text and 7 for max_tokens") as caught:
            make(tokenizer, item, **small)
        assert caught.value.param == "max_tokens"
        item = asked([5] * 4)
        item.sampling["max_new_tokens"] = None
        (request,) = make(tokenizer, item, **small).requests
        assert request.sampling.max_new_tokens == 6, "all that the pool leaves"

    def test_truncation_on_request(self, tokenizer: ServerTokenizer) -> None:
        (request,) = make(
            tokenizer, asked([5] * 100, max_new_tokens=30, min_new_tokens=9), truncate=True
        ).requests
        assert len(request.input_ids) == CONTEXT - 1
        assert (request.sampling.max_new_tokens, request.sampling.min_new_tokens) == (1, 1)

    def test_text_that_yields_no_token(self, tokenizer: ServerTokenizer) -> None:
        with pytest.raises(InvalidRequestError, match="text cannot be empty"):
            make(tokenizer, asked(""))

    def test_long_text_is_tokenised_alike(self, tokenizer: ServerTokenizer) -> None:
        text = "the harbour " * 2000
        sizes = ("context_length", "max_req_input_len", "max_request_tokens")
        (request,) = make(tokenizer, asked(text), **dict.fromkeys(sizes, 10**6)).requests
        assert request.input_ids == tokenizer.encode(text)

    def test_seeds(self, tokenizer: ServerTokenizer) -> None:
        made = make(tokenizer, asked("a", n=4, seed=42), asked("b", seed=42))
        seeds = [request.sampling.seed for request in made.requests]
        assert seeds == [42, *(derive_seed(42, i) for i in (1, 2, 3)), 42]
        assert made.prompt_of == [0, 0, 0, 0, 1]
        first, second = (make(tokenizer, asked("a"), asked("a")).requests for _ in range(2))
        assert first[0].sampling.seed != first[1].sampling.seed
        assert all(0 <= int(r.sampling.seed or 0) < 2**53 for r in first), "a double holds them"
        assert [r.sampling.seed for r in first] == [r.sampling.seed for r in second], (
            "--random-seed repeats the seeds of seedless requests"
        )

    def test_requests_cross_the_wire_unchanged(self, tokenizer: ServerTokenizer) -> None:
        speculation: list[Any] = [False, None, {"max_draft_tokens": 3}]
        for wish in speculation:
            item = asked(
                "a",
                stop=["x"],
                stop_token_ids=[5],
                temperature=1,
                top_k=2**63,
                seed=-(2**63),
                logit_bias={"5": -100, "7": 1},
                repetition_penalty=2,
                speculation=wish,
            )
            (request,) = make(tokenizer, item).requests
            assert decode_to_engine(encode(Submit(request))) == Submit(request)
        assert request.sampling.top_k == INFO.vocab_size, "more than all tokens is all tokens"


def test_derived_seeds_are_fixed_for_ever() -> None:
    """Written down: a change would change every n > 1 reply of a seeded request. 53 bits, so that a
    client which knows numbers as doubles alone can send every one of them back."""
    assert [derive_seed(42, i) for i in range(3)] == [
        42,
        6679422623415661,
        1440344771546334,
    ]
    assert derive_seed(-1, 1) == 8051922005355685
    seeds = {derive_seed(seed, i) for seed in range(100) for i in range(1, 50)}
    assert len(seeds) == 100 * 49
    assert all(0 <= seed < 2**53 and int(float(seed)) == seed for seed in seeds)


class TestNames:
    def test_one_request_is_called_by_the_rid(self) -> None:
        assert name_requests("x", [1]) == (["x"], None)

    def test_several_are_numbered_under_it(self) -> None:
        assert name_requests("x", [1, 2]) == (["x-0", "x-1", "x-2"], "x")

    def test_a_list_names_them_one_by_one(self) -> None:
        assert name_requests(["a", "b"], [1, 1]) == (["a", "b"], None)
        with pytest.raises(InvalidRequestError, match="got 2 for 3 requests"):
            name_requests(["a", "b"], [1, 2])

    def test_fresh_names_differ(self) -> None:
        assert name_requests(None, [1]) != name_requests(None, [1])

    def test_a_call_is_bounded(self) -> None:
        with pytest.raises(InvalidRequestError, match=f"at most {MAX_REQUESTS_PER_CALL} requests"):
            name_requests(None, [1] * (MAX_REQUESTS_PER_CALL + 1))
