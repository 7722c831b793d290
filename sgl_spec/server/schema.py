"""The bodies that the routes take: one declaration per field, with type, range, default and help.

`/openapi.json` shows these models, and `Body.read` refuses by them. null means "not given"
everywhere but inside lists. Nothing is converted, but that 2.0 is an integer, as in JSON Schema.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sgl_spec import request
from sgl_spec.errors import preview
from sgl_spec.request import refusal
from sgl_spec.server.unsupported import UNSUPPORTED

MAX_OPENAI_LOGPROBS = 20
MAX_RID_CHARS = 512
MAX_KEY_CHARS = 20  # of a token id in `logit_bias`
MAX_DRAFT_TOKENS = 1 << 16  # more than any tree holds, so that a larger wish is the same wish
# How alike two names are (by `difflib`, at most 1) of which one may be the other misspelt. Another
# server's field is likelier than a worse slip: "image_data" and "metadata" are alike by 0.67.
NEAR = 0.8


def fault(name: str, message: str) -> PydanticCustomError:
    """What is wrong with the field `name` of the object at hand; "{field}" in the message is its
    path in the body, "{value}" its value."""
    return PydanticCustomError("refused", "{text}", {"field": name, "text": message})


def words(allowed: str) -> WrapValidator:
    """Says what a field of several types takes, where pydantic would name each type by itself."""

    def check(value: Any, validate: Any) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError("words", "Input should be {a}", {"a": allowed}) from None

    return WrapValidator(check)


class Body(BaseModel):
    """An object that a client sends.

    unsupported: fields of other servers, each with the values that ask for nothing; null does
    always. elsewhere: fields that other routes or servers have, with what to say of them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    elsewhere: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def read(cls, body: object) -> Self:
        """The body, checked; raises `InvalidRequestError` naming a field that is wrong."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise refusal(error, body) from None

    @model_validator(mode="wrap")
    @classmethod
    def _names(cls, body: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse names that are not known here, and leave out what is null."""
        if not isinstance(body, dict):
            return validate(body)
        for name, value in body.items():
            cls._check_name(name, value)
        names = cls.names()
        return validate({k: whole(v) for k, v in body.items() if v is not None and k in names})

    @classmethod
    @functools.cache
    def names(cls) -> dict[str, None]:
        """What clients call its fields, in order."""
        return dict.fromkeys(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def _check_name(cls, name: str, value: object) -> None:
        if name in cls.unsupported:
            neutral = cls.unsupported[name]
            if value is not None and not any(_same(value, one) for one in neutral):
                allowed = " or ".join(["null", *map(preview, neutral)])
                raise fault(
                    name,
                    "{field} is not supported by this server: got {value}, only "
                    f"{allowed} is accepted.",
                )
        elif name not in cls.names():
            raise fault(name, f'Unknown field "{{field}}"{cls._hint(name)}')

    @classmethod
    def _hint(cls, name: str) -> str:
        """Where a field of this name, or of one much like it, is at home."""
        if name in cls.elsewhere:
            return f": {cls.elsewhere[name]}."
        for near in difflib.get_close_matches(name, [*cls.names(), *cls.elsewhere], 1, NEAR):
            home = f", {cls.elsewhere[near]}" if near in cls.elsewhere else ""
            return f". Did you mean {preview(near)}{home}?"
        return "."

    def same_meaning(self, first: str, second: str) -> None:
        """Raise if both fields are given and differ."""
        one, other = getattr(self, first), getattr(self, second)
        if None not in (one, other) and one != other:
            raise fault(
                second,
                f"{first} and {{field}} mean the same and differ: {preview(one)} and {{value}}.",
            )


def whole(value: Any) -> Any:
    """2.0 as 2, also in lists and lists of lists."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and {float, list} & set(map(type, value)):
        return [whole(one) for one in value]
    return value


def _same(value: object, neutral: object) -> bool:
    """Equality in which false is not 0 and an integer may equal a float."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _bias_keys(value: Any, validate: Any) -> Any:
    biases = validate(value)
    if not all(map(_is_id, biases)):
        raise ValueError
    return {int(token): bias for token, bias in biases.items()}


def _is_id(key: str) -> bool:
    digits = key.removeprefix("-")
    short = len(key) <= MAX_KEY_CHARS and digits.isascii() and digits.isdigit()
    return short and str(int(key)) == key


def _false(value: object) -> object:
    if value is not False:  # 0 is not
        raise ValueError
    return value


class DraftLimit(Body):
    """How much is drafted for one request."""

    max_draft_tokens: Annotated[int, Field(ge=0)]


Id = Annotated[int, Field(description="a token id")]
Ids = list[int]
Strings = Annotated[str | list[str], words("a string or a list of strings")]
IdLists = Annotated[Ids | list[Ids], words("a list of integers or a list of lists of integers")]
Prompts = Annotated[
    str | list[str] | Ids | list[Ids],
    words("a string, a list of strings, a list of integers or a list of lists of integers"),
]
Flags = Annotated[bool | list[bool], words("true, false or a list of these")]
Integers = Annotated[int | list[int], words("an integer or a list of integers")]
Name = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARS)]
Labels = dict[str, str]
Biases = Annotated[
    dict[str, float],
    WrapValidator(_bias_keys),
    words('an object of numbers by token id, as {"50256": -100}'),
]
Drafting = Annotated[
    Annotated[Literal[False], BeforeValidator(_false)] | DraftLimit,
    words('false or {"max_draft_tokens": k} with an integer k >= 0'),
]
JsonSchema = Annotated[dict[str, Any] | str, words("a JSON schema: an object or its text")]
OneGrammar = "at most one of the three: constrained output"

