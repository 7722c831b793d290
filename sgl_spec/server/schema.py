"""The bodies of our own routes, and what is common to those that generate.

`/openapi.json` shows these models and those of `openai_schema`, docs/http.md lists their fields.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WrapValidator, model_validator

from sgl_spec import request
from sgl_spec.errors import preview
from sgl_spec.server.body import Body, Many, fault, words
from sgl_spec.server.unsupported import UNSUPPORTED

MAX_RID_CHARS = 512
MAX_REQUESTS_PER_CALL = 4096
MAX_KEY_CHARS = 20  # of a token id in `logit_bias`
MAX_DRAFT_TOKENS = 1 << 16  # more than any tree holds, so that a larger wish is the same wish


def _bias_keys(value: Any, validate: Any) -> Any:
    biases = validate(value)
    if not all(map(_is_id, biases)):
        raise ValueError
    return {int(token): bias for token, bias in biases.items()}


def _is_id(key: str) -> bool:
    digits = key.removeprefix("-")
    short = len(key) <= MAX_KEY_CHARS and digits.isascii() and digits.isdigit()
    return short and str(int(key)) == key


def _strings(labels: object) -> object:
    """Refuse at the first label, not at each of a million."""
    if isinstance(labels, dict):
        for name, text in labels.items():
            if not isinstance(text, str):
                raise fault(name, "{field} must be a valid string, got {value}.")
    return labels


def _false(value: object) -> object:
    if value is not False:  # 0 is not
        raise ValueError
    return value


class DraftLimit(Body):
    """How much is drafted for one request."""

    max_draft_tokens: Annotated[int, Field(ge=0)]


Ids = Many[int]
Strings = Annotated[str | Many[str], words("a string or a list of strings")]
IdLists = Annotated[Ids | Many[Ids], words("a list of integers or a list of lists of integers")]
Prompts = Annotated[
    str | Many[str] | Ids | Many[Ids],
    words("a string, a list of strings, a list of integers or a list of lists of integers"),
]
Flags = Annotated[bool | Many[bool], words("true, false or a list of these")]
Integers = Annotated[int | Many[int], words("an integer or a list of integers")]
Name = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARS)]
Names = Annotated[
    Name | Many[Name] | None, Field(description="a name, or one per request of a batch")
]
# Without effect: they label a request, or say what is so anyway.
Label = Annotated[str | None, Field(description="a label")]
Labels = Annotated[
    Annotated[dict[str, str], BeforeValidator(_strings)] | None,
    Field(description="labels; metrics carry `model_name` alone"),
]
Counted = Annotated[bool | None, Field(description="metrics count every request")]
Past = Annotated[str | None, Field(description="of an earlier answer")]
PastList = Annotated[list[Any] | None, Field(description="of an earlier answer")]
Hint = Annotated[dict[str, Any] | None, Field(description="a hint to other servers")]
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
DraftTrees = Annotated[
    bool, Field(description="the reply tells each round: its tree, and what was accepted")
]
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
    elsewhere: ClassVar = {
        "include_stop_str_in_output": 'it is "no_stop_trim" here',
        **{name: f"it is {preview(ours)} here" for name, ours in _VLLM_GRAMMAR.items()},
    }

    n: int = Field(
        1,
        ge=1,
        le=request.MAX_CHOICES,
        description=f"answers to each prompt, 1 to {request.MAX_CHOICES}; a call holds at most "
        f"{MAX_REQUESTS_PER_CALL}, prompts times `n`",
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
    elsewhere: ClassVar = {
        **dict.fromkeys(Sampling.model_fields, "it belongs inside sampling_params"),
        **{name: f'it is "sampling_params.{ours}" here' for name, ours in _VLLM_GRAMMAR.items()},
        "include_stop_str_in_output": "it belongs inside sampling_params",
        "prompt": 'it is "text" here',
    }

    text: Strings | None = Field(None, description="a prompt, or one each of a batch")
    input_ids: IdLists | None = Field(None, description="the same in token ids")
    sampling_params: Sampling | Many[Sampling] = Field(
        default_factory=Sampling, description="one object for all prompts, or a list of one each"
    )
    rid: Names = None
    stream: bool = Field(
        False,
        description="server-sent events, each with all of the text so far; "
        "`--incremental-streaming-output` sends what is new",
    )
    return_prompt_token_ids: bool = Field(False, description="the reply tells `prompt_token_ids`")
    return_draft_trees: DraftTrees = False
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
    log_metrics: Counted = None
    no_logs: bool | None = Field(None, description="a label")
    conversation_id: Label = None
    custom_labels: Labels = None


class Profile(Body):
    """What /start_profile takes."""

    unsupported: ClassVar = {
        "start_step": (),
        "profile_by_stage": (False,),
        "profile_stages": (),
        "merge_profiles": (False,),
        "profile_prefix": (),
    }
    output_dir: str | None = None
    num_steps: int | None = None
    activities: Annotated[Many[str], words('a list of "CPU" and "GPU"')] | None = Field(
        None, description='of "CPU" and "GPU"; the second is a 400 where there is no GPU'
    )
    record_shapes: bool | None = None
    with_stack: bool | None = None
    profile_id: Label = None


class AbortRequest(Body):
    """What /abort_request takes."""

    rid: str = ""
    abort_all: bool = False


class Tokenize(Body):
    """What /tokenize takes."""

    elsewhere: ClassVar = {"text": 'it is "prompt" here'}
    model: str | None = None
    prompt: Strings
    add_special_tokens: bool = True


class Detokenize(Body):
    """What /detokenize takes."""

    model: str | None = None
    tokens: IdLists
    skip_special_tokens: bool = True
