"""Of which weights a calibration is, what it says of layers, and the partition that the paper prints."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from sglang_sparse.methods import fingerprint as weights
from sglang_sparse.methods.fingerprint import fingerprint
from sglang_sparse.methods.robsa.calibration_file import PRESETS, LayerSimilarity, RopeCalibration
from sglang_sparse.tools.calibration.robsa_report import plot, table

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.arange(4096, dtype=torch.int32)}
CONFIG: dict[str, Any] = {"architectures": ["X"], "hidden_size": 3, "rope_scaling": {"factor": 2.0}}


def checkpoint(folder: Path, files: list[dict[str, torch.Tensor]], config: dict[str, Any] = CONFIG) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-{i}.safetensors" for i in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt", "file": name})
    if len(files) > 1:
        places = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        (folder / weights.INDEX).write_text(json.dumps({"weight_map": places}))
    return str(folder)


def test_a_fingerprint_is_of_weights_and_config_and_not_of_places(tmp_path: Path) -> None:
    found = fingerprint(checkpoint(tmp_path / "one", [TENSORS]))
    parts = [{name: tensor} for name, tensor in TENSORS.items()]
    assert fingerprint(checkpoint(tmp_path / "two", parts)) == found
    # A file that the index does not name is not loaded.
    save_file({"c.weight": torch.ones(1)}, tmp_path / "two" / "consolidated.safetensors")
    assert fingerprint(str(tmp_path / "two")) == found
    saved = {**CONFIG, "transformers_version": "9", "rope_scaling": {"factor": 2.0, "torch_dtype": "float16"}}
    assert fingerprint(checkpoint(tmp_path / "three", [TENSORS], dict(reversed(saved.items())))) == found
    others = [
        checkpoint(tmp_path / "config", [TENSORS], {**CONFIG, "rope_scaling": {"factor": 4.0}}),
        checkpoint(tmp_path / "name", [{"c.weight" if k == "a.weight" else k: v for k, v in TENSORS.items()}]),
        checkpoint(tmp_path / "shape", [{**TENSORS, "a.weight": TENSORS["a.weight"].view(3, 2)}]),
        checkpoint(tmp_path / "type", [{**TENSORS, "a.weight": TENSORS["a.weight"].view(torch.int32)}]),
        checkpoint(tmp_path / "value", [{**TENSORS, "a.weight": TENSORS["a.weight"].nextafter(torch.tensor(9.0))}]),
        checkpoint(tmp_path / "more", [{**TENSORS, "c.weight": torch.ones(1)}]),
    ]
    assert len({found, *map(fingerprint, others)}) == 1 + len(others)


def test_large_tensors_count_at_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "WHOLE", 1 << 10)
    monkeypatch.setattr(weights, "PIECE", 1 << 6)

    def changed(place: int) -> str:
        tensor = TENSORS["b.weight"].clone()
        tensor[place] = -1
        return fingerprint(checkpoint(tmp_path / str(place), [{**TENSORS, "b.weight": tensor}]))

    found = fingerprint(checkpoint(tmp_path / "same", [TENSORS]))
    assert all(changed(place) != found for place in (0, 15, 2048, 4080, 4095)) and changed(1000) == found


def test_a_name_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "one", [TENSORS])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, revision, allow_patterns: folder)
    assert fingerprint("some/model") == fingerprint(folder)

    def absent(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        raise FileNotFoundError("not in the cache\nand no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(
        ValueError, match=r"^some/model: neither a folder nor a model that can be had \(not in the cache\)"
    ):
        fingerprint("some/model")


def broken(folder: Path, how: str) -> None:
    file = folder / "model-0.safetensors"
    if how == "bin":
        file.rename(folder / "pytorch_model.bin")
    elif how == "pointer":
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "shard":
        (folder / weights.INDEX).write_text('{"weight_map": {"a.weight": "model-7.safetensors"}}')
    elif how == "tensor":
        (folder / weights.INDEX).write_text('{"weight_map": {"x.weight": "model-0.safetensors"}}')
    elif how == "index":
        (folder / weights.INDEX).write_text("[]")
    else:
        (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("bin", "has no .safetensors; other forms of weights cannot be fingerprinted"),
        ("pointer", "bytes and no header"),
        ("cut", "cannot be read as safetensors"),
        ("empty", "0 bytes and no header"),
        ("shard", "model-7.safetensors: cannot be read as safetensors"),
        ("tensor", "tensor x.weight is missing"),
        ("index", "has no weight_map"),
        ("config", "config.json: cannot be read"),
    ],
)
def test_weights_that_cannot_be_read(tmp_path: Path, how: str, message: str) -> None:
    folder = checkpoint(tmp_path / "one", [TENSORS])
    broken(Path(folder), how)
    with pytest.raises(ValueError) as caught:
        fingerprint(folder)
    assert message in str(caught.value) and folder in str(caught.value)


def test_a_server_reads_a_calibration_without_torch() -> None:
    heavy = {"torch", "sglang", "transformers"}
    modules = ", ".join(f"sglang_sparse.methods.{name}" for name in ("robsa.calibration_file", "fingerprint"))
    code = f"import sys, {modules}; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


ABOUT: dict[str, Any] = dict(
    **dict(method="robsa", fingerprint="0", model="m", architecture="A", theta1=0.9, block_size=16, queries=1),
    **dict(prompts=[], files=[], seed=0, device="cpu", dtype="float32", versions={}),
)


def layer(number: int, mean: float) -> dict[str, Any]:
    return {"layer": number, "mean": mean, "deviation": 0.1, "recall": None}


def test_layers_above_theta2_are_sensitive() -> None:
    found = RopeCalibration.model_validate({**ABOUT, "layers": [layer(0, 0.99), layer(1, 0.991), layer(2, 1.0)]})
    assert found.layers[0] == LayerSimilarity(layer=0, mean=0.99, deviation=0.1, recall=None)
    assert [found.sensitive(theta2) for theta2 in (0, 0.99, 0.995, 1)] == [(0, 1, 2), (1, 2), (2,), ()]
    for bad in ([], [layer(1, 0.5)], [layer(0, 0.5), layer(0, 0.5)], [layer(0, 1.5)], [{**layer(0, 0.5), "x": 1}]):
        with pytest.raises(ValueError):
            RopeCalibration.model_validate({**ABOUT, "layers": bad})
    with pytest.raises(ValueError):
        RopeCalibration.model_validate({**ABOUT, "layers": [layer(0, 0.5)], "method": "anchor"})


def test_long_prompts_must_be_above_theta2_too() -> None:
    def rows(*pairs: tuple[float, float | None]) -> RopeCalibration:
        found = [
            {**layer(i, mean), "long": long and {"mean": long, "deviation": 0.0, "recall": 0.9}}
            for i, (mean, long) in enumerate(pairs)
        ]
        return RopeCalibration.model_validate({**ABOUT, "layers": found, "min_seq_len": 4096})

    found = rows((0.995, 0.98), (0.98, 0.995), (0.995, 0.995), (0.995, None))
    assert found.sensitive(0.99) == (2, 3) and found.sensitive(0.97) == (0, 1, 2, 3)
    assert RopeCalibration.model_validate_json(found.model_dump_json()) == found
    table(found, 0.99)


def test_a_plot_that_cannot_be_written_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    found = RopeCalibration.model_validate({**ABOUT, "layers": [layer(0, 0.99)]})
    plot(found, 0.9, tmp_path / "nowhere" / "x.png")
    assert "no plot: " in capsys.readouterr().out


def test_the_papers_partition() -> None:
    found = PRESETS["deepseek-v3-paper-ruler"]
    assert len(set(found.insensitive)) == 32 and {4, 17, 20, 43, 45, 60} <= set(found.insensitive)
    assert not {18, 19, 44, 48, 59} & set(found.insensitive)
    assert sorted(found.insensitive + found.sensitive(0.5)) == list(range(61))
    assert "not the partition behind its accuracy" in found.warning
    config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], num_attention_heads=128)
    assert found.refuse(config, 61) is None
    for other in (
        found.refuse(config, 4),
        found.refuse(SimpleNamespace(architectures=None, num_attention_heads=64), 61),
    ):
        assert other is not None and "is for DeepseekV3ForCausalLM with 61 layers and 128 heads" in other
    # A wrapper has the heads in the config of its language model.
    wrapper = SimpleNamespace(architectures=["KimiK25ForConditionalGeneration"], text_config=config)
    assert "this model is KimiK25ForConditionalGeneration with 61 layers and 128 heads" in str(
        found.refuse(wrapper, 61)
    )
    assert "and unknown heads" in str(found.refuse(SimpleNamespace(architectures=["X"]), 61))
