"""Tokenizers: bytes, characters, and the learned pieces of a byte-pair encoding."""

import abc
import dataclasses
import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from typing_extensions import override

from hbf.errors import UserError, choose

_MOST_SHOWN = 5  # largest number of unknown characters that a message lists
_PIECE = 2**24  # bytes of a piece: few, because encoding takes many times their memory
_END_OF_WORD = re.compile(rb'[!-~](?=[ \n])')


class Tokenizer(abc.ABC):
  """A vocabulary of tokens 0, …, V − 1 that converts texts to tokens and back.

  Attributes:
    kind: name of the kind of tokenizer.
  """

  kind: ClassVar[str]

  @classmethod
  @abc.abstractmethod
  def learned(cls, texts: Sequence[bytes], size: int) -> Self:
    """Return a tokenizer of this kind that can encode the given texts.

    Args:
      texts: all texts that the tokenizer has to encode. The first is the training text.
      size: V, the number of tokens. Only `BytePairs` uses it. Other kinds of tokenizer ignore it.

    Raises:
      UserError: a text is not UTF-8 (except for `Bytes`), the size is too small, or a package is missing.
    """

  @property
  @abc.abstractmethod
  def vocabulary(self) -> int:
    """Return V, the number of tokens."""

  @abc.abstractmethod
  def encode(self, text: bytes) -> np.ndarray:
    """Return the tokens of a text, int32 [n].

    Raises:
      UserError: there is no token for a part of the text.
    """

  def encode_text(self, text: str) -> np.ndarray:
    """Return the tokens of a text that a user gave as characters, int32 [n].

    A byte of a command line that is not UTF-8 is a surrogate in `text`. It is encoded as the byte that it was.

    Raises:
      UserError: there is no token for a part of the text, or the text has another surrogate.
    """
    try:
      content = text.encode(errors='surrogateescape')
    except UnicodeEncodeError as error:
      raise UserError(
        f'the text has {text[error.start]!r}, which is half a character; expected text that UTF-8 can hold: remove it'
      ) from None
    return self.encode(content)

  @abc.abstractmethod
  def decode(self, tokens: Sequence[int]) -> bytes:
    """Return the text that the tokens stand for."""

  @property
  def sizes(self) -> np.ndarray:
    """Return the number of bytes of each token, int32 [V]."""
    return np.array([len(self.decode([token])) for token in range(self.vocabulary)], np.int32)

  @abc.abstractmethod
  def to_json(self) -> dict[str, Any]:
    """Return a description of the tokenizer for JSON. `read_tokenizer` makes a tokenizer from it."""


@dataclasses.dataclass(frozen=True)
class Bytes(Tokenizer):
  """A tokenizer with a token for every byte. It can encode any file."""

  kind: ClassVar[str] = 'bytes'

  @classmethod
  @override
  def learned(cls, texts: Sequence[bytes], size: int) -> Self:
    del texts, size
    return cls()

  @property
  @override
  def vocabulary(self) -> int:
    return 256

  @override
  def encode(self, text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8).astype(np.int32)

  @override
  def decode(self, tokens: Sequence[int]) -> bytes:
    return bytes(map(int, tokens))

  @override
  def to_json(self) -> dict[str, Any]:
    return {'kind': self.kind}


@dataclasses.dataclass(frozen=True)
class Characters(Tokenizer):
  """A tokenizer with a token for every character of the texts that it learned from.

  Attributes:
    characters: the characters of the tokens 0, …, V − 1, sorted by code point.
  """

  kind: ClassVar[str] = 'characters'

  characters: str

  @classmethod
  def learned(cls, texts: Sequence[bytes], size: int) -> Self:
    """Return a tokenizer of all characters in the texts; see `Tokenizer.learned`."""
    del size
    found = [np.unique(_codes(part)) for text in texts for part in _decoded_pieces(text)]
    return cls(''.join(map(chr, np.unique(np.concatenate(found)).tolist())))

  @property
  @override
  def vocabulary(self) -> int:
    return len(self.characters)

  @override
  def encode(self, text: bytes) -> np.ndarray:
    codes, known = _codes(_decode_utf8(text)), np.array([ord(character) for character in self.characters])
    tokens = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    unknown = sorted({chr(code) for code in codes[known[tokens] != codes]})
    if unknown:
      more = f' and {len(unknown) - _MOST_SHOWN} more' if len(unknown) > _MOST_SHOWN else ''
      raise UserError(
        f'the vocabulary lacks the characters {", ".join(map(repr, unknown[:_MOST_SHOWN]))}{more}: use only the '
        f'{self.vocabulary} that the model was trained on, or train one with --config.data.tokenizer=bytes'
      )
    return tokens.astype(np.int32)

  @override
  def decode(self, tokens: Sequence[int]) -> bytes:
    return ''.join(self.characters[int(token)] for token in tokens).encode()

  @override
  def to_json(self) -> dict[str, Any]:
    return {'kind': self.kind, 'characters': self.characters}


