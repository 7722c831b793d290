"""The `data` command: answers as asked for, runs that go on, and prompts that are an input."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import pytest
from docs_commands import ROOT
from example import load_example

from sgl_spec.errors import ConfigError
from sgl_spec.server.tokenizer import ServerTokenizer
from sgl_spec.training.__main__ import main as command
from sgl_spec.training.data import main, parse, read_prompts
from sgl_spec.training.shards import ShardWriter, TokenSequence, TokenShards

NEW = 12
BENCHMARKS = sorted((ROOT / "sgl_spec" / "bench" / "data").glob("*.jsonl"))


@pytest.fixture(scope="module")
def make_prompts() -> ModuleType:
    """The example that writes prompts."""
    return load_example("make_prompts")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty short prompts of two kinds, one of them far too long."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"kind": ("qa", "chat")[i % 2], "prompt": f"say {i} and {i + 1}"} for i in range(60)]
    rows.append({"kind": "chat", "prompt": "word " * 900})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def flags(directory: Path, model: Path, prompts: Path, *more: str, tokens: int) -> list[str]:
    given = ["--model-path", str(model), "--out", str(directory), "--prompts", str(prompts)]
    given += ["--tokens", str(tokens), "--max-new-tokens", str(NEW), "--batch-size", "8"]
    return [*given, *more]


def test_answers_end_as_asked(tmp_path: Path, tiny_model_dir: Path, prompts: Path) -> None:
    """A second answer to a prompt is sampled, and prompts that are too long are left out."""
    main(flags(tmp_path, tiny_model_dir, prompts, "--speculative-algorithm", "NGRAM", tokens=5000))
    data = TokenShards(tmp_path)
    assert data.num_tokens >= 5000
    assert data.kind_names == ("chat", "qa")
    tokenizer = ServerTokenizer.from_dir(tiny_model_dir)
    greedy: set[tuple[int, ...]] = set()
    for index in range(len(data)):
        ids, prompt_len = data.sequence(index), int(data.prompt_lens[index])
        text = tokenizer.decode(ids[:prompt_len].tolist(), skip_special_tokens=False)
        assert text.startswith("<|im_start|>user\nsay ")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert 1 <= len(ids) - prompt_len <= NEW
        prompt = tuple(ids[:prompt_len].tolist())
        if data.temperatures[index] == 0:
            assert prompt not in greedy
            greedy.add(prompt)
        else:
            assert 0.3 <= data.temperatures[index] <= 1.0
    assert 20 < len(greedy) < 60
    manifest = json.loads((tmp_path / "part-00.json").read_text())
    assert manifest["seed"] == 0
    assert manifest["versions"]["torch"]


def test_a_run_goes_on_where_it_ended(tmp_path: Path, tiny_model_dir: Path, prompts: Path) -> None:
    main(flags(tmp_path, tiny_model_dir, prompts, tokens=1000))
    first = TokenShards(tmp_path)
    main(flags(tmp_path, tiny_model_dir, prompts, tokens=2000))
    both = TokenShards(tmp_path)
    assert both.num_tokens >= 2000
    assert all((both.sequence(i) == first.sequence(i)).all() for i in range(len(first)))
    jobs = both.jobs.tolist()
    assert len(set(jobs)) == len(jobs) > len(first)


def test_parts_share_the_prompts_out(tmp_path: Path, tiny_model_dir: Path, prompts: Path) -> None:
    for part in ("0/2", "1/2"):
        main(flags(tmp_path, tiny_model_dir, prompts, "--part", part, tokens=2000))
    data = TokenShards(tmp_path)
    assert data.num_tokens >= 2000
    parts = [TokenShards(tmp_path)._hashes[data.kinds == kind] for kind in (0, 1)]
    assert not set(parts[0].tolist()) & set(parts[1].tolist())  # every second prompt is of a kind


def test_a_stopped_run_keeps_what_was_finished(
    tmp_path: Path,
    tiny_model_dir: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C after 20 sequences: they are all on disk, and the same command goes on from them."""
    add, added = ShardWriter.add, []

    def stopped(writer: ShardWriter, sequence: TokenSequence) -> None:
        add(writer, sequence)
        added.append(sequence.job)
        if len(added) == 20:
            raise KeyboardInterrupt

    argv = ["data", *flags(tmp_path, tiny_model_dir, prompts, tokens=2000)]
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", stopped)
        assert command(argv) == 130
    assert "data: stopped; what was finished is kept" in capsys.readouterr().err
    assert TokenShards(tmp_path).jobs.tolist() == added
    assert command(argv) == 0
    jobs = TokenShards(tmp_path).jobs.tolist()
    assert len(set(jobs)) == len(jobs) > 20


