# %% [markdown]
# # Your data: from files to a re-ranker, and what it thinks
#
# A made-up bookshop of 300 books stands for your catalogue. It is written to
# two files, checked, and a small re-ranker is trained on it in some minutes on
# two CPU cores; then requests are answered and the reasoning behind the answers
# is looked at. docs/your_data.md is the same way on the command line.

# %%
import collections
import csv
import dataclasses
import json
import pathlib
import runpy
import textwrap

import matplotlib.pyplot as plt
import numpy as np

import dgr2_jax
from dgr2_jax.data import tokens, traces
from dgr2_jax.decoding import commit
from dgr2_jax.evaluation import reasoning, responses, rows
from dgr2_jax.objectives import rewards
from dgr2_jax.tools import check_data
from dgr2_jax.training import experiment as experiment_lib
from dgr2_jax.training import stages, workdir

ROOT = pathlib.Path(dgr2_jax.__file__).parents[1]
DATA = pathlib.Path('/tmp/dgr2_bookshop')  # yours
WORKDIR = pathlib.Path('/tmp/dgr2_bookshop_run')

# %% [markdown]
# ## Two files
#
# `items.jsonl` has an item a line: `item_id`, `title`, `categories` from broad
# to narrow and, if known, `brand` and `price`. `interactions.csv` says who
# bought what, and when. Readers of this shop keep to two genres, like some
# authors, and mostly read series in order.

# %%
shop = runpy.run_path(ROOT / 'experiments' / 'bookshop' / 'make.py')
rng = np.random.default_rng(0)
books = shop['books'](rng)
purchases = shop['purchases'](rng, books)

DATA.mkdir(parents=True, exist_ok=True)
with open(DATA / 'items.jsonl', 'w', encoding='utf-8') as f:
  f.writelines(json.dumps(book) + '\n' for book in books)


def write_purchases(rows):
  with open(DATA / 'interactions.csv', 'w', encoding='utf-8', newline='') as f:
    csv.writer(f).writerows([('user_id', 'item_id', 'timestamp'), *rows])


write_purchases([*purchases, ('reader0001', 'book999', 'yesterday')])
for name in ('items.jsonl', 'interactions.csv'):
  print(f'{name}:', *(DATA / name).read_text('utf-8').splitlines()[:3],
        sep='\n  ')

# %% [markdown]
# ## Checked
#
# `python -m dgr2_jax.tools.check_data DIR` names every line at fault; one was
# put there on purpose.

# %%
check_data.main([str(DATA)])
write_purchases(purchases)
assert check_data.check(DATA, None, 5, 10)[1] == 0  # lines at fault

# %% [markdown]
# ## Trained
#
# `configs/forkme.py` is the config to copy. Here the on-policy stages are left
# out, and two layers take few but large steps: `ar_sft` trains an
# autoregressive (AR) model, `convert` adds a mask token, `cft` makes it write
# blocks.

# %%
config = runpy.run_path(ROOT / 'configs' / 'forkme.py')['get_config']()
config.data.update(path=str(DATA), name='bookshop')
config.recipe = ('ar_sft', 'convert', 'cft')
config.model.num_layers = 2
config.ar_sft.update(steps=400, eval_every=400, batch_size=16,
                     learning_rate=5e-3)
config.cft.update(steps=500, eval_every=500, batch_size=16,
                  learning_rate=5e-3)
with workdir.open_workdir(WORKDIR, config) as directory:
  for stage in ('prepare', *config.recipe):
    stages.run(config, directory, stage)
experiment = experiment_lib.Experiment(config, WORKDIR)
data = experiment.data
print('requests whose target is among the retriever\'s ten:',
      data.summary['requests'], '\nof all users: '
      f'{data.summary["hit_rate"]:.1%}; a re-ranker can only help there')

# %% [markdown]
# ## Used
#
# A request is item ids: what was bought, oldest first, and ten candidates, as
# your retriever gives them; here, test requests. With `user_id`, what that user
# bought later stays out of all counts, as a fair test needs. Mode `ar` writes a
# token a forward, `verify` writes the same in fewer, `threshold` commits every
# token that is probable enough.

# %%
reranker = dgr2_jax.Reranker.load(WORKDIR)
title_of = {book['item_id']: book['title'] for book in books}


def ids(indices):
  return [data.items[i].item_id for i in indices]


asked = [dgr2_jax.Request(history=ids(r.history), candidates=ids(r.candidates),
                          user_id=data.dataset.users[r.user])
         for r in data.requests('test')[:20]]
answers = {mode: reranker.rerank(asked, mode=mode)
           for mode in ('ar', 'verify', 'threshold')}
plt.figure(figsize=(7, 2.5))
for mode, given in answers.items():
  plt.plot([answer.forwards for answer in given], '.-', label=mode)
  same = sum(a.ranking == b.ranking for a, b in zip(given, answers['ar']))
  print(f'{mode:9}: {sum(a.valid for a in given)} of {len(given)} valid, '
        f'{same} as ar, {np.mean([a.forwards for a in given]):.1f} forwards')
plt.xticks(range(0, len(asked), 5))
plt.xlabel('request')
plt.ylabel('forwards, prefill included')
plt.legend()
plt.show()

