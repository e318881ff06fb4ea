"""README's config tables are the schemas."""

import json
import re
from pathlib import Path

from sglang_sparse.methods.anchor import AnchorConfig
from sglang_sparse.methods.resa import ResaConfig
from sglang_sparse.methods.robsa import RobsaConfig
from sglang_sparse.methods.rocketkv import RocketkvConfig
from sglang_sparse.methods.skip_softmax import SkipSoftmaxConfig
from sglang_sparse.methods.skip_softmax_decode import SkipSoftmaxDecodeConfig

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_config_tables() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", README, re.M)
    resa, robsa, rocketkv, anchor, both_phases, skip_softmax = (
        [(name, json.dumps(field.default), field.description) for name, field in config.model_fields.items()]
        for config in (
            ResaConfig,
            RobsaConfig,
            RocketkvConfig,
            AnchorConfig,
            SkipSoftmaxDecodeConfig,
            SkipSoftmaxConfig,
        )
    )
    # What two methods of a phase share is said once.
    decode = [*resa, *(row for config in (robsa, rocketkv) for row in config if row not in resa)]
    prefill = [*anchor, *(row for row in both_phases if row not in decode)]
    assert rows == [*decode, *prefill, *(row for row in skip_softmax if row not in anchor)]
