"""Tests of runs that start from weights of another project: --config.init_from=FILE."""

import io
import os
import re
import signal

import jax
import numpy as np
import pytest
from interop import others, published
from rich.console import Console

from hbf.config.command_line import read_config
from hbf.errors import UserError
from hbf.interop import origins, tensors
from hbf.interop.positions import resize
from hbf.models.build import abstract_params
from hbf.training.checkpoints import Checkpoints
from hbf.training.experiment import make_plan, prepare
from hbf.training.initial import FREE
from hbf.training.loop import train
from hbf.training.reporter import Reporter
from hbf.training.sharding import with_sharding
from hbf.training.state import init_state
from hbf.training.workdir import flatten, load_config

ONE = jax.devices()[:1]
QUIET = Console(quiet=True)


def write(path, network, **sizes):
  """Write a network of one block for the digits (8×8 pixels, gray), or one of other sizes."""
  if network in ('hyperbf', 'vit'):
    theirs = published.random_state_dict(network, ('attn.scale', 'mlp.M_RBF', 'mlp.fc.bias'), depth=1, classes=10)
    theirs['patch_embed.proj.weight'] = theirs['patch_embed.proj.weight'][:, :1]
  else:
    theirs = others.random_tensors(network, **({'depth': 1, 'channels': 1, 'classes': 10} | sizes))
  tensors.write(path, theirs)
  return str(path)


def described(path):
  """Return config keys that describe the network of a file, with a learning rate of 0."""
  config = origins.read(path).config
  keys = {f'model.{key}': value for key, value in flatten(config).items() if key not in ('name', *FREE)}
  return keys | {'init_from': str(path), 'optimizer.learning_rate': 0.0, 'data.validation': 0.0}


def trained(workdir, experiment, average=False):
  """Return the parameters of the newest checkpoint, or their average."""
  checkpoints = Checkpoints(workdir / 'checkpoints', read_only=True)
  shapes = with_sharding(abstract_params(experiment.model, (8, 8, 1)), experiment.mesh)
  return jax.tree.map(np.asarray, checkpoints.restore_params(checkpoints.latest, shapes, average=average))


def fresh(experiment):
  """Return the initial parameters of a run without a file."""
  data = experiment.inputs['train']
  batch = next(iter(data.batches(experiment.order, 0, 1)))
  init = jax.jit(lambda *args: init_state(experiment.model, experiment.optimizer, experiment.objective, *args).params)
  return init(data.resident, batch)


def stop_at_the_first_report(monkeypatch):
  report = Reporter.report

  def stop(self, step, state):
    os.kill(os.getpid(), signal.SIGTERM)
    return report(self, step, state)

  monkeypatch.setattr(Reporter, 'report', stop)


def test_a_run_starts_from_a_file_and_goes_on_without_it(tmp_path, toy, monkeypatch):
  two = jax.devices()[:2]
  path, workdir = tmp_path / 'theirs.npz', tmp_path / 'run'
  write(path, others.google_vit, classes=7)
  config = toy('model=vit', **described(path), **{'train.average': 0.5})
  expected = dict(origins.read(path).params)
  expected['positions'] = np.asarray(resize(expected['positions'], 2, 2))  # from 3×3
  expected['head'] = fresh(prepare(config, devices=two))['head']
  printed = io.StringIO()
  with monkeypatch.context() as patch:
    stop_at_the_first_report(patch)
    assert train(config, workdir, Console(file=printed, width=500), two) is None
  assert f"starts from Google's ViT of {path}, with a new head of 10 classes" in printed.getvalue()
  path.unlink()
  assert train(config, workdir, QUIET, two) is not None
  found = trained(workdir, prepare(config, True, two))
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  average = trained(workdir, prepare(config, True, two), average=True)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), average, expected)
  assert load_config(workdir).init_from == str(path)
  with pytest.raises(UserError, match=r'theirs\.npz is not there'):
    train(config, tmp_path / 'another', QUIET)


@pytest.mark.slow
def test_recipe_finetune_trains_what_a_file_holds(tmp_path, digits_dir):
  """All parameters are trained, the embedding slowest. The data have three classes more than the file."""
  path = tmp_path / 'theirs.npz'
  write(path, others.google_vit, classes=7)
  given = {'optimizer.learning_rate': 1e-3, 'train.epochs': 1.0, 'data.dir': digits_dir}
  changes = {key: value for key, value in described(path).items() if key != 'data.validation'} | given
  flags = [f'--config.{key}={value}' for key, value in changes.items()]
  config = read_config(['--config=configs/digits.py:model=vit,recipe=finetune', *flags])
  result = train(config, tmp_path / 'run', QUIET, ONE)
  assert result['recipe'] == 'finetune'
  found, theirs = trained(tmp_path / 'run', prepare(config, True, ONE)), origins.read(path).params
  moved = (
    max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (found[part], theirs[part])), strict=True))
    for part in ('embedding', 'block0')
  )
  below, above = moved
  assert 0 < below < above


