"""The surface that the plugin needs of SGLang: nothing of it is missing, and what a release moves is named."""

import pkgutil
import re
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_sparse.attention import protocols
from sglang_sparse.check import main
from sglang_sparse.config.versions import UnsupportedSGLangError
from sglang_sparse.hooks import apply
from sglang_sparse.hooks.table import HOOKS
from sglang_sparse.methods import support
from sglang_sparse.tools import sglang_surface


def test_the_installed_sglang_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sglang"]) == 0
    assert "0 problems" in capsys.readouterr().out


def test_each_function_is_hooked_once() -> None:
    """Each is something to follow in the next SGLang: think twice before there is one more."""
    assert len({hook.target for hook in HOOKS}) == len(HOOKS) == 62


def test_every_table_of_flags_is_known() -> None:
    texts = (path.read_text() for path in sglang_surface.PACKAGE.rglob("*.py"))
    named = {name for text in texts for name in re.findall(r"(?m)^\w+_LIMITS", text)}
    assert named - {"MODEL_LIMITS"} == {name for name in sglang_surface.flag_limits() if name.isupper()}


def test_an_attribute_that_a_class_only_reads_is_not_its_own() -> None:
    known = sglang_surface._known(Scheduler)
    assert {"tree_cache", "waiting_queue"} <= known and "enable_fpm" not in known


def test_every_class_that_attributes_are_looked_up_in_is_used() -> None:
    used = {name.rpartition(".")[0] for name in sglang_surface.attributes()}
    assert used == set(sglang_surface.CLASSES.values())


def test_a_function_that_moved_and_one_that_takes_other_parameters_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_idle(self: Any, batch: Any) -> None: ...

    monkeypatch.setattr(Scheduler, "on_idle", on_idle)
    monkeypatch.delattr(Scheduler, "update_running_batch")
    found = dict(sglang_surface.problems())
    target = "sglang.srt.managers.scheduler.Scheduler"
    assert set(found) == {f"{target}.on_idle", f"{target}.update_running_batch"}
    assert "(self, batch)" in found[f"{target}.on_idle"] and "(self)" in found[f"{target}.on_idle"]
    with pytest.raises(UnsupportedSGLangError, match=r"Scheduler\.on_idle takes \(self, batch\), expected \(self\)"):
        apply.verify([hook for hook in HOOKS if hook.target.endswith("on_idle")])


def test_an_import_and_an_attribute_that_are_gone_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import TreeLock

    monkeypatch.delattr(pkgutil.resolve_name("sglang.srt.mem_cache.common"), "evict_from_tree_cache")
    monkeypatch.setitem(sglang_surface.CLASSES, "kv", f"{TreeLock.__module__}.{TreeLock.__name__}")
    found = dict(sglang_surface.problems())
    assert (
        "imported by sglang_sparse/scheduler/compaction.py"
        in found["sglang.srt.mem_cache.common.evict_from_tree_cache"]
    )
    assert f"{TreeLock.__module__}.TreeLock.kv_committed_len" in found
    assert main(["--sglang"]) == 1
    assert "evict_from_tree_cache" in capsys.readouterr().out


def test_private_members_of_sglang_are_among_what_is_looked_up() -> None:
    found = {name.rpartition(".")[2] for name in sglang_surface.attributes()}
    assert {"_hooks", "_patched", "_apply_war_barrier", "_counter_cls", "_get_q_k_bf16"} <= found
    assert {"extend_end", "ignore_eos", "total_offset", "scheduler_infos", "has_attention_sinks"} <= found


@pytest.mark.parametrize(
    ("protocol", "classes"),
    [
        (protocols.RadixAttention, ("layers.radix_attention.RadixAttention",)),
        (
            protocols.KVPool,
            tuple(f"mem_cache.memory_pool.{kind}TokenToKVPool" for kind in ("MHA", "MLA", "DSA")),
        ),
        (protocols.ReqToTokenPool, ("mem_cache.memory_pool.ReqToTokenPool",)),
        (protocols.ForwardBatch, ("model_executor.forward_batch_info.ForwardBatch",)),
        (protocols.ModelRunner, ("model_executor.model_runner.ModelRunner",)),
        (protocols.ModelWorker, ("managers.tp_worker.TpModelWorker",)),
        (protocols.Req, ("managers.schedule_batch.Req",)),
        (protocols.ScheduleBatch, ("managers.schedule_batch.ScheduleBatch",)),
        (protocols.Scheduler, ("managers.scheduler.Scheduler",)),
        (support.ModelConfig, ("configs.model_config.ModelConfig",)),
    ],
)
def test_protocols_have_what_sglang_has(protocol: type, classes: tuple[str, ...]) -> None:
    known = set().union(*(sglang_surface._known(pkgutil.resolve_name(f"sglang.srt.{name}")) for name in classes))
    bases = [base for base in protocol.__mro__ if base.__module__.startswith("sglang_sparse")]
    asked = {name for base in bases for name in base.__annotations__}
    assert asked and not asked - known
