"""Compiles every Triton kernel in its forms for GPUs, on a machine without one: python compile_ahead.py 80 90

The interpreter allows what the compiler refuses. Prints a line per form.
"""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_xmod.kernels import triton_gated, triton_norm, triton_select
from megatron_xmod.kernels.triton_tiles import tile_for

# Numbers, their exact companions, what is computed in, width.
ROWS = [("*bf16", "*fp32", tl.float32, 5120), ("*fp32", "*fp32", tl.float32, 1000), ("*fp64", "*fp64", tl.float64, 64)]
SCORES = [("*fp32", "*i32", tl.int32, tl.uint32, 32, 8192, 32), ("*fp64", "*i64", tl.int64, tl.uint64, 64, 256, 4)]


def forms():
    """(kernel, types of its pointers, constants, warps); every other argument is an i32."""
    for number, exact, accumulation, width in ROWS:
        tile = tile_for(width)
        constants = {"TYPE": accumulation, "ROWS": tile.rows, "WIDTH": tile.width}
        norm = dict.fromkeys(("x", "weight", "normed", "normed_gradient", "x_gradient"), number)
        norm |= {"inverse_rms": exact, "weight_partial": exact}
        for extra in ({"index": "*i64", "rows": number, "rows_gradient": number},
                      {"index": None, "rows": None, "rows_gradient": None}):
            yield triton_norm._forward, norm | extra, constants | {"EPS": 1e-6}, tile.warps
            yield triton_norm._backward, norm | extra, constants, tile.warps
        gated = dict.fromkeys(("x", "delta", "y", "gradient", "delta_gradient"), number) | {"index": "*i64"}
        for gate in (exact, None):
            for kernel in (triton_gated._forward, triton_gated._backward):
                yield kernel, gated | {"gate": gate, "gate_gradient": gate}, constants, tile.warps
    for score, keys, signed, unsigned, bits, block, warps in SCORES:
        yield (triton_select._select, {"score": score, "keys": keys, "owner": "*i64", "positions": "*i64"},
               {"INT": signed, "UINT": unsigned, "BITS": bits, "BLOCK": block}, warps)
        # Of one soft layer: the launcher makes a constant of an argument that is 1.
        yield (triton_select._select, {"score": score, "keys": keys, "owner": "*i64", "positions": "*i64"},
               {"INT": signed, "UINT": unsigned, "BITS": bits, "BLOCK": block, "batch": 1, "layers": 1,
                "token_stride": 1, "layer_stride": 1}, warps)


def compile_form(kernel, pointers, constants, warps, capability):
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    constants |= {name: None for name, kind in pointers.items() if kind is None and name in names}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    # Tensors begin at multiples of 16 bytes, and then loads are wide.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"]


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        for kernel, pointers, constants, warps in forms():
            compile_form(kernel, pointers, constants, warps, capability)
            print(capability, kernel.__name__, constants)
