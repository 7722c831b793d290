"""What the server can do once the model is loaded: one method per question a route asks."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

import sgl_spec
from sgl_spec.args import ResolvedArgs
from sgl_spec.errors import InvalidRequestError, UnavailableError
from sgl_spec.messages import EngineState
from sgl_spec.request import SamplingParams, TokenizedRequest
from sgl_spec.server.answers import FORMS, Talk
from sgl_spec.server.draft_trees import TreeWords
from sgl_spec.server.frontend import Frontend
from sgl_spec.server.http import Replies, Run
from sgl_spec.server.metrics import Metrics
from sgl_spec.server.model_info import ModelInfo
from sgl_spec.server.openai_protocol import (
    ChatPrompt,
    chat_call,
    check_model,
    read_chat,
    read_completions,
)
from sgl_spec.server.openai_replies import ChatReplies, CompletionReplies
from sgl_spec.server.output import Output, failure_of, simulation_mark
from sgl_spec.server.protocol import GenerateReplies, read_generate
from sgl_spec.server.requests import Made, RequestMaker, check_ids, encode, fresh_rid
from sgl_spec.server.responses import NAMES as RESPONSES_NAMES
from sgl_spec.server.responses import ResponsesReplies, as_chat
from sgl_spec.server.responses_schema import Responses
from sgl_spec.server.sampling import SamplingDefaults
from sgl_spec.server.schema import AbortRequest, Detokenize, Profile, Tokenize
from sgl_spec.server.tokenizer import ServerTokenizer

PROBE_TIMEOUT_S = 20.0
FLUSH_RETRY_S = 0.1
PROFILE_TIMEOUT_S = 300.0  # a long trace takes this long to be written
WARMUP_TOKENS = 8
# Always accepted as a model name, beside the served name and the model path.
ANY_MODEL = "default"


class Service:
    """A loaded model behind a frontend. metrics: present with --enable-metrics."""

    def __init__(
        self,
        args: ResolvedArgs,
        info: ModelInfo,
        tokenizer: ServerTokenizer,
        frontend: Frontend,
        metrics: Metrics | None,
    ) -> None:
        self.args = args
        self.info = info
        self.frontend = frontend
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._started = time.time()
        self._speculating = info.speculative_algorithm is not None
        self._reports: dict[str, Any] = {
            "tokenizer": tokenizer.tokenizer,
            "cache_report": args.enable_cache_report,
            "speculating": self._speculating,
            "simulated": args.simulate_acc_len,
        }
        names = (args.served_model_name, args.model_path, ANY_MODEL)
        self.names = tuple(dict.fromkeys(names))
        from_model = args.sampling_defaults == "model"
        self._defaults = SamplingDefaults(info.generation_defaults if from_model else {})
        given = args.tool_call_parser
        self._talk = Talk(
            tokenizer.form if given is None else FORMS[given], args.reasoning_parser is not None
        )
        self._maker = RequestMaker(
            info, tokenizer, truncate=args.allow_auto_truncate, seed=args.random_seed
        )

    async def generate(self, body: object) -> tuple[Run, bool]:
        """/generate: the run, and whether to stream it."""
        call = read_generate(body)
        made = await self._maker.make(call.asked, call.rid, stream=call.stream)
        replies = GenerateReplies(
            call,
            self._tokenizer.tokenizer,
            incremental=self.args.incremental_streaming_output,
            speculating=self._speculating,
        )
        return self._run(made, replies), call.stream

    async def completions(self, body: object) -> tuple[Run, bool]:
        """/v1/completions: the run, and whether to stream it."""
        call = read_completions(body, self._defaults, self.names, self._decode_prompt)
        made = await self._maker.make(call.asked, call.rid, stream=call.stream)
        if call.echo is not None and made.cut:
            call = msgspec.structs.replace(call, echo=self._cut_echo(call.echo, made))
        replies = CompletionReplies(call, made, self.names[0], **self._reports)
        return self._run(made, replies), call.stream

    async def chat(self, body: object) -> tuple[Run, bool]:
        """/v1/chat/completions: the run, and whether to stream it."""
        call = read_chat(body, self._defaults, self.names, self._render, self._talk)
        made = await self._maker.make(call.asked, call.rid, stream=call.stream)
        replies = ChatReplies(call, made, self.names[0], **self._reports)
        return self._run(made, replies), call.stream

    async def responses(self, body: object) -> tuple[Run, bool]:
        """/v1/responses: the run, and whether to stream it."""
        fields = Responses.read(body)
        call = chat_call(as_chat(fields), self._defaults, self.names, self._render, self._talk)
        (asked,) = call.asked
        if asked.sampling.get("grammar_field") == "response_format":
            asked.sampling["grammar_field"] = "text.format"
        asked = msgspec.structs.replace(asked, where="input", names=RESPONSES_NAMES)
        made = await self._maker.make([asked], None, stream=fields.stream)
        assert call.reader is not None
        marks = simulation_mark(self.args.simulate_acc_len)
        replies = ResponsesReplies(fields, made, self.names[0], call.reader, marks)
        return self._run(made, replies), fields.stream

    def _run(self, made: Made, replies: Replies) -> Run:
        tokenizer, source = self._tokenizer.tokenizer, self.info.speculative_algorithm
        marks: dict[str, Any] = simulation_mark(self.args.simulate_acc_len)
        if self.info.strict:
            marks["strict"] = True
        outputs = [
            Output(
                request,
                tokenizer,
                marks,
                TreeWords(tokenizer, request, source) if request.draft_trees else None,
            )
            for request in made.requests
        ]
        return Run(self.frontend, made, outputs, replies)

    def _decode_prompt(self, ids: list[int], where: str) -> str:
        check_ids(ids, where, self.info.vocab_size)
        return self._tokenizer.decode(ids)

    def _cut_echo(self, echo: list[str], made: Made) -> list[str]:
        """The prompts to repeat, those that were cut as the model saw them."""
        ids = {
            index: one.input_ids for index, one in zip(made.prompt_of, made.requests, strict=True)
        }
        return [
            self._beginning(text, ids[index]) if index in made.cut else text
            for index, text in enumerate(echo)
        ]

    def _beginning(self, text: str, ids: list[int]) -> str:
        """The text of a prompt's first ids; the special tokens that it writes out stay in it, those
        that the tokenizer added are left out."""
        written = self._tokenizer.decode(ids, skip_special_tokens=False)
        return written if text.startswith(written) else self._tokenizer.decode(ids)

    def _render(self, chat: ChatPrompt) -> str:
        return self._tokenizer.render_chat(
            chat.messages,
            add_generation_prompt=chat.generation_prompt,
            continue_final_message=chat.continue_final,
            tools=chat.tools or None,
            variables=chat.template_kwargs,
        )

    async def tokenize(self, body: object) -> dict[str, Any]:
        """/tokenize: ids of one text or of several."""
        fields = Tokenize.read(body)
        check_model(fields.model, self.names)
        single = isinstance(fields.prompt, str)
        texts = [fields.prompt] if isinstance(fields.prompt, str) else fields.prompt
        ids = [await encode(self._tokenizer, text, fields.add_special_tokens) for text in texts]
        counts = [len(one) for one in ids]
        return {
            "tokens": ids[0] if single else ids,
            "count": counts[0] if single else counts,
            "max_model_len": self.info.context_length,
        }

    def detokenize(self, body: object) -> dict[str, Any]:
        """/detokenize: text of one list of ids or of several."""
        fields = Detokenize.read(body)
        check_model(fields.model, self.names)
        tokens: Any = fields.tokens
        batch = bool(tokens) and isinstance(tokens[0], list)
        for i, ids in enumerate(tokens if batch else [tokens]):
            check_ids(ids, f"tokens[{i}]" if batch else "tokens", self.info.vocab_size)
        skip = fields.skip_special_tokens
        decode = self._tokenizer.decode
        if batch:
            return {"text": [decode(ids, skip_special_tokens=skip) for ids in tokens]}
        return {"text": decode(tokens, skip_special_tokens=skip)}

    def abort(self, body: object) -> None:
        """/abort_request: end one request, one call, or all."""
        fields = AbortRequest.read(body)
        if not fields.rid and not fields.abort_all:
            raise InvalidRequestError("Either rid or abort_all must be given.", param="rid")
        self.frontend.abort(None if fields.abort_all else fields.rid)

    async def warm_up(self) -> None:
        """Generate a few tokens, as many as one request may; raises what ends it badly."""
        await self._probe(min(WARMUP_TOKENS, self.info.max_request_tokens - 1))

    async def _probe(self, tokens: int) -> None:
        request = TokenizedRequest(
            rid=f"probe-{fresh_rid()}",
            input_ids=[min(1, self.info.vocab_size - 1)],
            sampling=SamplingParams(max_new_tokens=tokens, temperature=0, seed=0, ignore_eos=True),
            arrival=time.time(),
        )
        async with self.frontend.open([request]) as ticket:
            while updates := await ticket.updates():
                failure = failure_of(updates[-1].chunk.finish)
                if failure is not None:
                    raise failure

    async def check_generates(self) -> None:
        """/health_generate: raise `UnavailableError` unless the engine shows life in time.

        Any message of the engine is a sign of life, since a busy engine may let the probe wait.
        """
        before = self.frontend.received
        try:
            await asyncio.wait_for(self._probe(1), PROBE_TIMEOUT_S)
        except TimeoutError:
            if self.frontend.received == before:
                raise UnavailableError(
                    f"The engine has sent nothing for {PROBE_TIMEOUT_S:.0f} s."
                ) from None

    async def flush_cache(self, timeout_s: float) -> tuple[bool, str]:
        """/flush_cache: whether it worked, and what the engine says; retries until `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            reply = await self.frontend.control("flush_cache")
            if reply.ok or time.monotonic() >= deadline:
                return reply.ok, reply.message
            await asyncio.sleep(FLUSH_RETRY_S)

    async def profile(self, op: str, body: object) -> dict[str, Any]:
        """/start_profile and /stop_profile: what the engine says, and the trace's file."""
        args = Profile.read(body).model_dump(exclude={"profile_id"})
        reply = await self.frontend.control(op, args, PROFILE_TIMEOUT_S)
        if not reply.ok:
            raise InvalidRequestError(reply.message, param=reply.param)
        return {"message": reply.message, **reply.data}

    async def metrics_text(self) -> bytes | None:
        """/metrics, with the engine's counters as of now; None without --enable-metrics."""
        if self._metrics is None:
            return None
        self._metrics.engine.state = await self.frontend.state()
        return self._metrics.text()

    def model_info(self) -> dict[str, Any]:
        """/model_info."""
        args, info = self.args, self.info
        return {
            "model_path": args.model_path,
            "served_model_name": args.served_model_name,
            "tokenizer_path": args.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "load_format": args.load_format,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": info.model_type,
            "architectures": info.architectures,
            "vocab_size": info.vocab_size,
            "context_length": info.context_length,
            "dtype": info.dtype,
            "device": info.device,
        }

    async def server_info(self) -> dict[str, Any]:
        """/server_info: every option as resolved, what the engine found, and its counters now."""
        info = msgspec.to_builtins(self.info)
        state = await self.frontend.state()
        found = {
            "version": sgl_spec.__version__,
            "startup_time": self._started,
            "sampling_default_values": self._defaults.values,
            "internal_states": [self._internal_state(state)],
        }
        return {**self.args.public(), **info, **found}

    async def load(self) -> list[dict[str, int]]:
        """/get_load: SGLang's fields, of the one engine that there is."""
        state = await self.frontend.state()
        return [
            {
                "dp_rank": 0,
                "num_reqs": state.running + state.queued,
                "num_waiting_reqs": state.queued,
                "num_tokens": state.used_tokens,
            }
        ]

    def _internal_state(self, state: EngineState) -> dict[str, Any]:
        shown: dict[str, Any] = msgspec.to_builtins(state)
        shown |= {
            "last_gen_throughput": state.gen_throughput,
            "effective_max_running_requests": self.info.max_running_requests,
            "effective_max_running_requests_per_dp": self.info.max_running_requests,
            "memory_usage": self.info.memory,
            **simulation_mark(self.args.simulate_acc_len),
        }
        if self._speculating and state.spec_verify_total:
            shown["avg_spec_accept_length"] = state.spec_emitted_total / state.spec_verify_total
        return shown

    def models(self) -> list[dict[str, Any]]:
        """The cards of /v1/models."""
        return [
            {
                "id": self.names[0],
                "object": "model",
                "created": int(self._started),
                "owned_by": "sgl-spec",
                "root": self.args.model_path,
                "parent": None,
                "max_model_len": self.info.context_length,
            }
        ]
