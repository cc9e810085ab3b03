# %% [markdown]
# # Look inside: which tokens commit when, and what goes wrong
#
# An autoregressive (AR) teacher and the student that writes blocks, trained by
# the recipe: in which order does the student write, where do the two disagree,
# and what do wrong answers look like? If `recipe.ipynb` ran before, its model
# is taken; otherwise the next cell trains one for some minutes, without the
# on-policy stages.

# %%
import collections
import itertools
import pathlib
import re
import runpy

import matplotlib.pyplot as plt
import numpy as np

import dgr2_jax
from dgr2_jax.data import parsing, tokens, traces
from dgr2_jax.decoding import commit
from dgr2_jax.evaluation import examples, metrics, reasoning, responses, rows
from dgr2_jax.models import canvas as canvas_lib
from dgr2_jax.objectives import rewards
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import stages, workdir

ROOT = pathlib.Path(dgr2_jax.__file__).parents[1]
WORKDIR = pathlib.Path('/tmp/dgr2_recipe')
if (WORKDIR / 'config.json').exists():
  config = workdir.read_config(WORKDIR)
else:
  WORKDIR = pathlib.Path('/tmp/dgr2_look_inside')
  quickstart = runpy.run_path(ROOT / 'configs' / 'quickstart.py')
  config = quickstart['get_config']('short')
  config.recipe = ('ar_sft', 'convert', 'cft')
with workdir.open_workdir(WORKDIR, config) as directory:
  for stage in ('prepare', *config.recipe):
    stages.run(config, directory, stage)  # nothing, if it is complete
experiment = experiment_lib.Experiment(config, WORKDIR)
data = experiment.data
TEACHER, STUDENT = experiment.before('convert'), config.recipe[-1]
print(f'teacher: {TEACHER}, student: {STUDENT}, blocks of '
      f'{experiment.canvas.block_size} tokens')

# %% [markdown]
# The test requests are decoded three times: by the teacher, one token a
# forward, and by the student with two thresholds. A forward commits every token
# of the current block that is at least tau probable, or the most probable one.

# %%
requests = data.requests('test')
targets = data.target_positions('test')
checker = reasoning.Checker(requests, data.template, data.items,
                            data.semantic_ids, experiment.parser)
batches = experiment.eval_batches('test', config.evaluate.batch_size)


def decode(name, stage, tau, canvas):
  """Rollout and outcome of one way to answer the test requests."""
  rollout = responses.decode_split(
      experiment.model, experiment.restore(stage), batches,
      rule=commit.Threshold(tau), vocabulary=experiment.vocabulary,
      canvas=canvas, config=experiment.decode_config(), mesh=experiment.mesh)
  return rollout, responses.outcome(
      name, rollout, experiment.parser, targets, config.data.num_candidates,
      rewards.RewardConfig(), checker)


ways = {
    'teacher, AR': decode('ar', TEACHER, 1., canvas_lib.AUTOREGRESSIVE),
    'student, tau .9': decode(STUDENT, STUDENT, .9, experiment.canvas),
    'student, tau .4': decode(STUDENT, STUDENT, .4, experiment.canvas)}
print(f'{"":16} requests  Recall@1  NDCG@3  valid  tokens a forward')
for name, (_, outcome) in ways.items():
  row = rows.figures(outcome, targets)
  print('{:16} {n:8} {recall@1:9.3f} {ndcg@3:7.3f} {valid_rate:6.3f} '
        '{tokens_per_forward:17.2f}'.format(name, **row))

# %% [markdown]
# ## One response, forward by forward
#
# Reasoning first: latest category (as letters), leading brand and wanted
# category, then facts and a grade (`g`) for each of the ten candidates, and the
# choice; behind `answer` the new order. A cell's colour and number is the
# forward that committed it; forwards in between commit nothing, they keep a
# finished block.

# %%
def names_of(rollout, index):
  """The tokens of a response, as text."""
  return [data.tokenizer.decode([int(token)])
          for token in rollout.tokens[index, :rollout.length[index]]]


def short(name):
  """A token's text on little room."""
  text = name.removeprefix('<|').removesuffix('|>')
  text = text.rpartition('> ')[2].rpartition(': ')[2]
  return re.sub(r'([a-z])[a-z]+_(\d)', r'\1\2', text)[:10]


