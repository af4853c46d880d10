"""The tile model fitted to timed batches: known coefficients come back, noise and outliers are borne."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_tiles import ADA, KNOWN, REF

from headgate.core.errors import InputError
from headgate.cost.fit.tiles import Timed, features, fit_tiles
from headgate.cost.laws.tiles import TileTerms, batch_seconds
from headgate.cost.model import Chunk

UNKNOWN = ("constant", "per_column", "per_token", "per_vector_pair", "per_pair")


def probes(terms: TileTerms, count: int, noise: float = 0.0, seed: int = 0) -> list[Timed]:
    """Batches of all kinds, timed by the model: decodes alone, chunks at several starts, mixtures."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        decodes = 0 if number % 3 == 1 else int(draw.integers(1, 257))
        positions = tuple(int(x) for x in draw.integers(128, 8192, decodes))
        chunks = tuple(
            Chunk(int(draw.integers(0, 4000)), int(draw.integers(1, 900)))
            for _ in range(0 if number % 3 == 0 else draw.integers(1, 4))
        )
        seconds = batch_seconds(terms, chunks, positions) * (1 + noise * draw.standard_normal())
        found.append(Timed(chunks, positions, seconds))
    return found


def test_plain_least_squares_on_the_known_batches():
    batches = [
        Timed(tuple(chunks), tuple(positions), answer[-1] * 1e-3)
        for terms, chunks, positions, answer in KNOWN
        if terms is REF
    ]
    seconds = np.array([batch.seconds for batch in batches])
    errors = {}
    for columns in (64, 128, 256):
        rows = features(batches, replace(REF, tile=(128, columns, 32)), 1.0)[:, 1:]  # no constant
        found = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
        errors[columns] = float(np.sqrt(np.mean((rows @ found / seconds - 1) ** 2)))
        if columns == 128:
            known = (10.415616e-3, 5e-6, 4e-9, 6e-9)
            assert found == pytest.approx(known, rel=1e-7)
        if columns == 64:
            assert found[1] < 0  # the price of a token comes out negative
    assert errors[128] < 1e-9
    assert (errors[64], errors[256]) == pytest.approx((2.1e-3, 4.6e-2), rel=0.03)


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_known_coefficients_come_back(columns):
    true = replace(ADA, tile=(128, columns, 32), floor=1.45 * ADA.per_column)
    fit = fit_tiles(probes(true, 120), replace(REF, per_column=1.0))
    assert fit.terms.tile[1] == columns
    for name in (*UNKNOWN, "floor"):
        assert getattr(fit.terms, name) == pytest.approx(getattr(true, name), rel=1e-6), name
    assert fit.good
    assert fit.p95 < 1e-6


def test_without_a_floor_or_constant():
    fit = fit_tiles(probes(REF, 80), REF, constant=False)
    assert fit.terms.constant == 0
    assert fit.terms.floor == 0
    assert fit.terms.per_column == pytest.approx(REF.per_column, rel=1e-6)


def test_noise_and_outliers():
    batches = probes(ADA, 300, noise=0.02, seed=3)
    spoiled = [
        batch._replace(seconds=5 * batch.seconds) if i % 61 == 7 else batch for i, batch in enumerate(batches)
    ]
    fit = fit_tiles(spoiled, REF)
    assert 5 <= fit.dropped <= 15
    assert fit.terms.tile[1] == 128
    each, true = (terms.per_column / 128 + terms.per_token for terms in (fit.terms, ADA))
    assert each == pytest.approx(true, rel=0.02)  # the sum is sharp, its parts hide behind the noise
    assert fit.terms.floor == pytest.approx(ADA.floor, rel=0.1)
    assert fit.median < 0.03
    assert fit.good


def test_a_model_that_does_not_hold_is_not_good():
    draw = np.random.default_rng(1)
    batches = [batch._replace(seconds=float(draw.lognormal(-3, 1))) for batch in probes(ADA, 100)]
    assert not fit_tiles(batches, REF).good


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda batches: batches[:19], "19 timed batches; a fit needs at least 20"),
        (lambda batches: [*batches, batches[0]._replace(seconds=0.0)], "took no time"),
        (lambda batches: [*batches, Timed((), (), 1.0)], "is empty; leave it out"),
    ],
)
def test_bad_input(spoil, says):
    with pytest.raises(InputError, match=says):
        fit_tiles(spoil(probes(REF, 24)), REF)
