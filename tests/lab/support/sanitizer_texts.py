"""What compute-sanitizer prints, as it was seen."""

BEGIN = "========= COMPUTE-SANITIZER\n"
DONE = '\nsanitizer_inside: done {"device": "NVIDIA H200", "cases": 5, "kernels": ["_page_score_kernel"]}\n'
CLEAN = f"{BEGIN}{DONE}========= ERROR SUMMARY: 0 errors\n"
RACES_CLEAN = f"{BEGIN}{DONE}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
OUT_OF_BOUNDS = """\
========= Invalid __global__ read of size 16 bytes
=========     at _page_score_kernel+0xec0 in triton.py:113
=========     by thread (18,0,0) in block (0,0,0)
=========     Access to 0x74505bcccca0 is out of bounds
=========     and is 161 bytes after the nearest allocation at 0x74505bccc800 of size 1,024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: at::native::copy_kernel_cuda(at::TensorIterator&, bool) [0x9544e] in libtorch_cuda.so
=========
"""
OLD_OUT_OF_BOUNDS = """\
========= Invalid __global__ read of size 4 bytes
=========     at 0xda0 in kernels/sglang_sparse_kernels/page_score/triton.py:113:_page_score_kernel
=========     by thread (96,0,0) in block (44,0,0)
=========     Address 0x763995f9f000 is out of bounds
"""
MEMCHECK = f"""\
{BEGIN}{OUT_OF_BOUNDS}{OLD_OUT_OF_BOUNDS}\
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" on CUDA API call to cuCtx
Traceback (most recent call last):
torch.AcceleratorError: CUDA error: unspecified launch failure
========= Target application returned an error
========= ERROR SUMMARY: 1,300 errors
========= ERROR SUMMARY: 300 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
RACE = f"""\
{BEGIN}========= Error: Race reported between Write access at page_topk+0x1200
=========     and Read access at page_topk+0x1c40 [496 hazards]
=========
========= Warning: Race reported between Write access at page_topk+0x90
=========     and Write access at page_topk+0x90 [32 hazards]
=========
{DONE}========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
THEIRS = """\
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>(int)+0x70
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f2b3ba00000
=========
"""
OURS = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at reduce+0x2d0 in standard.py:191
=========     by thread (3,0,0) in block (1,0,0)
=========     Address 0x7f2b3ba00200
=========         Device Frame: _merge_kernel+0x2d0 in triton.py:250
=========
"""
INITCHECK = f"{BEGIN}{THEIRS}{OURS}{THEIRS}{DONE}========= ERROR SUMMARY: 3 errors\n"
MEANT = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at _combine_kernel+0x1f0 in triton.py:293
=========     by thread (1,0,0) in block (8,0,0)
=========     Address 0x7fa6bc800670
=========
"""
THEIRS_ALONE = f"{BEGIN}{THEIRS}{DONE}========= ERROR SUMMARY: 1 error\n"
NO_DEVICE = """\
========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section of the sanitizer documentation
=========
RuntimeError: CUDA error: unknown error
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""
NO_TOOL = f"{BEGIN}========= Error: the racecheck tool is not supported on this device\n"
UNPLACED = f"{BEGIN}========= Uninitialized access by cudaMemcpy\n{DONE}========= ERROR SUMMARY: 2 errors\n"
