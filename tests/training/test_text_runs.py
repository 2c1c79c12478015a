"""Tests of runs on texts, which have the same loop, checkpoints and commands as runs on images."""

import json
import shutil

import jax
import numpy as np
import pytest
from toy_runs import ONE, QUIET, assert_same_run, stop_at, timeless

import hbf
from configs import text
from hbf.editing import places
from hbf.editing import text as text_edits
from hbf.editing.edit import edit_files
from hbf.errors import UserError
from hbf.models.generation import Sampling
from hbf.training import export
from hbf.training.edits_file import FILE, read_edits, to_rows, undo
from hbf.training.evaluate import evaluate_workdir
from hbf.training.generate import write_texts
from hbf.training.loop import train
from hbf.training.workdir import load_config
from tests.commands import run_each

SMALL = {
  'model.width': 16,
  'model.depth': 1,
  'model.heads': 2,
  'data.length': 24,
  'data.validation': 0.1,
  'train.epochs': 0.1,
  'train.batch_size': 8,
  'train.average': 0.9,
  'optimizer.warmup': '3steps',
  'evaluate.every': '10steps',
  'checkpoint.every': '10steps',
  'log.every': '5steps',
  'log.units': False,
}

LEARNING = {'train.epochs': 0.3, 'optimizer.learning_rate': 1e-2}


@pytest.fixture(scope='module')
def sentences(tmp_path_factory):
  """Return the path of a text in which two letters determine the next one."""
  path = tmp_path_factory.mktemp('texts') / 'sentences.txt'
  path.write_text('the cat sat on the mat and the dog lay on the log. ' * 900)
  return path


@pytest.fixture(scope='module')
def make(sentences):
  def config(arguments='', **changes):
    made = text.get_config(arguments)
    made.update_from_flattened_dict({'data.name': 'text_file', 'data.root': str(sentences), **SMALL, **changes})
    for stage, option in (('stage2', 'centers'), ('stage2', 'hidden'), ('stage1', 'hidden')):
      if option in made.model[stage]:
        made.model[stage][option] = 12
    return made

  return config


@pytest.fixture(scope='module')
def finished(tmp_path_factory, make):
  workdir, config = tmp_path_factory.mktemp('runs') / 'run', make(**LEARNING, **{'log.units': True})
  return workdir, config, train(config, workdir, QUIET, ONE)


def test_a_run_learns_and_says_so_in_its_own_words(finished):
  workdir, config, result = finished
  assert result['task'] == 'next_token' and result['n'] == 4590 - 1 and result['flops_per_token'] > 0
  assert result['token_nll'] < 2.0 and result['bits_per_byte'] == pytest.approx(result['token_nll'] / np.log(2))
  assert result['perplexity'] == pytest.approx(np.exp(result['token_nll'])) and result['tokens_per_second'] > 0
  lines = timeless(workdir)
  scores = {line['step']: line['token_nll'] for line in lines if line['split'] == 'validation'}
  assert scores and all({'loss', 'accuracy'} <= line.keys() for line in lines if line['split'] == 'train')
  assert evaluate_workdir(workdir, 'best', 'validation', ONE).result['checkpoint'] == min(scores, key=scores.get)
  assert config.task == load_config(workdir).task


def test_evaluation_repeats_the_result_and_has_figures_by_position(finished):
  workdir, _, result = finished
  found = evaluate_workdir(workdir, 'latest', 'test', jax.devices()[:2]).result
  assert (found['n'], found['correct']) == (result['n'], result['correct'])
  assert found['token_nll'] == pytest.approx(result['token_nll'], rel=1e-5)
  assert [place['position'] for place in found['by_position']] == list(range(24))
  assert found['by_position'][0]['token_nll'] > found['by_position'][-1]['token_nll']  # it knows nothing of before


