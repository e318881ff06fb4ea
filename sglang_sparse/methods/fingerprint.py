"""The fingerprint of a checkpoint, and its tensors.

It needs neither torch nor transformers, so that a server can ask before it starts anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypedDict

from sglang_sparse.methods.support import Architecture, ModelConfig

# Fields of a config.json that do not change what attention computes: provenance, training, special tokens, and the
# element type, which is the server's to choose. ``dtype`` and ``torch_dtype`` are one field under two names.
HARMLESS = {
    *("_name_or_path", "transformers_version", "auto_map", "dtype", "torch_dtype", "use_cache"),
    *("initializer_range", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
}
# Tensors up to this many bytes count whole; of larger ones, pieces of this many at the beginning, middle and end.
WHOLE, PIECE = 1 << 22, 1 << 14
INDEX = "model.safetensors.index.json"


def fingerprint(model_path: str, revision: str | None = None) -> str:
    """Return a SHA-256 that tells a checkpoint from others, in hexadecimal digits.

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


def tensors(model_path: str, revision: str | None = None) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Return the tensors of a checkpoint's safetensors files, from their headers.

    Args:
        model_path: a folder, or a name; nothing is downloaded.
        revision: of a name.

    Returns:
        Element type and shape by name; None where not all of the files are there.

    Raises:
        ValueError: a file cannot be read as safetensors.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model_path, "config.json", revision=revision)
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
    if not (folder / INDEX).is_file() and not any(folder.glob("*.safetensors")):
        return None
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path, _ in _weight_files(folder):
        if not path.is_file():
            return None
        with _readable(path) as file:
            header, _ = _header(file, path.stat().st_size)
            found |= {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    return found


class _Tensor(TypedDict):
    dtype: str
    shape: list[int]
    data_offsets: list[int]


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


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error


def _without_harmless(config: object) -> object:
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
    with _readable(path) as file:
        header, start = _header(file, path.stat().st_size)
        missing = sorted((names or set()) - header.keys())
        if missing:
            raise ValueError(f"tensor {missing[0]} is missing")
        for name in header.keys() if names is None else names:
            entry = header[name]
            first, end = entry["data_offsets"]
            contents = _contents(file, start + first, end - first)
            yield json.dumps([name, entry["dtype"], entry["shape"], contents])


@contextmanager
def _readable(path: Path) -> Iterator[BinaryIO]:
    """A file of weights; what is wrong with it becomes a ``ValueError`` that names it."""
    try:
        with path.open("rb") as file:
            yield file
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors ({error})") from error


def _header(file: BinaryIO, size: int) -> tuple[dict[str, _Tensor], int]:
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


def overridden(model_config: Architecture) -> str | None:
    """Say that a server's model is no checkpoint as it is, or None: a calibration is of one."""
    overrides = getattr(model_config, "model_override_args", None)
    if not overrides:
        return None
    return (
        f"the calibration is of the checkpoint as it is, and --json-model-override-args changes {sorted(overrides)}"
        " of its config; allowed: a calibration of a copy that has that config"
    )


def misfit(method: str, expected: str, measured_on: str, model_config: ModelConfig) -> str | None:
    """Say why a calibration is not one of a server's model, or None when it is.

    Args:
        method: for which it was made.
        expected: the fingerprint that it has.
        measured_on: folder or name of its checkpoint.
    """
    if reason := overridden(model_config):
        return reason
    try:
        found = fingerprint(model_config.model_path, getattr(model_config, "revision", None))
    except ValueError as error:
        return f"the calibration cannot be compared with the model: {error}"
    if found == expected:
        return None
    return (
        f"the calibration was made on other weights, {measured_on} (fingerprint {expected[:12]}, "
        f"this model's is {found[:12]}); calibrate this one: python -m sglang_sparse.calibrate --method {method}"
    )
