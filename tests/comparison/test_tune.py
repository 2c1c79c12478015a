"""Tests of searches: arms have the same draws and numbers of trials, and best options are trained with new seeds."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import types

import numpy as np
import pytest

from hbf.comparison import tune
from hbf.comparison.devices import Device
from hbf.comparison.grid import Comparison, label_of, make_grid, with_arms
from hbf.comparison.presets import PRESETS
from hbf.comparison.proposals import RANDOM_SEARCH, Method
from hbf.comparison.space import corners, draw, parse_space
from hbf.config.command_line import read_config
from hbf.errors import UserError
from hbf.evaluation.scores import ACCURACY, NLL
from hbf.training.schema import stamp
from hbf.training.workdir import held, write_json

RATE, DECAY = 'optimizer.learning_rate', 'optimizer.weight_decay'
SPACE = (f'{RATE}=1e-3..1e-1', 'train.label_smoothing=0.0|0.1', f'gelu: {DECAY}=0.01..0.3')
ARMS = ('relu: identity', 'gelu: identity model.stage2.activation=gelu')

# Stands for train.py: the best rate is 1e-2, and some rates diverge or end the process.
TRAIN = """
import json, math, pathlib, sys
flags = dict(argument[2:].split('=', 1) for argument in sys.argv[1:])
rate, workdir = float(flags['config.optimizer.learning_rate']), pathlib.Path(flags['workdir'])
with open(workdir.parent / 'started', 'a') as file:
  print(workdir.name, file=file)
if rate > 0.05:
  sys.exit('error: training diverged: the loss is not finite')
if (workdir.parent / 'out-of-memory').exists():
  sys.exit('error: out of memory')
