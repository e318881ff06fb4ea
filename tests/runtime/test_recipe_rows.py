"""What a recipe says that a token of DSA's latents takes, which goes by who reads them."""

from pathlib import Path

import pytest

from sglang_sparse import recipes

FLOAT8 = ("[decode]", '[flags]\nkv-cache-dtype = "fp8_e4m3"\n\n[decode]')
TRTLLM = ("[flags]", '[flags]\ndsa-decode-backend = "trtllm"')
BLACKWELL = ('gpu = "H200"', 'gpu = "B200"')
PORTABLE = ('method = "dsa"', 'method = "dsa"\nconfig = { implementation = "portable" }')


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ([], 1152),
        # Scales, and rotated keys in two bytes a number.
        ([FLOAT8], 656),
        # A byte a number where SGLang's backend trtllm reads it, which is its own choice on Blackwell.
        ([FLOAT8, TRTLLM], 576),
        ([FLOAT8, BLACKWELL], 576),
        ([FLOAT8, BLACKWELL, PORTABLE], 656),
    ],
)
def test_bytes_of_a_token(changes: list[tuple[str, str]], row: int, tmp_path: Path) -> None:
    text = (recipes.FOLDER / "deepseek-v3.2.toml").read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = tmp_path / "own.toml"
    path.write_text(text)
    assert recipes.memory(recipes.load(str(path))).kv == 61 * (row + 132)
