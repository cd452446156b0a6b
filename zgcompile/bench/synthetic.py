"""Synthetic input graphs with the sizes and the degree law of well-known ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 1 << 25  # endpoints drawn at once: bounds the float64 scratch to 256 MiB


@dataclass(frozen=True)
class Shape:
    """Sizes of an input graph: `nodes` N, `edges` E, `features` D and `classes` C."""

    nodes: int
    edges: int
    features: int
    classes: int


@dataclass(frozen=True)
class SyntheticGraph:
    """CSR by destination: `indices[indptr[v]:indptr[v + 1]]` are the sources of `v`'s in-edges."""

    indptr: torch.Tensor  # i64[N + 1]
    indices: torch.Tensor  # i64[E]
    feat: torch.Tensor  # f32[N, D]
    label: torch.Tensor  # i64[N]


SHAPES = {
    "reddit": Shape(232_965, 114_615_892, 602, 41),
    "products": Shape(2_449_029, 123_718_280, 100, 47),
    "arxiv": Shape(169_343, 2_332_486, 128, 40),
}
SMALL = Shape(2_000, 40_000, 32, 8)


def power_law(shape: Shape, *, alpha: float = 0.8, seed: int = 0, device: str | torch.device = "cpu") -> SyntheticGraph:
    """In-degrees by rank: the node at rank r of a random permutation has weight r^-alpha and the in-degree weight x E,
    truncated, in [1, N/4].

    Sources are drawn with the same weights. The clamp makes the number of edges differ a little from `shape.edges`. The
    draws are those of `device`'s generator, so the CPU and a GPU give different input graphs of the same law.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    weight = torch.arange(1, shape.nodes + 1, device=device, dtype=torch.float64).pow(-alpha)
    weight = weight[torch.randperm(shape.nodes, device=device, generator=generator)]
    degree = (weight / weight.sum() * shape.edges).long().clamp(min=1, max=max(1, shape.nodes // 4))
    return _draw(shape, degree, weight, generator)


def uniform(shape: Shape, *, seed: int = 0, device: str | torch.device = "cpu") -> SyntheticGraph:
    """No heavy rows: every in-degree is E // N or one more, exactly E edges in all, and sources are uniform."""
    generator = torch.Generator(device=device).manual_seed(seed)
    order = torch.randperm(shape.nodes, device=device, generator=generator)
    degree = shape.edges // shape.nodes + (order < shape.edges % shape.nodes).long()
    return _draw(shape, degree, torch.ones(shape.nodes, device=device, dtype=torch.float64), generator)


def _draw(shape: Shape, degree: torch.Tensor, weight: torch.Tensor, generator: torch.Generator) -> SyntheticGraph:
    device = degree.device
    indptr = torch.zeros(shape.nodes + 1, dtype=torch.long, device=device)
    indptr[1:] = degree.cumsum(0)
    edges = int(indptr[-1])
    cumulative = weight.cumsum(0) / weight.sum()
    indices = torch.empty(edges, dtype=torch.long, device=device)
    for start in range(0, edges, CHUNK):
        size = min(CHUNK, edges - start)
        draw = torch.rand(size, device=device, dtype=torch.float64, generator=generator)
        indices[start : start + size] = torch.searchsorted(cumulative, draw).clamp(max=shape.nodes - 1)
    feat = torch.randn(shape.nodes, shape.features, device=device, generator=generator)
    label = torch.randint(0, shape.classes, (shape.nodes,), device=device, generator=generator)
    return SyntheticGraph(indptr, indices, feat, label)
