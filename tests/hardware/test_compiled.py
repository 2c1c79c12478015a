"""Tests of programs that are compiled as for absent hardware, but for this CPU's devices."""

import base64
import dataclasses
import functools
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from ops.keywords import hyperbf

from configs import cifar10, imagenet, text
from hbf.data.datasets import describe
from hbf.errors import UserError
from hbf.hardware import programs, report
from hbf.hardware.programs import plan_of, trace_programs
from hbf.hardware.report import check_fit, describe_programs, hash_program, markdown
from hbf.hardware.topologies import Topology, parse_topology
from hbf.training.experiment import prepare
from hbf.training.programs import jit_steps, make_init

STATISTICS = {'data.mean': (0.5,), 'data.std': (0.25,)}


TOPOLOGY = parse_topology('v5e-4')


@pytest.fixture(scope='module')
def here():
  """Let this CPU's devices and compiler stand in for those of every topology."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Topology, 'compile_devices', lambda topology: jax.devices()[: topology.devices])
    patch.setattr(report, '_OPTIONS', {'tpu': None, 'cuda': None})
    patch.setattr(Topology, 'compiler_versions', lambda topology: {'jaxlib': jax.lib.__version__})
    yield


@pytest.fixture(scope='module')
def config(toy):
  """Return a config in which most operations are matrix products."""
  return toy('model=hyperbf', **{'train.batch_size': 128, 'model.width': 64, 'model.stage2.centers': 128})


@pytest.fixture(scope='module')
def made(config, here):
  """Return the report on the programs of `config`."""
  return describe_programs(config, TOPOLOGY)


@pytest.mark.parametrize('kind', ['device', pytest.param('stream', marks=pytest.mark.slow)])
def test_the_programs_are_those_of_a_run(kind, toy):
  config = toy('model=hyperbf', **STATISTICS, **{'data.input': kind, 'train.batch_size': 16})
  devices = jax.devices()[:2]
  experiment, programs = prepare(config, devices=devices), trace_programs(config, devices)
  data = experiment.inputs['train']
  first = next(data.stacks(experiment.order, 0, [1], experiment.steps_per_call))
  state = jax.jit(make_init(experiment, experiment.objective))(data.resident, first, {})
  with jax.set_mesh(experiment.mesh):
    steps = jit_steps(experiment, experiment.objective, experiment.mesh, state)
    expected = steps.lower(state, data.resident, first, np.int32(1)).as_text()
    assert programs.each[0].traced.lower().as_text() == expected
  assert programs.parameter_bytes == 4 * experiment.parameters


@pytest.mark.parametrize('devices', [1, 4])
def test_published_data_need_not_be_there(devices, tmp_path):
  config = cifar10.get_config('model=vit')
  config.data.dir, config.train.average = str(tmp_path), 0.999
  programs = trace_programs(config, jax.devices()[:devices])
  assert programs.plan.task.dataset.image_shape == (32, 32, 3)
  assert [program.units for program in programs.each] == [256, 500]
  assert programs.optimizer_bytes // programs.parameter_bytes == 3  # two moments and the average
  train, evaluation = programs.each
  assert (train.held_bytes, evaluation.held_bytes - programs.optimizer_bytes) == tuple(
    count // devices * (32 * 32 * 3 + 4) for count in (10_000 + 1000, 49_000 + 1000 + 10_000)
  )


@pytest.mark.parametrize(('size', 'millions'), [('base', 86.4), ('large', 304.1)])
def test_imagenet_need_not_be_there(size, millions, tmp_path):
  config = imagenet.get_config(f'size={size}')
  config.data.dir = str(tmp_path)
  plan = plan_of(config)
  assert plan.parameters / 1e6 == pytest.approx(millions, abs=0.05)  # as many as ViT-B/16 and ViT-L/16
  assert {name: len(split) for name, split in plan.splits.items()} == {
    'train': 1_281_167 - 12_812,
    'validation': 12_812,
    'test': 50_000,
  }
  config.data.image_size = 0
  with pytest.raises(UserError, match=r'images of imagenet2012 vary in size.*data\.image_size'):
    plan_of(config)


def test_data_that_are_there_are_not_described(digits_dir, tmp_path):
  assert describe('digits', str(digits_dir), None) is None
  assert describe('image_folder', str(tmp_path), None) is None
  assert len(describe('tiny_imagenet', str(tmp_path), None).classes) == 200


def test_a_report_adds_up(made):
  json.dumps(made)
  for row in made['programs']:
    parts = row['argument_bytes'] + row['output_bytes'] - row['aliased_bytes'] + row['temporary_bytes']
    assert row['peak_bytes'] == parts + row['code_bytes'] + row['held_bytes']
    assert row['flops'] == pytest.approx(row['compiler_flops'], rel=0.05)
    assert row['fits'] and row['images_per_second'] == row['images'] / max(row['bound_seconds'].values())
  train, _ = made['programs']
  (among, exchanged), *_ = sorted(report.collectives(train).items(), key=lambda item: -item[1])
  assert among == ('all-reduce', 4, 1) and exchanged >= 0.9 * made['parameter_bytes']
  assert made['optimizer_bytes'] >= 2 * made['parameter_bytes']
  shown = markdown(made)
  assert all(text in shown for text in ('train step', 'evaluation step', 'all-reduce', 'images/s (estimate)'))
  assert len({len(line) for line in shown.splitlines()}) == 1


def test_what_is_still_the_same_is_not_compiled_again(config, made, monkeypatch):
  def compiled(name, *_):
    raise AssertionError(f'the {name} was compiled')

  monkeypatch.setattr(report, '_compile', compiled)
  assert describe_programs(config, TOPOLOGY, known=[made])['programs'] == made['programs']
  other = config.copy_and_resolve_references()
  other.model.stage2.centers = 120
  with pytest.raises(AssertionError, match='the train step was compiled'):
    describe_programs(other, TOPOLOGY, known=[made])
  with pytest.raises(AssertionError, match='was compiled'):
    describe_programs(config, TOPOLOGY, known=[made | {'versions': made['versions'] | {'jax': '0.1'}}])


def test_a_program_does_not_know_in_which_folder_it_was_made(made):
  """A Pallas kernel would contain the paths of its source, so the same program would be compiled again elsewhere.

  The paths are in whole stacks of calls, as outside of tests.
  """
  assert made['programs']
  unit = functools.partial(hyperbf, kernel='gaussian', sigma=2.0, normalization='layer', implementation='pallas')
  traced = jax.jit(lambda z: unit(z, z, z)).trace(jax.ShapeDtypeStruct((16, 128), jnp.float32))
  limit = jax.config.jax_traceback_in_locations_limit
  try:
    jax.config.update('jax_traceback_in_locations_limit', 100)  # JAX's own default
    text = traced.lower(lowering_platforms=('tpu',)).as_text()
  finally:
    jax.config.update('jax_traceback_in_locations_limit', limit)
  kernels = [base64.b64decode(body) for body in re.findall(r'body\\22: \\22([^\\]+)', text)]
  assert kernels and not any(b'pallas.py' in kernel for kernel in kernels)


def test_texts_are_told_of_in_tokens(here):
  config = text.get_config('model=hyperbf')
  config.model.update(width=16, depth=1, heads=2)
  config.data.length, config.train.batch_size, config.train.steps_per_call = 24, 8, 1
  made = describe_programs(config, TOPOLOGY)
  train, _ = made['programs']
  assert train['tokens'] == 24 * 8
  assert train['tokens_per_second'] == train['tokens'] / max(train['bound_seconds'].values())
  shown = markdown(made)
  assert 'tokens at once' in shown and 'tokens/s (estimate)' in shown and 'image' not in shown


def test_what_does_not_fit_is_told_with_the_batch_that_does(config, made, monkeypatch):
  check_fit(made, config, TOPOLOGY)
  chip = dataclasses.replace(TOPOLOGY.chip, memory_bytes=2**30)
  too_large = [row | {'fits': False, 'peak_bytes': 3 * 2**30} for row in made['programs']]
  monkeypatch.setattr(report, '_describe', lambda program, *_: {'peak_bytes': 2**25 * program.units})
  told = r'the train step does not fit v5e-4: it needs 3\.00 GiB a device, 2\.00 GiB too much; .* about 32$'
  with pytest.raises(UserError, match=told):
    check_fit(made | {'programs': too_large, 'memory_bytes': 2**30}, config, dataclasses.replace(TOPOLOGY, chip=chip))


def test_an_evaluation_step_that_does_not_fit_is_told_with_its_own_key(config, made, monkeypatch):
  monkeypatch.setattr(report, 'find_largest_batch', None)  # it would have nothing to do with this step
  train, evaluation = made['programs']
  too_large = evaluation | {'fits': False, 'peak_bytes': 3 * 2**30}
  with pytest.raises(UserError, match=r'the evaluation step does not fit .*; set evaluate\.batch_size to less$'):
    check_fit(made | {'programs': [train, too_large], 'memory_bytes': 2**30}, config, TOPOLOGY)


def test_the_largest_batch_is_shown_and_not_sought_again(config, made, monkeypatch):
  assert 'largest train.batch_size' not in markdown(made)
  assert re.search(r'\| largest train\.batch_size +\| 96 ', markdown(made | {'largest_batch': 96}))
  none = made | {'largest_batch': None}
  assert re.search(r'\| largest train\.batch_size +\| none ', markdown(none))
  monkeypatch.setattr(report, 'find_largest_batch', None)
  too_large = [made['programs'][0] | {'fits': False, 'peak_bytes': 3 * 2**30}]
  with pytest.raises(UserError, match=r'no train\.batch_size fits$'):
    check_fit(none | {'programs': too_large, 'memory_bytes': 2**30}, config, TOPOLOGY)


def test_a_folder_for_texts_is_made_before_anything_is_compiled(config, tmp_path, here, monkeypatch):
  (tmp_path / 'file').touch()
  monkeypatch.setattr(report, 'trace_programs', None)
  with pytest.raises(UserError, match='file cannot be a folder'):
    describe_programs(config, TOPOLOGY, tmp_path / 'file')


@pytest.mark.parametrize(
  'told',
  [
    'Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.',
    'Ran out of memory on HBM, the total memory required for HLO temporaries (20.50G) exceeds available HBM (15G).',
  ],
)
def test_what_the_compiler_finds_too_large_is_a_row(told):
  class Lowered:
    def compile(self, compiler_options):
      raise jax.errors.JaxRuntimeError(f'RESOURCE_EXHAUSTED: {told}')

  assert report._compile('train step', Lowered(), parse_topology('v5e-1')) == (int(20.5 * 2**30), None)


def test_what_the_compiler_refuses_is_a_line():
  class Lowered:
    def compile(self, compiler_options):
      raise jax.errors.JaxRuntimeError('UNIMPLEMENTED: no such thing\nand more')

  with pytest.raises(UserError, match=r'compiler of TPU v5es refuses the train step: UNIMPLEMENTED: no such thing$'):
    report._compile('train step', Lowered(), parse_topology('v5e-1'))


def test_a_batch_that_the_devices_cannot_share_is_refused(toy, here):
  with pytest.raises(UserError, match=r'train\.batch_size 30 cannot be shared by 4 devices'):
    describe_programs(toy(**{'train.batch_size': 30}), parse_topology('v5e-4'))


def test_kernels_for_tpus_are_refused_for_absent_gpus(toy, monkeypatch):
  gpus = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform='cuda')]))
  monkeypatch.setattr(programs, 'make_mesh', lambda *_: gpus)
  with pytest.raises(UserError, match='implementation pallas is for TPUs, and the platform is cuda'):
    trace_programs(toy('model=hyperbf', **STATISTICS, **{'model.stage2.implementation': 'pallas'}), jax.devices())


def test_cudnn_is_asked_of_the_chip_not_of_this_machine():
  """cuDNN needs a Hopper GPU for heads of more than 128 dimensions. JAX would ask this machine's GPU for its kind."""
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  for name, expected in (('h200-1', True), ('a100-8', False)):
    with parse_topology(name).tracing():
      assert cudnn.check_compute_capability('9.0') == expected
  with parse_topology('v5e-1').tracing():
    assert not cudnn.check_compute_capability('9.0')


def partitioned(static):
  """Return the lowered text and the jaxpr of a function with its own partitioning, like cuDNN's attention."""
  sharding = jax.NamedSharding(jax.make_mesh((2,), ('data',)), jax.P('data'))
  function = custom_partitioning(lambda x, factor: factor * x, static_argnums=(1,))

  def partition(factor, mesh, args, result):
    return mesh, lambda x: factor * x, args[0].sharding, (args[0].sharding,)

  function.def_partition(partition, sharding_rule='i -> i')
  traced = jax.jit(lambda x: function(x, static)).trace(jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding))
  return traced.lower().as_text(), traced.jaxpr


def test_a_program_is_known_again_whatever_python_calls_its_objects():
  (text, jaxpr), (_, another) = partitioned(2.0), partitioned(3.0)
  elsewhere = re.sub(r'backend_config = "\d+"', 'backend_config = "1"', text)
  assert elsewhere != text
  assert hash_program(elsewhere, jaxpr) == hash_program(text, jaxpr) != hash_program(text, another)
