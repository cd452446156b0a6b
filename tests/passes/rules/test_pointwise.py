"""Elementwise ops: pads stay pads; numbers from the device are data of the right type."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.passes.rules.harness import Case, Fixed, Hyper, Rows, backward, check_case, swept

LONG, INT = torch.int64, torch.int32
N, N4, M, W, H = Rows("n"), Rows("n", (4,)), Rows("m"), Fixed((4,)), Hyper()
# Pads of an unsigned divisor may be zero.
LARGE, DIVISOR = Rows("n", (), torch.uint8, 1, 200), Rows("n", (), torch.uint8, 1, 9)
NEGATIVE = Fixed((1,), LONG, -3, 0)
ACTIVATIONS = (
    F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, F.softplus, F.hardtanh, F.logsigmoid, F.selu, F.celu, F.mish,
    F.hardswish,
    F.relu6, torch.sigmoid, torch.tanh, torch.exp, torch.abs, torch.square, torch.sin, torch.erf, torch.sign, torch.neg,
)  # fmt: skip

CASES = [
    *[Case(f.__name__, backward(lambda x, f=f: f(x)), (N4,), tolerance=1e-5) for f in ACTIVATIONS],
    Case(
        "logarithms",
        backward(lambda x: (x.abs() + 1).log() + (x.abs() + 1).sqrt() + x.abs().log1p() + (x.abs() + 1).rsqrt()),
        (N4,),
        tolerance=1e-5,
    ),
    Case("prelu", backward(lambda x, w: F.prelu(x, w)), (N4, W), tolerance=1e-5),
    Case("glu", backward(lambda x: F.glu(x, 1)), (N4,), tolerance=1e-5),
    Case("arithmetic", backward(lambda x, y, w: (x + y) * w - x / (y.abs() + 1)), (N4, N4, W), tolerance=1e-5),
    Case("powers", backward(lambda x: x.pow(2) + x.abs().pow(1.5) + 2**x), (N4,), tolerance=1e-5),
    Case("comparisons", lambda x, y: ((x > y) & (x != y), (x >= 0) | (y < 0), ~(x == y)), (N4, N4)),
    Case("where", backward(lambda x, y: torch.where(x > 0, x, y)), (N4, N4)),
    Case(
        "where with numbers",
        lambda x: (torch.where(x > 0, x, 0.0), torch.where(x > 0, 1.0, x), torch.where(x > 0, 1.0, 2.0)),
        (N4,),
    ),
    Case("clamp", backward(lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=0), x.clamp(max=0.2))), (N4,)),
    Case("clamp by tensors", lambda x, y: (x.clamp(min=y), torch.maximum(x, y), torch.minimum(x, y)), (N4, N4)),
    Case("integers", lambda i: (i // 2, i % 3, i * 2 + 1, -i, i & 1, i << 1, (i / 2)), (Rows("n", (), LONG),)),
    Case("rounding", lambda x: (x.round(), x.floor(), x.ceil(), x.trunc(), x.long(), x.int()), (N4,)),
    Case("casts", lambda x: (x.double(), x.to(torch.bfloat16), x.half().float(), x > 0), (N4,)),
    Case(
        "addcmul and addcdiv",
        backward(lambda x, y, z: (torch.addcmul(x, y, z, value=0.5), torch.addcdiv(x, y, z.abs() + 1, value=2.0))),
        (N4, N4, N4),
        tolerance=1e-5,
    ),
    Case("lerp", backward(lambda x, y: torch.lerp(x, y, 0.3)), (N4, N4)),
    Case("lerp by a tensor", lambda x, y, w: torch.lerp(x, y, w), (N4, N4, W)),
    Case("isnan and isfinite", lambda x: (x.isnan(), x.isfinite(), torch.nan_to_num(x / x.relu())), (N4,)),
    Case("nan_to_num", lambda x: (1 / (x > 0).float()).nan_to_num(posinf=0.0), (N4,)),
    Case(
        "degree to its power",
        lambda d: d.pow(-0.5).masked_fill(d.pow(-0.5) == torch.inf, 0),
        (Rows("n", (), torch.float32),),
    ),
    Case(
        "times a count",
        lambda x: (x * x.shape[0], x / x.shape[0], x + x.shape[0], x - x.shape[0], x.shape[0] - x),
        (N4,),
    ),
    Case(
        "integers and a count",
        lambda i: (i * i.shape[0], i % i.shape[0], i // i.shape[0], i + i.shape[0], i < i.shape[0]),
        (Rows("n", (), LONG),),
        batches=({"n": 9, "m": 6}, {"n": 2, "m": 2}),
    ),
    Case(
        "int32 and a count",
        lambda i: (i * i.shape[0], i + i.shape[0], i.shape[0] - i, i > i.shape[0]),
        (Rows("n", (), INT),),
    ),
    Case(
        "a sum and a count",
        lambda i: (i.sum() + i.shape[0], i.int().sum() * i.shape[0], i.sum() == i.shape[0]),
        (Rows("n", (), LONG),),
    ),
    Case("a flag and a count", lambda m: m * m.shape[0], (Rows("n", (), torch.bool),)),
    Case("half and a count", lambda x: x / x.shape[0], (Rows("n", (4,), torch.bfloat16),), tolerance=1e-2),
    Case("times a number", lambda x, h: (x * h, x + h, x - h, h - x, x / h, x**2 * h), (N4, H), tolerance=1e-5),
    Case("compared with a number", lambda x, h: (x > h, x * 0 + 0.3 > h, (x * 0 + 0.3).sum() > h, x <= h), (N4, H)),
    Case("integers and a number", lambda i, h: (i * h, i + h), (Rows("n", (), LONG), H)),
    Case(
        "scaled by a number",
        lambda x, y, h: (torch.add(x, y, alpha=h), torch.sub(x, y, alpha=h), torch.rsub(x, y, alpha=h)),
        (N4, N4, H),
    ),
    Case(
        "addcmul by a number",
        lambda x, y, z, h: (torch.addcmul(x, y, z, value=h), torch.addcdiv(x, y, z.abs() + 1, value=h)),
        (N4, N4, N4, H),
        tolerance=1e-5,
    ),
    Case("lerp by a number", lambda x, y, h: torch.lerp(x, y, h), (N4, N4, H), tolerance=1e-5),
    Case("clamp by a number", lambda x, h: (x.clamp(min=h), x.clamp(max=h), x.clamp(-h, h)), (N4, H)),
    Case("integers clamped by a number", lambda i, h: (i.clamp(max=h), i.clamp(-h, 2.5)), (Rows("n", (), LONG), H)),
    Case(
        "filled with a number",
        lambda x, h: (torch.full_like(x, h), x.masked_fill(x > 0, h), torch.where(x > 0, x, h)),
        (N4, H),
    ),
    Case("fill_", lambda x: x.clone().fill_(2.0), (N4,)),
    Case("fill_ with a tensor", lambda x, w: x.clone().fill_(w), (N4, Fixed(()))),
    Case("in place", lambda x, y: x.clone().add_(y).mul_(2).relu_(), (N4, N4)),
    Case("a dropped zero", lambda x: torch.zeros_like(x).neg().sqrt().sum(0), (N4,)),
    Case(
        "equal sizes of two sources",
        lambda x, y: x + y,
        (N, M),
        batches=({"n": 6, "m": 6}, {"n": 5, "m": 5}, {"n": 2, "m": 2}),
    ),
    Case(
        "rounded quotients",
        lambda i, j: (torch.div(i, 2, rounding_mode="floor"), torch.div(i, j.abs() + 1, rounding_mode="trunc")),
        (Rows("n", (), LONG), Rows("n", (), LONG)),
    ),
    Case(
        "quotient by a count",
        lambda i: (torch.div(i, i.shape[0], rounding_mode="floor"), torch.div(i, i.shape[0], rounding_mode="trunc")),
        (Rows("n", (), LONG),),
        batches=({"n": 9, "m": 6}, {"n": 2, "m": 2}),
    ),
    Case("hardsigmoid", backward(lambda x: F.hardsigmoid(x)), (N4,), tolerance=1e-5),
    *[
        Case(
            f"{dtype} and a number that it cannot hold",
            lambda x, h: (
                *(x * h, x / h, x * 1e-4 * (h * 1e6), torch.lerp(x, x + 1, h), torch.addcmul(x, x, x, value=h)),
                *(x + h, h - x, x.abs() ** h, x > h, x.clamp(max=h), torch.add(x, x, alpha=h), x % h, x // h),
                torch.addcdiv(x, x, x.abs() + 1, value=h),
            ),
            (Rows("n", (4,), dtype), H),
            tolerance=0.0,
        )
        for dtype in (torch.float16, torch.bfloat16)
    ],
    *[
        Case(f"{name} by pads of zero", lambda i, j, f=f: f(i, j), (LARGE, DIVISOR))
        for name, f in {
            "floor": torch.floor_divide,
            "remainder": torch.remainder,
            "fmod": torch.fmod,
            "trunc": lambda i, j: torch.div(i, j, rounding_mode="trunc"),
            "number": lambda i, j: (7 // j, 7 % j, i // j[:1]),
        }.items()
    ],
    Case(
        "quotient by a count of zero",
        lambda i, y: (i // y.shape[0], i % y.shape[0]),
        (Rows("n", (), LONG), M),
        batches=({"n": 9, "m": 6}, {"n": 0, "m": 0}),
    ),
    Case(
        "integers to a power that is no count",
        lambda i, k: i ** (k[0] - 1).item(),
        (Rows("n", (), LONG), NEGATIVE),
        new=True,
    ),
    Case("integers to a power", lambda i, k: i ** (k[0] + 5).item(), (Rows("n", (), LONG), NEGATIVE), new=True),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
