"""Which layers of an MLA model select by their RoPE part, as calibrated, and of which model that was measured.

It needs neither torch nor transformers, so that a server can read a calibration before it starts anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

# Fields of a config.json that do not change what attention computes: provenance, training, special tokens, and the
# element type, which is the server's to choose. ``dtype`` and ``torch_dtype`` are one field under two names.
HARMLESS = {
    *("_name_or_path", "transformers_version", "auto_map", "dtype", "torch_dtype", "use_cache"),
    *("initializer_range", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
}
# Tensors up to this many bytes count whole; of larger ones, pieces of this many at the beginning, middle and end.
WHOLE, PIECE = 1 << 22, 1 << 14
INDEX = "model.safetensors.index.json"


class Similarity(BaseModel):
    """How well the RoPE part of a layer's scores stands for all of them, in some prompts.

    Attributes:
        mean: cosine similarity of the attention of both, mean over prompts, last positions and heads.
        deviation: standard deviation over prompts.
        recall: share of the attention mass on the blocks that the RoPE part selects; None if it was not measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mean: float = Field(ge=-1, le=1)
    deviation: float = Field(ge=0)
    recall: float | None = Field(ge=0, le=1)


class LayerSimilarity(Similarity):
    """The same in all prompts.

    Attributes:
        layer: its id.
        long: in the prompts of at least ``min_seq_len`` tokens; None if there are none, or it was not measured.
        groups: in each group of ``RopeCalibration.prompts``, in their order; empty if it was not measured.
    """

    layer: int = Field(ge=0)
    long: Similarity | None = None
    groups: list[Similarity] = []


class PromptGroup(BaseModel):
    """Prompts of one kind and length.

    Attributes:
        kind: a domain of the default mix, or "files".
        prompts: how many.
        tokens: how long they are, mean.
        length: which of ``--lengths`` they were made for; None: they are as long as they come.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: str
    prompts: int = Field(ge=1)
    tokens: int = Field(ge=1)
    length: int | None = Field(None, ge=1)


class RopeCalibration(BaseModel):
    """What ``sglang_sparse.calibrate --method robsa`` writes under ``calibration``.

    Attributes:
        method: the method that it is for.
        fingerprint: of the model, see `fingerprint`.
        model: folder or name of the checkpoint, as it was given.
        architecture: the model's class.
        theta1: threshold of the selection whose recall was measured.
        block_size: tokens of a block of that selection.
        queries: how many of the last positions of each prompt were looked at; of short prompts fewer.
        prompts: what was run.
        min_seq_len: tokens from which a row runs sparse, and a prompt counts as long; None: not recorded.
        long_prompts: how many are long; None: not recorded.
        notes: what whoever reads or uses the file should know of the prompts.
        files: names of the user's files that the prompts were drawn from; empty for the default mix.
        seed: of the prompts.
        device: where the model ran.
        dtype: in which element type.
        versions: of the packages that took part.
        layers: of all layers of the model, in their order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Literal["robsa"]
    fingerprint: str
    model: str
    architecture: str
    theta1: float = Field(gt=0, le=1)
    block_size: int = Field(ge=1)
    queries: int = Field(ge=1)
    prompts: list[PromptGroup]
    min_seq_len: int | None = Field(None, ge=0)
    long_prompts: int | None = Field(None, ge=0)
    notes: list[str] = []
    files: list[str]
    seed: int
    device: str
    dtype: str
    versions: dict[str, str]
    layers: list[LayerSimilarity]

    @field_validator("layers")
    @classmethod
    def _all_layers(cls, value: list[LayerSimilarity]) -> list[LayerSimilarity]:
        found = [row.layer for row in value]
        if not found or found != list(range(len(found))):
            raise ValueError(f"layers must be 0 and so on, each once and in order; got {found}")
        return value

    def sensitive(self, theta2: float) -> tuple[int, ...]:
        """The layers that select by their RoPE part: those whose mean similarity is above ``theta2``.

        "Sensitive" is the paper's word for layers whose cheap score is reliable. At 0 it is every layer whose scores
        are similar at all.

        Difference from the paper (section 2.3.1), which takes the mean over all prompts: that over the prompts of at
        least ``min_seq_len`` tokens, if there are such, must be above ``theta2``, too. Shorter rows run dense here, and
        most prompts of the paper's mix are short ones, in which the scores are more alike (appendix B.2): their mean
        may call a layer reliable that is not where the server relies on it.
        """
        return tuple(row.layer for row in self.layers if min(row.mean, (row.long or row).mean) > theta2)


