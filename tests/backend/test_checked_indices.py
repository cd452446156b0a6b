"""Every op that fails on some index values says so before it runs, and only then: against the op itself on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule
from zgcompile.passes.rules.table import load_rules

from zgcompile.backend.checked_indices import CHECKED, CheckedIndices, direct_limits, insert_checks, refuse_out_of_range

aten = torch.ops.aten
# Read by index, but by values that cannot be out of range: masks, and boundaries that values are only compared with.
COMPARED = {"masked_select", "masked_fill", "masked_scatter_backward", "native_dropout_backward", "bucketize"}
NAMES = {"index", "indices", "repeats", "target", "mask", "boundaries"}


def i(*values):
    return torch.tensor(values)


X, Y = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(2, 3)
SCORES = torch.randn(3, 4).log_softmax(1)
W = torch.ones(())
MASK = torch.tensor([True, False, True, False])
# (op, arguments, arguments of which one index value is out of range)
CASES = [
    (aten.index_select.default, (X, 0, i(0, 3)), (X, 0, i(0, 4))),
    (aten.index_select.default, (X, -1, i(2)), (X, -1, i(-1))),
    (aten.index_select.default, (W, 0, i(0)), (W, 0, i(1))),
    (aten.gather.default, (X, 1, i(2, 1).view(2, 1)), (X, 1, i(3, 1).view(2, 1))),
    (aten.embedding.default, (X, i(0, 3)), (X, i(4))),
    (aten.embedding_dense_backward.default, (Y, i(0, 3), 4, -1, False), (Y, i(0, 4), 4, -1, False)),
    (aten.take.default, (X, i(-12, 11)), (X, i(12))),
    (aten.put.default, (X, i(-12, 11), i(1.0, 2.0)), (X, i(-13, 0), i(1.0, 2.0))),
    (aten.index.Tensor, (X, [i(-4, 3)]), (X, [i(-5, 3)])),
    (aten.index.Tensor, (X, [None, i(2)]), (X, [None, i(3)])),
    (aten.index.Tensor, (X.view(2, 2, 3), [MASK.view(2, 2), i(2, 0)]), (X.view(2, 2, 3), [MASK.view(2, 2), i(3, 0)])),
    (aten.index_put.default, (X, [i(3, 0)], Y), (X, [i(4, 0)], Y)),
    (aten.index_add.default, (X, 0, i(3, 0), Y), (X, 0, i(-1, 0), Y)),
    (aten.index_copy.default, (X, 0, i(3, 0), Y), (X, 0, i(4, 0), Y)),
    (aten.index_reduce.default, (X, 0, i(3, 0), Y, "amax"), (X, 0, i(4, 0), Y, "amax")),
    (aten.index_fill.int_Scalar, (X, 0, i(-4, 3), 1.0), (X, 0, i(4), 1.0)),
    (aten.index_fill.int_Tensor, (X, 0, i(-4, 3), W), (X, 0, i(-5), W)),
    (aten.scatter.src, (X, 0, i(3, 0, 1).view(1, 3), Y), (X, 0, i(4, 0, 1).view(1, 3), Y)),
    (aten.scatter.value, (X, 0, i(3).view(1, 1), 1.0), (X, 0, i(-1).view(1, 1), 1.0)),
    (aten.scatter.reduce, (X, 0, i(3).view(1, 1), Y), (X, 0, i(4).view(1, 1), Y), {"reduce": "add"}),
    (aten.scatter.value_reduce, (X, 0, i(3).view(1, 1), 1.0), (X, 0, i(4).view(1, 1), 1.0), {"reduce": "add"}),
    (aten.scatter_add.default, (X, 1, i(2).view(1, 1), Y), (X, 1, i(3).view(1, 1), Y)),
    (aten.scatter_reduce.two, (X, 1, i(2).view(1, 1), Y, "sum"), (X, 1, i(3).view(1, 1), Y, "sum")),
    (aten.nll_loss_forward.default, (SCORES, i(0, 3, -100), None, 1, -100), (SCORES, i(0, 4, 1), None, 1, -100)),
    (
        aten.nll_loss_backward.default,
        (W, SCORES, i(0, 3, -100), None, 1, -100, W),
        (W, SCORES, i(0, -1, 1), None, 1, -100, W),
    ),
    (aten.repeat_interleave.Tensor, (i(2, 0, 3),), (i(2, -1, 3),)),
    (aten.repeat_interleave.Tensor, (i(2, 0, 3),), (i(2, 0, 3),), {"output_size": 5}, {"output_size": 4}),
    (aten.masked_scatter.default, (X, MASK.view(4, 1), Y), (X, ~MASK.view(4, 1), Y[:1])),
    (aten.masked_scatter.default, (X[0], MASK.view(4, 1), Y), (X[0], MASK.view(4, 1), Y[:1])),
    (aten._assert_async.default, (W,), (W * 0,)),
    (aten._assert_async.msg, (W, "words"), (W * 0, "words")),
    (aten.binary_cross_entropy.default, (Y / 5, Y / 5), (Y, Y / 5)),
    (aten.binary_cross_entropy.default, (Y / 5, Y / 5), (Y / 5, Y)),
    (aten.binary_cross_entropy.default, (Y / 5, Y / 5), (Y * torch.nan, Y / 5)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]).removeprefix("aten."))
def test_refused_where_the_op_fails_and_nowhere_else(case):
    op, good, bad, *options = case
    good_options = options[0] if options else {}
    bad_options = options[-1] if options else {}
    op(*good, **good_options)
    refuse_out_of_range(op, *good, **good_options)
    # which on the CPU says it by itself, but for this one, where only a debug build does
    if op is not aten.embedding_dense_backward.default:
        with pytest.raises((IndexError, RuntimeError)):
            op(*bad, **bad_options)
    with pytest.raises(IndexError, match="out of range in aten"):
        refuse_out_of_range(op, *bad, **bad_options)


class Table:
    """What a step may do by index in place, each by an index that may be wrong."""

    def __init__(self, device):
        self.x, self.y = X.to(device, copy=True), Y.to(device)

    def assign(self, index):
        self.x[index] = 1.0

    def add(self, index):
        self.x.index_add_(0, index, self.y)

    def put(self, index):
        self.x.index_put_((index,), self.y, accumulate=True)

    def copy(self, index):
        self.x.index_copy_(0, index, self.y)

    def fill(self, index):
        self.x.index_fill_(0, index, 2.0)

    def scatter(self, index):
        self.x.scatter_add_(0, index[:, None], self.y)

    def embed(self, index):
        torch.nn.functional.embedding(index, self.x)

    def backward(self, index):
        leaf = self.x.requires_grad_()
        leaf.index_select(0, index).sum().backward()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", [name for name in vars(Table) if not name.startswith("_")])
def test_every_op_inside_is_asked(name, device):
    good, bad = (torch.tensor(t, device=device) for t in ([0, 3], [0, 4]))
    with CheckedIndices():
        for index, wrong in ((good, False), (bad, True), (good, False)):
            table = Table(device)
            if wrong:
                with pytest.raises(IndexError, match="out of range in aten"):
                    getattr(table, name)(index)
            else:
                getattr(table, name)(index)
    if device == "cuda":
        torch.cuda.synchronize()


def test_repeats_whose_sum_wraps_around_are_refused():
    """ATen takes their sum for the number of rows, and writes as many as there are."""
    for repeats in (i(2**63 - 1, 2**63 - 1, 9), i(2**40)):
        with pytest.raises(IndexError):
            refuse_out_of_range(aten.repeat_interleave.Tensor, repeats)


def test_every_indexing_op_of_the_rule_table_is_checked():
    tested = {case[0] for case in CASES}
    for op in load_rules():
        tensors = {a.name for a in op._schema.arguments if "Tensor" in str(a.type)}
        if tensors & NAMES and op._schema.name.removeprefix("aten::") not in COMPARED:
            assert op in CHECKED, op
            assert op in tested, op


def fx_graph():
    """table[ids + 1] - table[ids]"""
    graph = Graph()
    table, ids = graph.placeholder("table"), graph.placeholder("ids")
    table.meta["val"], ids.meta["val"] = torch.arange(5), torch.tensor([0, 3])
    behind = graph.call_function(aten.add.Tensor, (ids, 1))
    behind.meta["val"] = torch.tensor([1, 4])
    last = graph.call_function(aten.index.Tensor, (table, [behind]))
    first = graph.call_function(aten.index.Tensor, (table, [ids]))
    graph.output(graph.call_function(aten.sub.Tensor, (last, first)))
    return graph, ids, behind


def test_checks_come_in_front_of_the_op(monkeypatch):
    graph, *_ = fx_graph()
    insert_checks(graph)
    module = GraphModule(torch.nn.Module(), graph)
    assert module(torch.arange(5), torch.tensor([0, 3])).tolist() == [1, 1]
    order = [n.target for n in graph.nodes if n.op == "call_function"]
    assert order.index(refuse_out_of_range) == order.index(aten.index.Tensor) - 1
    assert order.count(refuse_out_of_range) == 2
    with pytest.raises(IndexError, match=r"index out of range in aten\.index\.Tensor"):
        module(torch.arange(5), torch.tensor([4]))


def test_limits_are_what_the_static_sizes_allow():
    graph, ids, behind = fx_graph()
    assert direct_limits(graph) == {ids: 4, behind: 5}


def test_what_is_no_aten_op_passes():
    """A higher-order op is dispatched as it is."""
    assert CheckedIndices().__torch_dispatch__(lambda x: x + 1, (), (2,)) == 3
