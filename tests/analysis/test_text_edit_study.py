"""Tests of edits of a language model: the facts, the model's arrays at places in texts, and the scores."""

import dataclasses
import functools
import pathlib
import string

import jax
import numpy as np
import pytest

import hbf
from hbf.analysis import text_edit_study, text_facts
from hbf.analysis.report.text_edit_report import draw, table
from hbf.analysis.text_edit_study import TEXT_METHODS, Edits, TextFineTuning, TextTrial
from hbf.analysis.text_facts import make_facts
from hbf.analysis.texts import TextRun
from hbf.config.resolve import resolve
from hbf.data.text.texts import Texts
from hbf.data.text.tokenizers import learn_tokenizer
from hbf.editing import places, text
from hbf.editing.places import LAYERS, Passages, Places, read
from hbf.errors import UserError
from hbf.models.edited import LAST, MIDDLE
from hbf.models.generation import Sampling, generate
from hbf.tasks.registry import make_task
from hbf.training.restore import Restored
from hbf.training.sharding import make_mesh

pytestmark = pytest.mark.slow  # a study is run by hand, and changes rarely

LINES = 'the quick brown fox jumps over the lazy dog.\nand the slow red fox sleeps, it seems!\n'
TEXT = (LINES * 20 + string.ascii_letters + '\n').encode()
FACTS = make_facts(3, 2, seed=0)


@pytest.fixture(scope='module')
def run():
  config = hbf.get_config('shakespeare', model='hyperbf')
  small = {'model.width': 16, 'model.depth': 2, 'model.heads': 2, 'data.length': 64, 'data.validation': 0.3}
  config.update_from_flattened_dict(small)
  config = resolve(config)
  tokenizer = learn_tokenizer('characters', [TEXT], 0)
  tokens = tokenizer.encode(TEXT)
  task = make_task(config, Texts('fox', tokenizer, {'train': tokens[:1200], 'test': tokens[1200:]}))
  network = task.make_model(config.model)
  params = jax.jit(functools.partial(network.init, train=False))(jax.random.key(0), np.zeros((1, 64), np.int32))
  keys = iter(jax.random.split(jax.random.key(1), 500))
  params = jax.tree.map(lambda z: z + 0.3 * jax.random.normal(next(keys), z.shape), params['params'])
  return TextRun(pathlib.Path('nowhere'), Restored(config, make_mesh(jax.devices()[:1]), task, 0, network, params))