def test_an_interrupted_run_goes_on_bit_for_bit(make, tmp_path, monkeypatch):
  """It goes on from a stream, although it began with a text in device memory."""
  free = {'optimizer.name': 'schedule_free', 'optimizer.schedule': 'constant', 'optimizer.minimum_rate': 0.0}
  config = make('model=vit', **{'model.dropout': 0.1, 'train.average': 0.0}, **free)
  whole = train(config, tmp_path / 'whole', QUIET, ONE)
  assert whole is not None
  stop_at(monkeypatch, 15)
  assert train(config, tmp_path / 'parts', QUIET, ONE) is None
  monkeypatch.undo()
  config.data.input = 'stream'
  assert train(config, tmp_path / 'parts', QUIET, ONE) is not None
  assert_same_run(tmp_path / 'whole', tmp_path / 'parts')


def test_a_stream_starts_from_the_same_parameters_as_a_text_in_device_memory(make, tmp_path):
  """The centers of this network start at tokens of the first batch."""
  found = []
  for kind in ('device', 'stream'):
    config = make('model=hyperbf', **{'data.input': kind, 'train.epochs': 0.02})
    assert config.model.stage2.centers_init == 'tokens'
    found.append(train(config, tmp_path / kind, QUIET, ONE)['token_nll'])
  assert found[0] == pytest.approx(found[1], rel=1e-6)  # after four steps that compile differently


@pytest.mark.slow
def test_devices_and_parts_of_a_batch_do_not_matter(make, tmp_path):
  sgd = {'optimizer.name': 'sgd', 'optimizer.clip': 0.0, 'train.epochs': 0.02}
  sgd |= {'data.validation': 0.0, 'train.average': 0.0}
  found = []
  for number, (devices, changes) in enumerate([(1, {}), (2, {'train.accumulate': 2})]):
    config = make('model=vit', **sgd, **changes)
    found.append(train(config, tmp_path / str(number), QUIET, jax.devices()[:devices])['token_nll'])
  np.testing.assert_allclose(found[1:], found[0], rtol=1e-5)


@pytest.mark.slow
def test_masked_tokens_are_learned_too(make, tmp_path):
  changes = {'task': 'masked_token', 'data.validation': 0.0, 'train.average': 0.0}
  result = train(make('model=amlp', **LEARNING, **changes), tmp_path / 'run', QUIET, ONE)
  assert 4 * 191 <= result['n'] <= 4 * 192  # the last window ends with the text
  assert result['token_nll'] < np.log(17) and 'bits_per_byte' not in result
  with pytest.raises(UserError, match='a run of task masked_token: give a run of task next_token'):
    write_texts(tmp_path / 'run', ['the'], 5, Sampling())
  with pytest.raises(ValueError, match='a run of task masked_token: give a run of task next_token'):
    hbf.load(tmp_path / 'run').generate(['the'], 5)


@pytest.mark.slow
def test_a_trained_model_goes_on_beyond_its_length_without_its_text(finished, sentences):
  workdir, _, _ = finished
  hidden = sentences.with_suffix('.hidden')
  sentences.rename(hidden)
  try:
    one, two = write_texts(workdir, ['the cat', 'and the dog lay'], 60, Sampling(temperature=0))
    assert hbf.load(workdir).generate(['the cat', 'and the dog lay'], 60, temperature=0) == [one, two]
  finally:
    hidden.rename(sentences)
  assert len(one) == len(two) == 60 and {*one, *two} <= {*'the cat sat on the mat and the dog lay on the log. '}
  assert write_texts(workdir, ['and the dog lay'], 60, Sampling(temperature=0)) == [two]
  ended = write_texts(workdir, ['the cat'], 60, Sampling(temperature=0), stop=' ')
  assert ended == [one.partition(' ')[0]]


@pytest.mark.parametrize(
  ('prompt', 'stop', 'said'),
  [
    ('', '', 'prompt 0 is empty'),
    ('THE', '', "lacks the characters 'E', 'H', 'T'"),
    ('the cat ' * 10, '', r'prompt 0 has 80 tokens.*room for 24'),
    ('the', 'cat', "stop='cat' is 3 tokens"),
    ('caf\udce9', '', 'byte 3 of the text is not UTF-8'),
    ('the', '\udce9', 'byte 0 of the text is not UTF-8'),
  ],
)
def test_what_can_not_be_written_is_said(finished, prompt, stop, said):
  with pytest.raises(UserError, match=said):
    write_texts(finished[0], [prompt], 5, Sampling(), stop=stop)


