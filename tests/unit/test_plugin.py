"""A drafter from outside: what it lacks and what it does wrong is said by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_spec import LLM
from sgl_spec.errors import ConfigError, DrafterError
from sgl_spec.speculative.base import KVDrafter, protocol_methods, register_drafter

HEAD = "import torch\nfrom sgl_spec import register_drafter\n"
# Proposes nothing: root-only trees.
QUIET = """
from sgl_spec.speculative.tree import root_only
class Quiet:
    def __init__(self, context): pass
    def begin(self, row, tokens, known): pass
    def propose(self, batch): return root_only(torch.from_numpy(batch.roots()))
    def observe(self, batch, tree, accepted): pass
    def finish(self, row): pass
    def flush(self): pass
    def stats(self): return {"learned": 3.0}
"""
METHODS = ["begin", "propose", "observe", "finish", "flush", "stats"]


def start(tmp_path: Path, model: str, source: str, name: str) -> LLM:
    module = tmp_path / "drafters.py"
    module.write_text(HEAD + source)
    return LLM(
        model,
        speculative_algorithm=name,
        speculative_drafter_module=module,
        max_total_tokens=400,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_class_that_lacks_a_method_ends_the_start_before_the_model_is_loaded(
    tmp_path: Path, method: str
) -> None:
    source = QUIET.replace(f"def {method}(", f"def other_{method}(")
    source += "register_drafter('gap', Quiet)\n"
    with pytest.raises(ConfigError) as caught:
        start(tmp_path, str(tmp_path / "no-model"), source, "GAP")
    assert caught.value.message == (
        f"The drafter GAP lacks {method}; it must have the methods {', '.join(METHODS)}."
    )


def test_a_drafter_with_kv_has_more_methods() -> None:
    class Half:
        follows_kv = True
        begin = propose = observe = finish = flush = stats = open = lambda *_: None

    with pytest.raises(ConfigError, match="HALF lacks prefilled, verified, written_len;"):
        register_drafter("half", Half)  # type: ignore[arg-type]
    names = [name for name in vars(KVDrafter) if not name.startswith("_")]
    assert protocol_methods(Half) == [*METHODS, *names]


def test_a_drafter_with_kv_says_what_it_reads(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = QUIET + "    follows_kv, capture = True, ()\n    written_len = open = len\n"
    source += "    prefilled = verified = len\nregister_drafter('half', lambda c: Quiet(c))\n"
    with pytest.raises(ConfigError, match=r"HALF lacks reads_ahead; .* capture, reads_ahead"):
        start(tmp_path, str(tiny_model_dir), source, "HALF")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("register_drafter('made', lambda context: 5)", "The drafter MADE lacks begin, propose"),
        (
            "register_drafter('made', lambda context: 1 / 0)",
            "The drafter MADE cannot be built: ZeroDivisionError: division by zero.",
        ),
        ("nothing", "cannot be imported: NameError: name 'nothing' is not defined"),
    ],
)
def test_what_cannot_be_built_ends_the_start(
    tmp_path: Path, tiny_model_dir: Path, source: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        start(tmp_path, str(tiny_model_dir), source, "MADE")
    assert sentence in caught.value.message


def test_a_name_that_nobody_registered_ends_the_start_before_the_model_is_loaded(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"must be none or one of .*EAGLE, .*got 'UNHEARD'"):
        start(tmp_path, str(tmp_path / "no-model"), "pass", "unheard")


@pytest.mark.parametrize("method", ["begin", "propose", "observe", "finish"])
def test_an_exception_in_a_method_names_drafter_and_method(
    tmp_path: Path, tiny_model_dir: Path, method: str
) -> None:
    source = (
        QUIET
        + f"""
class Broken(Quiet):
    def {method}(self, *args): return {{}}["lost"]
register_drafter("broken", Broken)
"""
    )
    llm = start(tmp_path, str(tiny_model_dir), source, "broken")
    with pytest.raises(DrafterError) as caught:
        llm.generate("a", {"max_new_tokens": 3})
    assert caught.value.message == f"The drafter BROKEN failed in {method}: KeyError: 'lost'."
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_proposal_must_be_a_tree(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = (
        QUIET
        + """
class Chain(Quiet):
    def propose(self, batch): return [1, 2]
register_drafter("chain", Chain)
"""
    )
    llm = start(tmp_path, str(tiny_model_dir), source, "chain")
    with pytest.raises(DrafterError, match="CHAIN failed in propose: it must return a TokenTree"):
        llm.generate("a", {"max_new_tokens": 3})


def test_a_drafter_keeps_what_it_has_beside_the_protocol(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    source = QUIET + "Quiet.memory = 'kept'\nregister_drafter('quiet', Quiet)\n"
    with start(tmp_path, str(tiny_model_dir), source, "quiet") as llm:
        assert len(llm.generate("a", {"max_new_tokens": 3})[0].output_ids) == 3
        assert llm.engine.state().drafter == {"learned": 3.0}
        assert getattr(llm.engine.drafter, "memory") == "kept"  # noqa: B009
        assert not hasattr(llm.engine.drafter, "samples")
