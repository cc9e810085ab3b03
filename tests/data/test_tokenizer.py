import json

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers

from dgr2_jax.data import interactions
from dgr2_jax.data import prompts
from dgr2_jax.data import tokenizer as tokenizer_lib
from dgr2_jax.data import tokens
from dgr2_jax.data import vocabulary
from tests.data import fabricated

_OWN = ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<think>')


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  """A Hugging Face directory with special tokens, one of them in the model."""
  path = tmp_path_factory.mktemp('huggingface')
  text = tokenizers.Tokenizer(tokenizers.models.BPE())
  text.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  text.decoder = tokenizers.decoders.ByteLevel()
  text.train_from_iterator(
      ['gentle shampoo', 'gentle soap'] * 5, tokenizers.trainers.BpeTrainer(
          vocab_size=270, show_progress=False, special_tokens=[_OWN[0]],
          initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
  text.add_special_tokens(list(_OWN[1:3]))
  text.add_tokens([_OWN[3]])
  text.post_processor = tokenizers.processors.TemplateProcessing(
      single='<|im_start|> $A',
      special_tokens=[('<|im_start|>', text.token_to_id('<|im_start|>'))])
  text.save(str(path / 'tokenizer.json'))
  return path


@pytest.fixture(scope='module', params=[prompts.JSON, prompts.COMPACT])
def built(request):
  return vocabulary.build(
      fabricated.config(request.param), fabricated.items())


def test_added_tokens_follow_the_mask_in_order(built):
  text_size = built.mask_id
  assert built.id(tokens.PAD) == text_size + 1
  assert built.id(tokens.EOS) == text_size + 2
  assert built.vocab_size % 64 == 0
  used = np.flatnonzero(~built.banned)
  assert built.mask_id not in used and built.pad_id not in used
  assert built.eos_id in used
  # What lies behind the last name is unused and banned.
  assert built.banned[used.max() + 1:].all()


def test_two_builds_agree(built):
  for response_format in (prompts.JSON, prompts.COMPACT):
    one, two = (vocabulary.build(fabricated.config(response_format),
                                 fabricated.items()) for _ in range(2))
    text = [tokens.Text('Gentle shampoo 3, Leaf 2; nothing')]
    assert one.encode(text) == two.encode(text)


@hypothesis.given(st.text())
@hypothesis.settings(deadline=None)
def test_text_survives(built, text):
  ids = built.encode([tokens.Text(text)])
  assert built.decode(ids) == text
  assert all(i < built.mask_id for i in ids)


def test_nasty_text_gives_no_special_token(built):
  for text in fabricated.NASTY:
    assert all(i < built.mask_id for i in built.encode([tokens.Text(text)]))


@hypothesis.given(st.lists(st.integers(-5, 3000)))
@hypothesis.settings(deadline=None)
def test_decode_takes_any_row(built, ids):
  built.decode([i % built.vocab_size for i in ids])


def test_save_and_load(built, tmp_path):
  built.save(tmp_path / 'a')
  loaded = tokenizer_lib.load(tmp_path / 'a')
  pieces = [tokens.Text('Gentle shampoo'), tokens.Special(tokens.EOS)]
  assert loaded.encode(pieces) == built.encode(pieces)
  assert loaded.vocab_size == built.vocab_size
  np.testing.assert_array_equal(loaded.banned, built.banned)
  assert sorted(p.name for p in (tmp_path / 'a').iterdir()) == [
      'special_tokens.json', 'text.json']


def test_load_names_the_file(tmp_path):
  with pytest.raises(interactions.DataError, match='text.json'):
    tokenizer_lib.load(tmp_path)
  with pytest.raises(interactions.DataError, match='tokenizer.json'):
    tokenizer_lib.from_huggingface(tmp_path, [], 256)
  (tmp_path / 'tokenizer.json').write_text('{\n"a": }')
  with pytest.raises(interactions.DataError, match='tokenizer.json:2'):
    tokenizer_lib.from_huggingface(tmp_path, [], 256)
  (tmp_path / 'tokenizer.json').write_text('{}')
  with pytest.raises(interactions.DataError, match='not a Hugging Face'):
    tokenizer_lib.from_huggingface(tmp_path, [], 256)


def test_huggingface_is_extended(directory, tmp_path):
  original = tokenizers.Tokenizer.from_file(str(directory / 'tokenizer.json'))
  built = tokenizer_lib.from_huggingface(
      directory, [tokens.PAD, tokens.EOS, tokens.THINK_END, '<s_a_0>'], 256)
  for name in _OWN:
    assert built.id(name) == original.token_to_id(name)
  # The mask is the first row that the directory leaves free.
  assert built.mask_id == original.get_vocab_size()
  assert built.id(tokens.THINK_END) == built.mask_id + 1
  assert built.id('<s_a_0>') == built.mask_id + 2
  assert built.vocab_size == 512
  # Text is encoded as the directory does, and never to a special token.
  text = 'gentle shampoo soap'
  assert (built.encode([tokens.Text(text)])
          == original.encode(text, add_special_tokens=False).ids)
  for name in (*_OWN, '<s_a_0>', tokens.MASK):
    ids = built.encode([tokens.Text(name)])
    assert built.id(name) not in ids and built.decode(ids) == name
  built.save(tmp_path)
  assert tokenizer_lib.load(tmp_path).id('<s_a_0>') == built.id('<s_a_0>')


def test_forgeable_special_is_refused(directory):
  content = json.loads((directory / 'tokenizer.json').read_text())
  text = tokenizers.Tokenizer.from_str(json.dumps(
      {**content, 'added_tokens': [], 'post_processor': None}))
  byte = text.encode('x', add_special_tokens=False).ids[0]
  with pytest.raises(ValueError, match='forge'):
    tokenizer_lib.Tokenizer(
        text, {'x': byte}, [tokens.PAD, tokens.EOS], 64)


def test_bad_fields_are_named():
  config = fabricated.config(prompts.COMPACT)
  config.tokenizer.vocab_size = 100
  with pytest.raises(ValueError, match='tokenizer.vocab_size'):
    vocabulary.build(config, fabricated.items())
  config = fabricated.config(prompts.COMPACT)
  config.tokenizer.kind = 'words'
  with pytest.raises(ValueError, match='tokenizer.kind'):
    vocabulary.build(config, fabricated.items())


def test_joined_facts_are_capped():
  config = fabricated.config(prompts.COMPACT, trace={
      'facts': ('score', 'bought_with_last', 'bought_with_recent', 'popularity',
                'follows')})
  with pytest.raises(ValueError, match='combine_facts.*10368'):
    vocabulary.build(config, fabricated.items())
