"""The input graphs of the examples: a planted partition, or a CSR `.npz` with `adj_indptr`, `adj_indices`, `labels`."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch


@dataclass(frozen=True)
class InputGraph:
    """N nodes, E directed edges (each stored both ways), D features, split into train, validation and test ids.

    `indices[indptr[v]:indptr[v + 1]]` are the neighbours of `v`. Ids and labels are int64, features float32.
    """

    indptr: torch.Tensor  # [N + 1]
    indices: torch.Tensor  # [E]
    feat: torch.Tensor  # [N, D]
    label: torch.Tensor  # [N]
    train: torch.Tensor
    val: torch.Tensor
    test: torch.Tensor

    @property
    def num_nodes(self) -> int:
        return self.label.numel()

    @property
    def num_classes(self) -> int:
        return int(self.label.max()) + 1

    def to(self, device: str | torch.device) -> InputGraph:
        return InputGraph(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def symmetric_csr(src: np.ndarray, dst: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """`(indptr, indices)` with every edge both ways, once each, neighbours in ascending order."""
    edge = np.unique(np.concatenate([src * num_nodes + dst, dst * num_nodes + src]))
    indptr = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(edge // num_nodes, minlength=num_nodes), out=indptr[1:])
    return indptr, edge % num_nodes


def split(label: np.ndarray, per_class: int = 20, validation: int = 500) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of `per_class` training nodes a class, then `validation` nodes, then the rest, drawn with seed 0."""
    order = np.random.default_rng(0).permutation(label.size)
    train = np.concatenate([order[label[order] == c][:per_class] for c in np.unique(label)])
    rest = order[~np.isin(order, train)]
    return np.sort(train), np.sort(rest[:validation]), np.sort(rest[validation:])


def assemble(indptr: np.ndarray, indices: np.ndarray, feat: np.ndarray, label: np.ndarray) -> InputGraph:
    ids = [indptr, indices, label, *split(label)]
    indptr_, indices_, label_, train, val, test = (torch.from_numpy(a.astype(np.int64)) for a in ids)
    return InputGraph(indptr_, indices_, torch.from_numpy(feat.astype(np.float32)), label_, train, val, test)


def planted_partition(num_nodes: int = 1500, classes: int = 4, degree: int = 8, features: int = 32) -> InputGraph:
    """Four in five edges stay within a class, and a feature row is its class's direction under unit noise."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, classes, num_nodes)
    members = [np.flatnonzero(label == c) for c in range(classes)]
    src = rng.integers(0, num_nodes, num_nodes * degree // 2)
    inside = np.array([rng.choice(members[label[v]]) for v in src])
    dst = np.where(rng.random(src.size) < 0.8, inside, rng.integers(0, num_nodes, src.size))
    feat = rng.standard_normal((classes, features))[label] * 0.3 + rng.standard_normal((num_nodes, features))
    return assemble(*symmetric_csr(src, dst, num_nodes), feat, label)


def from_npz(path: str) -> InputGraph:
    """Reads `adj_*` (CSR), `labels` and `attr_*` (CSR features); without features, degrees one-hot stand in."""
    with np.load(path, allow_pickle=False) as file:
        array = dict(file)
    label = array["labels"].astype(np.int64)
    src = np.repeat(np.arange(label.size), np.diff(array["adj_indptr"]))
    indptr, indices = symmetric_csr(src, array["adj_indices"].astype(np.int64), label.size)
    if "attr_indptr" in array:
        feat = np.zeros(tuple(array["attr_shape"]), np.float32)
        row = np.repeat(np.arange(label.size), np.diff(array["attr_indptr"]))
        feat[row, array["attr_indices"]] = array["attr_data"]
    else:
        degrees, column = np.unique(np.diff(indptr), return_inverse=True)
        feat = np.eye(degrees.size, dtype=np.float32)[column]
    return assemble(indptr, indices, feat, label)


def load(data: str | None = None, device: str | torch.device = "cpu") -> InputGraph:
    """The input graph in file `data`, or the built-in planted partition."""
    return (planted_partition() if data is None else from_npz(data)).to(device)
