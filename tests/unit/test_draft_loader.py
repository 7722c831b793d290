"""A draft that does not fit stops the start-up, with the file, key or tensor that is at fault."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import (
    DROP,
    eagle3_config,
    eagle3_weights,
    eagle_weights,
    edit,
    edit_config,
    head_config,
    make_eagle,
    make_eagle3,
    noise,
    read_target,
    write_head,
)
from tiny import make_tiny

from sgl_spec.args import ServerArgs
from sgl_spec.engine.engine import Engine
from sgl_spec.errors import ConfigError
from sgl_spec.models.checkpoint import resolve_draft, resolve_token_map
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.loader import load_model

# --- tensors ---


def test_every_tensor_of_a_head_is_needed(
    tmp_path: Path, target_dir: Path, refuses: Callable[..., None]
) -> None:
    """Lost one by one, under the names of the file."""
    config = eagle3_config(read_target(target_dir)[0], attention_bias=True, bias=True)
    config["eagle_config"] |= {"norm_before_fc": True, "fc_norm": True}
    norms = {f"fc_norm.{index}.weight": torch.ones(32) for index in range(3)}
    weights = eagle3_weights(config) | norms | {"input_norm.weight": torch.ones(96)}
    for lost in weights.keys() - {"t2d"}:
        rest = {name: weight for name, weight in weights.items() if name != lost}
        refuses("EAGLE3", write_head(tmp_path, config, rest), "misses", lost)
        if lost != "d2t":
            renamed = rest | {f"{lost}_": weights[lost]}
            refuses("EAGLE3", write_head(tmp_path, config, renamed), "misses", lost)
    config = head_config(read_target(target_dir)[0], num_hidden_layers=2)
    weights = eagle_weights(config)
    for lost in weights:
        rest = {name: weight for name, weight in weights.items() if name != lost}
        refuses("EAGLE", write_head(tmp_path, config, rest), "misses weights", lost)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lm_head__weight": torch.ones(100, 32)}, ("lm_head.weight has shape [100, 32]", "[128")),
        ({"fc__weight": torch.ones(32, 64)}, ("fc.weight has shape [32, 64]", "[32, 96]")),
        (
            {"midlayer__self_attn__q_proj__weight": torch.ones(32, 32)},
            ("midlayer.self_attn.q_proj.weight has shape [32, 32]", "[32, 64]"),
        ),
        ({"midlayer__mlp__extra__weight": torch.ones(3)}, ("unexpected", "midlayer.mlp.extra")),
        ({"fc__bias": torch.ones(32)}, ("unexpected weights: fc.bias",)),
        ({"norm__weight": torch.ones(32, dtype=torch.int8)}, ("norm.weight is stored as I8",)),
        ({"d2t": DROP}, ("misses the tensor d2t", "draft_vocab_size is 128", "512")),
        ({"d2t": torch.zeros(100, dtype=torch.int64)}, ("d2t is torch.int64 [100]", "int64 [128]")),
        ({"d2t": torch.zeros(128)}, ("d2t is torch.float32 [128]",)),
        ({"d2t": torch.full((128,), 385)}, ("d2t names the token 512; allowed: 0 to 511",)),
        ({"d2t": torch.full((128,), -1)}, ("d2t names the token -1; allowed",)),
        ({"d2t": -torch.arange(128)}, ("d2t names the token 0 more than once",)),
        (
            {"d2t": torch.zeros(128, dtype=torch.int64), "t2d": torch.arange(512) < 129},
            ("t2d contradicts d2t about 1 tokens; t2d[128] = True", "no column for this token"),
        ),
        (
            {"d2t": torch.zeros(128, dtype=torch.int64), "t2d": torch.arange(512) > 1},
            ("t2d contradicts d2t about 386 tokens; t2d[0] = False", "allowed: True", "a column"),
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_tensors_of_an_eagle3_head(
    changes: dict[str, object],
    named: tuple[str, ...],
    tmp_path: Path,
    target_dir: Path,
    refuses: Callable[..., None],
) -> None:
    refuses("EAGLE3", edit(make_eagle3(tmp_path, target_dir), **changes), *named)


@pytest.mark.parametrize("marks", [torch.ones(128, dtype=torch.bool), torch.ones(512)])
def test_marks_of_another_form_are_named_and_left(
    marks: torch.Tensor,
    tmp_path: Path,
    target: Decoder,
    target_dir: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = edit(make_eagle3(tmp_path, target_dir), t2d=marks)
    load_draft("EAGLE3", head, target, tokenizer_dir=target_dir)
    form = f"t2d is {marks.dtype} {list(marks.shape)}, not bool [512]"
    assert f"{head}: {form}; it is not compared with d2t." in caplog.text


def test_tensors_of_an_eagle_head(
    tmp_path: Path, target_dir: Path, refuses: Callable[..., None]
) -> None:
    norm = {"layers__0__input_layernorm__weight": torch.ones(32)}
    refuses("EAGLE", edit(make_eagle(tmp_path, target_dir), **norm), "unexpected", "layers.0.input")
    wide = {"fc__weight": torch.ones(32, 96)}
    refuses("EAGLE", edit(make_eagle(tmp_path, target_dir), **wide), "fc.weight has shape [32, 96]")


def test_weights_of_a_head_are_finite(
    tmp_path: Path, target_dir: Path, refuses: Callable[..., None]
) -> None:
    makers = {"EAGLE": (make_eagle, 64), "EAGLE3": (make_eagle3, 96)}
    for algorithm, (make, columns) in makers.items():
        weight = torch.ones(32, columns)
        weight[7, 3] = float("nan")
        broken = edit(make(tmp_path / algorithm, target_dir), fc__weight=weight)
        refuses(algorithm, broken, "fc.weight holds NaN or infinite values in float32")


def test_a_null_draft_vocabulary_uses_the_targets_head(
    tmp_path: Path, target: Decoder, target_dir: Path
) -> None:
    head = make_eagle3(tmp_path, target_dir, draft_vocab_size=None)
    edit(head, lm_head__weight=torch.zeros(512, 32))  # published beside null: nobody reads it
    rows = noise(torch.Generator().manual_seed(1), 2, 32)
    assert load_draft("EAGLE3", head, target, tokenizer_dir=target_dir).logits(rows).std() > 0.01


# --- configs ---


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"draft_vocab_size": DROP}, ("draft_vocab_size = 'absent'", "null for the target's head")),
        ({"draft_vocab_size": 513}, ("draft_vocab_size = 513", "1 to 512")),
        ({"draft_vocab_size": "32000"}, ("draft_vocab_size = '32000'",)),
        ({"hidden_size": DROP}, ("hidden_size = None",)),
        ({"hidden_size": 64}, ("hidden_size = 64", "32, the target's hidden_size")),
        ({"target_hidden_size": 64}, ("target_hidden_size = 64", "32, the target's")),
        (
            {"hidden_size": 64, "target_hidden_size": 32, "draft_vocab_size": None},
            ("hidden_size = 64", "32, to go with the target's output layer"),
        ),
        ({"vocab_size": 500}, ("vocab_size = 500", "512, the target's vocab_size")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads = 3",)),
        ({"architectures": ["GemmaForCausalLMEagle3"]}, ("GemmaForCausalLMEagle3", "allowed: Lla")),
        ({"num_aux_hidden_states": 4}, ("num_aux_hidden_states = 4", "3, as many")),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ("use_aux_hidden_state = False",)),
        ({"eagle_config": {"use_mtp_layernorm": True}}, ("use_mtp_layernorm = True", "False")),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
            (
                "eagle_config.eagle_aux_hidden_state_layer_ids = [0, 1, 3]",
                "-1 (the embedding) to 2",
            ),
        ),
        (
            {"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [0, 1, 99]},
            (": eagle_aux_hidden_state_layer_ids = [0, 1, 99]", "0 to 3, the inputs of layers"),
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["0", 1, 2]}},
            ("eagle_config.eagle_aux_hidden_state_layer_ids = ['0', 1, 2]", "a layer id of the t"),
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}},
            ("eagle_config.eagle_aux_hidden_state_layer_ids = []", "a layer id of the target"),
        ),
        (
            {"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [True]},
            (": eagle_aux_hidden_state_layer_ids = [True]", "a layer id of the target"),
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
            ("eagle_aux_hidden_state_layer_ids = [0, 1, 2]", "one more than eagle_config's"),
        ),
        ({"eagle_config": [1]}, ("eagle_config = [1]",)),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ("rope_type = 'dynamic'",)),
        ({"rms_norm_eps": -1.0}, ("rms_norm_eps = -1.0", "a positive number")),
        ({"hidden_act": "gelu"}, ("hidden_act = 'gelu'",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config = 'fp8'",)),
        ({"speculators_model_type": "mlp"}, ("speculators_model_type = 'mlp'", "eagle3")),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_configs_of_an_eagle3_head(
    changes: dict[str, Any],
    named: tuple[str, ...],
    tmp_path: Path,
    target_dir: Path,
    refuses: Callable[..., None],
) -> None:
    refuses("EAGLE3", edit_config(make_eagle3(tmp_path, target_dir), **changes), *named)


def test_configs_of_an_eagle_head(
    tmp_path: Path, target_dir: Path, refuses: Callable[..., None]
) -> None:
    head = make_eagle(tmp_path, target_dir)
    refuses("EAGLE", edit_config(head, hidden_size=48), "hidden_size = 48", "32, the target's")
    refuses("EAGLE", edit_config(head, hidden_size=32, vocab_size=99), "vocab_size = 99")
    refuses("EAGLE", edit_config(head, architectures=["XEagle"]), "['XEagle']", "Qwen2ForCausalLM")
    (head / "config.json").write_text("[")
    refuses("EAGLE", head, "not valid JSON")


def test_guessed_layers_are_logged_loudly(
    tmp_path: Path,
    target: Decoder,
    target_dir: Path,
    caplog: pytest.LogCaptureFixture,
    refuses: Callable[..., None],
) -> None:
    head = make_eagle3(tmp_path / "head", target_dir)
    assert load_draft("EAGLE3", head, target, tokenizer_dir=target_dir).capture == (1, 2, 3)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    edit_config(head, eagle_config=DROP)
    assert load_draft("EAGLE3", head, target, tokenizer_dir=target_dir).capture == (2, 2, 1)
    (warning,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "GUESSING the inputs of layers 2, 2, 1" in warning.getMessage()
    edit_config(head, eagle_aux_hidden_state_layer_ids=[3, 0, 1])  # beside eagle_config: inputs
    assert load_draft("EAGLE3", head, target, tokenizer_dir=target_dir).capture == (3, 0, 1)
    small_dir = make_tiny(tmp_path / "small", hidden=32)
    edit_config(head, eagle_aux_hidden_state_layer_ids=DROP)
    with pytest.raises(ConfigError, match=r"layer_ids = 'absent'.*layers 0 to 1 of the target"):
        load_draft("EAGLE3", head, load_model(small_dir), tokenizer_dir=small_dir)


# --- kinds ---


def test_each_kind_under_another_algorithm(
    tmp_path: Path, target_dir: Path, refuses: Callable[..., None]
) -> None:
    made = {
        "EAGLE": (make_eagle(tmp_path / "eagle", target_dir), "a head in EAGLE's layout"),
        "EAGLE3": (make_eagle3(tmp_path / "eagle3", target_dir), "a head in EAGLE3's layout"),
        "STANDALONE": (target_dir, "a whole model"),
    }
    for algorithm, (_, needed) in made.items():
        for kind, (directory, found) in made.items():
            if kind != algorithm:
                needs = f"{algorithm} needs {needed}, but {directory} holds {found}"
                refuses(algorithm, directory, needs, f"(for --speculative-algorithm {kind})")


def test_a_torch_file_may_hold_tensors_only(
    tmp_path: Path, target_dir: Path, refuses: Callable[..., None]
) -> None:
    head = make_eagle(tmp_path, target_dir)
    (head / "model.safetensors").unlink()
    refuses("EAGLE", head, "has neither model.safetensors nor pytorch_model.bin")
    torch.save({"fc.weight": torch.zeros(1), "run": print}, head / "pytorch_model.bin")
    refuses("EAGLE", head, "Cannot read", "pytorch_model.bin")
    torch.save([1, 2], head / "pytorch_model.bin")
    refuses("EAGLE", head, "pytorch_model.bin must hold a dictionary of tensors")
    (head / "pytorch_model.bin").write_bytes(b"PK\x03\x04 no archive")
    refuses("EAGLE", head, "Cannot read", "pytorch_model.bin")


# --- token maps ---


def test_token_maps(tmp_path: Path, target_dir: Path, refuses: Callable[..., None]) -> None:
    head, path = make_eagle(tmp_path / "head", target_dir), tmp_path / "hot.pt"
    for content, named in (
        ([3, 512], "names the token 512; allowed: 0 to 511"),
        ([-1], "names the token -1"),
        ([5, 9, 5], "names the token 5 more than once"),
        ([], "must hold a list or a tensor of token ids"),
        (torch.tensor([], dtype=torch.int64), "holds no token id"),
        ([1.5], "must hold a list or a tensor of token ids"),
        (torch.ones(2, 2, dtype=torch.int64), "must hold a list or a tensor of token ids"),
        ({"ids": [1]}, "must hold a list or a tensor of token ids"),
    ):
        torch.save(content, path)
        refuses("EAGLE", head, f"--speculative-token-map {path}", named, token_map=path)
    own = f"Cannot read --speculative-token-map {path}: it is damaged, no file of torch.save, or"
    for written in (b"1 2 3", b"", b"PK\x03\x04 no archive"):
        path.write_bytes(written)
        refuses("EAGLE", head, own, token_map=path)
    torch.save([print], path)
    refuses("EAGLE", head, own, token_map=path)
    torch.save([1, 2], path)
    eagle3 = make_eagle3(tmp_path / "eagle3", target_dir)
    refuses("EAGLE3", eagle3, "--speculative-token-map works with EAGLE, not", token_map=path)
    refuses("EAGLE", head, "must be auto, safetensors, dummy, got gguf", load_format="gguf")
    assert resolve_token_map(str(path)) == path
    with pytest.raises(ConfigError, match=r"no such file, and no owner/repository/file\.pt"):
        resolve_token_map(str(tmp_path / "absent.pt"))


# --- paths ---


def test_a_draft_that_is_missing_is_found_before_the_target_is_loaded(
    tmp_path: Path, tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    draft = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": tmp_path}
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        Engine(ServerArgs(model_path=tiny_model_dir, **draft))
    assert "Loaded the target" not in caplog.text
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):
        Engine(ServerArgs(model_path=tiny_model_dir, **draft))
    assert "Loaded the target" in caplog.text


def test_paths_of_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: object, named: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            resolve_draft(str(path))
        assert named in refusal.value.message
        assert f"--speculative-draft-model-path {path}" in refusal.value.message

    refused(tmp_path, "has no config.json")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path / "config.json", "is a file; it must be a directory")
    refused("./absent", "no such directory")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("nobody/absent-head", "the hub did not give it")
    assert resolve_draft(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("path", "near"), [("smollm2-eagl3", "smollm2-eagle3"), ("SmolLM2-Draf", "smollm2-draft")]
)
def test_a_mistyped_built_in_name_asks_no_hub(
    path: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    with pytest.raises(ConfigError) as refusal:
        resolve_draft(path)
    assert refusal.value.message == (
        f"--speculative-draft-model-path {path}: no such directory; did you mean {near}? Built in "
        "are smollm2, smollm2-eagle3, smollm2-draft; a hub id is owner/repository."
    )


def test_what_the_hub_says_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise OSError("Got: ConnectError: no route\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"did not give it: ConnectError: no route$"):
        resolve_draft("someone/head")


def test_heads_on_the_hub_may_be_torch_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are asked for in that form only when the other is not there."""
    asked: list[list[str]] = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (repo, revision) == ("someone/head", "v2")
        asked.append(allow_patterns)
        (tmp_path / "config.json").write_text("{}")
        if "pytorch_model*.bin" in allow_patterns:
            (tmp_path / "pytorch_model.bin").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_draft("someone/head", "v2") == tmp_path
    assert len(asked) == 2
    assert (tmp_path / "pytorch_model.bin").exists()
    resolve_draft("someone/head", "v2")
    assert len(asked) == 3
