"""Every task against text written out by hand; nothing held out leaks."""

import numpy as np
import pytest

from dgr2_jax.data import interactions
from dgr2_jax.data import mid_training
from dgr2_jax.data import pipeline
from dgr2_jax.data import prompts
from dgr2_jax.data import tokens
from dgr2_jax.data import vocabulary
from tests.data import fabricated
from tests.data import shoppers

T = 64
DATASET = shoppers.make(1, num_users=30)
TEXT = ['A first document, in words. ' * 40, 'A second one.\n']
WEIGHTS = dict(persona=.25, sequential=.5, caption=.15, text=.1)


def make_template(response_format):
  config = fabricated.config(response_format)
  config.recipe = ('mid_train',)
  return prompts.Template(
      prompts.PromptConfig.from_config(config.prompt),
      vocabulary.build(config, DATASET.items), DATASET.items,
      fabricated.semantic_ids(len(DATASET.items)), 10)


@pytest.fixture(scope='module', params=(prompts.JSON, prompts.COMPACT))
def template(request):
  return make_template(request.param)


def make_config(**changes):
  return mid_training.MidTrainingConfig(**dict(
      max_length=T, held_out=.2, weights=WEIGHTS, text='a.txt') | changes)


def sid(item):
  codes = fabricated.semantic_ids(len(DATASET.items))[item]
  return '<|sid_begin|>{}<|sid_end|>'.format(
      ''.join(f'<s_{letter}_{code}>' for letter, code in zip('abc', codes)))


def attributes(template, index):
  item = DATASET.items[index]
  path = ' > '.join(item.categories)
  if template.config.response_format == prompts.COMPACT:
    return (f'{item.title}\n'
            + (f'<|category: {path}|>' if path else '<|no_category|>')
            + (f'<|brand: {item.brand}|>' if item.brand else '<|no_brand|>'))
  parts = [f'{label}: "{value}"' for label, value in (
      ('title', item.title), ('categories', path), ('brand', item.brand))
           if value]
  return ', '.join(parts)


def written(template, index):
  if template.config.response_format == prompts.COMPACT:
    return sid(index) + attributes(template, index)
  return f'{sid(index)}, {attributes(template, index)}\n'


def decoded(template, example):
  """The text, and the part of it that is learned."""
  return (template.tokenizer.decode(example.ids),
          template.tokenizer.decode(example.ids[example.learned_from:]))


def test_persona_is_the_history_in_order(template):
  history = [3, 7, 0, 4]
  examples = list(mid_training.persona(template, history, T))
  texts = [decoded(template, example) for example in examples]
  assert all(text == '<|persona|>' + learned for text, learned in texts)
  assert ''.join(learned for _, learned in texts) == ''.join(
      written(template, item) for item in history)
  assert len(examples) > 1  # no line is torn apart
  assert all(len(example.ids) <= T for example in examples)
  whole, = mid_training.persona(template, history, 1000)
  assert len(whole.ids) == sum(len(e.ids) for e in examples) - len(examples) + 1


def test_a_line_that_is_too_long_is_cut(template):
  example, = mid_training.persona(template, [3], 12)
  line = template.line(3, prompts.ITEM_FIELDS)
  assert example.ids == [template.tokenizer.id(tokens.PERSONA), *line[:11]]


def test_sequential_learns_every_id_behind_the_first(template):
  history = [3, 7, 0, 4]
  example, = mid_training.sequential(template, history, T)
  assert decoded(template, example) == (
      '<|next|>' + ''.join(map(sid, history)), ''.join(map(sid, history[1:])))
  # Each prefix is the prompt of the next item.
  for end in range(1, len(history)):
    prompt = mid_training.next_item_prompt(template, history[:end], T)
    target = template.item(history[end], ('sid',))
    begin = len(prompt)
    assert example.ids[:begin] == prompt
    assert example.ids[begin:begin + len(target)] == target


def test_long_histories_are_cut_from_their_end(template):
  history = list(range(8))
  room = 1 + 3 * 5  # three ids of five tokens
  texts = [decoded(template, e)[0]
           for e in mid_training.sequential(template, history, room)]
  assert texts == ['<|next|>' + ''.join(map(sid, part))
                   for part in ([5, 6, 7], [2, 3, 4], [0, 1])]
  prompt = mid_training.next_item_prompt(template, history, room)
  assert template.tokenizer.decode(prompt) == '<|next|>' + sid(6) + sid(7)
  assert not list(mid_training.sequential(template, [5], room))
  with pytest.raises(ValueError, match='max_length is 10: .* at least 11'):
    mid_training.next_item_prompt(template, history, 10)


