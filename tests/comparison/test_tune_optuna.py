"""Searches with the real Optuna: `make test-optuna`."""

import dataclasses
import json

import pytest

from hbf.comparison import tune
from hbf.comparison.proposals import DRAWN, STUDY, Method, Studies
from hbf.comparison.space import draw, parse_space
from hbf.errors import UserError
from hbf.evaluation.scores import ACCURACY

RATE = 'optimizer.learning_rate'
SPACE = (f'{RATE}=1e-3..1e-1', 'train.label_smoothing=0.0|0.1')
ARMS = ('relu: identity', 'gelu: identity model.stage2.activation=gelu')

# Stands for train.py: the best rate is 1e-2. Bad runs wait after their first evaluation, until they are stopped.
TRAIN = """
import json, math, pathlib, sys, time
flags = dict(argument[2:].split('=', 1) for argument in sys.argv[1:])
rate, workdir = float(flags['config.optimizer.learning_rate']), pathlib.Path(flags['workdir'])
with open(workdir.parent / 'started', 'a') as file:
  print(workdir.name, file=file)
if (workdir.parents[1] / 'out-of-memory').exists():
  sys.exit('error: out of memory')
if rate > 0.05:
  sys.exit('error: training diverged: the loss is not finite')
workdir.mkdir(exist_ok=True)
accuracy = 90 - 10 * abs(math.log10(rate) + 2)
lines = [
  {'step': 1, 'split': 'validation', 'accuracy': accuracy - 1},
  {'step': 2, 'split': 'train', 'loss': rate},
  {'step': 2, 'split': 'validation', 'accuracy': accuracy},
]
texts = [json.dumps(line) + '\\n' for line in lines]
(workdir / 'metrics.jsonl').write_text(texts[0])
if (workdir.parent / 'slow').exists() and accuracy < 86:
  time.sleep(60)
(workdir / 'metrics.jsonl').write_text(''.join(texts))
(workdir / 'result.json').write_text('{}')
"""


@pytest.fixture(scope='module', autouse=True)
def optuna():
  return pytest.importorskip('optuna')


@pytest.fixture
def states(optuna, tmp_path):
  """Return a function that returns the states of an arm's trials in its study."""

  def read(label):
    study = optuna.load_study(study_name=label, storage=f'sqlite:///{tmp_path}/search/{STUDY}')
    return [trial.state.name for trial in study.trials]

  return read


def stored(tmp_path):
  return json.loads((tmp_path / 'search' / 'tuning.json').read_text())


def options_of(found, label):
  return [trial['options'] for trial in found['trials'] if trial['label'] == label]


def test_tpe_begins_with_the_random_draws_and_goes_on_with_its_own(asked, search, states, tmp_path):
  workdir, count = tmp_path / 'search', DRAWN + 2
  workdir.mkdir()
  # A call that was killed after it asked: the trial has options, and no run has begun.
  killed = Studies(workdir, Method('tpe'), parse_space(SPACE), count, ACCURACY, tune.FIRST_SEED)
  first = killed.options('gelu', 0)

  (tmp_path / 'out-of-memory').touch()
  done, started = search(asked, 2, Method('tpe'))
  assert (done, len(started), states('gelu')) == (False, 4, ['RUNNING', 'RUNNING'])
  before = stored(tmp_path)
  (tmp_path / 'out-of-memory').unlink()
  done, started = search(asked, count, Method('tpe'))
  assert (done, len(started)) == (True, 2 * count)  # each trial once

  found = stored(tmp_path)
  for label in ('relu', 'gelu'):
    options = options_of(found, label)
    assert options[:DRAWN] == draw(parse_space(SPACE), label, DRAWN)
    assert options[:2] == options_of(before, label)
    assert len(options) == len(states(label)) == count
    assert set(states(label)) <= {'COMPLETE', 'PRUNED'}  # diverged trials are PRUNED
  assert options_of(found, 'gelu')[0] == first
  scores = [trial['held_out'] for trial in found['trials'] if trial['label'] == 'relu' and trial['held_out']]
  assert found['best_so_far']['relu'][-1] == max(scores)
  assert found['best_so_far']['relu'] == sorted(found['best_so_far']['relu'])
  assert search(asked, count, Method('tpe')) == (True, [])

  for changed, method, message in (
    (asked, Method(), r'has a search with --sampler=tpe and --noprune: give the same flags'),
    (dataclasses.replace(asked, space=SPACE[:1]), Method('tpe'), 'the search has another space for arm relu'),
  ):
    with pytest.raises(UserError, match=message):
      search(changed, count, method)


def test_a_bad_trial_is_stopped_for_good_and_counts(asked, search, states, tmp_path, capsys):
  asked, workdir = dataclasses.replace(asked, space=SPACE[:1], arms=ARMS[:1]), tmp_path / 'search'
  method = Method('random', prune=True)
  assert search(asked, 9, method)[0]
  assert states('relu').count('COMPLETE') == DRAWN + 1
  (workdir / 'slow').touch()
  done, started = search(asked, 14, method)
  assert (done, len(started)) == (True, 5)
  found = stored(tmp_path)
  pruned = [trial for trial in found['trials'] if 'pruned after 1 evaluations' in trial['failed']]
  diverged = [trial for trial in found['trials'] if 'diverged' in trial['failed']]
  assert pruned and states('relu').count('PRUNED') == len(pruned) + len(diverged)
  assert len(found['expected_best']['relu']) == 14  # all trials count
  assert search(asked, 14, method) == (True, [])  # what was stopped is not continued
  assert f'| {len(pruned)} ' in capsys.readouterr().out
  assert tune.with_best(asked, workdir / 'tuning.json').arms