def fingerprint(model_path: str, revision: str | None = None) -> str:
    """What tells a checkpoint from another one: a SHA-256 in hexadecimal digits.

    It is of the fields of ``config.json``, without those that do not change the forward pass (`HARMLESS`), and of every
    tensor in the safetensors files: name, element type, shape and contents; whole up to 4 MiB, of larger ones 16 KiB at
    the beginning, in the middle and at the end, so that a checkpoint of 700 GB takes seconds to minutes. A model that
    was trained further differs; a few elements that were changed elsewhere in a large tensor do not show. It depends
    neither on where the folder is nor on how the tensors are spread over files. What a server overrides of the config
    is not in it.

    Args:
        model_path: a folder, or a name that huggingface_hub finds, in its cache or by download.
        revision: of a name.

    Raises:
        ValueError: there is no such checkpoint, or its weights are not readable safetensors.
    """
    folder = _folder(model_path, revision)
    config = _without_harmless(_json(folder / "config.json"))
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    # By name: neither the order of files nor that within them counts.
    for line in sorted(line for file, names in _weight_files(folder) for line in _tensor_lines(file, names)):
        digest.update(f"\n{line}".encode())
    return digest.hexdigest()


def _folder(model_path: str, revision: str | None) -> Path:
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_path, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    # Its errors of names, of the network and of what is missing are all one or the other.
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{model_path}: neither a folder nor a model that can be had ({reason})") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error


def _without_harmless(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {name: _without_harmless(value) for name, value in config.items() if name not in HARMLESS}


def _weight_files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """The files with weights, and the names that count in each; None: all."""
    if (folder / INDEX).is_file():
        index = _json(folder / INDEX)
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict) or not places:
            raise ValueError(f"{folder / INDEX}: has no weight_map")
        return [
            (folder / file, {name for name, place in places.items() if place == file}) for file in set(places.values())
        ]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: has no .safetensors; other forms of weights cannot be fingerprinted")
    return [(file, None) for file in files]


def _tensor_lines(path: Path, names: set[str] | None) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            header, start = _header(file, path.stat().st_size)
            missing = sorted((names or set()) - header.keys())
            if missing:
                raise ValueError(f"tensor {missing[0]} is missing")
            for name in header.keys() if names is None else names:
                entry = header[name]
                first, end = entry["data_offsets"]
                contents = _contents(file, start + first, end - first)
                yield json.dumps([name, entry["dtype"], entry["shape"], contents])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors ({error})") from error


def _header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file by name, and where their bytes begin: 8 bytes of length, JSON, the bytes."""
    length = int.from_bytes(file.read(8), "little")
    start = 8 + length
    if not 8 < start <= size:
        raise ValueError(f"{size} bytes and no header")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    header.pop("__metadata__", None)
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end > size:
        raise ValueError(f"{size} bytes instead of {end}")
    return header, start


def _contents(file: BinaryIO, first: int, size: int) -> str:
    whole = [(0, size)]
    pieces = [(place, PIECE) for place in (0, (size - PIECE) // 2, size - PIECE)]
    digest = hashlib.sha256()
    for place, length in whole if size <= WHOLE else pieces:
        file.seek(first + place)
        digest.update(file.read(length))
    return digest.hexdigest()
