"""Tests that a run computes the same on all meshes as on one device."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from toy_runs import ONE

from configs import cifar10
from hbf.config.resolve import resolve
from hbf.errors import UserError
from hbf.hardware.hlo import count_traffic
from hbf.models.build import abstract_params, build_model
from hbf.nn.baselines.mlp import MLP
from hbf.nn.context import Context
from hbf.nn.hyperbf import HyperBFAttention, HyperBFCenters
from hbf.nn.positional import PositionalHyperBF
from hbf.training.experiment import prepare
from hbf.training.programs import jit_steps, make_init
from hbf.training.sharding import AXES, batch_sharding, check_tensor, make_mesh, parameter_spec, state_sharding

STEPS = 20


@dataclasses.dataclass(frozen=True)
class Run:
  """The first steps of a run: its experiment, the state before the steps, and the loss of each step."""

  experiment: object
  state: object
  losses: np.ndarray


@pytest.fixture(scope='module')
def run(toy):
  def first_steps(model, options, start=None, **sizes):
    """Take the first steps from `start` or a fresh state, on a mesh of these sizes. Without sizes, use one device."""
    changes = {'model.width': 32, 'model.heads': 4, 'train.batch_size': 64, 'model.dropout': 0.0} | options
    sizes = {f'mesh.{axis}': size for axis, size in sizes.items()}
    made = prepare(toy(f'model={model}', **changes, **sizes), devices=jax.devices() if sizes else ONE)
    data = made.inputs['train']
    with jax.set_mesh(made.mesh):
      first, *stacks = data.stacks(made.order, 0, [1] * STEPS, 1)
      init = make_init(made, made.objective)
      shardings = state_sharding(made.mesh, jax.eval_shape(init, data.resident, first, {}))
      if start is None:
        begin = jax.jit(init, out_shardings=shardings)(data.resident, first, {})
      else:
        begin = jax.device_put(start, shardings)
      steps = jit_steps(made, made.objective, made.mesh, begin)
      state, totals = jax.tree.map(jnp.copy, begin), [0.0]  # a step takes its state's memory
      for stack in (first, *stacks):
        state, _ = steps(state, data.resident, stack, np.int32(1))
        totals.append(float(state.totals.loss))
    return Run(made, begin, np.diff(totals))

  return first_steps


@pytest.fixture(scope='module')
def hyperbf(run):
  return run('hyperbf', {'model.stage2.centers': 24})


MESHES = [
  pytest.param({'data': 8}, id='data', marks=pytest.mark.slow),
  pytest.param({'data': 1, 'fsdp': 8}, id='fsdp', marks=pytest.mark.slow),
  pytest.param({'data': 2, 'tensor': 4}, id='tensor', marks=pytest.mark.slow),
  pytest.param({'data': 2, 'fsdp': 2, 'tensor': 2}, id='mixed'),
]


@pytest.mark.parametrize('sizes', MESHES)
def test_losses_are_those_of_one_device(run, hyperbf, sizes):
  """The losses agree up to float32 rounding. Sums have other parts, and twenty steps of Adam enlarge the rounding."""
  start = None if len(sizes) == 3 else jax.device_get(hyperbf.state)
  found = run('hyperbf', {'model.stage2.centers': 24}, start, **sizes)
  np.testing.assert_allclose(found.losses, hyperbf.losses, rtol=1e-4)
  if start is None:  # made where it lies
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found.state, hyperbf.state)
    centers = found.state.params['block0']['stage2']['centers']
    moments = found.state.opt_state[1].mu['block0']['stage2']['centers']
    assert centers.sharding.shard_shape(centers.shape) == moments.sharding.shard_shape(centers.shape) == (1, 12, 16)


@pytest.mark.parametrize('sizes', [{}, {'data': 1, 'fsdp': 2, 'tensor': 4}], ids=['one', 'mixed'])
@pytest.mark.parametrize('activation', ['gelu', 'swiglu'])
def test_units_that_lie_on_several_devices_stay_there(activation, sizes):
  """Each device multiplies its own units, although the two halves of a gated layer lie side by side in one kernel."""
  layer, x = MLP(64, activation), jax.random.normal(jax.random.key(0), (8, 4, 16))
  params = jax.jit(layer.init)(jax.random.key(1), x)
  mesh = make_mesh(jax.devices() if sizes else ONE, {'data': 1, 'fsdp': 1, 'tensor': 1} | sizes)
  shardings = state_sharding(mesh, params)
  step = jax.jit(lambda params, x: layer.apply(params, x), in_shardings=(shardings, None))
  with jax.set_mesh(mesh):
    compiled = step.lower(params, x).compile()
    np.testing.assert_allclose(compiled(params, x), jax.jit(layer.apply)(params, x), rtol=1e-5, atol=1e-6)
  products = [line for line in compiled.as_text().splitlines() if ' dot(' in line]
  units = 64 // 4 if sizes else 64
  columns = (2 if activation == 'swiglu' else 1) * units
  assert any(f',{columns}]' in line.split(' dot(')[0] for line in products)


@pytest.mark.parametrize('stage', [HyperBFAttention(4, memory=8), PositionalHyperBF(4)], ids=['memory', 'positional'])
def test_a_stage_1_on_several_devices_gives_the_same(stage):
  """Heads and learned centers are split over devices. All examples share the weights of `positional`."""
  x, context = jax.random.normal(jax.random.key(0), (8, 6, 16)), Context(positions=jnp.arange(6.0)[:, None])
  params = jax.jit(lambda key: stage.init(key, x, context))(jax.random.key(1))
  mesh = make_mesh(jax.devices(), {'data': 2, 'fsdp': 2, 'tensor': 2})
  shardings = state_sharding(mesh, params)
  gradient = jax.value_and_grad(lambda params, x: jnp.sum(stage.apply(params, x, context) ** 2))
  with jax.set_mesh(mesh):
    found = jax.jit(gradient, in_shardings=(shardings, batch_sharding(mesh)))(params, x)
  expected = jax.jit(gradient)(params, x)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_gradients_are_summed_within_fsdp_before_they_cross_data():
  """If the devices of a host share the parameters, hosts exchange only shards of the gradients."""
  unit, x = HyperBFCenters(64), jax.random.normal(jax.random.key(0), (8, 4, 32))
  params = jax.eval_shape(unit.init, jax.random.key(1), x)
  mesh = make_mesh(jax.devices(), {'data': 2, 'fsdp': 4, 'tensor': 1})
  shardings = state_sharding(mesh, params)
  gradient = jax.grad(lambda params, x: jnp.sum(unit.apply(params, x) ** 2))
  with jax.set_mesh(mesh):
    compiled = jax.jit(gradient, in_shardings=(shardings, batch_sharding(mesh)), out_shardings=shardings)
    network = count_traffic(compiled.lower(params, x).compile().as_text(), [0, 0, 0, 0, 1, 1, 1, 1]).network
  crossing = sum(size for among, size in network.items() if among.hosts > 1)
  assert crossing < 4 * 2 * 64 * 32 / 2  # centers and coefficients, in float32: a quarter of them, and vectors


def test_a_device_of_sixteen_has_a_sixteenth_of_the_parameters():
  """Each matrix is split over the sixteen devices. Vectors are whole on every device."""
  params = abstract_params(
    build_model(resolve(cifar10.get_config('model=hyperbf,recipe=memo')).model, 10), (32, 32, 3)
  )
  mesh = AbstractMesh((1, 16, 1), AXES)
  leaves = jax.tree_util.tree_leaves_with_path(params)
  specs = [parameter_spec(path, leaf.shape, mesh) for path, leaf in leaves]
  shards = [NamedSharding(mesh, spec).shard_shape(leaf.shape) for spec, (_, leaf) in zip(specs, leaves, strict=True)]
  assert sum(map(math.prod, shards)) <= sum(leaf.size for _, leaf in leaves) / 15


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    ({'data': 3}, r'mesh\.data 3 × mesh\.fsdp 1 × mesh\.tensor 1 cannot be formed of 8 devices'),
    ({'data': 4}, r'cannot be formed of 8 devices: their product must be 8'),
    ({'data': -1, 'tensor': 3}, r'mesh\.data -1 × mesh\.fsdp 1 × mesh\.tensor 3 cannot be formed of 8 devices'),
    ({'data': -1, 'fsdp': -1}, r'one of them may be -1'),
    ({'data': 0}, r'each must be 1 or more'),
  ],
)
def test_a_mesh_that_cannot_be_is_named(sizes, message):
  with pytest.raises(UserError, match=message):
    make_mesh(jax.devices(), {'data': 1, 'fsdp': 1, 'tensor': 1} | sizes)


@pytest.mark.parametrize(
  ('model', 'changes', 'message'),
  [
    ('hyperbf', {'heads': 6}, r'mesh\.tensor 4 does not divide model\.heads 6, .* a multiple of 4, such as 4'),
    ('hyperbf', {'stage2.centers': 250}, r'mesh\.tensor 4 does not divide model\.stage2\.centers 250'),
    ('gated', {'stage1.hidden': 426}, r'mesh\.tensor 4 does not divide model\.stage1\.hidden 426'),
  ],
)
def test_what_tensor_does_not_divide_is_named(model, changes, message):
  config = resolve(cifar10.get_config(f'model={model}')).model
  config.update_from_flattened_dict(changes)
  with pytest.raises(UserError, match=message):
    check_tensor(config, make_mesh(jax.devices(), {'data': -1, 'fsdp': 1, 'tensor': 4}))


def test_models_without_heads_need_none_that_tensor_divides():
  config = resolve(cifar10.get_config('model=gmlp')).model
  config.heads = 3
  check_tensor(config, make_mesh(jax.devices(), {'data': -1, 'fsdp': 1, 'tensor': 4}))
