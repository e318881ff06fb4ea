"""Forward ``python -m eval.recall`` to ``python -m eval.lab.recall``, for one release."""

import runpy

if __name__ == "__main__":
    runpy.run_module("eval.lab.recall", run_name="__main__")
