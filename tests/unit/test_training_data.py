"""The `data` command: prompts of every kind, answers as asked for, and runs that go on."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from sgl_spec.errors import ConfigError
from sgl_spec.server.tokenizer import ServerTokenizer
from sgl_spec.training import maker, writing
from sgl_spec.training.__main__ import main as command
from sgl_spec.training.data import main, parse
from sgl_spec.training.grammar import Grammar
from sgl_spec.training.mixture import Sources, compose, counts
from sgl_spec.training.prompts import (
    KINDS,
    Article,
    Overlap,
    Prompt,
    article_request,
    is_good_article,
    is_good_turn,
    library_articles,
    opening,
    question_about,
    read_prompts,
    renumbered,
    retrieved,
    summary_prompt,
)
from sgl_spec.training.shards import ShardWriter, TokenSequence, TokenShards

GRAMMAR = Grammar.load()
TEXT_TOKENS = 100


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of 704 tokens would take most of the time here."""
    monkeypatch.setattr(maker, "ARTICLE_TOKENS", TEXT_TOKENS)
    monkeypatch.setattr(writing, "ARTICLE_TOKENS", TEXT_TOKENS)


def run(directory: Path, model: Path, *more: str, tokens: int = 6000) -> None:
    args = ["--model-path", str(model), "--out", str(directory), "--tokens", str(tokens)]
    short = ["--max-new-tokens", "12", "--max-prompt-tokens", "1200", "--batch-size", "16"]
    main([*args, *short, "--device", "cpu", *more])


def test_every_symbol_of_the_grammar_expands() -> None:
    bound = dict.fromkeys(("a", "b", "c", "x", "title", "text", "passages", "question"), "T")
    bound["subject"] = "S"
    for symbol in GRAMMAR.alternatives:
        for seed in range(20):
            text = GRAMMAR.expand(symbol, random.Random(seed), bound)
            assert text, symbol
            assert "{" not in text, text


def test_numbers_keep_to_their_range_and_given_text_is_not_expanded() -> None:
    grammar = Grammar({"top": ["{3..5} {given}"]})
    drawn = {grammar.expand("top", random.Random(s), {"given": "{top}"}) for s in range(60)}
    assert drawn == {"3 {top}", "4 {top}", "5 {top}"}


def test_package_prompts_name_their_licences_and_overlap_with_no_benchmark() -> None:
    prompts = read_prompts(None)
    assert len(prompts) == 3758
    assert {prompt.kind for prompt in prompts} == {"chat", "math"}
    data = Path("sgl_spec/bench/data")
    overlap = Overlap(sorted(data.glob("*.jsonl")))
    assert not [prompt for prompt in prompts if overlap(prompt.text)]
    rows = Path("sgl_spec/training/data/train_prompts.jsonl").read_text().split("\n")
    assert all(json.loads(row)["licence"] for row in rows if row)


