"""What the device functions of `hopper.dequantise` do, bit for bit.

The simulated GPU leaves them out. Here each is built as on the GPU and its operations are carried
out for all 128 threads at once, on the bytes of a global and of a shared memory: every load, every
conversion and the place of every store.
"""

import re
import types

import ml_dtypes
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from pallas_kernels.hopper import dequantise

THREADS = np.arange(128)
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
TILES = 4
"""What is written to is some way into a larger ring."""


@pytest.fixture(autouse=True)
def context():
    with mlir.make_ir_context(), ir.Location.unknown():
        yield


def product(a, b):
    """Of pairs of bfloat16, rounded once, subnormal numbers included."""
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = (np.ascontiguousarray(x.astype(np.uint32)).view(BF16) for x in (a, b))
        a, b = (x.astype(np.float64) for x in pairs)
        return (a * b).astype(BF16).view(np.uint32)


def permute(a, b, selection):
    """PTX's prmt."""
    pool = np.stack([a >> 8 * i & 0xFF for i in range(4)] + [b >> 8 * i & 0xFF for i in range(4)])
    selection = int(selection[0])
    return sum(pool[selection >> 4 * i & 7] << 8 * i for i in range(4))


class Machine:
    """Runs a device function on 128 threads. Values are `[threads, elements]`, unsigned."""

    def __init__(self, monkeypatch, call, arguments, memories):
        captured = []
        fake = lambda **_: lambda f: lambda *_: captured.append(f)
        monkeypatch.setattr(dequantise, "inline_mgpu", fake)
        call()
        (device,) = captured
        i32, pointer = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.ptr")
        kinds = []
        for argument in arguments:
            if isinstance(argument, ir.Type):
                kinds.append(argument)
            else:
                kinds += [
                    ir.VectorType.get((x.shape[1],), i32) if x.ndim > 1 else i32
                    for x in argument[1]
                ]
        bases = [pointer] * len(memories)
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            f = func.FuncOp("f", ir.FunctionType.get([*bases, *kinds], []))
            block = f.add_entry_block()
            given, rest = list(block.arguments)[: len(bases)], list(block.arguments)[len(bases) :]
            self.values = dict(zip(given, memories, strict=True))
            values, refs = [], {}
            for argument in arguments:
                if isinstance(argument, ir.Type):
                    values.append(rest.pop(0))
                    refs[values[-1]] = given[len(refs)]
                    continue
                layout, known = argument
                registers = np.empty(layout.registers_shape, object)
                for i, x in enumerate(known):
                    registers.flat[i] = rest.pop(0)
                    self.values[registers.flat[i]] = x
                values.append(
                    FragmentedArray(_registers=registers, _layout=layout.layout, _is_signed=True)
                )
            monkeypatch.setattr(mgpu_utils, "memref_ptr", lambda ref: refs[ref])
            with ir.InsertionPoint(block):
                self.result = device(None, *values)
                func.ReturnOp([])
        self.stored = np.zeros(memories[0].bytes.size, int)
        for operation in block.operations:
            self.run(operation.operation)

    def registers(self):
        return [self.values[x] for x in self.result.registers.flat]

    def run(self, op):
        x = [self.values.get(operand) for operand in op.operands]
        result = self.evaluate(op, op.name, x)
        for value, found in zip(op.results, [result] if len(op.results) == 1 else [], strict=True):
            self.values[value] = found

    def evaluate(self, op, name, x):
        wrap = lambda x: x & 0xFFFFFFFF
        binary = {
            "arith.addi": lambda a, b: wrap(a + b),
            "arith.muli": lambda a, b: wrap(a * b),
            "arith.andi": np.bitwise_and,
            "arith.ori": np.bitwise_or,
            "arith.xori": np.bitwise_xor,
            "arith.shrui": np.right_shift,
            "arith.shli": lambda a, b: wrap(a << b),
        }
        if name in binary:
            return binary[name](*x)
        if name == "arith.constant":
            return np.full(128, wrap(ir.IntegerAttr(op.attributes["value"]).value))
        if name == "arith.cmpi":
            assert ir.IntegerAttr(op.attributes["predicate"]).value == 2  # signed, less than
            return x[0].astype(np.int32) < x[1].astype(np.int32)
        if name == "arith.select":
            return np.where(*x)
        if name == "vector.from_elements":
            return np.stack(x, axis=1)
        if name == "vector.extract":
            (position,) = ir.DenseI64ArrayAttr(op.attributes["static_position"])
            return x[0][:, position]
        if name == "llvm.extractvalue":
            (position,) = ir.DenseI64ArrayAttr(op.attributes["position"])
            return x[0][:, position]
        if name in ("llvm.bitcast", "arith.bitcast", "vector.bitcast"):
            return x[0]
        if name == "llvm.getelementptr":
            (index,) = ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"])
            scale = mgpu_utils.bitwidth(ir.TypeAttr(op.attributes["elem_type"]).value) // 8
            return x[0].at(scale * (x[1] if index == -(2**31) else index))
        if name == "nvvm.shfl.sync":
            assert "idx" in str(op)
            return x[1][THREADS // 32 * 32 + x[2] % 32]
        if name == "llvm.inline_asm":
            return self.assembly(ir.StringAttr(op.attributes["asm_string"]).value, x)
        if name == "llvm.store":
            assert x[0].shape == (128, 4)
            return x[1].store(x[0])
        assert name == "func.return", op
        return None

    def assembly(self, text, x):
        if "%tid.x" in text:
            return THREADS + 256  # it is the third warpgroup of its block
        if text.startswith("mul.rn.bf16x2"):
            return product(*x)
        if text.startswith("prmt.b32"):
            return permute(*x)
        assert re.match(r"ld\.global\b", text), text
        words = 4 if ".v4." in text else 1
        found = x[0].load(words)
        return found if words > 1 else found[:, 0]


class Memory:
    """Bytes, and an address in them for every thread."""

    def __init__(self, bytes, address=0, written=None):
        self.bytes, self.address = bytes, np.broadcast_to(address, 128)
        self.written = np.zeros(bytes.size, int) if written is None else written

    def at(self, offset):
        return Memory(self.bytes, self.address + offset, self.written)

    def load(self, words):
        assert (self.address % (4 * words) == 0).all()
        places = self.address[:, None] + np.arange(4 * words)
        found = np.ascontiguousarray(self.bytes[places]).view(np.uint32)
        return found.astype(np.int64)

    def store(self, words):
        assert (self.address % 16 == 0).all()
        # A warp's store takes its least time if each eight lanes meet every bank once.
        banks = np.sort(self.address.reshape(-1, 8) % 128, axis=1)
        assert (banks == np.arange(0, 128, 16)).all()
        places = self.address[:, None] + np.arange(16)
        self.bytes[places] = words.astype(np.uint32).view(np.uint8)
        np.add.at(self.written, places, 1)


def load(monkeypatch, function, values, row_stride):
    """The registers of a load of rows that lie so many elements apart."""
    rows, columns = values.shape
    memory = np.full((rows, row_stride * values.itemsize), 0xFF, np.uint8)
    memory[:, : columns * values.itemsize] = values.view(np.uint8)
    element = ir.Float8E4M3FNType.get() if values.itemsize == 1 else ir.F32Type.get()
    ref = ir.MemRefType.get(values.shape, element, ir.StridedLayoutAttr.get(0, [row_stride, 1]))
    shaped = types.SimpleNamespace(shape=values.shape)
    call = lambda: function(shaped, interpret=False)
    return Machine(monkeypatch, call, [ref], [Memory(memory.reshape(-1))]).registers()


def convert(monkeypatch, latents, scales, first, live):
    """Both halves of the rows that come of these, as bytes of tiles of 64 rows."""
    d_half = latents.shape[1] // 2
    words = load(monkeypatch, dequantise.load_latents, latents, latents.shape[1])
    factors = load(monkeypatch, dequantise.load_scales, scales, scales.shape[1])
    shape = 8, d_half // 64, 8, 64
    ref = ir.MemRefType.get(
        shape, ir.BF16Type.get(), ir.StridedLayoutAttr.get(0, [8 * d_half, 512, 64, 1])
    )
    strided = lambda shape, vec_size, known: (
        types.SimpleNamespace(
            layout=plgpu.Layout.WG_STRIDED(shape, vec_size=vec_size).to_mgpu(),
            registers_shape=(len(known),),
        ),
        known,
    )
    splat = (
        types.SimpleNamespace(layout=plgpu.Layout.WG_SPLAT(()).to_mgpu(), registers_shape=()),
        [np.full(128, live & 0xFFFFFFFF)],
    )
    memories = [Memory(np.full(64 * d_half * 2, 0xAA, np.uint8)) for _ in range(2)]
    tile = types.SimpleNamespace(shape=(64, d_half))
    Machine(
        monkeypatch,
        lambda: dequantise.store_bf16(tile, tile, first, None, None, None, interpret=False),
        [
            ref,
            ref,
            strided((16, d_half // 2), 4, words),
            strided((128,), 1, factors),
            splat,
        ],
        memories,
    )
    return memories


def natural(memory, d_half):
    """The rows of a tile that is swizzled by 128 bytes, and how often each byte was written."""
    row, byte = np.divmod(np.arange(64 * d_half * 2), d_half * 2)
    at = row // 8 * 16 * d_half + byte // 128 * 1024 + row % 8 * 128 + byte % 128
    at ^= (at >> 7 & 7) << 4
    shaped = lambda x: x[at].reshape(64, d_half * 2)
    return shaped(memory.bytes).view(BF16), shaped(memory.written)


def expected(latents, scales):
    values = latents.astype(np.float64) * np.repeat(scales.astype(np.float64), 128, axis=1)
    with np.errstate(over="ignore"):
        return values.astype(BF16)


def check(monkeypatch, latents, scales, first=0, live=64):
    d_half = latents.shape[1] // 2
    wanted = expected(latents, scales)
    alive = first + np.arange(16) < live
    wanted = np.where(alive[:, None], wanted.view(np.uint16), 0)
    for half, memory in enumerate(convert(monkeypatch, latents, scales, first, live)):
        found, written = natural(memory, d_half)
        rows = slice(first, first + 16)
        assert (written[rows] == 1).all() and written.sum() == 16 * d_half * 2
        bits = found[rows].view(np.uint16)
        # A dead row's zeros have any sign.
        bits = np.where(alive[:, None], bits, bits & 0x7FFF)
        np.testing.assert_array_equal(bits, wanted[:, half * d_half : (half + 1) * d_half])


def codes(rng, d_latent):
    """Every e4m3 but its NaNs, several times."""
    finite = np.array([x for x in range(256) if x & 0x7F != 0x7F], np.uint8)
    filled = np.resize(finite, 16 * d_latent)
    return rng.permutation(filled).reshape(16, d_latent).view(E4M3)


@pytest.mark.parametrize("first", [0, 16, 32, 48])
@pytest.mark.parametrize("d_latent", [512, 256])
def test_every_element_finds_its_place(d_latent, first, monkeypatch):
    rng = np.random.default_rng(first)
    scales = 2.0 ** rng.integers(-20, 21, (16, d_latent // 128))
    check(monkeypatch, codes(rng, d_latent), scales.astype(np.float32), first)


@pytest.mark.parametrize("start", range(-126, 128, 32))
def test_all_codes_at_all_scales(start, monkeypatch):
    """From the least normal float32: infinity where bfloat16 ends, as in any other conversion."""
    scales = 2.0 ** np.minimum(start + np.arange(64).reshape(16, 4) % 32, 127)
    every = np.resize(np.arange(256, dtype=np.uint8), 128)
    low, high = (np.resize(every + shift, 128) for shift in (0, 128))
    row = np.concatenate([low, high, low, high]).astype(np.uint8)
    latents = np.tile(np.where(row & 0x7F == 0x7F, 0, row).astype(np.uint8), (16, 1)).view(E4M3)
    for shift in (0, 1):  # each scale meets both halves of the codes
        rolled = np.roll(latents.view(np.uint8), 128 * shift, axis=1).view(E4M3)
        check(monkeypatch, rolled, scales.astype(np.float32))


@pytest.mark.parametrize("live", [-64, 0, 1, 17, 30, 32])
@pytest.mark.parametrize("d_latent", [512, 256])
def test_dead_rows_are_zero_whatever_they_hold(d_latent, live, monkeypatch):
    latents = codes(np.random.default_rng(0), d_latent).view(np.uint8)
    scales = np.ones((16, d_latent // 128), np.float32)
    dead = 16 + np.arange(16) >= live
    latents[dead] |= 0x7F
    scales[dead] = np.resize([np.nan, np.inf, -np.inf, 3e38], scales[dead].shape)
    check(monkeypatch, latents.view(E4M3), scales, 16, live)


def test_nan():
    """One of `append`'s is an infinity, for it has a scale of 2**120; any other is 480."""
    word = np.array([0xFF7F], np.uint32)
    spread = (word & 0x7F) << 4 | (word >> 8 & 0x7F) << 20 | 0x80000000
    exact = product(spread, np.array([0x7B807B80]))
    np.testing.assert_array_equal(exact.view(BF16), np.array([480, -480], BF16))
    scale = np.array([0x7B807B80])
    np.testing.assert_array_equal(
        product(exact, scale).view(BF16), np.array([np.inf, -np.inf], BF16)
    )


@pytest.mark.parametrize("d_latent", [512, 256])
def test_rows_lie_apart(d_latent, monkeypatch):
    """A load takes its rows' stride from the array."""
    latents = codes(np.random.default_rng(0), d_latent)
    near, far = (
        load(monkeypatch, dequantise.load_latents, latents, stride)
        for stride in (d_latent, 2 * d_latent)
    )
    for a, b in zip(near, far, strict=True):
        np.testing.assert_array_equal(a, b)
