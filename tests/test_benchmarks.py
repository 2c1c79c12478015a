"""Tests of the benchmarks in small sizes, and of the messages of the accelerator benchmark about failures."""

import argparse
import json
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hbf.ops.fast.choice
from benchmarks import (
  accelerator,
  batch_parts,
  common,
  correctness,
  growth,
  hardware,
  linear,
  models,
  nanogpt,
  parts,
  step,
)
from benchmarks import input as input_benchmark
from benchmarks.accelerator import Part
from hbf.config import recipes as configs
from hbf.config.resolve import resolve
from hbf.errors import UserError
from hbf.ops.fast.blocked import Summation
from hbf.ops.fast.sums import kernel_sums

ONE = jax.devices()[:1]
TOY = '--tokens=9 --centers=12 --width=16 --head-sizes=6 --cases=64x2 --recipes=toy --seconds=0.05 --rounds=2'


def toy_recipe():
  config = configs.small()
  config.model.update(width=16, depth=1, heads=2)
  config.train.batch_size = 16
  return config


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
  """Return the JSON of the benchmark with one type, one kernel, two normalizations, a model, and an unknown model."""
  out = tmp_path_factory.mktemp('accelerator') / 'folder' / 'found.json'
  bfloat16 = {'bfloat16': jnp.bfloat16}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, 'devices', lambda *_: ONE)  # eight devices on two cores need seconds for a step
    patch.setattr('sys.argv', ['accelerator', *TOY.split(), f'--out={out}'])
    patch.setitem(configs.RECIPES, 'toy', toy_recipe)
    for module in (accelerator, correctness):
      patch.setattr(module, 'DTYPES', bfloat16)
    patch.setattr(correctness, 'RESPONSES', {name: correctness.RESPONSES[name] for name in ('sum', 'layer')})
    patch.setattr(correctness, 'KERNELS', {'gaussian': correctness.KERNELS['gaussian']})
    for name, value in {'MODELS': ('identity', 'hyperbf:nonesuch'), 'INPUTS': ('device',)}.items():
      patch.setattr(accelerator, name, value)
    for name in ('keep_freed_memory', 'keep_compiled_programs'):  # for a process of its own
      patch.setattr(accelerator, name, lambda: None)
    for module, sizes in {step: {'DEPTH': 1, 'MATMUL_CPU': 64}, input_benchmark: {'EXAMPLES': 64, 'FILL': 1}}.items():
      for name, size in sizes.items():
        patch.setattr(module, name, size)
    accelerator.main()
  return json.loads(out.read_text())


def rows_of(measured, title):
  return [row for part in measured['parts'] if title in part['title'] for row in part['rows']]


@pytest.mark.slow
def test_every_part_is_there(measured):
  titles = ['attention', 'linear attention', 'in blocks', 'Pallas', 'Train step', 'Recipe', 'Input', 'digits']
  assert len(measured['parts']) == len(titles)
  assert all(title in part['title'] and part['rows'] for title, part in zip(titles, measured['parts'], strict=True))
  assert {'command', 'device', 'commit', 'versions'} <= set(measured)


@pytest.mark.slow
def test_fast_forms_are_within_tolerance(measured):
  rows = rows_of(measured, 'Relative errors')
  assert {row['operator'].split(',')[0] for row in rows} == {
    'softmax attention',
    'gaussian attention',
    'linear attention',
    'hyperbf xla',
    'hyperbf pallas',
  }
  assert {row['within'] for row in rows} == {'yes'}
  assert all(0 < row['d centers'] <= row['tolerance'] == 0.03 for row in rows)


@pytest.mark.slow
def test_a_form_that_does_not_compile_costs_its_own_row_only(measured):
  identity, nonesuch = rows_of(measured, 'Train step')
  assert identity['images/s'] > 0 and identity['of matmul rate'] and not identity['error']
  assert nonesuch['error'].startswith("OptionError: HyperBFCenters: unknown implementation 'nonesuch'")
  assert nonesuch['images/s'] == ''


@pytest.mark.slow
def test_hours_are_those_of_the_images_a_second(measured):
  (row,) = rows_of(measured, 'Recipe')
  assert row['images/s'] == pytest.approx(1e3 * row['batch'] / row['step ms'])
  assert row['100 epochs, hours'] == pytest.approx(100 * 50_000 / row['images/s'] / 3600)


