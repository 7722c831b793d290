"""Options: the declaration against --help and docs/flags.md, what is decided, what is refused."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sgl_spec
from sgl_spec.args import ResolvedArgs, ServerArgs, flags_page
from sgl_spec.errors import ConfigError
from sgl_spec.models.shipped import SHIPPED
from sgl_spec.options import declared
from sgl_spec.sglang_compat import FLAGS, IGNORED, NAMES, REFUSED, VLLM, ForeignFlag
from sgl_spec.validate import ABSENT_DRAFTERS, EMBEDDED_DRAFTS

ROOT = Path(__file__).parents[2]
OPTIONS = declared(ServerArgs)
NGRAM = "--speculative-algorithm NGRAM"
EAGLE = "--speculative-algorithm EAGLE"
EAGLE3 = "--speculative-algorithm EAGLE3"
STANDALONE = "--speculative-algorithm STANDALONE"
PLUGIN = "--speculative-algorithm mine --speculative-drafter-module my.drafters"
REJECTION, BLOCK = "--speculative-use-rejection-sampling", "--speculative-use-block-verification"
STEPS, TOPK = "--speculative-num-steps", "--speculative-eagle-topk"
NODES, POOL = "--speculative-num-draft-tokens", "--max-total-tokens"


def parse(line: str = "", model: str = "smollm2") -> ResolvedArgs:
    return ServerArgs.from_cli(["--model-path", model, *line.split()]).resolve()


def refusal(line: str) -> list[str]:
    """The lines of the error for a command line."""
    with pytest.raises(ConfigError) as caught:
        ServerArgs.from_cli(line.split()).resolve()
    return caught.value.message.splitlines()


# --- the declaration ---------------------------------------------------------------------------


def test_the_flag_page_is_what_the_declaration_gives() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == flags_page(), "run: python -m sgl_spec.args > docs/flags.md"
    flags = [flag for opt in OPTIONS.values() for flag in opt.flags]
    assert all(f"`{flag}`" in page for flag in flags)
    for name, entry in FLAGS.items():
        (row,) = [row for row in page.splitlines() if f"`--{name.replace('_', '-')}`" in row]
        assert (
            f"| {'changes nothing' if entry.accepted is None else 'refused'} | {entry.why} |" in row
        )


def test_help_names_every_flag_with_its_meaning_values_and_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        ServerArgs.from_cli(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for opt in OPTIONS.values():
        assert all(f"{flag} " in text or f"{flag}," in text for flag in opt.flags)
        assert opt.help in text
        assert f"default: {opt.default_text}" in text
        assert all(choice in text for choice in opt.choices)
    assert "--dp-size" not in text


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ServerArgs.from_cli(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"sgl-spec {sgl_spec.__version__}\n"


ODD = {"speculative_ngram_capacity": "2048", "simulate_acc_len": "2.5"}


@pytest.mark.parametrize("opt", OPTIONS.values(), ids=OPTIONS)
def test_flags_reach_their_field(opt: Any) -> None:
    usual = {str: "X", int: "2", float: "0.5", bool: "", tuple: "2 3"}[opt.kind]
    value = opt.choices[-1] if opt.choices else ODD.get(opt.name, usual)
    wanted = {bool: True, tuple: (2, 3)}.get(opt.kind, opt.kind(value))
    for flag in opt.flags:
        args = ServerArgs.from_cli(f"--model-path m {flag} {value}".split())
        assert getattr(args, opt.name) == wanted


def test_a_new_object_is_frozen_and_checked() -> None:
    args = ServerArgs(model_path="m", api_key="hush")
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.port = 1  # type: ignore[misc]
    with pytest.raises(ConfigError, match="--port must be"):
        dataclasses.replace(args, port=0)
    assert "hush" not in repr(args) + str(args.resolve().public())
    assert args.public()["port"] == 30000


def test_python_and_command_line_agree() -> None:
    from_python = ServerArgs.from_keywords(
        model_path=Path("m"), page_size=16, speculative_algorithm="ngram", enable_metrics=True
    )
    line = "--model=m --page-size=16 --speculative-algo NGRAM --enable-metrics"
    assert from_python == ServerArgs.from_cli(line.split())


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--dtype half", "dtype", "float16"),
        ("--dtype BFloat16", "dtype", "bfloat16"),
        ("--attention-backend auto", "attention_backend", None),
        ("--attention-backend torch_native", "attention_backend", "torch"),
        ("--attention-backend TRITON", "attention_backend", "triton"),
        ("--speculative-algorithm None", "speculative_algorithm", None),
        ("--speculative-algorithm nextn", "speculative_algorithm", "EAGLE"),
        ("--cuda-graph-bs 1 8 4 --port 3", "cuda_graph_bs", (1, 8, 4)),
        ("--chunked-prefill-size -1", "chunked_prefill_size", -1),
        ("--api-key=-abc", "api_key", "-abc"),
        ("--port 3 --port 4", "port", 4),
    ],
)
def test_spellings(line: str, name: str, value: object) -> None:
    assert getattr(ServerArgs.from_cli(["--model=m", *line.split()]), name) == value


# --- resolve -----------------------------------------------------------------------------------


def test_resolve_fills_what_was_left_open_in_a_new_object() -> None:
    args = ServerArgs(model_path="m")
    done = args.resolve()
    assert (args.max_running_requests, done.max_running_requests) == (None, 256)
    assert (done.tokenizer_path, done.served_model_name) == ("m", "m")
    assert isinstance(done.random_seed, int)
    assert done.tree_nodes == 1
    assert done.resolve() is done
    drafting = parse(NGRAM)
    assert (drafting.max_running_requests, drafting.speculative_num_draft_tokens) == (48, 12)
    assert drafting.tree_nodes == 12


@pytest.mark.parametrize(("device", "chunk"), [("cpu", 256), ("cuda", 2048)])
def test_what_depends_on_the_device_waits_for_it(device: str, chunk: int) -> None:
    assert parse(f"--device {device}").chunked_prefill_size == chunk
    done = parse()
    assert (done.device, done.chunked_prefill_size) == ("auto", None)
    known = done.for_device(device)
    assert (known.device, known.chunked_prefill_size) == (device, chunk)
    assert known.random_seed == done.random_seed
    assert parse("--chunked-prefill-size 64").for_device(device).chunked_prefill_size == 64


def test_what_changes_nothing_is_told_once_also_by_the_engine_s_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = parse(
        f"{STEPS} 3 --log-requests-format x --disable-cuda-graph --cuda-graph-bs-prefill 1 2"
    )
    assert "on a CPU" not in caplog.text
    fields = {item.name: getattr(done, item.name) for item in dataclasses.fields(done)}
    sent = ResolvedArgs(**msgspec.json.decode(msgspec.json.encode(fields)))
    sent.resolve().for_device("cpu").for_device("cpu").resolve()
    for words in (
        f"{STEPS} changes",
        "--log-requests-format x changes",
        "--cuda-graph-bs-prefill 1 2 ch",
    ):
        assert caplog.text.count(words) == 1
    assert caplog.text.count("--disable-cuda-graph changes nothing on a CPU.") == 1


def test_what_is_replaced_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    parse(f"--mem-fraction-static 0.5 {POOL} 100 --speculative-algorithm none")
    assert "--mem-fraction-static changes nothing beside" in caplog.text
    caplog.clear()
    parse(f"{EAGLE3} {STEPS} 5 {TOPK} 1 {NODES} 8")
    assert f"{NODES} 8 becomes 6" in caplog.text
    assert "--max-running-requests is not set; with speculation it is 48" in caplog.text
    caplog.clear()
    parse(f"{EAGLE3} {STEPS} 5 --max-running-requests 2")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("line", "shape", "slots"),
    [
        (EAGLE3, (5, 4, 8), 20),
        (STANDALONE, (3, 1, 4), 4),
        (f"{EAGLE3} {STEPS} 7 {TOPK} 8 {NODES} 32", (7, 8, 32), 56),
        (f"{EAGLE3} {STEPS} 9 {TOPK} 8 {NODES} 64", (9, 8, 64), 72),
        (f"{EAGLE3} {STEPS} 1", (1, 1, 2), 2),
        (f"{EAGLE3} {STEPS} 5 {TOPK} 1 {NODES} 64", (5, 1, 6), 6),
        (f"{STANDALONE} {STEPS} 63", (63, 1, 64), 64),
        (f"{EAGLE3} {STEPS} 2 {TOPK} 64 {NODES} 64", (2, 64, 64), 128),
        (f"{EAGLE3} {REJECTION}", (5, 1, 6), 6),
        (f"{STANDALONE} {BLOCK}", (3, 1, 4), 4),
        (f"{STANDALONE} {REJECTION} {STEPS} 3 {TOPK} 2", (3, 2, 12), 12),
        (f"{PLUGIN} {TOPK} 4", (None, 4, 12), 12),
        (f"{PLUGIN} {REJECTION}", (11, 1, 12), 12),
        (f"{PLUGIN} {BLOCK} {NODES} 6", (5, 1, 6), 6),
        (f"{PLUGIN} {REJECTION} {STEPS} 8 {NODES} 6", (8, 1, 6), 6),
        (f"{PLUGIN} {REJECTION} {TOPK} 4", (11, 4, 12), 12),
        (f"{PLUGIN} {REJECTION} {TOPK} 2 {STEPS} 2", (2, 2, 7), 7),
    ],
)
def test_shapes_of_trees(line: str, shape: tuple[int | None, ...], slots: int) -> None:
    done = parse(line)
    assert shape_of(done) == shape
    assert (done.tree_nodes, done.round_slots) == (shape[2], slots)
    assert done.for_target("Qwen2ForCausalLM") is done


def shape_of(done: ResolvedArgs) -> tuple[object, ...]:
    """(steps, topk, nodes) as the drafter is told."""
    options = done.drafter_options()
    assert "drafter_module" not in options
    return tuple(options[name] for name in ("num_steps", "eagle_topk", "num_draft_tokens"))


@pytest.mark.parametrize("algorithm", [EAGLE, EAGLE3])
def test_the_target_decides_a_shape_that_no_flag_gives(algorithm: str) -> None:
    done = parse(f"{algorithm} --speculative-draft-model-path d {POOL} 16", model="m")
    assert shape_of(done) == (None, None, None)
    with pytest.raises(AssertionError, match="for_target comes first"):
        _ = done.tree_nodes
    assert shape_of(done.for_target("Qwen3ForCausalLM")) == (3, 1, 4)
    with pytest.raises(ConfigError, match="must be at least 42 to hold one request"):
        done.for_target("LlamaForCausalLM")


def test_the_embedded_model_brings_its_draft_models() -> None:
    assert {name: algorithm for algorithm, name in EMBEDDED_DRAFTS.items()} == SHIPPED
    for algorithm, name in EMBEDDED_DRAFTS.items():
        line = f"--speculative-algorithm {algorithm}"
        assert parse(line).speculative_draft_model_path == name
        given = parse(f"{line} --speculative-draft-model mine --load-format dummy")
        assert given.speculative_draft_model_path == "mine"
        assert given.speculative_draft_load_format == "dummy"
    assert parse(NGRAM).speculative_draft_model_path is None


# --- what is refused -----------------------------------------------------------------------------

# One row for each check: a line, and how its only sentence begins.
VALUES = [
    ("--port 70000", "--port must be an integer from 1 to 65535, got 70000."),
    ("--port 1.5", "--port must be an integer from 1 to 65535, got '1.5'."),
    ("--port=", "--port must be an integer from 1 to 65535, got ''."),
    ("--port --host h", "Argument --port: expected one argument (one that begins with a dash is"),
    ("--api-key -k", "Argument --api-key: expected one argument (one that begins with a dash is"),
    ("--host=", "--host must be a non-empty string, got ''."),
    ("--host \ud800", "--host must be text in UTF-8, got \\ud800 at position 0."),
    ("--api-key k\udcff", "--api-key must be text in UTF-8, got byte 0xff at position 1."),
    ("--dtype float23", "--dtype must be one of auto, float32, bfloat16, float16, got 'float23' ("),
    ("--cuda-graph-bs", "Argument --cuda-graph-bs/--cuda-graph-bs-decode: expected at"),
    ("--cuda-graph-bs 2 x", "--cuda-graph-bs must be one or more integers >= 1"),
    ("--mem-fraction-static nan", "--mem-fraction-static must be a number above 0 and below 1"),
    ("--mem-fraction-static 1", "--mem-fraction-static must be a number above 0 and below 1"),
    ("--speculative-accept-threshold-acc 1.5", "--speculative-accept-threshold-acc must be a num"),
    ("--chunked-prefill-size 0", "--chunked-prefill-size must be -1 (off) or an integer >= 1"),
    ("--simulate-acc-len 65", "--simulate-acc-len must be a number from 1 to 64"),
    ("--random-seed -1", "--random-seed must be an integer from 0"),
    ("--enable-metrics=yes", "Argument --enable-metrics: ignored explicit argument 'yes'; see"),
    ("--prot 1", "--prot is not an option (did you mean --port?); see --help."),
    ("--max-total 9", "--max-total is not an option (did you mean --max-total-tokens?)"),
    ("--log-request", "--log-request is not an option (did you mean --log-requests?)"),
    ("--qqq 1", "--qqq is not an option; see --help."),
    ("stray", "'stray' belongs to no flag; see --help."),
    ("--host h stray", "'stray' belongs to no flag; see --help."),
    ("--tp 1 stray", "'stray' belongs to no flag; see --help."),
    ("-q", "-q is not an option; a value that begins with a dash is written --flag=-q."),
    ("--model-path m --dp", "Argument --dp-size/--data-parallel-size/--dp: expected one"),
]
TOGETHER = [
    ("--attention-backend flashinfer --device cpu --cuda-graph-bs 2", "--attention-backend flash"),
    ("--speculative-algorithm ngrm", "--speculative-algorithm must be one of none, NGRAM"),
    (f"{NGRAM} --speculative-draft-model m", "--speculative-draft-model-path m cannot be used"),
    (f"{NGRAM} {STEPS} 5", f"{STEPS} 5 cannot be used"),
    (f"{NGRAM} {TOPK} 5", f"{TOPK} 5 cannot be used"),
    (f"{NGRAM} --speculative-token-map h.pt", "--speculative-token-map h.pt cannot be used"),
    (f"{EAGLE3} --speculative-ngram-capacity 1024", "--speculative-ngram-capacity 1024 cannot"),
    (f"{NGRAM} --speculative-ngram-min-bfs-breadth 11", "--speculative-ngram-min-bfs-breadth must"),
    (EAGLE, "--speculative-algorithm EAGLE needs --speculative-draft-model-path"),
    (f"{EAGLE3} --model-path m", "--speculative-algorithm EAGLE3 needs --speculative-draft-model"),
    (f"{EAGLE3} --speculative-draft-model-revision v", "--speculative-draft-model-revision v"),
    (f"{EAGLE3} --speculative-token-map h.pt", "--speculative-token-map h.pt needs"),
    (f"{EAGLE3} {BLOCK} --speculative-draft-sampling topk", f"{BLOCK} samples the drafts"),
    (f"{EAGLE3} {TOPK} 4", f"{TOPK} 4 needs {STEPS} beside it"),
    (f"{EAGLE3} {NODES} 8", f"{NODES} 8 needs {STEPS} beside it"),
    (f"{EAGLE3} {STEPS} 5 {TOPK} 4", f"{TOPK} 4 needs {NODES} beside it"),
    (f"{EAGLE3} {STEPS} 1 {TOPK} 4 {NODES} 8", f"{NODES} must be at most 5"),
    (f"{EAGLE3} {STEPS} 10 {TOPK} 8 {NODES} 64", f"{STEPS} and {TOPK} must keep"),
    (f"{EAGLE3} {STEPS} 64", f"{STEPS} must be at most 63"),
    (f"{PLUGIN} {REJECTION} {STEPS} 64", f"{STEPS} must be at most 63"),
    (f"{PLUGIN} {REJECTION} {STEPS} 3 {NODES} 5", f"{NODES} must be at most 4"),
    (f"{PLUGIN} {REJECTION} {STEPS} 2 {TOPK} 2 {NODES} 8", f"{NODES} must be at most 7"),
    (f"{NGRAM} {REJECTION}", f"{REJECTION} cannot be used with --speculative-algorithm NGRAM"),
    (f"{PLUGIN} {BLOCK} --speculative-accept-threshold-acc 0.9", f"{BLOCK} judges drafts by p/q"),
    (f"{PLUGIN} {BLOCK} {TOPK} 2", f"{BLOCK} judges chains"),
    ("--simulate-acc-len 2", "--simulate-acc-len 2 needs --speculative-algorithm"),
    (f"{EAGLE3} {REJECTION} --simulate-acc-len 2", "--simulate-acc-len 2 settles what is accepted"),
    (f"{EAGLE3} --simulate-acc-len 7", "--simulate-acc-len must be at most 6"),
    ("--chunked-prefill-size 65 --page-size 16", "--chunked-prefill-size must be -1 or a multiple"),
    (f"{NGRAM} {POOL} 31 --page-size 16", f"{POOL} must be at least 32 to hold one request with"),
    (f"{EAGLE3} {POOL} 41", f"{POOL} must be at least 42 to hold one request with 20 rows of"),
    (f"{POOL} 3 --page-size 16", f"{POOL} must be at least 16 to hold one request with 1 tree"),
    ("--cuda-graph-bs 4 --disable-cuda-graph", "--cuda-graph-bs sizes what --disable-cuda-graph"),
    ("--cuda-graph-max-bs 4 --attention-backend torch", "--cuda-graph-max-bs needs"),
    ("--cuda-graph-bs 1 8 --cuda-graph-max-bs 4", "--cuda-graph-bs must be at most"),
    ("--schedule-policy lpm --disable-radix-cache", "--schedule-policy lpm orders requests"),
    ("--revision v2", "--revision v2 names a version on a hub"),
    *(
        (f"{PLUGIN} --speculative-algorithm {name}", f"--speculative-algorithm {name} is not supp")
        for name in ABSENT_DRAFTERS
    ),
    *((f"--{name.replace('_', '-')} 4", f"--{name.replace('_', '-')} is") for name in VLLM),
]


@pytest.mark.parametrize(("line", "begins"), [*VALUES, *TOGETHER])
def test_what_cannot_work_is_one_sentence(line: str, begins: str) -> None:
    (sentence,) = refusal(f"--model-path smollm2 {line}")
    assert sentence.startswith(begins)
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("--dp-size 2 --dtype x --port 0 --foo", "--foo --model-path --dp-size --dtype --port"),
        ("--model m --port= --host= --page-size 0", "--host --port --page-size"),
        ("--model m --speculative-algo E --port 0 --page-size 0", "--port --page-size"),
        ("--model m --lora-paths a b --dp 2 --bar", "--bar --lora-paths --dp-size"),
        (f"--model m {NGRAM} {STEPS} 3 {TOPK} 2", STEPS),
        ("--modl-path m", "--modl-path"),
    ],
)
def test_bad_values_are_told_together_and_then_the_first_contradiction(
    line: str, wanted: str
) -> None:
    assert " ".join(sentence.split()[0] for sentence in refusal(line)).startswith(wanted)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": "m"}, "model is not an option (did you mean model_path?)."),
        ({"max_model_len": 1}, "max_model_len is not an option (did you mean context_length?)."),
        ({"portt": 1, "page_size": 0}, "portt is not an option (did you mean port?).\n--page-si"),
        ({"without_effect": ("x",)}, "without_effect is not an option."),
        ({"port": True}, "--port must be an integer from 1 to 65535, got True."),
        ({"port": 1.0}, "--port must be an integer from 1 to 65535, got 1.0."),
        ({"port": None}, "--port must be an integer from 1 to 65535, got None."),
        ({"host": 5}, "--host must be a non-empty string, got 5."),
        ({"enable_metrics": "yes"}, "--enable-metrics must be true or false, got 'yes'."),
        ({"dp_size": 2, "enable_lora": True}, "--dp-size 2 is not supported by this version: the"),
        ({"dp": [1, 2]}, "--dp takes one value, got '1 2'."),
        ({"enable_lora": 1}, "--enable-lora is a switch and takes no value, got 1."),
        ({"dp_size": True}, "--dp-size takes a value, got True."),
        ({"tp_size": 3}, "--tp-size must be 1, 2, 4 or 8, got 3."),
        ({"lora_paths": ["x"]}, "--lora-paths x is not supported"),
    ],
)
def test_python_keywords_are_checked_too(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerArgs.from_keywords(**({"model_path": "m"} | given))
    assert caught.value.message.startswith(sentence)


# --- SGLang's other flags ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FLAGS, *NAMES])
def test_every_known_flag_is_accepted_with_a_log_line_or_refused_with_advice(name: str) -> None:
    entry, flag = FLAGS[NAMES.get(name, name)], f"--{name.replace('_', '-')}"
    main = f"--{NAMES.get(name, name).replace('_', '-')}"
    assert not {flag, main} & {f for opt in OPTIONS.values() for f in opt.flags}
    for value in entry.accepted or ():
        args = ServerArgs.from_cli(["--model=m", f"{flag}={value}"])
        assert args.without_effect == (f"{main} {value} changes nothing here.",)
    words = [flag] if entry.switch else [flag, "strange"]
    shown = " ".join([main, *words[1:]])
    if entry.accepted is None:
        args = ServerArgs.from_cli(["--model=m", *words, "--port", "3"])
        assert args.without_effect == (f"{shown} changes nothing here: {entry.why}.",)
        assert args.port == 3
    else:
        wanted = [f"{shown} is not supported by this version: {entry.why}."]
        assert refusal(" ".join(["--model=m", *words])) == wanted


def test_no_flag_has_two_reasons() -> None:
    words = [
        word for table in (IGNORED, REFUSED) for text in table.values() for word in text.split()
    ]
    assert len(words) == len(FLAGS)
    assert all(isinstance(entry, ForeignFlag) for entry in FLAGS.values())


@pytest.mark.parametrize("name", [name for name, opt in OPTIONS.items() if opt.other_names])
def test_names_of_other_implementations_leave_the_default(name: str) -> None:
    opt = OPTIONS[name]
    for word in opt.other_names.split():
        for args in (
            ServerArgs(model_path="m", **{name: word}),
            ServerArgs.from_cli(["--model=m", opt.flags[0], word.upper()]),
        ):
            assert getattr(args, name) == opt.default
            (note,) = args.without_effect
            assert note.startswith(f"{opt.flags[0]} {word}") or word.upper() in note
            assert note.endswith(f"the default stands, {opt.default_text}.")


def test_spellings_of_what_asks_for_nothing() -> None:
    args = ServerArgs.from_keywords(
        model_path="m",
        lora_paths=[],
        quantization=None,
        log_requests=False,
        cpu_offload_gb=0.0,
        json_model_override_args="{ }",
    )
    flags = [note.split()[0] for note in args.without_effect]
    assert flags == ["--cpu-offload-gb", "--json-model-override-args"]
    assert args == ServerArgs(model_path="m")