rollout, outcome = ways['student, tau .9']
valid = np.array([f == parsing.VALID for f in outcome.failures])
index, size = int(valid.argmax()), experiment.canvas.block_size
names, call = names_of(rollout, index), rollout.call[index]
grid = np.full((-(-len(names) // size), size), np.nan)
grid.ravel()[:len(names)] = call[:len(names)]
plt.figure(figsize=(10, 2.4))
plt.imshow(grid, aspect='auto', alpha=.5)
for place, name in enumerate(names):
  plt.text(place % size, place // size, f'{short(name)}\n{call[place]}',
           ha='center', va='center', fontsize=8)
plt.xlabel('token of the block')
plt.ylabel('block')
plt.yticks(range(len(grid)), range(1, 1 + len(grid)))
plt.title(f'{len(names)} tokens in {rollout.calls[index]} forwards')
plt.show()

# %% [markdown]
# ## Many responses
#
# The step within its block that committed each token. A block's first token is
# known before its first step: the forward that keeps the block before predicts
# it. Lines divide blocks. Facts can be copied from the prompt side by side;
# entries of an order depend on each other.

# %%
def steps_of(rollout):
  """[requests][tokens], from 1."""
  return [1 + np.array(examples.commit_steps(call[:length], size))
          for call, length in zip(rollout.call, rollout.length)]


fig, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True,
                           layout='constrained')
for panel, tau in zip(panels, ('.9', '.4')):
  steps = steps_of(ways[f'student, tau {tau}'][0])[:60]
  picture = np.full((len(steps), max(map(len, steps))), np.nan)
  for line, row in zip(picture, steps):
    line[:len(row)] = row
  image = panel.imshow(picture, aspect='auto', interpolation='nearest', vmin=1,
                       vmax=8)
  for start in range(size, picture.shape[1], size):
    panel.axvline(start - .5, color='w')
  panel.set(title=f'tau {tau}', xlabel='token of the response')
panels[0].set_ylabel('response')
fig.colorbar(image, label='step within its block (8: or later)')
plt.show()

# %%
END = data.tokenizer.decode([data.tokenizer.eos_id])


def kind_of(name, in_answer):
  if name.startswith('<|grade_'):
    return 'grades'
  if re.fullmatch(r'<\|c\d+\|>', name):
    return 'answer' if in_answer else 'choice'
  if re.fullmatch(r'<\|(\w+_\d ?)+\|>', name):
    return 'facts'
  return 'end' if name in (tokens.ANSWER, END) else 'pattern'


KINDS = ('pattern', 'facts', 'grades', 'choice', 'answer')
plt.figure(figsize=(7, 3))
for shift, tau in ((-.2, '.9'), (.2, '.4')):
  rollout, outcome = ways[f'student, tau {tau}']
  found = collections.defaultdict(list)
  for i, steps in enumerate(steps_of(rollout)):
    answer = False
    for name, step in zip(names_of(rollout, i), steps):
      answer |= name == tokens.ANSWER
      found[kind_of(name, answer)].append(step)
  plt.bar(np.arange(len(KINDS)) + shift,
          [np.mean(found[kind] or [np.nan]) for kind in KINDS], .4,
          label=f'tau {tau}')
plt.xticks(range(len(KINDS)), KINDS)
plt.ylabel('mean step within the block')
plt.legend()
plt.show()

# %% [markdown]
# ## Teacher against student
#
# On which requests is the item that the user bought next ranked first?

# %%
first = {name: metrics.rank_of_target(outcome.orders, targets) == 1
         for name, (_, outcome) in ways.items()}
teacher, student = first['teacher, AR'], first['student, tau .9']
print('                student right  student wrong')
for name, which in (('teacher right', teacher), ('teacher wrong', ~teacher)):
  print(f'{name} {(which & student).mean():15.1%} '
        f'{(which & ~student).mean():14.1%}')

# %% [markdown]
# Where do their responses differ? Below, the share of requests whose token at a
# place is not the teacher's, and how sure each was of its own tokens: the
# probability when it was committed.

# %%
fig, panels = plt.subplots(1, 2, figsize=(8, 2.6), layout='constrained')
reference = ways['teacher, AR'][0]
for colour, (name, (rollout, _)) in zip('krb', ways.items()):
  place = np.arange(rollout.tokens.shape[1])
  there = (place < np.minimum(rollout.length, reference.length)[:, None])
  count = np.maximum(there.sum(0), 1)
  differ = (rollout.tokens != reference.tokens) & there
  if rollout is not reference:
    panels[0].plot(place, differ.sum(0) / count, label=name,
                   color=colour)
  sure = np.where(there, np.exp(rollout.logprob), 0.).sum(0) / count
  panels[1].plot(place, sure, label=name, color=colour)
for panel, label in zip(panels, ("share unlike the teacher's token",
                                 'mean probability when committed')):
  for start in range(size, len(place), size):
    panel.axvline(start - .5, color='.8')
  panel.set(xlabel='token of the response', title=label)
panels[1].legend()
plt.show()

# %% [markdown]
# ## Failures: invalid responses
#
# An invalid response is not exactly one permutation of the candidates; the
# retriever's order is used in its place. Its first failure counts: no end
# (overflow), no readable answer (unparseable), an entry that is no candidate
# (out of set), a repeated candidate, a missing one.

# %%
print(f'{"":16}' + ''.join(f'{name:>13}' for name in parsing.FAILURES))
for name, (_, outcome) in ways.items():
  count = collections.Counter(outcome.failures)
  print(f'{name:16}' + ''.join(f'{count[f]:13}' for f in parsing.FAILURES))

# %% [markdown]
# The typical one is a candidate that the answer names twice. In parallel decoding
# both entries may be written by one forward, each likely on its own: below it is
# counted how often.

# %%
def answer_of(rollout, index):
  """(candidate, forward) of the answer's entries, and other tokens."""
  names = names_of(rollout, index)
  start = names.index(tokens.ANSWER) + 1 if tokens.ANSWER in names else 0
  return [(short(name), int(forward)) for name, forward in zip(
      names[start:-1], rollout.call[index, start:])]


for name, (rollout, outcome) in ways.items():
  gaps, shown = [], 0
  for i, failure in enumerate(outcome.failures):
    if failure != 'duplicate':
      continue
    answer = answer_of(rollout, i)
    written = collections.defaultdict(list)
    for candidate, forward in answer:
      written[candidate].append(forward)
    twice = {c: f for c, f in written.items() if len(f) > 1}
    gaps += [max(f) - min(f) for f in twice.values()]
    if shown < 2:
      shown += 1
      print(f'{name}, request {i}: {" ".join(c for c, _ in answer)}')
      for candidate, forwards in twice.items():
        print(f'    {candidate} was written by forwards '
              f'{", ".join(map(str, forwards))}')
  if gaps:
    print(f'{name}: {len(gaps)} repeated candidates, '
          f'{np.mean(np.array(gaps) == 0):.0%} of them by one forward\n')

# %% [markdown]
# ## Failures: a wrong first item
#
# Valid answers of the student at tau .9 that put another item first than the
# one that was bought. Why, as far as the response tells:
#
# - *against its reasoning*: the answer does not begin with the candidate that
#   the reasoning chose, or does not follow its grades;
# - *misjudged*: a grade of the first item or of the target is not the one that
#   the boosted ranker, the model's example, gives;
# - *as taught*: the example prefers the same item, or grades both alike. What
#   people buy is partly chance: no ranker is always right.

# %%
rollout, outcome = ways['student, tau .9']
taught = data.boosted_grades('test')
check = dict(zip(reasoning.CHECKS, outcome.reasoning.T))


def grades_of(index):
  """The grades in a response's reasoning; None if it lacks its form."""
  names = itertools.takewhile(
      lambda name: name != tokens.ANSWER, names_of(rollout, index))
  dense = traces.read_dense(list(names), data.template.config.trace,
                            config.data.num_candidates)
  return dense and dense.grades


def cause_of(index):
  if check['choice'][index] == 0 or check['grades'][index] == 0:
    return 'against its reasoning'
  given = grades_of(index)
  if given is None:
    return 'reasoning without its form'
  pair = [outcome.orders[index, 0], targets[index]]
  if (np.array(given)[pair] != taught[index, pair]).any():
    return 'misjudged'
  return 'as taught'


wrong = collections.defaultdict(list)
for i, failure in enumerate(outcome.failures):
  if failure == parsing.VALID and not student[i]:
    wrong[cause_of(i)].append(i)
plt.figure(figsize=(6, 1.8))
plt.barh(list(wrong), list(map(len, wrong.values())), color='#7cb5f2')
plt.xlabel(f'test requests, of {len(targets)}')
plt.show()

# %% [markdown]
# One of each kind. `taught` is the example's grade, `given` the response's; ★
# marks what was bought.

# %%
for cause, found in wrong.items():
  i = found[0]
  print(f'{cause.upper()}, request {i}. History, oldest first:')
  for item in data.describe(requests[i].history):
    print('   ', ' | '.join(examples.describe(item)))
  print('  new  taught  given  candidates in the retriever\'s order')
  given = grades_of(i) or [''] * config.data.num_candidates
  place = np.argsort(outcome.orders[i]) + 1
  for c, item in enumerate(data.describe(requests[i].candidates)):
    mark = examples.TARGET_MARK if c == targets[i] else ' '
    print(f'{place[c]:5} {taught[i, c]:7} {given[c]:6} {mark}',
          ' | '.join(examples.describe(item)))
  print()

# %% [markdown]
# Next: `docs/evaluation.md` has the checks of reasoning that the report runs on
# every response, and `dgr2_jax/decoding/block_decoder.py` opens with a picture
# of the decoder that was watched here.
