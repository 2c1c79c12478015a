"""Tests of runs that start from weights of this package: of a run, a checkpoint, an export or a pretrained model."""

import io
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console
from toy_runs import ONE, QUIET, params_of, save_untrained

from configs import text
from hbf.config.resolve import resolve
from hbf.data.datasets import from_arrays
from hbf.data.images.arrays import ArrayData
from hbf.errors import UserError
from hbf.interop.positions import resize
from hbf.models.edited import EditedClassifier
from hbf.training import export, own_weights, pretrained
from hbf.training.experiment import make_plan
from hbf.training.loop import train

LEARNED = {'model.positions': 'learned', 'model.pool': 'mean', 'data.validation': 0.0, 'train.epochs': 0.5}


@pytest.fixture(scope='module')
def trained(toy, tmp_path_factory):
  folder = tmp_path_factory.mktemp('trained') / 'run'
  train(toy('model=hyperbf', **LEARNED), folder, QUIET, ONE)
  return folder


@pytest.fixture(scope='module')
def exported(trained, tmp_path_factory):
  folder = tmp_path_factory.mktemp('exported') / 'model'
  export.export(export.from_run(trained), folder)
  return folder


@pytest.fixture
def packaged(trained, tmp_path, monkeypatch):
  monkeypatch.setattr(pretrained, 'MODELS', tmp_path / 'models')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  pretrained.store(trained, tmp_path / 'models' / 'toy', 'A toy.')
  return 'toy'


def start(toy, source, model='hyperbf', dataset=None, **changes):
  """Return the parameters with which a run starts."""
  return make_plan(toy(f'model={model}', **LEARNED, init_from=str(source), **changes), dataset=dataset).initial


def images(size, names):
  """Return a data set of random gray images."""
  random = np.random.default_rng(0)
  x, y = random.integers(0, 256, (200, size, size, 1), np.uint8), np.arange(200) % len(names)
  return from_arrays(ArrayData(x, y, x[:20], y[:20], names))


def assert_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_every_form_of_a_run_holds_the_same_weights(toy, trained, exported, packaged):
  expected, checkpoint = params_of(trained), max((trained / 'checkpoints').iterdir())
  for source, origin in {
    trained: 'the run',
    checkpoint: f'step {checkpoint.name} of the run',
    exported: 'the exported model',
    packaged: 'the pretrained model',
  }.items():
    given = start(toy, source)
    assert_equal(given.params, expected)
    assert given.source == f'{origin} of {source}, with its head'


def test_a_folder_named_checkpoints_may_hold_runs(trained, exported, tmp_path):
  for source, origin in ((trained, 'the run'), (exported, 'the exported model')):
    shutil.copytree(source, tmp_path / 'checkpoints' / 'x', dirs_exist_ok=False)
    assert own_weights.find(str(tmp_path / 'checkpoints' / 'x'), 'init_from').origin == origin
    shutil.rmtree(tmp_path / 'checkpoints')


def test_a_pretrained_model_is_read_where_it_is(monkeypatch):
  monkeypatch.setattr(pretrained, 'unpack', None)  # several processes could not make its run folder
  found = own_weights.find('laptop-cifar10-hyperbf', 'init_from')
  assert (found.origin, len(found.data.classes), len(found.mean)) == ('the pretrained model', 10, 3)


def test_a_run_that_learns_nothing_keeps_what_it_started_from(toy, trained, tmp_path):
  config = toy('model=hyperbf', **LEARNED, init_from=str(trained), **{'optimizer.learning_rate': 0.0})
  printed = io.StringIO()
  train(config, tmp_path / 'run', Console(file=printed, width=500), ONE)
  assert f'starts from the run of {trained}, with its head' in printed.getvalue()
  assert_equal(params_of(tmp_path / 'run'), params_of(trained))


def test_other_classes_get_a_new_head_even_if_they_are_as_many(toy, trained):
  given = start(toy, trained, dataset=images(8, [f'other {i}' for i in range(10)]))
  assert given.source.endswith('with a new head of 10 classes')
  expected = params_of(trained)
  del expected['head']
  assert_equal(given.params, expected)