# What vLLM calls our grammars, or has called them.
_VLLM_GRAMMAR = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "structured_outputs": "json_schema, regex or ebnf",
}


class Settings(Body):
    """How tokens are drawn and where a text ends, as all three generating routes call it."""

    unsupported = UNSUPPORTED
    elsewhere = {
        "include_stop_str_in_output": 'it is "no_stop_trim" here',
        **{name: f"it is {preview(ours)} here" for name, ours in _VLLM_GRAMMAR.items()},
    }

    n: int = Field(
        1,
        ge=1,
        le=request.MAX_CHOICES,
        description=f"answers to each prompt, 1 to {request.MAX_CHOICES}; a call holds at most "
        "4096, prompts times `n`",
    )
    frequency_penalty: request.FrequencyPenalty = 0.0
    presence_penalty: request.PresencePenalty = 0.0
    logit_bias: Biases = Field(
        {},
        description='`{"id": [-100, 100]}`, added to the token\'s logit; -100 and 100 are '
        "absolute, see below",
    )
    stop: Strings = Field(
        [], description=f"a string, or at most {request.MAX_STOP_STRINGS}; none of them empty"
    )
    stop_token_ids: Ids = Field([], description="ids that end the text as EOS does")
    ignore_eos: request.IgnoreEos = False
    no_stop_trim: request.NoStopTrim = False
    skip_special_tokens: request.SkipSpecialTokens = True
    seed: request.Seed | None = None
    sampling_seed: request.Seed | None = Field(None, description="another word for `seed`")
    json_schema: JsonSchema | None = Field(None, description=OneGrammar)
    regex: str | None = Field(None, description=OneGrammar)
    ebnf: str | None = Field(None, description=OneGrammar)
    speculation: Drafting | None = Field(
        None,
        description='`false` or `{"max_draft_tokens": k}`: this request is drafted nothing, or at '
        "most k tokens a round; 0 is false. By default no text depends on it",
    )
    stream_interval: request.StreamInterval | None = None
    spaces_between_special_tokens: bool | None = Field(
        None, description="fast tokenizers, the only ones here, put nothing there"
    )

    @model_validator(mode="after")
    def _one_seed(self) -> Self:
        self.same_meaning("seed", "sampling_seed")
        return self


class Sampling(Settings):
    """`sampling_params` of /generate. The defaults are SGLang's; generation_config has no say."""

    max_new_tokens: request.NewTokens = 128
    min_new_tokens: request.MinTokens = 0
    temperature: request.Temperature = 1.0
    top_k: request.TopK = -1
    top_p: request.TopP = 1.0
    min_p: request.MinP = 0.0
    repetition_penalty: request.RepetitionPenalty = 1.0