@pytest.mark.slow
def test_an_interrupted_run_is_compared_to_a_whole_one(measured):
  again, interrupted = rows_of(measured, 'digits')
  assert again['run'] == 'again'
  step = int(interrupted['run'].removeprefix('interrupted after step '))
  assert 5 <= step < 150
  assert [(row['bit for bit'], row['largest difference']) for row in (again, interrupted)] == [('yes', 0.0)] * 2


def test_parameters_that_differ_are_not_called_the_same():
  one = np.ones(3, np.float32)
  assert accelerator.difference([one, one], [one, one + np.float32(2**-20)]) == {
    'largest difference': 2**-20,
    'bit for bit': 'no',
  }
  assert accelerator.difference([one, one], [one, one * np.float32('nan')])['bit for bit'] == 'no'


def wrong_value(distances, coefficients, kernel):
  return kernel_sums(distances, 1.1 * coefficients, kernel)


def wrong_gradient(distances, coefficients, kernel):
  halved = coefficients / 2 + jax.lax.stop_gradient(coefficients / 2)
  return kernel_sums(distances, halved, kernel)


def no_number(distances, coefficients, kernel):
  return kernel_sums(distances, coefficients * jnp.nan, kernel)


def no_kernel(distances, coefficients, kernel):
  raise NotImplementedError('no such kernel\nwith details')


@pytest.mark.parametrize('broken', [wrong_value, wrong_gradient, no_number, no_kernel])
def test_a_broken_form_is_out_of_tolerance_or_says_why(broken, monkeypatch):
  monkeypatch.setitem(hbf.ops.fast.choice.IMPLEMENTATIONS, 'xla', Summation(broken))
  case = next(iter(correctness.stage2_cases('xla', 8, [5], [6])))
  rows = correctness.check([case])
  assert [row['dtype'] for row in rows] == ['float32', 'bfloat16']
  assert {row['within'] for row in rows} == {'no'}
  if broken is wrong_gradient:
    assert all(row['value'] <= row['tolerance'] < row['d coefficients'] for row in rows)
  if broken is no_kernel:
    assert {row['error'] for row in rows} == {'NotImplementedError: no such kernel'}


def test_the_kernel_is_named_by_what_the_program_calls():
  text = 'custom_call_target="__cudnn$fmhaSoftmax" ... custom_call_target="__gpu$xla.gpu.triton"'
  assert correctness.kernel_of(text) == 'cuDNN + Triton'
  assert correctness.kernel_of('fusion, kind=kCustom, "kind":"__triton_gemm"') == 'XLA'


def part(title, programs=1, measure=lambda: [{'a': 1}]):
  return Part(title, programs, measure)


def titles_by(measured, key):
  return [part['title'] for part in measured['parts'] if key in part]