def test_captions_go_both_ways(template):
  texts = [decoded(template, e) for e in mid_training.captions(template, 5, T)]
  there, back = sid(5), attributes(template, 5)
  assert texts == [
      ('<|describe|>' + there + back + tokens.EOS, there + back + tokens.EOS),
      ('<|identify|>' + back + there + tokens.EOS, back + there + tokens.EOS)]
  for example in mid_training.captions(template, 5, 10):
    assert len(example.ids) == 10
    assert template.item(5, ('sid',)) == [
        i for i in example.ids if i in template.item(5, ('sid',))]


def test_general_text_is_one_stream(template):
  examples = list(mid_training.general_text(template, TEXT, T))
  assert [len(e.ids) for e in examples[:-1]] == [T] * (len(examples) - 1)
  assert template.tokenizer.decode(sum((e.ids for e in examples), [])) == (
      tokens.EOS.join(TEXT) + tokens.EOS)


def test_packing_keeps_every_example_whole():
  rng = np.random.default_rng(0)
  examples = [
      mid_training.Example(rng.integers(1, 99, n).tolist(),
                           int(rng.integers(1, n)))
      for n in rng.integers(2, 21, 200)]
  rows = mid_training.pack(examples, 20)
  assert rows.dtype == np.int32 and rows.shape[1:] == (3, 20)
  found = []
  for ids, start, weight in rows:
    used = int((start >= 0).sum())
    assert (start[used:] == -1).all() and not weight[used:].any()
    for begin in np.unique(start[:used]):
      own = np.flatnonzero(start == begin)
      assert own[0] == begin and (np.diff(own) == 1).all()
      learned = weight[own] > 0
      first = int(np.argmax(learned))
      assert learned[first:].all() and not learned[:first].any()
      found.append((ids[own].tolist(), first))
  assert sorted(found) == sorted((e.ids, e.learned_from) for e in examples)
  total = sum(len(e.ids) for e in examples)
  assert len(rows) <= 1.1 * total / 20
  assert mid_training.pack([], 20).shape == (0, 3, 20)


@pytest.fixture(scope='module')
def built(template):
  rows = {}
  for task, split, packed in mid_training.build(
      make_config(), DATASET, template, TEXT, seed=0):
    rows[task, split] = packed
  return rows


def texts_of(template, packed):
  return [template.tokenizer.decode(ids[start == begin])
          for ids, start, _ in packed for begin in np.unique(start[start >= 0])]


def split_texts(template, built, task):
  """Sorted texts of each split's examples."""
  return {split: sorted(texts_of(template, built[task, split]))
          for split in mid_training.SPLITS}


def test_no_validation_or_test_purchase_is_seen(template, built):
  """Every training purchase is there, once a task, and not one more."""
  trained = [s[:-2].tolist() for s in DATASET.sequences if len(s) > 3]
  found = split_texts(template, built, 'sequential')
  assert sorted(found['train'] + found['held_out']) == sorted(
      '<|next|>' + ''.join(map(sid, history)) for history in trained)
  found = split_texts(template, built, 'persona')
  assert sorted(found['train'] + found['held_out']) == sorted(
      template.tokenizer.decode(example.ids) for history in trained
      for example in mid_training.persona(template, history, T))


def test_held_out_users_and_items_are_not_trained_on(template, built):
  trained = [s[:-2].tolist() for s in DATASET.sequences if len(s) > 3]
  user_of = {'<|next|>' + ''.join(map(sid, h)): h for h in trained}
  assert len(user_of) == len(trained)  # told apart by their histories
  users = split_texts(template, built, 'sequential')
  assert len(users['held_out']) == round(.2 * len(trained))
  # The same users of both tasks.
  persona = split_texts(template, built, 'persona')
  for split in mid_training.SPLITS:
    assert persona[split] == sorted(
        template.tokenizer.decode(example.ids) for text in users[split]
        for example in mid_training.persona(template, user_of[text], T))
  # Both directions of an item.
  captions = split_texts(template, built, 'caption')['held_out']
  items = [i for i in range(len(DATASET.items))
           if f'<|describe|>{sid(i)}{attributes(template, i)}{tokens.EOS}'
           in captions]
  assert len(items) == 4 and len(captions) == 8
  assert all(f'<|identify|>{attributes(template, i)}{sid(i)}{tokens.EOS}'
             in captions for i in items)


def test_too_little_to_hold_out():
  template = make_template(prompts.COMPACT)
  with pytest.raises(ValueError, match="task 'text' has 1 "):
    list(mid_training.build(
        make_config(weights=dict(text=1.)), DATASET, template, ['short'], 0))
  with pytest.raises(ValueError, match='max_length is 9'):
    list(mid_training.build(
        make_config(max_length=9), DATASET, template, TEXT, 0))