# %% [markdown]
# ## The reasoning of one answer
#
# The model was taught to reason in a template: what the history shows, facts
# and a grade for each candidate, a choice. Tokens come with the forward that
# wrote them. In words:

# %%
place = int(np.argmax([answer.valid for answer in answers['threshold']]))
request, answer = asked[place], answers['threshold'][place]
print('bought:   ', ', '.join(title_of[i] for i in request.history[-3:]))
print('would buy:', ', '.join(title_of[i] for i in answer.ranking[:3]), '\n')
print(textwrap.fill(answer.explanation, 80), '\n')
written = collections.defaultdict(list)
for token in answer.trace:
  written[token.forward].append(token.text)
for forward, texts in sorted(written.items()):
  print(textwrap.fill(f'forward {forward}: {" ".join(texts)}', 80,
                      subsequent_indent='    '))

# %% [markdown]
# The same reasoning as a table. `traces.read_dense` reads the template's tokens
# back.

# %%
form = traces.TraceConfig.from_config(config.prompt.trace)


def grades_of(answer, count=config.data.num_candidates):
  """The grades that an answer's reasoning gives; None without its form."""
  names = [token.text for token in answer.trace]
  end = names.index(tokens.ANSWER) if tokens.ANSWER in names else 0
  dense = traces.read_dense(names[:end], form, count)
  return dense and dense.grades


grades = grades_of(answer) or [''] * len(request.candidates)
print('place  grade  candidate, in the retriever\'s order')
for item, grade in zip(request.candidates, grades):
  print(f'{answer.ranking.index(item) + 1:5} {grade:6}  {title_of[item]}')

# %% [markdown]
# ## What if?
#
# Reasoning is worth reading if it moves with the request. The same request
# without the last purchase: which grades does that change?

# %%
fewer = dataclasses.replace(request, history=request.history[:-1])
answer, told = reranker.rerank([request, fewer], mode='verify')
print('not bought:', title_of[request.history[-1]])
for when, given in (('before', answer), ('then', told)):
  print(f'{when} would buy:', ', '.join(title_of[i] for i in given.ranking[:3]))
plt.figure(figsize=(7, 2.5))
for shift, name, given in ((-.2, 'before', answer), (.2, 'then', told)):
  if grades_of(given):
    plt.bar(np.arange(10) + shift, grades_of(given), .4, label=name)
plt.xticks(range(10), range(1, 11))
plt.xlabel('candidate')
plt.ylabel('grade, 0 to 4')
plt.ylim(0, 4.2)
plt.legend()
plt.show()

# %% [markdown]
# ## Is the reasoning true?
#
# Every claim of a response is held against its request, over all test requests:
# are the facts the candidates' facts, does the answer follow the grades?
# `dgr2_jax/evaluation/reasoning.py` lists the checks. Bars are the shares of
# responses that pass, with 95 % intervals.

# %%
targets = data.target_positions('test')
rollout = responses.decode_split(
    experiment.model, experiment.restore('cft'),
    experiment.eval_batches('test', config.evaluate.batch_size),
    rule=commit.Threshold(.9), vocabulary=experiment.vocabulary,
    canvas=experiment.canvas, config=experiment.decode_config(),
    mesh=experiment.mesh)
outcome = responses.outcome(
    'cft', rollout, experiment.parser, targets, config.data.num_candidates,
    rewards.RewardConfig(), reasoning.Checker(
        data.requests('test'), data.template, data.items, data.semantic_ids,
        experiment.parser))
figures = rows.figures(outcome, targets)
print(f'{figures["n"]} test requests: Recall@1 {figures["recall@1"]:.3f}, the '
      f'retriever\'s order {(targets == 0).mean():.3f}; valid '
      f'{figures["valid_rate"]:.3f}')
checks = rows.reasoning(outcome.reasoning)
rate = np.array([c['rate'] for c in checks.values()])
low, high = np.array([c['interval'] for c in checks.values()]).T
plt.figure(figsize=(6, 2.5))
plt.barh(list(checks), rate, color='#7cb5f2',
         xerr=[np.maximum(rate - low, 0), np.maximum(high - rate, 0)])
plt.xlabel('share of the responses to which the check applies')
plt.gca().invert_yaxis()
plt.show()

# %% [markdown]
# ## A book that the catalogue lacks
#
# Describe it as in `items.jsonl` in place of its id. It is read as a book that
# nobody has bought yet: its category and author speak for it.

# %%
known = next(b for b in books if b['item_id'] == request.history[-1])
new = known | {'item_id': 'book900', 'title': 'The Latest One'}
told, = reranker.rerank([dataclasses.replace(
    request, candidates=[*request.candidates[:-1], new])], mode='verify')
print(f'place of the new book: {told.ranking.index("book900") + 1} of '
      f'{len(told.ranking)}; valid: {told.valid}; new: {told.new_items}')

# %% [markdown]
# Next: put your directory in place of `DATA`, copy `configs/forkme.py`, train
# longer, and bring your retriever's lists (docs/your_data.md). The whole report
# comes from `--stage=evaluate`.
