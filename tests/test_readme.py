"""README's config table is the schema."""

import json
import re
from pathlib import Path

from sglang_sparse.methods.resa import ResaConfig

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_config_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", README, re.M)
    assert rows == [
        (name, json.dumps(field.default), field.description) for name, field in ResaConfig.model_fields.items()
    ]
