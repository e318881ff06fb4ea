"""README's config tables are the schemas."""

import json
import re
from pathlib import Path

from sglang_sparse.methods.anchor import AnchorConfig
from sglang_sparse.methods.resa import ResaConfig

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_config_tables() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", README, re.M)
    assert rows == [
        (name, json.dumps(field.default), field.description)
        for config in (ResaConfig, AnchorConfig)
        for name, field in config.model_fields.items()
    ]