def test_parts_without_time_are_skipped_by_name(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(accelerator, 'timed', lambda part: {'rows': [{'a': 1}], 'seconds': 10 * part.programs})
  parts = [part('two programs', 2), part('eight programs', 8), part('one program')]
  accelerator.run(parts, 60.0, tmp_path / 'a.json')
  measured = json.loads((tmp_path / 'a.json').read_text())
  assert titles_by(measured, 'rows') == ['two programs', 'one program']
  assert 'eight programs: skipped for lack of time' in capsys.readouterr().out
  assert '60 s are left, about 80 s needed' in measured['parts'][1]['skipped']


def test_a_crash_costs_its_part_and_a_kill_what_comes_after(tmp_path):
  def crash():
    raise RuntimeError('illegal address\nat a place')

  def kill():
    raise KeyboardInterrupt

  parts = [part('first'), part('crashes', 1, crash), part('last'), part('killed', 1, kill), part('never')]
  with pytest.raises(KeyboardInterrupt):
    accelerator.run(parts, 60.0, tmp_path / 'a.json')
  measured = json.loads((tmp_path / 'a.json').read_text())
  assert titles_by(measured, 'rows') == ['first', 'last']
  assert measured['parts'][1]['error'] == 'RuntimeError: illegal address'
  assert len(measured['parts']) == 3


@pytest.mark.parametrize(
  ('flag', 'said'),
  [
    ('--parts=speed', "unknown part 'speed'"),
    ('--cases=100x8', "unknown width '100'"),
    ('--recipes=mems', "unknown recipe 'mems': did you mean 'memo'"),
  ],
)
def test_bad_options_are_named_before_anything_runs(flag, said, monkeypatch):
  monkeypatch.setattr('sys.argv', ['accelerator', flag])
  monkeypatch.setattr(accelerator, 'run', None)
  with pytest.raises(SystemExit, match=said):
    accelerator.main()


def test_the_parts_of_a_text_model_are_refused_before_anything_compiles(monkeypatch, capsys):
  monkeypatch.setattr('sys.argv', ['parts', '--config=shakespeare'])
  monkeypatch.setattr(parts, 'compile_trainer', None)
  with pytest.raises(SystemExit):
    parts.main()
  assert '--config shakespeare is for next_token, and this benchmark is for classification' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('benchmark', 'flag', 'said'),
  [
    (growth, '--parts=stage1,stage3', "unknown part 'stage3'"),
    (growth, '--models=hyperbf,vits', "unknown model 'vits': did you mean 'vit'"),
    (growth, '--lengths=64,1000', '--tokens 4096 is not a multiple of --lengths 1000'),
    (growth, '--rounds=0', '0 is below 1'),
    (batch_parts, '--parts=1,3', '--parts: 3 does not divide the batch of 256 images'),
    (linear, '--lengths=64,256,64', '64,256,64: expected three different sizes or more'),
    (input_benchmark, '--data=cifar10,mnist', "unknown data 'mnist': known: cifar10, cifar100, digits, imagenet"),
  ],
)
def test_a_wrong_option_is_one_line_before_anything_is_measured(benchmark, flag, said, monkeypatch, capsys):
  monkeypatch.setattr('sys.argv', ['benchmark', flag])
  monkeypatch.setattr(benchmark, 'measure', None)
  monkeypatch.setattr(benchmark, 'keep_freed_memory', None)
  with pytest.raises(SystemExit) as ended:
    common.launch(benchmark.main)
  assert ended.value.code == 2
  assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_record_has_a_command_that_a_shell_takes(monkeypatch):
  flags = ['--layouts', 'one process', '--out', '/here/a.json', '--dir=/data/b', "--mix=(('a', 1),)", '--out=c.json']
  monkeypatch.setattr('sys.argv', ['/here/benchmarks/chaos.py', *flags])
  words = shlex.split(common.measured_on()['command'])
  assert words == ['python', '-m', 'benchmarks.chaos', '--layouts', 'one process', '--dir=b', "--mix=(('a', 1),)"]


@pytest.mark.parametrize(('name', 'units'), [('gmlp', {64}), ('unified', {64}), ('mixer', {8, 64}), ('vit', {64})])
def test_the_sizes_of_a_benchmark_hold_for_all_stages(name, units, monkeypatch):
  monkeypatch.setattr(models, 'compile_trainer', lambda config, *_: config)
  model = models.make_trainer(name, 16, 1, 2, 64, 8).model
  sizes = [
    stage[key] for stage in (model.stage1, model.stage2) if stage for key in ('hidden', 'memory') if key in stage
  ]
  assert {*sizes} - {0} == units


def test_a_benchmark_takes_the_step_that_training_compiles():
  config = resolve(configs.make_config('model=identity,recipe=small', {'name': 'digits'})).unlock()
  config.train.average = 0.9
  _, init, step = models.make_training(config, (8, 8, 1))
  batch = models.random_batch(4, (8, 8, 1))
  state = jax.eval_shape(lambda: step(init(None, batch), None, batch))
  assert jax.tree.map(jnp.shape, state.average) == jax.tree.map(jnp.shape, state.params)


def test_a_program_that_is_too_large_has_a_row(monkeypatch):
  about = {'topology': 'v5e-1', 'model': 'hyperbf', 'form': 'xla', 'recipe': 'memo', 'dtype': 'bfloat16'}
  program = {'flops': 2e9, 'peak_bytes': 5e10, 'fits': False}
  line = hardware._line({**about, 'programs': [program, program]})
  assert '50,000: too much' in line and len(line) == 14


@pytest.mark.parametrize(('platform', 'kernels'), [('gpu', 0), ('tpu', 1)])
def test_kernels_for_tpus_are_left_out_on_a_gpu(platform, kernels, monkeypatch):
  monkeypatch.setattr(jax, 'default_backend', lambda: platform)
  options = argparse.Namespace(tokens=[9], centers=[12], width=16, head_sizes=[6], cases=[(64, 2)], rounds=2)
  parts = [*accelerator.correctness_parts(options), *accelerator.step_parts(options)]
  assert sum('Pallas' in part.title for part in parts) == kernels
  assert parts[-1].programs == 2 + kernels  # hyperbf and vit


