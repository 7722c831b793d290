"""Options: the declaration against --help and docs/flags.md, and what is refused in which words."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sgl_spec
from sgl_spec.args import ResolvedArgs, ServerArgs, flags_page
from sgl_spec.contradictions import ABSENT_DRAFTERS
from sgl_spec.draft_shape import EMBEDDED_DRAFTS
from sgl_spec.errors import ConfigError
from sgl_spec.models.shipped import SHIPPED
from sgl_spec.options import build_parser, declared
from sgl_spec.sglang_families import ABSENT, NO_SPEED
from sgl_spec.sglang_flags import FOREIGN_ALIASES, FOREIGN_FLAGS, OWN_WORDS, VLLM_FLAGS

ROOT = Path(__file__).parents[2]
OPTIONS = declared(ServerArgs)
NGRAM = ["--speculative-algorithm", "NGRAM"]


EAGLE3 = ["--speculative-algorithm", "EAGLE3"]


def parse(*argv: str) -> ResolvedArgs:
    return ServerArgs.from_cli(["--model-path", "smollm2", *argv]).resolve()


# --- the declaration ---------------------------------------------------------------------------


def test_every_field_is_a_declared_option() -> None:
    fields = {item.name for item in dataclasses.fields(ServerArgs)}
    assert fields - set(OPTIONS) == {"without_effect", "logged"}


def test_the_flag_page_is_what_the_declaration_gives() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == flags_page(), "run: python -m sgl_spec.args > docs/flags.md"
    for opt in OPTIONS.values():
        for flag in opt.flags:
            assert f"`{flag}`" in page


def test_help_names_every_flag_with_its_meaning_values_and_default() -> None:
    text = " ".join(build_parser(OPTIONS, "prog", "about").format_help().split())
    for opt in OPTIONS.values():
        for flag in opt.flags:
            assert f"{flag} " in text or f"{flag}," in text
        assert opt.about.help in text
        assert f"default: {opt.default_text}" in text
        for choice in opt.about.choices:
            assert choice in text


def test_help_is_printed_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ServerArgs.from_cli(["--help"])
    assert caught.value.code == 0
    assert "--speculative-ngram-max-trie-depth" in capsys.readouterr().out


@pytest.mark.parametrize("opt", OPTIONS.values(), ids=OPTIONS)
def test_defaults_pass_their_own_check_and_flags_reach_their_field(opt: Any) -> None:
    assert opt.about.help.endswith(".")
    value: Any = {str: "x", int: "2", float: "0.5", bool: None, tuple: "2"}[opt.kind]
    if opt.about.choices:
        value = opt.about.choices[-1]
    if opt.name == "speculative_ngram_capacity":
        value = "2048"
    if opt.name == "simulate_acc_len":
        value = "2.5"
    for flag in opt.flags:
        argv = [flag] if value is None else [flag, value]
        args = ServerArgs.from_cli(["--model-path", "m", *argv])
        wanted = True if value is None else opt.kind(value)
        if opt.kind is tuple:
            wanted = (2,)
        if opt.name == "speculative_algorithm":
            wanted = "X"
        assert getattr(args, opt.name) == wanted


def test_a_new_object_is_frozen_and_checked() -> None:
    args = ServerArgs(model_path="m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.port = 1  # type: ignore[misc]
    with pytest.raises(ConfigError, match="--port must be"):
        dataclasses.replace(args, port=0)


def test_python_and_command_line_agree() -> None:
    from_python = ServerArgs(
        model_path=Path("m"), page_size=16, speculative_algorithm="ngram", enable_metrics=True
    )
    assert from_python == ServerArgs.from_cli(
        ["--model=m", "--page-size=16", "--speculative-algo", "NGRAM", "--enable-metrics"]
    )


# --- resolve -----------------------------------------------------------------------------------


def test_resolve_fills_what_was_left_open_in_a_new_object() -> None:
    args = ServerArgs(model_path="m")
    done = args.resolve()
    assert args.max_running_requests is None
    assert done.max_running_requests == 256
    assert (done.tokenizer_path, done.served_model_name) == ("m", "m")
    assert isinstance(done.random_seed, int)
    assert done.tree_nodes == 1
    assert done.resolve() == done
    assert pickle.loads(pickle.dumps(done)) == done
    open_still = {n for n, o in OPTIONS.items() if o.optional and getattr(done, n) is None}
    assert open_still == {
        "speculative_ngram_index",
        "revision",
        "context_length",
        "api_key",
        "chat_template",
        "max_queued_requests",
        "max_total_tokens",
        "mem_fraction_static",
        "attention_backend",
        "chunked_prefill_size",
        "cuda_graph_max_bs",
        "cuda_graph_bs",
        "speculative_algorithm",
        "speculative_drafter_module",
        "speculative_num_draft_tokens",
        "speculative_draft_model_path",
        "speculative_draft_model_revision",
        "speculative_draft_load_format",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_token_map",
        "simulate_acc_len",
    }


@pytest.mark.parametrize(("device", "chunk"), [("cpu", 256), ("cuda", 2048)])
def test_what_depends_on_the_device_waits_for_it(device: str, chunk: int) -> None:
    assert ServerArgs(model_path="m", device=device).resolve().chunked_prefill_size == chunk
    done = ServerArgs(model_path="m").resolve()
    assert (done.device, done.chunked_prefill_size) == ("auto", None)
    known = done.for_device(device)
    assert (known.device, known.chunked_prefill_size) == (device, chunk)
    assert known.random_seed == done.random_seed
    asked = ServerArgs(model_path="m", chunked_prefill_size=64).resolve()
    assert asked.for_device(device).chunked_prefill_size == 64


def test_lists_of_integers_are_read_from_a_line_and_from_python() -> None:
    line = parse("--cuda-graph-bs", "1", "8", "4", "--port", "31000", "--device", "cuda")
    assert line.cuda_graph_bs == (1, 8, 4)
    assert parse("--cuda-graph-bs-decode", "3").cuda_graph_bs == (3,)
    assert ServerArgs(model_path="m", cuda_graph_bs=[1, 8, 4]).cuda_graph_bs == (1, 8, 4)
    assert line.port == 31000


def test_on_a_cpu_flags_of_a_gpu_change_nothing_and_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = ["--disable-overlap-schedule", "--cuda-graph-max-bs", "4", "--cuda-graph-bs", "1", "2"]
    done = parse(*given)
    assert caplog.text == ""
    done.for_device("cuda")
    assert caplog.text == ""
    done.for_device("cpu")
    for flag in ("--disable-overlap-schedule", "--cuda-graph-max-bs", "--cuda-graph-bs"):
        assert f"{flag} changes nothing on a CPU." in caplog.text
    assert "--disable-cuda-graph" not in caplog.text


@pytest.mark.parametrize(
    ("given", "kept"),
    [("auto", None), ("torch_native", "torch"), ("TRITON", "triton"), ("flashinfer", "flashinfer")],
)
def test_attention_backends(given: str, kept: str | None) -> None:
    assert parse("--attention-backend", given).attention_backend == kept


def test_speculation_sets_48_running_requests_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    done = parse(*NGRAM)
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert (done.max_running_requests, done.speculative_num_draft_tokens) == (48, 12)
    assert done.tree_nodes == 12
    assert "--max-running-requests is not set; with speculation it is 48" in caplog.text
    caplog.clear()
    assert parse(*NGRAM, "--max-running-requests", "7").max_running_requests == 7
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            [*NGRAM, "--speculative-ngram-index", "device"],
            "--speculative-ngram-index device needs a GPU; allowed on a CPU: trie.",
        ),
        (
            ["--attention-backend", "flashinfer", "--cuda-graph-bs", "2"],  # which clash
            "--attention-backend flashinfer needs a GPU; allowed on a CPU: torch.",
        ),
    ],
)
def test_a_missing_gpu_is_told_before_flags_that_clash(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv, "--device", "cpu")
    assert caught.value.message == sentence


def test_an_index_on_a_gpu_is_refused_when_the_device_is_known() -> None:
    done = parse(*NGRAM, "--speculative-ngram-index", "device")
    assert done.for_device("cuda").speculative_ngram_index == "device"
    with pytest.raises(ConfigError, match="needs a GPU; allowed on a CPU: trie"):
        done.for_device("cpu")


@pytest.mark.parametrize("name", ["none", "None", "NONE"])
def test_no_speculation_has_a_name(name: str) -> None:
    assert parse("--speculative-algorithm", name).speculative_algorithm is None


def test_drafting_options_without_an_algorithm_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse("--speculative-num-draft-tokens", "8", "--speculative-num-steps", "3")
    assert "--speculative-num-draft-tokens changes nothing without" in caplog.text
    assert "--speculative-num-steps changes nothing without" in caplog.text
    caplog.clear()
    parse("--speculative-algorithm", "none")
    assert caplog.text == ""


def test_what_changes_nothing_is_told_once_also_by_the_engine_s_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = parse("--speculative-num-steps", "3", "--log-requests", "--disable-cuda-graph")
    fields = {item.name: getattr(done, item.name) for item in dataclasses.fields(done)}
    sent = ResolvedArgs(**msgspec.json.decode(msgspec.json.encode(fields)))
    sent.resolve().for_device("cpu").resolve()
    for words in ("--speculative-num-steps", "--log-requests", "--disable-cuda-graph"):
        assert caplog.text.count(f"{words} changes nothing") == 1


def test_a_module_allows_names_of_its_own() -> None:
    done = parse(
        "--speculative-algorithm", "mine", "--speculative-drafter-module", "my.drafters",
        "--speculative-num-steps", "3",
    )  # fmt: skip
    assert done.speculative_algorithm == "MINE"
    options = done.drafter_options()
    assert (options["num_steps"], options["num_draft_tokens"]) == (3, 12)
    assert "drafter_module" not in options


PLUGIN = ["--speculative-algorithm", "mine", "--speculative-drafter-module", "my.drafters"]
REJECTION, BLOCK = "--speculative-use-rejection-sampling", "--speculative-use-block-verification"
STEPS, TOPK = "--speculative-num-steps", "--speculative-eagle-topk"
NODES = "--speculative-num-draft-tokens"


@pytest.mark.parametrize(
    ("flags", "steps", "topk", "nodes"),
    [
        ([REJECTION], 11, 1, 12),
        ([BLOCK], 11, 1, 12),
        ([REJECTION, STEPS, "3"], 3, 1, 4),
        ([REJECTION, STEPS, "63"], 63, 1, 64),
        ([REJECTION, NODES, "6"], 5, 1, 6),
        ([REJECTION, STEPS, "8", NODES, "6"], 8, 1, 6),
        ([REJECTION, TOPK, "4"], 11, 4, 12),
        ([REJECTION, TOPK, "2", STEPS, "2"], 2, 2, 7),
        ([REJECTION, TOPK, "4", STEPS, "5", NODES, "8"], 5, 4, 8),
    ],
)
def test_sampled_drafts_have_a_shape_and_the_drafter_is_told(
    flags: list[str], steps: int, topk: int, nodes: int
) -> None:
    done = parse(*PLUGIN, *flags)
    shape = done.sampled_shape
    assert shape is not None
    assert (shape.steps, shape.topk, shape.nodes) == (steps, topk, nodes)
    assert done.tree_nodes == nodes
    options = done.drafter_options()
    told = [options[name] for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
    assert told == [steps, topk, nodes]
    assert done.resolve() == done


def shape_of(done: ResolvedArgs) -> tuple[object, ...]:
    """(steps, topk, nodes) as the drafter is told."""
    options = done.drafter_options()
    return tuple(options[name] for name in ("num_steps", "eagle_topk", "num_draft_tokens"))


@pytest.mark.parametrize(
    ("algorithm", "flags", "shape", "slots"),
    [
        ("EAGLE3", [], (5, 4, 8), 20),
        ("STANDALONE", [], (3, 1, 4), 4),
        ("EAGLE3", [STEPS, "7", TOPK, "8", NODES, "32"], (7, 8, 32), 56),
        ("EAGLE3", [STEPS, "9", TOPK, "8", NODES, "64"], (9, 8, 64), 72),
        ("EAGLE3", [STEPS, "1", TOPK, "4", NODES, "5"], (1, 4, 5), 5),
        ("STANDALONE", [STEPS, "2", TOPK, "3", NODES, "12"], (2, 3, 12), 12),
        ("EAGLE3", [STEPS, "1"], (1, 1, 2), 2),
        ("STANDALONE", [STEPS, "63"], (63, 1, 64), 64),
        ("EAGLE3", [STEPS, "2", TOPK, "64", NODES, "64"], (2, 64, 64), 128),
        ("EAGLE3", [REJECTION], (5, 1, 6), 6),
        ("STANDALONE", [BLOCK], (3, 1, 4), 4),
        ("STANDALONE", [REJECTION, STEPS, "3", TOPK, "2"], (3, 2, 12), 12),
    ],
)
def test_draft_models_have_a_shape(
    algorithm: str, flags: list[str], shape: tuple[int, int, int], slots: int
) -> None:
    done = parse("--speculative-algorithm", algorithm, *flags, "--max-running-requests", "2")
    assert shape_of(done) == shape
    assert (done.tree_nodes, done.round_slots) == (shape[2], slots)
    assert done.resolve() == done
    assert done.for_target("Qwen2ForCausalLM") == done


@pytest.mark.parametrize("nodes", ["2", "8", "64"])
def test_a_chain_has_a_node_per_step(nodes: str, caplog: pytest.LogCaptureFixture) -> None:
    chain = [*EAGLE3, STEPS, "5", TOPK, "1", "--max-running-requests", "2", "--random-seed", "7"]
    done = parse(*chain, NODES, nodes)
    assert shape_of(done) == (5, 1, 6)
    assert f"--speculative-num-draft-tokens {nodes} becomes 6" in caplog.text
    caplog.clear()
    assert done.resolve() == parse(*chain, NODES, "6") == parse(*chain) == done
    assert caplog.text == ""


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("LlamaForCausalLM", (5, 4, 8)), ("Qwen3ForCausalLM", (3, 1, 4))],
)
def test_the_target_decides_a_shape_that_no_flag_gives(
    algorithm: str, architecture: str, shape: tuple[int, int, int]
) -> None:
    asked = ServerArgs(
        model_path="m", speculative_algorithm=algorithm, speculative_draft_model_path="d"
    )
    done = asked.resolve()
    assert shape_of(done) == (None, None, None)
    assert done.resolve() == done
    with pytest.raises(AssertionError, match="for_target comes first"):
        _ = done.tree_nodes
    seen = done.for_target(architecture)
    assert shape_of(seen) == shape
    assert seen == seen.resolve() == seen.for_target("LlamaForCausalLM")
    assert shape_of(done) == (None, None, None)


def test_a_pool_too_small_for_the_shape_is_refused_when_it_is_known() -> None:
    asked = ServerArgs(
        model_path="m",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path="d",
        max_total_tokens=16,
    )
    assert asked.resolve().for_target("Qwen2ForCausalLM").round_slots == 4
    with pytest.raises(ConfigError, match="must be at least 42 to hold one request"):
        asked.resolve().for_target("LlamaForCausalLM")


def test_the_embedded_model_brings_its_draft_models() -> None:
    for algorithm, name in EMBEDDED_DRAFTS.items():
        done = parse("--speculative-algorithm", algorithm)
        assert done.speculative_draft_model_path == name
        given = parse("--speculative-algorithm", algorithm, "--speculative-draft-model", "mine")
        assert given.speculative_draft_model_path == "mine"
    assert parse(*NGRAM).speculative_draft_model_path is None
    assert {name: algorithm for algorithm, name in EMBEDDED_DRAFTS.items()} == SHIPPED


def test_draft_weights_are_read_as_the_target_s_are() -> None:
    assert parse(*EAGLE3).speculative_draft_load_format == "auto"
    assert parse(*EAGLE3, "--load-format", "dummy").speculative_draft_load_format == "dummy"
    mixed = parse(*EAGLE3, "--load-format", "dummy", "--speculative-draft-load-format", "auto")
    assert (mixed.load_format, mixed.speculative_draft_load_format) == ("dummy", "auto")
    assert parse(*NGRAM).speculative_draft_load_format is None


def test_without_sampled_drafts_the_drafter_chooses_its_shape() -> None:
    done = parse(*PLUGIN, TOPK, "4")
    assert done.sampled_shape is None
    options = done.drafter_options()
    told = [options[name] for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
    assert told == [None, 4, 12]


def test_thresholds_are_fractions_and_work_with_ngram() -> None:
    single, acc = (f"--speculative-accept-threshold-{name}" for name in ("single", "acc"))
    done = parse(*NGRAM, single, "0.25", acc, "0")
    assert done.speculative_accept_threshold_single == 0.25
    assert done.speculative_accept_threshold_acc == 0.0
    assert parse().speculative_accept_threshold_acc == 1.0
    assert ServerArgs(model_path="m", speculative_accept_threshold_acc=1).resolve() is not None


@pytest.mark.parametrize(
    ("given", "meant"),
    [("half", "float16"), ("float", "float32"), ("BFloat16", "bfloat16"), ("bf16", "bfloat16")],
)
def test_dtype_spellings(given: str, meant: str) -> None:
    assert parse("--dtype", given).dtype == meant


def test_the_api_key_is_shown_nowhere() -> None:
    args = ServerArgs(model_path="m", api_key="hush")
    assert "hush" not in repr(args)
    assert "hush" not in str(args.resolve().public())
    assert args.public()["port"] == 30000


# --- what is refused, and how --------------------------------------------------------------------

_METRICS = "--enable-metrics is a switch and takes no value, got 'yes'."
REFUSED: list[tuple[list[str], str]] = [
    (["--port", "70000"], "--port must be an integer from 1 to 65535, got 70000."),
    (["--port", "http"], "--port must be an integer from 1 to 65535, got 'http'."),
    (["--port", "1.5"], "--port must be an integer from 1 to 65535, got '1.5'."),
    (["--port"], "--port needs a value and none was given."),
    (["--model"], "--model-path needs a value and none was given."),
    (["--enable-metrics=yes"], _METRICS),
    (["--host", ""], "--host must be a non-empty string, got ''."),
    (["--api-key", ""], "--api-key must be a non-empty string, got ''."),
    (["--api-key", "k\udcff"], "--api-key must be text in UTF-8, got byte 0xff at position 1."),
    (["--host", "\ud800"], "--host must be text in UTF-8, got \\ud800 at position 0."),
    (
        ["--dtype", "float23"],
        "--dtype must be one of auto, float32, bfloat16, float16, got 'float23' "
        "(did you mean float32?).",
    ),
    (["--device", "tpu"], "--device must be one of auto, cpu, cuda, got 'tpu'."),
    (
        ["--attention-backend", "fa3"],
        "--attention-backend must be one of torch, triton, flashinfer, got 'fa3'.",
    ),
    (["--cuda-graph-bs"], "--cuda-graph-bs needs a value and none was given."),
    (
        ["--cuda-graph-bs", "2", "0"],
        "--cuda-graph-bs must be one or more integers >= 1 separated by spaces, got (2, 0).",
    ),
    (
        ["--cuda-graph-bs", "2", "x"],
        "--cuda-graph-bs must be one or more integers >= 1 separated by spaces, got ['2', 'x'].",
    ),
    (
        ["--cuda-graph-bs", "1", "8", "--cuda-graph-max-bs", "4"],
        "--cuda-graph-bs must be at most --cuda-graph-max-bs (4), got 8; leave one of them out.",
    ),
    (
        ["--cuda-graph-max-bs", "4", "--disable-cuda-graph"],
        "--cuda-graph-max-bs sizes what --disable-cuda-graph turns off; leave one out.",
    ),
    (
        ["--cuda-graph-bs", "4", "--attention-backend", "flashinfer"],
        "--cuda-graph-bs needs --attention-backend triton, whose forwards can be captured in a "
        "CUDA graph, got flashinfer; leave one of them out.",
    ),
    (
        ["--load-format", "gguf"],
        "--load-format must be one of auto, safetensors, dummy, got 'gguf'.",
    ),
    (["--schedule-policy", "lof"], "--schedule-policy must be one of fcfs, lpm, got 'lof'."),
    (["--context-length", "1"], "--context-length must be an integer >= 2, got 1."),
    (["--page-size", "0"], "--page-size must be an integer from 1 to 1024, got 0."),
    (
        ["--chunked-prefill-size", "0"],
        "--chunked-prefill-size must be -1 (off) or an integer >= 1, got 0.",
    ),
    (
        ["--chunked-prefill-size", "65", "--page-size", "16"],
        "--chunked-prefill-size must be -1 or a multiple of --page-size (16), got 65.",
    ),
    (
        ["--schedule-policy", "lpm", "--disable-radix-cache"],
        "--schedule-policy lpm orders requests by their cached prefix and needs the cache; "
        "use fcfs or drop --disable-radix-cache.",
    ),
    (
        ["--revision", "v2"],
        "--revision v2 names a version on a hub; the embedded model smollm2 has only one, "
        "leave it out.",
    ),
    (
        [*NGRAM, "--max-total-tokens", "25"],
        "--max-total-tokens must be at least 26 to hold one request with 12 tree nodes "
        "at --page-size 1, got 25.",
    ),
    (
        [*NGRAM, "--max-total-tokens", "31", "--page-size", "16"],
        "--max-total-tokens must be at least 32 to hold one request with 12 tree nodes "
        "at --page-size 16, got 31.",
    ),
    (
        ["--max-total-tokens", "3", "--page-size", "16"],
        "--max-total-tokens must be at least 16 to hold one request with 1 tree node "
        "at --page-size 16, got 3.",
    ),
    (
        ["--speculative-algorithm", "nextn"],
        "--speculative-algorithm NEXTN is not supported by this version; use EAGLE, which is what "
        "it means; allowed are none, NGRAM, EAGLE, EAGLE3, STANDALONE and names that "
        "--speculative-drafter-module registers.",
    ),
    (
        ["--speculative-algorithm", "dflash"],
        "--speculative-algorithm DFLASH is not supported by this version; allowed are none, "
        "NGRAM, EAGLE, EAGLE3, STANDALONE and names that --speculative-drafter-module registers.",
    ),
    (
        ["--speculative-algorithm", "ngrm"],
        "--speculative-algorithm must be one of none, NGRAM, EAGLE, EAGLE3, STANDALONE, got 'NGRM' "
        "(did you mean NGRAM?); a drafter of your own needs --speculative-drafter-module.",
    ),
    (
        [*NGRAM, "--speculative-num-draft-tokens", "1"],
        "--speculative-num-draft-tokens must be an integer from 2 to 64, got 1.",
    ),
    (
        [*NGRAM, "--speculative-num-draft-tokens", "65"],
        "--speculative-num-draft-tokens must be an integer from 2 to 64, got 65.",
    ),
    (
        [*NGRAM, "--speculative-ngram-max-trie-depth", "1"],
        "--speculative-ngram-max-trie-depth must be an integer from 2 to 64, got 1.",
    ),
    (
        [*NGRAM, "--speculative-ngram-min-bfs-breadth", "0"],
        "--speculative-ngram-min-bfs-breadth must be an integer >= 1, got 0.",
    ),
    (
        [*NGRAM, "--speculative-ngram-min-bfs-breadth", "11"],
        "--speculative-ngram-min-bfs-breadth must be at most "
        "--speculative-ngram-max-bfs-breadth (10), got 11.",
    ),
    (
        [*NGRAM, "--speculative-ngram-match-type", "DFS"],
        "--speculative-ngram-match-type must be one of BFS, PROB, got 'DFS'.",
    ),
    (
        [*NGRAM, "--speculative-ngram-capacity", "10"],
        "--speculative-ngram-capacity must be an integer >= 1024, got 10.",
    ),
    (
        [*NGRAM, "--speculative-draft-model", "m"],
        "--speculative-draft-model-path m cannot be used with --speculative-algorithm NGRAM, "
        "which has no draft model; leave it out.",
    ),
    (
        [*NGRAM, "--speculative-num-steps", "5"],
        "--speculative-num-steps 5 cannot be used with --speculative-algorithm NGRAM, "
        "which has no draft model; leave it out.",
    ),
    (
        [*NGRAM, "--speculative-token-map", "hot.pt"],
        "--speculative-token-map hot.pt cannot be used with --speculative-algorithm NGRAM, "
        "which has no draft model; leave it out.",
    ),
    (
        [*NGRAM, "--speculative-draft-sampling", "topk"],
        "--speculative-draft-sampling topk cannot be used with --speculative-algorithm NGRAM, "
        "which has no draft model; leave it out.",
    ),
    (
        ["--speculative-algorithm", "EAGLE"],
        "--speculative-algorithm EAGLE needs --speculative-draft-model-path: a directory or a hub "
        "id (smollm2 brings none for EAGLE, only for EAGLE3 and STANDALONE).",
    ),
    (
        [*EAGLE3, "--model-path", "m"],
        "--speculative-algorithm EAGLE3 needs --speculative-draft-model-path: a directory or a hub "
        "id (only smollm2 has draft models of its own, for EAGLE3 and STANDALONE).",
    ),
    (
        [*EAGLE3, "--speculative-draft-model-revision", "v2"],
        "--speculative-draft-model-revision v2 names a version on a hub; the draft models that "
        "come with this server have only one, leave it out.",
    ),
    (
        [*EAGLE3, "--speculative-ngram-max-bfs-breadth", "4"],
        "--speculative-ngram-max-bfs-breadth 4 cannot be used with --speculative-algorithm EAGLE3, "
        "which matches no n-grams; leave it out.",
    ),
    (
        [*EAGLE3, "--speculative-token-map", "hot.pt"],
        "--speculative-token-map hot.pt needs --speculative-algorithm EAGLE, got EAGLE3, whose "
        "draft brings its own vocabulary; leave it out.",
    ),
    (
        ["--speculative-algorithm", "STANDALONE", "--speculative-token-map", "hot.pt"],
        "--speculative-token-map hot.pt needs --speculative-algorithm EAGLE, got STANDALONE, whose "
        "draft uses the whole vocabulary; leave it out.",
    ),
    (
        [*EAGLE3, REJECTION, "--speculative-draft-sampling", "topk"],
        "--speculative-use-rejection-sampling samples the drafts and has no use for "
        "--speculative-draft-sampling topk; leave one of them out.",
    ),
    (
        [*EAGLE3, "--speculative-draft-sampling", "best"],
        "--speculative-draft-sampling must be one of shared-noise, topk, got 'best'.",
    ),
    (
        [*EAGLE3, TOPK, "4"],
        "--speculative-eagle-topk 4 needs --speculative-num-steps beside it; give both or neither.",
    ),
    (
        [*EAGLE3, NODES, "8"],
        "--speculative-num-draft-tokens 8 needs --speculative-num-steps beside it; give both or "
        "neither.",
    ),
    (
        [*EAGLE3, STEPS, "5", TOPK, "4"],
        "--speculative-eagle-topk 4 needs --speculative-num-draft-tokens beside it, the nodes of "
        "the tree, from 2 to 64.",
    ),
    (
        [*EAGLE3, STEPS, "1", TOPK, "4", NODES, "8"],
        "--speculative-num-draft-tokens must be at most 5, the root and the 4 candidates of "
        "--speculative-num-steps 1 with --speculative-eagle-topk 4, got 8.",
    ),
    (
        [*EAGLE3, STEPS, "10", TOPK, "8", NODES, "64"],
        "--speculative-num-steps and --speculative-eagle-topk must keep (steps - 1) * topk at most "
        "64, got (10 - 1) * 8 = 72.",
    ),
    (
        [*EAGLE3, STEPS, "64"],
        "--speculative-num-steps must be at most 63 for a chain (--speculative-eagle-topk 1), got "
        "64.",
    ),
    ([*EAGLE3, STEPS, "0"], "--speculative-num-steps must be an integer >= 1, got 0."),
    ([*EAGLE3, STEPS, "-1"], "--speculative-num-steps must be an integer >= 1, got -1."),
    (
        [*EAGLE3, STEPS, "1", TOPK, "65", NODES, "8"],
        "--speculative-eagle-topk must be an integer from 1 to 64, got 65.",
    ),
    (
        [*EAGLE3, "--max-total-tokens", "41"],
        "--max-total-tokens must be at least 42 to hold one request with 20 rows of draft steps "
        "at --page-size 1, got 41.",
    ),
    (
        [*EAGLE3, REJECTION, STEPS, "3", NODES, "5"],
        "--speculative-num-draft-tokens must be at most 4, what --speculative-num-steps 3 levels "
        "of --speculative-eagle-topk 1 hold, got 5.",
    ),
    (
        ["--speculative-accept-threshold-single", "1.5"],
        "--speculative-accept-threshold-single must be a number from 0 to 1, got 1.5.",
    ),
    (
        ["--speculative-accept-threshold-acc", "-0.1"],
        "--speculative-accept-threshold-acc must be a number from 0 to 1, got -0.1.",
    ),
    (
        ["--speculative-accept-threshold-acc", "nan"],
        "--speculative-accept-threshold-acc must be a number from 0 to 1, got nan.",
    ),
    (
        ["--speculative-accept-threshold-acc", "most"],
        "--speculative-accept-threshold-acc must be a number from 0 to 1, got 'most'.",
    ),
    (
        [*NGRAM, REJECTION],
        "--speculative-use-rejection-sampling cannot be used with --speculative-algorithm NGRAM, "
        "which copies its drafts and has no distribution to sample them from; leave it out.",
    ),
    (
        [*NGRAM, BLOCK],
        "--speculative-use-block-verification cannot be used with --speculative-algorithm NGRAM, "
        "which copies its drafts and has no distribution to sample them from; leave it out.",
    ),
    (
        [*PLUGIN, REJECTION, "--speculative-accept-threshold-acc", "0.9"],
        "--speculative-use-rejection-sampling judges drafts by p/q and has no use for "
        "--speculative-accept-threshold-acc 0.9; leave one of them out.",
    ),
    (
        [*PLUGIN, BLOCK, "--speculative-accept-threshold-single", "0"],
        "--speculative-use-block-verification judges drafts by p/q and has no use for "
        "--speculative-accept-threshold-single 0.0; leave one of them out.",
    ),
    (
        [*PLUGIN, BLOCK, TOPK, "2"],
        "--speculative-use-block-verification judges chains: --speculative-eagle-topk must be 1, "
        "got 2.",
    ),
    (
        [*PLUGIN, REJECTION, STEPS, "3", NODES, "5"],
        "--speculative-num-draft-tokens must be at most 4, what --speculative-num-steps 3 levels "
        "of --speculative-eagle-topk 1 hold, got 5.",
    ),
    (
        [*PLUGIN, REJECTION, STEPS, "2", TOPK, "2", NODES, "8"],
        "--speculative-num-draft-tokens must be at most 7, what --speculative-num-steps 2 levels "
        "of --speculative-eagle-topk 2 hold, got 8.",
    ),
    (
        [*PLUGIN, REJECTION, STEPS, "64"],
        "--speculative-num-steps must be at most 63 for a sampled chain, got 64.",
    ),
    (
        [*NGRAM, "--speculative-eagle-topk", "4"],
        "--speculative-eagle-topk 4 cannot be used with --speculative-algorithm NGRAM, "
        "which has no draft model; leave it out.",
    ),
    (
        ["--tensor-parallel-size", "2"],
        "--tensor-parallel-size 2 is not supported by this version: the model runs in one engine "
        "process; leave it out or set it to 1.",
    ),
    (
        ["--quantization=fp8"],
        "--quantization fp8 is not supported by this version: load the checkpoint in its own "
        "dtype, or choose one with --dtype.",
    ),
    (
        ["--kv-cache-dtype", "fp8_e5m2"],
        "--kv-cache-dtype fp8_e5m2 is not supported by this version: the KV cache has the model's "
        "dtype; use auto.",
    ),
    (["--tp-size"], "--tp-size needs a value and none was given."),
    (["--enable-lora=1"], "--enable-lora is a switch and takes no value, got '1'."),
    (["--prot", "1"], "--prot is not an option (did you mean --port?); see --help."),
    (
        ["--max-total", "100"],
        "--max-total is not an option (did you mean --max-total-tokens?); see --help.",
    ),
    (
        ["--mem-fraction", "0.8"],
        "--mem-fraction is not an option (did you mean --mem-fraction-static?); see --help.",
    ),
    (["--tool-parser", "x"], "--tool-parser is not an option; see --help."),
    *(
        ([flag, "4"], f"{flag} is not an option (did you mean {meant}?); see --help.")
        for flag, meant in VLLM_FLAGS.items()
    ),
    (
        ["--log-request"],
        "--log-request is not an option (did you mean --log-requests?); see --help.",
    ),
    *(
        (
            [f"--mem-fraction-static={value}"],
            f"--mem-fraction-static must be a number above 0 and below 1, got {seen}.",
        )
        for value, seen in [("0", "0.0"), ("1", "1.0"), ("-0.5", "-0.5"), ("nan", "nan")]
    ),
    (
        ["--mem-fraction-static=much"],
        "--mem-fraction-static must be a number above 0 and below 1, got 'much'.",
    ),
    (["--host", "h", "-hx"], "-hx is not an option; see --help."),
    (["--host", "h", "-port", "3"], "-port is not an option (did you mean --port?); see --help."),
    (["--help=x"], "--help is a switch and takes no value, got 'x'."),
    (["--", "--port", "3"], "'--' belongs to no flag; see --help."),
    (["--host", "h", "-5"], "'-5' belongs to no flag; see --help."),
    (["--log-requests", "--enable-metrics", "true"], _METRICS.replace("yes", "true")),
    (["--numa-node", "0", "--port", "3", "stray"], "'stray' belongs to no flag; see --help."),
    (
        ["--tp-size", "--port", "3", "1"],
        "'1' belongs to no flag; see --help.\n--tp-size needs a value and none was given.",
    ),
    (
        ["--dp", "2", "stray"],
        "--dp 2 is not supported by this version: the model runs in one engine process; leave it "
        "out or set it to 1.\n'stray' belongs to no flag; see --help.",
    ),
    (
        ["--qqq", "1", "--prot", "--qqq", "2", "--prot"],
        "--qqq is not an option; see --help.\n"
        "--prot is not an option (did you mean --port?); see --help.",
    ),
    (["--tp", "1", "stray"], "'stray' belongs to no flag; see --help."),
    (
        [
            "--tp",
            "2",
            "--trust-remote-code",
            "--hf-chat-template-name",
            "rag",
            "--qqq",
            "--dp",
            "1",
        ],
        "--tp 2 is not supported by this version: the model runs in one engine process; leave it "
        "out or set it to 1.\n"
        "--hf-chat-template-name rag is not supported by this version: name the template's file "
        "with --chat-template.\n"
        "--qqq is not an option; see --help.",
    ),
    (["--qqq"], "--qqq is not an option; see --help."),
    (["stray"], "'stray' belongs to no flag; see --help."),
]


@pytest.mark.parametrize(("argv", "sentence"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_what_cannot_work_is_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert caught.value.message == sentence


def test_all_that_is_wrong_with_a_line_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerArgs.from_cli(
            ["--tp-size", "2", "--dtype", "int8", "--page-size", "0", "--no-such-flag"]
        )
    lines = caught.value.message.split("\n")
    wanted = ("--tp-size 2", "--no-such-flag", "--model-path", "--dtype", "--page-size")
    assert [line.startswith(flag) for line, flag in zip(lines, wanted, strict=True)] == [True] * 5
    with pytest.raises(ConfigError) as caught:
        ServerArgs(model_path="m", port=0, page_size=0)
    assert [line.split()[0] for line in caught.value.message.split("\n")] == [
        "--port",
        "--page-size",
    ]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (
            "--speculative-algorithm EAGLE5 --page-size 0",
            ["--page-size must be an", "--speculative-algorithm must be one of"],
        ),
        (
            "--foo 1 --speculative-algorithm NGRAM --speculative-use-rejection-sampling --port 0",
            ["--foo is not", "--port must", "--speculative-use-rejection-sampling cannot be used"],
        ),
        (
            "--port --page-size 0 --enable-metrics=yes --host",
            ["--port needs", "--enable-metrics is a", "--host needs", "--page-size must"],
        ),
        (
            "--speculative-algorithm NGRAM --speculative-num-steps 3 --speculative-eagle-topk 2 "
            "--schedule-policy lpm --disable-radix-cache --revision v2",
            [
                "--speculative-num-steps 3 cannot",
                "--speculative-eagle-topk 2 cannot",
                "--schedule-policy lpm orders",
                "--revision v2 names",
            ],
        ),
    ],
)
def test_values_and_contradictions_are_told_at_once(line: str, wanted: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*line.split())
    lines = caught.value.message.split("\n")
    assert [said[: len(words)] for said, words in zip(lines, wanted, strict=True)] == wanted


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("--speculative-algorithm EAGLE3 --speculative-num-steps 0 --speculative-eagle-topk 4", 1),
        ("--speculative-algorithm EAGLE5 --speculative-use-rejection-sampling", 0),
        ("--speculative-algorithm EAGLE3 --speculative-eagle-topk 4 --max-total-tokens 2", 1),
        ("--chunked-prefill-size 65 --page-size x", 1),
        ("--chunked-prefill-size 65 --page-size 16 --max-total-tokens 2", 0),
        ("--model-path --revision v2", 0),
    ],
)
def test_what_depends_on_a_refused_value_is_not_told(line: str, first: int) -> None:
    """It may be right when that is mended: only what is wrong by itself."""
    with pytest.raises(ConfigError) as caught:
        ServerArgs.from_cli(["--model-path", "smollm2", *line.split()]).resolve()
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith(line.split()[first * 2])


@pytest.mark.parametrize("value", ["-abc", "-", "-1e-3", "-7b", "-x=y"])
def test_a_value_may_begin_with_a_dash(value: str) -> None:
    args = ServerArgs.from_cli(["--model-path", value, "--api-key", value, "--port", "3"])
    assert (args.model_path, args.api_key, args.port) == (value, value, 3)


def test_a_refused_value_with_a_dash_hides_no_other_error() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--mem-fraction-static", "-1e-3", "--foo", "1", "--port", "-x", "--tp", "2")
    assert caught.value.message.splitlines() == [
        "--foo is not an option; see --help.",
        "--tp 2 is not supported by this version: the model runs in one engine process; leave it "
        "out or set it to 1.",
        "--mem-fraction-static must be a number above 0 and below 1, got -0.001.",
        "--port must be an integer from 1 to 65535, got '-x'.",
    ]


def test_a_mistyped_option_is_not_also_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*EAGLE3, "--speculative-num-step", "3", TOPK, "4", NODES, "16")
    assert caught.value.message == (
        "--speculative-num-step is not an option (did you mean --speculative-num-steps?); see "
        "--help."
    )
    with pytest.raises(ConfigError) as caught:
        ServerArgs.from_keywords(
            model_path="smollm2",
            speculative_algorithm="EAGLE3",
            speculative_num_step=3,
            speculative_eagle_topk=4,
        )
    assert caught.value.message == (
        "speculative_num_step is not an option (did you mean speculative_num_steps?)."
    )
    with pytest.raises(ConfigError) as caught:
        ServerArgs.from_cli(["--modl-path", "m"])
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["without_effect", "logged"])
def test_what_the_server_notes_of_its_options_is_no_keyword(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is not an option\.$"):
        ServerArgs.from_keywords(**{"model_path": "m", name: ("said",)})


def test_keywords_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerArgs.from_keywords(
            model_path="smollm2", foo=1, page_size=0, tp_size=2, bar=2, revision="v2"
        )
    told = [line.split()[0] for line in caught.value.message.split("\n")]
    assert told == ["--tp-size", "foo", "bar", "--page-size", "--revision"]
    with pytest.raises(ConfigError, match=r"foo is not an option\.\nbar is not an option\."):
        ServerArgs(model_path="m", foo=1, bar=2)  # type: ignore[call-arg]


def test_the_model_is_required() -> None:
    with pytest.raises(ConfigError, match="--model-path is required"):
        ServerArgs.from_cli([])


@pytest.mark.parametrize("name", ABSENT_DRAFTERS)
def test_absent_algorithms_stay_refused_with_a_module(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not supported by this version"):
        parse("--speculative-algorithm", name.lower(), "--speculative-drafter-module", "m")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": "m"}, "model is not an option (did you mean model_path?)."),
        ({"max_model_len": 1}, "max_model_len is not an option (did you mean context_length?)."),
        ({"portt": 1}, "portt is not an option (did you mean port?)."),
        ({"port": True}, "--port must be an integer from 1 to 65535, got True."),
        ({"port": 1.0}, "--port must be an integer from 1 to 65535, got 1.0."),
        ({"port": None}, "--port must be an integer from 1 to 65535, got None."),
        ({"host": 5}, "--host must be a non-empty string, got 5."),
        ({"enable_metrics": 1}, "--enable-metrics must be true or false, got 1."),
        ({"enable_metrics": "yes"}, "--enable-metrics must be true or false, got 'yes'."),
        (
            {"tp_size": 2},
            "tp_size is not supported by this version: the model runs in one engine process; "
            "leave it out or set it to 1.",
        ),
    ],
)
def test_python_keywords_are_checked_too(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerArgs(**({"model_path": "m"} | given))
    assert caught.value.message == sentence
    assert caught.value.param == next(iter(given))


# --- SGLang's other flags ------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [*FOREIGN_FLAGS, *FOREIGN_ALIASES])
def test_every_known_flag_is_accepted_with_a_log_line_or_refused_with_advice(
    flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry = FOREIGN_FLAGS[FOREIGN_ALIASES.get(flag, flag)]
    assert flag not in {f for opt in OPTIONS.values() for f in opt.flags}
    for value in entry.harmless:
        with caplog.at_level(logging.WARNING):
            parse(f"{flag}={value}")
        assert f"{flag} {value} changes nothing here" in caplog.text
    argv = [flag] if entry.switch else [flag, "strange"]
    if entry.ignored:
        parse(*argv)
        assert f"{' '.join(argv)} changes nothing here: {entry.advice}." in caplog.text
    else:
        with pytest.raises(ConfigError) as caught:
            parse(*argv)
        assert caught.value.message == (
            f"{' '.join(argv)} is not supported by this version: {entry.advice}."
        )


def test_foreign_flags_stand_beside_our_own() -> None:
    done = parse("--tp", "1", "--port", "31000", "--show-time-cost", "--enable-metrics")
    assert (done.port, done.enable_metrics) == (31000, True)


def test_flags_that_change_no_answer_are_accepted_with_several_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse("--cuda-graph-bs-prefill", "1", "2", "--log-requests", "--enable-mixed-chunk")
    assert "--cuda-graph-bs-prefill 1 2 changes nothing here: prompt chunks have" in caplog.text
    assert "--log-requests changes nothing here" in caplog.text
    assert "--enable-mixed-chunk changes nothing here" in caplog.text


def test_a_share_of_the_memory_is_overruled_by_a_size_in_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert parse("--mem-fraction-static", "0.5").mem_fraction_static == 0.5
    assert caplog.text == ""
    parse("--mem-fraction-static", "0.5", "--max-total-tokens", "100")
    assert "--mem-fraction-static changes nothing beside --max-total-tokens." in caplog.text


def test_keywords_may_hold_sglang_s_other_flags(caplog: pytest.LogCaptureFixture) -> None:
    args = ServerArgs.from_keywords(
        model_path="m", tp_size=1, show_time_cost=True, log_requests=False, quantization=None
    )
    assert dataclasses.replace(args, without_effect=()) == ServerArgs(model_path="m")
    args.resolve()
    assert "--tp-size 1 changes nothing here" in caplog.text
    assert "--show-time-cost changes nothing here" in caplog.text
    assert "--log-requests" not in caplog.text
    ServerArgs.from_keywords(model_path="m", cuda_graph_bs_prefill=[1, 2]).resolve()
    assert "--cuda-graph-bs-prefill 1 2 changes nothing here" in caplog.text


def test_spellings_of_what_asks_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    parse("--cpu-offload-gb", "0.0", "--json-model-override-args", "{ }")
    assert "--cpu-offload-gb 0.0 changes nothing here" in caplog.text
    assert "--json-model-override-args { } changes nothing here" in caplog.text
    args = ServerArgs.from_keywords(model_path="m", lora_paths=[], numa_node=[], cpu_offload_gb=0.0)
    assert args.without_effect == ("--cpu-offload-gb 0.0 changes nothing here.",)
    with pytest.raises(ConfigError, match="--lora-paths x is not supported"):
        ServerArgs.from_keywords(model_path="m", lora_paths=["x"])
    with pytest.raises(ConfigError, match="--tp-size takes one value, got '1 2'"):
        ServerArgs.from_keywords(model_path="m", tp_size=[1, 2])


def test_keywords_that_are_refused_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerArgs.from_keywords(model_path="m", tp_size=2, page_size=4, enable_lora=True)
    first, second = caught.value.message.splitlines()
    assert first.startswith("--tp-size 2 is not supported")
    assert second.startswith("--enable-lora is not supported")
    with pytest.raises(ConfigError, match="portt is not an option"):
        ServerArgs.from_keywords(model_path="m", portt=1)


def test_the_flag_page_tells_what_becomes_of_every_flag_of_sglang() -> None:
    accepted, refused = flags_page().partition("These are refused")[::2]
    for flag, entry in FOREIGN_FLAGS.items():
        assert (f"`{flag}`" in accepted) == entry.accepted
        assert (f"`{flag}`" in refused) == (not entry.ignored)


def test_no_flag_is_in_two_families() -> None:
    families = [flag for one in (*NO_SPEED, *ABSENT) for flag, _, _ in one.flags()]
    own = [flag for opt in OPTIONS.values() for flag in opt.flags]
    names = [*families, *OWN_WORDS, *FOREIGN_ALIASES, *own]
    assert len(names) == len(set(names))


def test_code_of_a_checkpoint_is_not_trusted_and_not_needed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse("--trust-remote-code", *NGRAM)
    assert (
        "--trust-remote-code changes nothing here: code from a checkpoint is never" in caplog.text
    )


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ServerArgs.from_cli(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"sgl-spec {sgl_spec.__version__}\n"


def test_a_flag_of_vllm_stands_for_ours() -> None:
    """What it means here is not said to be missing as well."""
    line = (
        "--model-path m --speculative-algorithm EAGLE3 --speculative-draft-model-path d "
        "--num-speculative-tokens 4 --speculative-eagle-topk 4 --speculative-num-steps 3"
    )
    with pytest.raises(ConfigError) as raised:
        ServerArgs.from_cli(line.split())
    assert raised.value.message.splitlines() == [
        "--num-speculative-tokens is not an option (did you mean --speculative-num-draft-tokens, "
        "which counts one more?); see --help."
    ]
