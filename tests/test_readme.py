"""README's config tables are the schemas."""

import json
import re
from pathlib import Path

from sglang_sparse.method_config import MethodConfig
from sglang_sparse.methods.anchor import AnchorConfig
from sglang_sparse.methods.dsa import DsaConfig
from sglang_sparse.methods.resa import ResaConfig
from sglang_sparse.methods.robsa import RobsaConfig
from sglang_sparse.methods.rocketkv import RocketkvConfig
from sglang_sparse.methods.skip_softmax import SkipSoftmaxConfig

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_config_tables() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", README, re.M)
    resa, robsa, rocketkv, dsa, anchor, skip_softmax = (
        [(name, json.dumps(field.default), field.description) for name, field in config.model_fields.items()]
        for config in (ResaConfig, RobsaConfig, RocketkvConfig, DsaConfig, AnchorConfig, SkipSoftmaxConfig)
    )
    # What two methods of a phase share is said once.
    decode = [*resa, *(row for config in (robsa, rocketkv) for row in config if row not in resa)]
    # Of DSA's, what all methods have has one value.
    dsa = [row for row in dsa if row[0] not in MethodConfig.model_fields]
    assert rows == [*decode, *dsa, *anchor, *(row for row in skip_softmax if row not in anchor)]
