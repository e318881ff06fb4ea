"""Read recipes, TOML files with a model, a method and matching server flags, from ``sglang_sparse/recipes``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sglang_sparse.config.files import read_config
from sglang_sparse.config.settings import Settings, build
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.methods.config import refused_value
from sglang_sparse.methods.registry import require_known
from sglang_sparse.methods.skip_softmax.calibration_file import STAND_IN
from sglang_sparse.methods.support import KINDS

FOLDER = Path(__file__).parent.parent / "recipes"
# SGLang's flags that have their own fields in a recipe.
_OWN_FLAGS = ("model-path", "tp-size", "context-length", "mem-fraction-static")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Sparse(_Table):
    """A method of one phase and its config, as the server's flags take them."""

    method: str
    config: dict[str, object] = Field(default_factory=dict)


class Measured(_Table):
    """A figure that a command of ``eval`` measured.

    Attributes:
        what: name and subject of the figure.
        value: the figure.
        unit: its unit.
        file: the result file, from the root of the repository.
        row: fields that identify the row in that file.
        field: the row's field with the figure.
    """

    what: str
    value: float
    unit: str
    file: str
    row: dict[str, str]
    field: str

    def __str__(self) -> str:
        return f"{self.what}: {self.value:g} {self.unit} (measured: {self.file}, {self.field})"


class Recipe(_Table):
    """A recipe's content.

    Attributes:
        title: its purpose.
        model_path: SGLang's ``--model-path``, as a rule a Hugging Face id.
        attention: kind of attention of the model, see ``support.KINDS``.
        gpu: the GPU it is for.
        gpus: their number, which is ``--tp-size``.
        context_length: tokens, ``--context-length``.
        mem_fraction_static: ``--mem-fraction-static``.
        run: whether a server of this model has been run on GPUs with this method.
        before: steps before the first start.
        notes: notes for the user.
        config: fields of the model's ``config.json`` that say of which kinds it is, where ``attention`` does not.
        flags: further flags of SGLang without their dashes; true for one without a value, a table for JSON.
        decode: the decode method; none for dense decode.
        prefill: the prefill method; none for dense prefill.
        measured: measured figures.
    """

    title: str
    model_path: str
    attention: str
    gpu: str
    gpus: int = Field(gt=0)
    context_length: int = Field(gt=0)
    mem_fraction_static: float = Field(gt=0, lt=1)
    run: Literal["with weights", "with dummy weights", "not run"] = "not run"
    before: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    config: dict[str, object] = Field(default_factory=dict)
    flags: dict[str, bool | int | float | str | dict[str, object]] = Field(default_factory=dict)
    decode: Sparse | None = None
    prefill: Sparse | None = None
    measured: list[Measured] = Field(default_factory=list)

    @field_validator("attention")
    @classmethod
    def _kind_exists(cls, value: str) -> str:
        if value not in KINDS:
            raise ValueError(f"must be one of {', '.join(KINDS)}")
        return value

    @field_validator("flags")
    @classmethod
    def _flags_are_further_ones(cls, value: dict[str, object]) -> dict[str, object]:
        for name, given in value.items():
            if name in _OWN_FLAGS or name.startswith("sparse-"):
                raise ValueError(f"{name} has its own field; allowed: flags without one")
            if given is False:
                raise ValueError(f"{name} is false; allowed: true, or no such flag")
        return value

    def arguments(self) -> list[str]:
        """Return the words after ``python -m sglang.launch_server``."""
        own = (self.model_path, self.gpus, self.context_length, self.mem_fraction_static)
        sparse: dict[str, object] = {}
        for name, asked in (("sparse", self.decode), ("sparse-prefill", self.prefill)):
            if asked is not None:
                sparse[f"{name}-method"] = asked.method
                if asked.config:
                    sparse[f"{name}-config"] = asked.config
        given = [*zip(_OWN_FLAGS, own, strict=True), *self.flags.items(), *sparse.items()]
        return [word for name, value in given for word in _words(name, value)]

    def settings(self) -> Settings:
        """The methods with their configs.

        Raises:
            SparseArgumentError: a method is unknown or its config is not valid.
        """
        decode, prefill = self.decode or Sparse(method=""), self.prefill or Sparse(method="")
        methods = decode.method or None, decode.config, prefill.method or None, prefill.config
        return build(*methods, checkpoint=lambda: STAND_IN)


def _words(name: str, value: object) -> list[str]:
    if value is True:
        return [f"--{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


_TABLES: dict[str, type[_Table]] = {"decode": Sparse, "prefill": Sparse, "measured": Measured}


def _refused(origin: str, error: ValidationError) -> SparseArgumentError:
    found = []
    for detail in error.errors():
        where = [str(part) for part in detail["loc"]]
        table = _TABLES.get(where[0], Recipe) if len(where) > 1 else Recipe
        if detail["type"] in ("extra_forbidden", "missing"):
            what = "unknown" if detail["type"] == "extra_forbidden" else "missing"
            message = f"{what} key {'.'.join(where)!r}, allowed: {', '.join(table.model_fields)}"
            found.append(SparseArgumentError(message, field=".".join(where), got=detail["input"]))
        else:
            found.append(refused_value({**detail, "loc": (".".join(where),)}))
    return found[0].reworded(f"{origin}: {'; '.join(map(str, found))}")


def names() -> list[str]:
    """Return the names of the recipes in this package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Recipe:
    """Read a recipe.

    Args:
        name: one of `names`, or the path of a ``.toml`` file.

    Raises:
        SparseArgumentError: no recipe has this name, the file is unreadable or no TOML, or its keys or values are not
            those of a recipe; names the value and the allowed ones.
    """
    own = name.endswith(".toml")
    if not own:
        require_known("--recipe", name, dict.fromkeys(names(), ""))
    fields = read_config(name if own else str(FOLDER / f"{name}.toml"), "--recipe")
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise _refused(f"--recipe {name}", error) from error