class Generate(Body):
    """What /generate takes."""

    unsupported = UNSUPPORTED
    elsewhere = {
        **dict.fromkeys(Sampling.model_fields, "it belongs inside sampling_params"),
        **{name: f'it is "sampling_params.{ours}" here' for name, ours in _VLLM_GRAMMAR.items()},
        "include_stop_str_in_output": "it belongs inside sampling_params",
        "prompt": 'it is "text" here',
    }

    text: Strings | None = Field(None, description="a prompt, or one each of a batch")
    input_ids: IdLists | None = Field(None, description="the same in token ids")
    sampling_params: Sampling | list[Sampling] = Field(
        default_factory=Sampling, description="one object for all prompts, or a list of one each"
    )
    rid: Name | list[Name] | None = Field(None, description="a name, or one per request of a batch")
    stream: bool = Field(
        False,
        description="server-sent events, each with all of the text so far; "
        "`--incremental-streaming-output` sends what is new",
    )
    return_prompt_token_ids: bool = Field(False, description="the reply tells `prompt_token_ids`")
    return_logprob: Flags = Field(
        False,
        description="true, or one per prompt of a batch; without it the other fields may only "
        "have their defaults",
    )
    logprob_start_len: Integers = Field(
        -1,
        description="first position of the prompt to report, -1 for the output alone",
    )
    top_logprobs_num: Integers = Field(
        0,
        description=f"0 to {request.MAX_TOP_LOGPROBS}: the most likely tokens at every position, "
        "equal ones by rising id",
    )
    token_ids_logprob: IdLists = Field(
        [],
        description=f"at most {request.MAX_LOGPROB_IDS} ids to report at every position; a list "
        "of lists is one list per prompt",
    )
    return_text_in_logprobs: bool = Field(False, description="entries tell the token's text")
    log_metrics: bool | None = Field(None, description="metrics count every request")
    no_logs: bool | None = Field(None, description="a label")
    conversation_id: str | None = Field(None, description="a label")
    custom_labels: Labels | None = Field(
        None, description="labels; metrics carry `model_name` alone"
    )


class StreamOptions(Body):
    """What a stream tells of usage."""

    unsupported = {"include_obfuscation": (False,)}
    include_usage: bool = Field(False, description="one event with it at the end")
    continuous_usage_stats: bool = Field(False, description="in every event")


class NamedSchema(Body):
    """A JSON schema as OpenAI wraps it. Output follows it whether `strict` is set or not."""

    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="output follows the schema in any case")
    name: str | None = Field(None, description="a label")
    description: str | None = Field(None, description="a label")


class ResponseFormat(Body):
    """OpenAI's word for what the output must match."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise fault("json_schema", "{field} must be an object, got null.")
        if self.type != "json_schema" and self.json_schema is not None:
            raise fault(
                "type",
                '{field} must be "json_schema" where a json_schema is given, got {value}.',
            )
        return self


_OPENAI_UNSUPPORTED = {
    **UNSUPPORTED,
    "return_prompt_token_ids": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory", "in-memory"),
}
_FROM_MODEL = "; null: the model's generation_config"


class OpenAI(Settings):
    """What /v1/completions and /v1/chat/completions share."""

    unsupported = _OPENAI_UNSUPPORTED

    model: str | None = Field(
        None, description="the served name, the model path or `default`; others are a 404"
    )
    temperature: request.Temperature | None = None
    top_k: request.TopK | None = None
    top_p: request.TopP | None = None
    min_p: request.MinP | None = None
    repetition_penalty: request.RepetitionPenalty | None = None
    min_tokens: request.MinTokens = Field(0, description="`min_new_tokens`")
    stream: bool = Field(False, description="server-sent events")
    stream_options: StreamOptions = Field(
        default_factory=StreamOptions, description="what a stream tells of usage"
    )
    response_format: ResponseFormat | None = Field(None, description="constrained output")
    return_spec_tokens_details: bool = Field(False, description="what speculation reports")
    return_meta_info: bool = Field(False, description="what speculation reports")
    user: str | None = Field(None, description="a label")
    safety_identifier: str | None = Field(None, description="a label")
    prompt_cache_key: str | None = Field(None, description="a label")
    metadata: Labels | None = Field(None, description="labels")
    log_metrics: bool | None = Field(None, description="metrics count every request")
    custom_labels: Labels | None = Field(
        None, description="labels; metrics carry `model_name` alone"
    )


class Completions(OpenAI):
    """What /v1/completions takes."""

    unsupported = {**_OPENAI_UNSUPPORTED, "suffix": ("",)}

    prompt: Prompts = Field(description="a string, a list of strings, of ids or of lists of ids")
    max_tokens: request.NewTokens = Field(16, description="0 or more")
    echo: bool = Field(False, description="the prompt's text in front")
    rid: Name | list[Name] | None = Field(None, description="a name, or one per request of a batch")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_OPENAI_LOGPROBS, description=f"0 to {MAX_OPENAI_LOGPROBS}"
    )


class TextPart(Body):
    """A part of a message's content."""

    unsupported = dict.fromkeys(
        ("image_url", "input_audio", "file", "video_url", "audio_url", "refusal"), ()
    )
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Field(None, description="a hint to other servers")


