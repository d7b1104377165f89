"""Ridge from sums against numpy on the rows, and the choice of its penalty."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wakesight.errors import RequestError
from wakesight.learning import ridge

ROWS, WIDTH, HEADS = 400, 7, 3


def drawn(noise_level: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=noise) * torch.logspace(-2, 3, WIDTH) + 100
    weights = torch.randn(WIDTH, HEADS, generator=noise) / torch.logspace(-2, 3, WIDTH)[:, None]
    y = (x - 100) @ weights + 5 + noise_level * torch.randn(ROWS, HEADS, generator=noise)
    return x, y.T.contiguous()


def solved(x: np.ndarray, y: np.ndarray, lam: float) -> tuple[np.ndarray, float]:
    """Weights on raw inputs and intercept, by an augmented least-squares problem on standardised inputs."""
    mean, std = x.mean(axis=0), x.std(axis=0)
    z = (x - mean) / std
    a = np.vstack(
        [np.hstack([z, np.ones((len(z), 1))]), np.hstack([np.sqrt(lam) * np.eye(WIDTH), np.zeros((WIDTH, 1))])]
    )
    found = np.linalg.lstsq(a, np.concatenate([y, np.zeros(WIDTH)]), rcond=None)[0]
    weights = found[:-1] / std
    return weights, found[-1] - mean @ weights


@pytest.mark.parametrize("noise_level", [0.01, 5.0, 50.0])
def test_it_is_the_least_squares_solution_with_the_best_penalty_of_each_head(noise_level):
    x, y = drawn(noise_level)
    rows, held = torch.arange(ROWS - 40), torch.arange(ROWS - 40, ROWS)
    shift = x.double().mean(dim=0)
    line = ridge.fit(ridge.sums(x, y, rows, shift), ridge.sums(x, y, held, shift), shift)

    a, b = x.double().numpy(), y.double().numpy()
    for head in range(HEADS):
        errors = []
        for lam in ridge.LAMBDAS:
            weights, bias = solved(a[:-40], b[head, :-40], lam)
            errors.append(np.square(a[-40:] @ weights + bias - b[head, -40:]).mean())
        best = ridge.LAMBDAS[int(np.argmin(errors))]
        weights, bias = solved(a, b[head], best)
        assert line.penalty[head] == best
        assert line.weights[:, head].numpy() == pytest.approx(weights, rel=1e-6, abs=1e-9)
        assert line(x)[head].numpy() == pytest.approx(a @ weights + bias, rel=1e-6, abs=1e-6)


def test_sums_of_parts_are_sums_of_all():
    x, y = drawn()
    shift = torch.zeros(WIDTH, dtype=torch.float64)
    whole = ridge.sums(x, y, torch.arange(ROWS), shift)
    parts = ridge.sums(x, y, torch.arange(0, ROWS, 2), shift) + ridge.sums(x, y, torch.arange(1, ROWS, 2), shift)

    for name in ("count", "x", "y", "xx", "xy", "yy"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))


def test_a_column_that_never_changes_does_no_harm():
    x, y = drawn()
    x[:, 2] = 7.0
    shift = x.double().mean(dim=0)
    line = ridge.fit(ridge.sums(x, y, torch.arange(300), shift), ridge.sums(x, y, torch.arange(300, 400), shift), shift)

    assert bool(torch.isfinite(line(x)).all())
    assert float(line.weights[2].abs().max()) < 1e-3


@pytest.mark.parametrize(("documents", "count"), [(1, 0), (2, 1), (10, 1), (57, 5)])
def test_a_tenth_of_the_documents_is_held_out_whatever_their_order(documents, count):
    ids = [f"doc-{number}" for number in range(documents)]
    flags = dict(zip(ids, ridge.held_out_tenth(ids), strict=True))

    assert sum(flags.values()) == count
    assert flags == dict(zip(ids[::-1], ridge.held_out_tenth(ids[::-1]), strict=True))


def test_too_few_rows_are_refused():
    x, y = drawn()
    shift = x.double().mean(dim=0)
    one, none = (ridge.sums(x, y, torch.arange(count), shift) for count in (10, 0))

    with pytest.raises(RequestError, match="held-out documents"):
        ridge.fit(one, none, shift)


def test_every_fold_holds_out_a_tenth_of_its_training_documents():
    from wakesight.learning.dataset import Drawn, Rows
    from wakesight.learning.fit import _groups

    sizes = {"big": 30, "pair": 2, "one": 1, "mid": 17}
    drawn = tuple(Drawn(f"{corpus}-{n}", corpus, 5) for corpus, size in sizes.items() for n in range(size))
    groups = _groups(Rows(None, drawn, {}), sorted(sizes), 0)
    for fold, size in sizes.items():
        held = [corpus for corpus, folds in groups.values() if fold in folds]
        assert len(held) == (50 - size) // 10
        assert fold not in held
    alone = _groups(Rows(None, drawn, {}), [], 0)
    assert sum("" in folds for _, folds in alone.values()) == 5
