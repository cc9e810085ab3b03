"""Prepared requests, as people would send them."""

from dgr2_jax.serving import prompting

Request = prompting.Request


def requests_of(reranker, split='test'):
  """The requests of a split."""
  data = reranker._experiment.data
  users = data.dataset.users
  name = [item.item_id for item in data.items]
  return [Request([name[i] for i in r.history], [name[i] for i in r.candidates],
                  user_id=users[r.user]) for r in data.requests(split)]


def prompts_of(reranker, requests):
  checked = [reranker._prompter.checked(r) for r in requests]
  return [reranker._prompter.template(r).prompt(r).ids
          for r in reranker._prompter.with_facts(checked)]


def described(reranker, item_id, name):
  """A catalogue's item as one that it lacks."""
  item = next(item for item in reranker._experiment.data.items
              if item.item_id == item_id)
  return {'item_id': name, 'title': item.title, 'brand': item.brand,
          'categories': list(item.categories)}