@dataclasses.dataclass(frozen=True)
class BytePairs(Tokenizer):
  """A byte-pair encoding (Sennrich et al. 2016) on bytes, as in GPT-2.

  The vocabulary begins with all 256 bytes. Then the most frequent pair of neighboring tokens becomes a new token.
  This step is repeated until the vocabulary has the wanted size.

  Attributes:
    learned_pieces: the vocabulary in the JSON format of the library `tokenizers`.
  """

  kind: ClassVar[str] = 'bpe'

  learned_pieces: str

  @classmethod
  def learned(cls, texts: Sequence[bytes], size: int) -> Self:
    """Return a tokenizer with pieces learned from the first text, the training text; see `Tokenizer.learned`."""
    if size < 257:
      raise UserError(f'data.vocabulary must be 257 or more, as 256 bytes are tokens already: it is {size}')
    library = _import_library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    lines = (line for part in _decoded_pieces(texts[0]) for line in part.splitlines(keepends=True))
    tokenizer.train_from_iterator(lines, trainer)
    return cls(tokenizer.to_str())

  @functools.cached_property
  def _library(self) -> Any:
    return _import_library().Tokenizer.from_str(self.learned_pieces)

  @property
  @override
  def vocabulary(self) -> int:
    return self._library.get_vocab_size()

  @override
  def encode(self, text: bytes) -> np.ndarray:
    return np.array(self._library.encode(_decode_utf8(text)).ids, np.int32)

  @override
  def decode(self, tokens: Sequence[int]) -> bytes:
    # A piece may end within a character. The library's decoder would replace a character that is not complete.
    pieces = ''.join(str(self._library.id_to_token(int(token))) for token in tokens)
    return bytes(_BYTE_OF[character] for character in pieces)

  @override
  def to_json(self) -> dict[str, Any]:
    return {'kind': self.kind, 'learned_pieces': self.learned_pieces}


def _import_library() -> types.ModuleType:
  """Import the library `tokenizers`, which `pip install hbf[text]` installs.

  Raises:
    UserError: the library is not installed.
  """
  try:
    import tokenizers
  except ImportError as error:
    raise UserError(
      'data.tokenizer is bpe: expected the package tokenizers; install hbf[text], or set it to bytes or characters'
    ) from error
  return tokenizers


def _byte_of() -> dict[str, int]:
  """Return the byte that each character in a learned piece stands for.

  The library `tokenizers` writes pieces as GPT-2 does: a visible byte as the character with the same
  code point, other bytes as the characters with code points from 256 on.
  """
  visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
  invisible = [byte for byte in range(256) if byte not in visible]
  return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(invisible)}


_BYTE_OF = _byte_of()
TOKENIZERS: Mapping[str, type[Tokenizer]] = {cls.kind: cls for cls in (Bytes, Characters, BytePairs)}


def learn_tokenizer(kind: str, texts: Sequence[bytes], size: int) -> Tokenizer:
  """Return a tokenizer of the given kind that can encode the given texts.

  Args:
    kind: 'bytes', 'characters' or 'bpe'.
    texts: all texts that the tokenizer has to encode. The first is the training text.
    size: number of tokens of 'bpe', including the 256 bytes. The other kinds ignore it.

  Raises:
    UserError: the kind is unknown, or as for `Tokenizer.learned`.
  """
  return choose('data.tokenizer', kind, TOKENIZERS).learned(texts, size)


def read_tokenizer(stored: Mapping[str, Any]) -> Tokenizer:
  """Return a tokenizer from the description that its `to_json` returned."""
  return TOKENIZERS[stored['kind']](**{key: value for key, value in stored.items() if key != 'kind'})


def split_text(text: bytes) -> Iterator[bytes]:
  """Yield consecutive pieces of a text. To encode them one by one takes less memory, and gives the same tokens.

  A piece has at least 16 MiB, except the last one. It ends with a word in ASCII, before a space or a line break. No
  token of any tokenizer extends beyond such an end.
  """
  start = 0
  while start < len(text):
    end = _END_OF_WORD.search(text, start + _PIECE)
    stop = end.end() if end else len(text)
    yield text[start:stop]
    start = stop


def _decoded_pieces(text: bytes) -> Iterator[str]:
  start = 0
  for piece in split_text(text):
    yield _decode_utf8(piece, start)
    start += len(piece)


def _decode_utf8(text: bytes, start: int = 0) -> str:
  """Decode a text. Raise UserError if it is not UTF-8.

  If the text is a piece of a longer text, `start` is the number of bytes before the piece, for the message.
  """
  try:
    return text.decode()
  except UnicodeDecodeError as error:
    raise UserError(
      f'byte {start + error.start:,} of the text is not UTF-8 ({error.reason}): convert it, or set data.tokenizer to '
      'bytes'
    ) from None


def _codes(text: str) -> np.ndarray:
  """Return the code points of a text, uint32 [n]."""
  return np.frombuffer(text.encode('utf-32-le'), np.uint32)
