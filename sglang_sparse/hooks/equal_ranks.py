"""Compare the ranks of one server: each node reads its own flags and config file."""

from __future__ import annotations

import logging
from datetime import timedelta

from sglang.srt.runtime_context import get_parallel
from torch import distributed

from sglang_sparse.config import arguments, digest
from sglang_sparse.config.settings import settings_of
from sglang_sparse.errors import SparseArgumentError

# Ranks have just loaded their weights together. What a rank compiles before it compares takes minutes at most.
WAIT = timedelta(minutes=5)
logger = logging.getLogger(__name__)


def require_equal_ranks(server_args: object) -> None:
    """Compare the fields that decide answers over all ranks, and end the start of each rank if one differs.

    Nodes without a sparse flag take part, in case another node has one; servers of elastic ranks do not.

    Raises:
        SparseArgumentError: fields differ, or a rank does not take part.
    """
    args, settings, group = arguments.of(server_args), settings_of(server_args), get_parallel().world_group
    if group.world_size == 1 or args.elastic_ep_backend or (settings is None and args.nnodes == 1):
        return
    try:
        distributed.monitored_barrier(group.cpu_group, timeout=WAIT, wait_all_ranks=True)
    except RuntimeError as error:
        if settings is None:
            logger.warning("sglang_sparse: another rank does not compare its flags; this one has no sparse method")
            return
        message = f"ranks of one server differ: got no config from another rank within {WAIT.seconds} s ({error})"
        raise SparseArgumentError(message, allowed="this plugin on each node: pip install sglang-sparse") from error
    fields = digest.fields_of(digest.published(settings), args.page_size)
    every = group.all_gather_object((args.node_rank, fields))
    if not any(one[f"{flag}-method"] for _, one in every for flag in ("--sparse", "--sparse-prefill")):
        return
    differing = digest.differences({f"rank {rank} of node {node}": one for rank, (node, one) in enumerate(every)})
    if differing:
        values = ", ".join(f"{field} {value}" for field, value in differing.items())
        allowed = "the same sparse flags, config files and version of sglang_sparse on each node"
        raise SparseArgumentError(
            f"ranks of one server differ: got {values}", field=", ".join(differing), got=differing, allowed=allowed
        )
