"""A matrix as a tensor train: a chain of small cores that it is the product of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Core = tuple[int, int, int, int]  # rank before, rows, columns, rank after
Part = TypeVar("Part")

CORES: Final = 4
PREFIX: Final = "tt/"  # begins the names of cores and of what is computed from them
GAIN: Final = 2  # times fewer numbers in the cores than in the weight, or it does not pay


@dataclass(frozen=True, slots=True)
class TensorTrain:
    """What cores a weight is made of.

    With both extents of the weight split into d factors, R = m_1 ... m_d and
    C = n_1 ... n_d, its element is a product of d matrices::

        W[(i_1 ... i_d), (j_1 ... j_d)] = G_1[i_1, j_1] G_2[i_2, j_2] ... G_d[i_d, j_d]

    Core k holds those of all (i_k, j_k), as [r_{k-1}, m_k, n_k, r_k]; r_0 = r_d = 1.

    Attributes:
        weight: its name.
        rows, columns: the factors of its extents, as many of one as of the other.
        ranks: r_0 ... r_d.

    Source: Oseledets, Tensor-train decomposition, SIAM J. Sci. Comput. 33(5), 2011, for
    matrices as in Novikov et al., Tensorizing neural networks (arXiv:1509.06569).
    """

    weight: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(
        cls, weight: str, rows: Sequence[int], columns: Sequence[int], rank: int
    ) -> TensorTrain:
        """No rank above `rank`, nor above what a matrix of that shape can have."""
        pairs = [(m, n) for m, n in zip(rows, columns, strict=True) if m * n > 1]
        pairs = pairs or [(1, 1)]
        sizes = [m * n for m, n in pairs]
        inner = (
            min(rank, math.prod(sizes[:k]), math.prod(sizes[k:]))
            for k in range(1, len(sizes))
        )
        return cls(
            weight, tuple(m for m, _ in pairs), tuple(n for _, n in pairs), (1, *inner, 1)
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return math.prod(self.rows), math.prod(self.columns)

    @property
    def cores(self) -> dict[str, Core]:
        """Shape of each core, by its name, in order."""
        shapes = zip(self.ranks, self.rows, self.columns, self.ranks[1:], strict=False)
        return {f"{PREFIX}{self.weight}/{k}": shape for k, shape in enumerate(shapes)}

    @property
    def elements(self) -> int:
        """Of all cores."""
        return sum(map(math.prod, self.cores.values()))

    @property
    def pays(self) -> bool:
        return GAIN * self.elements <= math.prod(self.shape)


def fit(weight: str, shape: tuple[int, int], rank: int) -> TensorTrain:
    """The train for a weight of that shape, whether it pays or not.

    Factors are spread evenly, the smallest last: 784 x 128 is (4, 7, 7, 4) x (4, 4, 4, 2).
    Where an extent has a large prime factor this needs many numbers; then rows are
    split with the largest factor first and columns with it last, which for two primes
    leaves the product of two matrices.
    """
    rows, columns = (balanced(extent) for extent in shape)
    even = TensorTrain.of(weight, (*rows[1:], rows[0]), (*columns[1:], columns[0]), rank)
    return even if even.pays else TensorTrain.of(weight, rows[::-1], columns, rank)


def balanced(extent: int, count: int = CORES) -> tuple[int, ...]:
    """So many factors of the least sum, ascending; 1 is one."""
    return min(_splits(extent, count, 1), key=lambda factors: (sum(factors), factors))


def _splits(extent: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (extent,)
        return
    factor = least
    while factor**count <= extent:
        if extent % factor == 0:
            for rest in _splits(extent // factor, count - 1, factor):
                yield (factor, *rest)
        factor += 1


def contract(parts: Sequence[Part], join: Callable[[Part, Part], Part]) -> Part:
    """Join neighbours until one is left, by halves: the last product is the only large one.

    It takes R C r multiply-adds for an R x C weight, the others about sqrt(R C) r^2.
    """
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return join(contract(parts[:middle], join), contract(parts[middle:], join))


def merge(train: TensorTrain, cores: Sequence[Array]) -> npt.NDArray[np.float32]:
    """The weight that cores are worth; summed in double precision."""
    whole = contract([np.asarray(core, np.float64) for core in cores], _join)
    return whole.reshape(train.shape).astype(np.float32)


def _join(left: Array, right: Array) -> Array:
    """[p, m, n, q] and [q, k, l, s] to [p, m k, n l, s]."""
    (p, m, n, _), (_, k, l, s) = left.shape, right.shape  # noqa: E741 - as in the formula
    product = np.tensordot(left, right, axes=1).transpose(0, 1, 3, 2, 4, 5)
    return product.reshape(p, m * k, n * l, s)


def dense(
    weights: Mapping[str, npt.NDArray[np.float32]], trains: Sequence[TensorTrain]
) -> dict[str, npt.NDArray[np.float32]]:
    """The weights as the file holds them, each train's cores merged into its own."""
    values = dict(weights)
    for train in trains:
        values[train.weight] = merge(train, [values.pop(name) for name in train.cores])
    return values


def decompose(
    matrix: npt.NDArray[np.float32], train: TensorTrain
) -> list[npt.NDArray[np.float32]]:
    """The cores of a train that is close to a matrix; exact where the ranks allow it.

    TT-SVD: singular values are cut off from one core to the next, so that the error is at
    most sqrt(d - 1) times that of the best train of these ranks. In the end all cores get
    the same root mean square, as those drawn at random have, so that one learning rate
    suits them all.
    """
    count = len(train.rows)
    pairs = [axis for k in range(count) for axis in (k, count + k)]
    rest = matrix.astype(np.float64).reshape(*train.rows, *train.columns).transpose(pairs)
    cores: list[npt.NDArray[np.float64]] = []
    *shapes, last = train.cores.values()
    for shape in shapes:
        rank = shape[3]
        left, values, right = np.linalg.svd(
            rest.reshape(math.prod(shape[:3]), -1), full_matrices=False
        )
        cores.append(left[:, :rank].reshape(shape))
        rest = values[:rank, None] * right[:rank]
    return _levelled([*cores, rest.reshape(last)])


def _levelled(cores: Sequence[npt.NDArray[np.float64]]) -> list[npt.NDArray[np.float32]]:
    sizes = [float(np.sqrt(np.mean(np.square(core)))) for core in cores]
    level = math.prod(size ** (1 / len(cores)) for size in sizes)
    scales = [level / size if level else 1.0 for size in sizes]
    return [(core * s).astype(np.float32) for core, s in zip(cores, scales, strict=True)]


def draw(
    train: TensorTrain, deviation: float, generator: np.random.Generator
) -> list[npt.NDArray[np.float32]]:
    """Random cores whose weight's elements have this standard deviation.

    Such an element sums up r_1 ... r_{d-1} products of d numbers.
    """
    paths = math.prod(train.ranks)
    spread = (deviation**2 / paths) ** (1 / (2 * len(train.rows)))
    return [
        generator.normal(0, spread, shape).astype(np.float32)
        for shape in train.cores.values()
    ]
