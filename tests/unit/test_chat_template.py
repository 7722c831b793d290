"""The API process's tokenizer: raw text, chat templates, and agreement with transformers."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from sgl_spec.errors import ConfigError, InvalidRequestError
from sgl_spec.models.checkpoint import resolve_checkpoint
from sgl_spec.server import launch
from sgl_spec.server.answers import HERMES
from sgl_spec.server.tokenizer import ServerTokenizer

CHATML = (
    "{% for m in messages %}{{ '<s>' + m.role + '\\n' + m.content + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)
TRIMMING = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
EVERYTHING = """\
{%- if tools %}
    {{- tools | tojson }}
{%- endif %}
{% for m in messages %}
    {% if m.role == 'skip' %}
        {% continue %}
    {% endif %}
    {% generation %}
{{ bos_token }}{{ m | tojson(indent=1) }}{{ flag | default('unset') }}
    {% endgeneration %}
    {% if m.role == 'end' %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now('%Y') }}{{ namespace(a=1).a }}{{ dict(b=2)['b'] }}
{% if messages[0].role == 'bad' %}{{ raise_exception('roles must alternate') }}{% endif %}
"""
CHAT = [
    {"role": "system", "content": "Be brief. Ünïcödé <&>"},
    {"role": "user", "content": "  What's 2+2?\n"},
    {"role": "assistant", "content": "It is 4. "},
]


@pytest.fixture(scope="module")
def make_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A directory with a small byte-level tokenizer that adds <s>, and the given config fields."""

    def make(files: dict[str, str] | None = None, **config: Any) -> Path:
        path = tmp_path_factory.mktemp("tokenizer")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=280,
            initial_alphabet=alphabet,
            show_progress=False,
            special_tokens=["<s>", "</s>"],
        )
        tokenizer.train_from_iterator(["the cat sat on the mat"], trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=64)
        tokenizer.save(str(path / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": {"content": "<s>", "__type": "AddedToken"},
            "eos_token": "</s>",
        } | config
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        for name, text in (files or {}).items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(text)
        return path

    return make


def reference(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def test_raw_text_gets_the_tokenizer_s_special_tokens_and_a_chat_gets_none(
    make_dir: Callable[..., Path],
) -> None:
    path = make_dir(chat_template=CHATML)
    ours, theirs = ServerTokenizer.from_dir(path), reference(path)
    for text in ("", "the cat", "naïve 👍🏽 </s> text that is longer than four tokens"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text)[0] == 0
        assert ours.decode(ours.encode(text)) == text.replace("</s>", "")
    chat = ours.encode_chat(CHAT)
    assert chat == theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert chat[0] == 0
    assert chat[1] != 0


@pytest.mark.parametrize("template", [CHATML, TRIMMING, EVERYTHING])
@pytest.mark.parametrize("form", ["string", "list", "file", "file_and_config"])
def test_rendering_equals_transformers(
    make_dir: Callable[..., Path], template: str, form: str
) -> None:
    tool_use = "{{ tools | length }} tools for {{ messages | length }}"
    entries = [
        {"name": "default", "template": template},
        {"name": "tool_use", "template": tool_use},
    ]
    path = {
        "string": lambda: make_dir(chat_template=template),
        "list": lambda: make_dir(chat_template=entries),
        "file": lambda: make_dir(
            {"chat_template.jinja": template, "additional_chat_templates/tool_use.jinja": tool_use}
        ),
        "file_and_config": lambda: make_dir({"chat_template.jinja": template}, chat_template="no"),
    }[form]()
    ours, theirs = ServerTokenizer.from_dir(path), reference(path)
    tools = [{"type": "function", "function": {"name": "f", "description": "ü"}}]
    chats = [CHAT, CHAT[:1], [{"role": "skip", "content": "a"}, {"role": "end", "content": "b"}]]
    for chat in chats:
        for options in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True},
            {"add_generation_prompt": True, "tools": tools},
            {"add_generation_prompt": True, "flag": "set"},
        ):
            if options.get("continue_final_message") and template == EVERYTHING:
                continue  # JSON of the message: nothing to continue, in either
            if "tools" in options and template != EVERYTHING and "list" not in form:
                continue  # theirs leaves them out
            expected = theirs.apply_chat_template(chat, tokenize=False, **options)
            ours_only = {k: v for k, v in options.items() if k != "flag"}
            variables = {k: v for k, v in options.items() if k == "flag"}
            assert ours.render_chat(chat, **ours_only, variables=variables) == expected


