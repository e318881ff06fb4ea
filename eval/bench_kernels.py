"""Forward ``python -m eval.bench_kernels`` to ``python -m eval.lab.bench_kernels``, for one release."""

import runpy

if __name__ == "__main__":
    runpy.run_module("eval.lab.bench_kernels", run_name="__main__")
