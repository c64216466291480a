"""Vectors for kernels: a thin layer of LLVM vector IR under numba intrinsics.

Everything here is generic IR that lowers to AVX2, AVX-512 or NEON alike. What the CPU has only decides how wide a
vector is worth being; it never decides a bit of a result.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()


def llvm_function(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
    """The declaration of an LLVM intrinsic in the builder's module."""
    declared = builder.module.globals.get(name)
    if declared is None:
        declared = ir.Function(builder.module, ir.FunctionType(result, arguments), name)
    return declared


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in double, rounded once, whatever the optimiser would like."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.call(llvm_function(builder, "llvm.fma.f64", F64, [F64] * 3), arguments)

    return types.float64(types.float64, types.float64, types.float64), emit


@intrinsic
def rint(typingctx: Any, x: Any) -> Any:
    """x in double rounded to the nearest integer, ties to even."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.call(llvm_function(builder, "llvm.rint.f64", F64, [F64]), arguments)

    return types.float64(types.float64), emit