workdir.mkdir(exist_ok=True)
accuracy = 90 - 10 * abs(math.log10(rate) + 2)
lines = [
  {'step': 1, 'split': 'validation', 'accuracy': 99.0},
  {'step': 2, 'split': 'train', 'loss': rate},
  {'step': 2, 'split': 'validation', 'accuracy': accuracy},
  {'step': 3, 'split': 'train', 'skipped': 1},
  {'step': 3, 'split': 'test', 'accuracy': 12.34},
]
(workdir / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\\n' for line in lines))
(workdir / 'result.json').write_text('{}')
"""


def stored(tmp_path):
  return json.loads((tmp_path / 'search' / 'tuning.json').read_text())


def test_a_trial_whose_score_is_not_a_number_has_diverged():
  """A network of texts may have finite parameters and an infinite loss."""
  names = [field.name for field in dataclasses.fields(tune.Trial) if field.default is dataclasses.MISSING]
  trial = tune.Trial(**dict.fromkeys(names) | {'task': 'next_token', 'failed': 'not run yet', 'run': 'any'})
  lines = [{'split': 'train', 'loss': 2.0}, {'split': 'validation', 'token_nll': float('nan')}]
  logs = types.SimpleNamespace(failure=lambda run: None, metrics=lambda run: lines)
  found = trial.measured(logs)
  assert found.diverged and found.settled and found.held_out is None
  lines[1]['token_nll'] = float('inf')
  assert trial.measured(logs).diverged
  lines[1]['token_nll'] = 1.5
  assert (trial.measured(logs).held_out, trial.measured(logs).failed) == (1.5, '')
  del lines[1]
  with pytest.raises(UserError, match=r'the log of any is damaged \(no held-out score\): remove this run folder'):
    trial.measured(logs)


def test_all_arms_have_the_same_draws_of_the_options_that_they_share():
  space = parse_space(SPACE)
  plain, own = draw(space, 'relu', 64), draw(space, 'gelu', 64)
  assert [{key: options[key] for key in plain[0]} for options in own] == plain
  assert DECAY not in plain[0]
  assert plain[:7] == draw(space, 'relu', 7) == draw(space[::-1], 'other', 7)
  rates = np.log10([float(options[RATE]) for options in plain])
  assert -3 <= rates.min() < -2.8
  assert -1.2 < rates.max() <= -1
  assert abs(rates.mean() + 2) < 0.25
  smoothing = [options['train.label_smoothing'] for options in plain]
  assert 20 < smoothing.count('0.1') < 44
  assert abs(np.corrcoef(rates, np.asarray(smoothing, float))[0, 1]) < 0.3


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('optimizer.learning_rate', 'no distribution of a key'),
    (f'{RATE}=0..1', 'needs 0 < LOW < HIGH'),
    (f'{RATE}=1e-2..1e-3', 'needs 0 < LOW < HIGH'),
    (f'{RATE}=1.2.3..4', 'does not have two numbers'),
    ('a b=1|2', 'no distribution of a key'),
  ],
)
def test_what_is_no_distribution_is_refused(line, message):
  with pytest.raises(UserError, match=message):
    parse_space([line])


def test_the_expected_best_is_the_mean_over_all_subsets():
  values = [70.0, 90.0, 60.0, 80.0]
  pairs = [max(a, b) for i, a in enumerate(values) for b in values[:i]]
  assert tune.expected_best(values, ACCURACY) == pytest.approx([75, np.mean(pairs), 87.5, 90])
  assert tune.expected_best([3.0, 1.0, 2.0], NLL) == pytest.approx([2, 4 / 3, 1])


def test_a_search_is_equal_and_its_best_goes_on_with_fresh_seeds(asked, search, tmp_path, capsys):
  done, started = search(asked, 4)
  shown, found = capsys.readouterr().out, stored(tmp_path)
  assert done
  assert started == [f'digits-{label}-t0{n}-{1000 + n}' for n in range(4) for label in ('relu', 'gelu')]
  by_label = {label: [trial for trial in found['trials'] if trial['label'] == label] for label in ('relu', 'gelu')}
  assert [t['options'][RATE] for t in by_label['relu']] == [t['options'][RATE] for t in by_label['gelu']]
  for trial in found['trials']:
    rate = float(trial['options'][RATE])
    if rate > 0.05:
      assert (trial['held_out'], trial['failed'][:24]) == (None, 'error: training diverged')
    else:
      assert (trial['held_out'], trial['loss']) == (pytest.approx(90 - 10 * abs(np.log10(rate) + 2)), rate)
  best = max((t for t in by_label['gelu'] if t['held_out']), key=lambda trial: trial['held_out'])
  assert found['best']['gelu'] == {'trial': best['number'], 'options': best['options']}
  assert len(found['expected_best']['gelu']) == 4
  assert found['expected_best']['gelu'][-1] == pytest.approx(best['held_out'])
  assert (tmp_path / 'search' / 'tuning.png').read_bytes().startswith(b'\x89PNG')
  assert re.search(rf'^\| gelu +\| 4 .*{best["held_out"]:.2f}.*{RATE}={best["options"][RATE]}', shown, re.MULTILINE)
  assert '12.34' not in shown + json.dumps(found)  # nothing of the test split

  tune.report(tmp_path / 'search')
  assert (capsys.readouterr().out, stored(tmp_path)) == (shown, found)
  tuned = tune.with_best(asked, tmp_path / 'search' / 'tuning.json')
  assert [label_of(arm) for arm in tuned.arms] == ['relu', 'gelu']
  config = make_grid(tuned).arms[1].config(0)
  assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (
    float(best['options'][RATE]),
    float(best['options'][DECAY]),
  )
  assert config.model.stage2.activation == 'gelu'
  alone = tune.with_best(with_arms(asked, ['gelu']), tmp_path / 'search' / 'tuning.json')
  assert (alone.arms, alone.like) == (tuned.arms[1:], tuned.arms[0])
  beside = tune.with_best(dataclasses.replace(asked, like='vit'), tmp_path / 'search' / 'tuning.json')
  assert (beside.arms, beside.like) == (tuned.arms, 'vit')  # the arm that gives the sizes was not searched


def test_a_search_goes_on_with_what_is_missing(asked, search, tmp_path):
  workdir = tmp_path / 'search'
  workdir.mkdir()
  (workdir / '.lock').touch()  # of a call that was killed at its start
  assert search(with_arms(asked, ['relu']), 1) == (True, ['digits-relu-t00-1000'])
  (workdir / 'out-of-memory').touch()
  done, started = search(asked, 2)
  assert (done, len(started)) == (False, 3)
  with pytest.raises(UserError, match=r'numbers of trials \(relu 1, gelu 0\)|gelu has no finished trial'):
    tune.with_best(asked, workdir / 'tuning.json')
  (workdir / 'out-of-memory').unlink()
  assert search(asked, 2) == (True, started)
  assert search(asked, 2) == (True, [])  # what diverged is not tried again
  with pytest.raises(UserError, match='digits, not on cifar'):
    search(Comparison(('configs/cifar10.py',), ARMS, space=SPACE), 1)


def test_tuned_arms_are_those_that_were_searched_with_seeds_that_were_not(asked, search, tmp_path):
  search(with_arms(asked, ['relu']), 1)
  path = tmp_path / 'search' / 'tuning.json'
  for changed, message in (
    ({'seeds': (0, 1000)}, r'a trial of .*tuning\.json used seed 1000: give --seeds'),
    ({'arms': ('gelu',)}, "unknown arm of .*tuning.json 'gelu'"),
    ({'arms': ('relu: mixer',)}, "arm relu is 'relu: mixer' here and 'relu: identity' in"),
  ):
    with pytest.raises(UserError, match=message):
      tune.with_best(Comparison(asked.configs, **{'arms': ARMS[:1], **changed}), path)
  with pytest.raises(UserError, match='is not there'):
    tune.with_best(asked, tmp_path / 'nothing.json')


@pytest.mark.parametrize(
  ('changes', 'count', 'message'),
  [
    ({'space': ()}, 1, 'a search needs a space'),
    ({'arms': ()}, 1, 'needs at least one arm and one trial'),
    ({}, 0, 'needs at least one arm and one trial'),
    ({'configs': ('configs/digits.py', 'configs/cifar10.py')}, 1, 'takes one config, but 2 were given'),
    ({'space': ('rleu: model.heads=2|4',)}, 1, 'option of arm rleu: the arms are relu, gelu'),
    ({'space': ('model.haeds=2|4',)}, 1, "unknown config key 'haeds'"),
    ({'overrides': ('--config.data.validation=0.0',)}, 1, 'set data.validation to more than 0'),
    ({'space': ('model.expansion=1.0|2.0',)}, 1, r'the space has model\.expansion, but the parameters of each trial'),
    ({'space': ('train.epochs=1.0|2.0',), 'operations': '1e9'}, 1, r'has train\.epochs, and every trial gets 1e9'),
  ],
)
def test_what_can_not_be_searched_is_refused(asked, search, tmp_path, changes, count, message):
  changes = {**changes, 'overrides': (*asked.overrides, *changes.get('overrides', ()))}
  with pytest.raises(UserError, match=message):
    search(dataclasses.replace(asked, **changes), count)
  assert not (tmp_path / 'search').exists()


@pytest.mark.parametrize('method', [Method('tpe'), Method('random', prune=True)])
def test_without_optuna_one_line_says_how_to_install_it(asked, tmp_path, monkeypatch, method):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=r"needs the package optuna: install it by pip install 'hbf\[optuna\]'$"):
    tune.tune(asked, 1, tmp_path / 'search', [Device()], method)
  assert not (tmp_path / 'search').exists()


def test_a_path_that_optuna_cannot_use_is_refused(asked, tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)  # as if it were installed
  for name, wrong in (('what?', '?'), ('{here}', '{')):
    with pytest.raises(UserError, match=rf'has a \{wrong} in its path, which Optuna cannot use: choose another'):
      tune.tune(asked, 1, tmp_path / name, [Device()], Method('tpe'))
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize('method', [RANDOM_SEARCH, Method('tpe')])
def test_trials_on_other_data_are_refused_before_anything_runs(asked, search, tmp_path, monkeypatch, method):
  """Optuna's later trials are new runs, so all stored trials count."""
  search(asked, 1)
  path = tmp_path / 'search' / 'tuning.json'
  found = json.loads(path.read_text())
  found['trials'] = [trial | method._asdict() for trial in found['trials']]
  path.write_text(json.dumps(found))
  trial = tune.load_trials(path)[0]
  config = read_config([*trial.arguments, f'--config.seed={trial.seed}'])
  write_json(tmp_path / 'search' / trial.run / 'config.json', stamp(json.loads(config.to_json())))
  write_json(tmp_path / 'search' / trial.run / 'data.json', {'name': 'digits', 'fingerprint': 'other'})
  monkeypatch.setattr(tune, 'check_optuna', lambda method, folder: None)
  with pytest.raises(UserError, match=rf'{trial.run} has other data than the data of this call'):
    search(asked, 2, method)


def test_a_folder_of_something_else_is_left_alone(asked, search, tmp_path):
  (tmp_path / 'search').mkdir()
  (tmp_path / 'search' / 'grid.json').write_text('{}')
  with pytest.raises(UserError, match='is not a search'):
    search(asked, 1)


@pytest.mark.parametrize('method', [Method('tpe'), Method('random', prune=True)])
def test_every_choice_of_a_search_with_optuna_is_checked_before_it_starts(asked, tmp_path, monkeypatch, method):
  """Optuna proposes the options of later trials only when earlier ones have ended."""
  monkeypatch.setattr(tune, 'check_optuna', lambda method, folder: None)
  space = ('train.label_smoothing=0.0|0.1', 'gelu: model.stage2.activation=gelu|relu|silu')
  with pytest.raises(UserError, match=r"unknown model\.stage2\.activation 'silu'"):
    tune.tune(dataclasses.replace(asked, space=space), 1, tmp_path / 'search', [Device()], method)
  assert not (tmp_path / 'search').exists()


def test_corners_contain_every_choice_and_both_ends():
  space = parse_space((f'{RATE}=1e-3..1e-1', 'model.heads=2|4|8', 'gelu: model.heads=2'))
  assert corners(space, 'relu') == [
    {RATE: '0.001', 'model.heads': '2'},
    {RATE: '0.1', 'model.heads': '4'},
    {RATE: '0.001', 'model.heads': '8'},
  ]
  assert corners(space, 'gelu') == [{RATE: '0.001', 'model.heads': '2'}, {RATE: '0.1', 'model.heads': '2'}]
  assert corners((), 'relu') == [{}]


def test_a_report_during_a_search_writes_nothing(asked, search, tmp_path, capsys):
  search(asked, 1)
  workdir, shown = tmp_path / 'search', capsys.readouterr().out
  before = {path.name: path.stat().st_ino for path in workdir.glob('tuning.*')}
  with held(workdir):
    tune.report(workdir)
  assert capsys.readouterr().out == shown
  assert {path.name: path.stat().st_ino for path in workdir.glob('tuning.*')} == before
  tune.report(workdir)
  assert {path.name: path.stat().st_ino for path in workdir.glob('tuning.*')} != before


def test_a_search_has_one_recipe(asked, search):
  search(asked, 1)
  (config,) = asked.configs
  with pytest.raises(UserError, match=r'the folder has arms of .*, and --config=.*recipe=laptop differs in more'):
    search(dataclasses.replace(asked, configs=(config.replace('recipe=small', 'recipe=laptop'),)), 2)


def test_a_search_needs_a_local_folder(asked):
  with pytest.raises(UserError, match='s3://bucket/search is a URL, but a local folder is needed'):
    tune.tune(asked, 1, pathlib.Path('s3://bucket/search'), [Device()])


@pytest.mark.parametrize('name', [name for name, preset in PRESETS.items() if preset.space])
def test_the_spaces_of_presets_are_distributions_of_their_arms_options(name):
  preset = PRESETS[name]
  assert {option.label for option in parse_space(preset.space)} <= {'', *map(label_of, preset.arms)}
