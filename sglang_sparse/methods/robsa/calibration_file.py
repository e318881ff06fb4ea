"""The layers of an MLA model that select by their RoPE part, as calibrated or as printed in the paper.

It needs neither torch nor transformers, so that a server can read a calibration before it starts anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Similarity(BaseModel):
    """The agreement of a layer's RoPE scores with its full scores, in some prompts.

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
    """The part of a file under ``calibration``, written by ``sglang_sparse.calibrate --method robsa``.

    Attributes:
        method: the method that it is for.
        fingerprint: of the model, see `fingerprint.fingerprint`.
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


@dataclass(frozen=True)
class Preset:
    """Layers that were found insensitive, without their similarities.

    Attributes:
        name: by which a config asks for it.
        architecture: class of the models that it is for.
        num_layers: layers of these.
        num_heads: attention heads of these.
        insensitive: ids of the layers whose RoPE part does not stand for the full score.
        warning: what a server says at its start.
    """

    name: str
    architecture: str
    num_layers: int
    num_heads: int
    insensitive: tuple[int, ...]
    warning: str

    def sensitive(self, theta2: float) -> tuple[int, ...]:
        """The other layers, whatever ``theta2`` is: see `RopeCalibration.sensitive`."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.insensitive)

    def refuse(self, hf_config: Any, num_layers: int) -> str | None:
        """Return the reason why it does not fit a model with such a config; None if it does."""
        architecture = (hf_config.architectures or ["unknown"])[0]
        # A wrapper, such as one for pictures, keeps them in the config of its language model.
        heads = getattr(getattr(hf_config, "text_config", hf_config), "num_attention_heads", "unknown")
        if (architecture, num_layers, heads) == (self.architecture, self.num_layers, self.num_heads):
            return None
        return (
            f"preset {self.name} is for {self.architecture} with {self.num_layers} layers and {self.num_heads} heads, "
            f"and this model is {architecture} with {num_layers} layers and {heads} heads: "
            "calibrate it with python -m sglang_sparse.calibrate --method robsa"
        )


PRESETS = {
    found.name: found
    for found in (
        # RoBSA, table 7, row "RULER": 20 prompts of about 15k tokens, "identified RoPE-insensitive layers".
        Preset(
            name="deepseek-v3-paper-ruler",
            architecture="DeepseekV3ForCausalLM",
            num_layers=61,
            # Kimi-K2 has the class and the layers too, and half the heads.
            num_heads=128,
            insensitive=(4, 17, *range(20, 44), 45, 46, 47, 50, 55, 60),
            warning=(
                "preset deepseek-v3-paper-ruler: the paper prints these 32 layers (table 7) to show how the choice of "
                "prompts biases a calibration; they are not the partition behind its accuracy, and they were found on "
                "DeepSeek-V3. For your own checkpoint run python -m sglang_sparse.calibrate --method robsa"
            ),
        ),
    )
}