def test_a_seed_of_draws_has_32_bits(finished):
  with pytest.raises(UserError, match='seed is 4294967296: expected a whole number from 0 to 4294967295'):
    write_texts(finished[0], ['the'], 5, Sampling(), seed=2**32)


@pytest.mark.slow
def test_a_prompt_that_is_not_utf8_is_continued_by_a_model_of_bytes(make, tmp_path):
  train(make(**{'data.tokenizer': 'bytes', 'train.epochs': 0.02}), tmp_path / 'run', QUIET, ONE)
  flags = [f'--workdir={tmp_path}/run', '--prompt=caf\udce9', '--count=3', '--temperature=0']
  ((status, printed, errors),) = run_each([('hbf/cli/generate.py', *flags)])
  assert (status, errors) == (0, '') and printed.startswith(r'caf\udce9') and len(printed) > len(r'caf\udce9\n')


def test_a_stage_that_can_not_be_causal_is_refused_before_anything_is_written(make, tmp_path):
  with pytest.raises(UserError, match='AveragePooling mixes a token with later tokens'):
    train(make('model=pooling'), tmp_path / 'run', QUIET, ONE)
  with pytest.raises(UserError, match='a window has 90,000'):
    train(make(**{'data.length': 90_000}), tmp_path / 'run', QUIET, ONE)
  assert not (tmp_path / 'run').exists()


def test_another_text_is_not_the_runs(finished, sentences, tmp_path):
  other = tmp_path / 'other.txt'
  other.write_text(sentences.read_text().replace('cat', 'tac'))
  with pytest.raises(UserError, match=r'trained on other data \(as many examples of the same kind, but others\)'):
    evaluate_workdir(finished[0], 'latest', 'test', ONE, root=str(other))
  other.write_text(sentences.read_text() + 'A cat!')
  with pytest.raises(UserError, match=r'trained on other data \(other tokens'):
    evaluate_workdir(finished[0], 'latest', 'test', ONE, root=str(other))
  assert json.loads((finished[0] / 'data.json').read_text())['tokenizer']['kind'] == 'characters'


def test_texts_have_no_copies(finished):
  with pytest.raises(UserError, match='copies=mirror is for images; the run is on texts'):
    evaluate_workdir(finished[0], 'latest', 'test', ONE, copies='mirror')


PROMPT, ANSWER = 'the cat sat on ', 'gold.'