@pytest.mark.parametrize('network', [others.google_vit, others.timm_vit], ids=['google', 'timm'])
def test_the_head_stays_where_the_classes_are_as_many(tmp_path, toy, network):
  path = tmp_path / 'theirs.npz'
  write(path, network)
  given = make_plan(toy('model=vit', **described(path))).initial
  expected = origins.read(path).params
  expected['positions'] = np.asarray(resize(expected['positions'], 2, 2))
  jax.tree.map(np.testing.assert_array_equal, given.params, expected)
  assert given.source.endswith('theirs.npz, with its head')


# Networks with their model, and the model of the run: another one, or the same of other sizes.
CASES = {
  f'{name} for {run}': (network, run)
  for name, network, model in (
    ("Google's ViT", others.google_vit, 'vit'),
    ("Google's Mixer", others.google_mixer, 'mixer'),
    ("timm's ViT", others.timm_vit, 'vit'),
    ("timm's gMLP", others.timm_gmlp, 'gmlp'),
    ("timm's Mixer", others.timm_mixer, 'mixer'),
    ("the authors' Hyper_ViT", 'hyperbf', 'hyperbf'),
    ("the authors' ViT", 'vit', 'vit'),
  )
  for run in (model, 'softmax+hyperbf')
}


@pytest.mark.parametrize(('network', 'model'), CASES.values(), ids=CASES)
def test_a_config_of_another_model_is_refused_with_the_arguments_that_help(tmp_path, digits_dir, network, model):
  path = write(tmp_path / 'theirs.safetensors', network)
  given = [f'--config.data.dir={digits_dir}', f'--config.init_from={path}', '--config.model.depth=2']
  with pytest.raises(UserError) as error:
    train(read_config([f'--config=configs/digits.py:model={model}', *given]), tmp_path / 'run', QUIET)
  assert not (tmp_path / 'run').exists()
  message = str(error.value)
  assert path in message and 'of a wrong shape: block0/' in message
  needed = re.search(r'it does with (model=(\w+) after the colon of --config, and )?(--config.*)', message)
  flags = [f'--config=configs/digits.py:model={needed[2] or model}', *given, *needed[3].split()]
  plan = make_plan(read_config(flags))
  shapes = jax.tree.map(
    lambda z: z.shape, (plan.initial.params, abstract_params(plan.model, plan.task.dataset.image_shape))
  )
  assert shapes[0] == shapes[1]


@pytest.mark.parametrize(('changes', 'needed'), [
  ({'model.stage2.activation': 'relu'}, '--config.model.stage2.activation=gelu'),
  ({'model.heads': 4}, '--config.model.heads=2'),
  ({'model.norm_epsilon': 1e-5}, '--config.model.norm_epsilon=1e-06'),
  ({'model.depth': 2}, '--config.model.depth=1'),
], ids=str)  # fmt: skip
def test_only_what_differs_is_asked_for(tmp_path, toy, changes, needed):
  write(tmp_path / 'theirs.npz', others.google_vit)
  config = toy('model=vit', **(described(tmp_path / 'theirs.npz') | changes))
  with pytest.raises(UserError) as error:
    make_plan(config)
  assert str(error.value).endswith(f': it does with {needed}')
  assert ('block1/' in str(error.value)) == ('model.depth' in changes)


def test_how_a_run_trains_is_its_own_affair(tmp_path, toy):
  write(tmp_path / 'theirs.npz', others.google_vit)
  free = {'model.dropout': 0.1, 'model.drop_path': 0.1, 'model.remat': True, 'model.stage2.output_scale': 0.5}
  assert make_plan(toy('model=vit', **(described(tmp_path / 'theirs.npz') | free))).initial is not None


def test_images_of_other_channels_can_not_be_helped(tmp_path, toy):
  write(tmp_path / 'theirs.npz', others.google_vit, channels=3)
  with pytest.raises(UserError, match=r'theirs.npz is for images of 3 channels, digits has 1$'):
    make_plan(toy('model=vit', **described(tmp_path / 'theirs.npz')))
