"""CUDA C++ kernels, compiled when they are first used by the NVRTC that comes with torch; no compiler is needed.

For the few kernels that Triton cannot express well. What is here needs `cuda.bindings`, which SGLang installs on
NVIDIA systems; everywhere else the operation's Triton kernel runs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch

from .launch import dependent_launch

logger = logging.getLogger(__name__)

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_longlong
# Of the headers that sources may include, by name.
HEADERS = Path(__file__).parent / "cuda"
# Ampere.
LEAST_CAPABILITY = (8, 0)


@functools.cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for `device`: an NVIDIA GPU from Ampere on, with the bindings installed."""
    if (
        device.type != "cuda"
        or torch.version.cuda is None
        or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY
    ):
        return False
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return False
    try:
        from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]

        known = _check(nvrtc.nvrtcGetSupportedArchs())
    except (ImportError, RuntimeError) as error:
        # Without it all is right and some operations are slower.
        logger.warning("sglang_sparse: kernels in CUDA C++ are not used, NVRTC cannot be loaded: %s", error)
        return False
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor not in known:
        logger.warning("sglang_sparse: kernels in CUDA C++ are not used, NVRTC does not know sm_%d%d", major, minor)
        return False
    return True


class Kernel:
    """A compiled kernel.

    Args:
        source: the file.
        name: of its ``extern "C"`` function.
        device: it is loaded there.
        defines: names and values for the preprocessor.
        cluster: consecutive blocks in x that form a cluster, at most 8; more than 1 on GPUs with dependent launch only.
        shared_bytes: of shared memory that a block has beside what the source declares.

    Raises:
        RuntimeError: it does not compile; has the compiler's messages.
    """

    def __init__(
        self,
        source: Path,
        name: str,
        device: torch.device,
        defines: dict[str, int],
        cluster: int = 1,
        shared_bytes: int = 0,
    ):
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        self._driver = driver
        self._device = device
        # The module is loaded into the context of the current device.
        with torch.cuda.device(device):
            image = compile_file(source, torch.cuda.get_device_capability(device), defines)
            self._module = _check(driver.cuModuleLoadData(image))
            self._function = _check(driver.cuModuleGetFunction(self._module, name.encode()))
            if shared_bytes:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))
        self._shared_bytes = shared_bytes
        self._attributes = []
        if dependent_launch(device):
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self._attributes.append(attribute)
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
            self._attributes.append(attribute)

    def __call__(self, grid: tuple[int, int], threads: int, *arguments: torch.Tensor | int | None) -> None:
        """Launch on the current stream of the kernel's device; not for the first time while a graph is captured there,
        since that loads the kernel.

        Args:
            grid: blocks in x and y; in x a multiple of the cluster.
            threads: of a block.
            arguments: tensors and None are passed as pointers, numbers as ``long long``.
        """
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        config.attrs, config.numAttrs = self._attributes, len(self._attributes)
        values = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in arguments)
        types = tuple(_LONG if isinstance(x, int) else _POINTER for x in arguments)
        with torch.cuda.device(self._device):
            _check(self._driver.cuLaunchKernelEx(config, self._function, (values, types), 0))


def compile_file(source: Path, capability: tuple[int, int], defines: dict[str, int]) -> bytes:
    """The machine code of a file for a compute capability such as ``(9, 0)``.

    Raises:
        RuntimeError: it does not compile; has the compiler's messages.
    """
    from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]

    headers = sorted(HEADERS.glob("*.cuh"))
    texts, names = [path.read_bytes() for path in headers], [path.name.encode() for path in headers]
    program = _check(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), len(names), texts, names))
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{source} does not compile with {' '.join(options)}:\n{log.decode(errors='replace')}")
    image = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, image))
    _check(nvrtc.nvrtcDestroyProgram(program))
    return image


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"CUDA failed: {status!r}")
    return values[0] if values else None