def test_a_final_message_is_continued_without_its_end(make_dir: Callable[..., Path]) -> None:
    plain = ServerTokenizer.from_dir(make_dir(chat_template=CHATML))
    assert plain.render_chat(CHAT, continue_final_message=True).endswith("assistant\nIt is 4. ")
    trimming = ServerTokenizer.from_dir(make_dir(chat_template=TRIMMING))
    assert trimming.render_chat(CHAT, continue_final_message=True).endswith("[It is 4.")
    with pytest.raises(InvalidRequestError, match="cannot both be true"):
        plain.render_chat(CHAT, add_generation_prompt=True, continue_final_message=True)
    dropping = ServerTokenizer.from_dir(make_dir(chat_template="nothing"))
    with pytest.raises(InvalidRequestError, match="drops the final message"):
        dropping.render_chat(CHAT, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="needs text"):
        plain.render_chat([{"role": "assistant"}], continue_final_message=True)


def test_templates_without_tools_are_told_as_hermes_does(make_dir: Callable[..., Path]) -> None:
    ours = ServerTokenizer.from_dir(make_dir(chat_template=CHATML))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"ü": 1}}}
    chat = [
        *CHAT[:2],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "two", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = ours.render_chat(chat, tools=tools)
    system, user, called, result, _ = text.split("<s>")[1:]
    assert system.startswith(f"system\n{CHAT[0]['content']}\n\n# Tools\n")
    assert json.dumps(tools[0]) in system
    assert user == f"user\n{CHAT[1]['content']}</s>\n"
    asked = '{"name": "f", "arguments": {"ü": 1}}'
    assert called == f"assistant\n<tool_call>\n{asked}\n</tool_call></s>\n"
    assert result == "user\n<tool_response>\ntwo\n</tool_response></s>\n"
    assert ours.render_chat(CHAT[1:2], tools=tools).startswith("<s>system\n# Tools\n")
    assert (ours.form, ServerTokenizer.from_dir(make_dir(chat_template=EVERYTHING)).form) == (
        HERMES,
        None,
    )


def test_text_parts_become_one_string(make_dir: Callable[..., Path]) -> None:
    ours = ServerTokenizer.from_dir(make_dir(chat_template=CHATML))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ours.render_chat([{"role": "user", "content": parts}]) == ours.render_chat(
        [{"role": "user", "content": "one two", "name": None}]
    )


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "bad", "content": "hi"}], "does not take these messages: roles must alternate"),
        ([{"role": "user"}], "does not take these messages"),
    ],
)
def test_bad_messages_are_a_400_that_names_them(
    make_dir: Callable[..., Path], messages: list[Any], said: str
) -> None:
    template = EVERYTHING + "{{ messages[0].content + '' }}"
    ours = ServerTokenizer.from_dir(make_dir(chat_template=template))
    with pytest.raises(InvalidRequestError, match=said) as caught:
        ours.render_chat(messages)
    assert caught.value.param == "messages"
    assert caught.value.status == 400


def test_the_template_runs_in_a_sandbox(make_dir: Callable[..., Path]) -> None:
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.items() }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    ):
        ours = ServerTokenizer.from_dir(make_dir(chat_template=attack))
        with pytest.raises(InvalidRequestError) as caught:
            ours.render_chat(CHAT)
        assert caught.value.param == "messages"


def test_template_variables_cannot_replace_the_request(make_dir: Callable[..., Path]) -> None:
    from sgl_spec.server.chat_template import ChatTemplate

    template = ChatTemplate({"default": CHATML}, {})
    with pytest.raises(InvalidRequestError, match='cannot set "messages"'):
        template.render(CHAT, variables={"messages": []})