@pytest.fixture(scope='module')
def few():
  """Use few texts, so that the tests are fast."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(text_edit_study, 'COPIES', 2)
    patch.setattr(text_edit_study, 'CONTROLS', 2)
    patch.setattr(text_edit_study, 'SETS', {'prompt': 1, 'copies': 2, 'reworded': 1, 'controls': 2})
    patch.setattr(text_edit_study, 'GUARDED', 512)
    patch.setattr(text_edit_study, 'NAMED', 8)
    patch.setattr(places, 'BEGINNINGS', 5)
    yield


@pytest.fixture(scope='module')
def split(run, few):
  return text_edit_study.open_split(run, 'test', FACTS, 4, seed=0)


@pytest.fixture(scope='module')
def bases(run, few):
  return text_edit_study.open_bases(run)


def test_facts_have_names_of_their_own():
  facts = make_facts(20, 3, seed=5)
  assert facts == make_facts(20, 3, seed=5) != make_facts(20, 3, seed=6)
  assert len({fact.answer for fact in facts} | {x for fact in facts for x in (fact.prompt, *fact.controls)}) == 100
  for fact in facts:
    assert fact.prompt[-3:] == fact.reworded[-3:] and fact.prompt != fact.reworded
    assert len(fact.reworded + fact.answer) < 64 and fact.answer.istitle()


def test_places_precede_the_tokens_of_the_continuation():
  found = Places.of([(np.array([5, 6]), np.array([7, 8, 9])), (np.array([1]), np.array([2]))], 6)
  assert found.windows.tolist() == [[5, 6, 7, 8, 0, 0], [1, 0, 0, 0, 0, 0]]
  assert found.windows[found.rows, found.columns].tolist() == [6, 7, 8, 1]
  assert found.following.tolist() == [7, 8, 9, 2]
  assert text_facts.contexts(found)[1].tolist() == [7, 6, 5, -1, -1, -1]


def test_passages_are_parts_of_the_text_and_end_with_a_line_break():
  text = np.frombuffer(LINES.encode(), np.uint8)
  passages = Passages(text, ord('\n'), seed=0)
  for _ in range(20):
    passage = bytes(passages.draw(30).astype(np.uint8)).decode()
    assert passage in LINES and passage.endswith('\n')
    assert bytes(passages.beginning(8).astype(np.uint8)) == b'and the '


def test_the_arrays_at_a_place_are_the_networks(run):
  """A place's point is its token in a layer. The head maps features to logits. Later tokens have no effect."""
  text = run.windows('test', 2)
  whole = Places.everywhere(text)
  seen = read(run.model, run.params, whole)
  np.testing.assert_allclose(seen[LAST].logits.reshape(2, 64, -1), run.observe(text).logits, rtol=1e-4, atol=1e-4)
  head = run.params['embedding']['embedding']
  np.testing.assert_allclose(seen[LAST].features @ head.T, seen[LAST].logits, rtol=1e-3, atol=1e-3)
  cut = read(run.model, run.params, Places.of([(text[0, :20], text[0, 20:22])], 64))
  for layer in LAYERS:
    np.testing.assert_allclose(cut[layer].points, seen[layer].points[[19, 20]], rtol=1e-3, atol=1e-3)
  np.testing.assert_allclose(seen[LAST].points.mean(axis=1), 0, atol=1e-4)  # this LayerNorm has no bias
  assert not np.allclose(seen[MIDDLE].points, seen[LAST].points)


@pytest.mark.parametrize('name', [name for name in TEXT_METHODS if name != 'ReLU neuron'])
def test_a_fact_is_written_after_its_prompt(name, split, bases):
  wanted = TEXT_METHODS[name]
  trial = wanted.trials[0]._replace(margin=4.0)
  found = text_edit_study.alone(Edits(wanted, trial, bases, split), 2)
  assert found['prompt'] == 100
  if name.startswith('lookup'):
    assert found['changed'] == found['controls'] == found['reworded'] == 0
    assert found['copies'] == (100 if name == 'lookup of the prompt' else 0)


def test_the_study_and_the_command_make_the_same_edits(run, bases, split):
  """The command's logits are those of the study's ball in the metric of copies, at every place of the first fact."""
  wanted = TEXT_METHODS['HyperBF ball, metric of copies']
  study = Edits(wanted, TextTrial(LAST, 1.0, 4.0), bases, split).logits(range(1))
  train = run.task.splits(0.3)['train'].tokens
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(text, 'GUARDED', 512)
    editor = text.TextEditor(run.model, run.params, run.tokenizer, train, None, (0, False))
  editor.edit(FACTS[0].prompt, FACTS[0].answer, 1.0, 4.0)
  for name in ('prompt', 'copies', 'controls', 'text'):
    seen = split.seen[name][LAST].at(split.rows(name, range(1)))
    found = seen.logits + editor.edits.changes(seen.points)
    np.testing.assert_allclose(found, study[name], rtol=1e-3, atol=5e-3)


def test_without_edits_nothing_changes(run, split):
  found = text_edit_study.scores({name: seen[LAST].logits for name, seen in split.seen.items()}, split, range(3))
  assert found['controls'] == found['changed'] == found['prompt'] == 0
  assert found['bits'] == pytest.approx(run.losses(run.windows('test', 4)).mean() / np.log(2), rel=1e-4)


def test_an_edit_does_not_reach_guarded_places(bases, split):
  """With a reach of 1, guarded places in texts with another answer keep their logits."""
  wanted = TEXT_METHODS['HyperBF ball, metric of copies, names guarded']
  base, rows = bases.of(wanted, MIDDLE), split.rows('prompt', range(1))
  assert len(base.guard.logits) == len(bases.text[MIDDLE].guard.logits) + text_edit_study.NAMED
  labels = split.places['prompt'].following[rows]
  responses = wanted.method.respond(base, split.seen['prompt'][MIDDLE].at(rows), labels, base.guard, 1.0)
  assert responses[base.guard.logits.argmax(axis=1) != labels[:, None]].max() < 1e-4