def test_positions_follow_the_size_of_the_images(toy, trained):
  larger = images(16, [str(i) for i in range(10)])
  expected = params_of(trained)
  expected['positions'] = np.asarray(resize(expected['positions'], 4, 4))
  assert_equal(start(toy, trained, dataset=larger).params, expected)


def test_the_size_matters_only_to_weights_that_belong_to_tokens(toy, tmp_path):
  larger = images(16, [str(i) for i in range(10)])
  without = LEARNED | {'model.positions': 'none', 'train.epochs': 0.05}
  for model, fits in {'hyperbf': True, 'mixer': False}.items():
    config, folder = toy(f'model={model}', **without), tmp_path / model
    save_untrained(config, folder)
    again = toy(f'model={model}', **without | {'init_from': str(folder)})
    if fits:
      assert make_plan(again, dataset=larger).initial is not None
    else:
      with pytest.raises(UserError, match=r'of a wrong shape: .*it does with --config.data.image_size=8$'):
        make_plan(again, dataset=larger)


def test_another_network_is_refused_with_the_flags_that_help(toy, trained):
  with pytest.raises(UserError, match=r'holds the run, .*: it does with --config.model.depth=1$'):
    start(toy, trained, **{'model.depth': 2})
  with pytest.raises(UserError, match=r"it does with --config.model.depth=1 '--config.model.merge=\(\)'$"):
    start(toy, trained, **{'model.depth': 2, 'model.merge': (1,)})
  with pytest.raises(UserError, match=r'it does with model=hyperbf after the colon of --config, and --config.model.'):
    start(toy, trained, 'vit')


def test_what_holds_no_weights_is_refused(toy, trained, exported, tmp_path, monkeypatch):
  (tmp_path / 'empty').mkdir()
  with pytest.raises(UserError, match='empty holds no weights: expected a run folder'):
    start(toy, tmp_path / 'empty')
  with pytest.raises(UserError, match='999'):
    start(toy, trained / 'checkpoints' / '999')
  with pytest.raises(UserError, match='nowhere holds no weights: expected a run folder'):
    start(toy, tmp_path / 'nowhere')
  model, variables, about = export.load_model(exported)
  monkeypatch.setattr(export, 'load_model', lambda folder: (EditedClassifier(model, 1), variables, about))
  with pytest.raises(UserError, match='holds an edited model: export the model without --edits'):
    own_weights.read(str(exported))


def text_config(path, **changes):
  config = text.get_config('model=hyperbf')
  small = {'model.width': 16, 'model.depth': 1, 'model.heads': 2, 'model.stage2.centers': 12, 'data.length': 24}
  run = {'data.name': 'text_file', 'data.root': str(path), 'train.epochs': 0.05, 'train.batch_size': 8}
  run['log.units'] = False
  config.update_from_flattened_dict(small | run | {'data.validation': 0.1} | changes)
  return resolve(config)


def test_texts(toy, trained, tmp_path):
  one, other = tmp_path / 'one.txt', tmp_path / 'other.txt'
  one.write_text('the cat sat on the mat. ' * 500)
  other.write_text('Dogs lay on the log; a fox ran! ' * 500)
  save_untrained(text_config(one), tmp_path / 'run')
  source, expected = {'init_from': str(tmp_path / 'run')}, params_of_texts(tmp_path / 'run')
  same = make_plan(text_config(one, **source)).initial
  assert_equal(same.params, expected)
  assert same.source.endswith('with its vocabulary')
  fresh = make_plan(text_config(other, **source)).initial
  assert_equal(fresh.params, {name: value for name, value in expected.items() if name != 'embedding'})
  assert 'with new vectors of ' in fresh.source
  masked = make_plan(text_config(one, task='masked_token', **source)).initial
  assert 'embedding' not in masked.params  # its vocabulary has the mask too
  assert train(text_config(other, **source), tmp_path / 'next', QUIET, ONE) is not None
  with pytest.raises(UserError, match='network for images, and task next_token is on texts: name a'):
    make_plan(text_config(one, init_from=str(trained)))
  with pytest.raises(UserError, match='network for texts, and task classification is on images'):
    start(toy, tmp_path / 'run')


def params_of_texts(folder):
  return own_weights.read(str(folder)).params
