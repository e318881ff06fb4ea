"""A transfer of KV between a prefill and a decode server of this machine's CPU, through files: for tests of pairs.

It takes the place of SGLang's "mori" backend. The decode server writes what it has of a prompt, the prefill server
answers with the rest: the bytes of each page and layer, and the request's row of metadata. Stages of one server meet
those of the other.
"""

import ctypes
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, KVTransferMetric
from sglang.srt.disaggregation.fake.conn import FakeKVManager, FakeKVReceiver, FakeKVSender
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

FOLDER = "SPARSE_TEST_TRANSFERS"
BACKEND = TransferBackend.MORI


def file_of(manager: "Manager", room: int, part: str) -> Path:
    return Path(os.environ[FOLDER]) / f"{room}-{manager.kv_args.pp_rank}.{part}"


def asked_for(manager: "Manager", room: int) -> Path | None:
    """Return any decode stage's file about its KV of a prompt: the others have as much, and may say so later."""
    return next(file_of(manager, room, "asked").parent.glob(f"{room}-*.asked"), None)


def write(path: Path, value: object) -> None:
    """Put a value where the other server looks for it, all at once."""
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


def memory(pointers: list[int], sizes: list[int], row: int) -> list[Any]:
    """One row, a page or a request's metadata, of each buffer."""
    return [
        (ctypes.c_char * size).from_address(start + row * size) for start, size in zip(pointers, sizes, strict=True)
    ]


def pages_of(args: KVArgs, page: int) -> list[Any]:
    return memory(args.kv_data_ptrs, args.kv_item_lens, page)


class Everywhere:
    """The one rank of any prefill server: which of several has a prompt, its room says."""

    def get(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(dp_size=1)


class Manager(FakeKVManager):
    supports_role_switch = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefill_info_table = Everywhere()

    def teardown(self) -> None:
        """Nothing runs behind it."""


class Sender(FakeKVSender):
    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int, **kwargs: Any) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, **kwargs)
        self.pages: list[int] = []

    def poll(self) -> int:
        if self.conclude_state is None and asked_for(self.kv_mgr, self.bootstrap_room) is None:
            return KVPoll.Bootstrapping
        return super().poll()

    def pop_decode_prefix_len(self) -> int:
        found = asked_for(self.kv_mgr, self.bootstrap_room)
        assert found is not None
        return pickle.loads(found.read_bytes())

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        super().init(num_kv_indices, aux_index)
        self.total, self.row = num_kv_indices, aux_index

    def send(self, kv_indices: np.ndarray, *_: Any, **__: Any) -> None:
        self.pages += kv_indices.tolist()
        self.has_sent = len(self.pages) >= self.total
        if self.has_sent:
            args = self.kv_mgr.kv_args
            sent = [[bytes(part) for part in pages_of(args, page)] for page in self.pages]
            row = [bytes(part) for part in memory(args.aux_data_ptrs, args.aux_item_lens, self.row)]
            write(file_of(self.kv_mgr, self.bootstrap_room, "sent"), (sent, row))

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric()


class Receiver(FakeKVReceiver):
    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self.room = bootstrap_room

    def send_metadata(
        self, kv_indices: np.ndarray, aux_index: int, *_: Any, decode_prefix_len: int | None = None, **__: Any
    ) -> None:
        super().send_metadata(kv_indices, aux_index)
        self.pages, self.row = kv_indices.tolist(), aux_index
        write(file_of(self.kv_mgr, self.room, "asked"), decode_prefix_len or 0)

    def poll(self) -> int:
        found = file_of(self.kv_mgr, self.room, "sent")
        if self.conclude_state is not None or not self.has_sent_metadata:
            return super().poll()
        if not found.exists():
            return KVPoll.Transferring
        sent, row = pickle.loads(found.read_bytes())
        args = self.kv_mgr.kv_args
        assert len(sent) == len(self.pages), (len(sent), self.pages)
        for page, parts in zip(self.pages, sent, strict=True):
            for place, part in zip(pages_of(args, page), parts, strict=True):
                place[:] = part
        for place, part in zip(memory(args.aux_data_ptrs, args.aux_item_lens, self.row), row, strict=True):
            place[:] = part
        return super().poll()


class Bootstrap:
    """Nobody has to be found."""

    def __init__(self, **_: Any) -> None:
        pass


CLASSES = {
    KVClassType.MANAGER: Manager,
    KVClassType.SENDER: Sender,
    KVClassType.RECEIVER: Receiver,
    KVClassType.BOOTSTRAP_SERVER: Bootstrap,
}


def kv_class(original: Callable[..., Any], backend: TransferBackend, class_type: KVClassType) -> Any:
    return CLASSES[class_type] if backend == BACKEND and class_type in CLASSES else original(backend, class_type)


def register() -> None:
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", kv_class, HookType.AROUND)


def install(folder: Path) -> dict[str, str]:
    """Install this as a plugin of SGLang's, in a folder; returns the environment of servers that load it."""
    metadata = folder / "folder_transfer-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: folder-transfer\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nfolder_transfer = folder_transfer:register\n")
    transfers = folder / "transfers"
    transfers.mkdir()
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {FOLDER: str(transfers), "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
