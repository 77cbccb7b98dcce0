"""Products of matrices: MatMul and Gemm."""

from __future__ import annotations

import math

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents, add_all
from edgetrain.compiler.rules.shaping import (
    reshape_from,
    scaled,
    sum_to,
    swap_last,
)


def matmul_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = a @ b, batched and broadcast as in numpy: da = dy @ b^T, db = a^T @ dy.

    A vector stands for a matrix of one row (a) or one column (b). When b has no batch
    axes, those of a are folded into its rows, so that db is a single matrix product.
    """
    a, b = node.inputs
    shape_a, shape_b = g.shape(a), g.shape(b)
    rows = shape_a if len(shape_a) > 1 else (1, *shape_a)
    columns = shape_b if len(shape_b) > 1 else (*shape_b, 1)
    batch = np.broadcast_shapes(rows[:-2], columns[:-2])
    n, k, m = rows[-2], rows[-1], columns[-1]
    dy = reshape_from(g, dy, g.shape(node.output), (*batch, n, m))
    a = reshape_from(g, a, shape_a, rows)
    b = reshape_from(g, b, shape_b, columns)
    da = g("MatMul", dy, swap_last(g, b, len(columns)))
    da = sum_to(g, da, (*batch, n, k), rows)
    if len(columns) == 2:
        flat = math.prod(batch) * n
        a = reshape_from(g, a, rows, (flat, k))
        dy = reshape_from(g, dy, (*batch, n, m), (flat, m))
        db = g("MatMul", swap_last(g, a, 2), dy)
    else:
        db = g("MatMul", swap_last(g, a, len(rows)), dy)
        db = sum_to(g, db, (*batch, k, m), columns)
    return reshape_from(g, da, rows, shape_a), reshape_from(g, db, columns, shape_b)


def matmul_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """ty = ta @ b + a @ tb."""
    (a, b), (ta, tb) = node.inputs, tangents
    return add_all(g, ta and g("MatMul", ta, b), tb and g("MatMul", a, tb))


def gemm_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = alpha * op(a) @ op(b) + beta * c, where op may transpose."""
    a, b = node.inputs[:2]
    trans_a, trans_b = int(node.get("transA", 0)), int(node.get("transB", 0))
    alpha = float(node.get("alpha", 1.0))
    if trans_a:
        da = g("Gemm", b, dy, alpha=alpha, transA=trans_b, transB=1)
    else:
        da = g("Gemm", dy, b, alpha=alpha, transA=0, transB=1 - trans_b)
    if trans_b:
        db = g("Gemm", dy, a, alpha=alpha, transA=1, transB=trans_a)
    else:
        db = g("Gemm", a, dy, alpha=alpha, transA=1 - trans_a, transB=0)
    c = node.input(2)
    if not c:
        return da, db
    dc = sum_to(g, dy, g.shape(node.output), g.shape(c))
    return da, db, scaled(g, dc, float(node.get("beta", 1.0)), node.output)


def gemm_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    a, b = node.inputs[:2]
    ta, tb, tc = (*tangents, None)[:3]
    attributes = {k: v for k, v in node.attributes.items() if k != "beta"}
    product = add_all(
        g,
        ta and g("Gemm", ta, b, **attributes),
        tb and g("Gemm", a, tb, **attributes),
    )
    if tc is None:
        return product
    tc = scaled(g, tc, float(node.get("beta", 1.0)), node.output)
    if product is None:
        return g("Expand", tc, g.ints(*g.shape(node.output)))
    return g("Add", product, tc)