def test_overlap_finds_whole_texts_and_long_quotes(tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    words = [f"w{i}" for i in range(40)]
    row = {"id": 1, "turns": ["Who sings  Yesterday?", " ".join(words)]}
    file.write_text(json.dumps(row) + "\n")
    overlap = Overlap([file])
    assert overlap("who sings yesterday")
    assert overlap("before " + " ".join(words[5:17]) + " after")
    assert not overlap(" ".join(words[5:16]))
    assert not overlap("Who sings Yesterday and Imagine?")
    with pytest.raises(ConfigError, match=r"no\.jsonl"):
        Overlap([tmp_path / "no.jsonl"])


def test_sums_get_other_numbers_and_keep_their_words() -> None:
    prompt = Prompt("math", "Ann has 12 apples and 2/3 of 45 pears, at $1.50 and 1 coin.")
    varied = renumbered(prompt, random.Random(3)).text
    assert varied != prompt.text
    assert "2/3" in varied
    assert "$1.50" in varied
    assert "1 coin" in varied
    assert varied.split()[:2] == ["Ann", "has"]


def test_turns_of_a_model_are_judged() -> None:
    assert is_good_turn("chat", "Write a poem about the sea.")
    assert not is_good_turn("chat", "sea sea sea sea sea sea sea sea")
    assert not is_good_turn("chat", "Write")
    assert is_good_turn("math", "Ann has 3 pears and eats 2. How many are left?")
    assert not is_good_turn("math", "Ann has pears and eats some of them?")
    assert not is_good_turn("qa", "Who played Anna?\nAnswer: nobody at all")
    assert not is_good_article("word " * 200)
    assert is_good_article(" ".join(f"{i} and" for i in range(150)))


def test_long_prompts_hold_their_texts() -> None:
    rng = random.Random(5)
    articles = [Article(f"title{i}", " ".join(f"a{i}w{j}" for j in range(400))) for i in range(5)]
    summary = summary_prompt(articles, GRAMMAR, rng)
    assert summary.kind == "summarization"
    assert sum(all(w in summary.text for w in item.text.split()) for item in articles) in (1, 2)
    about, passages = retrieved(articles, rng)
    lines = passages.split("\n")
    assert 2 <= len(lines) <= 6
    assert any(line.startswith(about.title) for line in lines)
    assert all(80 <= len(line.split()) <= 101 for line in lines)
    question = question_about(about, "in 1987 so Ann Lee went home", GRAMMAR, rng)
    assert any(subject in question for subject in (about.title, "Ann Lee", "1987"))


def test_library_texts_are_prose_of_bounded_length() -> None:
    articles = library_articles(GRAMMAR.alternatives["module"])
    assert len(articles) > 100
    assert all(120 <= len(item.text.split()) <= 700 for item in articles)


def test_requests_and_openings_exist_for_what_the_model_writes() -> None:
    rng = random.Random(1)
    for kind in ("chat", "math", "qa", "translation", "rag"):
        assert opening(kind, GRAMMAR, rng)
    title, request = article_request(GRAMMAR, rng)
    assert title in request


def test_composition_follows_the_plan_and_drops_what_must_go() -> None:
    wanted = counts(300_000, 256)
    turns = {"chat": ["A turn of my own."], "qa": ["Forbidden words here?"]}
    sources = Sources(read_prompts(None), turns, [Article("t", "word " * 150)] * 3, [("p", "q?")])
    dropped = lambda text: "Forbidden" in text  # noqa: E731 - two words of a rule
    prompts = compose(wanted, sources, GRAMMAR, random.Random(2), dropped)
    found = {kind: sum(prompt.kind == kind for prompt in prompts) for kind in KINDS}
    assert found.pop("writing") == 0
    for kind, number in found.items():
        assert 0.95 * wanted[kind] - 2 <= number <= wanted[kind], kind
    texts = [prompt.text for prompt in prompts]
    assert "A turn of my own." in texts
    assert not any("Forbidden" in text for text in texts)


def test_data_of_every_kind_ends_as_asked(tmp_path: Path, tiny_model_dir: Path) -> None:
    run(tmp_path, tiny_model_dir)
    data = TokenShards(tmp_path)
    assert data.num_tokens >= 6000
    assert data.kind_names == KINDS
    assert len(set(data.kinds.tolist())) >= 5
    tokenizer = ServerTokenizer.from_dir(tiny_model_dir)
    for index in range(len(data)):
        ids, prompt_len = data.sequence(index), int(data.prompt_lens[index])
        text = tokenizer.decode(ids[:prompt_len].tolist(), skip_special_tokens=False)
        assert text.startswith("<|im_start|>user\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        limit = TEXT_TOKENS if KINDS[data.kinds[index]] == "writing" else 12
        assert 1 <= len(ids) - prompt_len <= limit
    answers = data.temperatures[data.kinds != KINDS.index("writing")]
    assert 0.3 < (answers == 0).mean() < 0.9
    assert ((answers == 0) | ((answers >= 0.3) & (answers <= 1.0))).all()
    manifest = json.loads((tmp_path / "part-00.json").read_text())
    assert manifest["seed"] == 0
    assert manifest["versions"]["torch"]


def test_a_run_goes_on_where_it_ended(tmp_path: Path, tiny_model_dir: Path) -> None:
    run(tmp_path, tiny_model_dir, tokens=3000)
    first = TokenShards(tmp_path)
    run(tmp_path, tiny_model_dir, tokens=5000)
    both = TokenShards(tmp_path)
    assert len(both) > len(first)
    assert both.num_tokens >= 5000
    count = len(first)
    assert all((both.sequence(i) == first.sequence(i)).all() for i in range(count))
    jobs = both.jobs.tolist()
    assert len(set(jobs)) == len(jobs)


def test_parts_differ_and_join(tmp_path: Path, tiny_model_dir: Path) -> None:
    for part in ("0/2", "1/2"):
        run(tmp_path, tiny_model_dir, "--part", part)
    data = TokenShards(tmp_path)
    assert data.num_tokens >= 6000
    files = [(tmp_path / f"prompts-0{part}-0.jsonl").read_text().split("\n") for part in (0, 1)]
    first, second = ({json.loads(line)["text"] for line in file if line} for file in files)
    assert len(first & second) < 0.2 * len(first)


def test_time_ends_a_run_with_what_is_there(tmp_path: Path, tiny_model_dir: Path) -> None:
    run(tmp_path, tiny_model_dir, "--time-limit", "0.5", tokens=300_000)
    assert json.loads((tmp_path / "part-00.json").read_text())["format"] == 1


def test_a_stopped_run_keeps_what_was_finished(
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C after 40 sequences: they are all on disk, and the same command goes on from them."""
    add, added = ShardWriter.add, []

    def stopped(writer: ShardWriter, sequence: TokenSequence) -> None:
        add(writer, sequence)
        added.append(sequence.job)
        if len(added) == 40:
            raise KeyboardInterrupt

    flags = ["--model-path", str(tiny_model_dir), "--out", str(tmp_path), "--tokens", "6000"]
    flags += ["--max-new-tokens", "12", "--batch-size", "16", "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", stopped)
        assert command(["data", *flags]) == 130
    assert "data: stopped; what was finished is kept" in capsys.readouterr().err
    assert TokenShards(tmp_path).jobs.tolist() == added
    assert command(["data", *flags]) == 0
    jobs = TokenShards(tmp_path).jobs.tolist()
    assert len(set(jobs)) == len(jobs) > 40


@pytest.mark.parametrize(("context", "answer"), [(256, "100"), (160, "12"), (96, "12")])
def test_prompts_that_leave_no_room_are_dropped(
    tmp_path: Path, tiny_model_dir: Path, context: int, answer: str
) -> None:
    """A short context holds the shorter prompts; the shortest, none of the texts to be written."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    config = json.loads((model / "config.json").read_text())
    changed = config | {"max_position_embeddings": context}
    (model / "config.json").write_text(json.dumps(changed))
    run(tmp_path / "data", model, "--max-new-tokens", answer, tokens=1500)
    data = TokenShards(tmp_path / "data")
    assert len(data) > 5
    assert int(data.lens.max()) <= context
    answered = data.kinds != KINDS.index("writing")
    assert int(data.prompt_lens[answered].max()) <= context - int(answer)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tokens", "0"], "--tokens"),
        (["--greedy-share", "1.5"], "--greedy-share"),
        (["--temperature", "0.9", "0.3"], "--temperature"),
        (["--part", "2/2"], "--part"),
        (["--batch-size", "-1"], "--batch-size"),
        (["--attention", "triton", "--device", "cpu"], "--attention"),
    ],
)
def test_values_out_of_range_are_refused(flags: list[str], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(["--out", str(tmp_path), *flags])


def test_the_command_reports_errors_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["data", "--out", str(tmp_path), "--part", "x"]) == 2
    assert capsys.readouterr().err == "data: --part x is not I/N with 0 <= I < N <= 100.\n"
    assert command(["nothing"]) == 2
    assert command(["--help"]) == 0
