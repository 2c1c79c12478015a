import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import reference

from hbf.analysis import memory_study
from hbf.analysis.memory import ENERGIES, energy, retrieve
from hbf.analysis.report.memory_report import draw, table
from hbf.errors import UserError
from hbf.ops.basis import RadialBasis

RNG = np.random.default_rng(0)
STORED, POINTS = RNG.normal(size=(7, 4)), RNG.normal(size=(30, 4)) * 2
FULL = RNG.normal(size=(3, 4))  # W has fewer rows than columns, so M = WᵀW is singular


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def basis(kernel, metric='identity'):
  weights = {'identity': None, 'diagonal': jnp.asarray([1.0, 0.0, 2.0, 0.5]), 'full': jnp.asarray(FULL)}[metric]
  return RadialBasis(kernel, 0.8, metric=metric, weights=weights)


METRICS = ['identity', 'diagonal', 'full']
# The fast tests have every kernel and every metric once.
UPDATES = [
  pytest.param(kernel, metric, marks=() if kernel == 'gaussian' or metric == 'identity' else pytest.mark.slow)
  for kernel in ENERGIES
  for metric in METRICS
]


@pytest.mark.parametrize(('kernel', 'metric'), UPDATES)
def test_an_update_never_raises_the_energy(kernel, metric):
  stored, unit = jnp.asarray(STORED), basis(kernel, metric)

  @jax.jit
  def updated(points):
    return retrieve(points, stored, unit), energy(points, stored, unit)

  points, energies = jnp.asarray(POINTS), []
  eight = retrieve(points, stored, unit, 8)
  for _ in range(9):
    last, (points, found) = points, updated(points)
    energies.append(found)
  np.testing.assert_allclose(last, eight)
  assert (np.diff(energies, axis=0) <= 1e-13).all()
  assert (energies[8] < energies[0] - 1e-3).all()


@pytest.mark.parametrize('kernel', ENERGIES)
def test_an_update_is_a_step_down_the_gradient(kernel):
  """An update is x' = x − σ² ∇E / ΣK if the energy E is −Σ g. If E is −log Σ g, its gradient is divided by Σ g."""
  points, stored = jnp.asarray(POINTS), jnp.asarray(STORED)
  s = reference.squared_distances(POINTS, STORED) / (2 * 0.8**2)
  weights = np.vectorize(reference.KERNELS[kernel])(s).sum(axis=1, keepdims=True)
  factor = {
    'gaussian': np.exp(-s).sum(axis=1, keepdims=True),
    'laplacian': ((1 + np.sqrt(2 * s)) * np.exp(-np.sqrt(2 * s))).sum(axis=1, keepdims=True),
  }.get(kernel, 1.0)
  slopes = jax.jit(jax.vmap(jax.grad(lambda x: energy(x[None], stored, basis(kernel))[0])))(points)
  np.testing.assert_allclose(retrieve(points, stored, basis(kernel)), points - 0.8**2 * factor * slopes / weights)


def test_patterns_of_equal_norm_make_it_a_modern_hopfield_network():
  """The update is X softmax(β Xᵀ ξ) with β = 1/σ² (Ramsauer et al. 2021, eq. 3)."""
  stored = STORED / np.linalg.norm(STORED, axis=1, keepdims=True)
  logits = POINTS @ stored.T / 0.8**2
  weights = np.exp(logits - logits.max(axis=1, keepdims=True))
  expected = weights @ stored / weights.sum(axis=1, keepdims=True)
  np.testing.assert_allclose(retrieve(jnp.asarray(POINTS), jnp.asarray(stored), basis('gaussian')), expected)


def test_a_metric_of_the_known_coordinates_completes_a_pattern():
  known = jnp.asarray([1.0, 1.0, 0.0, 0.0])
  sharp = RadialBasis('gaussian', 0.05, metric='diagonal', weights=known)
  damaged = jnp.asarray(STORED) * known + 100.0 * (1 - known)
  np.testing.assert_allclose(retrieve(damaged, jnp.asarray(STORED), sharp), STORED, atol=1e-3)


def test_other_kernels_and_normalizations_are_refused():
  points = jnp.asarray(POINTS)
  with pytest.raises(
    UserError, match='a memory has no kernel gaussian with normalization layer: use normalization sum'
  ):
    retrieve(points, points, RadialBasis('gaussian', 1.0, normalization='layer'))
  with pytest.raises(UserError, match='a memory has no kernel ball_relu'):
    energy(points, points, RadialBasis('ball_relu', 1.0, normalization='none'))


def test_the_study_measures_every_memory_and_draws_it(monkeypatch, tmp_path):
  for name, value in {'STEPS': 2, 'QUERIES': 8, 'SIGMAS': np.array([0.5, 2.0]), 'MOST': 8}.items():
    monkeypatch.setattr(memory_study, name, value)
  with jax.enable_x64(False):
    images = {split: RNG.normal(size=(40, 48)).astype(np.float32) for split in ('train', 'test')}
    rows = memory_study.complete(images, (4, 4, 3), 20, seed=0)
    found = memory_study.capacity(8, 'norm 1', memory_study.hyperbf_of_all, seed=0)
  assert found == 8
  assert len(rows) == 3 * len({*memory_study.MEMORIES, memory_study.AUTOENCODER})
  exact = [row for row in rows if row['memory'].endswith('known pixels') and row['damage'] == 'lower half hidden']
  assert [row['retrieved'] for row in exact] == [100.0, 100.0]
  capacities = [{'dimensions': 8, 'patterns': 'norm 1', 'memory': 'HyperBF', 'seed': 0, 'capacity': found}]
  draw({'completions': rows, 'capacities': capacities}, tmp_path / 'memory.png')
  lines = table({'completions': rows}).splitlines()
  assert len(lines) == 2 + len(rows) and 'retrieved of 20, %' in lines[0]