class CalledFunction(Body):
    """What was called, and with what."""

    name: str
    arguments: str = Field(description="a JSON object as text")

    @model_validator(mode="after")
    def _arguments_are_json(self) -> Self:
        try:
            is_object = isinstance(json.loads(self.arguments or "{}"), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise fault("arguments", "{field} must be the text of a JSON object, got {value}.")
        return self


class ToolCall(Body):
    """A call in the history."""

    id: str | None = Field(None, description="what the answer to it names")
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="of a stream")


class Function(Body):
    """A function that may be called."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = Field(None, description="told to the model")
    parameters: dict[str, Any] | None = Field(
        None, description="a JSON schema; null for a function without"
    )
    strict: bool | None = Field(
        None, description="where calls are required, arguments follow the schema in any case"
    )


class Tool(Body):
    """What a chat offers."""

    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = Field(None, description="a hint to other servers")


class FunctionName(Body):
    """Which function."""

    name: str


class ToolChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class Message(Body):
    """One message of a chat."""

    unsupported = {"function_call": (), "audio": (), "refusal": ("",)}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(
        None, description="may be null in an assistant's message that calls tools"
    )
    tool_calls: list[ToolCall] = Field([], description="the calls of an assistant's message")
    tool_call_id: str | None = Field(None, description="which call a tool's message answers")
    name: str | None = Field(None, description="for templates that know it")
    reasoning_content: str | None = Field(None, description="for templates that know it")
    annotations: list[Any] | None = Field(None, description="of an earlier answer")
    cache_control: dict[str, Any] | None = Field(None, description="a hint to other servers")
    provider_specific_fields: dict[str, Any] | None = Field(None, description="of litellm")

    @model_validator(mode="after")
    def _with_content(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise fault("tool_calls", f"{{field}} belongs to an assistant, not to a {self.role}.")
        if self.content is None and not self.tool_calls:
            raise fault("content", "{field} is required.")
        return self


class Chat(OpenAI):
    """What /v1/chat/completions takes."""

    unsupported = {
        **_OPENAI_UNSUPPORTED,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "web_search_options": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "stream_reasoning": (True,),
    }

    messages: list[Message] = Field(description="the chat so far")
    max_tokens: request.NewTokens | None = Field(
        None, description="0 or more. Without, all that the context (or a smaller KV pool) leaves"
    )
    max_completion_tokens: request.NewTokens | None = Field(
        None, description="another word for `max_tokens`"
    )
    continue_final_message: bool = Field(
        False, description="the last message, the assistant's, is the beginning of the answer"
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="end the prompt with the header of the assistant's turn; null is true unless "
        "the last message is continued",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="an object of further variables for the template"
    )
    rid: Name | None = Field(None, description="a name")
    logprobs: bool = Field(False, description="log-probabilities of the output")
    top_logprobs: int = Field(
        0, ge=0, le=MAX_OPENAI_LOGPROBS, description=f"0 to {MAX_OPENAI_LOGPROBS}"
    )
    tools: list[Tool] = Field([], description="functions that the model may call")
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None,
        description='"none" hides the tools, "auto" (as null) lets the model choose, "required" '
        "and a named function are kept by a grammar",
    )
    parallel_tool_calls: bool = Field(True, description="false: at most one call")
    separate_reasoning: bool = Field(
        True,
        description="with `--reasoning-parser`: `reasoning_content` apart from `content`",
    )
    prediction: dict[str, Any] | None = Field(
        None, description="a guess at the text; the server's own drafter makes them"
    )

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        self.same_meaning("max_tokens", "max_completion_tokens")
        return self


class ItemText(Body):
    """A part of the content of an item of `input`."""

    unsupported = dict.fromkeys(("image_url", "file_id", "file_data", "file_url", "detail"), ())
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, description="of an earlier answer")
    logprobs: list[Any] | None = Field(None, description="of an earlier answer")


class ItemMessage(Body):
    """A message; `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ItemText]
    id: str | None = Field(None, description="of an earlier answer")
    status: str | None = Field(None, description="of an earlier answer")
    phase: str | None = Field(None, description="of an earlier answer")


class ItemCall(CalledFunction):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    id: str | None = Field(None, description="of an earlier answer")
    status: str | None = Field(None, description="of an earlier answer")


class ItemResult(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ItemText]
    id: str | None = Field(None, description="of the client")
    status: str | None = Field(None, description="of the client")


class ItemReasoning(Body):
    """Reasoning of an earlier answer, which models are not shown again."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: str | None = None


def _item_type(item: Any) -> str | None:
    return item.get("type") or "message" if isinstance(item, dict) else None


Item = Annotated[
    Annotated[ItemMessage, Tag("message")]
    | Annotated[ItemCall, Tag("function_call")]
    | Annotated[ItemResult, Tag("function_call_output")]
    | Annotated[ItemReasoning, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="words",
        custom_error_message="Input should be an object of type message, function_call, "
        "function_call_output or reasoning",
    ),
]


class FlatFunction(Function):
    """A function that may be called, as /v1/responses writes it."""

    type: Literal["function"]


class FlatChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """What the output must match."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    name: str | None = Field(None, description="a label")
    description: str | None = Field(None, description="a label")
    strict: bool | None = Field(None, description="output follows the schema in any case")


class TextOptions(Body):
    """How text is written."""

    unsupported = {"verbosity": ("medium",)}
    format: TextFormat | None = Field(None, description="constrained output")


class Responses(Body):
    """What /v1/responses takes. Nothing is stored: a call holds the whole conversation."""

    unsupported = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "reasoning": ({},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    model: str | None = Field(
        None, description="the served name, the model path or `default`; others are a 404"
    )
    input: str | list[Item] = Field(description="a text, or the items of the conversation")
    instructions: str | None = Field(None, description="a system message in front")
    max_output_tokens: request.NewTokens | None = Field(
        None, description="0 or more. Without, all that the context (or a smaller KV pool) leaves"
    )
    temperature: request.Temperature | None = None
    top_p: request.TopP | None = None
    stream: bool = Field(False, description="server-sent events")
    tools: list[FlatFunction] = Field([], description="functions that the model may call")
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = Field(
        None, description="as in chats"
    )
    parallel_tool_calls: bool = Field(True, description="false: at most one call")
    text: TextOptions = Field(default_factory=TextOptions, description="constrained output")
    user: str | None = Field(None, description="a label")
    safety_identifier: str | None = Field(None, description="a label")
    prompt_cache_key: str | None = Field(None, description="a label")
    metadata: Labels | None = Field(None, description="labels; the reply repeats them")


class Profile(Body):
    """What /start_profile takes."""

    unsupported = {
        "start_step": (),
        "profile_by_stage": (False,),
        "profile_stages": (),
        "merge_profiles": (False,),
        "profile_prefix": (),
    }
    output_dir: str | None = None
    num_steps: int | None = None
    activities: Annotated[list[str], words('a list of "CPU" and "GPU"')] | None = Field(
        None, description='of "CPU" and "GPU"; the second is a 400 where there is no GPU'
    )
    record_shapes: bool | None = None
    with_stack: bool | None = None
    profile_id: str | None = Field(None, description="a label")


class AbortRequest(Body):
    """What /abort_request takes."""

    rid: str = ""
    abort_all: bool = False


class Tokenize(Body):
    """What /tokenize takes."""

    elsewhere = {"text": 'it is "prompt" here'}
    model: str | None = None
    prompt: Strings
    add_special_tokens: bool = True


class Detokenize(Body):
    """What /detokenize takes."""

    model: str | None = None
    tokens: IdLists
    skip_special_tokens: bool = True
