import json
import os

import pytest
from rich.console import Console

from hbf.analysis import nested
from hbf.training.loop import train

QUIET = Console(file=open(os.devnull, 'w'))  # noqa: SIM115 (lives as long as the tests)


@pytest.fixture
def one_device(use_devices):
  use_devices(1)


def test_the_curve_ends_at_the_runs_own_figure(tmp_path, toy, one_device, capsys):
  result = train(toy(**{'model.stage2.nested': True}), tmp_path / 'run', QUIET)
  assert nested.main(['--workdir', str(tmp_path / 'run')]) == 0
  rows = json.loads((tmp_path / 'run' / 'nested.json').read_text())['rows']
  assert [row['centres'] for row in rows] == [1, 2, 4, 8, 12]
  assert (rows[-1]['n'], rows[-1]['correct']) == (result['n'], result['correct'])
  assert rows[-1]['params'] == result['params'] > rows[0]['params']
  assert len({row['nll'] for row in rows}) == 5
  assert (tmp_path / 'run' / 'nested.png').stat().st_size > 0
  assert f'| 12 | {result["params"]:,} |' in capsys.readouterr().out
  assert nested.main(['--workdir', str(tmp_path / 'run'), '--counts', '3,12']) == 0
  rows = json.loads((tmp_path / 'run' / 'nested.json').read_text())['rows']
  assert [row['centres'] for row in rows] == [3, 12]
  for wrong, message in (('13', '13 centres can not be taken'), ('1,b', "not 'b'")):
    assert nested.main(['--workdir', str(tmp_path / 'run'), '--counts', wrong]) == 1
    assert message in capsys.readouterr().err


def test_a_run_without_centres_is_refused(tmp_path, toy, one_device, capsys):
  train(toy('model=vit'), tmp_path / 'run', QUIET)
  assert nested.main(['--workdir', str(tmp_path / 'run')]) == 1
  assert 'error: vit has no centres in its stage 2' in capsys.readouterr().err
