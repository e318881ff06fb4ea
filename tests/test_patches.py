"""patches/README.md tells the truth about the hook table, and every patch applies."""

import importlib.util
import re
import subprocess
from pathlib import Path

from sglang_sparse.hooks.table import HOOKS

PATCHES = Path(__file__).parent.parent / "patches"


def test_the_ledger_lists_every_seam() -> None:
    rows = re.findall(r"^\| `(sglang\.[^`]+)` \| (\w+) \| (\w+) \| (.+) \|$", (PATCHES / "README.md").read_text(), re.M)
    assert rows == [(hook.target, hook.kind, hook.process, hook.purpose) for hook in HOOKS]


def test_every_patch_applies_to_the_installed_sglang() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    site_packages = Path(spec.submodule_search_locations[0]).parent
    for patch in sorted(PATCHES.glob("*.patch")):
        command = ["git", "apply", "--check", "--directory", str(site_packages), str(patch)]
        subprocess.run(command, check=True, cwd=site_packages)
