from __future__ import annotations

import numpy as np
import pytest
import torch


def neighbours(data, v):
    return data.indices[data.indptr[v] : data.indptr[v + 1]].tolist()


@pytest.fixture
def write(tmp_path):
    def write(num_nodes, edges, **arrays):
        edges = sorted(edges)
        indptr = np.searchsorted([a for a, _ in edges], np.arange(num_nodes + 1)).astype(np.int32)
        path = tmp_path / "graph.npz"
        np.savez(path, adj_indptr=indptr, adj_indices=np.array([b for _, b in edges], np.int32), **arrays)
        return path

    return write


def test_built_in_graph_is_symmetric_split_and_fixed():
    from input_graph import load

    data, again = load(), load()
    rows = [neighbours(data, v) for v in range(data.num_nodes)]
    assert all(v in rows[u] for v, row in enumerate(rows) for u in row)
    assert all(row == sorted(set(row)) for row in rows)
    parts = torch.cat([data.train, data.val, data.test])
    assert sorted(parts.tolist()) == list(range(data.num_nodes))
    assert data.val.numel() == 500
    assert torch.bincount(data.label[data.train]).tolist() == [20] * data.num_classes
    assert data.train.numel() % 32 != 0, "the examples' default batch must leave a partial last one"
    assert torch.equal(data.indices, again.indices)
    assert torch.equal(data.feat, again.feat)


def test_npz_is_symmetrised_and_its_sparse_features_laid_out(write):
    from input_graph import load

    path = write(
        5,
        [(0, 1), (1, 0), (0, 3), (3, 3)],
        labels=np.array([0, 1, 0, 1, 1], np.int8),
        attr_indptr=np.array([0, 2, 2, 3, 3, 3], np.int32),
        attr_indices=np.array([0, 2, 1], np.int32),
        attr_data=np.array([1, 5, 3], np.float32),
        attr_shape=np.array([5, 3]),
    )
    data = load(path)
    assert [neighbours(data, v) for v in range(5)] == [[1, 3], [0], [], [0, 3], []]
    assert data.feat.tolist() == [[1, 0, 5], [0, 0, 0], [0, 3, 0], [0, 0, 0], [0, 0, 0]]
    assert data.label.dtype == torch.int64
    assert data.num_classes == 2


def test_npz_without_features_gets_its_degrees_one_hot(write):
    from input_graph import load

    data = load(write(4, [(0, 1), (0, 2)], labels=np.array([0, 1, 0, 1])))
    assert data.feat.tolist() == [[0, 0, 1], [0, 1, 0], [0, 1, 0], [1, 0, 0]]  # degrees 2, 1, 1, 0
