"""Cold compile seconds of every kernel: `python -m benchmarks.compiling` from the project's root.

Processor seconds beside elapsed ones: on a shared machine only the first say what the compiler did.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from k3ray.kernels.compile import all_kernels


def measure() -> None:
    """Compile everything in this process, whose cache must be empty, and print a line a kernel."""
    total_cpu = total = 0.0
    for kernel in all_kernels():
        cpu, started = time.process_time(), time.perf_counter()
        kernel.compile()
        cpu, elapsed = time.process_time() - cpu, time.perf_counter() - started
        total_cpu, total = total_cpu + cpu, total + elapsed
        name = kernel.function.__module__.rpartition(".")[2] + "." + kernel.function.__name__
        print(f"{name:32} {cpu:6.2f} s of processor, {elapsed:6.2f} s elapsed, {len(kernel.signatures)} signatures")
    print(f"{'everything':32} {total_cpu:6.2f} s of processor, {total:6.2f} s elapsed")


def main() -> None:
    """Measure in a process of its own with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        script = "from benchmarks.compiling import measure; measure()"
        subprocess.run([sys.executable, "-c", script], env=os.environ | {"NUMBA_CACHE_DIR": folder}, check=True)


if __name__ == "__main__":
    main()
