"""Tests of the models that come with the package."""

import json

import jax
import numpy as np
import pytest
from rich.console import Console

import hbf
from hbf.cli import pretrained as cli
from hbf.errors import UserError
from hbf.training import pretrained
from hbf.training.loop import train

QUIET = Console(quiet=True)


@pytest.fixture(scope='module')
def run(toy, tmp_path_factory):
  folder = tmp_path_factory.mktemp('run') / 'run'
  train(toy('model=hyperbf', **{'train.epochs': 1.0}), folder, QUIET, jax.devices()[:1])
  return folder


@pytest.fixture
def models(run, tmp_path, monkeypatch):
  """Let the package have one model, and an empty cache. Return the folder of models."""
  monkeypatch.setattr(pretrained, 'MODELS', tmp_path / 'models')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  pretrained.store(run, tmp_path / 'models' / 'toy', 'A toy.')
  return tmp_path / 'models'


def test_a_stored_model_is_the_run_bit_for_bit(run, models):
  images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), np.uint8)
  loaded = hbf.load_pretrained('toy')
  np.testing.assert_array_equal(loaded.predict(images), hbf.load(run).predict(images))
  assert loaded.evaluate()['correct'] == json.loads((run / 'result.json').read_text())['correct']


def test_the_second_call_leaves_the_folder_as_it_is(models):
  first = pretrained.unpack('toy')
  before = sorted((path, path.stat().st_mtime_ns) for path in first.rglob('*'))
  assert pretrained.unpack('toy') == first
  assert sorted((path, path.stat().st_mtime_ns) for path in first.rglob('*')) == before


def test_the_command_prints_the_folder_and_no_warning(models, tmp_path, capsys, caplog):
  caplog.set_level('WARNING', 'absl')  # Orbax warns of intended behavior
  assert cli.main(['toy', f'--workdir={tmp_path / "mine"}']) == 0
  assert capsys.readouterr().out == f'{tmp_path / "mine"}\n' and caplog.messages == []


def test_a_card_states_data_and_score(models):
  card = (models / 'toy' / 'README.md').read_text()
  assert 'A toy.' in card and '| data set | digits |' in card and '| accuracy, % on test |' in card


def test_an_unknown_name_and_a_folder_in_use_are_refused(models, tmp_path):
  with pytest.raises(UserError, match="unknown model 'toi': did you mean 'toy'"):
    hbf.load_pretrained('toi')
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'file').touch()
  with pytest.raises(UserError, match='holds something else than toy'):
    pretrained.unpack('toy', tmp_path / 'mine')
  assert [path.name for path in (tmp_path / 'mine').iterdir()] == ['file']


def test_two_first_uses_at_once_share_one_folder(models, monkeypatch):
  write = pretrained._write_checkpoint

  def slower(*given):
    monkeypatch.setattr(pretrained, '_write_checkpoint', write)
    pretrained.unpack('toy')  # as another process does meanwhile
    write(*given)

  monkeypatch.setattr(pretrained, '_write_checkpoint', slower)
  folder = pretrained.unpack('toy')
  assert [*folder.parent.iterdir()] == [folder] and folder == pretrained.default_workdir('toy')


def test_a_full_disk_is_a_line(models, tmp_path, monkeypatch):
  def full(*_):
    raise ValueError('Error writing "x": No space left on device')  # as TensorStore says it

  monkeypatch.setattr(pretrained, '_write_checkpoint', full)
  with pytest.raises(UserError, match=r'mine could not be written \(no space left on device\): choose another'):
    pretrained.unpack('toy', tmp_path / 'mine')
  assert not (tmp_path / 'mine').exists()


def test_a_model_that_changes_gets_another_folder(models):
  before = pretrained.unpack('toy')
  result = json.loads((models / 'toy' / 'result.json').read_text())
  (models / 'toy' / 'result.json').write_text(json.dumps(result | {'more': 1}))
  assert pretrained.unpack('toy') != before


def test_a_folder_without_a_model_is_refused(models, tmp_path, capsys):
  assert cli.main([f'--workdir={tmp_path / "mine"}']) == 1
  assert 'needs a model: give the NAME of one' in capsys.readouterr().err


def test_damaged_weights_leave_no_folder(models, tmp_path):
  (models / 'toy' / 'model.safetensors').write_bytes(b'torn')
  with pytest.raises(UserError):
    pretrained.unpack('toy', tmp_path / 'mine')
  assert not (tmp_path / 'mine').exists()


@pytest.mark.parametrize('name', pretrained.names())
def test_a_model_of_the_package_loads_and_its_card_has_its_scores(name, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  run = hbf.load_pretrained(name)
  result = json.loads((pretrained.MODELS / name / 'result.json').read_text())
  assert sum(leaf.size for leaf in jax.tree.leaves(run.params)) == result['params']
  card = (pretrained.MODELS / name / 'README.md').read_text()
  about = card.split('\n\n')[1]
  assert card == pretrained.card(pretrained.MODELS / name, about)
