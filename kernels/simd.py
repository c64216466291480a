"""Vectors for kernels: a thin layer of LLVM vector IR from which a kernel's inner loop is built in one numba intrinsic.

Building the whole loop at once ("macro intrinsic") compiles several times faster than hundreds of vector statements
that numba types one by one, to the same machine code. Everything is generic IR, lowered to AVX2, AVX-512 or NEON
alike: what the CPU has only decides how wide a vector is worth being, never a bit of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from k3ray.kernels.compile import inlined

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
BYTES = I8.as_pointer()


@cache
def cpu_features() -> frozenset[str]:
    """What numba may use of this CPU, e.g. "avx2" (its own settings can take features away)."""
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


def double_lanes() -> int:
    """How many doubles one vector register holds."""
    return 8 if "avx512f" in cpu_features() else 4


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    """The vector type <lanes x element>."""
    return ir.VectorType(element, lanes)


def constants(element: ir.Type, values: Sequence[float]) -> ir.Constant:
    """A constant vector of these values."""
    return ir.Constant(vector(element, len(values)), [ir.Constant(element, value) for value in values])


def splat(element: ir.Type, value: float, lanes: int) -> ir.Constant:
    """A constant vector with the value in every lane."""
    return constants(element, [value] * lanes)


def zeros(element: ir.Type, lanes: int) -> ir.Constant:
    """A vector of zeros."""
    return ir.Constant(vector(element, lanes), None)


def shuffle(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """The given lanes of `first` followed by `second`."""
    return builder.shuffle_vector(first, second, constants(I32, lanes))


def llvm_function(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> ir.Function:
    """The declaration of an LLVM intrinsic in the builder's module."""
    declared = builder.module.globals.get(name)
    if declared is None:
        declared = ir.Function(builder.module, ir.FunctionType(result, arguments), name)
    return declared


def multiply_add(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z in double, each lane rounded once; scalars or vectors."""
    name = f"v{x.type.count}f64" if isinstance(x.type, ir.VectorType) else "f64"
    return builder.call(llvm_function(builder, f"llvm.fma.{name}", x.type, [x.type] * 3), [x, y, z])


def array_bytes(context: Any, builder: ir.IRBuilder, array_type: types.Array, array: ir.Value) -> ir.Value:
    """A byte pointer to an array argument's first item."""
    return builder.bitcast(context.make_array(array_type)(context, builder, array).data, BYTES)


def array_shape(context: Any, builder: ir.IRBuilder, array_type: types.Array, array: ir.Value) -> list[ir.Value]:
    """The extents of an array argument."""
    shape = context.make_array(array_type)(context, builder, array).shape
    return [builder.extract_value(shape, axis) for axis in range(array_type.ndim)]


def at(builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
    """A byte pointer moved by an offset in bytes."""
    return builder.gep(pointer, [I64(offset) if isinstance(offset, int) else offset])


def load(builder: ir.IRBuilder, pointer: ir.Value, kind: ir.Type, offset: ir.Value | int = 0) -> ir.Value:
    """A value of any type from a byte pointer plus an offset in bytes, of any alignment."""
    return builder.load(builder.bitcast(at(builder, pointer, offset), kind.as_pointer()), align=1)


def store(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, offset: ir.Value | int = 0) -> None:
    """Write a value at a byte pointer plus an offset in bytes, of any alignment."""
    builder.store(value, builder.bitcast(at(builder, pointer, offset), value.type.as_pointer()), align=1)


def prefetch(builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value, nearness: int = 3) -> None:
    """Ask for the cache line there, into the first cache (3) or the second (2); harmless past the end."""
    function = llvm_function(builder, "llvm.prefetch.p0", ir.VoidType(), [BYTES, I32, I32, I32])
    builder.call(function, [at(builder, pointer, offset), I32(0), I32(nearness), I32(1)])


def loop(
    builder: ir.IRBuilder,
    start: ir.Value,
    stop: ir.Value,
    step: int,
    carried: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """for i in range(start, stop, step): carried = body(i, carried); the values carried out of it."""
    before = builder.block
    inside, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", start, stop), inside, after)
    builder.position_at_end(inside)
    index = builder.phi(I64)
    index.add_incoming(start, before)
    entering = [builder.phi(value.type) for value in carried]
    leaving = list(body(index, entering))
    following = builder.add(index, I64(step))
    last = builder.block  # the body may have added blocks
    index.add_incoming(following, last)
    for phi, initial, value in zip(entering, carried, leaving, strict=True):
        phi.add_incoming(initial, before)
        phi.add_incoming(value, last)
    builder.cbranch(builder.icmp_signed("<", following, stop), inside, after)
    builder.position_at_end(after)
    results = [builder.phi(value.type) for value in carried]
    for phi, initial, value in zip(results, carried, leaving, strict=True):
        phi.add_incoming(initial, before)
        phi.add_incoming(value, last)
    return results


@intrinsic
def address(typingctx: Any, array: Any) -> Any:
    """Where an array's first item lies, for kernels that walk bytes."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(array_bytes(context, builder, signature.args[0], arguments[0]), I64)

    return types.intp(array), emit


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in double, rounded once, whatever the optimiser would like."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return multiply_add(builder, *arguments)

    return types.float64(types.float64, types.float64, types.float64), emit


@inlined
def aligned_doubles(count: int) -> Any:
    """Scratch for `count` doubles that starts on a cache line, so that no vector in it straddles two."""
    memory = np.empty(count + 8, np.float64)
    skip = (-memory.ctypes.data % 64) // 8
    return memory[skip : skip + count]
