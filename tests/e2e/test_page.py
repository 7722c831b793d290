"""The page at / in a browser: it shows a server's rounds, and those of a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, chromium, installed
from serving import Launch, Server
from talk import drained

from sgl_spec.server.trace import main, read

PROMPT = "The harbour master kept a ledger of every boat that came in"
NEW = 40
DONE = "document.getElementById('same').textContent !== ''"
TEXTS = "Array.from(document.querySelectorAll('.text')).map(e => e.textContent)"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(launch_shared: Launch, traces: Path) -> Iterator[Server]:
    flags = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
    trace = ("--spec-trace", str(traces))
    server = launch_shared(*flags, *trace, "--speculative-verify-whole-trees")
    yield server
    drained(server)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if installed() is None:
        pytest.skip("chromium is not installed; CI installs it")
    with chromium(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Page:
    browser.events.clear()
    browser.size(1280, 900)
    return browser


def fill(page: Page, **values: object) -> None:
    for name, value in values.items():
        page.read(f"document.getElementById({name!r}).value = {json.dumps(value)}; 1")


def facts(page: Page) -> list[list[str]]:
    found: list[list[str]] = page.read(
        "Array.from(document.querySelectorAll('.run')).map(run => "
        "Array.from(run.querySelectorAll('dd')).map(e => e.textContent))"
    )
    return found


@pytest.fixture
def asked(page: Page, server: Server) -> Page:
    """After a run with speculation on and off, without a mouse."""
    page.open(server.url)
    page.until("document.getElementById('about').textContent.includes('NGRAM')")
    page.read("document.querySelector('[value=complete]').click(); 1")
    fill(page, prompt=PROMPT, tokens=str(NEW))
    page.read("document.getElementById('prompt').focus(); 1")
    page.press("Enter", ctrl=True)
    page.until(DONE)
    return page


def test_two_settings_give_one_text(asked: Page, server: Server) -> None:
    """It is the text that the server gives, and accept lengths are counted right."""
    told = asked.read("document.getElementById('same').textContent")
    assert told == f"\u2713 the same text, {NEW} tokens"
    body = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "seed": 1}
    (choice,) = server.client.post("/v1/completions", json=body).json()["choices"]
    assert asked.read(TEXTS) == [choice["text"]] * 2
    drafted, plain = facts(asked)
    assert [plain[0], plain[2], plain[3]] == ["1.00", str(NEW - 1), str(NEW)]
    assert float(drafted[0]) == pytest.approx((NEW - 1) / int(drafted[2]), abs=0.01)
    assert float(drafted[0]) > 1
    coloured = asked.read("document.querySelectorAll('.run')[0].querySelectorAll('.draft').length")
    assert coloured >= NEW - 1 - int(drafted[2])
    assert asked.problems() == []


def test_rounds_are_gone_through_with_the_keyboard(asked: Page) -> None:
    """The tree follows, and its accepted path is marked."""
    asked.read("document.querySelector('input[type=range]').focus(); 1")
    asked.press("Home")
    seen, bold = set(), 0
    rounds = int(facts(asked)[0][2])
    for _ in range(rounds):
        seen.add(asked.read("document.querySelector('.round').textContent"))
        words = asked.read("document.querySelector('.round').textContent").split()
        taken = asked.read("document.querySelectorAll('.run:first-child .tree g.taken').length")
        nodes = asked.read("document.querySelectorAll('.run:first-child .tree g').length")
        assert words[words.index("accepted,") - 1] == str(taken)
        assert nodes >= 1 + int(words[words.index("drafted,") - 1])
        rows = asked.read("document.querySelectorAll('.run:first-child tr.taken').length")
        assert rows == taken
        bold += taken
        asked.press("ArrowRight")
    assert len(seen) == rounds > 1
    assert bold
    words = asked.read("document.querySelector('.spent').textContent")
    assert all(f"{name} " in words for name in ("draft", "verify", "host"))


def test_it_fits_a_phone_and_the_dark(asked: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = asked.read(ground)
    asked.scheme("dark")
    assert asked.read(ground) != light
    asked.scheme("light")
    asked.size(360, 740, phone=True)
    assert asked.read("document.documentElement.scrollWidth") <= 360


def test_refusals_are_told(page: Page, server: Server) -> None:
    page.open(server.url)
    page.until("document.getElementById('about').textContent.includes('NGRAM')")
    fill(page, prompt="", beside="")
    page.read("document.querySelector('[value=complete]').click(); 1")
    page.press("Enter", ctrl=True)
    page.until("document.querySelector('.problem') && !document.querySelector('.problem').hidden")
    assert "prompt cannot be empty" in page.read("document.querySelector('.problem').textContent")


def test_programs_get_lines_and_browsers_a_page_of_its_own(server: Server) -> None:
    assert server.client.get("/").headers["content-type"].startswith("text/plain")
    reply = server.client.get("/", headers={"Accept": "text/html,*/*;q=0.8"})
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "src=" not in reply.text
    assert "@import" not in reply.text


def traced(server: Server, traces: Path, text: str) -> tuple[Path, dict[str, Any]]:
    """A file with the request in it."""
    rid = f"traced {text}"
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    body = {"text": text, "rid": rid, "sampling_params": sampling}
    reply = server.client.post("/generate", json=body).json()
    assert "draft_trees" not in reply["meta_info"]
    (path,) = traces.iterdir()
    (found,) = [one for one in read(path) if one["rid"] == rid]
    assert (found["text"], found["output_ids"]) == (reply["text"], reply["output_ids"])
    assert len(found["rounds"]) == reply["meta_info"]["spec_verify_ct"]
    return path, found


def test_a_trace_as_a_page(page: Page, server: Server, traces: Path, tmp_path: Path) -> None:
    text = "</script><b>bold</b>"
    path, found = traced(server, traces, text)
    target = tmp_path / "trace.html"
    assert main([str(path), "--rid", found["rid"], "--html", str(target)]) == 0
    page.open(target.as_uri())
    page.until("document.querySelector('.run') !== null")
    (shown,) = page.read(TEXTS)
    assert shown
    assert found["text"].startswith(shown)
    assert len(found["text"]) - len(shown) <= 1, "but for a character that the end leaves open"
    assert page.read("document.querySelector('.run h2').textContent") == found["rid"]
    assert facts(page)[0][2] == str(len(found["rounds"]))
    assert page.problems() == []


def test_a_trace_in_the_terminal(
    server: Server, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, found = traced(server, traces, PROMPT)
    assert main([str(path), "--rid", found["rid"], "--rounds", "100"]) == 0
    told = capsys.readouterr().out
    rounds = found["rounds"]
    length = (NEW - 1) / len(rounds)
    first, text, *_ = told.splitlines()
    head = f"{found['rid']}: {NEW} tokens, {len(rounds)} rounds, accept length {length:.2f}"
    assert first == head
    assert told.count("\nround ") == len(rounds)
    assert told.count("\n\u2714 ") == sum(len(one["accepted"]) for one in rounds) > 0
    assert text.count("[") > found["text"].split("\n")[0].count("[")


def test_a_file_that_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    path.write_text('{"rid": "a"}\n')
    assert main([str(path)]) == 2
    assert "line 1, is no request of a trace" in capsys.readouterr().err
    path.write_text("")
    assert main([str(path)]) == 2
    assert "no request in it" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