@pytest.fixture(scope='module')
def few():
  """Guard few places, and measure the metric on few copies."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(text_edits, 'GUARDED', 480)
    patch.setattr(places, 'BEGINNINGS', 20)
    yield


@pytest.fixture(scope='module')
def edited(tmp_path_factory, finished, few):
  """A copy of the run with an edit, made as by the command. And the numbers that the command prints."""
  folder = shutil.copytree(finished[0], tmp_path_factory.mktemp('edited') / 'run')
  return folder, text_edits.edit_text(folder, PROMPT, ANSWER)


def write(folder, edits):
  return write_texts(folder, [PROMPT], len(ANSWER), Sampling(temperature=0), edits=edits)


def test_an_edited_model_writes_the_answer_and_only_if_asked_to(edited, finished):
  folder, made = edited
  assert made.guarded == 480 and made.changed < 10  # some guarded places have the same text before them
  assert write(folder, True) == [ANSWER] != write(folder, False)
  (edit,) = read_edits(folder).edits
  assert (edit.source, edit.label, len(edit.centers)) == (PROMPT, ANSWER, len(ANSWER))
  assert [edit.was] == write(folder, False)
  assert to_rows(read_edits(folder))[0][1:4] == (f'‘{PROMPT}’', edit.was, ANSWER)
  result = evaluate_workdir(folder, 'latest', 'test', ONE, edits=True).result
  assert result['edits'] == len(ANSWER) and result['n'] == finished[2]['n']


def test_undo_of_a_text_edit_is_exact(edited, finished, tmp_path, few):
  folder = shutil.copytree(edited[0], tmp_path / 'run')
  text_edits.edit_text(folder, 'the dog lay on ', 'mat')
  assert [len(edit.centers) for edit in read_edits(folder).edits] == [5, 3]
  undo(folder, 1)
  again, first = (read_edits(z).params for z in (folder, edited[0]))
  jax.tree.map(np.testing.assert_array_equal, again, first)
  undo(folder, 0)
  assert not (folder / FILE).exists()
  run = hbf.load(folder)
  bare = hbf.load(edited[0], edits=True).undo()
  assert bare.model == run.model and bare.edits is None
  jax.tree.map(np.testing.assert_array_equal, dict(bare.params), dict(run.params))


def test_prompts_are_edited_in_python_as_by_the_command(edited, finished, few):
  run = hbf.edit(hbf.load(finished[0]), [PROMPT], [ANSWER])
  np.testing.assert_array_equal(run.edits.params['centers'], read_edits(edited[0]).params['centers'])
  assert run.generate([PROMPT], 5, temperature=0) == [ANSWER]
  with pytest.raises(UserError, match='expected a list of prompts'):
    hbf.edit(run, PROMPT, [ANSWER])
  with pytest.raises(UserError, match='expected a list of prompts'):
    hbf.edit(run, 3, [ANSWER])
  with pytest.raises(UserError, match='prompts and answers have 3: expected texts'):
    hbf.edit(run, [PROMPT], [3])


@pytest.mark.parametrize(
  ('prompt', 'answer', 'said'),
  [
    (PROMPT, 'quiz', "answer 'quiz': the vocabulary lacks the characters 'i', 'q', 'u', 'z'"),
    (PROMPT, 'caf\udce9', r"answer 'caf\\udce9': byte 3 of the text is not UTF-8"),
    ('', ANSWER, 'the prompt is empty'),
    (PROMPT, '', 'the answer is empty'),
    ('the ' * 6, ANSWER, 'prompt and answer have 29 tokens: the model reads at most 24'),
    (PROMPT, ANSWER, 'is continued by .* already: there is nothing to edit'),
    (PROMPT, 'the mat', "overlaps edit 0, which answers 'gold.': undo that edit first"),
    (PROMPT + 'go', 'es', "overlaps edit 0, which answers 'gold.': undo that edit first"),
  ],
)
def test_wrong_edits_of_texts_change_nothing(edited, few, prompt, answer, said):
  before = {path: path.read_bytes() for path in edited[0].rglob('*') if path.is_file()}
  with pytest.raises(UserError, match=said) as caught:
    text_edits.edit_text(edited[0], prompt, answer)
  assert '\n' not in str(caught.value)
  assert {path: path.read_bytes() for path in edited[0].rglob('*') if path.is_file()} == before


def test_an_edit_needs_the_right_kind_of_run(edited, make, tmp_path, monkeypatch):
  with pytest.raises(UserError, match='holds a run of task next_token: give --prompt with --answer'):
    edit_files(edited[0], ['cat.png'], 'cat')
  with pytest.raises(UserError, match='holds a run of task next_token: give a run of task classification'):
    export.from_run(edited[0], edits=True)
  run = hbf.load(edited[0])
  without = {**run.params, 'block0': {**run.params['block0'], 'stage2': {'hidden': {}, 'out': {}}}}
  with pytest.raises(UserError, match='stage 2 of block0 has no centers'):
    text_edits.check_centers(run.model, without)


@pytest.mark.slow
def test_wrong_flags_of_edit_end_in_one_line():
  flags = [['--prompt=a'], ['--label=cat', '--prompt=a', '--answer=b'], ['--label=cat'], ['cat.png'], []]
  done = run_each([('hbf/cli/edit.py', '--workdir=/nowhere', *own) for own in flags])
  assert [status for status, *_ in done] == [1] * 5
  assert [error.count('\n') for *_, error in done] == [1] * 5
  said = (
    'belong together',
    'give images with their --label, or',
    'no images given',
    '--label is missing',
    'or --list',
  )
  assert all(part in error for part, (*_, error) in zip(said, done, strict=True))
