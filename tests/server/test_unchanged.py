"""Without a sparse flag the plugin changes nothing: same backend class, same pool, same sizes."""

from pathlib import Path

THIRD_PARTY = str(Path(__file__).parents[1] / "support" / "third_party")


def probe(serve, checkpoint, plugins: str, *flags: str, **kwargs) -> dict[str, object]:
    env = {"PYTHONPATH": THIRD_PARTY, "SGLANG_PLUGINS": plugins}
    with serve(checkpoint, "--max-total-tokens", "20000", *flags, env=env, **kwargs) as server:
        return server.server_info()["probe"]


def test_dense_with_and_without_the_plugin_is_the_same_server(serve, checkpoint) -> None:
    without = probe(serve, checkpoint, "torch_cpu,probe")
    with_plugin = probe(serve, checkpoint, "torch_cpu,probe,sglang_sparse")
    assert with_plugin == without
    assert without["backend"] == "TorchNativeAttnBackend"
    sparse = probe(serve, checkpoint, "torch_cpu,probe,sglang_sparse", config={})
    assert sparse["backend"] == "SparseAttentionBackend"
    assert sparse["pool"] == without["pool"]
    assert set(sparse["pool_attributes"]) - set(without["pool_attributes"]) == {"sglang_sparse_pools"}