def test_time_ends_a_run_with_what_is_there(
    tmp_path: Path, tiny_model_dir: Path, prompts: Path
) -> None:
    argv = flags(tmp_path, tiny_model_dir, prompts, "--time-limit", "0.01", tokens=300_000)
    main(argv)
    assert json.loads((tmp_path / "part-00.json").read_text())["shards"] == []


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--tokens", "0"], "--tokens 0 is out of range"),
        (["--temperature", "0.9", "0.3"], "--temperature"),
        (["--part", "2/2"], "--part 2/2 is not I/N"),
    ],
)
def test_values_out_of_range_are_refused(given: list[str], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(["--out", str(tmp_path), *given])


@pytest.mark.parametrize(
    ("content", "named"),
    [("", "holds no prompt"), ("{", "line 1 is not JSON"), ('{"prompt": 3}', "no `prompt` text")],
)
def test_files_without_prompts_are_refused(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=named):
        read_prompts(file)
    with pytest.raises(ConfigError, match="Cannot read --prompts"):
        read_prompts(tmp_path / "none")


def test_prompts_without_room_are_refused(
    tmp_path: Path, tiny_model_dir: Path, prompts: Path
) -> None:
    with pytest.raises(ConfigError, match="None of 61 prompts has at most 8 tokens"):
        main(flags(tmp_path, tiny_model_dir, prompts, "--max-prompt-tokens", "8", tokens=100))


def test_package_prompts_name_their_licences_and_overlap_with_no_benchmark(
    make_prompts: ModuleType,
) -> None:
    found = read_prompts(None)
    assert len(found) == 3758
    assert {prompt.kind for prompt in found} == {"chat", "math"}
    overlap = make_prompts.Overlap(BENCHMARKS)
    assert not [prompt for prompt in found if overlap(prompt.text)]
    rows = (ROOT / "sgl_spec/training/data/train_prompts.jsonl").read_text().split("\n")
    assert all(json.loads(row)["licence"] for row in rows if row)


def test_made_prompts_are_of_every_kind_and_of_no_benchmark(
    make_prompts: ModuleType, tmp_path: Path
) -> None:
    out, kept_out = tmp_path / "made.jsonl", tmp_path / "out.jsonl"
    make_prompts.main([str(out), "--count", "200"])
    made = read_prompts(out)
    assert len(made) == 200
    assert {prompt.kind for prompt in made} == set(make_prompts.SHARES)
    assert not any("{" in prompt.text for prompt in made if prompt.kind == "qa")
    kept_out.write_text(json.dumps({"turns": [made[0].text]}) + "\n")
    make_prompts.main([str(out), "--count", "200", "--exclude", str(kept_out)])
    again = [prompt.text for prompt in read_prompts(out)]
    assert made[0].text not in again
    assert 100 < len(again) < 200


def test_every_symbol_of_the_grammar_expands(make_prompts: ModuleType) -> None:
    given = dict.fromkeys(("a", "b", "c", "x", "title", "text", "passages", "question"), "T")
    grammar = make_prompts.Grammar(random.Random(0))
    for symbol in grammar.alternatives:
        for _ in range(20):
            text = grammar.expand(symbol, **given, subject="S")
            assert text, symbol
            assert "{" not in text, text


def test_sums_get_other_numbers_and_keep_their_words(make_prompts: ModuleType) -> None:
    text = "Ann has 12 apples and 2/3 of 45 pears, at $1.50 and 1 coin."
    varied = make_prompts.renumbered(text, random.Random(3))
    assert varied != text
    assert all(part in varied for part in ("Ann has", "2/3", "$1.50", "1 coin"))


def test_texts_of_the_model_become_articles(
    make_prompts: ModuleType, tiny_model_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "made.jsonl"
    make_prompts.ARTICLE_WORDS = (1, 700)
    model = ["--model-path", str(tiny_model_dir), "--written", "2"]
    make_prompts.main([str(out), "--count", "20", *model])
    assert len(read_prompts(out)) == 20


def test_the_command_reports_errors_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["data", "--out", str(tmp_path), "--part", "x"]) == 2
    assert capsys.readouterr().err == "data: --part x is not I/N with 0 <= I < N <= 100.\n"
    assert command(["nothing"]) == 2
    assert command(["--help"]) == 0
