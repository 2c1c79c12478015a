"""Tests that the fused kernels equal the plain implementation, interpreted on a CPU, and lower for TPUs."""

import contextlib
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from ops import reference
from ops.keywords import hyperbf, hyperbf_plain
from rich.console import Console

from hbf.errors import UserError
from hbf.ops.distances import distances
from hbf.ops.fast import pallas
from hbf.ops.fast.sums import kernel_sums
from hbf.tasks.images import ImageTask
from hbf.training import experiment
from hbf.training.loop import train
from hbf.training.sharding import make_mesh
from hbf.training.units import EXAMPLES

N, A, D, V = 37, 11, 6, 5


@pytest.fixture
def small_blocks(monkeypatch):
  """Make the blocks so small that they divide neither the points nor the centers."""
  monkeypatch.setattr(pallas, '_POINTS', 16)
  monkeypatch.setattr(pallas, '_CENTERS', 4)


def make(lead=(), dtype='float32', seed=0):
  rng = np.random.default_rng(seed)
  shapes = {'points': (N, D), 'centers': (A, D), 'coefficients': (A, V)}
  arrays = {name: jnp.asarray(rng.normal(size=(*lead, *shape)), dtype) for name, shape in shapes.items()}
  arrays['sigma'] = jnp.asarray(rng.uniform(0.8, 2, size=(*lead, 1, A)), jnp.float32)
  return arrays | {'weights': jnp.asarray(rng.uniform(0.5, 1.5, size=(*lead, D)), jnp.float32)}


# The kernels, and only the first in the fast tests.
FIRST_KERNEL = ['gaussian', *(pytest.param(k, marks=pytest.mark.slow) for k in reference.KERNELS if k != 'gaussian')]


def assert_equal(implementation, expected_form, arrays, tolerance, expected_arrays):
  """Assert that both functions give the same sum of sines of all outputs, and the same gradient."""

  def run(implementation, arrays):
    def total(z):
      return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in jax.tree.leaves(implementation(**z)))

    return jax.jit(jax.value_and_grad(total))(arrays)

  value, gradient = run(implementation, arrays)
  expected, expected_gradient = run(expected_form, expected_arrays)
  np.testing.assert_allclose(value, expected, rtol=tolerance, atol=N * tolerance)
  for name, z in gradient.items():
    assert z.dtype == arrays[name].dtype
    wanted = np.asarray(expected_gradient[name], np.float64)
    np.testing.assert_allclose(
      np.asarray(z, np.float64), wanted, atol=tolerance * (np.abs(wanted).max() + 1e-3), err_msg=name
    )


@pytest.mark.parametrize('kernel', FIRST_KERNEL)
def test_all_sums_equal_those_in_blocks(kernel, small_blocks):
  """The sums mass, power and log_peak are compared too."""

  def sums(implementation, points, centers, coefficients, sigma, weights):
    return implementation(distances(points, centers, 'diagonal', weights, 0.5 / sigma**2), coefficients, kernel)

  arrays = make(lead=(2, 3))
  assert_equal(
    *(functools.partial(sums, implementation) for implementation in (pallas.pallas_sums, kernel_sums)),
    arrays,
    1e-5,
    arrays,
  )


EACH = [
  (*names, 'float32', 1e-4) for names in zip(reference.KERNELS, reversed(reference.NORMALIZATIONS), strict=True)
]
EACH += [('gaussian', 'layer', 'bfloat16', 0.05), ('inverse_multiquadric', 'none', 'bfloat16', 0.05)]


@pytest.mark.parametrize(('kernel', 'normalization', 'dtype', 'tolerance'), EACH)
def test_every_kernel_and_normalization_equals_the_plain_form_in_float32(kernel, normalization, dtype, tolerance):
  unit = {'kernel': kernel, 'normalization': normalization, 'metric': 'diagonal'}
  forms = (functools.partial(hyperbf, implementation='pallas', **unit), functools.partial(hyperbf_plain, **unit))
  arrays = make((2,), dtype, seed=2)
  assert_equal(*forms, arrays, tolerance, {name: z.astype(jnp.float32) for name, z in arrays.items()})


def test_a_free_metric_that_is_no_distance_spoils_no_padding(small_blocks):
  """Responses of metric bilinear may be huge. Those of padding points must not become NaN."""
  arrays = make(seed=3)
  arrays['weights'] = -40 * jnp.eye(D)
  unit = {'kernel': 'gaussian', 'normalization': 'layer', 'metric': 'bilinear'}
  gradient = jax.jit(jax.grad(lambda z: hyperbf(**z, implementation='pallas', **unit).sum()))(arrays)
  assert all(jnp.isfinite(z).all() for z in gradient.values())