def test_a_hidden_cpu_is_asked_for(monkeypatch):
  def hidden(*_):
    raise RuntimeError('Unknown backend cpu')

  monkeypatch.setattr(jax, 'devices', hidden)
  with pytest.raises(UserError, match='JAX_PLATFORMS='):
    correctness.host()


def test_an_operation_belongs_to_the_part_that_made_it():
  scopes = {
    'jit(f)/jvp(ImageClassifier)/trunk/trunk._blocks/block0/block0._update/stage1/qkv/dot_general': 'stage 1',
    'jit(f)/transpose(jvp(ImageClassifier))/trunk/trunk._blocks/block0/block0._update/stage2/exp': 'stage 2',
    'jit(f)/jvp(ImageClassifier)/trunk/trunk._blocks/block0/block0._update/norm_stage2/mul': 'norms and residuals',
    'jit(f)/jvp(ImageClassifier)/embed/embedding/dot_general': 'stem',
    'jit(f)/jvp(ImageClassifier)/head/dot_general': 'head and loss',
    'jit(f)/optimizer/mul': 'optimizer',
    'jit(f)/input/vmap(jit(_bernoulli))/lt': 'input and augmentation',
    '': 'rest',
  }
  assert {scope: parts.part_of(scope) for scope in scopes} == scopes


def test_times_and_bytes_are_added_up_for_each_part():
  moved = {'a': ('jit(f)/jvp(M)/head/dot_general', 30), 'b': ('jit(f)/transpose(jvp(M))/head/mul', 10), 'c': ('', 5)}
  found = parts.rows({'a': 2.0, 'b': 6.0, 'c': 2.0}, moved, {'head and loss': 5}, rate=1000, bandwidth=10_000)
  head, whole = found[list(parts.PARTS).index('head and loss')], found[-1]
  assert (head['forward, ms'], head['backward, ms'], head['share, %']) == (2, 6, 80)
  # 5 operations at 1,000 a second take longer than 40 bytes.
  assert head['estimate, ms'] == head['products, ms'] == pytest.approx(5)
  assert (whole['backward, ms'], whole['share, %'], whole['GB moved']) == (6, 100, 45e-9)


def test_a_round_beside_nanogpt_takes_whole_steps(monkeypatch):
  make_config = nanogpt.make_text_config

  def small(*arguments):
    config = make_config(*arguments)
    config.model.update(width=16, depth=1, heads=2)
    return config

  monkeypatch.setattr(nanogpt, 'make_text_config', small)
  monkeypatch.setattr(nanogpt, 'STEPS', 2)
  tokens = np.random.default_rng(0).integers(0, 65, 20_000).astype(np.uint8)
  take = nanogpt.our_steps('hyperbf', tokens)
  assert [int(take()), int(take())] == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
  'command',
  [
    'augmentation --config configs/cifar10.py:recipe=small --transforms= --mix= --rounds 1',
    'batch_parts --configs digits --parts 1,4 --batch 16 --rounds 1',
    'bound --rounds 1',
    'chaos --kills 1 --layouts "one process"',
    'compile --models vit --configs digits --rounds 1',
    'coverage --times 2',
    'generation --models hyperbf --count 8 --rounds 1',
    'growth --parts stage1,stage2 --models vit --lengths 16,32 --units 16,32 --tokens 64 --width 12 --rounds 1',
    'input --data digits --seconds 1 --rounds 1',
    'linear --lengths 64,128,256 --features 4,8,16 --width 16 --heads 2 --rounds 1',
    'operator --tokens 256 --centers 128 --rounds 1',
    'parts --config digits --image_size 8 --rounds 1',
    'step --models positional --cases 64x4 --patch 8 --rounds 1',
  ],
)
def test_a_benchmark_runs_in_a_small_size(command, tmp_path):
  name, *flags = shlex.split(command)
  command = [sys.executable, '-m', f'benchmarks.{name}', *flags, f'--out={tmp_path / "measured.json"}']
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  measured = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
  assert measured and all(one['rows'] for one in measured)