def test_the_flag_takes_a_file_or_a_template(make_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = make_dir(chat_template=CHATML)
    file = tmp_path / "my.jinja"
    file.write_text("from file: {{ messages[0].content }}")
    ours = ServerTokenizer.from_dir(path, str(file))
    assert ours.render_chat([{"role": "user", "content": "x"}]) == "from file: x"
    ours = ServerTokenizer.from_dir(path, "inline: {{ messages[0].role }}")
    assert ours.render_chat([{"role": "user", "content": "x"}]) == "inline: user"
    with pytest.raises(ConfigError, match="--chat-template must be a readable file or a Jinja"):
        ServerTokenizer.from_dir(path, "chatml")
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ServerTokenizer.from_dir(path, "{% if %}")


def test_broken_directories_are_refused_by_name(
    make_dir: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        ServerTokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerTokenizer.from_dir(tmp_path)
    with pytest.raises(ConfigError, match="none is named 'default'"):
        ServerTokenizer.from_dir(make_dir(chat_template=[{"name": "rag", "template": "x"}]))
    with pytest.raises(ConfigError, match="must be a string or a list"):
        ServerTokenizer.from_dir(make_dir(chat_template=5))
    for broken in ("{", "[]"):
        path = make_dir()
        (path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
            ServerTokenizer.from_dir(path)


def test_without_a_template_text_is_served_and_chats_are_refused(
    make_dir: Callable[..., Path],
) -> None:
    ours = ServerTokenizer.from_dir(make_dir())
    assert not ours.has_chat_template
    assert ours.encode("the cat")
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        ours.render_chat(CHAT)


def test_the_current_time_is_offered(make_dir: Callable[..., Path]) -> None:
    ours = ServerTokenizer.from_dir(make_dir(chat_template="{{ strftime_now('%Y') }}"))
    assert abs(int(ours.render_chat(CHAT)) - datetime.datetime.now().year) <= 1


def test_the_api_process_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, sgl_spec.server.tokenizer, sgl_spec.text, sgl_spec.args\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nosuch.jinja", "--chat-template must be a readable file or a Jinja template, got"),
        ("{% for m in messages %}", "--chat-template is not valid Jinja (line 1)"),
    ],
)
def test_a_template_that_cannot_be_used_ends_the_start_before_anything_loads(
    given: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "configure_logging", lambda *_: None)
    monkeypatch.setattr(launch, "listen", lambda *_: pytest.fail("the server has started"))
    assert launch.run(["--model-path", "smollm2", "--chat-template", given]) == 2
    assert said in capsys.readouterr().err


SMOLLM2_CHATS = [
    [{"role": "user", "content": "Hi"}],
    CHAT,
    [{"role": "user", "content": "日本語と👩\u200d👧 1234567 <|im_end|>"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "\n\n tabs\t "}],
]


def test_smollm2_equals_transformers_with_its_default_system_line() -> None:
    path = resolve_checkpoint("smollm2")
    ours, theirs = ServerTokenizer.from_dir(path), reference(path)
    assert "You are a helpful AI assistant named SmolLM" in ours.render_chat(SMOLLM2_CHATS[0])
    for chat in SMOLLM2_CHATS:
        for options in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True},
        ):
            expected = theirs.apply_chat_template(chat, tokenize=False, **options)
            ours_only = {k: v for k, v in options.items() if k != "flag"}
            variables = {k: v for k, v in options.items() if k == "flag"}
            assert ours.render_chat(chat, **ours_only, variables=variables) == expected
            expected_ids = theirs.apply_chat_template(chat, **options)["input_ids"]
            assert ours.encode_chat(chat, **options) == expected_ids
    for text in (
        "The capital of France is",
        "1234 + 5678 =",
        "naïve 日本 👍🏽",
        "<|im_start|>user",
    ):
        assert ours.encode(text) == theirs(text)["input_ids"]
