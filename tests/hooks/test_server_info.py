"""A server starts only if each of its schedulers runs sparse, those behind SGLang's data-parallel controller too."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.engine import SchedulerInitResult
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_sparse import plugin
from sglang_sparse.config.settings import build
from sglang_sparse.hooks import apply
from sglang_sparse.hooks.server_info import REPLICAS, report_replicas, require_active_schedulers

CONFIG = build("resa", {}).config.model_dump_json()
ASKED: Any = SimpleNamespace(sparse_method="resa", sparse_prefill_method=None, sparse_config=CONFIG)
SPARSE = {"sparse_method": "resa", "sparse_prefill_method": None, "max_total_num_tokens": 4096}
DENSE = {"max_total_num_tokens": 4096}


def launched(*infos: dict[str, object]) -> tuple[object, ...]:
    """Return SGLang's result of a start, as far as it is read."""
    return None, SchedulerInitResult(scheduler_infos=list(infos))


def of_controller(*reports: dict[str, object]) -> dict[str, object]:
    """Return the report of its schedulers that a controller gives the main process."""
    info: dict[str, object] = dict(DENSE)
    controller: Any = SimpleNamespace(_scheduler_init_infos=list(reports))
    report_replicas(info, controller)
    return info


def test_a_controller_passes_on_what_runs() -> None:
    own = {field: SPARSE[field] for field in ("sparse_method", "sparse_prefill_method")}
    assert of_controller(SPARSE, DENSE)[REPLICAS] == [own, dict.fromkeys(own)]


@pytest.mark.parametrize("infos", [(SPARSE,), (SPARSE, SPARSE), (of_controller(SPARSE, SPARSE),)])
def test_a_server_whose_schedulers_all_run_sparse_starts(infos: tuple[dict[str, object], ...]) -> None:
    require_active_schedulers(launched(*infos), object, ASKED)


@pytest.mark.parametrize(
    ("infos", "rank"),
    [((SPARSE, DENSE), 1), ((of_controller(SPARSE, SPARSE, DENSE),), 2), ((dict(DENSE),), 0)],
    ids=["no controller", "a replica", "a controller without the plugin"],
)
def test_one_that_runs_dense_ends_the_start(infos: tuple[dict[str, object], ...], rank: int) -> None:
    with pytest.raises(RuntimeError, match=f"--sparse-method resa: scheduler {rank} runs dense"):
        require_active_schedulers(launched(*infos), object, ASKED)


@pytest.mark.parametrize(("process", "hooked"), [(plugin.DETOKENIZER, []), (plugin.CONTROLLER, ["report_replicas"])])
def test_other_processes_of_sglang_load_what_they_call(
    process: str, hooked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[apply.Hook] = []
    monkeypatch.setattr(plugin, "getproctitle", lambda: process)
    monkeypatch.setattr(apply, "register", found.extend)
    plugin.register()
    assert [hook.function.partition(":")[2] for hook in found] == hooked