@pytest.mark.parametrize('kernel', FIRST_KERNEL)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('d', [64, 768])
def test_forward_and_gradient_lower_without_the_hardware(d, dtype, kernel):
  shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((4096, d), (1536, d), (1536, 768))]

  def loss(*z):
    return (
      hyperbf(*z, kernel=kernel, sigma=2.0, normalization='layer', implementation='pallas').astype(jnp.float32).sum()
    )

  lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*shapes).lower(lowering_platforms=('tpu',))
  assert lowered.as_text().count('tpu_custom_call') == 3  # the sums, and both kernels of the gradient


REFUSED = 'implementation pallas is for TPUs, and the platform is gpu: use implementation xla'


def test_a_gpu_is_refused(monkeypatch):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  with pytest.raises(UserError, match=REFUSED):
    hyperbf(**make(), kernel='gaussian', normalization='layer', metric='diagonal', implementation='pallas')


@pytest.mark.parametrize('platform', ['gpu', 'tpu'])
def test_devices_of_a_mesh_count_not_those_of_this_machine(platform, monkeypatch):
  """A program for absent TPUs may be traced on a machine with a GPU, and a program for absent GPUs on any machine."""
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu' if platform == 'tpu' else 'cpu')
  device = jax.sharding.AbstractDevice(device_kind='', num_cores=1, platform=platform)
  unit = {'kernel': 'gaussian', 'normalization': 'layer', 'metric': 'diagonal', 'implementation': 'pallas'}
  refused = pytest.raises(UserError, match=REFUSED) if platform == 'gpu' else contextlib.nullcontext()
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ('data',), abstract_device=device)), refused:
    jax.jit(lambda z: hyperbf(**z, **unit)).trace(make())


def test_a_run_on_a_gpu_is_refused_before_its_data_are_read(toy, monkeypatch):
  gpus = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform='gpu')]))
  monkeypatch.setattr(experiment, 'make_mesh', lambda *_: gpus)
  monkeypatch.setattr(ImageTask, 'open', None)
  with pytest.raises(UserError, match=REFUSED):
    experiment.prepare(toy('model=hyperbf', **{'model.stage2.implementation': 'pallas'}))


def sharded_step(mesh):
  """Return a function for a loss with gradients, its arrays, and the arrays with the points sharded on the mesh."""
  rows, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ('data', None))
  arrays = make() | {'points': jax.random.normal(jax.random.key(1), (64, D))}
  placed = {name: jax.device_put(z, rows if name == 'points' else whole) for name, z in arrays.items()}
  unit = {'kernel': 'gaussian', 'normalization': 'layer', 'metric': 'diagonal', 'implementation': 'pallas'}
  step = jax.jit(jax.value_and_grad(lambda z: jnp.sum(jnp.sin(hyperbf(**z, **unit)))))
  return step, arrays, placed


def test_points_on_several_devices_stay_there(small_blocks):
  """Each device computes the sums for its points. The gradients of shared arrays are added over the devices."""
  mesh = make_mesh(jax.devices())
  step, arrays, placed = sharded_step(mesh)
  with jax.set_mesh(mesh):
    compiled = step.lower(placed).compile()
  assert 'all-gather' not in compiled.as_text()
  (value, gradient), (expected, expected_gradient) = compiled(placed), step(arrays)
  np.testing.assert_allclose(value, expected, rtol=1e-4)
  for name, z in gradient.items():
    np.testing.assert_allclose(z, expected_gradient[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_lowers_for_several_tpus():
  """Mosaic kernels cannot be partitioned automatically."""
  mesh = make_mesh(jax.devices())
  step, _, placed = sharded_step(mesh)
  with jax.set_mesh(mesh):
    text = step.trace(placed).lower(lowering_platforms=('tpu',)).as_text()
  assert text.count('tpu_custom_call') == 3


@pytest.mark.slow
def test_training_and_evaluation_divide_the_points(toy, tmp_path, monkeypatch):
  """Each of the eight devices gets an eighth of the points, in all programs of a run."""
  seen, sums = [], pallas._sums

  def record(kernel, distances, coefficients):
    seen.append(distances.points.shape[-2])
    return sums(kernel, distances, coefficients)

  monkeypatch.setattr(pallas, '_sums', record)
  sizes = {'train.batch_size': 64, 'evaluate.batch_size': 128, 'train.epochs': 0.1, 'log.units': True}
  train(
    toy('model=hyperbf', **sizes, **{'model.stage2.implementation': 'pallas'}), tmp_path / 'run', Console(quiet=True)
  )
  tokens, batches = 5, (64, 128, EXAMPLES)  # training, evaluation, the health of the units
  assert set(seen) == {tokens, *(tokens * b // 8 for b in batches)}  # an image alone shows what parameters there are
