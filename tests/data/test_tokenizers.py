"""Tests that texts become tokens and tokens become the same texts."""

import json
import os
import random
import sys

import numpy as np
import pytest

from hbf.data.text import tokenizers
from hbf.data.text.tokenizers import TOKENIZERS, Characters, learn_tokenizer, read_tokenizer, split_text
from hbf.errors import UserError

TEXT = 'Ein Maß ist, was ein Maß ist.\nΣ K(‖W(q − k)‖²)\r\n\tda-da-da 漢字 🙂 '.encode() * 20


@pytest.fixture(params=TOKENIZERS)
def made(request):
  return learn_tokenizer(request.param, [TEXT], 300)


def test_what_is_encoded_is_decoded(made):
  tokens = made.encode(TEXT)
  assert tokens.dtype == np.int32 and tokens.min() >= 0 and tokens.max() < made.vocabulary
  assert made.decode(tokens) == TEXT


def test_sizes_are_those_of_the_text(made):
  sizes = made.sizes
  assert sizes.shape == (made.vocabulary,) and sizes[made.encode(TEXT)].sum() == len(TEXT)


@pytest.mark.parametrize('kind', TOKENIZERS)
@pytest.mark.parametrize('size', [1, 70])
def test_the_tokens_of_pieces_are_those_of_the_text(kind, size, monkeypatch):
  spaces = [' ', '  ', '\n', ' \n\n ', "'s", '\t\n', '\u3000 ', '\r\n', ' 12', '!']
  drawn = random.Random(0)
  text = ''.join(f'da{drawn.choice("aeß")}{drawn.choice(spaces)}' for _ in range(400)).encode()
  whole = learn_tokenizer(kind, [text], 280)
  monkeypatch.setattr(tokenizers, '_PIECE', size)
  pieces = [*split_text(text)]
  assert len(pieces) > 10 and b''.join(pieces) == text
  assert learn_tokenizer(kind, [text], 280) == whole
  np.testing.assert_array_equal(np.concatenate([whole.encode(piece) for piece in pieces]), whole.encode(text))


def test_a_stored_tokenizer_gives_the_same_tokens(made):
  again = read_tokenizer(json.loads(json.dumps(made.to_json())))
  np.testing.assert_array_equal(again.encode(TEXT), made.encode(TEXT))
  assert again.vocabulary == made.vocabulary


def test_any_tokens_are_some_text(made):
  """A model may draw any tokens, even half a character."""
  drawn = random.Random(0).choices(range(made.vocabulary), k=500)
  assert len(made.decode(drawn)) == made.sizes[drawn].sum()


def test_characters_are_all_that_occur_in_order():
  made = learn_tokenizer('characters', [b'cab', 'bä'.encode()], 0)
  assert made.characters == 'abcä' and made.encode('äb'.encode()).tolist() == [3, 1]


def test_byte_pairs_are_the_pairs_that_occur_most_and_learned_of_the_first_text_alone():
  made = learn_tokenizer('bpe', [b'abab abab abab', b'cdcd cdcd cdcd cdcd'], 258)
  assert made.vocabulary == 258
  assert len(made.encode(b'abab')) < 4 and len(made.encode(b'cdcd')) == 4
  assert learn_tokenizer('bpe', [TEXT], 300).to_json() == learn_tokenizer('bpe', [TEXT], 300).to_json()


def test_a_character_that_the_vocabulary_lacks_is_named():
  with pytest.raises(UserError, match=r"lacks the characters 'X', 'Y': use only the 3 "):
    Characters('abc').encode(b'aXbYcX')
  with pytest.raises(UserError, match=r"'A', 'B', 'C', 'D', 'E' and 21 more"):
    Characters('abc').encode(b'ABCDEFGHIJKLMNOPQRSTUVWXYZ')


@pytest.mark.parametrize('kind', ['characters', 'bpe'])
def test_bytes_that_are_no_characters_are_an_error_where_characters_are_asked_for(kind):
  with pytest.raises(UserError, match=r'byte 3 of the text is not UTF-8 .* set data.tokenizer to bytes'):
    learn_tokenizer(kind, [b'abc\xff'], 300)
  assert learn_tokenizer('bytes', [b'abc\xff'], 0).encode(b'abc\xff').tolist() == [97, 98, 99, 255]


def test_the_byte_that_is_no_character_is_counted_from_the_start_of_the_text(monkeypatch):
  monkeypatch.setattr(tokenizers, '_PIECE', 5)
  with pytest.raises(UserError, match='byte 18 of the text is not UTF-8'):
    learn_tokenizer('characters', [b'one two three four\xff'], 0)


def test_a_text_of_the_command_line_that_is_not_utf8_is_bytes_or_refused(made):
  text = os.fsdecode(b'Ma\xe9')
  if made.kind == 'bytes':
    assert made.encode_text(text).tolist() == [*b'Ma\xe9']
  else:
    with pytest.raises(UserError, match='byte 2 of the text is not UTF-8'):
      made.encode_text(text)
  assert made.encode_text('Maß').tolist() == made.encode('Maß'.encode()).tolist()
  with pytest.raises(UserError, match=r"the text has '\\ud83d', which is half a character; expected"):
    made.encode_text('Ma\ud83d')


def test_mistakes_say_what_to_do():
  with pytest.raises(UserError, match=r"unknown data.tokenizer 'byte': did you mean 'bytes'"):
    learn_tokenizer('byte', [TEXT], 0)
  with pytest.raises(UserError, match=r'data\.vocabulary must be 257 or more'):
    learn_tokenizer('bpe', [TEXT], 256)


def test_byte_pairs_name_the_extra_that_installs_their_library(monkeypatch):
  monkeypatch.setitem(sys.modules, 'tokenizers', None)
  with pytest.raises(UserError, match=r'install hbf\[text\]'):
    learn_tokenizer('bpe', [TEXT], 300)
