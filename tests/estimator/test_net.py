"""The fast reader is the plain one, in any chunk, and has the paper's size."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_features import TOKENS, geometry, paper, signals
from torch.utils._python_dispatch import TorchDispatchMode

from wakesight.core import Signals
from wakesight.errors import RequestError
from wakesight.estimator import reference
from wakesight.estimator.features import READERS, FeatureSpec
from wakesight.estimator.net import LayerNets, Reader, empty_reader


def fitted(spec: FeatureSpec, found: Signals, hidden: int = 16) -> Reader:
    """Random weights with the statistics of a context, as after training."""
    reader = empty_reader(spec, geometry(), hidden, hidden_size=5)
    layers = []
    for layer, nets in enumerate(reader.layers):
        rows = spec.matrix(found, layer, reader.windows[layer]).nan_to_num().expand(nets.heads, -1, -1)
        layers.append(dataclasses.replace(nets, mean=rows.mean(dim=1), std=rows.std(dim=1).clamp_min(1e-6)))
    return dataclasses.replace(reader, layers=tuple(layers))


def test_the_papers_shape_has_the_papers_parameters():
    reader = empty_reader(FeatureSpec(), paper())

    assert [nets.inputs for nets in reader.layers] == [435] + [867] * 15
    assert reader.parameters == 3_448_896


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_the_fast_reader_equals_the_reference(name, held, chunk):
    found = signals(held)
    reader = fitted(FeatureSpec(READERS[name]), found)

    fast, plain = reader.scores(found, chunk=chunk), reference.scores(reader, found)

    for a, b, heads in zip(fast, plain, (2, 3), strict=True):
        assert a.dtype == torch.float32
        assert list(a.shape) == [heads, TOKENS]
        assert float(a.min()) >= 0
        assert float(a.max()) <= 1
        assert float(a.std()) > 1e-4  # weights that ignore the inputs would agree as well
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_folding_keeps_precision_where_a_mean_is_large_against_its_spread():
    found = signals()
    native = [one * 1e-3 + 50.0 for one in found["native"]]
    found = dataclasses.replace(found, streams={**found.streams, "native": native})
    reader = fitted(FeatureSpec(), found)
    double = dataclasses.replace(
        reader,
        layers=tuple(
            LayerNets(*(tensor.double() for tensor in nets.tensors().values()), shared=nets.shared)
            for nets in reader.layers
        ),
    )

    for fast, exact in zip(reader.scores(found), reference.scores(double, found), strict=True):
        torch.testing.assert_close(fast.double(), exact, rtol=0, atol=2e-5)


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out._base is None:
            self.numbers = max(self.numbers, out.numel())
        return out


def test_memory_grows_with_the_chunk_not_with_the_context():
    spec = FeatureSpec()
    noise = torch.Generator().manual_seed(0)
    seen = []
    for tokens in (400, 1600):
        native = [torch.rand(tokens, heads, 3, generator=noise) for heads in geometry().native_heads]
        found = Signals(tokens, 0, (1.0, 1.0), {"native": native})
        reader = empty_reader(spec, geometry())
        with Largest() as largest:
            reader.scores(found, chunk=50)
        seen.append(largest.numbers)
        result = 3 * tokens  # scores of the larger layer

    assert seen[0] == 50 * 3 * 64  # a chunk of the hidden layer; all heads' inputs apart would be more
    assert seen[1] <= max(seen[0], result)


def test_a_weight_of_another_shape_is_refused_and_so_are_signals_of_another_model():
    found = signals()
    reader = empty_reader(FeatureSpec(), geometry())
    nets = reader.layers[0]

    with pytest.raises(RequestError, match="second_bias has the shape"):
        dataclasses.replace(nets, second_bias=torch.zeros(7))
    other = Signals(TOKENS, 0, (1.0, 1.0), {**found.streams, "native": [x[:, :1] for x in found["native"]]})
    with pytest.raises(RequestError, match=r"attention layer 0 give 12 inputs.*fitted on 24"):
        reader.scores(other)
    with pytest.raises(RequestError, match="chunk=0"):
        reader.scores(found, chunk=0)
