"""Searches with a stand-in for train.py. A module that uses these fixtures has SPACE, ARMS, and TRAIN, the script."""

import sys

import pytest

from hbf.comparison import runs, tune
from hbf.comparison.devices import Device
from hbf.comparison.grid import Comparison
from hbf.comparison.proposals import RANDOM_SEARCH


@pytest.fixture
def asked(request, digits_dir):
  overrides = (f'--config.data.dir={digits_dir}', '--config.model.depth=1')  # what is deep is traced for long
  return Comparison(
    ('configs/digits.py:recipe=small',), request.module.ARMS, (0, 1), overrides, space=request.module.SPACE
  )


@pytest.fixture
def search(request, tmp_path, monkeypatch):
  """Return a function that searches with a stand-in for train.py. It returns the result and the started runs."""
  script = tmp_path / 'train.py'
  script.write_text(request.module.TRAIN)
  monkeypatch.setattr(runs, 'TRAIN', (sys.executable, str(script)))
  monkeypatch.setattr(runs, 'POLL_SECONDS', 0.01)

  def run(asked, count, method=RANDOM_SEARCH, workdir=tmp_path / 'search'):
    started = workdir / 'started'
    started.unlink(missing_ok=True)
    done = tune.tune(asked, count, workdir, [Device()], method)
    return done, started.read_text().split() if started.exists() else []

  return run