def mixed(built, size, host=0, hosts=1, seed=0):
  weights = make_config().tasks
  return pipeline.mixed_batches(
      [built[task, 'train'] for task in weights], list(weights.values()), size,
      seed, host, hosts)


def test_mixture_is_in_proportion_and_a_function_of_seed_and_step(
    template, built):
  task_of = {row[0].tobytes(): k for k, task in enumerate(mid_training.TASKS)
             for row in built[task, 'train']}
  dataset = mixed(built, 8)
  tasks = [task_of[row.tobytes()] for step in range(50)
           for row in dataset[step]['tokens']]
  np.testing.assert_allclose(
      np.bincount(tasks) / len(tasks), list(WEIGHTS.values()), atol=.01)
  # Each task's rows come once an epoch, in another order every time.
  count = len(built['sequential', 'train'])
  rows = [row.tobytes() for step in range(50) for row in dataset[step]['tokens']
          if task_of[row.tobytes()] == 1]
  first, second = rows[:count], rows[count:2 * count]
  assert len(set(first)) == count and set(first) == set(second)
  assert first != second
  for step in (49, 3):  # whatever was asked for before
    for key, value in mixed(built, 8)[step].items():
      np.testing.assert_array_equal(value, dataset[step][key])
  assert any((mixed(built, 8, seed=1)[0][key] != dataset[0][key]).any()
             for key in dataset[0])
  hosts = [mixed(built, 8, k, 4) for k in range(4)]
  for step in (0, 7):
    for key, value in dataset[step].items():
      np.testing.assert_array_equal(
          value, np.concatenate([host[step][key] for host in hosts]))


def test_held_out_rows_count_once(built):
  packed = built['persona', 'train'][:11]
  batches = list(pipeline.packed_batches(packed, 4))
  assert [len(batch['weight']) for batch in batches] == [4, 4, 4]
  for field, name in enumerate(('tokens', 'start', 'weight')):
    values = np.concatenate([batch[name] for batch in batches])
    np.testing.assert_array_equal(values[:11], packed[:, field])
  assert not batches[2]['weight'][3].any()


def test_files_of_text(tmp_path):
  plain, lines = tmp_path / 'a.txt', tmp_path / 'a.jsonl'
  plain.write_text('One.\n\nTwo.\n')
  assert mid_training.read_text(plain) == ['One.\n\nTwo.\n']
  lines.write_text('{"text": "One."}\n\n{"text": "Two.", "url": "x"}\n')
  assert mid_training.read_text(lines) == ['One.', 'Two.']
  for path, content, message in (
      (plain, b' \n', 'a.txt: config.mid_train.text is empty'),
      (plain, b'\xff\xfe', 'a.txt: config.mid_train.text cannot be read'),
      (lines, b'{"text": " "}\n', 'a.jsonl: config.mid_train.text is empty'),
      (lines, b'{"text": "x"}\n{"txt": "x"}\n', 'a.jsonl:2: expected a JSON'),
      (lines, b'["x"]\n', 'a.jsonl:1: expected a JSON object'),
      (lines, b'{"text": ', 'a.jsonl:1: malformed JSON')):
    path.write_bytes(content)
    with pytest.raises(interactions.DataError, match=message):
      mid_training.read_text(path)
  for path in (tmp_path, tmp_path / 'none.txt', tmp_path / 'none.jsonl'):
    with pytest.raises(interactions.DataError, match=path.name):
      mid_training.read_text(path)


def test_rows_are_written_and_mapped(built, tmp_path):
  mid_training.write(tmp_path / 'rows', (
      (task, split, rows) for (task, split), rows in built.items()))
  for split in mid_training.SPLITS:
    loaded = mid_training.load(tmp_path / 'rows', ('caption', 'text'), split)
    assert list(loaded) == ['caption', 'text']
    for task, rows in loaded.items():
      np.testing.assert_array_equal(rows, built[task, split])
  with pytest.raises(interactions.DataError, match='run --stage=prepare'):
    mid_training.load(tmp_path / 'none', ('caption',), 'train')


def test_weights_are_shares():
  config = make_config(weights=dict(text=1, persona=3, caption=0))
  assert config.tasks == {'persona': .75, 'text': .25}
  assert list(config.tasks) == ['persona', 'text']
  for changes, message in (
      (dict(weights=dict(persona=1, captions=1)), 'weights.captions is no'),
      (dict(weights=dict(persona=0)), 'weights are all 0'),
      (dict(text=''), 'text is empty: weights.text needs a file')):
    with pytest.raises(ValueError, match=message):
      make_config(**changes)
