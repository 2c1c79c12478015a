"""Tests of the accuracy of a run against its number of centers."""

import functools
import json

import jax
import pytest
from rich.console import Console

from hbf.analysis import nested
from hbf.training.convert import write
from hbf.training.experiment import prepare
from hbf.training.loop import train

ONE = jax.devices()[:1]
QUIET = Console(quiet=True)


@pytest.mark.slow
def test_the_curve_ends_at_the_runs_own_figure(tmp_path, toy, capsys):
  workdir = tmp_path / 'run'
  nests = {'model.stage2.nested': True, 'model.stage2.centers': 3, 'train.average': 0.9, 'log.units': True}
  result = train(toy(**nests), workdir, QUIET, ONE)
  assert nested.main(['--workdir', str(workdir)]) == 0
  rows = json.loads((workdir / 'nested.json').read_text())['rows']
  assert [row['centers'] for row in rows] == [1, 2, 3]
  assert (rows[-1]['n'], rows[-1]['correct']) == (result['n'], result['correct'])
  assert rows[-1]['params'] == result['params'] > rows[0]['params']
  assert len({row['nll'] for row in rows}) == 3
  assert (workdir / 'nested.png').stat().st_size > 0
  (last,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith('| 3 ')]
  assert f'{result["params"]:,}' in last
  assert nested.main(['--workdir', str(workdir), '--counts', '2']) == 0
  assert json.loads((workdir / 'nested.json').read_text())['rows'] == rows[1:2]
  assert nested.main(['--workdir', str(workdir), '--counts', '3', '--average']) == 0
  (row,) = json.loads((workdir / 'nested.json').read_text())['rows']
  assert row['correct'] == result['average']['correct']
  assert row['nll'] == pytest.approx(result['average']['nll'], rel=1e-6)  # a sum over eight devices, and over one
  capsys.readouterr()
  for wrong, message in (('4', '4 centers can not be taken'), ('1,b', "--counts has 'b'")):
    assert nested.main(['--workdir', str(workdir), '--counts', wrong]) == 1
    assert message in capsys.readouterr().err


def test_a_run_without_centers_is_refused(tmp_path, toy, capsys):
  experiment = prepare(toy('model=vit'), devices=ONE)
  image = jax.numpy.zeros((1, *experiment.task.dataset.image_shape))
  init = jax.jit(functools.partial(experiment.model.init, train=False))
  write(tmp_path / 'run', experiment, init(jax.random.key(0), image)['params'])
  assert nested.main(['--workdir', str(tmp_path / 'run')]) == 1
  assert 'error: vit has no centers in its stage 2' in capsys.readouterr().err