def test_separation_compares_each_copy_with_each_other_name(bases, split):
  """If one kind of texts is moved near to the prompts and the other is not, the separation is 100% or 0%."""
  for near, far, share in (('copies', 'controls', 100), ('controls', 'copies', 0)):
    seen = {name: dict(layers) for name, layers in split.seen.items()}
    for name, scale in ((near, 1e-3), (far, 1.0)):
      own = seen[name][LAST]
      seen[name][LAST] = own._replace(points=scale * (1 + np.abs(own.points)))
    seen['prompt'][LAST] = seen['prompt'][LAST]._replace(points=np.zeros_like(seen['prompt'][LAST].points))
    identity = text_edit_study.Base(bases.text[LAST].guard, np.eye(16))
    found = text_edit_study.separation(bases._replace(text={LAST: identity}), split._replace(seen=seen), LAST, 3)
    assert found == [share] * 3


def test_fine_tuning_ends_when_the_fact_is_written(run, split):
  tuning = TextFineTuning(run, split)
  same = tuning.logits(run.params, range(1, 3))
  where = split.rows('copies', range(1, 3))
  np.testing.assert_allclose(same['copies'], split.seen['copies'][LAST].logits[where], rtol=1e-3, atol=1e-3)
  params = tuning.taught(run.params, 1, 0.1)
  found = text_edit_study.scores(tuning.logits(params, range(1, 2)), split, range(1, 2))
  assert found['prompt'] == 100 and found['changed'] > 0
  prompt = run.tokenizer.encode(FACTS[1].prompt.encode()).tolist()
  written = generate(run.model, {'params': params}, [prompt], len(FACTS[1].answer), Sampling(temperature=0))
  assert run.tokenizer.decode(written[0].tolist()).decode() == FACTS[1].answer


def test_the_best_trial_changes_few_answers_and_has_the_greatest_harmonic_mean():
  options = (50, 0, 0), (80, 0.1, 10), (90, 0.1, 90), (99, 3, 0)
  found = [{'copies': c, 'changed': d, 'controls': e} for c, d, e in options]
  assert text_edit_study.best(found, 0.1) == 1
  assert text_edit_study.best(found, 5) == 3
  assert text_edit_study.best(found[1:], 0.01) == 0


@pytest.mark.slow
def test_the_study_has_a_row_for_each_method(run, few, monkeypatch, tmp_path):
  monkeypatch.setattr(TextRun, 'of', classmethod(lambda cls, folder: run))
  for name in ('IN_TRIALS', 'TUNED', 'TUNED_IN_TRIALS'):
    monkeypatch.setattr(text_edit_study, name, 1)
  monkeypatch.setattr(text_edit_study, 'RATES', (0.1,))
  methods = {name: TEXT_METHODS[name] for name in ('HyperBF ball, identity metric', 'lookup of the prompt')}
  monkeypatch.setattr(text_edit_study, 'TEXT_METHODS', methods)
  rows = text_edit_study.measure(pathlib.Path('nowhere'), 2)
  assert [row['method'] for row in rows] == ['no edit', *methods, 'fine-tuning of all parameters']
  assert [after['facts'] for after in rows[1]['many']] == [1, 2]
  lines = table({'rows': rows}).splitlines()
  assert len(lines) == 6 and 'lookup of the prompt' in lines[4]
  draw({'rows': rows}, tmp_path / 'text.png')
  assert (tmp_path / 'text.png').stat().st_size > 10_000


def test_a_run_without_held_out_text_is_refused(run, monkeypatch):
  config = run.restored.config.copy_and_resolve_references()
  config.data.validation = 0.0
  other = TextRun(run.workdir, dataclasses.replace(run.restored, config=config))
  monkeypatch.setattr(TextRun, 'of', classmethod(lambda cls, folder: other))
  with pytest.raises(UserError, match='holds out no text'):
    text_edit_study.measure(pathlib.Path('nowhere'))
